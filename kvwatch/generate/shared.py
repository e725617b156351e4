"""Panels that more than one dashboard has. `legend` names the engines: see `queries.LEGEND` and `ENGINE_LEGEND`."""

from grafana_foundation_sdk.builders import statetimeline, table, timeseries

from kvwatch.checks.check import Check
from kvwatch.generate import queries
from kvwatch.generate.panels import (
    CODES,
    COUNT,
    GREEN,
    LONE,
    NARROW_COLUMN,
    ORANGE,
    PER_SECOND,
    RATIO,
    RED,
    SECONDS,
    TOKENS_PER_SECOND,
    VERDICTS,
    Query,
    column,
    graph,
    link,
    opens,
    rows,
    runbook_of,
    states,
    steps,
    values,
    wide,
)
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    GENERATION_TOKENS,
    INTER_TOKEN_LATENCY,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    TIME_TO_FIRST_TOKEN,
)

NO_AGENT = "no agent"
NO_PREDICTION = "no prediction"
NOT_KNOWN = "not known"
UP_OR_DOWN = values((0, "up", GREEN), (1, "down", RED))
"""How `queries.down` is shown."""
CHECK_COLUMN = 205  # pixels; the longest id of a check
VERDICTS_OF_ENGINES = values(*CODES, (queries.UNREADABLE, "unreadable", RED))
"""How `queries.verdict` is shown."""


def kv_cache_held(legend: str, limits: Thresholds, *checks: Check) -> timeseries.Panel:
    return graph(
        "KV cache held",
        [Query(expr=queries.value(KV_CACHE_USAGE), legend=legend)],
        unit=RATIO,
        top=1,
        about="Share of the KV blocks that requests hold. Cached prefixes that nobody uses count as free.",
        checks=checks,
        limits=steps((GREEN, None), (ORANGE, limits.kv_cache_saturated_ratio)),
    )


def preemptions(legend: str, *checks: Check) -> timeseries.Panel:
    return graph(
        "Preemptions",
        [Query(expr=queries.rate(PREEMPTIONS), legend=legend)],
        unit=PER_SECOND,
        about="Requests thrown out of the batch for want of KV blocks. Their tokens are computed again.",
        checks=checks,
    )


def prefix_cache_hits(legend: str, *checks: Check) -> timeseries.Panel:
    return graph(
        "Prefix-cache hits",
        [Query(expr=queries.prefix_hit_ratio(), legend=legend)],
        unit=RATIO,
        top=1,
        about="Share of the looked-up prompt tokens that were found. A prefix shorter than a block never hits. A fall "
        "at the start of an incident: the cache was lost, by a restart or by eviction.",
        checks=checks,
    )


def time_to_first_token(legend: str) -> timeseries.Panel:
    return graph(
        "Time to first token, p95",
        [Query(expr=queries.quantile(0.95, TIME_TO_FIRST_TOKEN), legend=legend)],
        unit=SECONDS,
        about="From arrival to the first token, queue time included.",
    )


def time_between_tokens(legend: str) -> timeseries.Panel:
    return graph(
        "Time between tokens, p95",
        [Query(expr=queries.quantile(0.95, INTER_TOKEN_LATENCY), legend=legend)],
        unit=SECONDS,
        about="What users see as stutter. A preempted request waits between two of its tokens.",
    )


def tokens(legend: str, *checks: Check) -> timeseries.Panel:
    return graph(
        "Tokens",
        [
            Query(expr=queries.rate(PROMPT_TOKENS), legend=f"prompt {legend}"),
            Query(expr=queries.rate(GENERATION_TOKENS), legend=f"generated {legend}"),
        ],
        unit=TOKENS_PER_SECOND,
        about="What the engine gets done: prompt tokens processed and tokens generated.",
        checks=checks,
    )


def checks_over_time(expr: str, legend: str, *, about: str, none: str, most: int) -> statetimeline.Panel:
    """A band per check that links to its runbook."""
    panel = states(
        "Checks of the agent",
        [Query(expr=expr, legend=legend)],
        about=about,
        mappings=(VERDICTS,),
        none=none,
        most=most,
    )
    return panel.data_links([link("Runbook", runbook_of("${__field.labels.check}"))])


def checks_not_ok(*, hidden: tuple[str, ...] = ()) -> table.Panel:
    """What the agent complains about now, the worst first, each with a link to its runbook."""
    found = rows(
        "Checks that are not ok",
        [Query(expr=queries.not_ok(), legend="status")],
        about="What the agent's checks say now. A click on a check opens its runbook. Where nothing is shown, the "
        "verdict tells whether all is well or nothing is known.",
        order=("check", LONE, "target", "engine", "pod", "model_name"),
        hidden=("cluster", "namespace", *hidden),
        sort=("status",),
        none="no check fires, or no agent: see the verdict",
    )
    column(found, "status", unit=COUNT, mappings=(VERDICTS,))
    wide(found, "check", CHECK_COLUMN)
    wide(found, "engine", NARROW_COLUMN)
    opens(found, "check", runbook_of("${__data.fields.check}"), "Runbook", blank=True)
    return found
