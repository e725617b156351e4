#!/usr/bin/env python3
"""Record decisions of vLLM's scheduler as golden traces, so that tests without vLLM compare with them.

    python tools/record_simulator_golden.py [PYTHON_WITH_VLLM]

Writes tests/data/simulator/traces.jsonl.gz (cases with their traces) and closed_loop.json (hashes of long traces).
"""

import gzip
import hashlib
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

from simulator_cases import (  # noqa: E402 -- the path must be set first
    closed_loop_case,
    held_up_case,
    oracle_python,
    random_case,
    run_oracle,
    trace_hash,
)

DATA = Path(__file__).parent.parent / "tests" / "data" / "simulator"
SEEDS = (*range(24), *(seed for seed in range(24, 200) if random_case(seed)["engine"].get("max_num_active_seqs")))[:30]
HELD_UP_SEEDS = (625, 664, 729, 983, 1817, 3724)


def main() -> None:
    python = sys.argv[1] if len(sys.argv) > 1 else oracle_python()
    cases = [random_case(seed) for seed in SEEDS] + [held_up_case(seed) for seed in HELD_UP_SEEDS]
    long_cases = [
        closed_loop_case(max_num_seqs=seats, watermark=watermark)
        for seats, watermark in ((32, 0.0), (16, 0.0), (32, 0.05), (18, 0.02))
    ]
    answers = run_oracle(python, cases + long_cases)
    lines = "".join(
        json.dumps({"case": case} | {k: answer[k] for k in ("steps", "end_seconds")}, separators=(",", ":")) + "\n"
        for case, answer in zip(cases, answers, strict=False)
    )
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / "traces.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    hashes = [
        {
            "max_num_seqs": case["engine"]["max_num_seqs"],
            "watermark": case["engine"]["watermark"],
            "steps": len(answer["steps"]),
            "preemptions": sum(len(preempted) for _, preempted, _ in answer["steps"]),
            "end_seconds": answer["end_seconds"],
            "sha256": hashlib.sha256(trace_hash(answer["steps"])).hexdigest(),
        }
        for case, answer in zip(long_cases, answers[len(cases) :], strict=True)
    ]
    (DATA / "closed_loop.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
