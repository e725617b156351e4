"""Versions, vLLM's defaults by version and GPU, and whole command lines."""

from typing import Any

import budget_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.budget import plan_for
from kvwatch.engine import Device, EngineConfig, resolve
from kvwatch.errors import SettingError
from kvwatch.model import read_model
from kvwatch.versions import LATEST_KNOWN, engine_version, parse_version, rules_of, version_text
from kvwatch.vllm_args import FLAGS, left_out, parse_command_line, whole_number

GIB = 1 << 30
H100 = Device(name="NVIDIA H100 80GB HBM3", memory_bytes=85028896768, capability=(9, 0))
A100 = Device(name="NVIDIA A100-SXM4-80GB", memory_bytes=85100068864, capability=(8, 0))
B200 = Device(name="NVIDIA B200", memory_bytes=182642 << 20, capability=(10, 0))
L4 = Device(name="NVIDIA L4", memory_bytes=23612293120, capability=(8, 9))
GB10 = Device(name="NVIDIA GB10", memory_bytes=130663463321, capability=(12, 1))
MI300 = Device(name="AMD Instinct MI300X", memory_bytes=196592 << 20, capability=(9, 4))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("v0.11", (0, 11, 0)),
        ("0.20.2rc1.dev249+g3ab12cd", (0, 20, 2)),
        ("0.11.1-dev", (0, 11, 1)),
        (" 1.2.3 ", (1, 2, 3)),
    ],
)
def test_versions_as_people_and_vllm_write_them(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "text",
    ["", "latest", "0", "nightly-2026", "0.x", "0.1.dev20051+g1a2b3c", "v0.1.dev0", "1.2.3.4.5e9999\n0"],
)
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--vllm-version"):
        parse_version(text)


def test_a_build_without_tags_has_the_version_that_its_page_implies() -> None:
    assert engine_version("0.1.dev20051+g1a2b3c", "0.24.0") == (0, 24, 0)
    assert engine_version("0.32.0", "0.24.0") == (0, 32, 0)
    assert engine_version(None, "0.24.0") == (0, 24, 0)
    assert engine_version("main", None) is None


def test_the_rules_by_version() -> None:
    lines = {
        text: rules_of(parse_version(text)).tokens_line for text in ("0.10.2", "0.11.0", "0.19.1", "0.20.2", "0.33.0")
    }
    assert lines == {
        "0.10.2": "blocks",
        "0.11.0": "groups",
        "0.19.1": "groups",
        "0.20.2": "concurrency",
        "0.33.0": "concurrency",
    }
    concurrency = {text: rules_of(parse_version(text)).concurrency for text in ("0.8.5", "0.9.2", "0.27.1", "0.28.0")}
    assert concurrency == {"0.8.5": "tokens", "0.9.2": "bytes", "0.27.1": "bytes", "0.28.0": "groups"}
    padding = {text: rules_of(parse_version(text)).padding_ratio for text in ("0.11.2", "0.12.0", "0.17.1", "0.18.0")}
    assert padding == {"0.11.2": None, "0.12.0": 1.25, "0.17.1": 1.25, "0.18.0": 1.5}
    assert [rules_of(v).null_block_in_fit_check for v in ((0, 28, 0), (0, 29, 0))] == [False, True]
    assert [rules_of(v).in_flight_counts_batches for v in ((0, 25, 1), (0, 26, 0))] == [False, True]
    assert [rules_of(v).hybrid_manager for v in ((0, 8, 5), (0, 9, 0))] == [False, True]
    assert [rules_of(v).gpu_memory_utilization for v in ((0, 19, 1), (0, 20, 2))] == [0.9, 0.92]


@pytest.mark.parametrize(
    ("version", "device", "tokens", "seqs"),
    [
        ("0.33.0", B200, 16384, 1024),
        ("0.33.0", H100, 8192, 1024),
        ("0.33.0", A100, 2048, 256),
        ("0.33.0", L4, 2048, 256),
        ("0.33.0", GB10, 2048, 256),
        ("0.32.0", GB10, 8192, 1024),
        ("0.28.0", B200, 8192, 1024),
        ("0.9.2", A100, 2048, 256),
        ("0.8.5", A100, 8192, 1024),
        ("0.7.3", H100, 8192, 256),
        ("0.7.3", A100, 2048, 256),
        ("0.6.6", H100, 131072, 256),
        ("0.32.0", Device(name="cpu", memory_bytes=0), 2048, 128),
    ],
)
def test_batch_limits_by_version_and_gpu(version: str, device: Device, tokens: int, seqs: int) -> None:
    engine = EngineConfig(vllm_version=parse_version(version), device=device)
    resolved = resolve(engine, budget_cases.model("Llama-3.1-8B"))
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs) == (tokens, seqs)


def test_batch_limits_respect_each_other() -> None:
    model = budget_cases.model("Llama-3.1-8B")
    small = resolve(EngineConfig(device=H100, max_num_seqs=2, max_model_len=1024), model)
    assert small.max_num_batched_tokens == 2048
    few = resolve(EngineConfig(device=H100, max_num_batched_tokens=512), model)
    assert few.max_num_seqs == 512
    doubled = resolve(EngineConfig(device=H100, performance_mode="throughput"), model)
    assert (doubled.max_num_batched_tokens, doubled.max_num_seqs) == (16384, 2048)
    whole = resolve(EngineConfig(device=L4, enable_chunked_prefill=False), model)
    assert whole.max_num_batched_tokens == 131072


def test_batches_in_flight() -> None:
    model = budget_cases.model("gpt-oss-20b")

    def in_flight(**flags: Any) -> tuple[int, int]:
        resolved = resolve(EngineConfig(device=H100, **flags), model)
        return resolved.max_concurrent_batches, resolved.in_flight_tokens

    assert in_flight() == (2, 16384)
    assert in_flight(async_scheduling=False) == (1, 8192)
    assert in_flight(pipeline_parallel_size=4) == (4, 32768)
    assert in_flight(max_concurrent_batches=3) == (3, 24576)
    assert in_flight(speculative_method="ngram", num_speculative_tokens=3) == (1, 8192)
    assert in_flight(vllm_version=(0, 25, 0)) == (2, 8192)
    assert in_flight(vllm_version=(0, 13, 0)) == (1, 8192)


def test_every_setting_says_where_it_came_from() -> None:
    model = budget_cases.model("Llama-3.1-8B")
    without = dict(resolve(EngineConfig(), model).sources)
    assert (without["max_num_batched_tokens"], without["vllm_version"]) == ("assumed", "assumed")
    given_flags = EngineConfig(device=H100, max_num_seqs=64, vllm_version=(0, 32, 0), max_model_len=8192)
    sources = dict(resolve(given_flags, model).sources)
    assert sources["max_num_seqs"] == sources["vllm_version"] == sources["max_model_len"] == "given"
    assert sources["max_num_batched_tokens"] == "derived"
    newest = EngineConfig(vllm_version=LATEST_KNOWN, vllm_version_given=True)
    assert dict(resolve(newest, model).sources)["vllm_version"] == "given"


def test_the_checkpoints_kv_dtype_is_taken_for_auto_and_overridden_by_a_flag() -> None:
    config = {**budget_cases.truth()["configs"]["Llama-3.1-8B"], "quantization_config": {
        "quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}  # fmt: skip
    model = read_model(config)
    assert resolve(EngineConfig(), model).kv_cache_dtype == "fp8_e4m3"
    assert resolve(EngineConfig(kv_cache_dtype="bfloat16"), model).kv_cache_dtype == "bfloat16"


def test_sparse_mla_stores_fp8_in_its_own_layout_except_on_blackwell() -> None:
    model = budget_cases.model("DeepSeek-V3.2")
    assert resolve(EngineConfig(device=H100, kv_cache_dtype="fp8"), model).kv_cache_dtype == "fp8_ds_mla"
    assert resolve(EngineConfig(device=B200, kv_cache_dtype="fp8"), model).kv_cache_dtype == "fp8"
    assert resolve(EngineConfig(device=H100, kv_cache_dtype="bfloat16"), model).kv_cache_dtype == "auto"


def test_amd_cards_have_kernels_of_their_own() -> None:
    for name, size in (("DeepSeek-V3", 16), ("DeepSeek-V3.2", 16), ("Llama-3.1-8B", 16)):
        engine = EngineConfig(device=MI300, kv_cache_dtype="fp8" if name == "DeepSeek-V3" else "auto")
        assert plan_for(budget_cases.model(name), engine).block_size_tokens == size
    resolved = resolve(EngineConfig(device=MI300), budget_cases.model("Llama-3.1-8B"))
    assert resolved.max_num_batched_tokens == 16384


def test_prefix_caching_and_state_blocks_by_kind_of_model() -> None:
    hybrid, pure, dense = (budget_cases.model(name) for name in ("Qwen3-Next-80B-A3B", "Mamba2-2.7B", "Qwen3-8B"))
    resolved = [resolve(EngineConfig(), model) for model in (hybrid, pure, dense)]
    assert [(r.enable_prefix_caching, r.mamba_cache_mode) for r in resolved] == [
        (True, "align"), (False, "none"), (True, "none")]  # fmt: skip
    assert resolve(EngineConfig(enable_prefix_caching=False), hybrid).mamba_cache_mode == "none"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tensor_parallel_size": 3}, "does not divide the model's 32 attention heads"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0"),
        ({"pipeline_parallel_size": 33}, "more than the model's 32 layers"),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "does not divide --tensor-parallel-size 4"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "needs 2 ranks for each of the model's 8 KV heads",
        ),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization is 0.0"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
        ({"watermark": 1.0}, "--watermark is 1.0"),
        ({"max_model_len": -2}, "--max-model-len is -2"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"dtype": "int4"}, "--dtype 'int4'"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype 'fp4' is unknown"),
        ({"kv_cache_dtype": "octave_k3v4"}, "octave_k3v4 exists"),
        ({"kv_cache_dtype": "nvfp4", "vllm_version": (0, 11, 0)}, "needs vLLM 0.20.0 or newer"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla is for latent attention with a sparse indexer"),
        ({"kv_cache_dtype_skip_layers": ("0", "last")}, "names 'last'; vLLM knows layer numbers"),
        ({"performance_mode": "fast"}, "--performance-mode 'fast' is unknown; vLLM knows balanced"),
        ({"mamba_cache_mode": "al"}, "--mamba-cache-mode 'al' is unknown"),
        ({"mamba_cache_dtype": "fp8"}, "--mamba-cache-dtype 'fp8' is unknown"),
        ({"mamba_ssm_cache_dtype": "f32"}, "--mamba-ssm-cache-dtype 'f32' is unknown"),
        ({"block_size": 12, "device": H100}, "--block-size is 12; every attention backend"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "8 is less than --max-num-seqs 64"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
            "2048 is less than max_model_len 131072, and --no-enable-chunked-prefill",
        ),
    ],
)
def test_settings_that_vllm_refuses_are_refused_by_name(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        resolve(EngineConfig(**flags), budget_cases.model("Llama-3.1-8B"))


def test_what_vllm_accepts_is_not_refused_with_it() -> None:
    model = budget_cases.model("Llama-3.1-8B")
    for flags in (
        {"max_num_seqs": 8, "max_num_batched_tokens": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 2048},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048},
        {"kv_cache_dtype_skip_layers": ("31", "sliding_window")},
        {"block_size": 8, "device": H100, "vllm_version": (0, 8, 5)},
        {"block_size": 12},  # what an engine reports, on a device that is not told
    ):
        assert resolve(EngineConfig(**flags), model).max_num_batched_tokens >= 8
    sparse = budget_cases.model("DeepSeek-V3.2")
    assert resolve(EngineConfig(kv_cache_dtype="fp8_ds_mla"), sparse).kv_cache_dtype == "fp8_ds_mla"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "words"),
    [
        ("DeepSeek-V3", H100, "int8_per_token_head", "Try fp8"),
        ("DeepSeek-V3", B200, "fp8_per_token_head", "Try fp8"),
        ("DeepSeek-V3", None, "int4_per_token_head", "Try fp8"),
        ("DeepSeek-V3", MI300, "int8_per_token_head", "Try fp8"),
        ("DeepSeek-V3", H100, "fp8_e5m2", "Try fp8"),
        ("DeepSeek-V3", None, "fp8_e5m2", "Try fp8"),
        ("DeepSeek-V3", H100, "turboquant_4bit_nc", "Try fp8"),
        ("DeepSeek-V3", B200, "nvfp4", "Try fp8"),
        ("DeepSeek-V3", A100, "fp8", "compute capability 8.0.* Try auto"),
        ("DeepSeek-V3", A100, "fp8_e4m3", "compute capability 8.0.* Try auto"),
        ("DeepSeek-V3", A100, "int8_per_token_head", "Try auto"),
        ("DeepSeek-V3.2", H100, "int8_per_token_head", "Try fp8"),
        ("DeepSeek-V3.2", B200, "fp8_e5m2", "Try fp8"),
        ("DeepSeek-V3.2", H100, "nvfp4_ds_mla", "compute capability 9.0.* Try fp8"),
        ("Kimi-Linear-48B", H100, "fp8_e5m2", "Try fp8"),
        ("GLM-4.7-Flash", H100, "fp8_per_token_head", "Try fp8"),
    ],
)
def test_a_kv_dtype_that_no_backend_for_latents_takes_is_refused(
    name: str, device: Device | None, dtype: str, words: str
) -> None:
    """Each but MI300's was refused by vLLM 0.32.0 itself: "No valid attention backend found", or not below SM89."""
    with pytest.raises(SettingError, match=rf"--kv-cache-dtype {dtype} does not work with latent attention.*{words}"):
        resolve(EngineConfig(device=device, kv_cache_dtype=dtype), budget_cases.model(name))


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("DeepSeek-V3", H100, "fp8"),
        ("DeepSeek-V3", H100, "fp8_e4m3"),
        ("DeepSeek-V3", GB10, "fp8"),
        ("DeepSeek-V3", None, "fp8"),
        ("DeepSeek-V3", A100, "bfloat16"),
        ("DeepSeek-V3", MI300, "fp8_e5m2"),
        ("DeepSeek-V3.2", B200, "nvfp4_ds_mla"),
        ("DeepSeek-V3.2", None, "nvfp4_ds_mla"),
        ("MiniCPM3-4B", H100, "fp8_e5m2"),
        ("Llama-3.1-8B", H100, "int8_per_token_head"),
    ],
)
def test_a_kv_dtype_that_a_backend_takes_is_not_refused(name: str, device: Device | None, dtype: str) -> None:
    assert resolve(EngineConfig(device=device, kv_cache_dtype=dtype), budget_cases.model(name)).kv_cache_dtype == dtype


def test_heads_and_ranks_have_to_divide_each_other() -> None:
    phi4 = read_model(
        {
            "architectures": ["Phi3ForCausalLM"],
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "hidden_size": 5120,
        }
    )
    assert resolve(EngineConfig(tensor_parallel_size=2), phi4).tensor_parallel_size == 2
    with pytest.raises(SettingError, match="--tensor-parallel-size 4 and the model's 10 KV heads do not divide"):
        resolve(EngineConfig(tensor_parallel_size=4), phi4)


def test_context_parallelism_does_not_work_with_windows() -> None:
    engine = EngineConfig(tensor_parallel_size=8, decode_context_parallel_size=8)
    with pytest.raises(SettingError, match="does not work with sliding windows"):
        resolve(engine, budget_cases.model("gpt-oss-20b"))


def test_a_version_outside_those_read_is_said_to_be_so() -> None:
    model = budget_cases.model("Llama-3.1-8B")
    assert "outside the versions read" in resolve(EngineConfig(vllm_version=(0, 99, 0)), model).assumptions[0]
    assert resolve(EngineConfig(vllm_version=LATEST_KNOWN), model).assumptions == ()
    assert version_text(LATEST_KNOWN) == "0.33.0"


# --- whole command lines ---


def test_a_serve_command_line() -> None:
    line = parse_command_line(
        "VLLM_USE_V1=1 vllm serve meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --max_model_len=32K \\\n"
        "  --kv-cache-dtype fp8 --no-enable-prefix-caching --enforce-eager --port 8000 --trust-remote-code  # comment\n"
        "  --gpu-memory-utilization 0.9"
    )
    assert line.model == "meta-llama/Llama-3.1-70B"
    assert line.fields == {
        "tensor_parallel_size": 4,
        "max_model_len": 32768,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.9,
    }
    assert line.ignored == ("--port", "--trust-remote-code")


def test_a_model_after_a_flag_that_takes_no_value() -> None:
    line = parse_command_line("vllm serve --trust-remote-code --enable-lora --seed 1 org/model --headless -tp 2")
    assert (line.model, line.fields) == ("org/model", {"tensor_parallel_size": 2})


def test_a_containers_argument_list() -> None:
    line = parse_command_line(
        "        - --model=/models/qwen\n        - --tensor-parallel-size=2\n        # a comment\n"
        "        - '--max-num-seqs'\n        - \"64\"\n"
    )
    assert line.model == "/models/qwen"
    assert line.fields == {"tensor_parallel_size": 2, "max_num_seqs": 64}
    flow = parse_command_line('["--model", "m", "-tp", "8", "--async-scheduling"]')
    assert (flow.model, flow.fields) == ("m", {"tensor_parallel_size": 8, "async_scheduling": True})


def test_the_module_form_and_an_interpreter_in_front() -> None:
    line = parse_command_line("python3 -m vllm.entrypoints.openai.api_server --model x -pp 2 -dcp 4 -tp 4")
    assert line.model == "x"
    assert line.fields == {
        "pipeline_parallel_size": 2, "decode_context_parallel_size": 4, "tensor_parallel_size": 4}  # fmt: skip


def test_objects_inside_a_command_line() -> None:
    line = parse_command_line(
        'vllm serve m --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\' '
        '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\''
    )
    assert line.fields == {"num_speculative_tokens": 3, "speculative_method": "mtp", "kv_connector": "NixlConnector"}
    dotted = parse_command_line(
        "vllm serve m --speculative-config.num_speculative_tokens 2 --speculative-config.method eagle3"
    )
    assert dotted.fields == {"num_speculative_tokens": 2, "speculative_method": "eagle3"}


def test_a_list_flag_takes_every_word_up_to_the_next_flag() -> None:
    line = parse_command_line("vllm serve m --kv-cache-dtype-skip-layers 0 1 sliding_window --dtype bfloat16")
    assert line.fields == {"kv_cache_dtype_skip_layers": ("0", "1", "sliding_window"), "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m --max-num-seqs many", "--max-num-seqs is 'many'"),
        ("vllm serve m --gpu-memory-utilization 92", "takes a share between 0 and 1"),
        ("vllm serve m --tensor-parallel-size", "stands at the end"),
        ("vllm serve m --dtype 'half", "cannot be split into words"),
        ("vllm serve m --speculative-config {broken", "takes a JSON object"),
        ('vllm serve m --speculative-config \'{"num_speculative_tokens": "two"}\'', "has to be a whole number"),
        ("vllm serve m --enforce-eager=maybe", "takes true or false"),
    ],
)
def test_a_command_line_that_cannot_be_read_names_the_flag(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        parse_command_line(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("8192", 8192), ("32k", 32000), ("32K", 32768), ("1.5M", 1572864), ("2.5m", 2500000), ("40GiB", 40 * GIB),
     ("16G", 16 * GIB), ("1_000", 1000), ("131,072", 131072)],
)  # fmt: skip
def test_numbers_as_vllm_reads_them(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "command: [vllm]\nargs:\n  - serve\n  - org/m\n  - --max-num-seqs=8",
        'command: ["vllm"]\nargs: ["serve", "org/m", "--max-num-seqs", "8"]',
        'bash -c "vllm serve org/m --max-num-seqs 8"',
        "/bin/sh -ec 'exec vllm serve org/m --max-num-seqs 8 | tee log --max-num-seqs 9'",
        "ray job submit -- vllm serve org/m --max-num-seqs 8 && echo --max-num-seqs 9",
        "vllm serve org/m --max-num-seqs 8  # --max-num-seqs 9",
        "vllm serve org/m --max-num-s 8",
    ],
)
def test_a_command_line_as_pods_and_shells_hold_it(text: str) -> None:
    line = parse_command_line(text)
    assert (line.model, line.fields) == ("org/m", {"max_num_seqs": 8})


def test_the_beginning_of_a_flag_is_the_flag_where_only_one_begins_so() -> None:
    line = parse_command_line("vllm serve org/m --gpu-memory-util 0.5 --max-num 9 --kv-cache-memory 1GiB")
    assert line.fields == {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": GIB}
    assert line.ignored == ("--max-num",)


def test_what_is_not_read_is_named_and_what_may_matter_first() -> None:
    line = parse_command_line("vllm serve org/m other --port 80 --hf-overrides '{}' --config x.yaml")
    assert left_out(line.ignored) == (
        "Not read, though it can change the KV cache or its memory: --hf-overrides, --config. "
        "Without effect on the KV cache, or not a flag kvwatch knows: other, --port"
    )
    assert left_out(("--hf-overrides.rope_scaling",)).endswith("memory: --hf-overrides.rope_scaling.")
    assert left_out(()) == ""


@given(st.text(max_size=60))
def test_any_text_is_a_command_line_or_one_known_error(text: str) -> None:
    try:
        line = parse_command_line(text)
    except SettingError as error:
        assert str(error)
    else:
        assert set(line.fields) <= {flag.field for flag in FLAGS} | {
            "num_speculative_tokens", "speculative_method", "kv_connector"}  # fmt: skip


# --- kernels ---


@pytest.mark.parametrize(
    ("name", "device", "version", "dtype", "block_size"),
    [
        ("Llama-3.1-8B", B200, (0, 33, 0), "auto", 16),
        ("DeepSeek-V3", B200, (0, 33, 0), "auto", 32),
        ("DeepSeek-V3", B200, (0, 17, 0), "auto", 128),
        ("DeepSeek-V3", H100, (0, 33, 0), "auto", 16),
        ("DeepSeek-V3", H100, (0, 33, 0), "fp8", 64),
        ("DeepSeek-V3", H100, (0, 11, 1), "auto", 64),
        ("DeepSeek-V3", A100, (0, 33, 0), "auto", 16),
        ("DeepSeek-V3", GB10, (0, 33, 0), "fp8", 16),
        ("DeepSeek-V3.2", B200, (0, 33, 0), "auto", 64),
        ("Gemma-4-26B(text)", H100, (0, 33, 0), "fp8", 64),
        ("Gemma-4-26B(text)", A100, (0, 33, 0), "fp8", 16),
        ("Qwen3-Next-80B-A3B", B200, (0, 33, 0), "auto", 544),
    ],
)
def test_the_kernels_of_a_gpu_settle_the_block_size(
    name: str, device: Device, version: tuple[int, int, int], dtype: str, block_size: int
) -> None:
    engine = EngineConfig(device=device, vllm_version=version, kv_cache_dtype=dtype)
    assert plan_for(budget_cases.model(name), engine).block_size_tokens == block_size
