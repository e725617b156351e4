"""What the agent costs: CPU and memory of `kvwatch agent` on the recorded engine, with a page of 63 KB every 5 s.

    python benchmarks/measure_agent.py [--seconds 50] [--interval 5]

The engine runs in this process and the agent in another, whose /proc entries are read. Its /metrics is scraped every
15 s and its page opened every 5 s, as a Prometheus and a browser do. The first seconds, in which Python starts, are not
counted, and neither is the simulation of an engine in trouble (about 2.5 s of CPU, once in half an hour), which waits
until the trouble is a minute old: this is over before. Exit code 1 if a round takes more than BUDGET_RATIO times what
prometheus_client takes on this machine to parse the page once, or the agent more than BUDGET_RSS_BYTES. On a machine
where that is 10 ms, BUDGET_RATIO is half a percent of a core.
"""

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvwatch.demo import RecordedEngine, load_recording

BUDGET_RATIO = 2.5
BUDGET_RSS_BYTES = 45 * 1024 * 1024
SETTLE_SECONDS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    seconds: float
    cpu_share: float
    interval_seconds: float
    peer_seconds: float
    rss_bytes: int
    peak_rss_bytes: int

    @property
    def ratio(self) -> float:
        """CPU time of a round, in parses of the page by prometheus_client."""
        return self.cpu_share * self.interval_seconds / self.peer_seconds

    def __str__(self) -> str:
        mib = 1024 * 1024
        return (
            f"{self.seconds:.0f} s: {self.cpu_share:.2%} of a core, a round is {self.ratio:.2f} times the "
            f"{self.peer_seconds * 1e3:.1f} ms of prometheus_client's parser, {self.rss_bytes / mib:.1f} MiB resident "
            f"(peak {self.peak_rss_bytes / mib:.1f} MiB)"
        )


def measure(seconds: float, interval_seconds: float = 5.0) -> Cost:
    engine = RecordedEngine(load_recording())
    engine.start()
    arguments = (
        "--target",
        engine.url,
        "--listen",
        "127.0.0.1:0",
        "--interval",
        f"{interval_seconds:g}s",
        "--window",
        "1h",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kvwatch", "agent", *arguments], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        url = ""
        while not url:
            line = process.stderr.readline()
            assert line, "the agent ended before it said where its page is"
            url = line.partition("the report is at ")[2].strip()
        time.sleep(SETTLE_SECONDS)
        return _watch(process.pid, url, seconds, interval_seconds, engine.url)
    finally:
        process.terminate()
        process.wait()
        engine.stop()


def _parsed_seconds(page: str) -> float:
    """CPU time of the fastest of some parses."""
    times = []
    for _ in range(20):
        started = time.thread_time()  # this process serves the page as well
        list(text_string_to_metric_families(page))
        times.append(time.thread_time() - started)
    return min(times)


def _watch(pid: int, url: str, seconds: float, interval_seconds: float, engine_url: str) -> Cost:
    started, before = time.monotonic(), _cpu_seconds(pid)
    for number in range(int(seconds // 5)):
        paths = ("/", "/metrics") if number % 3 == 0 else ("/",)
        for path in paths:
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                answer.read()
        time.sleep(max(0.0, started + 5 * (number + 1) - time.monotonic()))
    passed = time.monotonic() - started
    with urllib.request.urlopen(f"{engine_url}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Cost(
        seconds=passed,
        cpu_share=(_cpu_seconds(pid) - before) / passed,
        interval_seconds=interval_seconds,
        peer_seconds=_parsed_seconds(page),
        rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
        peak_rss_bytes=int(status["VmHWM"].split()[0]) * 1024,
    )


def _cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds")
    arguments = parser.parse_args()
    cost = measure(arguments.seconds, arguments.interval)
    print(cost)
    print(f"budget: {BUDGET_RATIO:g} times, {BUDGET_RSS_BYTES / 1024 / 1024:.0f} MiB")
    return 0 if cost.ratio <= BUDGET_RATIO and cost.rss_bytes <= BUDGET_RSS_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
