"""Reports for tests of renderings, made by hand so that a changed threshold does not change them."""

from dataclasses import replace

from kvwatch.capacity import Capacity
from kvwatch.checks import ALL
from kvwatch.finding import Finding, Status, Verdict
from kvwatch.proposal import Recommendation, Withheld
from kvwatch.report import EngineReport, Report, Scrape, unseen_engine
from kvwatch.snapshot import EngineKey

TARGET = "http://10.0.0.7:8000"
KEY = EngineKey(target=TARGET, model_name="llama-3-8b", engine="0")
AT_SECONDS = 1_800_000_000.0

_VERDICTS = {
    "preemptions_sustained": Verdict(
        status=Status.CRITICAL,
        summary="0.66 preemptions per second, 0.83 per finished request",
        evidence={"preemptions": 25.0, "preemptions_per_second": 0.6579, "finished_requests": 30.0},
    ),
    "kv_cache_saturated": Verdict(
        status=Status.WARNING,
        summary="the pool was 98% full on average, with at least 7 requests waiting",
        evidence={"kv_cache_usage_ratio_mean": 0.98125},
    ),
    "concurrency_oversubscribed": Verdict(
        status=Status.WARNING,
        summary="27 requests in flight; the pool carries 17 of today's length",
        evidence={"requests_carried": 17, "usable_blocks": 255, "lengths_from": "window"},
    ),
    "capacity_below_budget": Verdict(
        status=Status.WARNING,
        summary="256 blocks, -10.0% against the 284 predicted",
        evidence={"num_gpu_blocks": 256, "budget_num_gpu_blocks": 284, "capacity_deviation_ratio": -0.0986},
    ),
    "context_exceeds_capacity": Verdict(status=Status.UNKNOWN, summary="max_model_len is not known"),
}


# These and no others, so that a new check changes no golden file.
CHECKS = ("metrics_missing", "engine_stalled", *_VERDICTS)


def findings(verdicts: dict[str, Verdict] | None = None) -> tuple[Finding, ...]:
    """One finding for each of `CHECKS`: those given, or those of the thrashing engine; the rest is ok."""
    chosen = _VERDICTS if verdicts is None else verdicts
    fine = Verdict(status=Status.OK, summary="fine")
    return tuple(check.finding(chosen.get(check.id, fine)) for check in ALL if check.id in CHECKS)


THRASHING = EngineReport(
    key=KEY,
    vllm_version="0.32.0",
    vllm_version_source="observed",
    at_seconds=AT_SECONDS,
    window_seconds=60.0,
    restarts=0,
    observed={
        "running_requests": 18.0,
        "waiting_requests": 10.0,
        "kv_cache_usage_ratio": 0.9882,
        "preemptions_per_second": 0.6579,
        "generation_tokens_per_second": 913.4,
        "time_to_first_token_p95_seconds": 17.04,
        "inter_token_latency_p95_seconds": 0.111,
    },
    capacity=Capacity(
        num_gpu_blocks=256,
        usable_blocks=255,
        block_size_tokens=128,
        capacity_tokens=32768,
        max_concurrency=8.0,
        max_model_len=4096,
        blocks_per_max_len_request=32,
        tokens_per_block=128,
        source=(("num_gpu_blocks", "observed"),),
    ),
    budget=None,
    findings=findings(),
    recommendations=(
        Recommendation(
            setting="gateway_max_in_flight",
            flag=None,
            current=27,
            proposed=17,
            apply="now",
            because=("preemptions_sustained", "kv_cache_saturated"),
            confidence="medium",
            predicted={"method": "analytic", "in_flight": 17, "demand_blocks": 250.1},
            note="cap the requests in flight on this engine at 17 in the gateway and answer 429 beyond that",
        ),
        Recommendation(
            setting="watermark",
            flag="--watermark 0.08",
            current=None,
            proposed=0.08,
            apply="restart",
            because=("preemptions_sustained",),
            confidence="medium",
            predicted={"method": "analytic", "reserve_blocks": 20},
            note="keeps 20 blocks for running requests to grow into before another is admitted",
        ),
    ),
    withheld=(Withheld(setting="max_num_seqs", reason="it is 17 already"),),
)

HEALTHY = replace(
    THRASHING,
    key=replace(KEY, target="http://10.0.0.8:8000"),
    observed={"running_requests": 3.0, "waiting_requests": 0.0, "kv_cache_usage_ratio": 0.12},
    findings=findings({}),
    recommendations=(),
    withheld=(),
)

_UNSEEN = unseen_engine(
    EngineKey(target="http://10.0.0.9:8000", model_name="", engine=""), "scrape failed: no connection", None
)
DOWN = replace(_UNSEEN, findings=tuple(finding for finding in _UNSEEN.findings if finding.check in CHECKS))


def scrape(target: str, failure: str | None = None) -> Scrape:
    return Scrape(target=target, at_seconds=AT_SECONDS, duration_seconds=0.004, failure=failure)


def report_of(*engines: EngineReport) -> Report:
    """A report of these engines, in this order."""
    return Report(
        window_seconds=60.0,
        engines=engines,
        scrapes=tuple(
            scrape(engine.key.target, None if engine.observed else engine.findings[0].summary) for engine in engines
        ),
    )


FLEET = report_of(THRASHING, DOWN, HEALTHY)
