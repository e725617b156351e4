"""--quantization and the checkpoint: what vLLM 0.32.0 answered for every pair of them."""

import json
from pathlib import Path
from typing import Any

import budget_cases
import pytest
from click.testing import CliRunner, Result

from kvwatch.cli import cli
from kvwatch.engine import EngineConfig, resolve
from kvwatch.errors import SettingError
from kvwatch.model import read_model
from kvwatch.weights import weights_of

LLAMA: dict[str, Any] = budget_cases.truth()["configs"]["Llama-3.1-8B"]
QWEN_MOE: dict[str, Any] = budget_cases.truth()["configs"]["Qwen3-30B-A3B"]
_FLAGS = """
    auto-round auto_awq auto_gptq awq awq_marlin bitsandbytes compressed-tensors experts_int8 fbgemm_fp8 fp8
    fp8_per_block fp8_per_channel fp8_per_tensor fp_quant gguf gpt_oss_mxfp4 gptq gptq_marlin humming inc
    int8_per_channel_weight_only marlin modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 mxfp8
    nonsense nvfp4_per_token online quark torchao
"""
FLAGS = frozenset(_FLAGS.split())
# quant_method -> the flags with which vLLM made its configuration, for an H100 that was not there (tools/fake_cuda.py).
ACCEPTED: dict[str, frozenset[str]] = {
    "awq": frozenset({"auto_awq", "awq", "awq_marlin", "humming", "marlin", "moe_wna16"}),
    "gptq": frozenset({"auto_gptq", "gptq", "gptq_marlin", "humming", "marlin", "moe_wna16"}),
    "fp8": frozenset({"fp8", "humming"}),
    "compressed-tensors": frozenset({"compressed-tensors", "humming"}),
    "bitsandbytes": frozenset({"bitsandbytes", "humming"}),  # with the plugin, since 0.28
    "torchao": frozenset({"humming", "torchao"}),
    "quark": frozenset({"humming", "quark"}),
    "fbgemm_fp8": frozenset({"fbgemm_fp8", "humming"}),
    "modelopt": FLAGS,
    "auto-round": FLAGS,
    "mxfp4": FLAGS,
}
_ONLINE = """
    experts_int8 fp8 fp8_per_block fp8_per_channel fp8_per_tensor gpt_oss_mxfp4 humming int8_per_channel_weight_only
    mxfp4 mxfp8 nvfp4_per_token
"""
ONLINE = frozenset(_ONLINE.split())
# vLLM refuses these on their own; a plugin, --hf-overrides or another platform can make them work.
OPEN = frozenset({"bitsandbytes", "gguf", "inc", "nonsense", "online", "torchao"})


def is_refused(flag: str, quantization: dict[str, Any] | None) -> bool:
    config = LLAMA if quantization is None else {**LLAMA, "quantization_config": quantization}
    try:
        resolve(EngineConfig(quantization=flag), read_model(config))
    except SettingError as error:
        assert f"--quantization {flag}" in str(error)
        assert "vLLM would refuse to start" in str(error)
        return True
    return False


@pytest.mark.parametrize("method", ACCEPTED)
def test_a_flag_has_to_match_the_checkpoint_as_vllm_has_it(method: str) -> None:
    refused = {flag for flag in FLAGS if is_refused(flag, {"quant_method": method})}
    assert refused == FLAGS - ACCEPTED[method]


def test_a_checkpoint_that_is_not_quantised_takes_only_what_quantises_while_loading() -> None:
    refused = {flag for flag in FLAGS if is_refused(flag, None)}
    assert refused == FLAGS - ONLINE - OPEN


def test_the_method_of_a_checkpoint_is_found_wherever_vllm_finds_it() -> None:
    assert is_refused("awq", {"quant_method": "GPTQ"})
    assert not is_refused("compressed-tensors", {"quant_method": "compressed_tensors"})
    assert not is_refused("awq", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    nested = {**budget_cases.truth()["configs"]["Gemma-3-27B(text)"], "quantization_config": {"quant_method": "gptq"}}
    wrapped = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": nested}
    assert read_model(wrapped).quantization == "gptq"
    assert read_model(LLAMA).quantization is None


def budget(*arguments: str) -> Result:
    command = ["budget", "--gpu", "H100", *arguments]
    return CliRunner().invoke(cli, command, env={"COLUMNS": "80"})


def test_the_refusal_says_what_to_give_instead() -> None:
    result = budget("--model", "Llama-3.1-8B", "--quantization", "awq")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Give the awq checkpoint as --model, or a method that quantises while loading: fp8" in result.stderr
    assert budget("--model", "Llama-3.1-8B", "--quantization", "fp8").exit_code in {0, 1}


@pytest.mark.parametrize(
    ("file", "method", "content"),
    [
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 128, "desc_act": False}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_the_file_that_early_quantisers_wrote_beside_config_json_counts(
    file: str, method: str, content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(json.dumps(content))
    result = budget("--model", str(tmp_path), "--quantization", method, "-o", "json")
    assert result.exit_code == 0, result.stderr
    weights = json.loads(result.stdout)["memory"]["terms"][0]
    assert weights["name"] == "weights"
    assert weights["bytes_per_rank"] < 6e9


LINEAR = 32 * (4096 * (4096 + 2048 + 4096) + 3 * 4096 * 14336)
EXPERTS = 48 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("config", "flag", "parameters", "bits"),
    [
        (LLAMA, "fp8_per_tensor", LINEAR, 8),
        (LLAMA, "fp8_per_channel", LINEAR, 8),
        (LLAMA, "fp8_per_block", LINEAR, 8 + 32 / 128**2),
        (LLAMA, "mxfp8", LINEAR, 8 + 8 / 32),
        (LLAMA, "mxfp4", LINEAR, 4 + 8 / 32),
        (LLAMA, "bitsandbytes", LINEAR, 4.5),
        (LLAMA, "nvfp4_per_token", 0, 16),
        (QWEN_MOE, "experts_int8", EXPERTS, 8),
        (QWEN_MOE, "int8_per_channel_weight_only", EXPERTS, 8),
        (QWEN_MOE, "nvfp4_per_token", EXPERTS, 4.5),
    ],
)
def test_a_method_that_quantises_while_loading_has_its_bits(
    config: dict[str, Any], flag: str, parameters: int, bits: float
) -> None:
    (plain,) = weights_of(config).loaded_bytes_per_rank
    (loaded,) = weights_of(config, quantization=flag).loaded_bytes_per_rank
    assert plain - loaded == pytest.approx(parameters * (16 - bits) / 8, abs=1)


def test_a_flag_whose_bytes_are_not_known_is_named() -> None:
    result = budget("--model", "Llama-3.1-8B", "--quantization", "torchao")
    assert result.exit_code == 2
    assert "--quantization torchao" in result.stderr
    assert "--kv-cache-memory-bytes" in result.stderr
