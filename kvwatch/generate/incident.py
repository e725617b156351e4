"""The incident dashboard: what happened, in which order. All panels share one time range and one cursor."""

from grafana_foundation_sdk.builders import dashboard, statetimeline, timeseries

from kvwatch.checks.check import Check
from kvwatch.finding import Status
from kvwatch.generate import frame, queries, shared
from kvwatch.generate.panels import (
    BANDS,
    COUNT,
    GREEN,
    ORANGE,
    RED,
    SECONDS,
    Query,
    Sheet,
    beside,
    graph,
    states,
    steps,
    values,
)
from kvwatch.generate.queries import LEGEND
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    QUEUE_TIME,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TIME_TO_FIRST_TOKEN,
)

RESTARTED, DOWN = 3, 4
"""What a band of the first panel says beside the severities of alerts."""


def incident(limits: Thresholds, checks: dict[str, Check]) -> dashboard.Dashboard:
    """Read from the top: what was reported, the cause (load and its lengths), the pool, the harm, what users felt."""
    builder = frame.framed(
        frame.INCIDENT,
        "kvwatch / Incident timeline",
        "What happened and in which order: set the range to the incident.",
        since="3h",
    )
    sheet = Sheet(builder)
    sheet.line(6, beside(_reported()))
    sheet.line(7, beside(_checks()))
    for panel in (*_cause(checks), *_pool(limits, checks), *_felt(limits, checks)):
        sheet.line(6, beside(panel))
    return builder


def _reported() -> statetimeline.Panel:
    return states(
        "Alerts, restarts and outages",
        [
            Query(expr=queries.severities(), legend="{{target}}{{instance}} {{engine}} {{alertname}}"),
            Query(expr=f"{RESTARTED} * ({frame.restarts()} >bool 0)", legend="{{instance}} restart"),
            Query(expr=f"{DOWN} * ({queries.down()} > 0)", legend="{{instance}} {{engine}} down"),
        ],
        about="Alerts of kvwatch's rules in this Prometheus, red where they are critical; restarts of engines, and "
        "engines that could not be scraped.",
        mappings=(
            values(
                (Status.CRITICAL.code, "critical", RED),
                (Status.WARNING.code, "warning", ORANGE),
                (RESTARTED, "restart", "blue"),
                (DOWN, "down", "purple"),
            ),
        ),
        none="no alert, no restart and no outage, or no rules",
    )


def _checks() -> statetimeline.Panel:
    return shared.checks_over_time(
        queries.not_ok(),
        "{{pod}} {{target}} {{engine}} {{check}}",
        about="Checks that were not ok. A click on a band leads to the check's runbook.",
        none="every check ok, or no kvwatch agent",
        most=BANDS,
    )


def _cause(checks: dict[str, Check]) -> tuple[timeseries.Panel, ...]:
    return (
        graph(
            "Requests in flight",
            [
                Query(expr=queries.value(REQUESTS_RUNNING), legend=f"running {LEGEND}"),
                Query(expr=queries.value(REQUESTS_WAITING), legend=f"waiting {LEGEND}"),
            ],
            unit=COUNT,
            about="More of them, at the same lengths: the load rose. Many on one engine while another has room: it is "
            "not spread evenly.",
            checks=(checks["concurrency_oversubscribed"], checks["replica_imbalance"]),
        ),
        graph(
            "Request length, mean",
            [
                Query(expr=queries.mean(REQUEST_PROMPT_TOKENS), legend=f"prompt {LEGEND}"),
                Query(expr=queries.mean(REQUEST_GENERATION_TOKENS), legend=f"answer {LEGEND}"),
            ],
            unit=COUNT,
            about="Tokens of requests as they finish: longer ones show up late.",
            checks=(checks["long_context_monopoly"],),
        ),
    )


def _pool(limits: Thresholds, checks: dict[str, Check]) -> tuple[timeseries.Panel, ...]:
    return (
        shared.kv_cache_held(LEGEND, limits, checks["kv_cache_saturated"], checks["kv_cache_filling"]),
        shared.preemptions(LEGEND, checks["preemptions_sustained"]),
        shared.prefix_cache_hits(LEGEND, checks["prefix_cache_evicting"]),
    )


def _felt(limits: Thresholds, checks: dict[str, Check]) -> tuple[timeseries.Panel, ...]:
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
        shared.time_between_tokens(LEGEND),
        shared.tokens(LEGEND, checks["engine_stalled"]),
    )
