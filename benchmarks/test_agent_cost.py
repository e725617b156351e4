"""The agent stays within its budget while an engine thrashes: one minute, on a machine with a core to spare."""

import subprocess
import sys
from pathlib import Path

MEASURE = Path(__file__).parent / "measure_agent.py"


def test_a_minute_of_the_agent_costs_less_than_its_budget() -> None:
    run = subprocess.run([sys.executable, MEASURE, "--seconds", "60"], capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
