"""The documentation says what the code does: every check, threshold, metric, command and option is there, and fresh."""

import importlib.util
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvwatch import checks
from kvwatch.checks.check import Check
from kvwatch.cli import COMMANDS, cli
from kvwatch.cli.generate import command, help_texts
from kvwatch.generate import reference, rules
from kvwatch.recording import signals
from kvwatch.thresholds import DEFAULTS
from kvwatch.vllm_metrics import ALL as METRICS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "Alert"]
EXISTING = [name for name, _ in COMMANDS if importlib.util.find_spec(f"kvwatch.cli.{name}")]

every_check = pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.id)


def test_every_file_of_the_folder_is_one_check_of_the_registry_and_named_by_its_id() -> None:
    files = {path.stem for path in Path(checks.__file__).parent.glob("*.py")} - {"__init__", "check"}
    assert sorted(files) == sorted(check.id for check in checks.ALL)


def test_the_docstring_of_the_registry_lists_the_checks_in_order() -> None:
    listed = re.findall(r"^([a-z_]+)  +\S", checks.__doc__ or "", re.MULTILINE)
    assert listed == [check.id for check in checks.ALL]


@every_check
def test_a_page_has_the_runbook_headings(check: Check) -> None:
    page = (DOCS / "checks" / f"{check.id}.md").read_text()
    assert HEADINGS == re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert f"# {check.id}\n\n{check.summary}\n" in page


@every_check
def test_no_section_of_a_page_is_empty(check: Check) -> None:
    for section in re.split(r"^## .+$", reference.check_page(check), flags=re.MULTILINE)[1:]:
        assert len(section.split()) > 10


@every_check
def test_explain_prints_the_page(check: Check) -> None:
    printed = CliRunner().invoke(cli, ["explain", check.id])
    assert 0 == printed.exit_code
    assert f"{reference.MARK}\n\n{printed.stdout}" == (DOCS / "checks" / f"{check.id}.md").read_text()


def test_the_table_of_checks_has_every_check_and_alert() -> None:
    page = (DOCS / "reference" / "checks.md").read_text()
    for check in checks.ALL:
        assert f"](../checks/{check.id}.md) | {check.summary} | `{check.alert_name}` |" in page


def test_every_threshold_says_where_it_comes_from() -> None:
    texts = reference.threshold_texts()
    assert set(texts) == set(type(DEFAULTS).__dataclass_fields__)
    for name, text in texts.items():
        assert len(text.split()) >= 8, name


def test_every_metric_and_every_recorded_series_is_listed() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    for metric in METRICS:
        assert f"| `{metric.exposed}` | {metric.kind} |" in page
    for rule in signals(DEFAULTS).all():
        assert f"| `{rule.record}` |" in page


@pytest.mark.parametrize("name", EXISTING)
def test_every_command_and_option_is_documented(name: str) -> None:
    page = (DOCS / "reference" / "cli.md").read_text()
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    commands = {f"kvwatch {name}": found}
    if isinstance(found, click.Group):
        commands |= {f"kvwatch {name} {child}": entry for child, entry in found.commands.items()}
    for words, entry in commands.items():
        section = re.search(rf"^## {words}\n\n```text\n(.+?)\n```$", page, re.MULTILINE | re.DOTALL)
        assert section, words
        for parameter in entry.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[-1] in section[1], f"{words} {parameter.opts}"
                assert parameter.help, f"{words} {parameter.opts} has no help"


@pytest.mark.parametrize("path", sorted(reference.reference_files(help_texts())))
def test_a_generated_page_is_fresh(path: str) -> None:
    """`make generate` writes them."""
    assert reference.reference_files(help_texts())[path] == (DOCS / path).read_text()


def test_the_rule_file_is_fresh() -> None:
    """`make generate` writes it."""
    assert rules.to_yaml(rules.rule_file()) == (ROOT / "alerts" / "kvwatch.rules.yaml").read_text()


def test_pages_of_removed_checks_are_stale_and_others_are_left_alone(tmp_path: Path) -> None:
    runner = CliRunner()
    assert 0 == runner.invoke(command, ["reference", "--output", str(tmp_path)]).exit_code
    removed, own = tmp_path / "checks" / "no_such_check.md", tmp_path / "checks" / "notes.md"
    removed.write_text(f"{reference.MARK}\n\n# no_such_check\n")
    own.write_text("# Our notes\n")
    named = runner.invoke(command, ["reference", "--check", "--output", str(tmp_path)])
    assert (1, f"stale: {removed}\n") == (named.exit_code, named.stdout)
    assert 0 == runner.invoke(command, ["reference", "--output", str(tmp_path)]).exit_code
    assert not removed.exists()
    assert own.exists()
    assert 0 == runner.invoke(command, ["reference", "--check", "--output", str(tmp_path)]).exit_code


def test_every_link_between_pages_leads_somewhere() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if not re.match(r"[a-z]+:", link):
                assert (path.parent / link).exists(), f"{path}: {link}"
