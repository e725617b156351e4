"""The cases that vLLM's own planning code computed (tests/data/budget/kv_truth.json), and how to ask for them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvwatch.engine import Device, EngineConfig
from kvwatch.model import ModelSpec, read_model

TRUTH_FILE = Path(__file__).parent / "data" / "budget" / "kv_truth.json"
TRUTH_VERSION = (0, 32, 0)
GIB = 1 << 30


@cache
def truth() -> dict[str, Any]:
    with TRUTH_FILE.open(encoding="utf-8") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


@cache
def model(name: str) -> ModelSpec:
    return read_model(truth()["configs"][name], name=name)


def device(label: str) -> Device:
    gpu = truth()["gpus"][label]
    return Device(name=gpu["name"], memory_bytes=gpu["memory_bytes"], capability=tuple(gpu["capability"]))


def engine(case: dict[str, Any], gpu: str, **flags: Any) -> EngineConfig:
    """The flags of one case."""
    named: dict[str, Any] = {
        "vllm_version": TRUTH_VERSION,
        "device": device(gpu),
        "tensor_parallel_size": case.get("tp", 1),
        "pipeline_parallel_size": case.get("pp", 1),
        "decode_context_parallel_size": case.get("dcp", 1),
        "kv_cache_dtype": case.get("kv_dtype", "auto"),
        "block_size": case.get("block_size"),
        "max_model_len": case.get("max_model_len"),
        "enable_prefix_caching": case.get("prefix"),
        **case.get("extra", {}),
    }
    return EngineConfig(**{**named, **flags})
