"""What the pictures show: an incident on three recorded engines, with an agent, the alert rules and a real Prometheus.

chat-0 is overloaded after a while and stays so; docs-0 restarts and loses its prefix cache; chat-1 is well.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from recorded import Part, Played, server

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from parts import free_port, prometheus, running, serving  # noqa: E402 -- tests/ is no package
from test_live_budget import TINY  # noqa: E402 -- the model of the recorded engines

ENGINES: Mapping[str, tuple[Part, ...]] = {
    "chat-0:8000": (Part(capture="healthy", seconds=80), Part(capture="thrash")),
    "chat-1:8000": (Part(capture="healthy"),),
    "docs-0:8000": (Part(capture="prefix", seconds=200), Part(capture="prefix", down_seconds=20)),
}
LENGTH_SECONDS = 440.0
"""At least: figures over five minutes show the overload alone, and a critical alert fires."""
RATE_INTERVAL = "40s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    prometheus: str
    started_seconds: float

    @property
    def ends_seconds(self) -> float:
        """Unix time. No time label of an axis falls on the right edge, where half of it would be cut off."""
        ends = math.ceil(self.started_seconds + LENGTH_SECONDS)
        while ends % 60 != 26 or ends % 300 < 70:
            ends += 1
        return ends


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[Scene]:
    """The engines, an agent that knows their model, and a Prometheus that scrapes both and has the alert rules."""
    model = folder / "config.json"
    model.write_text(json.dumps(TINY))
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(serving(server(Played(parts)))) for name, parts in ENGINES.items()}
        agent = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "kvwatch", "agent", "--listen", agent, "--window", "30s"]
        command += ["--model", str(model), *(f"--target={url}" for url in urls.values())]
        started = time.time()
        stack.enter_context(running(command, log=folder / "agent.log", ready_url=f"http://{agent}/metrics"))
        address = stack.enter_context(prometheus(folder, yaml.safe_dump(configuration(urls, agent))))
        yield Scene(prometheus=address, started_seconds=started)


def configuration(urls: Mapping[str, str], agent: str) -> dict[str, Any]:
    """prometheus.yml. Instances and targets get the names of the engines instead of their addresses here."""
    engines = [{"targets": [url.removeprefix("http://")], "labels": {"instance": name}} for name, url in urls.items()]
    renamed = [
        {"source_labels": ["target"], "regex": url, "target_label": "target", "replacement": f"http://{name}"}
        for name, url in urls.items()
    ]
    return {
        "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "5s"},
        "rule_files": [str(ROOT / "alerts/kvwatch.rules.yaml")],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": engines},
            {"job_name": "kvwatch", "static_configs": [{"targets": [agent]}], "metric_relabel_configs": renamed},
        ],
    }
