"""Pictures of the dashboards: recorded engines and an agent, scraped by a real Prometheus, drawn in Chromium.

usage: python tools/render_dashboards/render.py [OUTPUT_FOLDER]      needs Prometheus, Node with npm, Chromium

Grafana itself is not needed: app.jsx draws with Grafana's own components from npm (see there). They go to
$KVWATCH_CACHE/grafana-components (~/.cache/kvwatch; 1 GB). It takes ten minutes: see scene.py for what is played.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from scene import RATE_INTERVAL, ROOT, Scene, playing

from parts import binary, serving  # isort: skip -- scene.py made tests/ importable

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("KVWATCH_CACHE") or Path.home() / ".cache/kvwatch") / "grafana-components"
SOURCES = ("package.json", "app.jsx", "bands.jsx", "annotations.js", "frames.js", "smaller.mjs")
LOADERS = ("svg=dataurl", "woff=dataurl", "woff2=dataurl", "ttf=empty")
CHOSEN: Mapping[str, Mapping[str, str]] = {
    "fleet": {},
    "engine": {"instance": "chat-0:8000", "target": ".*chat-0.*"},
    "incident": {},
}
TOP_OF_ENGINE = 1332
"""Pixels at a width of 1280: down to the proposed settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A dashboard at a width; all of it where no height is given. Pixels."""

    name: str
    dashboard: str
    theme: str
    width: int
    height: int | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)


def pictures() -> Iterator[Picture]:
    for dashboard, chosen in CHOSEN.items():
        for theme in ("dark", "light"):
            for width in (1280, 1920):
                name = f"{dashboard}-{theme}-{width}"
                yield Picture(name=name, dashboard=dashboard, theme=theme, width=width, chosen=chosen)
    yield Picture(
        name="engine-top",
        dashboard="engine",
        theme="dark",
        width=1280,
        height=TOP_OF_ENGINE,
        chosen=CHOSEN["engine"],
    )


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        build(folder)
        scene = stack.enter_context(playing(folder))
        remaining = scene.ends_seconds - time.time()
        print(f"recording for {remaining:.0f} s", flush=True)
        time.sleep(remaining)
        page = stack.enter_context(served(folder))
        for picture in pictures():
            draw(page, scene, picture, output / f"dashboard-{picture.name}.png")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The page and the dashboards, on a port of this machine."""
    for path in (ROOT / "dashboards").glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    with serving(functools.partial(Quiet, directory=str(folder))) as address:  # type: ignore[arg-type]
        yield address


class Quiet(SimpleHTTPRequestHandler):
    """Serves the page and the dashboards without a log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def build(folder: Path) -> None:
    """app.jsx with Grafana's components in one file."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        shutil.copyfile(HERE / name, CACHE / name)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps"], cwd=CACHE, check=True)
    command = ["npx", "esbuild", "app.jsx", "--bundle", "--log-level=error", f"--outfile={folder / 'app.js'}"]
    command += ['--define:process.env.NODE_ENV="production"', "--define:global=window"]
    command += ["--alias:react-router-dom-v5-compat=react-router-dom"]  # the first asks for version 5 of the second
    command += [f"--loader:.{loader}" for loader in LOADERS]
    subprocess.run(command, cwd=CACHE, check=True)
    (folder / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="app.css">'
        '<div id="root"></div><script src="app.js"></script>'
    )


def draw(page: str, scene: Scene, picture: Picture, file: Path) -> None:
    """One picture. The page is loaded twice: to learn its height, and to be drawn at it."""
    query = {
        "dashboard": f"kvwatch-{picture.dashboard}.json",
        "prometheus": scene.prometheus,
        "theme": picture.theme,
        "from": scene.started_seconds,
        "to": scene.ends_seconds,
        "rate": RATE_INTERVAL,
        **{f"var-{variable}": value for variable, value in picture.chosen.items()},
    }
    url = f"{page}/index.html?{urllib.parse.urlencode(query)}"
    told = chromium(["--dump-dom", f"--window-size={picture.width},1000"], url)
    state, _, rest = told.partition("<title>")[2].partition("</title>")[0].partition(" ")
    if state != "drawn":
        raise RuntimeError(f"{picture.name} is not drawn: {state or 'no answer in time'} {rest}")
    chromium([f"--screenshot={file}", f"--window-size={picture.width},{picture.height or rest}"], url)
    subprocess.run(["node", str(CACHE / "smaller.mjs"), str(file)], cwd=CACHE, check=True)
    print(file, f"{file.stat().st_size // 1024} KB", flush=True)


def chromium(arguments: list[str], url: str) -> str:
    command = [binary("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--disable-background-networking", "--virtual-time-budget=20000", *arguments, url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images")
