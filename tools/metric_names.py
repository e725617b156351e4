"""Write kvwatch/data/vllm_metric_names.json, by which `kvwatch lint` judges names, from tests/data/vllm_metrics.csv.

usage: python tools/metric_names.py

The CSV lists every metric in the sources of the vLLM releases that were read, with the first and last release that has
it, and the releases that show it only under --show-hidden-metrics-for-version.
"""

import csv
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / "tests/data/vllm_metrics.csv"
OUTPUT = ROOT / "kvwatch/data/vllm_metric_names.json"
PREFIX = "vllm:"

# What to write in place of a metric that went, or, with a newer name, in place of it on older releases.
INSTEAD = {
    "avg_generation_throughput_toks_per_s": "rate(vllm:generation_tokens_total[5m])",
    "avg_prompt_throughput_toks_per_s": "rate(vllm:prompt_tokens_total[5m])",
    "cpu_cache_usage_perc": "vllm:kv_offload_cpu_cache_usage_perc, with KV offloading",
    "gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "gpu_prefix_cache_hit_rate": "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])",
    "gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "num_requests_swapped": "rate(vllm:num_preemptions_total[5m]): requests are no longer swapped but preempted",
    "spec_decode_draft_acceptance_rate": "rate(vllm:spec_decode_num_accepted_tokens_total[5m]) / "
    "rate(vllm:spec_decode_num_draft_tokens_total[5m])",
    "time_in_queue_requests": "vllm:request_queue_time_seconds",
    "time_per_output_token_seconds": "vllm:inter_token_latency_seconds (between tokens) or "
    "vllm:request_time_per_output_token_seconds (mean of a request)",
    "kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
    "prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
    "inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "request_queue_time_seconds": "vllm:time_in_queue_requests",
}
COMMON_LABELS = {"model_name", "engine"}
RATIO_ENDINGS = ("_usage_perc", "_hit_rate", "_acceptance_rate")
# Names under vLLM's prefix that others expose: the router of vllm-project/production-stack, and NVIDIA NIM.
ELSEWHERE = {
    "router of production-stack": (
        "avg_decoding_length",
        "avg_itl",
        "avg_latency",
        "current_qps",
        "healthy_pods_total",
        "input_tokens_total",
        "num_decoding_requests",
        "num_incoming_requests_total",
        "num_prefill_requests",
        "output_tokens_total",
        "request_errors_total",
        "request_latency_seconds_bucket",
        "request_latency_seconds_count",
        "request_latency_seconds_sum",
        "routing_decisions_total",
    ),
    "NVIDIA NIM": ("num_request_max",),
}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def catalogue() -> dict[str, Any]:
    """Name -> type, first and last release, and where it tells something: hidden_from, instead, labels, ratio."""
    metrics: dict[str, dict[str, Any]] = {}
    with CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name = row["name"].removeprefix(PREFIX)
            found = metrics.setdefault(name, {"type": row["type"], "first": row["first"], "last": row["last"]})
            found["first"] = min(found["first"], row["first"], key=version)
            if version(row["last"]) >= version(found["last"]):
                found["last"] = row["last"]
                hidden = sorted(row["hidden_in"].split(), key=version)
                found.pop("hidden_from", None)
                if hidden:
                    found["hidden_from"] = hidden[0]
            labels = {label for of in json.loads(row["labels"] or "{}").values() for label in of} - COMMON_LABELS
            if labels:
                found["labels"] = sorted({*labels, *found.get("labels", ())})
            if name in INSTEAD:
                found["instead"] = INSTEAD[name]
            if name.endswith(RATIO_ENDINGS):
                found["ratio"] = True
    releases = [entry[key] for entry in metrics.values() for key in ("first", "last")]
    return {
        "first_release": min(releases, key=version),
        "last_release": max(releases, key=version),
        "metrics": {name: metrics[name] for name in sorted(metrics)},
        "elsewhere": {name: whose for whose, names in ELSEWHERE.items() for name in names},
    }


def as_json() -> str:
    """One metric a line."""
    content = catalogue()
    metrics = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["metrics"].items())
    head = json.dumps({key: content[key] for key in ("first_release", "last_release", "elsewhere")}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "metrics": {{\n{metrics}\n }}\n}}\n'


if __name__ == "__main__":
    OUTPUT.write_text(as_json(), encoding="utf-8")
