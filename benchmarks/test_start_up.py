"""Starting up: `kvwatch check FILE` of an installed wheel, against what any Python exporter costs at least.

On a machine where importing prometheus_client takes 0.07 s of CPU, the check takes 0.10 to 0.12 s.
"""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests/data/exposition/vllm-0.32.0-all-families.prom"
MOST_CPU_RATIO, MOST_MEBIBYTES = 2.0, 40.0
ROUNDS = 7


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with nothing but kvwatch, installed from its wheel."""
    folder = tmp_path_factory.mktemp("install")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("kvwatch-*.whl")
    subprocess.run([*pip, "install", str(wheel)], check=True)
    return folder / "venv/bin"


# A small process between: what is forked from pytest would count pytest's memory as its own.
MEASURE = """
import os, sys
nowhere = os.open(os.devnull, os.O_WRONLY)
actions = [(os.POSIX_SPAWN_DUP2, nowhere, 1), (os.POSIX_SPAWN_DUP2, nowhere, 2)]
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions)
_, status, usage = os.wait4(process, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def spent(command: Sequence[str]) -> tuple[float, float]:
    """CPU seconds, and the largest resident set in MiB, of one run."""
    run = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    code, cpu_seconds, largest = run.stdout.split()
    assert code in {"0", "1"}
    return float(cpu_seconds), float(largest) / (1024 * 1024 if sys.platform == "darwin" else 1024)


def least(command: Sequence[str]) -> tuple[float, float]:
    """The least of several runs: what the command takes where nothing else runs."""
    runs = [spent(command) for _ in range(ROUNDS + 1)][1:]  # the first writes the byte code
    return min(cpu for cpu, _ in runs), min(rss for _, rss in runs)


def test_a_check_of_a_file_costs_little_more_than_importing_prometheus_client(installed: Path) -> None:
    python, kvwatch = str(installed / "python"), str(installed / "kvwatch")
    bare_cpu, bare_rss = least([python, "-c", "pass"])
    peer_cpu, _ = least([python, "-c", "import prometheus_client"])
    check_cpu, check_rss = least([kvwatch, "check", str(PAGE)])
    help_cpu, help_rss = least([kvwatch, "--help"])
    print(
        f"\nbare {bare_cpu:.3f} s CPU, {bare_rss:.1f} MiB; import prometheus_client +{peer_cpu - bare_cpu:.3f} s; "
        f"check FILE +{check_cpu - bare_cpu:.3f} s, {check_rss:.1f} MiB; "
        f"--help +{help_cpu - bare_cpu:.3f} s, {help_rss:.1f} MiB"
    )
    assert check_cpu - bare_cpu <= MOST_CPU_RATIO * (peer_cpu - bare_cpu)
    assert check_rss <= MOST_MEBIBYTES
