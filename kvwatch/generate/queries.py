"""PromQL for panels: one expression per fact, for every spelling of its metric and every selection in the dashboard.

An expression reads vLLM's own series, not recording rules, so a dashboard works on a Prometheus that only scrapes vLLM.
Its result has one series per engine, with the labels of `ENGINE_LABELS` that the engine's series have.
"""

from kvwatch.finding import Status
from kvwatch.recording import duration, joined, selectors
from kvwatch.render.prometheus import CHECK_STATUS, SCRAPE_SUCCESS
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    ADMISSION_REJECTIONS,
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    Metric,
)

SELECTED = 'job=~"$job",model_name=~"$model_name",instance=~"$instance",engine=~"$engine"'
"""The dashboard's selection. "All" is `.*`, which also matches an absent label: no engine before vLLM 0.8."""

# Where some are missing, the others tell engines apart. Triton writes `model` for `model_name`.
ENGINE_LABELS = ("cluster", "namespace", "pod", "job", "instance", "model_name", "model", "engine")
LEGEND = "{{instance}} {{engine}} {{model_name}}{{model}}"
ENGINE_LEGEND = "engine {{engine}}"
"""Where one instance is chosen."""

# One agent may watch many engines; beside each engine of a fleet stands one, and they all call theirs the same.
AGENT_LABELS = ("cluster", "namespace", "pod", "target", "model_name", "engine")
AGENT_LEGEND = "{{model_name}} {{target}} {{engine}} {{pod}}"

RATE = "$__rate_interval"
"""Range of a rate that is drawn over time; Grafana makes it span at least four scrapes."""

AGENT_STATUS = CHECK_STATUS
AGENT_SELECTED = 'pod=~"$pod",target=~"$target",model_name=~"$model_name",engine=~"$engine"'
"""The same selection among the agent's series, which name an engine's page `target`."""

TARGET_LABELS = "cluster, namespace, pod, target"
UNREADABLE = 4
"""A verdict beside the codes of kvwatch_check_status."""
NOTHING = -1
"""Stands for "no proposal": a value, since VictoriaMetrics takes NaN for no series."""
REMEMBERED = "1d"
"""How long an engine that is gone is missed, if it is still to be scraped."""

GENERATED_WHEN_PREEMPTED = 0.2
"""Share of its answer that a request has when it is preempted; see `recomputed_tokens`."""


def per_engine(expr: str, how: str = "sum", *keep: str) -> str:
    """One series per engine and per value of the labels to keep besides."""
    inner = "\n".join(f"  {line}" for line in expr.split("\n"))
    return f"{how} by ({', '.join((*keep, *ENGINE_LABELS))}) (\n{inner}\n)"


def value(metric: Metric, call: str = "{}", *keep: str, matcher: str = "") -> str:
    """A gauge as it stands, or under `call`, such as `avg_over_time({}[5m])`."""
    return per_engine(joined(metric, call, matcher=_selected(matcher)), metric.combine, *keep)


def rate(metric: Metric, over: str = RATE, *keep: str, part: str = "") -> str:
    """A counter per second. The rate is taken of every series before series are summed, so a restart stays one."""
    return per_engine(joined(metric, f"rate({{}}[{over}])", part=part, matcher=SELECTED), "sum", *keep)


def quantile(share: float, metric: Metric, over: str = RATE) -> str:
    """A quantile of a histogram; no series where nothing was observed."""
    return f"histogram_quantile({share:g}, {rate(metric, over, 'le', part='_bucket')}) >= 0"


def mean(metric: Metric, over: str = RATE) -> str:
    """The mean of a histogram's observations; no series where there were none."""
    return f"{rate(metric, over, part='_sum')}\n/ ({rate(metric, over, part='_count')} > 0)"


def preemptions_per_request(over: str = RATE) -> str:
    """Preemptions for each request that finished; +Inf where some were preempted and none finished."""
    return f"({rate(PREEMPTIONS, over)}\n/ {rate(REQUEST_SUCCESS, over)}) >= 0"


def prefix_hit_ratio(over: str = RATE) -> str:
    """Share of the looked-up prompt tokens that the prefix cache had."""
    return f"{rate(PREFIX_CACHE_HITS, over)}\n/ ({rate(PREFIX_CACHE_QUERIES, over)} > 0)"


def recomputed_tokens(over: str = RATE) -> str:
    """Tokens to compute again, per second: an estimate, since vLLM does not count them.

    A preempted request loses its prompt and what it had generated. It is the one admitted last, so that is little: a
    fifth of its answer. On six mixes of lengths played through kvwatch's simulator the estimate was 0.90 to 1.47 times
    the truth without prefix caching (median 1.04); with it, when blocks of the preempted survive, up to 3.9 times.
    """
    return (
        f"{rate(PREEMPTIONS, over)}\n* (\n{mean(REQUEST_PROMPT_TOKENS, over)}\n"
        f"+ {GENERATED_WHEN_PREEMPTED:g} * {mean(REQUEST_GENERATION_TOKENS, over)}\n)"
    )


def tokens(over: str = RATE) -> str:
    """Prompt and generated tokens per second."""
    return f"{rate(PROMPT_TOKENS, over)}\n+ {rate(GENERATION_TOKENS, over)}"


def full_with_a_queue(limits: Thresholds) -> str:
    """1 for each engine whose pool is full while requests wait, else 0."""
    over = duration(limits.alert_range_seconds)
    usage, waiting = value(KV_CACHE_USAGE, f"avg_over_time({{}}[{over}])"), value(REQUESTS_WAITING)
    return f"({usage} >=bool {limits.kv_cache_saturated_ratio:g})\n* ({waiting} >bool 0)"


def stalled(limits: Thresholds) -> str:
    """1 for each engine that holds requests and has given no token for twice the time of a stall, else 0."""
    over = duration(2 * limits.stall_seconds)
    held = f"{value(REQUESTS_RUNNING, f'min_over_time({{}}[{over}])')}\n+ " + value(
        REQUESTS_WAITING, f"min_over_time({{}}[{over}])"
    )
    return f"(({held}) >bool 0)\n* (({tokens(over)}) ==bool 0)"


def down() -> str:
    """1 for each engine of the last day whose target cannot be scraped now, 0 where it can.

    An engine that is down has no series of its own. No series where this Prometheus does not scrape it: see `up`.
    """
    known = value(REQUESTS_RUNNING, f"last_over_time({{}}[{REMEMBERED}])")
    up = 'min by (cluster, job, instance) (up{job=~"$job",instance=~"$instance"})'
    return f"1 + 0 * {known}\n- on (cluster, job, instance) group_left ()\n{up}"


def severities() -> str:
    """What alerts fire for, by how bad it is: 2 critical, 1 any other severity, as of `Status`."""
    worst = f"{Status.CRITICAL.code} * ({alerts('critical')} >bool 0)\nor {Status.WARNING.code} * ({alerts()} >bool 0)"
    return f"max without (severity) (\n{worst}\n)"


def alerts(severity: str = ".+") -> str:
    """Firing alerts of kvwatch's rules, by what they fired for; those the agent sends are in Alertmanager only.

    Rules over vLLM's series name the engine's instance, rules over the agent's series the agent's and its target.
    """
    firing = f'alertname=~"VLLM.+",alertstate="firing",severity=~"{severity}",model_name=~"$model_name"'
    return (
        "sum by (alertname, severity, job, instance, model_name, engine) (\n"
        f'  ALERTS{{{firing},target="",instance=~"$instance"}}\n)\n'
        "or sum by (alertname, severity, pod, target, model_name, engine) (\n"
        f'  ALERTS{{{firing},target!="",target=~"$target",pod=~"$pod"}}\n)'
    )


def rejections(over: str = RATE) -> str:
    """Requests refused by a queue limit, per second and reason. vLLM counts them per server, not per engine."""
    calls = joined(ADMISSION_REJECTIONS, f"rate({{}}[{over}])", matcher=SELECTED.rpartition(",")[0])
    return per_engine(calls, "sum", "reason")


def agent(name: str, *, by: tuple[str, ...] = (), matcher: str = "") -> str:
    """A figure of the kvwatch agent, one series per engine; no series without the agent."""
    return f"max by ({', '.join((*by, *AGENT_LABELS))}) ({name}{{{AGENT_SELECTED}}}{matcher and ' ' + matcher})"


def proposed(name: str) -> str:
    """A setting that the agent proposes, one series per engine: `NOTHING` where it leaves it as it is."""
    return f"{agent(name)}\nor 0 * {agent(AGENT_STATUS)} + {NOTHING}"


def not_ok() -> str:
    """Checks of the agent that say warning (1) or critical (2)."""
    return f"{agent(AGENT_STATUS, by=('check',))} > {Status.OK.code} < {Status.UNKNOWN.code}"


def verdict() -> str:
    """The agent's worst status per engine: 2 critical, 1 warning, 0 ok; 3 where every check is unknown, and
    `UNREADABLE` where the agent cannot read the engine's page.
    """
    unreadable = f'max by ({TARGET_LABELS}) ({SCRAPE_SUCCESS}{{pod=~"$pod",target=~"$target"}} == 0)'
    status = agent(AGENT_STATUS)
    judged = agent(AGENT_STATUS, matcher=f"!= {Status.UNKNOWN.code}")
    return f"{UNREADABLE} + 0 * {status}\n+ on ({TARGET_LABELS}) group_left ()\n{unreadable}\nor {judged}\nor {status}"


def names(metric: Metric) -> str:
    """A selector of all spellings at once, for the lists of values to choose from."""
    spelt = "|".join(one.partition("{")[0] for one in selectors(metric))
    return f'__name__=~"{spelt}"'


def _selected(matcher: str) -> str:
    return ",".join(filter(None, (SELECTED, matcher)))
