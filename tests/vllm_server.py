"""A real vLLM for tests: the tiny model on the CPU, served by `tools/serve_vllm.sh` on a free port of 127.0.0.1."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parts import answers, free_port, missing

TOOLS = Path(__file__).parent.parent / "tools"
START_SECONDS = 900  # 25 s on two idle cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Its base address, and the group of its processes."""

    address: str
    group: int


def vllm_python() -> str:
    """The Python that has vLLM. Skips the test if there is none, or fails it under KVWATCH_REQUIRE_PARTS=1."""
    where = subprocess.run([TOOLS / "install_vllm.sh", "--where"], capture_output=True, text=True, check=True)
    python = where.stdout.strip()
    if not Path(python).exists():
        missing("vLLM")
    return python


@contextlib.contextmanager
def vllm_server(log: Path, *flags: str) -> Iterator[Server]:
    """Serve the tiny model with these `vllm serve` flags until the block ends."""
    vllm_python()
    port = free_port()
    command = [str(TOOLS / "serve_vllm.sh"), str(port), *flags]
    if shutil.which("setpriv"):  # a test run that is killed takes its server with it
        command = ["setpriv", "--pdeathsig", "TERM", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, address, log)
        yield Server(address=address, group=process.pid)
    finally:
        _end(process)


def _wait_until_ready(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not answers(f"{address}/health"):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "was not ready in time" if process.poll() is None else f"ended with status {process.returncode}"
            raise RuntimeError(f"vLLM {state}:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the server and its engine, two processes in a group of their own."""
    for how, patience_seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_seconds)
