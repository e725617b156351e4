import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from simulator_cases import closed_loop_case

from kvwatch.cli import cli

GOLDEN = Path(__file__).parent / "data" / "simulator"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments], env={"COLUMNS": "80"})


@pytest.fixture
def thrash(tmp_path: Path) -> str:
    file = tmp_path / "thrash.yaml"
    case = closed_loop_case(max_num_seqs=32, watermark=0.0, vllm_version="0.32.0")
    file.write_text(yaml.safe_dump(case))
    return str(file)


def test_json_has_an_option_for_each_combination_and_the_chosen_one(thrash: str) -> None:
    result = run("--workload", thrash, "--max-num-seqs", "32,16", "--watermark", "0,0.05", "--output", "json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert list(data)[:2] == ["schema_version", "kind"]
    assert data["kind"] == "simulation"
    assert [(o["max_num_seqs"], o["watermark"], o["steps"], o["preemptions"]) for o in data["options"]] == [
        (32, 0.0, 4408, 51),
        (32, 0.05, 4532, 14),
        (16, 0.0, 5234, 0),
        (16, 0.05, 5234, 0),
    ]
    assert data["chosen"] == data["options"][1]
    assert data["current"] == data["options"][0]
    assert data["options"][0]["output_tokens_per_second"] == pytest.approx(
        data["options"][0]["output_tokens"] / data["options"][0]["makespan_seconds"]
    )
    assert set(data["options"][0]) >= {
        "max_num_batched_tokens", "num_gpu_blocks", "scheduled_tokens", "ttft_p50_seconds", "ttft_p99_seconds",
        "itl_p50_seconds", "itl_p99_seconds", "peak_usage_ratio",
    }  # fmt: skip


def test_yaml_and_json_say_the_same(thrash: str) -> None:
    arguments = ("--workload", thrash, "--watermark", "0,0.02")
    assert yaml.safe_load(run(*arguments, "-o", "yaml").stdout) == json.loads(run(*arguments, "-o", "json").stdout)


def test_without_settings_the_workload_itself_is_simulated(thrash: str) -> None:
    data = json.loads(run("--workload", thrash, "-o", "json").stdout)
    assert data["options"] == [data["chosen"]] == [data["current"]]


def test_the_objective_decides_what_is_chosen(thrash: str) -> None:
    arguments = ("--workload", thrash, "--max-num-seqs", "32,16", "--watermark", "0,0.05", "-o", "json")
    chosen = {
        objective: json.loads(run(*arguments, "--objective", objective).stdout)["chosen"]
        for objective in ("balanced", "stability", "latency")
    }
    assert (chosen["balanced"]["max_num_seqs"], chosen["balanced"]["watermark"]) == (32, 0.05)
    assert chosen["stability"]["max_num_seqs"] == 16
    assert chosen["latency"]["max_num_seqs"] == 32


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("trap-balanced.txt", ("--max-num-seqs", "256,32", "--watermark", "0,0.02,0.05")),
        ("trap-wide.txt", ("--num-gpu-blocks", "5800,6103", "--max-num-batched-tokens", "2048,8192")),
        ("trap-calm.txt", ("--max-num-seqs", "24", "--objective", "stability")),
        ("trap-not-calm.txt", ("--max-num-seqs", "256,50", "--objective", "stability")),
    ],
)
def test_text_is_at_most_80_columns_and_as_recorded(name: str, arguments: tuple[str, ...]) -> None:
    result = run("--workload", "long-context-trap", *arguments)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout == (GOLDEN / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--workload", "nope.yaml"), "nope.yaml: No such file or directory"),
        (("--workload", "long-context-trap", "--max-num-seqs", "9000"), "is smaller than max_num_seqs (9000)"),
        (("--workload", "long-context-trap", "--max-num-seqs", "a,b"), "whole numbers separated by commas"),
        (("--workload", "long-context-trap", "--watermark", ","), "has no values"),
        (("--workload", "long-context-trap", "--watermark", "1.0"), "0 <= watermark < 1"),
        (("--workload", "long-context-trap", "--num-gpu-blocks", "100"), "vLLM would never schedule it to its end"),
        (("--workload", "long-context-trap", "--max-num-seqs", ",".join(map(str, range(1, 10_002)))), "too many"),
    ],
)
def test_what_cannot_be_simulated_exits_2_and_says_why(arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_watermark_is_refused_for_a_vllm_without_one(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(closed_loop_case(max_num_seqs=32, vllm_version="0.23.0")))
    result = run("--workload", str(file), "--watermark", "0,0.05")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "vLLM 0.23.0 has no --watermark: it came with 0.24.0" in result.stderr


def test_what_was_left_out_of_a_log_is_said_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("time,prompt_tokens,output_tokens\n0,10,0\n1,10,5\n")
    file = tmp_path / "load.yaml"
    file.write_text("engine: {num_gpu_blocks: 100}\ncost: {step_seconds: 0.02}\nrequest_log: log.csv\n")
    result = run("--workload", str(file), "-o", "json")
    assert "1 of 2 requests left out" in result.stderr
    assert json.loads(result.stdout)["chosen"]["requests"] == 1
