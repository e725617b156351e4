"""Every case that vLLM 0.32's own code computed: blocks, bytes, concurrency, tokens, refusals, page sizes."""

import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import budget_cases
import parts
import pytest

from kvwatch.budget import DoesNotFit, predict
from kvwatch.kv_dtypes import latent_token_bytes, token_bytes

# In these the truth was computed without the libraries that vLLM picks first on such a GPU (FlashMLA for fp8 MLA on
# Hopper, FlashInfer on Blackwell), so the block size is that of a fallback kernel. It is taken from the case.
FALLBACK_KERNEL = {
    "DeepSeek-V3|tp1|pp1|dcp1|fp8|{}|H100-80GB": "TRITON_MLA instead of FLASHMLA (blocks of 64)",
    "DeepSeek-V2-Lite|tp2|pp1|dcp1|fp8|{}|H100-80GB": "TRITON_MLA instead of FLASHMLA (blocks of 64)",
    "DeepSeek-V3|tp8|pp1|dcp1|auto|{}|B200-180GB": "CUTLASS_MLA instead of FLASHINFER_MLA (blocks of 32)",
    "Qwen3-Next-80B-A3B|tp1|pp1|dcp1|auto|{}|B200-180GB": "FLASH_ATTN instead of FLASHINFER (steps of 16)",
}
CASES: list[dict[str, Any]] = budget_cases.truth()["cases"]
REFUSALS: list[dict[str, Any]] = budget_cases.truth()["startup_errors"]
PAGES: list[dict[str, Any]] = [row for row in budget_cases.truth()["direct_page_sizes"] if "error" not in row]


@pytest.mark.parametrize("row", CASES, ids=lambda row: row["id"])
def test_a_budget_equals_what_vllm_computed(row: dict[str, Any]) -> None:
    flags = {"block_size": row["block_size_after_platform"]} if row["id"] in FALLBACK_KERNEL else {}
    engine = budget_cases.engine(row["case"], row["gpu"], **flags)
    budget = predict(budget_cases.model(row["case"]["name"]), engine, row["available_kv_cache_memory_bytes_per_worker"])
    assert budget.num_gpu_blocks == row["num_blocks"]
    assert list(budget.plan.block_bytes) == row["bytes_per_block"]
    assert budget.blocks_per_max_len_request == row["blocks_per_request_at_max_model_len"]
    assert budget.max_concurrency == row["max_concurrency"]
    assert budget.capacity_tokens == row["kv_cache_size_tokens"]
    assert sorted((group.num_layers, group.blocks_per_max_len_request) for group in budget.groups) == sorted(
        (group["num_layers"], group["blocks"]) for group in _whole_model(row)
    )


def _whole_model(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The truth lists the first stage's layers; with pipeline stages only the number of groups is comparable."""
    if row["case"].get("pp", 1) == 1:
        groups: list[dict[str, Any]] = row["groups"]
        return groups
    engine = budget_cases.engine(row["case"], row["gpu"])
    budget = predict(budget_cases.model(row["case"]["name"]), engine, row["available_kv_cache_memory_bytes_per_worker"])
    assert len(budget.groups) == len(row["groups"])
    return [
        {"num_layers": ours.num_layers, "blocks": theirs["blocks"]}
        for ours, theirs in zip(budget.groups, row["groups"], strict=True)
    ]


@pytest.mark.parametrize("row", CASES, ids=lambda row: row["id"])
def test_vllms_defaults_are_found_from_the_gpu(row: dict[str, Any]) -> None:
    engine = budget_cases.engine(row["case"], row["gpu"])
    budget = predict(budget_cases.model(row["case"]["name"]), engine, row["available_kv_cache_memory_bytes_per_worker"])
    assert budget.engine.max_num_batched_tokens == row["max_num_batched_tokens"]
    assert budget.engine.max_num_seqs == row["max_num_seqs"]
    assert budget.engine.max_concurrent_batches == row["max_concurrent_batches"]
    assert budget.engine.max_model_len == row["max_model_len"]


def test_the_cases_with_a_fallback_kernel_are_the_only_ones_that_differ_without_help() -> None:
    differing = set()
    for row in CASES:
        budget = predict(
            budget_cases.model(row["case"]["name"]),
            budget_cases.engine(row["case"], row["gpu"]),
            row["available_kv_cache_memory_bytes_per_worker"],
        )
        if budget.num_gpu_blocks != row["num_blocks"]:
            differing.add(row["id"])
    assert differing == set(FALLBACK_KERNEL)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: str(row["case"]))
def test_a_refusal_names_vllms_numbers(row: dict[str, Any]) -> None:
    said = re.search(
        r"max seq len \((\d+)\), \(([\d.]+) GiB KV.*memory \(([\d.]+) GiB\).*maximum model length is (\d+)",
        row["error"],
    )
    assert said is not None
    with pytest.raises(DoesNotFit) as refused:
        predict(
            budget_cases.model(row["case"]["name"]),
            budget_cases.engine(row["case"], row["gpu"]),
            row["case"].get("avail", 40 * budget_cases.GIB),
        )
    assert refused.value.max_model_len == int(said[1])
    assert _gib(refused.value.needed_bytes) == float(said[2])
    assert _gib(refused.value.available_bytes) == float(said[3])
    assert refused.value.estimated_max_model_len == int(said[4])


def _gib(size_bytes: int) -> float:
    """vLLM's format_gib: two decimals."""
    return round(size_bytes / budget_cases.GIB, 2)


@pytest.mark.parametrize(
    "row", PAGES, ids=lambda row: f"{row['kv_cache_dtype']}-{row['head_size']}-{row['backend'].split()[0]}"
)
def test_bytes_per_token_equal_vllms_page_sizes(row: dict[str, Any]) -> None:
    dtype, size = row["kv_cache_dtype"], row["head_size"]
    if row["backend"].startswith("MLA"):
        assert latent_token_bytes(dtype, size, "bfloat16") * row["block_size"] == row["page_size_bytes"]
        return
    token = token_bytes(dtype, size, size, "bfloat16")
    assert token * row["num_kv_heads"] * row["block_size"] == row["page_size_bytes"]
    assert math.isclose(token, row["bytes_per_token_per_kv_head"])


@pytest.mark.real
@pytest.mark.slow
def test_the_installed_vllm_still_gives_the_stored_answers() -> None:
    python = Path(os.environ.get("KVWATCH_VLLM_PYTHON", "~/.cache/kvwatch/vllm-0.32.0/bin/python")).expanduser()
    if not python.is_file():
        parts.missing(f"vLLM 0.32 ({python})")
    oracle = Path(__file__).parents[1] / "tools" / "kv_oracle.py"
    done = subprocess.run(
        [str(python), str(oracle), "--only", "Llama-3.2-1B"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "2 cases, 0 drifted or failed, 0 missing"
