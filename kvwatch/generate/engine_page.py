"""The engine dashboard: what it should have, what it has, what happens to it now, and what to change."""

from grafana_foundation_sdk.builders import dashboard, statetimeline, table
from grafana_foundation_sdk.models import dashboard as models

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
    Query,
    Sheet,
    figure,
    graph,
    rows,
    states,
    steps,
    words,
)
from kvwatch.generate.queries import AGENT_LEGEND, ENGINE_LEGEND
from kvwatch.recording import duration
from kvwatch.render.prometheus import CAPACITY, EVIDENCE, RECOMMENDED
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    CACHE_CONFIG_INFO,
    E2E_LATENCY,
    GENERATION_TOKENS,
    INTER_TOKEN_LATENCY,
    KV_BLOCK_IDLE_BEFORE_EVICT,
    KV_BLOCK_LIFETIME,
    KV_BLOCK_REUSE_GAP,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    PROMPT_TOKENS,
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

NO_AGENT = "no kvwatch agent is scraped"
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
    "kv_cache_memory_bytes": "bytes",
}


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
    _now(sheet, limits, checks)
    _pressure(sheet, limits, checks)
    _budget(sheet, limits, checks)
    _prefix_cache(sheet)
    _latency(sheet, limits, checks)
    _load(sheet, checks)
    sheet.heading("Checks of the agent")
    sheet.line(12, _statuses())
    return builder


def _now(sheet: Sheet, limits: Thresholds, checks: dict[str, Check]) -> None:
    """What matters at 3 am."""
    over = duration(limits.alert_range_seconds)
    sheet.line(
        4,
        figure(
            "Verdict of the agent",
            queries.verdict(),
            legend=AGENT_LEGEND,
            unit=COUNT,
            about="The worst of the agent's checks.",
            none="no agent",
            limits=steps(("text", None)),
            mappings=(VERDICTS,),
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
            checks=(checks["requests_queueing"],),
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
            queries.agent(IN_FLIGHT),
            legend=AGENT_LEGEND,
            unit=COUNT,
            about="What helps now without a restart: the number of requests in flight to allow at the gateway, as the "
            "agent works it out from today's request lengths. `kvwatch recommend` explains it.",
            none="nothing proposed",
            decimals=0,
        ),
    )


def _pressure(sheet: Sheet, limits: Thresholds, checks: dict[str, Check]) -> None:
    sheet.line(
        8,
        graph(
            "KV cache held",
            [Query(expr=queries.value(KV_CACHE_USAGE), legend=ENGINE_LEGEND)],
            unit=RATIO,
            top=1,
            about="Share of the KV blocks that requests hold. Cached prefixes that nobody uses count as free.",
            checks=(checks["kv_cache_saturated"],),
            limits=steps((GREEN, None), (ORANGE, limits.kv_cache_saturated_ratio)),
        ),
        graph(
            "Requests",
            [
                Query(expr=queries.value(REQUESTS_RUNNING), legend=f"running {ENGINE_LEGEND}"),
                Query(expr=queries.value(REQUESTS_WAITING), legend=f"waiting {ENGINE_LEGEND}"),
                Query(expr=queries.agent(CARRIED), legend="carried without preemption {{engine}}"),
            ],
            unit=COUNT,
            about="In the batch, waiting, and, from the agent, how many of today's lengths the KV cache carries.",
            checks=(checks["concurrency_oversubscribed"], checks["sequence_cap_reached"]),
        ),
        graph(
            "Preemptions",
            [Query(expr=queries.rate(PREEMPTIONS), legend=ENGINE_LEGEND)],
            unit=PER_SECOND,
            about="Requests thrown out of the batch for want of KV blocks. Their tokens are computed again.",
            checks=(checks["preemptions_sustained"],),
        ),
    )
    sheet.line(
        7,
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
            "Waiting, by reason",
            [
                Query(
                    expr=queries.value(REQUESTS_WAITING_BY_REASON, "{}", "reason"),
                    legend=f"{{{{reason}}}} {ENGINE_LEGEND}",
                ),
                Query(
                    expr=queries.rejections(),
                    legend="refused /s: {{reason}}",
                ),
            ],
            unit=COUNT,
            about="capacity: no room in the batch or the KV cache. deferred: waits for a LoRA slot or a KV transfer. "
            "By reason since vLLM 0.20; refusals by a queue limit since 0.32.",
        ),
    )


def _budget(sheet: Sheet, limits: Thresholds, checks: dict[str, Check]) -> None:
    sheet.heading("KV cache: what it should have and what it has")
    tolerance = limits.capacity_deviation_ratio
    sheet.line(
        4,
        figure(
            "Blocks predicted",
            queries.agent(BLOCKS),
            legend=AGENT_LEGEND,
            unit=COUNT,
            decimals=0,
            about="KV blocks that model, flags and GPU should give, worked out by the agent (it needs --model).",
            none="no prediction",
        ),
        figure(
            "Blocks live",
            queries.agent(LIVE_BLOCKS),
            legend=AGENT_LEGEND,
            unit=COUNT,
            decimals=0,
            about="KV blocks of one engine, as its page says. Without the agent, see the table below.",
            none=NO_AGENT,
        ),
        figure(
            "Live against predicted",
            queries.agent(DEVIATION),
            legend=AGENT_LEGEND,
            unit=RATIO,
            about="0 is as predicted, -10 % a tenth fewer.",
            checks=(checks["capacity_below_budget"],),
            limits=steps((ORANGE, None), (GREEN, -tolerance)),
            none="no prediction",
        ),
        figure(
            "Tokens it holds",
            queries.agent(LIVE_TOKENS),
            legend=AGENT_LEGEND,
            unit=COUNT,
            about="As vLLM counts them: its concurrency at the maximum length times that length.",
            none=NO_AGENT,
        ),
        figure(
            "Full-length requests",
            queries.agent(CONCURRENCY),
            legend=AGENT_LEGEND,
            unit=COUNT,
            about="How many requests of max_model_len fit at once. Below 1, one of them can never run.",
            checks=(checks["context_exceeds_capacity"],),
            limits=steps((RED, None), (GREEN, 1)),
            none=NO_AGENT,
        ),
        figure(
            "Requests carried",
            queries.agent(CARRIED),
            legend=AGENT_LEGEND,
            unit=COUNT,
            decimals=0,
            about="Requests of today's lengths that the KV cache carries to their end.",
            checks=(checks["concurrency_oversubscribed"],),
            none="not known",
        ),
    )
    sheet.line(5, _as_vllm_says(), _proposed(), widths=(15, 9))


def _as_vllm_says() -> table.Panel:
    return rows(
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
        hidden=("Value", "cluster", "namespace", "pod", "job", "instance", "model", "model_name"),
    )


def _proposed() -> table.Panel:
    name = "__name__"
    found = rows(
        "Proposed settings",
        [Query(expr=f'{{__name__=~"kvwatch_recommended_.+",{queries.AGENT_SELECTED}}}', legend="proposed")],
        about="What the agent proposes. `kvwatch recommend` gives the reasons and what each would do.",
        order=(name, "model_name", "engine"),
        hidden=("job", "instance", "target", "namespace", "pod", "cluster", "container", "endpoint", "service"),
        none="nothing proposed, or no kvwatch agent",
    )
    flags = {metric: setting.replace("_", " ") for setting, (metric, _) in RECOMMENDED.items()}
    found.override_by_name(
        name,
        [
            models.DynamicConfigValue(id_val="mappings", value=[words(flags)]),
            models.DynamicConfigValue(id_val="displayName", value="setting"),
            models.DynamicConfigValue(id_val="custom.width", value=170),
        ],
    )
    return found


def _statuses() -> statetimeline.Panel:
    status = queries.agent(queries.AGENT_STATUS, by=("check",))
    return states(
        "Checks of the agent",
        [Query(expr=status, legend="{{check}} {{target}} {{engine}}")],
        about="One band per check; `kvwatch explain CHECK` prints its runbook.",
        mappings=(VERDICTS,),
        none=NO_AGENT,
    )


def _prefix_cache(sheet: Sheet) -> None:
    sheet.heading("Prefix cache")
    sampled = "Only with --kv-cache-metrics, for a sample of the blocks (vLLM 0.12 and later). "
    sheet.line(
        7,
        graph(
            "Prefix-cache hits",
            [Query(expr=queries.prefix_hit_ratio(), legend=ENGINE_LEGEND)],
            unit=RATIO,
            top=1,
            about="Share of the looked-up prompt tokens that were found. A prefix shorter than a block never hits.",
        ),
        graph(
            "Prefix-cache look-ups",
            [
                Query(expr=queries.rate(PREFIX_CACHE_QUERIES), legend=f"looked up {ENGINE_LEGEND}"),
                Query(expr=queries.rate(PREFIX_CACHE_HITS), legend=f"found {ENGINE_LEGEND}"),
            ],
            unit=TOKENS_PER_SECOND,
            about="Prompt tokens per second.",
        ),
        graph(
            "Blocks evicted",
            [Query(expr=queries.rate(KV_BLOCK_LIFETIME, part="_count"), legend=ENGINE_LEGEND)],
            unit=PER_SECOND,
            about=sampled + "Turnover alone is no harm: an idle engine recycles blocks too.",
        ),
        graph(
            "Idle before eviction, reuse gap",
            [
                Query(expr=queries.quantile(0.5, KV_BLOCK_IDLE_BEFORE_EVICT), legend=f"idle p50 {ENGINE_LEGEND}"),
                Query(expr=queries.quantile(0.9, KV_BLOCK_REUSE_GAP), legend=f"gap p90 {ENGINE_LEGEND}"),
            ],
            unit=SECONDS,
            about=sampled + "Blocks that go before their next use would have come cost hits.",
        ),
    )


def _latency(sheet: Sheet, limits: Thresholds, checks: dict[str, Check]) -> None:
    sheet.heading("Latency")
    slow = steps((GREEN, None), (ORANGE, limits.queue_time_warning_seconds))

    def quantiles(metric: Metric) -> list[Query]:
        return [
            Query(expr=queries.quantile(q, metric), legend=f"p{q * 100:g} {ENGINE_LEGEND}") for q in (0.5, 0.95, 0.99)
        ]

    sheet.line(
        7,
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


def _load(sheet: Sheet, checks: dict[str, Check]) -> None:
    sheet.heading("Load")
    sheet.line(
        7,
        graph(
            "Tokens",
            [
                Query(expr=queries.rate(PROMPT_TOKENS), legend=f"prompt {ENGINE_LEGEND}"),
                Query(expr=queries.rate(GENERATION_TOKENS), legend=f"generated {ENGINE_LEGEND}"),
            ],
            unit=TOKENS_PER_SECOND,
            about="Prompt tokens processed and tokens generated.",
            checks=(checks["engine_stalled"],),
        ),
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
        graph(
            "Prompt length",
            [
                Query(expr=queries.mean(REQUEST_PROMPT_TOKENS), legend=f"mean {ENGINE_LEGEND}"),
                Query(expr=queries.quantile(0.95, REQUEST_PROMPT_TOKENS), legend=f"p95 {ENGINE_LEGEND}"),
            ],
            unit=COUNT,
            about="Tokens of the requests that finished.",
        ),
        graph(
            "Answer length",
            [
                Query(expr=queries.mean(REQUEST_GENERATION_TOKENS), legend=f"mean {ENGINE_LEGEND}"),
                Query(expr=queries.quantile(0.95, REQUEST_GENERATION_TOKENS), legend=f"p95 {ENGINE_LEGEND}"),
            ],
            unit=COUNT,
            about="Tokens of the requests that finished.",
        ),
    )
