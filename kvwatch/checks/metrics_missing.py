"""The page lacks metrics that kvwatch needs to judge the KV cache.

## Meaning

One or more of the signals that every vLLM engine exports are not on its /metrics page: KV-cache usage, running and
waiting requests, preemptions. The page can be another server's (a router, a Triton or NIM front end), vLLM can run with
`--disable-log-stats`, a relabelling rule can drop series, or a new vLLM release can have renamed a metric.

## Impact

Every check that needs the missing metric answers `unknown`. An alert on a series that does not exist never fires, so
silence does not mean health.

## Diagnosis

- `kvwatch check URL` names the missing metrics.
- `curl -s URL/metrics | grep -E '^(ray_)?vllm[:_]'` shows what the server exports under which prefix.
- In Prometheus, `absent(vllm:kv_cache_usage_perc)` and `up` tell a missing series from a target that is down.
- A `scrape_interval` longer than half of the 5 minutes that a rate looks back gives it too few scrapes: preemptions
  then count as missing although the page has them.

## Mitigation

- Scrape the vLLM server itself, not the router or gateway in front of it.
- Start vLLM without `--disable-log-stats`.
- NVIDIA NIM of 2024 and Triton without its KV gauges do not export preemptions: kvwatch cannot judge them there.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import duration, signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, PREEMPTIONS, REQUESTS_RUNNING, REQUESTS_WAITING

REQUIRED = (KV_CACHE_USAGE, REQUESTS_RUNNING, REQUESTS_WAITING, PREEMPTIONS)


def evaluate(view: EngineView, _limits: Thresholds) -> Verdict:
    latest = view.window.latest
    missing = [metric.exposed for metric in REQUIRED if latest.get(metric) is None]
    if missing:
        return Verdict(
            status=Status.WARNING,
            summary=f"not exposed: {', '.join(missing)}; checks that need them cannot judge this engine",
            evidence={"missing": ", ".join(missing)},
        )
    return Verdict(status=Status.OK, summary="all metrics that kvwatch needs are exposed")


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    """The ways in which silence would pass for health: an engine lacks a series, a live target lost all of them, this
    Prometheus has no vLLM at all, or an agent cannot read its target.
    """
    seen = signals(limits)
    needed = ((seen.usage, KV_CACHE_USAGE), (seen.running, REQUESTS_RUNNING), (seen.waiting, REQUESTS_WAITING))
    lacking = [
        f'label_replace({seen.seen} unless {recorded}, "metric", "{metric.exposed}", "", "")'
        for recorded, metric in (*needed, (seen.preemptions, PREEMPTIONS))
    ]
    engines = f"group by (job, instance) ({seen.seen})"
    remembered = f"group by (job, instance) (last_over_time({seen.seen}[{duration(limits.alert_remembers_seconds)}]))"
    lost = f"(\n  {remembered}\n  unless {engines}\n  and on (job, instance) (up == 1)\n)"
    return (
        warning(
            limits,
            expr="\nor ".join((*lacking, lost, f"absent({seen.seen})")),
            summary=f"{{{{ with $labels.metric }}}}{ENGINE} does not expose {{{{ . }}}}"
            "{{ else }}{{ with $labels.instance }}{{ . }} answers but exposes no vLLM metric any more"
            "{{ else }}no vLLM engine is scraped{{ end }}{{ end }}",
        ),
        AlertRule(
            severity=Status.CRITICAL,
            expr="kvwatch_scrape_success == 0",
            for_seconds=limits.alert_for_seconds,  # a rollout leaves a target without an engine for minutes
            keep_firing_for_seconds=limits.alert_critical_keep_firing_seconds,
            summary="kvwatch cannot read {{ $labels.target }}",
        ),
    )


CHECK = Check(id="metrics_missing", docs=__doc__, evaluate=evaluate, alert=alert)
