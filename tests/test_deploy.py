"""deploy/ is checked by the tools that will read it, and every command, port and path in it by kvwatch's own parser."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from parts import binary
from prometheus_releases import Program

from kvwatch.cli import cli
from kvwatch.config import listen_address

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PROBES = {"livenessProbe", "readinessProbe", "startupProbe"}


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def containers(path: str) -> Iterator[dict[str, Any]]:
    for document in documents(path):
        if document["kind"] == "Deployment":
            yield from document["spec"]["template"]["spec"]["containers"]


def ours(path: str) -> dict[str, Any]:
    [container] = [container for container in containers(path) if container["name"] == "kvwatch"]
    return container


def parsed(arguments: list[str]) -> dict[str, Any]:
    """A kvwatch command line -> its options, as click reads them. Raises click.UsageError for what it does not know."""
    name, *rest = arguments
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command.make_context(name, rest).params


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def beside_python(name: str) -> str:
    """A program of the development requirements."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found is not None, f"{name} is not in the environment of {sys.executable}: pip install -e '.[dev]'"
    return found


SIDECAR, STANDALONE = "kubernetes/sidecar.yaml", "kubernetes/agent.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_the_image_follows_the_rules_for_images() -> None:
    run(beside_python("hadolint"), "deploy/Dockerfile")


def test_the_image_gets_all_that_it_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for line in copied for name in line.split()} == allowed
    for name in allowed:
        assert (ROOT / name).exists()


@pytest.mark.parametrize("path", [SIDECAR, STANDALONE])
def test_the_manifests_are_what_kubernetes_expects(path: str) -> None:
    run(beside_python("kubernetes-validate"), "--strict", "--quiet", f"deploy/{path}")


@pytest.mark.parametrize(
    "arguments", [ours(SIDECAR)["args"], COMPOSE["kvwatch"]["command"]], ids=["sidecar", "compose"]
)
def test_the_agent_takes_the_arguments_and_listens_where_it_is_expected(arguments: list[str]) -> None:
    options = parsed(arguments)
    assert listen_address(options["listen"]) == ("0.0.0.0", 9109)
    assert len(options["target"]) == 1


@pytest.mark.parametrize("path", [SIDECAR, STANDALONE])
def test_ports_and_probes_exist(path: str) -> None:
    container = ours(path)
    assert container["ports"] == [{"name": "kvwatch", "containerPort": 9109}]
    for probe in PROBES & set(container):
        assert container[probe]["httpGet"]["port"] == "kvwatch"
        assert container[probe]["httpGet"]["path"] in {"/healthz", "/readyz"}
    [service] = [document for document in documents(path) if document["kind"] == "Service"]
    named = {port["name"] for container in containers(path) for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == named


@pytest.mark.parametrize("path", [SIDECAR, STANDALONE])
def test_the_agent_runs_with_the_least_rights(path: str) -> None:
    security = ours(path)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert f"USER {security['runAsUser']}:" in (DEPLOY / "Dockerfile").read_text()


def test_the_agents_budget_is_that_of_the_engine_beside_it() -> None:
    [engine] = [container for container in containers(SIDECAR) if container["name"] == "vllm"]
    model, *flags = engine["args"]
    assert {f"--model={model}", *flags} <= set(ours(SIDECAR)["args"])
    assert set(COMPOSE["vllm"]["command"]) <= set(COMPOSE["kvwatch"]["command"])


def test_the_observer_cannot_take_the_engine_out_of_service() -> None:
    assert "readinessProbe" not in ours(SIDECAR)


@pytest.mark.parametrize("source", ["configmap", "systemd"])
def test_the_agent_takes_the_settings_file(source: str, tmp_path: Path) -> None:
    file = DEPLOY / "systemd/kvwatch.yaml"
    if source == "configmap":
        file = tmp_path / "kvwatch.yaml"
        [config] = [document for document in documents(STANDALONE) if document["kind"] == "ConfigMap"]
        file.write_text(config["data"]["kvwatch.yaml"])
    options = parsed(["agent", "--config", str(file)])
    assert len(options["target"]) >= 1
    assert listen_address(options["listen"])[1] == 9109


def test_the_settings_file_suggests_only_settings_that_exist(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/kvwatch.yaml").read_text()
    file = tmp_path / "kvwatch.yaml"
    file.write_text(re.sub(r"^# (?=[a-z-]+: )", "", text, flags=re.MULTILINE))
    assert parsed(["agent", "--config", str(file)])["model"] is not None


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd/kvwatch-agent.service").read_text()
    [command] = re.findall(r"^ExecStart=(\S+) (.+)$", unit, re.MULTILINE)
    assert shlex.split(command[1])[:2] == ["agent", "--config"]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    file = tmp_path / "kvwatch-agent.service"
    file.write_text(unit.replace(command[0], sys.executable))
    run("systemd-analyze", "verify", str(file))


@pytest.mark.real
def test_prometheus_accepts_its_configuration(promtool: Program) -> None:
    done = promtool.run("check", "config", DEPLOY / "prometheus/scrape.yaml")
    assert 0 == done.returncode, done.stderr


@pytest.mark.real
def test_alertmanager_accepts_its_configuration() -> None:
    run(binary("amtool"), "check-config", "alerts/alertmanager.example.yaml")


def test_prometheus_scrapes_the_ports_that_are_there() -> None:
    [config] = documents("prometheus/scrape.yaml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets == {"vllm": ["vllm:8000"], "kvwatch": ["kvwatch:9109"]}
    assert set(targets) <= set(COMPOSE)
    [monitor] = documents("prometheus/podmonitor.yaml")
    named = {port["name"] for container in containers(SIDECAR) for port in container["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} == named


def test_compose_mounts_files_that_exist() -> None:
    for service in COMPOSE.values():
        for volume in service.get("volumes", ()):
            host = volume.partition(":")[0]
            assert not host.startswith(".") or (DEPLOY / host).exists(), volume
    assert (DEPLOY / COMPOSE["kvwatch"]["build"]["context"] / COMPOSE["kvwatch"]["build"]["dockerfile"]).exists()
