"""Workloads on which the simulator is compared with vLLM's own scheduler, as mappings, and how to run the latter."""

import json
import os
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvwatch.simulation import CostModel, Request, SchedulerSettings, SimulationResult, StepTrace
from kvwatch.simulator import simulate

ORACLE = Path(__file__).parent.parent / "tools" / "scheduler_oracle.py"
Case = dict[str, Any]
Steps = list[list[Any]]


def oracle_python() -> str:
    """The Python that has vLLM; it may not exist."""
    default = "~/.cache/kvwatch/vllm-0.32.0/bin/python"
    return str(Path(os.environ.get("KVWATCH_VLLM_PYTHON", default)).expanduser())


def run_oracle(python: str, cases: list[Case]) -> list[dict[str, Any]]:
    """The traces of vLLM's own scheduler."""
    result = subprocess.run(
        [python, str(ORACLE)],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"steps"')]


def simulated(case: Case) -> tuple[Steps, SimulationResult]:
    """The simulator's trace of a case, in the oracle's form."""
    steps: Steps = []

    def trace(step: StepTrace) -> None:
        steps.append([[list(pair) for pair in step.scheduled], sorted(step.preempted), step.free_blocks])

    result = simulate(
        SchedulerSettings(**case["engine"]), CostModel(**case["cost"]), requests_of(case), case.get("clients"), trace
    )
    return steps, result


def requests_of(case: Case) -> tuple[Request, ...]:
    return tuple(Request(**item) for item in case["requests"])


def trace_hash(steps: Iterable[Any]) -> bytes:
    """A trace in bytes, for hashing."""
    return json.dumps(list(steps), separators=(",", ":")).encode()


def closed_loop_case(**engine: Any) -> Case:
    """84 requests of 28 clients in 2048 blocks of 16 tokens: it thrashes with 32 seats and fits with 16."""
    rng = random.Random(11)
    return {
        "engine": {"num_gpu_blocks": 2048, "block_size": 16, "enable_prefix_caching": False, **engine},
        "cost": {"step_seconds": 0.02, "per_token_seconds": 1e-5, "per_kv_token_seconds": 1e-8},
        "clients": 28,
        "requests": [
            {"prompt_tokens": rng.randint(900, 1500), "output_tokens": rng.randint(600, 1200)} for _ in range(84)
        ],
    }


def random_case(seed: int) -> Case:
    """A small engine under pressure: few blocks, so that requests queue, are preempted and evict prefixes."""
    rng = random.Random(seed)
    block_size = rng.choice([16, 16, 32, 64, 128])
    seats = rng.choice([1, 2, 4, 8, 16, 32])
    longest_prompt = rng.choice([40, 200, 600, 1500])
    longest_output = rng.choice([2, 30, 120, 400])
    count = rng.randint(3, 40)
    prefixes = {f"p{i}": rng.randint(1, longest_prompt) for i in range(rng.randint(1, 3))}
    shares = rng.random() < 0.6
    requests = []
    at_seconds = 0.0
    for _ in range(count):
        request: dict[str, Any] = {
            "prompt_tokens": rng.randint(1, longest_prompt),
            "output_tokens": rng.randint(1, longest_output),
        }
        if shares and rng.random() < 0.7:
            name = rng.choice(list(prefixes))
            shared = min(prefixes[name], request["prompt_tokens"]) if rng.random() < 0.3 else prefixes[name]
            request |= {"prefix": name, "prefix_tokens": shared}
            request["prompt_tokens"] = max(request["prompt_tokens"], shared)
        request["at_seconds"] = round(at_seconds, 3)
        at_seconds += rng.expovariate(1.0) * rng.choice([0.0, 0.05, 0.3, 2.0])
        requests.append(request)
    needed = blocks_of_the_longest(requests, block_size)
    engine: dict[str, Any] = {
        "num_gpu_blocks": 1 + needed + rng.choice([0, 1, needed // 2, needed, 3 * needed]),
        "block_size": block_size,
        "max_model_len": 4096,
        "max_num_batched_tokens": max(seats, rng.choice([16, 64, 256, 1024, 2048])),
        "max_num_seqs": seats,
        "watermark": rng.choice([0.0, 0.0, 0.01, 0.05, 0.1, 0.2]),
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "enable_prefix_caching": rng.random() < 0.6,
    }
    if rng.random() < 0.2:
        engine["max_num_active_seqs"] = rng.randint(1, seats)
    if rng.random() < 0.25:
        engine["long_prefill_token_threshold"] = rng.choice([8, 50, 300])
        engine["long_prefill_token_threshold_adaptive"] = rng.random() < 0.5
    case: Case = {
        "engine": engine,
        "cost": {
            "step_seconds": rng.choice([0.02, 0.0137]),
            "per_token_seconds": rng.choice([0.0, 1e-5, 3.3e-5]),
            "per_kv_token_seconds": rng.choice([0.0, 1e-8, 1.7e-7]),
        },
        "requests": requests,
    }
    if rng.random() < 0.5:
        case["clients"] = rng.randint(1, 30)
    elif rng.random() < 0.2:
        rng.shuffle(requests)  # a file need not be ordered by time
    return case


def held_up_case(seed: int) -> Case:
    """A token budget so small that, with a limit on long prefills, decoding requests may go without a token."""
    rng = random.Random(seed)
    seats = rng.choice([4, 8, 16])
    budget = max(seats, rng.choice([8, 12, 20, 40]))
    requests: list[dict[str, Any]] = []
    at_seconds = 0.0
    for _ in range(rng.randint(5, 30)):
        prompt = rng.choice([rng.randint(1, 8), rng.randint(1, 40), rng.randint(100, 600)])
        request: dict[str, Any] = {
            "prompt_tokens": prompt,
            "output_tokens": rng.randint(1, 60),
            "at_seconds": round(at_seconds, 3),
        }
        if rng.random() < 0.5 and prompt >= 16:
            request |= {"prefix": "p", "prefix_tokens": rng.randint(16, prompt)}
        at_seconds += rng.choice([0, 0, 0.02, 0.2])
        requests.append(request)
    needed = blocks_of_the_longest(requests, 16)
    return {
        "engine": {
            "num_gpu_blocks": 1 + needed + rng.choice([0, 2, needed // 2, needed]),
            "block_size": 16,
            "max_model_len": 4096,
            "max_num_batched_tokens": budget,
            "max_num_seqs": seats,
            "watermark": rng.choice([0.0, 0.1]),
            "scheduler_reserve_full_isl": rng.random() < 0.3,
            "enable_prefix_caching": rng.random() < 0.7,
            "long_prefill_token_threshold": rng.choice([0, budget - 1, budget - 2, budget // 2, 3]),
            "long_prefill_token_threshold_adaptive": rng.random() < 0.3,
        },
        "cost": {"step_seconds": 0.02, "per_token_seconds": 1e-4, "per_kv_token_seconds": 0.0},
        "requests": requests,
    }


def hybrid_case(seed: int) -> Case:
    """A full-attention group and a sliding window beside it, in a pool that is too small for the load."""
    rng = random.Random(seed)
    window = rng.choice([128, 512, 1024])
    requests = [{"prompt_tokens": rng.randint(200, 2000), "output_tokens": rng.randint(100, 900)} for _ in range(50)]
    return {
        "engine": {
            "num_gpu_blocks": rng.choice([700, 1000, 1500]),
            "block_size": 16,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 32,
            "watermark": rng.choice([0.0, 0.05]),
            "enable_prefix_caching": seed % 2 == 1,
            "sliding_window": window,
        },
        "cost": {"step_seconds": 0.02},
        "clients": 20,
        "requests": requests,
    }


def blocks_of_the_longest(requests: list[dict[str, Any]], block_size: int) -> int:
    longest = max(item["prompt_tokens"] + item["output_tokens"] - 1 for item in requests)
    return int(-(-longest // block_size))
