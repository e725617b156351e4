"""A real vLLM thrashes under real requests: kvwatch, Prometheus and Alertmanager must say so, and say when it is over.

The tests share one engine and run in the order of this file: healthy, thrashing, recovered.
"""

import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from grid_cases import CPU
from load import Load, Traffic
from parts import Webhook, alertmanager, answers, eventually, free_port, get, prometheus, running, webhook
from vllm_server import vllm_server

from kvwatch.simulation import Request, SchedulerSettings
from kvwatch.simulator import simulate

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
# 95 usable blocks of 128 tokens, and a batch that may grow beyond what they carry.
POOL = ("--num-gpu-blocks-override", "96", "--max-num-seqs", "32")
SHORT = Traffic(clients=4, prompt_tokens=(200, 400), output_tokens=(40, 80))
OUTGROWING = Traffic(clients=28, prompt_tokens=(300, 500), output_tokens=(400, 800))
# vLLM's scheduler preempts these 380 times per 336 requests at a cap of 20 and above, 200 times at 16, 100 times at 15,
# 19 times at 14, twice at 13 and never at 12.
GOOD_CAPS = range(11, 17)
ALERT = "VLLMPreemptionsSustained"
# Ranges and waits of the rules are divided by this: a rate over 15 s, not 5 minutes; critical after 6 s, not 2 minutes.
SPEED_UP = 20
RULE, AGENT = "prometheus", "agent"
# Until something happens that takes seconds, or half a minute, where nothing else uses the machine.
PATIENCE_SECONDS = 900.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base address of a vLLM server with a small pool."""
    with vllm_server(tmp_path_factory.mktemp("vllm") / "vllm.log", *POOL) as server:
        yield server.address


@pytest.fixture(scope="module")
def receiver(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """What the on-call person gets from the agent, and from Prometheus with the generated rules."""
    folder = tmp_path_factory.mktemp("watching")
    with contextlib.ExitStack() as stack:
        hook = stack.enter_context(webhook())
        manager = stack.enter_context(alertmanager(folder, alertmanager_config(hook.url)))
        agent = stack.enter_context(kvwatch_agent(folder, engine, manager))
        stack.enter_context(prometheus(folder, prometheus_config(folder, engine, agent, manager)))
        yield hook


@pytest.fixture(scope="module")
def thrashing(engine: str, receiver: Webhook) -> Iterator[Load]:
    """More and longer requests than the pool carries, going on until `stop`."""
    assert latest(receiver, AGENT) == latest(receiver, RULE) == {}
    before = preemptions(engine)
    load = Load(engine, OUTGROWING)
    load.start()
    try:
        eventually(
            lambda: load.errors or (load.answered >= OUTGROWING.clients and preemptions(engine) >= before + 5),
            within_seconds=PATIENCE_SECONDS,
        )
        assert load.errors == []
        yield load
    finally:
        load.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    exit_code: int
    report: dict[str, Any]

    @property
    def engine(self) -> dict[str, Any]:
        [engine] = self.report["engines"]
        assert isinstance(engine, dict)
        return engine

    def finding(self, check: str) -> dict[str, Any]:
        [finding] = [finding for finding in self.engine["findings"] if finding["check"] == check]
        assert isinstance(finding, dict)
        return finding

    def proposed(self) -> dict[str, float]:
        return {change["setting"]: change["proposed"] for change in self.engine["recommendations"]}


def recommended(address: str, *flags: tuple[str, ...]) -> list[Verdict]:
    """What `kvwatch recommend` says with each of these flags, looking at the same time."""
    command = [sys.executable, "-m", "kvwatch", "recommend", address, "--output", "json"]
    with contextlib.ExitStack() as stack:
        processes = []
        for more in flags:
            process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(ended, process)
            processes.append(process)
        return [verdict_of(process) for process in processes]


def verdict_of(process: "subprocess.Popen[str]") -> Verdict:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode in {0, 1}, err
    return Verdict(exit_code=process.returncode, report=json.loads(out))


def ended(process: "subprocess.Popen[str]") -> None:
    """Whatever became of the test, the process is gone and its pipes are closed."""
    process.kill()
    process.communicate()


def effect_of(proposed: Mapping[str, float]) -> tuple[float, float]:
    """What vLLM's scheduler makes of this traffic under the proposed flags: preemptions and throughput, of the present.

    Of the preemptions a watermark of 0.05 leaves a half, 0.1 a sixth, 0.2 a fourteenth (at 99 % of the throughput).
    """
    rng = random.Random(0)
    requests = tuple(
        Request(
            prompt_tokens=rng.randint(*OUTGROWING.prompt_tokens), output_tokens=rng.randint(*OUTGROWING.output_tokens)
        )
        for _ in range(12 * OUTGROWING.clients)
    )
    now = SchedulerSettings(num_gpu_blocks=96, block_size=128, max_model_len=8192, max_num_seqs=32)
    flags = {name: proposed[name] for name in ("max_num_seqs", "watermark") if name in proposed}
    then = replace(now, **flags)  # type: ignore[arg-type]  # their fields
    before, after = (simulate(settings, CPU, requests, OUTGROWING.clients) for settings in (now, then))
    return after.preemptions / before.preemptions, after.output_tokens_per_second / before.output_tokens_per_second


def test_a_healthy_engine_gets_no_warning(engine: str, receiver: Webhook) -> None:
    load = Load(engine, SHORT)
    load.start()
    try:
        # The first requests of a server are slow.
        eventually(lambda: load.errors or load.answered >= SHORT.clients, within_seconds=PATIENCE_SECONDS)
        [verdict] = recommended(engine, ("--window", "10s"))
    finally:
        load.stop()
    assert load.errors == []
    assert (0, []) == (verdict.exit_code, bad_findings(verdict))
    assert verdict.proposed() == {}
    assert receiver.alerts("firing") == []
    assert verdict.engine["vllm_version"].startswith("0.")
    assert verdict.engine["capacity"]["usable_blocks"] == 95


def test_a_thrashing_engine_is_named_with_what_to_change(engine: str, thrashing: Load) -> None:
    window = ("--window", f"{window_with_preemptions(engine):.0f}s")
    verdict, on_an_older_vllm = recommended(engine, window, (*window, "--vllm-version", "0.20.0"))
    assert thrashing.errors == []
    assert verdict.exit_code == 1
    thrash = verdict.finding("preemptions_sustained")
    assert thrash["status"] == "critical"
    assert thrash["evidence"]["preemptions_per_second"] > 0.05
    assert re.match(r"\d+\.\d\d preemptions per second", thrash["summary"])

    proposed = verdict.proposed()
    assert proposed["gateway_max_in_flight"] in GOOD_CAPS
    assert proposed["watermark"] > 0
    left, kept = effect_of(proposed)
    assert left <= 0.35
    assert kept >= 0.94

    assert on_an_older_vllm.exit_code == 1
    older = on_an_older_vllm.proposed()
    assert older["gateway_max_in_flight"] in GOOD_CAPS
    assert older["max_num_seqs"] < 20
    assert "watermark" not in older


@pytest.mark.parametrize("sender", [AGENT, RULE])
def test_the_alert_reaches_the_receiver(receiver: Webhook, thrashing: Load, sender: str) -> None:
    alert = eventually(lambda: firing(receiver, sender), within_seconds=PATIENCE_SECONDS)
    assert thrashing.errors == []
    assert alert["labels"]["model_name"] == "tiny-llama"
    assert alert["labels"]["engine"] == "0"
    assert alert["annotations"]["runbook_url"].endswith("/docs/checks/preemptions_sustained.md")
    assert "per finished request" in alert["annotations"]["summary"]


def test_recovery_resolves_the_alert(receiver: Webhook, thrashing: Load) -> None:
    def all_are(status: str) -> bool:
        return all(latest(receiver, sender).get("status") == status for sender in (AGENT, RULE))

    eventually(lambda: all_are("firing"), within_seconds=PATIENCE_SECONDS)
    thrashing.stop()
    eventually(lambda: all_are("resolved"), within_seconds=PATIENCE_SECONDS)


def bad_findings(verdict: Verdict) -> list[str]:
    return [finding["check"] for finding in verdict.engine["findings"] if finding["status"] in {"warning", "critical"}]


def preemptions(address: str) -> float:
    page = get(f"{address}/metrics", timeout_seconds=60)
    [line] = [line for line in page.splitlines() if line.startswith("vllm:num_preemptions_total")]
    return float(line.rpartition(" ")[2])


def window_with_preemptions(address: str) -> float:
    """Seconds in which the engine preempts ten times at its present pace, 20 at least: a busy machine is slow."""
    before, started = preemptions(address), time.monotonic()
    eventually(lambda: preemptions(address) >= before + 10, within_seconds=PATIENCE_SECONDS, every_seconds=0.5)
    return max(20.0, time.monotonic() - started)


def latest(receiver: Webhook, sender: str) -> dict[str, Any]:
    """The last word on the critical alert from this sender; empty while there is none."""
    words: list[dict[str, Any]] = [
        alert
        for body in tuple(receiver.bodies)
        for alert in body["alerts"]
        if alert["labels"]["alertname"] == ALERT
        and alert["labels"]["severity"] == "critical"
        and alert["labels"].get("sent_by", AGENT) == sender
    ]
    return words[-1] if words else {}


def firing(receiver: Webhook, sender: str) -> dict[str, Any]:
    """The last word, where it is that the alert fires; empty otherwise, as between two bursts on a slow machine."""
    alert = latest(receiver, sender)
    return alert if alert.get("status") == "firing" else {}


@contextlib.contextmanager
def kvwatch_agent(folder: Path, engine: str, manager: str) -> Iterator[str]:
    """The agent watching the engine and telling Alertmanager; gives the host and port it listens on."""
    listen = f"127.0.0.1:{free_port()}"
    hasty = ("--interval", "1s", "--window", "15s", "--for", "6s", "--keep-firing-for", "15s")
    command = (
        sys.executable,
        "-m",
        "kvwatch",
        "agent",
        "--target",
        engine,
        "--listen",
        listen,
        "--alertmanager",
        manager,
    )
    with running((*command, *hasty), log=folder / "agent.log", ready_url=f"http://{listen}/healthz"):
        eventually(lambda: answers(f"http://{listen}/readyz"), within_seconds=PATIENCE_SECONDS)
        yield listen


def alertmanager_config(hook: str) -> str:
    """The example of alerts/ with the test's receiver and without its waits."""
    config = yaml.safe_load((ROOT / "alerts/alertmanager.example.yaml").read_text())
    config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": hook}]
    return yaml.safe_dump(config)


def prometheus_config(folder: Path, engine: str, agent: str, manager: str) -> str:
    """The one of deploy/ with the test's addresses, a scrape a second, and the generated rules sped up."""
    rules = folder / "kvwatch.rules.yaml"
    rules.write_text(yaml.safe_dump(sped_up(yaml.safe_load((ROOT / "alerts/kvwatch.rules.yaml").read_text()))))
    config = yaml.safe_load((ROOT / "deploy/prometheus/scrape.yaml").read_text())
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["global"]["external_labels"] = {"sent_by": RULE}
    config["rule_files"] = [str(rules)]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [manager.removeprefix("http://")]}]}]
    addresses = {"vllm": engine.removeprefix("http://"), "kvwatch": agent}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [addresses.pop(job["job_name"])]}]
        job.pop("scrape_interval", None)
    assert addresses == {}
    return yaml.safe_dump(config)


def sped_up(rules: dict[str, Any]) -> dict[str, Any]:
    """The rule file with every duration divided by SPEED_UP: ranges, `for`, `keep_firing_for`. Thresholds stay."""
    for group in rules["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(\w+)\]", lambda found: f"[{divided(found[1])}]", rule["expr"])
            for field in {"for", "keep_firing_for"} & set(rule):
                rule[field] = divided(rule[field])
    return rules


def divided(duration: str) -> str:
    """5m -> 15s."""
    parts = re.findall(r"(\d+)([smh])", duration)
    seconds = sum(int(number) * {"s": 1, "m": 60, "h": 3600}[unit] for number, unit in parts)
    return f"{max(1, round(seconds / SPEED_UP))}s"
