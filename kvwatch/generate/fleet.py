"""The fleet dashboard: which engine is worst, and how the others are."""

from grafana_foundation_sdk.builders import dashboard, table

from kvwatch.checks.check import Check
from kvwatch.generate import frame, queries, shared
from kvwatch.generate.panels import (
    COUNT,
    GREEN,
    ORANGE,
    PER_SECOND,
    RATIO,
    RED,
    SECONDS,
    TOKENS_PER_SECOND,
    Panel,
    Query,
    Sheet,
    column,
    figure,
    graph,
    opens,
    rows,
    states,
    steps,
    values,
)
from kvwatch.generate.queries import AGENT_LEGEND, LEGEND
from kvwatch.recording import duration
from kvwatch.render.prometheus import EVIDENCE
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    QUEUE_TIME,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TIME_TO_FIRST_TOKEN,
)

ENGINE_PAGE = (
    f"/d/{frame.ENGINE}?var-datasource=${{datasource}}&var-job=${{__data.fields.job}}"
    "&var-instance=${__data.fields.instance}&var-engine=${__data.fields.engine}&${__url_time_range}"
)
DEVIATION = EVIDENCE["capacity_below_budget", "capacity_deviation_ratio"][0]


def fleet(limits: Thresholds, checks: dict[str, Check]) -> dashboard.Dashboard:
    """All engines at once; the first row counts those in trouble, the table has the worst on top."""
    builder = frame.framed(
        frame.FLEET, "kvwatch / Fleet", "vLLM engines, the worst first. Needs only vLLM's own metrics.", since="1h"
    )
    sheet = Sheet(builder)
    over = duration(limits.alert_range_seconds)
    sheet.line(4, *_in_trouble(limits, checks, over), widths=(3, 3, 4, 4, 3, 4, 3))
    sheet.line(8, _worst_first(limits, over))
    sheet.line(
        8,
        shared.kv_cache_held(LEGEND, limits, checks["kv_cache_saturated"], checks["kv_cache_underused"]),
        shared.preemptions(LEGEND, checks["preemptions_sustained"]),
    )
    sheet.line(
        8,
        graph(
            "Requests waiting",
            [Query(expr=queries.value(REQUESTS_WAITING), legend=LEGEND)],
            unit=COUNT,
            about="Requests that wait to be scheduled. Some on one engine while another has none: the load is not "
            "spread evenly.",
            checks=(checks["requests_queueing"], checks["replica_imbalance"]),
        ),
        graph(
            "Requests running",
            [Query(expr=queries.value(REQUESTS_RUNNING), legend=LEGEND)],
            unit=COUNT,
            about="Requests in the batch. A flat top is max_num_seqs, or what the KV cache carries.",
            checks=(checks["sequence_cap_reached"],),
        ),
    )
    sheet.line(8, shared.time_to_first_token(LEGEND), shared.time_between_tokens(LEGEND))
    _with_the_agent(sheet, limits, checks)
    return builder


def _in_trouble(limits: Thresholds, checks: dict[str, Check], over: str) -> tuple[Panel, ...]:
    return (
        figure(
            "Engines",
            f"count({queries.value(REQUESTS_RUNNING)})",
            unit=COUNT,
            about="Engines that are scraped.",
            checks=(checks["metrics_missing"],),
            none="none",
        ),
        figure(
            "Down",
            f"sum({queries.down()})",
            unit=COUNT,
            about=f"Engines seen in the last {queries.REMEMBERED} that Prometheus fails to scrape now.",
            checks=(checks["metrics_missing"],),
            limits=steps((GREEN, None), (RED, 1)),
            none=shared.NOT_KNOWN,
        ),
        figure(
            "Preempting",
            f"sum({queries.preemptions_per_request(over)} >bool {limits.preemptions_per_request_warning:g})",
            unit=COUNT,
            about=f"Engines with more than {limits.preemptions_per_request_warning:g} preemptions per finished request "
            f"in {over}. Their KV cache is too small for what runs at once.",
            checks=(checks["preemptions_sustained"],),
            limits=steps((GREEN, None), (RED, 1)),
            none="no traffic",
        ),
        figure(
            "Full, with a queue",
            f"sum({queries.full_with_a_queue(limits)})",
            unit=COUNT,
            about=f"Engines whose KV cache was at least {limits.kv_cache_saturated_ratio:.0%} held on average over "
            f"{over} while requests wait. A full cache alone is what vLLM aims for.",
            checks=(checks["kv_cache_saturated"],),
            limits=steps((GREEN, None), (ORANGE, 1)),
        ),
        figure(
            "Stalled",
            f"sum({queries.stalled(limits)})",
            unit=COUNT,
            about=f"Engines that held requests for {duration(2 * limits.stall_seconds)} and gave no token.",
            checks=(checks["engine_stalled"],),
            limits=steps((GREEN, None), (RED, 1)),
        ),
        figure(
            "Requests waiting",
            f"sum({queries.value(REQUESTS_WAITING)})",
            unit=COUNT,
            about="Requests that wait to be scheduled, on all engines.",
            checks=(checks["requests_queueing"],),
        ),
        figure(
            "Alerts firing",
            f"count({queries.severities()})",
            unit=COUNT,
            about="Firing alerts of kvwatch's rules in this Prometheus; one that is both a warning and critical counts "
            "once. Alerts of the agent are in Alertmanager only.",
            limits=steps((GREEN, None), (ORANGE, 1)),
            none="none, or no rules",
        ),
    )


def _worst_first(limits: Thresholds, over: str) -> table.Panel:
    """One row per engine, those that are down on top. Preemptions come next: they are the harm, and a queue or a full
    cache only leads to it.
    """
    state, preemptions, share, queue, held = "State", "Preempts /s", "Per request", "Queue p95", "KV held"
    found = rows(
        "Engines, worst first",
        [
            Query(expr=queries.down(), legend=state),
            Query(expr=queries.rate(PREEMPTIONS, over), legend=preemptions),
            Query(expr=queries.preemptions_per_request(over), legend=share),
            Query(expr=queries.quantile(0.95, QUEUE_TIME, over), legend=queue),
            Query(expr=queries.value(KV_CACHE_USAGE), legend=held),
            Query(expr=queries.value(REQUESTS_WAITING), legend="Waiting"),
            Query(expr=queries.value(REQUESTS_RUNNING), legend="Running"),
            Query(expr=queries.quantile(0.95, TIME_TO_FIRST_TOKEN, over), legend="TTFT p95"),
            Query(expr=queries.rate(GENERATION_TOKENS, over), legend="Output"),
            Query(expr=queries.prefix_hit_ratio(over), legend="Prefix hits"),
        ],
        about=f"Rates and quantiles over {over}, the rest now. Order: down, preemptions, queue time, KV cache held. "
        "Per request: preemptions for each request that finished.",
        order=("model_name", "model", "instance", "engine"),
        hidden=("cluster", "namespace", "pod", "job"),
        sort=(state, preemptions, queue, held),
    )
    severe = steps(
        ("transparent", None),
        (ORANGE, limits.preemptions_per_request_warning),
        (RED, limits.preemptions_per_request_critical),
    )
    column(found, state, unit=COUNT, mappings=(values((0, "up", "transparent"), (1, "down", RED)),))
    column(found, preemptions, unit=PER_SECOND)
    column(found, share, unit=RATIO, limits=severe)
    column(found, queue, unit=SECONDS, limits=steps(("transparent", None), (ORANGE, limits.queue_time_warning_seconds)))
    column(found, held, unit=RATIO, limits=steps(("transparent", None), (ORANGE, limits.kv_cache_saturated_ratio)))
    for name in ("Waiting", "Running"):
        column(found, name, unit=COUNT)
    column(found, "TTFT p95", unit=SECONDS)
    column(found, "Output", unit=TOKENS_PER_SECOND)
    column(found, "Prefix hits", unit=RATIO)
    opens(found, "instance", ENGINE_PAGE, "Open this engine")
    return found


def _with_the_agent(sheet: Sheet, limits: Thresholds, checks: dict[str, Check]) -> None:
    sheet.heading("With the kvwatch agent")
    verdicts = states(
        "Verdict by engine",
        [Query(expr=queries.verdict(), legend=AGENT_LEGEND)],
        about="The worst of the agent's checks, those that could not be judged left out. Unreadable: the agent gets no "
        "page of the engine.",
        mappings=(shared.VERDICTS_OF_ENGINES,),
        none=shared.NO_AGENT,
    )
    sheet.line(8, shared.checks_not_ok(hidden=("model_name",)), verdicts)
    sheet.line(
        7,
        graph(
            "Live KV blocks against the budget",
            [Query(expr=queries.agent(DEVIATION), legend=AGENT_LEGEND)],
            unit=RATIO,
            bottom=None,
            at_least=limits.capacity_deviation_ratio * 2,
            about="0 is as predicted from model, flags and GPU; -10 % is a tenth fewer. Needs the agent's --model. "
            "Engines of one model that differ are configured differently.",
            none=shared.NO_PREDICTION,
            checks=(checks["capacity_below_budget"], checks["config_drift"]),
            limits=steps((ORANGE, None), (GREEN, -limits.capacity_deviation_ratio)),
        ),
    )
