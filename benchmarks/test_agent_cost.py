"""The agent stays within its budget while an engine thrashes, on a machine with a core to spare."""

import subprocess
import sys
from pathlib import Path

MEASURE = Path(__file__).parent / "measure_agent.py"


def test_the_agent_costs_less_than_its_budget() -> None:
    run = subprocess.run([sys.executable, MEASURE], capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
