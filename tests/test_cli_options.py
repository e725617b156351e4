"""Options of every command: an empty value is a variable that was not set, never the current folder or a default."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kvwatch.cli import COMMANDS, cli
from kvwatch.errors import SettingError
from kvwatch.vllm_args import parse_command_line

CONTEXT = click.Context(cli)


def commands() -> Iterator[tuple[str, click.Command]]:
    for name, _ in COMMANDS:
        command = cli.get_command(CONTEXT, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", command.commands[inner]) for inner in command.commands)
        else:
            yield name, command


def options_with_a_value() -> list[tuple[str, click.Option]]:
    return [
        (name, param)
        for name, command in commands()
        for param in command.params
        if isinstance(param, click.Option) and not param.is_flag and not param.count
    ]


OPTIONS = options_with_a_value()
ARGUMENTS = [name for name, command in commands() if any(isinstance(param, click.Argument) for param in command.params)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": "80"})


def test_all_commands_were_looked_at() -> None:
    assert len(OPTIONS) > 150
    assert {"budget", "check", "record", "generate rules", "agent"} <= {name for name, _ in OPTIONS}


@pytest.mark.parametrize("value", ["", "  "], ids=["empty", "blank"])
@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=lambda x: x if isinstance(x, str) else max(x.opts, key=len))
def test_an_empty_value_is_refused(name: str, option: click.Option, value: str) -> None:
    result = run(*name.split(), max(option.opts, key=len), value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert max(option.opts, key=len) in result.stderr or f"{option.opts[0]} " in result.stderr


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_empty_argument_is_refused(name: str, tmp_path: Path) -> None:
    more = ("--output", str(tmp_path)) if name == "record" else ()
    result = run(*name.split(), "", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "empty" in result.stderr or "there is no check ''" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_refusal_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("record", "http://127.0.0.1:8000", "-o", "")
    assert result.exit_code == 2
    assert "'--output' / '-o': the value is empty; give: Folder for the pages" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_settings_file_has_no_empty_values_either(tmp_path: Path) -> None:
    file = tmp_path / "kvwatch.yaml"
    file.write_text('target: http://127.0.0.1:8000\nmodel: ""\n')
    result = run("agent", "--config", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "kvwatch.yaml: model: the value is empty" in result.stderr


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    result = CliRunner().invoke(cli, ["budget", "--model", "Llama-3.1-8B"], env={"KVWATCH_BUDGET_GPU": ""})
    assert "--gpu" in result.output
    assert "the value is empty" not in result.output


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m --quantization ''",
        "vllm serve m --kv-cache-dtype=",
        "vllm serve m --kv-cache-dtype-skip-layers ''",
        "vllm serve ''",
        "vllm serve --model ''",
        "vllm serve --model=",
    ],
)
def test_a_command_line_of_vllm_with_an_empty_value_is_refused(line: str) -> None:
    with pytest.raises(SettingError, match=r"is ''|is empty"):
        parse_command_line(line)
