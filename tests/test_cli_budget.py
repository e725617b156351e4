"""`kvwatch budget`: exit codes, the JSON contract, text goldens, precedence of flags, broken input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import budget_cases
import pytest
import yaml
from click.testing import CliRunner, Result

from kvwatch.cli import cli

GOLDEN = Path(__file__).parent / "golden"
GIB = 1 << 30
REWRITE = os.environ.get("KVWATCH_UPDATE_GOLDEN") == "1"  # `make golden` writes them anew; the diff is then reviewed


def run(*arguments: str, env: dict[str, str] | None = None, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["budget", *arguments], env={"COLUMNS": "80", **(env or {})}, input=stdin)


def document(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    result = run(*arguments, "--output", "json", env=env)
    assert result.exit_code in {0, 1}, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return write(tmp_path, budget_cases.truth()["configs"]["Llama-3.1-70B"])


def write(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


# --- the JSON contract ---


def test_the_json_starts_with_version_and_kind_and_has_the_contracts_keys(llama: str) -> None:
    found = document("--model", llama, "--kv-cache-memory-bytes", "40GiB", "--max-model-len", "4096")
    assert list(found)[:2] == ["schema_version", "kind"]
    assert (found["schema_version"], found["kind"]) == (1, "budget")
    assert {"model", "engine", "memory", "budget", "table", "assumptions"} <= set(found)
    assert {"name", "architecture", "dtype", "layers"} <= set(found["model"])
    assert found["model"]["layers"] == [
        {"kind": "full", "count": 80, "kv_heads": 8, "head_dim": 128, "window_tokens": None}
    ]
    assert found["memory"]["available_kv_cache_bytes_per_rank"] == 40 * GIB
    assert found["memory"]["source"] == "given"
    assert found["budget"] == {
        "bytes_per_token": 327680,
        "bytes_per_token_per_rank": 327680,
        "fixed_bytes_per_request": 0,
        "block_size_tokens": 16,
        "block_bytes_per_rank": 5242880,
        "num_gpu_blocks": 8192,
        "usable_blocks": 8191,
        "blocks_per_max_len_request": 256,
        "max_model_len": 4096,
        "max_concurrency": 32.0,
        "capacity_tokens": 131072,
        "groups": [
            {
                "kind": "full",
                "num_layers": 80,
                "block_size_tokens": 16,
                "page_bytes_per_layer": 65536,
                "block_bytes_per_rank": 5242880,
                "blocks_per_max_len_request": 256,
            }
        ],
    }


def test_the_table_is_contexts_by_users(llama: str) -> None:
    found = document(
        "--model", llama, "--kv-cache-memory-bytes", "42949672960", "--max-model-len", "64k",
        "--context", "2000", "--context", "64000", "--concurrency", "1", "--concurrency", "50",
    )  # fmt: skip
    rows = [(row["context_tokens"], row["concurrency"], row["kv_cache_bytes"], row["fits"]) for row in found["table"]]
    assert rows == [
        (2000, 1, 655_360_000, True),
        (2000, 50, 32_768_000_000, True),
        (64000, 1, 20_971_520_000, True),
        (64000, 50, 1_048_576_000_000, False),
    ]


def test_without_memory_only_costs_are_given(llama: str) -> None:
    result = run("--model", llama, "--output", "json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["fits"] is None
    assert found["budget"]["num_gpu_blocks"] is None
    assert found["budget"]["bytes_per_token"] == 327680
    assert {row["fits"] for row in found["table"]} == {None}
    text = run("--model", llama).stdout
    assert text.startswith("COSTS ONLY")
    assert "--gpu-memory-gib" in text


def test_an_override_needs_no_memory(llama: str) -> None:
    found = document("--model", llama, "--num-gpu-blocks-override", "9000", "--max-model-len", "8192")
    assert found["budget"]["num_gpu_blocks"] == 9000
    assert found["memory"]["available_kv_cache_bytes_per_rank"] == 9000 * 5242880


def test_a_gpu_gives_an_estimate_between_bounds() -> None:
    found = document("--model", "Llama-3.1-70B", "--gpu", "H100", "--tensor-parallel-size", "4")
    memory = found["memory"]
    assert memory["source"] == "derived"
    assert memory["low_bytes_per_rank"] < memory["available_kv_cache_bytes_per_rank"] < memory["high_bytes_per_rank"]
    assert {"weights", "activations"} <= {term["name"] for term in memory["terms"]}
    assert found["engine"]["gpu"]["name"] == "NVIDIA H100 80GB HBM3"


def test_yaml_says_the_same_as_json(llama: str) -> None:
    arguments = ("--model", llama, "--kv-cache-memory-bytes", "40GiB", "--max-model-len", "8192", "--explain")
    assert yaml.safe_load(run(*arguments, "-o", "yaml").stdout) == document(*arguments)


@pytest.mark.parametrize("name", sorted(budget_cases.truth()["configs"]))
def test_every_model_of_the_truth_can_be_shown_in_every_format(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, budget_cases.truth()["configs"][name])
    arguments = ("--model", path, "--kv-cache-memory-bytes", "80GiB", "--gpu", "H100", "--explain")
    for output in ("text", "json", "yaml"):
        result = run(*arguments, "--output", output)
        assert result.exit_code in {0, 1}, result.output
        assert "nan" not in result.stdout.lower().replace("financ", "")
        assert max(len(line) for line in result.stdout.splitlines()) <= 80 or output != "text"


# --- exit codes ---


def test_a_pool_too_small_for_one_request_is_a_finding_with_both_numbers(llama: str) -> None:
    result = run("--model", llama, "--kv-cache-memory-bytes", "40GiB", "--vllm-version", "0.32.0")
    assert result.exit_code == 1
    assert result.stdout.startswith("DOES NOT FIT")
    assert "needs 40.00 GiB" in " ".join(result.stdout.split())
    assert "131056" in result.stdout
    refusal = document("--model", llama, "--kv-cache-memory-bytes", "40GiB", "--vllm-version", "0.32.0")["refusal"]
    assert (refusal["needed_bytes"], refusal["available_bytes"]) == (40 * GIB, 40 * GIB - 5242880)
    assert refusal["estimated_max_model_len"] == 131056


def test_a_load_that_was_asked_about_and_does_not_fit_is_a_finding(llama: str) -> None:
    arguments = ("--model", llama, "--kv-cache-memory-bytes", "40GiB", "--max-model-len", "4096")
    assert run(*arguments).exit_code == 0
    assert run(*arguments, "--context", "4096", "--concurrency", "32").exit_code == 0
    assert run(*arguments, "--context", "4096", "--concurrency", "33").exit_code == 1
    assert run(*arguments, "--mix", "4096x30", "--mix", "2000x2").exit_code == 0
    assert run(*arguments, "--mix", "4096x30", "--mix", "4kx3").exit_code == 1


def test_more_gpus_are_named_where_the_weights_do_not_fit() -> None:
    result = run("--model", "Llama-3.1-70B", "--gpu", "H100", "--max-model-len", "8192")
    assert result.exit_code == 1
    assert "With --tensor-parallel-size" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model: give --model"),
        (("--model", "no-such-model-at-all"), "is not among the"),
        (("--model", "./nowhere/config.json"), "no such file or folder"),
        (("--model", "Llama-3.1-70B", "--gpu", "H100000"), "H100000"),
        (("--model", "Llama-3.1-70B", "--gpu-memory-gib", "-1"), "--gpu-memory-gib is -1"),
        (("--model", "Llama-3.1-70B", "--tensor-parallel-size", "7"), "does not divide the model's 64 attention heads"),
        (("--model", "Llama-3.1-70B", "--kv-cache-dtype", "fp3"), "'fp3' is unknown"),
        (("--model", "Llama-3.1-70B", "--vllm-version", "newest"), "--vllm-version 'newest'"),
        (("--model", "Llama-3.1-70B", "--arrival-rate", "3"), "belong together"),
        (("--model", "Llama-3.1-70B", "--mix", "many"), "--mix 'many'"),
        (("--model", "Llama-3.1-70B", "--context", "999999"), "--context 999999 is more than max_model_len"),
        (("--vllm-args", "vllm serve m --max-num-seqs few"), "--max-num-seqs is 'few'"),
        (("--vllm-args", "a", "--vllm-args-file", "b"), "give one"),
        (("--vllm-args-file", "/nowhere/args"), "cannot be read"),
        (("--vllm-args-file", "/dev/zero"), "more than 1,048,576 bytes"),
    ],
)
def test_what_cannot_be_used_is_one_line_on_stderr_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"[]", "holds a list"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"{" * 100_000, "is not JSON"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "lacks num_hidden_layers"),
        (b'{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": NaN}', "num_hidden_layers is nan"),
        (b" " * (9 << 20), "more than 8,388,608 bytes"),
    ],
)
def test_a_broken_config_file_is_one_clear_error(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    result = run("--model", str(path))
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_folder_is_read_with_its_quantisation_and_its_index(tmp_path: Path) -> None:
    write(tmp_path, budget_cases.truth()["configs"]["Llama-3.1-8B"])
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}})
    )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16 * 10**9}}))
    found = document("--model", str(tmp_path), "--gpu", "L40S")
    assert found["engine"]["kv_cache_dtype"] == "fp8_e4m3"
    weights = next(term for term in found["memory"]["terms"] if term["name"] == "weights")
    assert (weights["bytes_per_rank"], weights["source"]) == (16 * 10**9, "given")
    assert run("--model", str(tmp_path.parent)).exit_code == 2


def test_an_index_with_a_size_that_cannot_be_is_named_among_the_assumptions(tmp_path: Path) -> None:
    write(tmp_path, budget_cases.truth()["configs"]["Llama-3.1-8B"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}}))
    found = document("--model", str(tmp_path), "--gpu", "L40S")
    weights = next(term for term in found["memory"]["terms"] if term["name"] == "weights")
    assert (weights["bytes_per_rank"], weights["source"]) == (16_060_522_496, "derived")
    assert any("model.safetensors.index.json says 0 bytes" in assumption for assumption in found["assumptions"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": "16 GB"}}))
    refused = run("--model", str(tmp_path), "--gpu", "L40S")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "Repair the file or take it away" in refused.stderr


def test_a_model_that_this_machine_has_downloaded_is_found_by_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--acme--secret-7b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    write(snapshot, budget_cases.truth()["configs"]["Llama-3.1-8B"])
    found = document("--model", "acme/secret-7b", env={"HF_HOME": str(tmp_path)})
    assert (found["model"]["name"], found["budget"]["bytes_per_token"]) == ("acme/secret-7b", 131072)
    assert run("--model", "acme/other-7b", env={"HF_HOME": str(tmp_path)}).exit_code == 2


def test_a_length_beyond_the_models_own_is_warned_about(llama: str) -> None:
    found = document("--model", llama, "--max-model-len", "200000")
    assert "vLLM refuses it unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in found["warnings"][0]


# --- whole command lines and precedence ---


def test_a_whole_command_line_says_the_same_as_single_flags(llama: str) -> None:
    line = f"vllm serve {llama} -tp 4 --max-model-len 32K --kv-cache-dtype fp8 --port 8000"
    whole = run("--vllm-args", line, "--kv-cache-memory-bytes", "20GiB", "-o", "json")
    single = document(
        "--model", llama, "--tensor-parallel-size", "4", "--max-model-len", "32768", "--kv-cache-dtype", "fp8",
        "--kv-cache-memory-bytes", "20GiB",
    )  # fmt: skip
    assert json.loads(whole.stdout) == single
    assert "Without effect on the KV cache, or not a flag kvwatch knows: --port" in whole.stderr


def test_a_command_line_from_a_file_and_from_standard_input(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "args.txt"
    file.write_text(f"- --model={llama}\n- --tensor-parallel-size=8\n")
    for arguments, stdin in ((("--vllm-args-file", str(file)), None), (("--vllm-args-file", "-"), file.read_text())):
        result = run(*arguments, "-o", "json", stdin=stdin)
        assert json.loads(result.stdout)["engine"]["tensor_parallel_size"] == 8


def test_a_flag_wins_over_the_command_line_inside_and_that_over_the_environment(llama: str) -> None:
    line = f"vllm serve {llama} --max-num-seqs 64 --tensor-parallel-size 2"
    found = document(
        "--vllm-args", line, "--max-num-seqs", "16",
        env={"KVWATCH_BUDGET_MAX_NUM_SEQS": "8", "KVWATCH_BUDGET_TENSOR_PARALLEL_SIZE": "4",
             "KVWATCH_BUDGET_MAX_MODEL_LEN": "2048"},
    )["engine"]  # fmt: skip
    assert (found["max_num_seqs"], found["tensor_parallel_size"], found["max_model_len"]) == (16, 2, 2048)


def test_an_estimated_pool_is_shown_as_what_is_claimed_less_its_terms() -> None:
    printed = run("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "H100").stdout
    lines = printed[printed.index("\nPool\n") : printed.index("  one block")].splitlines()
    assert "    72.85 GiB claimed, less" in lines
    assert sum(line.startswith("  - ") for line in lines) == 4


def test_a_given_pool_claims_nothing(llama: str) -> None:
    printed = run("--model", llama, "--kv-cache-memory-bytes", "40000000000").stdout
    assert "Pool" in printed
    assert "claimed" not in printed


def test_a_memory_size_replaces_that_of_the_named_gpu(llama: str) -> None:
    found = document("--model", llama, "--gpu", "H100", "--gpu-memory-gib", "94", "--kv-cache-memory-bytes", "50GiB")
    assert found["engine"]["gpu"] == {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 94 * GIB}
    assert document("--model", llama, "--gpu", "cpu")["engine"]["block_size"] == 128


def test_littles_law_is_in_the_report(llama: str) -> None:
    arguments = ("--model", llama, "--kv-cache-memory-bytes", "40GiB", "--max-model-len", "4096",
                 "--arrival-rate", "2", "--response-time", "12.5", "--retry-ratio", "0.5")  # fmt: skip
    found = document(*arguments)
    assert found["arrivals"]["in_flight"] == 50.0
    assert {row["concurrency"] for row in found["table"]} == {50}
    assert "2 requests/s ÷ (1 − 0.5) × 12.5 s = 50.0 requests" in " ".join(run(*arguments).stdout.split())


# --- text ---

GOLDENS: dict[str, tuple[str, ...]] = {
    "full": ("--model", "Llama-3.1-70B", "--kv-cache-memory-bytes", "35658965975", "--tensor-parallel-size", "4",
             "--max-model-len", "32768", "--gpu", "H100", "--vllm-version", "0.32.0"),
    "refused": ("--model", "Llama-3.1-70B", "--kv-cache-memory-bytes", "40GiB", "--vllm-version", "0.32.0"),
    "costs": ("--model", "gpt-oss-20b"),
    "hybrid": ("--model", "Qwen3-Next-80B-A3B-Instruct", "--kv-cache-memory-bytes", "40GiB", "--gpu", "H100",
               "--vllm-version", "0.32.0", "--explain"),
    "latent": ("--model", "deepseek-ai/DeepSeek-V3.2", "--kv-cache-memory-bytes", "40GiB", "--gpu", "H100",
               "--tensor-parallel-size", "8", "--kv-cache-dtype", "fp8", "--vllm-version", "0.32.0"),
    "load": ("--model", "Llama-3.1-8B", "--kv-cache-memory-bytes", "20GiB", "--gpu", "L4", "--max-model-len", "32768",
             "--arrival-rate", "4", "--response-time", "20", "--retry-ratio", "0.2", "--mix", "32000x2",
             "--mix", "2000x50", "--data-parallel-size", "2"),
    "states": ("--model", "Nemotron-H-8B-Base-8K", "--kv-cache-memory-bytes", "4GiB", "--gpu", "H100"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_the_text_is_as_agreed(name: str) -> None:
    path = GOLDEN / f"budget_{name}.txt"
    text = run(*GOLDENS[name]).stdout
    if REWRITE:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text


def test_every_golden_has_its_command() -> None:
    assert {path.stem for path in GOLDEN.glob("budget_*.txt")} == {f"budget_{name}" for name in GOLDENS}


def test_the_command_starts_without_heavy_libraries() -> None:
    code = (
        "import sys; from kvwatch.cli import cli\n"
        "try: cli(['budget', '--model', 'Llama-3.1-8B', '--kv-cache-memory-bytes', '20GiB'], standalone_mode=False)\n"
        "except SystemExit: pass\n"
        "heavy = {'rich', 'yaml', 'urllib3', 'prometheus_client', 'msgspec', 'kvwatch.memory'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (("--gpu", "L4", "--kv-cache-memory-bytes", "40GiB"), "40.00 GiB of KV cache per GPU are more than the 21.99"),
        (("--gpu", "L4", "--num-gpu-blocks-override", "100000"), "GiB of KV cache per GPU are more than the 21.99"),
        (("--vllm-version", "0.10.2", "--watermark", "0.02"), "vLLM 0.10.2 may not know --watermark: 0.24.0 is the"),
        (("--vllm-version", "0.8.5", "--kv-cache-memory-bytes", "1GiB"), "not know --kv-cache-memory-bytes: 0.10.2"),
    ],
)
def test_flags_that_vllm_takes_and_then_fails_on_are_warned_of(flags: tuple[str, ...], warning: str) -> None:
    found = document("--model", "meta-llama/Llama-3.1-8B", "--max-model-len", "4096", *flags)
    assert [text for text in found["warnings"] if warning in text] == found["warnings"]
    assert len(found["warnings"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "~nobody-of-this-name/x"), "--model ~nobody-of-this-name/x: "),
        (("--model", "a" * 5000), "File name too long"),
        (("--model", "meta-llama/Llama-3.1-8B", "--retry-ratio", "0.5"), "--arrival-rate and --response-time"),
        (("--model", "meta-llama/Llama-3.1-8B", "--gpu", "cpu", "--gpu-memory-gib", "64"), "VLLM_CPU_KVCACHE_SPACE"),
    ],
)
def test_what_cannot_be_used_is_one_error(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 400


def test_a_command_line_on_standard_input_that_is_no_text_is_one_error() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "kvwatch", "budget", "--vllm-args-file", "-"],
        input=b"\xff\xfe",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr.startswith(b"Error: --vllm-args-file - cannot be read: ")


def test_a_verdict_that_an_estimate_leaves_open_says_so() -> None:
    refused = " ".join(run("--model", "openai/gpt-oss-120b", "--gpu", "H100").stdout.split())
    assert refused.startswith("DOES NOT FIT")
    assert "The memory is an estimate, between -1.41 GiB and 6.14 GiB: it may start all the same." in refused
    fits = " ".join(run("--model", "mistralai/Mistral-7B-Instruct-v0.3", "--gpu", "A10G").stdout.split())
    assert "(an estimate: 0.7 to 1.6; below 1 it would refuse to start)" in fits
    certain = run("--model", "openai/gpt-oss-120b", "--gpu", "L4").stdout
    assert "may start all the same" not in certain


def test_no_gain_is_claimed_over_a_pool_that_holds_nothing() -> None:
    result = run("--model", "google/gemma-3-27b-it", "--gpu", "L4")
    assert result.exit_code == 1
    assert "with --kv-cache-dtype fp8" in result.output
    assert "concurrency 0.00" not in result.output
