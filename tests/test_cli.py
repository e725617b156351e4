"""The command line of check, recommend, record and explain: exit codes, stdout, stderr, files of every kind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from pages import CAPTURES, EXPOSITION, engine_page
from parts import eventually, free_port
from servers import Replay, Request, answer, server

from kvwatch import checks
from kvwatch.cli import COMMANDS, cli
from kvwatch.exposition import MAX_PAGE_BYTES

HEALTHY, PREFIX, THRASH = (str(CAPTURES / name) for name in ("healthy", "prefix", "thrash"))
KVWATCH = (sys.executable, "-m", "kvwatch")


def run(*arguments: str, env: dict[str, str] | None = None, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), env=env, input=stdin)


def process(
    arguments: Sequence[str], *, env: dict[str, str] | None = None, stdout: int = subprocess.PIPE
) -> "subprocess.Popen[str]":
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVWATCH_")}
    return subprocess.Popen(
        [*KVWATCH, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, env={**plain, **(env or {})}
    )


def worst(result: Result) -> str:
    report = json.loads(result.stdout)
    assert report["kind"] == "report"
    return str(report["worst"])


# Exit codes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "recommend"])
@pytest.mark.parametrize(("source", "code"), [(HEALTHY, 0), (PREFIX, 0), (THRASH, 1)])
def test_the_exit_code_says_whether_something_was_found(command: str, source: str, code: int) -> None:
    result = run(command, source)
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout


@pytest.mark.parametrize(
    ("source", "fail_on", "code"),
    [
        (THRASH, "critical", 1),
        (HEALTHY, "warning", 0),
        (str(EXPOSITION / "nim_llama31_8b.prom"), "warning", 1),
        (str(EXPOSITION / "nim_llama31_8b.prom"), "critical", 0),
    ],
)
def test_the_level_that_counts_as_found_is_a_choice(source: str, fail_on: str, code: int) -> None:
    assert run("check", source, "--fail-on", fail_on).exit_code == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "no-such-file"],
        ["check", THRASH, "--window", "soon"],
        ["check", THRASH, "--output", "xml"],
        ["check", THRASH, "--header", "Bearer s3cret"],
        ["check", "http://127.0.0.1:1", "--header", "Authorization: Bearer s3cret\nX: y"],
        ["check", "http://user:s3cret@127.0.0.1:1"],
        ["frobnicate"],
        ["explain", "no_such_check"],
        ["record", THRASH, "--output", "somewhere"],
        ["record", "http://127.0.0.1:1"],
        ["recommend", THRASH, "--watermark", "0.05", "--vllm-version", "0.20.0"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_2_with_a_reason_on_stderr(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert "s3cret" not in result.stderr


def test_a_source_that_fails_beside_one_that_does_not_is_2_and_the_rest_is_reported() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    result = run("check", HEALTHY, dead, "--output", "json")
    assert result.exit_code == 2
    assert len(json.loads(result.stdout)["engines"]) == 1
    assert f"Error: {dead}/metrics: no connection" in result.stderr


def test_an_interrupt_is_130() -> None:
    with server({"/metrics": answer(engine_page())}) as address:
        started = process(["check", address, "--window", "60s"])
        assert started.stderr is not None
        assert "sampling" in started.stderr.readline()
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=30)
    assert (started.returncode, out) == (130, "")
    assert "Interrupted." in err
    assert "Traceback" not in err


# Output --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "recommend"])
def test_json_and_yaml_hold_the_same_report(command: str) -> None:
    as_json, as_yaml = (run(command, THRASH, "--output", kind).stdout for kind in ("json", "yaml"))
    assert json.loads(as_json) == yaml.safe_load(as_yaml)
    assert list(json.loads(as_json))[:2] == ["schema_version", "kind"]


@pytest.mark.parametrize("command", ["check", "recommend"])
def test_html_is_one_page_that_does_not_refresh_and_exits_as_text_does(command: str) -> None:
    result = run(command, THRASH, "--output", "html")
    assert result.exit_code == 1
    assert result.stdout.startswith("<!doctype html>")
    assert "the KV pool is thrashing" in result.stdout
    assert "as of 20" in result.stdout
    assert "http-equiv='refresh'" not in result.stdout


def test_args_are_the_flags_of_the_next_rollout_alone() -> None:
    told = json.loads(run("recommend", THRASH, "--output", "json").stdout)["engines"][0]["recommendations"]
    result = run("recommend", THRASH, "--output", "args")
    assert result.exit_code == 1
    assert result.stdout == " ".join(item["flag"] for item in told if item["apply"] == "restart") + "\n"


def test_args_of_an_engine_that_is_fine_are_nothing() -> None:
    result = run("recommend", HEALTHY, "--output", "args")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No flag is proposed" in result.stderr


def test_recommend_names_what_to_do_before_what_is_fine() -> None:
    text = run("recommend", THRASH).stdout
    assert text.index("Now, without a restart") < text.index("unknown")


def test_the_talk_of_a_live_look_is_on_stderr() -> None:
    with server({"/metrics": answer(engine_page())}) as address:
        result = run("check", address, "--window", "0.2s", "--output", "json")
    assert worst(result) == "unknown"
    assert result.stderr == f"sampling {address} for 0 s\n"


def test_a_reader_that_has_seen_enough_changes_no_exit_code() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    started = process(["check", THRASH], stdout=write_end)
    os.close(write_end)
    _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (1, "")
    shell = f"{' '.join(KVWATCH)} check {THRASH} --output json | head -1"
    out = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("{\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_a_result_that_cannot_be_written_is_2() -> None:
    with Path("/dev/full").open("w") as full:
        started = process(["check", HEALTHY], stdout=full.fileno())
        _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (2, "Error: the result cannot be written: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize(
    ("arguments", "redirection", "said"),
    [
        (f"check {HEALTHY}", ">&-", "Error: the result cannot be written: Bad file descriptor\n"),
        (f"check {HEALTHY}", ">&- 2>&-", ""),
        ("check nowhere", "2>&-", ""),
        ("check nowhere", "2>/dev/full", ""),
        ("check --nosuch", "2>/dev/full", ""),
    ],
)
def test_where_nothing_can_be_written_the_exit_code_says_so(arguments: str, redirection: str, said: str) -> None:
    shell = f"{' '.join(KVWATCH)} {arguments} {redirection}"
    out = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout, out.stderr) == (2, "", said)


def test_a_terminal_that_cannot_show_a_name_does_not_end_the_command(tmp_path: Path) -> None:
    page = tmp_path / "page.prom"
    page.write_text(engine_page(model_name="模型-e"), encoding="utf-8")
    for kind in ("text", "json"):
        started = process(["check", str(page), "--output", kind], env={"PYTHONIOENCODING": "latin-1"})
        out, err = started.communicate(timeout=30)
        assert (started.returncode, err) == (0, "")
        assert "??-e" in out


def test_no_colour_reaches_a_pipe() -> None:
    started = process(["check", THRASH], env={"FORCE_COLOR": "1", "TERM": "xterm"})
    out, _ = started.communicate(timeout=30)
    assert "\x1b" not in out


# Help ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [name for name, _ in COMMANDS])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: cli {command} [OPTIONS]")


def test_the_list_of_commands() -> None:
    result = run("--help")
    assert [name for name, _ in COMMANDS] == re.findall(r"^  ([a-z]+) {2,}", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "own"),
    [("check", "--fail-on"), ("recommend", "--objective"), ("agent", "--alertmanager"), ("budget", "--context")],
)
def test_help_has_the_options_of_the_command_before_those_of_the_engine(command: str, own: str) -> None:
    text = run(command, "--help").stdout
    options, engine, flags = map(text.index, ("\nOptions:\n", "\nThe engine:\n", "\nvLLM flags of the engine:\n"))
    assert options < text.index(f"  {own}") < text.index("--help") < engine < text.index("  --model ") < flags
    assert flags < text.index("  --max-model-len")
    assert "  SOURCE...\n" not in text


@pytest.mark.parametrize("typed", ["preemption_sustained", "Preemptions-Sustained"])
def test_a_mistyped_check_is_answered_with_the_nearest(typed: str) -> None:
    assert "did you mean preemptions_sustained?" in run("explain", typed).stderr


def test_explain_lists_the_checks_and_prints_their_pages() -> None:
    listed = run("explain").stdout.splitlines()
    assert [line.split()[0] for line in listed if line[0] != " "] == [check.id for check in checks.ALL]
    assert max(map(len, listed)) <= 80
    for check in checks.ALL:
        page = run("explain", check.id).stdout
        assert page.startswith(f"# {check.id}\n")
        assert all(f"## {part}" in page for part in ("Meaning", "Impact", "Diagnosis", "Mitigation"))


# Environment ---------------------------------------------------------------------------------------------------------


def test_variables_are_named_as_the_flags_are() -> None:
    assert worst(run("check", HEALTHY, env={"KVWATCH_CHECK_OUTPUT": "json"})) == "unknown"
    assert run("check", THRASH, env={"KVWATCH_CHECK_FAIL_ON": "never"}).exit_code == 2
    assert run("check", THRASH, env={"KVWATCH_CHECK_WINDOW": "soon"}).exit_code == 2
    assert run("recommend", HEALTHY, env={"KVWATCH_CHECK_WINDOW": "soon"}).exit_code == 0


def test_a_flag_wins_over_a_variable() -> None:
    result = run("check", HEALTHY, "--output", "json", env={"KVWATCH_CHECK_OUTPUT": "text"})
    assert worst(result) == "unknown"


def test_headers_in_the_environment_are_one_a_line() -> None:
    seen: list[Request] = []
    with server({"/metrics": answer(engine_page())}, seen=seen) as address:
        headers = "Authorization: Bearer a b\nX-Scope-OrgID: team"
        result = run("check", address, "--window", "0s", env={"KVWATCH_CHECK_HEADER": headers})
    assert result.exit_code == 0, result.stderr
    sent = {(r.headers["Authorization"], r.headers["X-Scope-OrgID"]) for r in seen}
    assert sent == {("Bearer a b", "team")}


# Files, pipes and captures -------------------------------------------------------------------------------------------


def test_a_page_on_standard_input() -> None:
    page = engine_page(running=2).encode()
    result = run("check", "-", "--output", "json", stdin=page)
    (engine,) = json.loads(result.stdout)["engines"]
    assert (engine["target"], engine["observed"]["running_requests"]) == ("stdin", 2)


def broken_files() -> dict[str, bytes]:
    return {
        "empty.prom": b"",
        "blank.prom": b"\n \n",
        "binary.prom": bytes(range(256)),
        "huge.prom": b"#" * (MAX_PAGE_BYTES + 1),
        "cut.prom": engine_page().encode()[:-9],
        "other.prom": b"node_cpu_seconds_total 5\n",
        "login.prom": b"<!doctype html><title>log in</title>",
        "router.prom": b'vllm:num_requests_running{server="http://pod:8000"} 1\n',
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_file_in_which_nothing_can_be_read_is_2_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(broken_files()[name])
    result = run("check", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {tmp_path / name}: ")
    assert len(result.stderr) > len(f"Error: {tmp_path / name}: ") + 40


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    page = tmp_path / "page.prom"
    page.write_text(engine_page())
    page.chmod(0)
    if os.access(page, os.R_OK):
        pytest.skip("this user may read every file")
    result = run("check", str(page))
    assert (result.exit_code, result.stderr) == (2, f"Error: {page}: Permission denied\n")


@pytest.mark.parametrize("page", sorted(EXPOSITION.glob("*.prom")), ids=lambda path: path.stem)
def test_every_recorded_page_is_answered(page: Path) -> None:
    for command in ("check", "recommend"):
        result = run(command, str(page), "--output", "json")
        assert result.exit_code in {0, 1}, result.stderr
        for engine in json.loads(result.stdout)["engines"]:
            assert [finding["check"] for finding in engine["findings"]] == [check.id for check in checks.ALL]


def captured(folder: Path, pages: dict[int, str]) -> str:
    for unix_ms, page in pages.items():
        (folder / f"{unix_ms}.prom").write_text(page)
    return str(folder)


def test_a_capture_with_a_truncated_page_is_judged_without_it_and_says_so(tmp_path: Path) -> None:
    pages = {1000 * n: engine_page(preemptions=n) for n in range(5)}
    result = run("check", captured(tmp_path, {**pages, 2500: pages[2000][:200]}), "--output", "json")
    report = json.loads(result.stdout)
    assert report["window_seconds"] == 4
    assert ["1 of 6 pages left out" in note for note in report["notes"]] == [True]


def test_a_capture_over_a_restart_counts_what_was_before_and_after(tmp_path: Path) -> None:
    def page(second: int) -> str:
        fresh = second >= 30
        counted = second - 30 if fresh else 5000 + second
        return engine_page(preemptions=counted, finished=40 * counted, started=1.8e9 if fresh else 1.7e9)

    report = json.loads(run("check", captured(tmp_path, {1000 * s: page(s) for s in range(0, 60, 5)}), "-ojson").stdout)
    (engine,) = report["engines"]
    assert engine["restarts"] == 1
    assert engine["observed"]["preemptions_per_second"] == pytest.approx(1.0)


def test_a_capture_in_which_engines_come_and_go(tmp_path: Path) -> None:
    two = engine_page(engine="0") + engine_page(engine="1", started=None, config={})
    folder = captured(tmp_path, {1000: engine_page(engine="0"), 2000: two, 3000: engine_page(engine="1")})
    report = json.loads(run("check", folder, "--output", "json").stdout)
    assert {engine["engine"]: engine["at_seconds"] for engine in report["engines"]} == {"0": 2, "1": 3}
    assert len(report["notes"]) == 1
    assert "m engine 0" in report["notes"][0]


def test_the_same_target_twice_and_two_targets_of_one_model() -> None:
    report = json.loads(run("check", HEALTHY, HEALTHY, PREFIX, "--output", "json").stdout)
    assert [(e["target"], e["model_name"], e["engine"]) for e in report["engines"]] == [
        (HEALTHY, "tiny-llama", "0"),
        (PREFIX, "tiny-llama", "0"),
    ]


# record --------------------------------------------------------------------------------------------------------------


def test_a_recording_can_be_judged(tmp_path: Path) -> None:
    replay = Replay(CAPTURES / "thrash", speed=20)
    with server({"/metrics": replay}) as address:
        result = run("record", address, "--output", str(tmp_path / "new"), "--interval", "0.1s", "--duration", "2s")
    assert result.exit_code == 0, result.stderr
    saved = sorted((tmp_path / "new").glob("*"))
    assert result.stdout == f"{len(saved)} pages in {tmp_path / 'new'}\n"
    assert len(saved) > 5
    found = run("check", str(tmp_path / "new"), "--output", "json")
    (engine,) = json.loads(found.stdout)["engines"]
    assert {f["check"]: f["status"] for f in engine["findings"]}["preemptions_sustained"] == "critical"


def test_a_recording_is_not_mixed_with_another(tmp_path: Path) -> None:
    (tmp_path / "1000.prom").write_text(engine_page())
    with server({"/metrics": answer(engine_page())}) as address:
        result = run("record", address, "--output", str(tmp_path), "--duration", "0s")
    assert result.exit_code == 2
    assert "holds 1 pages already" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["1000.prom"]


def test_a_recording_of_a_server_that_does_not_answer_leaves_nothing(tmp_path: Path) -> None:
    result = run("record", f"http://127.0.0.1:{free_port()}", "--output", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "no connection" in result.stderr
    assert list((tmp_path / "new").glob("*")) == []
    assert not (tmp_path / "new").exists()  # it would be read as a recording


def test_a_folder_that_was_there_stays_where_nothing_could_be_recorded(tmp_path: Path) -> None:
    result = run("record", f"http://127.0.0.1:{free_port()}", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert tmp_path.is_dir()


def test_a_recording_of_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with server({"/metrics": answer("node_cpu_seconds_total 5\n")}) as address:
        result = run("record", address, "--output", str(tmp_path), "--duration", "0s")
    assert result.exit_code == 2
    assert "has no vLLM metric" in result.stderr


def test_a_recording_that_is_interrupted_keeps_its_pages(tmp_path: Path) -> None:
    with server({"/metrics": answer(engine_page())}) as address:
        started = process(["record", address, "--output", str(tmp_path), "--interval", "0.1s", "--duration", "1h"])
        eventually(lambda: len(list(tmp_path.glob("*.prom"))) > 2)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=30)
    assert started.returncode == 0
    assert "the pages so far are saved" in err
    assert out.endswith(f"pages in {tmp_path}\n")


@pytest.mark.parametrize("arguments", [["--interval", "0s"], ["--output", "/dev/null/x"], ["--duration", "x"]])
def test_settings_of_a_recording_that_cannot_be(tmp_path: Path, arguments: list[str]) -> None:
    result = run("record", "http://127.0.0.1:1", "--output", str(tmp_path), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error" in result.stderr


def test_a_slow_server_is_not_asked_in_a_burst(tmp_path: Path) -> None:
    times: list[float] = []
    lock = threading.Lock()

    def slow_once(handler: object) -> None:
        with lock:
            times.append(time.monotonic())
            first = len(times) == 1
        if first:
            time.sleep(1.0)
        answer(engine_page())(handler)  # type: ignore[arg-type] # as the server gave it

    with server({"/metrics": slow_once}) as address:
        result = run("record", address, "--output", str(tmp_path), "--interval", "0.2s", "--duration", "1.5s")
    assert result.exit_code == 0
    assert len(times) <= 5  # of eight rounds, those of the first second were missed
