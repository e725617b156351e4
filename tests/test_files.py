"""Reading files that were named by a user: up to a bound, and never forever."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvwatch import files
from kvwatch.cli import cli
from kvwatch.errors import SourceError
from kvwatch.files import bounded_text, read_up_to

PAGE = Path(__file__).parent / "data" / "exposition" / "dp2_engines.prom"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SILENCE_SECONDS", 0.3)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": "80"})


def test_a_file_is_read_whole_up_to_the_bound_and_refused_beyond_it(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfabc")
    assert bounded_text(file, limit_bytes=6) == "abc"
    assert read_up_to(file, 4) == b"\xef\xbb\xbfa"
    with pytest.raises(SourceError, match="more than 5 bytes"):
        bounded_text(file, limit_bytes=5)


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(SourceError, match=r"/dev/zero: more than 1,000,000 bytes"):
        bounded_text(Path("/dev/zero"), limit_bytes=1_000_000)


@pytest.mark.usefixtures("impatient")
def test_a_fifo_into_which_nobody_writes_is_an_error_with_the_time_waited(fifo: Path) -> None:
    with pytest.raises(SourceError, match=r"fifo: nothing was written into it for 0\.3 s"):
        bounded_text(fifo, limit_bytes=10)


@pytest.mark.usefixtures("impatient")
def test_a_fifo_whose_writer_falls_silent_is_an_error_too(fifo: Path) -> None:
    with subprocess.Popen(["sh", "-c", f"exec >{fifo}; printf abc; exec sleep 60"]) as writer:
        try:
            with pytest.raises(SourceError, match="nothing was written into it"):
                bounded_text(fifo, limit_bytes=10)
        finally:
            writer.kill()


def test_a_fifo_is_read_to_its_end_however_it_is_written(fifo: Path) -> None:
    def write() -> None:
        with fifo.open("wb", buffering=0) as file:
            for piece in (b"a" * 100_000, b"b" * 100_000):
                file.write(piece)
                time.sleep(0.05)

    threading.Thread(target=write, daemon=True).start()
    assert bounded_text(fifo, limit_bytes=1_000_000) == "a" * 100_000 + "b" * 100_000


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "command",
    [
        ("budget", "--model"),
        ("budget", "--vllm-args-file"),
        ("simulate", "--workload"),
        ("check",),
        ("recommend",),
        ("agent", "--config"),
        ("lint",),
    ],
    ids=" ".join,
)
def test_no_command_hangs_on_a_fifo_or_reads_a_device_without_end(command: tuple[str, ...], fifo: Path) -> None:
    for file, said in ((str(fifo), "nothing was written into it"), ("/dev/zero", "more than")):
        result = run(*command, file)
        assert (result.exit_code, result.stdout) == (2, "")
        assert file in result.stderr
        assert said in result.stderr


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["device", "fifo", "enormous"])
def test_no_file_of_a_models_folder_is_read_without_end(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
    result = run("budget", "--model", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(file) in result.stderr


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("key", ["requests_file", "request_log"])
def test_no_list_of_requests_is_read_without_end(key: str, fifo: Path, tmp_path: Path) -> None:
    workload = tmp_path / "workload.yaml"
    workload.write_text(f"engine: {{num_gpu_blocks: 100}}\n{key}: {fifo.name}\n")
    result = run("simulate", "--workload", str(workload))
    assert result.exit_code == 2
    assert "fifo: nothing was written into it" in result.stderr


@pytest.mark.usefixtures("impatient")
def test_a_page_of_a_capture_that_is_a_fifo_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1700000000000.prom")
    (tmp_path / "1700000002000.prom").write_bytes(PAGE.read_bytes())
    result = run("check", str(tmp_path))
    assert result.exit_code in {0, 1}
    assert "1 of 2 pages left out" in " ".join(result.output.split())


@pytest.mark.usefixtures("impatient")
def test_a_generated_file_that_is_a_fifo_is_not_waited_for(fifo: Path) -> None:
    result = run("generate", "rules", "--output", str(fifo))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{fifo}: cannot be read" in result.stderr


def test_a_model_may_come_through_a_pipe() -> None:
    """As from `--model <(jq .text_config config.json)`."""
    command = [sys.executable, "-m", "kvwatch", "budget", "--model", "/dev/stdin", "--kv-cache-memory-bytes", "4GiB"]
    done = subprocess.run(command, input=json.dumps(CONFIG), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_line_on_standard_input_is_refused_rather_than_cut_off() -> None:
    result = CliRunner().invoke(
        cli, ["budget", "--vllm-args-file", "-"], input="vllm serve m" + " --no-such-flag" * 100_000
    )
    assert result.exit_code == 2
    assert "standard input: more than 1,048,576 bytes" in result.stderr
