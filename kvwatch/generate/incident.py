"""The incident dashboard: what happened, in which order. All panels share one time axis and one cursor."""

from grafana_foundation_sdk.builders import dashboard

from kvwatch.checks.check import Check
from kvwatch.generate import frame, queries
from kvwatch.generate.panels import (
    COUNT,
    GREEN,
    ORANGE,
    PER_SECOND,
    RATIO,
    RED,
    SECONDS,
    TOKENS_PER_SECOND,
    VERDICTS,
    Panel,
    Query,
    Sheet,
    graph,
    states,
    steps,
    values,
)
from kvwatch.generate.queries import LEGEND
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    GENERATION_TOKENS,
    INTER_TOKEN_LATENCY,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TIME_TO_FIRST_TOKEN,
)


def incident(limits: Thresholds, checks: dict[str, Check]) -> dashboard.Dashboard:
    """Read from the top: what was reported, the cause (load and its lengths), the pool, the harm, what users felt."""
    builder = frame.framed(
        frame.INCIDENT,
        "kvwatch / Incident timeline",
        "What happened and in which order, on one time axis: set the range to the incident.",
        since="3h",
    )
    sheet = Sheet(builder)
    sheet.line(6, *_reported())
    for panel in (*_cause(), *_pool(limits, checks), *_felt(limits, checks)):
        sheet.line(5, panel)
    return builder


def _reported() -> tuple[Panel, ...]:
    status = queries.agent(queries.AGENT_STATUS, by=("check",))
    return (
        states(
            "Alerts and restarts",
            [
                Query(expr=queries.alerts(), legend="{{alertname}} {{instance}} {{target}} {{engine}} {{severity}}"),
                Query(expr=f"2 * ({frame.restarts()} >bool 0)", legend="restart {{job}} {{instance}}"),
            ],
            about="Alerts of kvwatch's rules in this Prometheus, and restarts of engines.",
            mappings=(values((1, "firing", RED), (2, "restart", "blue")),),
            none="no alert and no restart, or no rules",
        ),
        states(
            "Checks of the agent",
            [Query(expr=f"{status} > 0 < 3", legend="{{check}} {{pod}} {{target}} {{engine}}")],
            about="Checks that were not ok.",
            mappings=(VERDICTS,),
            none="every check ok, or no kvwatch agent",
        ),
    )


def _cause() -> tuple[Panel, ...]:
    return (
        graph(
            "Requests in flight",
            [
                Query(expr=queries.value(REQUESTS_RUNNING), legend=f"running {LEGEND}"),
                Query(expr=queries.value(REQUESTS_WAITING), legend=f"waiting {LEGEND}"),
            ],
            unit=COUNT,
            about="More of them, at the same lengths: the load rose.",
        ),
        graph(
            "Request length, mean",
            [
                Query(expr=queries.mean(REQUEST_PROMPT_TOKENS), legend=f"prompt {LEGEND}"),
                Query(expr=queries.mean(REQUEST_GENERATION_TOKENS), legend=f"answer {LEGEND}"),
            ],
            unit=COUNT,
            about="Tokens of requests as they finish: longer ones show up late.",
        ),
    )


def _pool(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    return (
        graph(
            "KV cache held",
            [Query(expr=queries.value(KV_CACHE_USAGE), legend=LEGEND)],
            unit=RATIO,
            top=1,
            about="Share of the KV blocks that requests hold.",
            checks=(checks["kv_cache_saturated"],),
            limits=steps((GREEN, None), (ORANGE, limits.kv_cache_saturated_ratio)),
        ),
        graph(
            "Preemptions",
            [Query(expr=queries.rate(PREEMPTIONS), legend=LEGEND)],
            unit=PER_SECOND,
            about="Requests thrown out of the batch for want of KV blocks.",
            checks=(checks["preemptions_sustained"],),
        ),
        graph(
            "Prefix-cache hits",
            [Query(expr=queries.prefix_hit_ratio(), legend=LEGEND)],
            unit=RATIO,
            top=1,
            about="Share of the looked-up prompt tokens that were found. A fall at the start of an incident: the "
            "cache was lost, by a restart or by eviction.",
        ),
    )


def _felt(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    return (
        graph(
            "Queue time and time to first token, p95",
            [
                Query(expr=queries.quantile(0.95, QUEUE_TIME), legend=f"queue {LEGEND}"),
                Query(expr=queries.quantile(0.95, TIME_TO_FIRST_TOKEN), legend=f"first token {LEGEND}"),
            ],
            unit=SECONDS,
            about="What users wait for before the first token.",
            checks=(checks["requests_queueing"],),
            limits=steps((GREEN, None), (ORANGE, limits.queue_time_warning_seconds)),
        ),
        graph(
            "Time between tokens, p95",
            [Query(expr=queries.quantile(0.95, INTER_TOKEN_LATENCY), legend=LEGEND)],
            unit=SECONDS,
            about="What users see as stutter.",
        ),
        graph(
            "Tokens",
            [
                Query(expr=queries.rate(PROMPT_TOKENS), legend=f"prompt {LEGEND}"),
                Query(expr=queries.rate(GENERATION_TOKENS), legend=f"generated {LEGEND}"),
            ],
            unit=TOKENS_PER_SECOND,
            about="What the engine gets done.",
            checks=(checks["engine_stalled"],),
        ),
    )
