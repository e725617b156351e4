"""Recording rules: one series per engine for every signal the alerts need, whatever vLLM calls its metrics.

vLLM renamed metrics, Ray Serve and OpenMetrics scrapes change their prefix, vLLM before 0.8 has no engine label and
Triton writes `model` for `model_name`. A rule here joins all spellings with `or` and settles the labels, so an alert
reads one name. The rates are taken of vLLM's own series and only then joined and summed: a sum of counters hides a
restart from `rate`.

    engine:vllm_<what>:<op>      <op> is `last`, or an operation and its range: `min5m`, `rate5m`

All other labels (job, instance, namespace, pod, cluster) are kept: `without`, never `by`.
"""

import textwrap
from dataclasses import dataclass, fields

from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    ADMISSION_REJECTIONS,
    CACHE_CONFIG_INFO,
    ENGINE_SLEEP_STATE,
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    MAX_NUM_SEQS,
    PREEMPTIONS,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    PREFIXES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
    Metric,
)

PLACE_LABELS = "cluster, namespace, job, pod, instance, engine"
"""What tells engines apart, where the scrape sets it."""

CONFIG_LABELS = (
    "block_size",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "sliding_window",
)
"""Labels of cache_config_info that follow from flags, so that replicas of one deployment agree on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording rule; as text it is the name it records."""

    record: str
    expr: str
    help: str

    def __str__(self) -> str:
        return self.record


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Every recorded series. Rates, means and extremes cover `alert_range_seconds`."""

    running: Recording
    running_minimum: Recording
    running_maximum: Recording
    running_trend: Recording
    waiting: Recording
    waiting_minimum: Recording
    deferred: Recording
    usage: Recording
    usage_mean: Recording
    usage_maximum: Recording
    usage_forecast: Recording
    awake: Recording
    max_num_seqs: Recording
    preemptions: Recording
    preemptions_rate: Recording
    finished_rate: Recording
    preemptions_per_request: Recording
    queue_times_rate: Recording
    queue_time_mean: Recording
    prompt_tokens_rate: Recording
    generation_tokens_rate: Recording
    prefix_lookups_rate: Recording
    prefix_hit_ratio: Recording
    prefix_hit_usual: Recording
    rejections_rate: Recording
    held_while_stalled: Recording
    tokens_while_stalled: Recording
    usage_moves_while_stalled: Recording
    seen: Recording
    cache_config: Recording

    def all(self) -> tuple[Recording, ...]:
        """In an order in which every rule stands below the rules it reads."""
        return tuple(getattr(self, field.name) for field in fields(self))


def duration(seconds: float) -> str:
    """Seconds -> a Prometheus duration: 300 -> 5m, 90 -> 90s."""
    whole = round(seconds)
    for unit, length in (("h", 3600), ("m", 60)):
        if whole and whole % length == 0:
            return f"{whole // length}{unit}"
    return f"{whole}s"


def stall_range_seconds(limits: Thresholds) -> float:
    """Over which a stalled engine shows no token: twice the span, to hold two scrapes that are a minute apart.

    Prometheus 3 does not count a scrape at the very beginning of a range, Prometheus 2 does.
    """
    return 2 * limits.stall_seconds


def signals(limits: Thresholds) -> Signals:
    """All recording rules for these thresholds, which set the ranges."""
    over, stalled = duration(limits.alert_range_seconds), duration(stall_range_seconds(limits))

    def last(what: str, metric: Metric, text: str, matcher: str = "") -> Recording:
        expr = _per_engine(metric, "{}", matcher=matcher)
        return Recording(record=f"engine:vllm_{what}:last", expr=expr, help=text)

    def ranged(what: str, op: str, metric: Metric, text: str, part: str = "") -> Recording:
        function = f"{op}_over_time" if op in {"min", "max", "avg"} else op
        expr = _per_engine(metric, f"{function}({{}}[{over}])", part=part)
        return Recording(record=f"engine:vllm_{what}:{op}{over}", expr=expr, help=text)

    def quotient(what: str, op: str, above: Recording | str, below: Recording | str, text: str) -> Recording:
        return Recording(record=f"engine:vllm_{what}:{op}{over}", expr=f"{above}\n/\n{below}", help=text)

    preemptions = ranged("preemptions", "increase", PREEMPTIONS, "preemptions in the range")
    finished = ranged("requests_finished", "rate", REQUEST_SUCCESS, "requests finished per second")
    observed = ranged(
        "queue_time_observations",
        "rate",
        QUEUE_TIME,
        "requests per second whose queue time was observed, which vLLM does when they finish",
        part="_count",
    )
    preemptions_rate = ranged("preemptions", "rate", PREEMPTIONS, "preemptions per second")
    running = last("requests_running", REQUESTS_RUNNING, REQUESTS_RUNNING.help)
    waiting = last("requests_waiting", REQUESTS_WAITING, REQUESTS_WAITING.help)
    usage = last("kv_cache_usage_ratio", KV_CACHE_USAGE, KV_CACHE_USAGE.help)
    lookups = ranged(
        "prefix_cache_lookups", "rate", PREFIX_CACHE_QUERIES, "prompt tokens looked up in the prefix cache, per second"
    )
    horizon = duration(limits.filling_horizon_seconds)
    generation = ranged("generation_tokens", "rate", GENERATION_TOKENS, "tokens generated per second")
    seen = Recording(
        record="engine:vllm_engine:seen",
        expr="group without () (\n"
        + "\n  or ".join(("  " + str(running), *map(str, (waiting, usage, preemptions, generation))))
        + "\n)",
        help="1 for every engine of which any of these signals is exposed",
    )
    return Signals(
        running=running,
        running_minimum=ranged("requests_running", "min", REQUESTS_RUNNING, "fewest requests in the batch"),
        running_maximum=ranged("requests_running", "max", REQUESTS_RUNNING, "most requests in the batch"),
        running_trend=ranged(
            "requests_running", "deriv", REQUESTS_RUNNING, "by how many requests the batch grows, per second"
        ),
        waiting=waiting,
        waiting_minimum=ranged("requests_waiting", "min", REQUESTS_WAITING, "fewest requests waiting"),
        deferred=last(
            "requests_deferred",
            REQUESTS_WAITING_BY_REASON,
            "requests waiting for a LoRA slot or a KV transfer (0.20+)",
            matcher=f'{REQUESTS_WAITING_BY_REASON.split}="deferred"',
        ),
        usage=usage,
        usage_mean=ranged("kv_cache_usage_ratio", "avg", KV_CACHE_USAGE, "mean share of the KV blocks held"),
        usage_maximum=ranged("kv_cache_usage_ratio", "max", KV_CACHE_USAGE, "largest share of the KV blocks held"),
        usage_forecast=Recording(
            record=f"engine:vllm_kv_cache_usage_ratio:forecast{horizon}",
            expr=_per_engine(KV_CACHE_USAGE, f"predict_linear({{}}[{over}], {limits.filling_horizon_seconds:g})"),
            help=f"share of the KV blocks held in {horizon}, if it goes on as over {over}",
        ),
        awake=last(
            "engine_awake",
            ENGINE_SLEEP_STATE,
            "0 while the engine sleeps on request (0.11+)",
            matcher=f'{ENGINE_SLEEP_STATE.split}="awake"',
        ),
        max_num_seqs=last("max_num_seqs", MAX_NUM_SEQS, MAX_NUM_SEQS.help),
        preemptions=preemptions,
        preemptions_rate=preemptions_rate,
        finished_rate=finished,
        preemptions_per_request=quotient(
            "preemptions_per_request",
            "ratio",
            preemptions_rate,
            finished,
            "preemptions per finished request; +Inf where some were preempted and none finished",
        ),
        queue_times_rate=observed,
        queue_time_mean=quotient(
            "queue_time_seconds",
            "mean",
            _per_engine(QUEUE_TIME, f"rate({{}}[{over}])", part="_sum"),
            observed,
            "mean seconds between arrival and first scheduling, of the requests that finished in the range",
        ),
        prompt_tokens_rate=ranged("prompt_tokens", "rate", PROMPT_TOKENS, "prompt tokens processed per second"),
        generation_tokens_rate=generation,
        prefix_lookups_rate=lookups,
        prefix_hit_ratio=quotient(
            "prefix_cache_hit_ratio",
            "ratio",
            _per_engine(PREFIX_CACHE_HITS, f"rate({{}}[{over}])"),
            f"({lookups} > 0)",
            "share of the looked-up prompt tokens found in the prefix cache",
        ),
        prefix_hit_usual=Recording(
            record="engine:vllm_prefix_cache_hit_ratio:lifetime",
            expr=f"{_per_engine(PREFIX_CACHE_HITS, '{}')}\n/\n({_per_engine(PREFIX_CACHE_QUERIES, '{}')} > 0)",
            help="the same share since the engine started: what is usual, and never an alarm by itself",
        ),
        rejections_rate=ranged(
            "admission_rejections",
            "rate",
            ADMISSION_REJECTIONS,
            "requests refused by a queue limit, per second (0.32+)",
        ),
        held_while_stalled=Recording(
            record=f"engine:vllm_requests_held:min{stalled}",
            expr=f"{_per_engine(REQUESTS_RUNNING, f'min_over_time({{}}[{stalled}])')}\n+\n"
            f"{_per_engine(REQUESTS_WAITING, f'min_over_time({{}}[{stalled}])')}",
            help="requests that the engine held all the time: fewest running plus fewest waiting",
        ),
        tokens_while_stalled=Recording(
            record=f"engine:vllm_tokens:rate{stalled}",
            expr=f"{_per_engine(PROMPT_TOKENS, f'rate({{}}[{stalled}])')}\n+\n"
            f"{_per_engine(GENERATION_TOKENS, f'rate({{}}[{stalled}])')}",
            help="prompt and generated tokens per second",
        ),
        usage_moves_while_stalled=Recording(
            record=f"engine:vllm_kv_cache_usage_ratio:changes{stalled}",
            expr=_per_engine(KV_CACHE_USAGE, f"changes({{}}[{stalled}])"),
            help="how often the share of KV blocks held changed: blocks were allocated or freed",
        ),
        seen=seen,
        cache_config=Recording(
            record="engine:vllm_cache_config:info",
            expr=f"group by (\n{indented(config_labels(PLACE_LABELS))}\n) (\n"
            + indented(_number_the_engine(joined(CACHE_CONFIG_INFO, "{}")))
            + f"\n)\n* on ({PLACE_LABELS}) group_left (model_name) {seen}",
            help="1 for every engine, with the settings of its cache and its model as labels",
        ),
    )


def selectors(metric: Metric, *, part: str = "", matcher: str = "") -> tuple[str, ...]:
    """Selectors of every spelling of a metric, today's name first.

    The bare names that NIM writes belong to any program, so they count only where a model is named.
    """
    found = []
    for name in (metric.name, *metric.former):
        for prefix in PREFIXES:
            matchers = ",".join(filter(None, (matcher, "" if prefix else 'model_name!=""')))
            found.append(f"{prefix}{name}{part}" + (f"{{{matchers}}}" if matchers else ""))
    return tuple(found)


def joined(metric: Metric, call: str, *, part: str = "", matcher: str = "") -> str:
    """`call` (a template with one {}) of the spelling that an engine has. Of several spellings the first wins."""
    return "\nor ".join(call.replace("{}", selector) for selector in selectors(metric, part=part, matcher=matcher))


def _per_engine(metric: Metric, call: str, *, part: str = "", matcher: str = "") -> str:
    """One series per engine: spellings joined, the split label summed away, model_name and engine settled."""
    expr = joined(metric, call, part=part, matcher=matcher)
    if metric.split:
        expr = _wrap(f"{metric.combine} without ({metric.split}) (", expr, ")")
    for settle in (_name_the_model, _number_the_engine):
        expr = settle(expr)
    return expr


def _name_the_model(expr: str) -> str:
    """`model_name`, or `model` where there is no model_name (Triton)."""
    both = _wrap("label_join(", expr, ', "model_name", ";", "model_name", "model")')
    return _wrap("label_replace(", both, ', "model_name", "$1$2", "model_name", "(.+);.*|;(.*)")')


def _number_the_engine(expr: str) -> str:
    """Engine 0 where there is no engine label (vLLM before 0.8, NIM)."""
    return _wrap("label_replace(", expr, ', "engine", "0", "engine", "")')


def _wrap(opening: str, expr: str, closing: str) -> str:
    return f"{opening}\n{indented(expr)}\n{closing}"


def config_labels(first: str) -> str:
    """A label list: these, then `CONFIG_LABELS`, on lines of bearable length."""
    return f"{first},\n" + textwrap.fill(", ".join(CONFIG_LABELS), width=100)


def indented(expr: str) -> str:
    return "\n".join(f"  {line}" for line in expr.split("\n"))
