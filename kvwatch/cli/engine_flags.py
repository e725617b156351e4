"""Flags that say what kvwatch cannot read from an engine's page, and the facts made from them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from kvwatch.capacity import EngineFacts
from kvwatch.window import Window

_GIVEN = ("vllm_version", "max_model_len", "max_num_seqs", "watermark")


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The vLLM flags of the running engine, spelt as vLLM spells them."""
    options = (
        click.option("--vllm-version", metavar="X.Y.Z", help="vLLM's version, where the server does not tell."),
        click.option("--max-model-len", type=click.IntRange(min=1), help="The engine's --max-model-len."),
        click.option("--max-num-seqs", type=click.IntRange(min=1), help="The engine's --max-num-seqs."),
        click.option("--watermark", type=click.FloatRange(0, 1, max_open=True), help="The engine's --watermark."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def engine_facts(
    made: Iterable[Window], observed: Mapping[str, EngineFacts], flags: Mapping[str, Any]
) -> dict[str, EngineFacts]:
    """Facts per target: what a flag gives wins over what the server tells."""
    targets = {window.key.target for window in made} | set(observed)
    return {target: _merge(observed.get(target, EngineFacts()), flags) for target in targets}


def _merge(seen: EngineFacts, flags: Mapping[str, Any]) -> EngineFacts:
    given = {name: flags[name] for name in _GIVEN if flags.get(name) is not None}
    sources = [(name, origin) for name, origin in seen.sources if name not in given]
    return EngineFacts(
        vllm_version=given.get("vllm_version", seen.vllm_version),
        max_model_len=given.get("max_model_len", seen.max_model_len),
        max_num_seqs=given.get("max_num_seqs", seen.max_num_seqs),
        watermark=given.get("watermark", seen.watermark),
        sources=(*sources, *((name, "given") for name in given)),
    )
