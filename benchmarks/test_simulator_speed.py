"""How fast the simulator is: against vLLM's scheduler, and from a thousand requests to a million."""

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from simulator_cases import closed_loop_case, oracle_python, requests_of

from kvwatch.simulation import CostModel, Request, SchedulerSettings, SimulationResult
from kvwatch.simulator import simulate

SPEED = Path(__file__).parent.parent / "tools" / "simulator_speed.py"
COST = CostModel(step_seconds=0.02, per_token_seconds=1e-5, per_kv_token_seconds=1e-8)


@pytest.mark.real
def test_the_simulator_is_fifty_times_as_fast_as_the_scheduler_of_vllm() -> None:
    python = oracle_python()
    if not Path(python).exists():
        pytest.skip(f"no vLLM at {python}; set KVWATCH_VLLM_PYTHON to a Python that has vLLM 0.32")
    run = subprocess.run([python, str(SPEED)], capture_output=True, text=True, check=True, timeout=600)
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"max_num_seqs"')]
    for row in rows:
        print(row)
    assert len(rows) == 3
    assert min(row["ratio"] for row in rows) >= 50


@pytest.mark.parametrize("max_num_seqs", [32, 16])
def test_a_thrashing_closed_loop(benchmark: Any, max_num_seqs: int) -> None:
    case = closed_loop_case(max_num_seqs=max_num_seqs)
    settings, requests = SchedulerSettings(**case["engine"]), requests_of(case)
    result: SimulationResult = benchmark(simulate, settings, COST, requests, case["clients"])
    assert result.requests == 84


@pytest.mark.slow
@pytest.mark.parametrize("caching", [False, True])
def test_the_cost_of_a_request_does_not_grow_with_their_number(caching: bool) -> None:
    """A steady open loop on a busy engine, 1e3, 1e4, 1e5 and 1e6 requests: microseconds per request."""
    per_request = {count: seconds_per_request(count, caching=caching) for count in (10**3, 10**4, 10**5, 10**6)}
    for count, seconds in per_request.items():
        print(f"caching {caching}: {count} requests, {seconds * 1e6:.0f} us each")
    assert per_request[10**6] <= 2 * min(per_request[10**3], per_request[10**4])


def seconds_per_request(count: int, *, caching: bool) -> float:
    """The best of some runs, so that all sizes are measured equally long."""
    rng = random.Random(5)
    at_seconds, requests = 0.0, []
    for _ in range(count):
        at_seconds += rng.expovariate(2.0)
        shared: dict[str, Any] = {"prefix": f"p{rng.randrange(20)}", "prefix_tokens": 200} if caching else {}
        requests.append(
            Request(
                at_seconds=at_seconds,
                prompt_tokens=rng.randint(300, 900),
                output_tokens=rng.randint(50, 500),
                **shared,
            )
        )
    settings = SchedulerSettings(num_gpu_blocks=1500, max_num_seqs=64, enable_prefix_caching=caching)
    times = []
    for _ in range(max(1, min(5, 10**5 // count))):
        started = time.process_time()
        simulate(settings, COST, requests)
        times.append(time.process_time() - started)
    return min(times) / count
