"""Start-up lines that people posted (tests/data/budget/sizing_truth.csv): what vLLM logged against the prediction.

A row with the KV-cache memory is predicted from it; the memory is logged to two decimals, so the prediction is a range.
A row without it but with the number of blocks is predicted from that. Every other row is listed with the reason.
"""

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvwatch.budget import Budget, DoesNotFit, plan_for, predict, predict_from
from kvwatch.engine import Device, EngineConfig
from kvwatch.model import ModelSpec, read_model
from kvwatch.versions import Version

HERE = Path(__file__).parent
GIB = 1 << 30
with (HERE / "data" / "budget" / "sizing_truth.csv").open(encoding="utf-8", newline="") as _file:
    ROWS = list(csv.DictReader(_file))
KNOWN = json.loads((HERE.parent / "kvwatch" / "data" / "models.json").read_text(encoding="utf-8"))
RTX_5090 = Device(name="NVIDIA GeForce RTX 5090", memory_bytes=32 * GIB, capability=(12, 0))

# Rows (counted from 0) that cannot be compared, and why.
UNUSABLE = {
    0: "the model is not named",
    3: "no memory and no length posted",
    4: "no memory and no length posted",
    5: "no memory and no length posted",
    6: "no memory and no length posted",
    8: "the memory is one worker's; the smaller one of another rank decided",
    12: "no memory posted",
    13: "no memory posted",
    16: "the memory is one node's; the smaller one of the other node decided",
    17: "max_model_len is not posted",
    18: "max_model_len is not posted",
    36: "DeepSeek-V4 is refused: its caches are not modelled",
    37: "DeepSeek-V4 is refused: its caches are not modelled",
    38: "DeepSeek-V4 is refused: its caches are not modelled",
    39: "DeepSeek-V4 is refused: its caches are not modelled",
    40: "DeepSeek-V4 is refused: its caches are not modelled",
    41: "DeepSeek-V4 is refused: its caches are not modelled",
    42: "the config of gemma-4-31B-it is not at hand",
    43: "neither memory nor blocks nor the batch limit are posted",
    50: "GLM-5.3-Flash is refused: its caches are not modelled",
    51: "GLM-5.3-Flash is refused: its caches are not modelled",
    55: "the model is not named",
    57: "the model is not named",
    58: "the model is not named",
    79: "only one stage of an unnamed model is described",
    82: "the model is not named",
}


@dataclass(frozen=True, kw_only=True)
class Also:
    """What a row says in words rather than in its columns."""

    model: str | None = None
    config: dict[str, Any] | None = None
    version: Version | None = None
    num_gpu_blocks: int | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()


MTP = {"num_speculative_tokens": 1, "speculative_method": "mtp"}
_GLM_51 = {
    19: {}, 20: MTP, 21: {}, 22: MTP, 23: {}, 24: MTP, 25: {}, 26: MTP, 27: MTP, 28: {},
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "max_position_embeddings": 128000,
}
ALSO: dict[int, Also] = {
    **{line: Also(model="zai-org/GLM-5.1", flags=flags) for line, flags in _GLM_51.items()},
    14: Also(model="deepseek-ai/DeepSeek-V3.2", num_gpu_blocks=1214464 // 64),
    29: Also(model="zai-org/GLM-5.2", flags={"decode_context_parallel_size": 4}),
    **{line: Also(model="moonshotai/Kimi-K2-Instruct") for line in (30, 31)},
    32: Also(model="moonshotai/Kimi-K2-Instruct", num_gpu_blocks=1115136 // 64),
    33: Also(model="moonshotai/Kimi-K2-Instruct", num_gpu_blocks=1753088 // 128),
    34: Also(model="moonshotai/Kimi-K2-Instruct", num_gpu_blocks=1507120 // 16),
    35: Also(
        model="moonshotai/Kimi-K2-Instruct", num_gpu_blocks=3621504 // 128, flags={"decode_context_parallel_size": 8}
    ),
    # tokens = blocks // 4 groups × 784
    44: Also(model="Qwen/Qwen3.5-27B", num_gpu_blocks=1487),
    # 425 and 424 blocks are the only whole numbers that give the posted tokens
    45: Also(
        model="Qwen/Qwen3.5-27B", num_gpu_blocks=425, flags={"num_speculative_tokens": 3, "speculative_method": "mtp"}
    ),
    46: Also(
        model="Qwen/Qwen3.5-27B", num_gpu_blocks=424, flags={"num_speculative_tokens": 3, "speculative_method": "mtp"}
    ),
    47: Also(model="Qwen/Qwen3.5-35B-A3B"),
    48: Also(model="Qwen/Qwen3.5-35B-A3B"),
    49: Also(model="Qwen/Qwen3.5-27B", ignore=("num_gpu_blocks",)),  # the author's own estimate of blocks
    # the checkpoint asks for fp8 KV, prefix caching was switched on, and 52 speculates
    52: Also(model="Qwen/Qwen3.5-122B-A10B", flags={"kv_cache_dtype": "fp8", "enable_prefix_caching": True, **MTP}),
    53: Also(model="Qwen/Qwen3.5-122B-A10B", flags={"kv_cache_dtype": "fp8", "enable_prefix_caching": True}),
    54: Also(
        model="Qwen/Qwen3.5-27B",
        flags={"num_speculative_tokens": 3, "speculative_method": "mtp", "device": RTX_5090},
    ),
    56: Also(config=LFM2, version=(0, 15, 0), num_gpu_blocks=40738),
    68: Also(ignore=("max_concurrency",)),  # the posted tokens and concurrency come from different starts
    74: Also(num_gpu_blocks=67856 // 16),
    75: Also(num_gpu_blocks=803600 // 16),
}


def _model(line: int) -> ModelSpec:
    row, also = ROWS[line], ALSO.get(line, Also())
    if also.config is not None:
        return read_model(also.config)
    if also.model is not None:
        return read_model(KNOWN[also.model]["config"], name=also.model)
    shape = re.search(r"(\d+)L[^\d]{0,40}?(\d+)kv hd(\d+)", row["arch notes"])
    assert shape is not None, row["arch notes"]
    layers, kv_heads, head_dim = (int(number) for number in shape.groups())
    return read_model(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "num_attention_heads": kv_heads * 8,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_size": kv_heads * 8 * head_dim,
            "max_position_embeddings": 1 << 24,
        }
    )


def _version(line: int) -> Version:
    given = ALSO.get(line, Also()).version
    found = re.search(r"0\.(\d+)(?:\.(\d+))?", ROWS[line]["vllm_version"].replace("0.2x", "0.24"))
    if given is not None or found is None:
        return given or (0, 24, 0)
    return 0, int(found[1]), int(found[2] or 0)


def _engine(line: int) -> EngineConfig:
    row = ROWS[line]
    shards = re.search(r"dcp=(\d+)", row["arch notes"])
    flags: dict[str, Any] = {
        "vllm_version": _version(line),
        "tensor_parallel_size": int(row["tp"].split()[0]),
        "pipeline_parallel_size": int(row["pp"]),
        "decode_context_parallel_size": int(shards[1]) if shards else 1,
        "kv_cache_dtype": row["kv_dtype"].split(" -> ")[-1].split("(")[0],
        "max_model_len": int(row["max_model_len"]) if row["max_model_len"] else 4096,
    }
    return EngineConfig(**{**flags, **ALSO.get(line, Also()).flags})


def _observed(line: int) -> dict[str, float]:
    columns = {
        "num_gpu_blocks": "num_gpu_blocks",
        "capacity_tokens": "kv_cache_tokens",
        "max_concurrency": "max_concurrency",
    }
    skipped = set(ALSO.get(line, Also()).ignore)
    if not ROWS[line]["max_model_len"]:
        skipped.add("max_concurrency")
    return {
        name: float(ROWS[line][column])
        for name, column in columns.items()
        if ROWS[line][column] and name not in skipped
    }


def _figures(budget: Budget) -> dict[str, float]:
    return {
        "num_gpu_blocks": budget.num_gpu_blocks,
        "capacity_tokens": budget.capacity_tokens,
        "max_concurrency": budget.max_concurrency,
    }


# The fork of this row stores about 49,740 bytes per token, which is no layout of vLLM's; its blocks are compared.
OTHER_LAYOUT = {29}
FROM_MEMORY = [
    line
    for line, row in enumerate(ROWS)
    if line not in UNUSABLE and line not in OTHER_LAYOUT and row["available_kv_gib"]
]
FROM_BLOCKS = [
    line
    for line, row in enumerate(ROWS)
    if line not in UNUSABLE
    and line not in FROM_MEMORY
    and (row["num_gpu_blocks"] or ALSO.get(line, Also()).num_gpu_blocks)
]


def test_every_row_is_compared_or_listed_with_its_reason() -> None:
    assert sorted([*UNUSABLE, *FROM_MEMORY, *FROM_BLOCKS]) == list(range(len(ROWS)))
    assert len(FROM_MEMORY) + len(FROM_BLOCKS) == 57


@pytest.mark.parametrize("line", FROM_MEMORY, ids=lambda line: f"{line}-{ROWS[line]['model']}")
def test_the_logged_memory_predicts_the_logged_blocks_tokens_and_concurrency(line: int) -> None:
    planned = plan_for(_model(line), _engine(line))
    logged = float(ROWS[line]["available_kv_gib"])
    half_a_digit = 0.0051  # vLLM before 0.14 printed two decimals, later ones at most two
    low, high = (
        _figures(predict_from(planned, int((logged + sign * half_a_digit) * GIB), check_fit=False)) for sign in (-1, 1)
    )
    for name, value in _observed(line).items():
        printed = 0.0051 if name == "max_concurrency" else 0.0
        assert low[name] - printed <= value <= high[name] + printed, name


@pytest.mark.parametrize("line", FROM_BLOCKS, ids=lambda line: f"{line}-{ROWS[line]['model']}")
def test_the_logged_blocks_predict_the_logged_tokens_and_concurrency(line: int) -> None:
    blocks = ALSO.get(line, Also()).num_gpu_blocks or int(ROWS[line]["num_gpu_blocks"])
    engine = EngineConfig(**{**_fields(_engine(line)), "num_gpu_blocks_override": blocks})
    found = _figures(predict(_model(line), engine))
    for name, value in _observed(line).items():
        assert abs(found[name] - value) <= (0.0051 if name == "max_concurrency" else 0), name


def _fields(engine: EngineConfig) -> dict[str, Any]:
    return {name: getattr(engine, name) for name in EngineConfig.__dataclass_fields__}


def test_a_refusal_that_was_posted_names_the_same_numbers() -> None:
    with pytest.raises(DoesNotFit) as refused:
        predict(_model(15), _engine(15), int(float(ROWS[15]["available_kv_gib"]) * GIB))
    assert round(refused.value.needed_bytes / GIB, 2) == 23.25
    assert abs(refused.value.estimated_max_model_len - 190272) <= 128  # the memory is known to two decimals


def test_llama_4_before_the_hybrid_manager_needed_24_gib() -> None:
    config = KNOWN["meta-llama/Llama-4-Scout-17B-16E-Instruct"]["config"]
    engine = EngineConfig(vllm_version=(0, 8, 3), tensor_parallel_size=8, max_model_len=1048576)
    planned = plan_for(read_model(config), engine)
    assert planned.block_bytes_per_rank * planned.blocks_at(1048576) == 24 * GIB


def test_short_convolutions_are_padded_as_the_log_says() -> None:
    planned = plan_for(_model(56), _engine(56))
    state = next(group for group in planned.groups if group.kind == "short_conv").pages[0]
    assert (state.page_bytes - state.payload_bytes) / state.payload_bytes == 3.0  # "padding by 300 %"
    assert [group.num_layers for group in planned.groups] == [5, 5, 6]  # "2 padding layers"
