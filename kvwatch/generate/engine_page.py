"""The engine dashboard: what it should have, what it has, what happens to it now, and what to change."""

from grafana_foundation_sdk.builders import dashboard, statetimeline, table

from kvwatch.checks import ALL
from kvwatch.checks.check import Check
from kvwatch.generate import frame, queries, shared
from kvwatch.generate.panels import (
    BYTES,
    COUNT,
    GREEN,
    GREY,
    NUMBER,
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
    dashed,
    figure,
    graph,
    rows,
    steps,
    values,
    wide,
)
from kvwatch.generate.queries import ENGINE_LEGEND
from kvwatch.generate.shared import NO_AGENT, NO_PREDICTION, NOT_KNOWN
from kvwatch.recording import duration
from kvwatch.render.prometheus import CAPACITY, EVIDENCE, RECOMMENDED
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    CACHE_CONFIG_INFO,
    E2E_LATENCY,
    INTER_TOKEN_LATENCY,
    KV_BLOCK_IDLE_BEFORE_EVICT,
    KV_BLOCK_LIFETIME,
    KV_BLOCK_REUSE_GAP,
    KV_CACHE_USAGE,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    QUEUE_TIME,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
    TIME_TO_FIRST_TOKEN,
    Metric,
)

BLOCKS, DEVIATION = (
    EVIDENCE["capacity_below_budget", key][0] for key in ("budget_num_gpu_blocks", "capacity_deviation_ratio")
)
CARRIED = EVIDENCE["concurrency_oversubscribed", "requests_carried"][0]
LIVE_BLOCKS, LIVE_TOKENS, CONCURRENCY = (
    CAPACITY[key][0] for key in ("num_gpu_blocks", "capacity_tokens", "max_concurrency")
)
IN_FLIGHT = RECOMMENDED["gateway_max_in_flight"][0]
# Labels of cache_config_info that say how large the pool is and why -> heads of the columns.
POOL_LABELS = {
    "engine": "engine",
    "num_gpu_blocks": "blocks",
    "block_size": "block",
    "kv_cache_size_tokens": "tokens",
    "kv_cache_max_concurrency": "full-length",
    "cache_dtype": "dtype",
    "enable_prefix_caching": "caching",
    "gpu_memory_utilization": "GPU",
    "num_gpu_blocks_override": "override",
    "kv_cache_memory_bytes": "memory",
}
NOTHING = values((queries.NOTHING, "none", GREY))
"""How a proposal that the agent does not make is shown."""


def engine_page(limits: Thresholds, checks: dict[str, Check]) -> dashboard.Dashboard:
    """One engine, or the few selected."""
    builder = frame.framed(
        frame.ENGINE,
        "kvwatch / Engine",
        "One vLLM engine: the KV cache it should have and has, what happens to it, what to change.",
        since="1h",
        one_instance=True,
    )
    sheet = Sheet(builder)
    sheet.line(4, *_now(limits, checks), widths=(3, 4, 4, 3, 3, 4, 3))
    sheet.line(8, shared.checks_not_ok(hidden=("target", "model_name")), *_pressure(limits, checks))
    sheet.line(7, *_harm(limits, checks))
    sheet.heading("KV cache: what it should have and what it has")
    sheet.line(4, *_pool(limits, checks))
    sheet.line(5, _as_vllm_says(checks))
    sheet.line(5, _proposed())
    sheet.heading("Prefix cache")
    sheet.line(7, *_prefix_cache(checks))
    sheet.heading("Latency")
    sheet.line(7, *_latency(limits, checks))
    sheet.heading("Load")
    sheet.line(7, *_load(checks))
    sheet.heading("Checks of the agent")
    sheet.line(12, _checks())
    return builder


def _now(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    """What matters at 3 am."""
    over = duration(limits.alert_range_seconds)
    return (
        figure(
            "Engine",
            f"max({queries.down()})",
            unit=COUNT,
            about="Whether Prometheus gets the engine's metrics now.",
            checks=(checks["metrics_missing"],),
            limits=steps((GREY, None)),
            none=NOT_KNOWN,
            mappings=(shared.UP_OR_DOWN,),
        ),
        figure(
            "Verdict of the agent",
            queries.verdict(),
            legend=ENGINE_LEGEND,
            unit=COUNT,
            about="The worst of the agent's checks. Unreadable: the agent gets no page of the engine.",
            checks=(checks["metrics_missing"],),
            none=NO_AGENT,
            limits=steps((GREY, None)),
            mappings=(shared.VERDICTS_OF_ENGINES,),
        ),
        figure(
            "Preempted / finished",
            f"max({queries.preemptions_per_request(over)})",
            unit=RATIO,
            about=f"Preemptions for each request that finished in {over}, of the worst engine selected.",
            checks=(checks["preemptions_sustained"],),
            limits=steps(
                (GREEN, None),
                (ORANGE, limits.preemptions_per_request_warning),
                (RED, limits.preemptions_per_request_critical),
            ),
            none="no traffic",
        ),
        figure(
            "KV cache held",
            f"max({queries.value(KV_CACHE_USAGE)})",
            unit=RATIO,
            about="Share of the KV blocks that requests hold now, of the fullest engine selected.",
            checks=(checks["kv_cache_saturated"],),
            limits=steps((GREEN, None), (ORANGE, limits.kv_cache_saturated_ratio)),
        ),
        figure(
            "Requests waiting",
            f"sum({queries.value(REQUESTS_WAITING)})",
            unit=COUNT,
            about="Requests that wait to be scheduled.",
            checks=(checks["requests_queueing"], checks["replica_imbalance"]),
            limits=steps((GREEN, None), (ORANGE, 1)),
        ),
        figure(
            "Queue time, p95",
            f"max({queries.quantile(0.95, QUEUE_TIME, over)})",
            unit=SECONDS,
            about=f"From arrival to the first scheduling, of the requests scheduled in {over}.",
            checks=(checks["requests_queueing"],),
            limits=steps((GREEN, None), (ORANGE, limits.queue_time_warning_seconds)),
            none="no traffic",
        ),
        figure(
            "Cap in flight at",
            queries.proposed(IN_FLIGHT),
            legend=ENGINE_LEGEND,
            unit=NUMBER,
            about="What helps now without a restart: the number of requests in flight to allow at the gateway, as the "
            "agent works it out from today's request lengths. `kvwatch recommend` explains it.",
            none=NO_AGENT,
            mappings=(NOTHING,),
        ),
    )


def _pressure(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    requests = graph(
        "Requests",
        [
            Query(expr=queries.value(REQUESTS_RUNNING), legend=f"running {ENGINE_LEGEND}"),
            Query(expr=queries.value(REQUESTS_WAITING), legend=f"waiting {ENGINE_LEGEND}"),
            Query(expr=queries.agent(CARRIED), legend=f"carried {ENGINE_LEGEND}"),
        ],
        unit=COUNT,
        about="In the batch, waiting, and, from the agent, how many of today's lengths the KV cache carries without a "
        "preemption.",
        checks=(checks["concurrency_oversubscribed"], checks["sequence_cap_reached"]),
    )
    return (
        shared.kv_cache_held(ENGINE_LEGEND, limits, checks["kv_cache_saturated"], checks["kv_cache_filling"]),
        dashed(requests, "/^carried/"),
    )


def _harm(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    return (
        shared.preemptions(ENGINE_LEGEND, checks["preemptions_sustained"]),
        graph(
            "Preempted / finished",
            [Query(expr=queries.preemptions_per_request(), legend=ENGINE_LEGEND)],
            unit=RATIO,
            about="Preemptions for each request that finished.",
            at_least=limits.preemptions_per_request_critical,
            checks=(checks["preemptions_sustained"],),
            limits=steps(
                (GREEN, None),
                (ORANGE, limits.preemptions_per_request_warning),
                (RED, limits.preemptions_per_request_critical),
            ),
        ),
        graph(
            "Computed again (estimate)",
            [
                Query(expr=queries.recomputed_tokens(), legend=f"again {ENGINE_LEGEND}"),
                Query(expr=queries.tokens(), legend=f"counted {ENGINE_LEGEND}"),
            ],
            unit=TOKENS_PER_SECOND,
            about="vLLM does not count what it computes again. Preemptions times the mean prompt and a fifth of the "
            "mean answer of the requests that finished; with prefix caching an upper bound, since surviving blocks are "
            "not computed again. Beside it what vLLM counts: each prompt once, and generated tokens.",
            checks=(checks["preemptions_sustained"],),
        ),
        graph(
            "Waiting and refused, by reason",
            [
                Query(
                    expr=queries.value(REQUESTS_WAITING_BY_REASON, "{}", "reason"),
                    legend=f"{{{{reason}}}} {ENGINE_LEGEND}",
                ),
                Query(expr=queries.rejections(), legend="refused /s: {{reason}}"),
            ],
            unit=COUNT,
            about="capacity: no room in the batch or the KV cache. deferred: waits for a LoRA slot or a KV transfer. "
            "By reason since vLLM 0.20; refusals by a queue limit since 0.32.",
            checks=(checks["long_context_monopoly"], checks["admission_rejected"]),
            none="by reason since vLLM 0.20",
        ),
    )


def _pool(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    tolerance = limits.capacity_deviation_ratio
    return (
        figure(
            "Blocks predicted",
            queries.agent(BLOCKS),
            legend=ENGINE_LEGEND,
            unit=NUMBER,
            about="KV blocks that model, flags and GPU should give, worked out by the agent (it needs --model).",
            none=NO_PREDICTION,
        ),
        figure(
            "Blocks live",
            queries.agent(LIVE_BLOCKS),
            legend=ENGINE_LEGEND,
            unit=NUMBER,
            about="KV blocks of one engine, as its page tells the agent. Without one, see the table below.",
            checks=(checks["kv_cache_underused"],),
            none=NOT_KNOWN,
        ),
        figure(
            "Live against predicted",
            queries.agent(DEVIATION),
            legend=ENGINE_LEGEND,
            unit=RATIO,
            about="0 is as predicted, -10 % a tenth fewer.",
            checks=(checks["capacity_below_budget"],),
            limits=steps((ORANGE, None), (GREEN, -tolerance)),
            none=NO_PREDICTION,
        ),
        figure(
            "Tokens it holds",
            queries.agent(LIVE_TOKENS),
            legend=ENGINE_LEGEND,
            unit=COUNT,
            about="As vLLM counts them: its concurrency at the maximum length times that length.",
            none=NOT_KNOWN,
        ),
        figure(
            "Full-length requests",
            queries.agent(CONCURRENCY),
            legend=ENGINE_LEGEND,
            unit=COUNT,
            about="How many requests of max_model_len fit at once. Below 1, one of them can never run.",
            checks=(checks["context_exceeds_capacity"],),
            limits=steps((RED, None), (GREEN, 1)),
            none=NOT_KNOWN,
        ),
        figure(
            "Requests carried",
            queries.agent(CARRIED),
            legend=ENGINE_LEGEND,
            unit=COUNT,
            decimals=0,
            about="Requests of today's lengths that the KV cache carries to their end.",
            checks=(checks["concurrency_oversubscribed"],),
            none=NOT_KNOWN,
        ),
    )


def _as_vllm_says(checks: dict[str, Check]) -> table.Panel:
    found = rows(
        "KV cache as vLLM reports it",
        [
            Query(
                expr=queries.value(CACHE_CONFIG_INFO, "{}", *(label for label in POOL_LABELS if label != "engine")),
                legend="Value",
            )
        ],
        about="Labels of cache_config_info. Data-parallel engines of one server write the sum of their blocks.",
        order=tuple(POOL_LABELS),
        renamed=POOL_LABELS,
        numbers=("kv_cache_memory_bytes",),
        hidden=("Value", "cluster", "namespace", "pod", "job", "instance", "model", "model_name"),
        checks=(checks["config_drift"], checks["prefix_cache_ineffective"]),
    )
    column(found, POOL_LABELS["kv_cache_memory_bytes"], unit=BYTES)
    return found


def _proposed() -> table.Panel:
    heads = {name: setting.replace("_", " ") for setting, (name, _) in RECOMMENDED.items()}
    found = rows(
        "Proposed settings",
        [Query(expr=queries.proposed(name), legend=head) for name, head in heads.items()],
        about="What the agent proposes. `kvwatch recommend` gives the reasons and what each would do.",
        order=("engine",),
        hidden=("target", "namespace", "pod", "cluster", "model_name"),
        none=NO_AGENT,
    )
    for head in heads.values():
        column(found, head, unit=NUMBER, mappings=(NOTHING,), filled=False)
    for name in ("engine", "watermark", "replicas"):
        wide(found, name, 90)  # so that the long names of the others fit on a screen of 1280
    return found


def _checks() -> statetimeline.Panel:
    return shared.checks_over_time(
        queries.agent(queries.AGENT_STATUS, by=("check",)),
        "{{engine}} {{check}}",
        about="One band per check; a click on it leads to the check's runbook.",
        none=NO_AGENT,
        most=2 * len(ALL),
    )


def _prefix_cache(checks: dict[str, Check]) -> tuple[Panel, ...]:
    flag = "needs --kv-cache-metrics"
    sampled = "Only with --kv-cache-metrics, for a sample of the blocks (vLLM 0.12 and later). "
    return (
        shared.prefix_cache_hits(ENGINE_LEGEND, checks["prefix_cache_ineffective"], checks["prefix_cache_evicting"]),
        graph(
            "Prefix-cache look-ups",
            [
                Query(expr=queries.rate(PREFIX_CACHE_QUERIES), legend=f"looked up {ENGINE_LEGEND}"),
                Query(expr=queries.rate(PREFIX_CACHE_HITS), legend=f"found {ENGINE_LEGEND}"),
            ],
            unit=TOKENS_PER_SECOND,
            about="Prompt tokens per second.",
            checks=(checks["prefix_cache_ineffective"],),
        ),
        graph(
            "Blocks evicted",
            [Query(expr=queries.rate(KV_BLOCK_LIFETIME, part="_count"), legend=ENGINE_LEGEND)],
            unit=PER_SECOND,
            about=sampled + "Turnover alone is no harm: an idle engine recycles blocks too.",
            checks=(checks["prefix_cache_evicting"],),
            none=flag,
        ),
        graph(
            "Idle before eviction, reuse gap",
            [
                Query(expr=queries.quantile(0.5, KV_BLOCK_IDLE_BEFORE_EVICT), legend=f"idle p50 {ENGINE_LEGEND}"),
                Query(expr=queries.quantile(0.9, KV_BLOCK_REUSE_GAP), legend=f"gap p90 {ENGINE_LEGEND}"),
            ],
            unit=SECONDS,
            about=sampled + "Blocks that go before their next use would have come cost hits.",
            checks=(checks["prefix_cache_evicting"],),
            none=flag,
        ),
    )


def _latency(limits: Thresholds, checks: dict[str, Check]) -> tuple[Panel, ...]:
    slow = steps((GREEN, None), (ORANGE, limits.queue_time_warning_seconds))

    def quantiles(metric: Metric) -> list[Query]:
        return [
            Query(expr=queries.quantile(q, metric), legend=f"p{q * 100:g} {ENGINE_LEGEND}") for q in (0.5, 0.95, 0.99)
        ]

    return (
        graph("Time to first token", quantiles(TIME_TO_FIRST_TOKEN), unit=SECONDS, about="Queue time included."),
        graph(
            "Queue time",
            quantiles(QUEUE_TIME),
            unit=SECONDS,
            about="From arrival to the first scheduling.",
            checks=(checks["requests_queueing"],),
            limits=slow,
        ),
        graph(
            "Time between tokens",
            quantiles(INTER_TOKEN_LATENCY),
            unit=SECONDS,
            about="A preempted request waits between two of its tokens.",
        ),
        graph("Arrival to last token", quantiles(E2E_LATENCY), unit=SECONDS, about="Of the requests that finished."),
    )


def _load(checks: dict[str, Check]) -> tuple[Panel, ...]:
    return (
        shared.tokens(ENGINE_LEGEND, checks["engine_stalled"]),
        graph(
            "Requests finished, by reason",
            [
                Query(
                    expr=queries.rate(REQUEST_SUCCESS, queries.RATE, "finished_reason"),
                    legend=f"{{{{finished_reason}}}} {ENGINE_LEGEND}",
                )
            ],
            unit=PER_SECOND,
            about="stop and length are answers; abort is a client that left.",
        ),
        _lengths("Prompt length", REQUEST_PROMPT_TOKENS, checks["long_context_monopoly"]),
        _lengths("Answer length", REQUEST_GENERATION_TOKENS),
    )


def _lengths(title: str, metric: Metric, *checks: Check) -> Panel:
    return graph(
        title,
        [
            Query(expr=queries.mean(metric), legend=f"mean {ENGINE_LEGEND}"),
            Query(expr=queries.quantile(0.95, metric), legend=f"p95 {ENGINE_LEGEND}"),
        ],
        unit=COUNT,
        about="Tokens of the requests that finished.",
        checks=checks,
    )
