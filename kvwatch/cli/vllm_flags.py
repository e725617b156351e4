"""The options that describe an engine: --model, --gpu, every vLLM flag of `kvwatch.vllm_args`, whole command lines.

Shared by every command that can use a budget. A flag on the command line wins over the same flag inside --vllm-args,
which wins over the environment and the configuration file.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvwatch.cli.not_empty import PathName
from kvwatch.errors import SettingError, SourceError
from kvwatch.files import bounded_text
from kvwatch.versions import parse_version
from kvwatch.vllm_args import FLAGS, CommandLine, Flag, parse_command_line, value_of

if TYPE_CHECKING:  # commands that are given no vLLM flag do not load the budget side
    from kvwatch.engine import Device, EngineConfig

_GIB = 1 << 30
_OWN_FIELDS = {"num_speculative_tokens", "speculative_method", "max_concurrent_batches"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the options say: the model's argument (None if none was given), the engine, and flags without effect."""

    model: str | None
    engine: "EngineConfig"
    ignored: tuple[str, ...]

    @property
    def names_memory(self) -> bool:
        """Whether the KV cache's size can be told."""
        engine = self.engine
        return any(
            value is not None for value in (engine.kv_cache_memory_bytes, engine.num_gpu_blocks_override, engine.device)
        )


class EngineOption(click.Option):
    """Says what the engine is: model, GPU, version, a command line."""


class VllmFlag(click.Option):
    """A flag of vLLM itself."""


class EngineCommand(click.Command):
    """A command whose --help has its own options first, then those of the engine, then vLLM's flags."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "The engine": [], "vLLM flags of the engine": []}
        own, engine, flags = sections.values()
        for param in self.get_params(ctx):
            entry = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if entry is not None:
                kind = flags if isinstance(param, VllmFlag) else engine if isinstance(param, EngineOption) else own
                kind.append(entry)
        for title, entries in sections.items():
            with formatter.section(title):
                formatter.write_dl(entries)


class _FlagType(click.ParamType):  # type: ignore[type-arg]  # generic in click's newest releases only
    """A vLLM flag's value, read as vLLM reads it."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self.name = flag.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            return value  # read before
        try:
            return value_of(self.flag, str(value))  # a settings file gives numbers as such
        except SettingError as error:
            self.fail(str(error), param, ctx)


_METAVAR = {
    "count": "N",
    "length": "TOKENS",
    "bytes": "BYTES",
    "share": "SHARE",
    "gigabytes": "GIB",
    "text": "NAME",
    "list": "LIST",
}


def vllm_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options. The command receives them as keyword arguments and hands them to `engine_request`."""
    for flag in reversed(FLAGS):
        command = _option(flag)(command)
    own = (
        _about_engine(
            "--num-speculative-tokens", type=click.IntRange(min=0), metavar="N", help="Draft tokens per step."
        ),
        _about_engine("--speculative-method", metavar="NAME", help="mtp, eagle3, ngram, ..."),
        _about_engine(
            "--max-concurrent-batches",
            type=click.IntRange(min=1),
            metavar="N",
            help="Batches in flight, where it differs from vLLM's default.",
        ),
    )
    for option in reversed(own):
        command = option(command)
    return engine_options(command)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The model, the GPU, the version and whole command lines, for a command whose own flags are vLLM's."""
    options = (
        _about_engine("--model", metavar="PATH|NAME", help="config.json, its folder, or a known model's name."),
        _about_engine("--gpu", metavar="NAME", help="The GPU: H100, L4, A100-40GB, 'NVIDIA H100 80GB HBM3', ..."),
        _about_engine(
            "--gpu-memory-gib", type=float, metavar="GIB", help="Memory of one GPU as its driver reports it."
        ),
        _about_engine("--vllm-version", metavar="X.Y.Z", help="vLLM's version; decides rules and defaults."),
        _about_engine("--vllm-args", metavar="'...'", help="A whole vllm serve command line, as in a pod spec."),
        _about_engine(
            "--vllm-args-file",
            type=PathName(dir_okay=False, allow_dash=True),
            metavar="FILE",
            help="A file with such a command line; - is standard input.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _about_engine(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(*names, cls=EngineOption, **settings)


def _option(flag: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if flag.kind == "switch":
        return click.option(f"{flag.option}/--no-{flag.name}", flag.field, cls=VllmFlag, default=None, help=flag.help)
    return click.option(
        flag.option,
        *(alias for alias in flag.aliases if len(alias) > 2),
        flag.field,
        cls=VllmFlag,
        type=_FlagType(flag),
        metavar=_METAVAR[flag.kind],
        help=flag.help,
    )


def engine_request(ctx: click.Context, options: Mapping[str, Any]) -> EngineRequest:
    """The options, the command line inside them and the GPU's name -> EngineRequest. Raises SettingError."""
    from kvwatch.engine import EngineConfig

    line = _command_line(options)
    fields: dict[str, Any] = dict(line.fields)
    names = {flag.field for flag in FLAGS} | _OWN_FIELDS
    for name in names:
        value = options.get(name)
        if value is not None and (name not in fields or _typed(ctx, name)):
            fields[name] = value
    version = options.get("vllm_version")
    if version is not None:
        fields["vllm_version"], fields["vllm_version_given"] = parse_version(version), True
    fields["device"] = device_from(options.get("gpu"), options.get("gpu_memory_gib"))
    model = options.get("model")
    if line.model is not None and (model is None or not _typed(ctx, "model")):
        model = line.model
    return EngineRequest(model=model, engine=EngineConfig(**fields), ignored=line.ignored)


def _typed(ctx: click.Context, name: str) -> bool:
    """Whether the option stood on the command line, rather than in the environment or the configuration file."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _command_line(options: Mapping[str, Any]) -> CommandLine:
    text, file = options.get("vllm_args"), options.get("vllm_args_file")
    if text is not None and file is not None:
        raise SettingError("--vllm-args and --vllm-args-file both give a command line; give one")
    if file is not None:
        text = _read(file)
    return parse_command_line(text) if text is not None else CommandLine(model=None, fields={}, ignored=())


MAX_ARGS_BYTES = 1024 * 1024


def _read(file: str) -> str:
    try:
        if file != "-":
            return bounded_text(Path(file), limit_bytes=MAX_ARGS_BYTES)
        text = sys.stdin.read(MAX_ARGS_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"--vllm-args-file {file} cannot be read: {error}") from error
    if len(text) > MAX_ARGS_BYTES:
        raise SourceError(f"standard input: more than {MAX_ARGS_BYTES:,} bytes are no command line of vLLM")
    return text


def device_from(gpu: str | None, memory_gib: float | None) -> "Device | None":
    """A named GPU, a memory size, or both: the name settles vLLM's defaults, the size replaces the table's."""
    from kvwatch.engine import Device

    if memory_gib is not None and not 0 < memory_gib < 1 << 20:
        raise SettingError(f"--gpu-memory-gib is {memory_gib}; give the GPU's memory in GiB, such as 79.19")
    if gpu is None:
        return None if memory_gib is None else Device(name="", memory_bytes=int(memory_gib * _GIB))
    if gpu.strip().lower() == "cpu":
        return Device(name="cpu", memory_bytes=int((memory_gib or 0) * _GIB))
    from kvwatch.gpu import find_gpu

    found = find_gpu(gpu)
    memory = found.memory_bytes if memory_gib is None else int(memory_gib * _GIB)
    return Device(name=found.name, memory_bytes=memory, capability=found.capability)
