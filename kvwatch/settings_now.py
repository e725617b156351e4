"""The scheduler settings an engine runs with, as far as its page and the flags given tell; the rest is assumed.

vLLM's page shows the pool and the block size. max_num_seqs, max_num_batched_tokens and the watermark are on no page
(vllm/v1/metrics/loggers.py, 0.32.0), so each of them is given, inferred from what is seen, or vLLM's default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvwatch.checks.check import EngineView
from kvwatch.errors import NoData, SettingError
from kvwatch.flag_releases import EVICT_UNHASHED_FIRST_SINCE, V1_SINCE, has_flag
from kvwatch.simulation import KvGroup, SchedulerSettings
from kvwatch.versions import Version, engine_version, version_text
from kvwatch.vllm_metrics import (
    ITERATION_TOKENS,
    KV_CACHE_USAGE,
    MAX_NUM_SEQS,
    REQUEST_PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
)
from kvwatch.window import Window

if TYPE_CHECKING:  # a load without a model does not load the budget side
    from kvwatch.budget import Budget

Origin = Literal["given", "observed", "derived", "assumed"]

# Requests at the cap in so large a share of the pages with a queue are taken for the cap itself.
_PINNED_SHARE = 0.8
# The tiers of vLLM's default, engine/arg_utils.py, get_batch_defaults.
_BATCHED_TOKENS_TIERS = (2048, 8192, 16384)
_DEFAULT_SEQS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One input of the simulation and where its value is from."""

    name: str
    value: float | int | str | bool
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsNow:
    """The settings, and for each that matters its origin. `max_num_seqs_binds` is False for a default never reached."""

    settings: SchedulerSettings
    max_num_seqs_known: bool
    assumptions: tuple[Assumption, ...]


def settings_now(view: EngineView) -> SettingsNow:
    """Page, capacity and facts -> SchedulerSettings. Raises NoData naming the missing input."""
    capacity = view.capacity
    version = engine_version(view.facts.vllm_version, view.window.latest.vllm_version_at_least)
    told = engine_version(view.facts.vllm_version, None)
    if told is not None and told < V1_SINCE:
        raise NoData(
            f"vLLM {version_text(told)} decides otherwise than the V1 scheduler that is simulated, "
            f"vLLM's default since {version_text(V1_SINCE)}"
        )
    if not capacity.num_gpu_blocks or not capacity.block_size_tokens:
        raise NoData("num_gpu_blocks and block_size are not exposed by this engine: the pool cannot be simulated")
    groups = _groups(view.facts.budget)
    block_size = _block_size(view, groups)
    seqs, seqs_origin = _max_num_seqs(view)
    told_batch = view.facts.max_num_batched_tokens
    if told_batch is not None and told_batch < seqs and seqs_origin == "assumed":
        seqs = told_batch  # with more vLLM would not have started
    batched, batched_origin = _max_num_batched_tokens(view, seqs)
    watermark = view.facts.watermark or 0.0
    caching, caching_origin = _prefix_caching(view, version)
    reserve = version is None or has_flag("scheduler_reserve_full_isl", version)
    longest, length_origin = _max_model_len(view)
    settings = SchedulerSettings(
        num_gpu_blocks=capacity.num_gpu_blocks,
        block_size=block_size,
        max_model_len=longest,
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        watermark=watermark,
        scheduler_reserve_full_isl=reserve,
        enable_prefix_caching=caching,
        evict_unhashed_first=version is None or version >= EVICT_UNHASHED_FIRST_SINCE,
        groups=groups,
    )
    given_watermark: Origin = "given" if view.facts.watermark is not None else "assumed"
    return SettingsNow(
        settings=settings,
        max_num_seqs_known=seqs_origin != "assumed",
        assumptions=(
            Assumption(name="num_gpu_blocks", value=capacity.num_gpu_blocks, origin="observed"),
            Assumption(name="tokens_per_block", value=block_size, origin="derived"),
            Assumption(name="max_num_seqs", value=seqs, origin=seqs_origin),
            Assumption(name="max_num_batched_tokens", value=batched, origin=batched_origin),
            Assumption(name="watermark", value=watermark, origin=given_watermark),
            Assumption(name="enable_prefix_caching", value=caching, origin=caching_origin),
            Assumption(name="scheduler_reserve_full_isl", value=reserve, origin="derived" if version else "assumed"),
            Assumption(name="max_model_len", value=longest, origin=length_origin),
        ),
    )


def with_budget(settings: SchedulerSettings, now: Budget, other: Budget) -> SchedulerSettings | None:
    """The settings on the pool that the engine would have with another budget: the live one times their ratio.

    None where such a pool cannot be simulated.
    """
    if len(now.groups) != len(other.groups) or now.num_gpu_blocks <= 0:
        return None
    groups = _groups(other)
    blocks = settings.num_gpu_blocks * other.num_gpu_blocks // now.num_gpu_blocks
    sizes = {group.block_size for group in groups if group.is_full}
    if blocks < 2 or len(sizes) > 1:
        return None
    if sizes:
        size = sizes.pop()
    elif groups:
        size = groups[0].block_size
    else:
        size = settings.block_size * other.block_size_tokens // now.block_size_tokens
    return replace(settings, num_gpu_blocks=blocks, block_size=size, groups=groups)


def _groups(budget: Budget | None) -> tuple[KvGroup, ...]:
    """The block tables of a hybrid model, from its budget; empty for a model with one."""
    if budget is None or len(budget.groups) < 2:
        return ()
    groups = []
    for planned, shown in zip(budget.plan.groups, budget.groups, strict=True):
        window = max((page.cache.window_tokens or 0 for page in planned.pages), default=0)
        if shown.kind in {"full", "mla", "mla_indexer"}:
            groups.append(KvGroup(block_size=shown.block_size_tokens))
        elif window:
            held = math.ceil((window - 1) / shown.block_size_tokens) + 1
            held = min(held, shown.blocks_per_max_len_request)
            groups.append(KvGroup(block_size=shown.block_size_tokens, max_blocks=held))
        else:
            groups.append(KvGroup(block_size=shown.block_size_tokens, max_blocks=shown.blocks_per_max_len_request))
    return tuple(groups)


def _block_size(view: EngineView, groups: tuple[KvGroup, ...]) -> int:
    full = {group.block_size for group in groups if group.max_blocks is None}
    if len(full) > 1:
        raise NoData("the model's full-attention groups differ in block size, which the simulator does not model")
    if full:
        return full.pop()
    if groups:
        return groups[0].block_size
    if view.capacity.tokens_per_block is None:
        raise NoData("blocks per token are not one number for this model: give --model and its flags")
    return view.capacity.tokens_per_block


def _max_num_seqs(view: EngineView) -> tuple[int, Origin]:
    """Given, exposed (NIM), or inferred from a pinned count of running requests; else vLLM's default, not reached."""
    facts, window = view.facts, view.window
    if facts.max_num_seqs is not None:
        return facts.max_num_seqs, "given"
    exposed = window.latest.get(MAX_NUM_SEQS)
    if exposed:
        return int(exposed), "observed"
    most = _most_running(window)
    if _is_pinned(window, most):
        return most, "derived"
    budget = facts.budget
    return max(_DEFAULT_SEQS if budget is None else budget.max_num_seqs, most), "assumed"


def _most_running(window: Window) -> int:
    try:
        return int(window.maximum(REQUESTS_RUNNING))
    except NoData:
        return 0


def _is_pinned(window: Window, most: int) -> bool:
    """Whether the pages with a queue, and room in the pool, nearly all show this count of running requests."""
    queued = [
        running
        for snapshot in window.snapshots
        if (snapshot.get(REQUESTS_WAITING) or 0) > 0
        and (snapshot.get(KV_CACHE_USAGE) or 1.0) < 0.9
        and (running := snapshot.get(REQUESTS_RUNNING)) is not None
    ]
    return most > 0 and len(queued) >= 3 and sum(count == most for count in queued) >= _PINNED_SHARE * len(queued)


def _max_num_batched_tokens(view: EngineView, seqs: int) -> tuple[int, Origin]:
    """Given, or the smallest of vLLM's defaults that does not contradict the tokens per step seen.

    A prompt computed in chunks is counted whole in the step that ends it, so a step may show more than the budget by
    up to a prompt: only a bucket that is wholly above proves a larger budget.
    """
    given = view.facts.max_num_batched_tokens
    if given is not None:
        if given < seqs:
            raise SettingError(
                f"max_num_batched_tokens is {given:,}, less than the {seqs:,} sequences that run at a time: vLLM does "
                "not start so. Give the --max-num-batched-tokens and --max-num-seqs that the engine runs with."
            )
        return given, "given"
    budget = view.facts.budget
    if budget is not None:
        return max(budget.engine.max_num_batched_tokens, seqs), "derived"
    seen = _largest_step(view.window)
    fitting = [tier for tier in _BATCHED_TOKENS_TIERS if tier >= seen]
    return max(fitting[0] if fitting else _BATCHED_TOKENS_TIERS[-1], seqs), "assumed"


def _largest_step(window: Window) -> float:
    """A number of tokens that some step is known to have passed, beyond what one prompt explains."""
    try:
        steps = window.lifetime(ITERATION_TOKENS)
        longest_prompt = _highest_bucket(window)
    except NoData:
        return 0.0
    lower, below, seen = 0.0, 0.0, 0.0
    for bound, count in zip(steps.bounds, steps.counts, strict=True):
        if count > below:
            seen = lower
        lower, below = bound, max(below, count)
    return seen - longest_prompt


def _highest_bucket(window: Window) -> float:
    prompts = window.lifetime(REQUEST_PROMPT_TOKENS)
    highest, below = 0.0, 0.0
    for bound, count in zip(prompts.bounds, prompts.counts, strict=True):
        if count > below and math.isfinite(bound):
            highest = bound
        below = max(below, count)
    return highest


def _prefix_caching(view: EngineView, version: Version | None) -> tuple[bool, Origin]:
    shown = view.window.latest.cache_config.enable_prefix_caching
    if shown is not None:
        return shown, "observed"
    return version is None or version >= (0, 8), "assumed"


def _max_model_len(view: EngineView) -> tuple[int, Origin]:
    """Known, or as long as the pool allows: then no length is ruled out."""
    capacity = view.capacity
    if capacity.max_model_len:
        origin = dict(capacity.source).get("max_model_len", "derived")
        known: dict[str, Origin] = {"given": "given", "observed": "observed"}
        return capacity.max_model_len, known.get(origin, "derived")
    pool = (capacity.num_gpu_blocks or 2) * (capacity.tokens_per_block or capacity.block_size_tokens or 16)
    return pool, "assumed"
