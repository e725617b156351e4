"""The releases of Prometheus that are found: the one on PATH, and one of 3 or later in a folder of its own.

A range holds the sample at its beginning up to Prometheus 2 and no more from 3 on, so a rule at an edge is judged
otherwise. Both judge it where both are there: `tools/fetch_prometheus_3.sh` fetches the second one if it can be had.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from parts import missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`promtool` or `prometheus` of one release; as text the end of a test's name."""

    name: str
    release: str = "missing"
    path: str = ""

    def __str__(self) -> str:
        return f"{self.name}-{self.release}"

    def run(self, *arguments: str | Path, given: str = "") -> "subprocess.CompletedProcess[str]":
        """Its answer. Skips the test where there is no such program, or fails it under KVWATCH_REQUIRE_PARTS=1."""
        command = [self.path or missing(self.name), *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)

    def judge(self, folder: Path, test: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        """promtool's verdict on a unit test of rules, which it finds beside the test in `folder`."""
        file = folder / "test.yaml"
        file.write_text(yaml.safe_dump(test, sort_keys=False))
        return self.run("test", "rules", file)


@cache
def found(name: str) -> tuple[Program, ...]:
    """One for each release, the one on PATH first; a missing one where there is none at all."""
    by_release: dict[str, Program] = {}
    for path in filter(None, (shutil.which(name), shutil.which(name, path=str(_folder())))):
        program = _program(name, path)
        by_release.setdefault(program.release, program)
    return tuple(by_release.values()) or (Program(name=name),)


def header() -> str:
    """What is found, for the first lines of a test run."""
    said = [f"{program} ({program.path})" if program.path else str(program) for program in found("promtool")]
    if not any(int(program.release.partition(".")[0]) >= 3 for program in found("promtool") if program.path):
        said.append("none of Prometheus 3, see tools/fetch_prometheus_3.sh")
    return ", ".join(said)


def _folder() -> Path:
    """Where the second release is: KVWATCH_PROMETHEUS_3, or the cache that the tools share."""
    given = os.environ.get("KVWATCH_PROMETHEUS_3")
    if given and not shutil.which("promtool", path=given):
        raise pytest.UsageError(f"KVWATCH_PROMETHEUS_3={given} is no folder with a promtool; name one, or unset it")
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given or Path(os.environ.get("KVWATCH_CACHE") or user_cache / "kvwatch") / "prometheus-3")


def _program(name: str, path: str) -> Program:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr  # promtool 2 says it on stderr
    match = re.search(r", version (\d[\d.]*)", said)
    if not match:
        raise pytest.UsageError(f"{path} --version names no release: {said!r}; mend it or take it away")
    return Program(name=name, release=match[1], path=path)
