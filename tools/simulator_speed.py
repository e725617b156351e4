#!/usr/bin/env python3
"""Time vLLM's scheduler and the simulator on the same workload, in this one process. Run it with vLLM's Python.

The workload: 84 requests of 28 clients, prompts of 900-1500 and answers of 600-1200 tokens, 2048 blocks of 16 tokens.
Prints one JSON object per setting: the median seconds of each, and their ratio.
"""

import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import scheduler_oracle  # noqa: E402 -- the path must be set first
from simulator_cases import closed_loop_case, requests_of  # noqa: E402

from kvwatch.simulation import CostModel, SchedulerSettings  # noqa: E402
from kvwatch.simulator import simulate  # noqa: E402

ROUNDS = 5


def main() -> None:
    for seats, watermark in ((32, 0.0), (16, 0.0), (32, 0.05)):
        case = closed_loop_case(max_num_seqs=seats, watermark=watermark)
        settings, cost, requests = SchedulerSettings(**case["engine"]), CostModel(**case["cost"]), requests_of(case)
        vllm_seconds, simulator_seconds = [], []
        for _ in range(ROUNDS):
            vllm_seconds.append(scheduler_oracle.run(case, traced=False)["seconds"])
            started = time.perf_counter()
            result = simulate(settings, cost, requests, case["clients"])
            simulator_seconds.append(time.perf_counter() - started)
        vllm, simulator = statistics.median(vllm_seconds), statistics.median(simulator_seconds)
        sys.stdout.write(
            json.dumps(
                {
                    "max_num_seqs": seats,
                    "watermark": watermark,
                    "steps": result.steps,
                    "vllm_seconds": vllm,
                    "simulator_seconds": simulator,
                    "ratio": vllm / simulator,
                }
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
