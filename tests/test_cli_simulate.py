import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from pages import CAPTURES, EXPOSITION
from servers import Answer, Replay, answer, server
from simulator_cases import closed_loop_case

from kvwatch.cli import cli
from kvwatch.cli.simulate import is_source

GOLDEN = Path(__file__).parent / "data" / "simulator"
THRASH = str(CAPTURES / "thrash")
TWO_MODELS = str(EXPOSITION / "dp2_engines.prom")


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments], env={"COLUMNS": "80"}, input=stdin)


def inputs_of(data: dict[str, list[dict[str, object]]]) -> dict[object, tuple[object, object]]:
    return {item["name"]: (item["value"], item["origin"]) for item in data["assumptions"]}


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


# An engine as the workload -------------------------------------------------------------------------------------------


def test_the_load_of_a_capture_is_simulated_with_what_it_rests_on() -> None:
    result = run("--workload", THRASH, "--max-num-seqs", "256,20", "--watermark", "0,0.05", "-o", "json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (data["clients"], data["current"]["requests"]) == (28, 224)
    assert data["chosen"]["preemptions"] < data["current"]["preemptions"] / 3
    inputs = inputs_of(data)
    assert inputs["max_num_seqs"] == (256, "assumed")
    assert inputs["num_gpu_blocks"] == (256, "observed")
    assert inputs["clients"] == (28, "derived")
    assert inputs["vllm_version"] == ("at least 0.32.0", "derived")


def test_the_text_names_the_engine_and_what_is_assumed_of_it() -> None:
    result = run("--workload", THRASH, "--watermark", "0,0.05")
    assert max(map(len, result.stdout.splitlines()[1:])) <= 80
    text = " ".join(result.stdout.split())
    assert "thrash, tiny-llama engine 0: 224 requests, 28 clients; 256 blocks of 128 tokens" in text
    assert "assumed max_num_seqs 256, max_num_batched_tokens 2048, watermark 0.0" in text
    assert "What a step costs could not be fitted to this window." in text


def test_the_command_line_of_the_engine_replaces_what_is_assumed() -> None:
    arguments = ("--vllm-args", "vllm serve --max-num-seqs 24 --watermark 0.02", "-o", "json")
    data = json.loads(run("--workload", THRASH, *arguments).stdout)
    assert (data["current"]["max_num_seqs"], data["current"]["watermark"]) == (24, 0.02)
    assert inputs_of(data)["max_num_seqs"] == (24, "given")


def test_a_version_that_is_only_a_lower_bound_refuses_no_flag_but_one_that_is_given_does() -> None:
    assert run("--workload", THRASH, "--watermark", "0.05").exit_code == 0
    refused = run("--workload", THRASH, "--watermark", "0.05", "--vllm-version", "0.23.0")
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "--watermark is 0.05, and vLLM 0.23.0 has no --watermark: it came with 0.24.0. Leave it out, or name" in said


def test_pages_that_may_be_older_than_the_watermark_are_named() -> None:
    """The release of this page is 0.15 or so; what it shows came with 0.13."""
    page = str(EXPOSITION / "v0.15ish_qwen3coder30b_live.prom")
    said = run("--workload", page, "--watermark", "0.05").stderr
    assert "note: --watermark came with vLLM 0.24.0, and the pages tell only that this one is at least 0.13.0" in said
    assert "note: --watermark" not in run("--workload", page, "--watermark", "0").stderr
    assert "note: --watermark" not in run("--workload", THRASH, "--watermark", "0.05").stderr


def test_what_was_seen_stands_beside_what_is_simulated() -> None:
    data = json.loads(run("--workload", THRASH, "-o", "json").stdout)
    assert inputs_of(data)["preemptions_per_request"] == (0.833, "observed")


def test_clients_that_give_up_are_counted_where_some_do(tmp_path: Path) -> None:
    file = tmp_path / "impatient.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "engine": {"num_gpu_blocks": 256, "max_num_seqs": 32},
                "cost": {"step_seconds": 0.02},
                "retry": {"first_token_timeout_seconds": 2, "max_attempts": 2},
                "requests": [{"at_seconds": n / 4, "prompt_tokens": 200, "output_tokens": 200} for n in range(60)],
            }
        )
    )
    options = json.loads(run("--workload", str(file), "--max-num-seqs", "2,4", "-o", "json").stdout)["options"]
    assert [option["abandoned_requests"] for option in options] == [50, 40]
    text = run("--workload", str(file), "--max-num-seqs", "2,4").stdout.splitlines()
    assert "gave up" in next(line for line in text if "seqs" in line and "preempt" in line)
    assert ">given up</th>" in run("--workload", str(file), "--max-num-seqs", "2,4", "-o", "html").stdout
    patient = run("--workload", str(file), "--max-num-seqs", "32,64").stdout
    assert "gave up" not in patient
    assert "given up" not in patient


def test_a_server_is_sampled_and_its_version_is_read() -> None:
    replayed = Replay(CAPTURES / "thrash", speed=20.0)
    pages: dict[str, Answer] = {"/metrics": replayed, "/version": answer('{"version": "0.32.0"}')}
    with server(pages) as address:
        result = run("--workload", address, "--window", "1s", "-o", "json")
    assert result.exit_code == 0
    assert "sampling" in result.stderr
    data = json.loads(result.stdout)
    assert data["workload"] == f"{address}, tiny-llama engine 0"
    assert inputs_of(data)["vllm_version"] == ("0.32.0", "observed")


def test_a_page_on_standard_input_is_an_engine() -> None:
    page = max(Path(THRASH).glob("*.prom")).read_bytes()
    result = run("--workload", "-", stdin=page)
    assert result.exit_code == 0
    assert result.stdout.startswith("stdin, tiny-llama engine 0: 224 requests, 28 clients")
    assert "lengths_from lifetime" in " ".join(result.stdout.split())


def test_of_several_engines_one_must_be_chosen_and_the_error_lists_them() -> None:
    result = run("--workload", TWO_MODELS)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has 4 engines, and one is simulated; choose it:" in result.stderr
    assert "  --model-name deepseek-v4-flash-w8a8-mtp --engine 1" in result.stderr


def test_an_engine_alone_does_not_choose_between_two_models() -> None:
    result = run("--workload", TWO_MODELS, "--engine", "1")
    assert result.exit_code == 2
    assert "has 2 engines" in result.stderr
    assert "--engine 0" not in result.stderr


def test_an_engine_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    result = run("--workload", TWO_MODELS, "--engine", "7")
    assert result.exit_code == 2
    assert "has no engine of that --model-name and --engine. It has:" in result.stderr
    assert result.stderr.count("--engine 0") == 2


def test_the_chosen_engine_is_the_one_that_is_reconstructed() -> None:
    result = run("--workload", TWO_MODELS, "--engine", "1", "--model-name", "/home/user/qwen3-8b")
    assert "has 2 engines" not in result.stderr
    assert "/home/user/qwen3-8b engine 1" in result.stdout + result.stderr


def test_a_load_that_cannot_be_reconstructed_says_what_is_missing() -> None:
    result = run("--workload", str(EXPOSITION / "v0.8_num_gpu_blocks_none.prom"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "its load cannot be reconstructed" in result.stderr
    assert "workload file" in result.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("long-context-trap", False),
        ("load.yaml", False),
        ("load", False),
        ("localhost:8000", False),
        ("http://127.0.0.1:8000", True),
        ('prometheus+http://p:9090?selector={job="vllm"}', True),
        ("-", True),
        ("page.prom", True),
        (THRASH, True),
        ("x" * 5000, False),
    ],
)
def test_what_the_workload_is_shows_in_its_form(name: str, expected: bool) -> None:
    assert is_source(name) == expected


def test_a_built_in_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long-context-trap").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_source("long-context-trap")
    assert is_source("./long-context-trap")


def test_options_of_a_source_are_refused_for_a_workload_file(thrash: str) -> None:
    result = run("--workload", thrash, "--engine", "0", "--window", "30s")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--engine, --window: only for a --workload that is a SOURCE" in result.stderr


def test_an_address_without_its_scheme_is_told_how_to_be_one() -> None:
    assert "for a server give http://localhost:8000" in run("--workload", "localhost:8000").stderr


def test_html_is_one_page(thrash: str) -> None:
    page = run("--workload", thrash, "--watermark", "0,0.05", "-o", "html").stdout
    assert page.startswith("<!doctype html>")
    assert page.endswith("</body></html>\n")
    assert "<code>--watermark 0.05</code>" in page
