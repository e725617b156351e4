"""The budget of a running engine: what a flag gives, what its page says, and where the two pools differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvwatch.budget import predict
from kvwatch.capacity import EngineFacts, live_capacity
from kvwatch.cli import cli
from kvwatch.engine import Device, EngineConfig
from kvwatch.model import read_model
from kvwatch.reconcile import differences
from kvwatch.snapshot import CacheConfig

THRASH = str(Path(__file__).parent / "data" / "captures" / "thrash")
# The model of the recorded engine: 2 layers x 2 KV heads x 64, 1,024 bytes per token at bfloat16.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 264,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def engine_of(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["check", THRASH, "--output", "json", *arguments])
    assert result.exit_code == 1, result.output
    engine: dict[str, Any] = json.loads(result.stdout)["engines"][0]
    return engine


def finding(engine: dict[str, Any], check: str) -> dict[str, Any]:
    return next(entry for entry in engine["findings"] if entry["check"] == check)


def test_without_a_model_there_is_no_budget_and_the_check_says_what_to_give() -> None:
    engine = engine_of()
    assert engine["budget"] is None
    assert finding(engine, "capacity_below_budget")["status"] == "unknown"
    assert "--model" in finding(engine, "capacity_below_budget")["summary"]


def test_the_page_fills_in_the_settings_that_no_flag_gives(model: str) -> None:
    engine = engine_of("--model", model)
    budget = engine["budget"]
    assert (256, 128, 32, 8.0) == (
        budget["num_gpu_blocks"],
        budget["block_size_tokens"],
        budget["blocks_per_max_len_request"],
        budget["max_concurrency"],
    )
    assert finding(engine, "capacity_below_budget")["status"] == "ok"


def test_a_flag_that_differs_from_the_running_engine_is_named(model: str) -> None:
    judged = finding(
        engine_of("--model", model, "--gpu", "cpu", "--num-gpu-blocks-override", "300"), "capacity_below_budget"
    )
    assert judged["status"] == "warning"
    assert "num_gpu_blocks_override is 256 on the engine and 300 in the budget" in judged["summary"]
    assert -0.1467 == judged["evidence"]["capacity_deviation_ratio"]


def compared(page: CacheConfig, **flags: Any) -> list[str]:
    engine = EngineConfig(max_model_len=4096, device=Device(name="cpu", memory_bytes=0), **flags)
    budget = predict(read_model(TINY, name="tiny"), engine)
    return [
        str(difference)
        for difference in differences(page, live_capacity(page, EngineFacts(max_model_len=4096)), budget)
    ]


def test_a_pool_that_no_setting_explains_differs_in_memory() -> None:
    gib = 1 << 30
    page = CacheConfig(num_gpu_blocks=8192, block_size=128, gpu_memory_utilization=0.9)
    assert ["kv_cache_bytes_per_rank is 1.00 GiB on the engine and 2.00 GiB in the budget"] == compared(
        page, kv_cache_memory_bytes=2 * gib
    )


def test_pools_that_agree_differ_in_nothing() -> None:
    page = CacheConfig(num_gpu_blocks=8192, block_size=128)
    assert [] == compared(page, kv_cache_memory_bytes=1 << 30)


def test_another_layout_is_named_before_memory_is_blamed() -> None:
    page = CacheConfig(num_gpu_blocks=8192, block_size=64, kv_cache_max_concurrency=128.0, kv_cache_size_tokens=524288)
    assert [
        "block_size is 64 on the engine and 128 in the budget",
        "blocks_per_max_len_request is 64 on the engine and 32 in the budget",
    ] == compared(page, kv_cache_memory_bytes=1 << 30)


def test_a_model_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    result = CliRunner().invoke(cli, ["check", THRASH, "--model", str(broken)])
    assert result.exit_code == 2
    assert "config.json" in result.stderr
