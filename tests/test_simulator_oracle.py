"""The simulator against vLLM's own scheduler: recorded traces, and the scheduler itself where vLLM is."""

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from simulator_cases import (
    closed_loop_case,
    held_up_case,
    hybrid_case,
    oracle_python,
    random_case,
    run_oracle,
    simulated,
    trace_hash,
)

from kvwatch.simulation import KvGroup

DATA = Path(__file__).parent / "data" / "simulator"
GOLDEN: list[dict[str, Any]] = [
    json.loads(line) for line in gzip.decompress((DATA / "traces.jsonl.gz").read_bytes()).splitlines()
]
CLOSED_LOOP: list[dict[str, Any]] = json.loads((DATA / "closed_loop.json").read_text())


@pytest.mark.parametrize("number", range(len(GOLDEN)))
def test_every_step_decides_what_vllm_decided(number: int) -> None:
    golden = GOLDEN[number]
    steps, result = simulated(golden["case"])
    assert steps == golden["steps"]
    assert result.makespan_seconds == pytest.approx(golden["end_seconds"], rel=1e-12)


@pytest.mark.parametrize("golden", CLOSED_LOOP, ids=lambda g: f"{g['max_num_seqs']}-{g['watermark']}")
def test_a_thrashing_engine_decides_what_vllm_decided(golden: dict[str, Any]) -> None:
    case = closed_loop_case(max_num_seqs=golden["max_num_seqs"], watermark=golden["watermark"])
    steps, result = simulated(case)
    assert (result.steps, result.preemptions) == (golden["steps"], golden["preemptions"])
    assert hashlib.sha256(trace_hash(steps)).hexdigest() == golden["sha256"]
    assert result.makespan_seconds == pytest.approx(golden["end_seconds"], rel=1e-12)


def test_the_recorded_cases_preempt_recompute_and_hit_prefixes() -> None:
    results = [simulated(golden["case"])[1] for golden in GOLDEN]
    assert sum(result.preemptions for result in results) > 200
    assert sum(result.recomputed_tokens for result in results) > 10_000
    assert sum(result.prefix_hit_tokens for result in results) > 10_000


@pytest.fixture
def vllm_python() -> str:
    python = oracle_python()
    if not Path(python).exists():
        reason = f"no vLLM at {python}; set KVWATCH_VLLM_PYTHON to a Python that has vLLM 0.32"
        if os.environ.get("KVWATCH_REQUIRE_PARTS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.mark.real
@pytest.mark.slow
def test_hundreds_of_random_workloads_are_decided_as_the_installed_vllm_decides_them(vllm_python: str) -> None:
    cases = [random_case(seed) for seed in range(1000, 1500)] + [held_up_case(seed) for seed in range(100)]
    different = [
        number
        for number, (case, answer) in enumerate(zip(cases, run_oracle(vllm_python, cases), strict=True))
        if simulated(case)[0] != answer["steps"]
    ]
    assert different == []


@pytest.mark.real
@pytest.mark.slow
def test_models_with_a_sliding_window_take_within_two_percent_of_the_steps(vllm_python: str) -> None:
    """Here the model is approximate: windows are held at their maximum, and prefixes hit in the full group alone."""
    cases = [hybrid_case(seed) for seed in range(16)]
    preemptions = {"vllm": 0, "simulator": 0}
    for case, answer in zip(cases, run_oracle(vllm_python, cases), strict=True):
        engine = dict(case["engine"])
        window = KvGroup(block_size=16, window_tokens=engine.pop("sliding_window"))
        result = simulated(case | {"engine": engine | {"groups": (KvGroup(block_size=16), window)}})[1]
        assert result.steps == pytest.approx(len(answer["steps"]), rel=0.02)
        preemptions["simulator"] += result.preemptions
        preemptions["vllm"] += sum(len(preempted) for _, preempted, _ in answer["steps"])
    assert preemptions["simulator"] == pytest.approx(preemptions["vllm"], rel=0.4)
