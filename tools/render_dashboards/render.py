"""Pictures of the dashboards: recorded engines and an agent, scraped by a real Prometheus, drawn in Chromium.

usage: python tools/render_dashboards/render.py [OUTPUT_FOLDER]      needs Prometheus, Node with npm, Chromium

Grafana itself is not needed: app.jsx draws with Grafana's own components from npm (see there). They go to
$KVWATCH_CACHE/grafana-components (~/.cache/kvwatch; 1 GB).
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from parts import binary, free_port, prometheus, running, serving  # noqa: E402 -- tests/ is no package

CAPTURES = ROOT / "tests/data/captures"
# Instance, captures it plays one after another, seconds before it starts. Pages last SLOWER times as long as recorded.
ENGINES = {
    "chat-0:8000": ("healthy", "thrash"),
    "chat-1:8000": ("healthy", "healthy"),
    "docs-0:8000": ("prefix", "prefix"),
}
SLOWER = 2.0
RATE_INTERVAL = "20s"
PICTURES: tuple[tuple[str, str, int, str, int | None, dict[str, str]], ...] = (
    # file, dashboard, width, theme, height (None: all of it), what is chosen
    ("dashboard-fleet", "kvwatch-fleet", 1280, "dark", None, {}),
    ("dashboard-engine", "kvwatch-engine", 1280, "dark", 1110, {"instance": "chat-0:8000", "target": ".*chat-0.*"}),
    ("dashboard-incident", "kvwatch-incident", 1280, "light", None, {}),
)
LOADERS = ("svg=dataurl", "woff2=dataurl", "ttf=empty")


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        build(folder)
        started = time.time()
        address = stack.enter_context(watched(folder))
        length = max(sum(seconds(capture) for capture in captures) for captures in ENGINES.values())
        print(f"recording for {length:.0f} s")
        time.sleep(length)
        for path in (ROOT / "dashboards").glob("*.json"):
            (folder / path.name).write_bytes(path.read_bytes())
        page = stack.enter_context(serving(functools.partial(Quiet, directory=str(folder))))  # type: ignore[arg-type]
        for name, dashboard, width, theme, height, chosen in PICTURES:
            query = {
                "dashboard": f"{dashboard}.json",
                "prometheus": address,
                "theme": theme,
                "from": started,
                "to": time.time(),
                "rate": RATE_INTERVAL,
                **{f"var-{variable}": value for variable, value in chosen.items()},
            }
            draw(f"{page}/index.html?{urllib.parse.urlencode(query)}", output / f"{name}.png", width, height)


class Quiet(SimpleHTTPRequestHandler):
    """Serves the page and the dashboards without a log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def build(folder: Path) -> None:
    """app.jsx with Grafana's components in one file."""
    cache = Path(os.environ.get("KVWATCH_CACHE") or Path.home() / ".cache/kvwatch") / "grafana-components"
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "app.jsx"):
        shutil.copyfile(HERE / name, cache / name)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps"], cwd=cache, check=True)
    command = ["npx", "esbuild", "app.jsx", "--bundle", "--log-level=error", f"--outfile={folder / 'app.js'}"]
    command += ['--define:process.env.NODE_ENV="production"', "--define:global=window"]
    command += ["--alias:react-router-dom-v5-compat=react-router-dom"]  # the first asks for version 5 of the second
    command += [f"--loader:.{loader}" for loader in LOADERS]
    subprocess.run(command, cwd=cache, check=True)
    (folder / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="app.css">'
        '<div id="root"></div><script src="app.js"></script>'
    )


def seconds(capture: str) -> float:
    pages = sorted((CAPTURES / capture).glob("*.prom"))
    return SLOWER * (int(pages[-1].stem) - int(pages[0].stem)) / 1000


def played(captures: tuple[str, ...]) -> type[BaseHTTPRequestHandler]:
    """A server that shows captures one after another from its first scrape on."""
    pages: list[tuple[float, bytes]] = []
    offset = 0.0
    for capture in captures:
        files = sorted((CAPTURES / capture).glob("*.prom"))
        first = int(files[0].stem)
        pages += [(offset + SLOWER * (int(file.stem) - first) / 1000, file.read_bytes()) for file in files]
        offset = pages[-1][0] + 2
    started: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            started[:] = started or [time.monotonic()]
            elapsed = time.monotonic() - started[0]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(max((one for one in pages if one[0] <= elapsed), key=lambda one: one[0])[1])

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[str]:
    """The engines, an agent and a Prometheus that scrapes both; gives the address of Prometheus."""
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(serving(played(captures))) for name, captures in ENGINES.items()}
        agent = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "kvwatch", "agent", "--listen", agent, "--interval", "1s", "--window", "20s"]
        for url in urls.values():
            command += ["--target", url]
        stack.enter_context(running(command, log=folder / "agent.log", ready_url=f"http://{agent}/metrics"))
        jobs = [
            {
                "job_name": "vllm",
                "static_configs": [
                    {"targets": [url.removeprefix("http://")], "labels": {"instance": name}}
                    for name, url in urls.items()
                ],
            },
            {
                "job_name": "kvwatch",
                "static_configs": [{"targets": [agent]}],
                "metric_relabel_configs": [
                    {
                        "source_labels": ["target"],
                        "regex": url,
                        "target_label": "target",
                        "replacement": f"http://{name}",
                    }
                    for name, url in urls.items()
                ],
            },
        ]
        rules = folder / "rules.yml"
        rules.write_text(
            yaml.safe_dump(
                {
                    "groups": [
                        {
                            "name": "shown",
                            "rules": [
                                {
                                    "alert": "VLLMPreemptionsSustained",
                                    "expr": "rate(vllm:num_preemptions_total[20s]) > 0.1",
                                    "for": "5s",
                                    "labels": {"severity": "critical"},
                                }
                            ],
                        }
                    ]
                }
            )
        )
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": jobs,
        }
        yield stack.enter_context(prometheus(folder, yaml.safe_dump(config)))


def draw(url: str, picture: Path, width: int, height: int | None) -> None:
    """A picture of the page, of all of it where no height is given: then it is loaded once more to learn its height."""
    if height is None:
        page = chromium(["--dump-dom", f"--window-size={width},1000"], url)
        height = int(page.partition("<title>drawn ")[2].partition("</title>")[0])
    chromium([f"--screenshot={picture}", f"--window-size={width},{height}"], url)
    print(picture, f"{picture.stat().st_size // 1024} KB")


def chromium(arguments: list[str], url: str) -> str:
    command = [binary("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--disable-background-networking", "--virtual-time-budget=20000", *arguments, url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images")
