from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.cli import agent as cli_agent
from kvwatch.cli.engine_flags import Given
from kvwatch.config import Config, OptionKind, listen_address, read_config
from kvwatch.errors import SettingError
from kvwatch.thresholds import DEFAULTS

OPTIONS = {
    "interval": OptionKind(convert=float),
    "target": OptionKind(convert=str, is_list=True),
    "header": OptionKind(convert=str, is_list=True),
    "down_for": OptionKind(convert=str),
    "quiet": OptionKind(convert=bool, is_flag=True),
}

BOMB = (
    "[&a [x, x, x, x, x, x, x, x, x], "
    + ", ".join(
        f"&{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
    )
    + "]"
)


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvwatch.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(SettingError) as refused:
        read_config(file(tmp_path, text), OPTIONS)
    return str(refused.value).removeprefix(f"{tmp_path / 'kvwatch.yaml'}: ")


def test_a_key_is_an_option_with_dashes_or_underscores(tmp_path: Path) -> None:
    settings = read_config(file(tmp_path, "down-for: 5m\ntarget: http://a\nquiet: true\n"), OPTIONS)
    assert settings.options == {"down_for": "5m", "target": ("http://a",), "quiet": True}
    assert settings.limits == DEFAULTS


def test_headers_may_be_a_mapping(tmp_path: Path) -> None:
    settings = read_config(file(tmp_path, "header: {Authorization: Bearer a b}\n"), OPTIONS)
    assert settings.options == {"header": ("Authorization: Bearer a b",)}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read_config(file(tmp_path, "# nothing\n"), OPTIONS).options == {}


def test_thresholds_are_changed_one_by_one(tmp_path: Path) -> None:
    limits = read_config(file(tmp_path, "thresholds: {hold_seconds: 60, preemptions_minimum: 5}\n"), OPTIONS).limits
    assert (limits.hold_seconds, limits.preemptions_minimum) == (60.0, 5)
    assert limits.stall_seconds == DEFAULTS.stall_seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("intervall: 5\n", "intervall: there is no such setting; did you mean interval?"),
        ("zzz: 5\n", "zzz: there is no such setting; there are: down_for, header"),
        (
            "thresholds: {hold_second: 3}\n",
            "thresholds.hold_second: there is no such threshold; did you mean hold_seconds?",
        ),
        ("thresholds: {hold_seconds: -1}\n", "thresholds.hold_seconds: -1 is not a number from 0 upwards"),
        ("thresholds: {hold_seconds: .nan}\n", "thresholds.hold_seconds: nan is not a number from 0 upwards"),
        ("thresholds: {preemptions_minimum: 1.5}\n", "thresholds.preemptions_minimum: 1.5 is not a whole number"),
        ("thresholds: 3\n", "thresholds: 3 is not a mapping"),
        ("interval: abc\n", "interval: could not convert string to float"),
        ("interval: true\n", "interval: True is not text or a number"),
        ("interval: [1, 2]\n", "interval: [1, 2] is not text or a number"),
        ("interval:\n", "interval: missing is not text or a number"),
        ("quiet: 1\n", "quiet: 1 is not true or false"),
        ("target: [http://a, null]\n", "target[1]: missing is not text or a number"),
        ("down-for: 1\ndown_for: 2\n", "down_for: it stands there twice"),
        ("- a\n", "the file is a list, not a mapping"),
        ("a: [\n", "not readable as YAML"),
        ("interval: 5s\ninterval: 10s\n", "not readable as YAML: the key 'interval' is there twice"),
        ("quiet: !!bool maybe\n", "not readable as YAML: a tag does not fit its value"),
        ("a: !!python/object/apply:os.getcwd []\n", "not readable as YAML"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_path(tmp_path: Path, text: str, says: str) -> None:
    assert refusal(tmp_path, text).startswith(says)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent\.yaml: No such file"):
        read_config(tmp_path / "absent.yaml", OPTIONS)


@given(st.binary(max_size=60))
def test_any_bytes_are_settings_or_a_setting_error(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    path = tmp_path_factory.mktemp("config") / "kvwatch.yaml"
    path.write_bytes(body)
    try:
        read_config(path, OPTIONS)
    except SettingError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9109", ("127.0.0.1", 9109)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9109", ("::1", 9109)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_to_listen_on(text: str, address: tuple[str, int]) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["9109", "127.0.0.1", "a:http", "a:65536", "a:\N{SUPERSCRIPT TWO}", f"a:{'1' * 5000}", "::1:9109", ""],
)
def test_no_address_to_listen_on(text: str) -> None:
    with pytest.raises(SettingError, match="is not HOST:PORT"):
        listen_address(text)


def test_every_interface_must_be_asked_for_by_name() -> None:
    with pytest.raises(SettingError, match=r"0\.0\.0\.0:9109 for every interface"):
        listen_address(":9109")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"targets": ()}, "no engine to watch"),
        ({"targets": ("http://a", "http://a")}, "given twice"),
        ({"targets": tuple(f"http://a{n}" for n in range(65))}, "65 targets"),
        ({"interval_seconds": 0.0}, "--interval 0s is too short"),
        ({"interval_seconds": 5.0, "window_seconds": 9.0}, "at least twice the interval"),
        ({"interval_seconds": 1.0, "window_seconds": 3600.0}, "more than 1000 pages"),
    ],
)
def test_settings_that_do_not_work_together_are_refused(changed: dict[str, object], says: str) -> None:
    settings: dict[str, object] = {"targets": ("http://a",), "host": "127.0.0.1", "port": 0, **changed}
    with pytest.raises(SettingError, match=says):
        Config(**settings)  # type: ignore[arg-type]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Given]]:
    """What the command would run with, instead of running it."""
    seen: list[tuple[Config, Given]] = []
    monkeypatch.setattr(cli_agent, "_run", lambda config, flags: seen.append((config, flags)))
    return seen


def invoke(*arguments: str, **environment: str) -> Result:
    env = {f"KVWATCH_AGENT_{name.upper()}": value for name, value in environment.items()}
    return CliRunner().invoke(
        cli_agent.command, arguments, env=env, auto_envvar_prefix="KVWATCH_AGENT", catch_exceptions=False
    )


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    made: list[tuple[Config, Given]], tmp_path: Path
) -> None:
    path = file(tmp_path, "target: [http://file:1]\ninterval: 3s\nwindow: 33s\ndown_for: 3m\nmax-num-seqs: 300\n")
    outcome = invoke("--config", str(path), "--interval", "1s", interval="2s", window="22s", header="A: b c\nD: e")
    assert outcome.exit_code == 0, outcome.output
    config, flags = made[0]
    assert config.interval_seconds == 1.0
    assert config.window_seconds == 22.0
    assert config.down_for_seconds == 180.0
    assert config.targets == ("http://file:1",)
    assert config.headers == {"A": "b c", "D": "e"}
    assert flags.engine is not None
    assert flags.engine.max_num_seqs == 300
    assert (config.host, config.port) == ("127.0.0.1", 9109)
    assert config.for_seconds is None


def test_targets_given_as_flags_replace_those_of_the_file(made: list[tuple[Config, Given]], tmp_path: Path) -> None:
    path = file(tmp_path, "target: [http://file:1]\nthresholds: {hold_seconds: 45}\n")
    invoke("--target", "http://a:1", "--target", "http://b:1", config=str(path))
    assert made[0][0].targets == ("http://a:1", "http://b:1")
    assert made[0][0].limits.hold_seconds == 45.0


def test_a_wrong_value_in_the_file_is_refused_with_the_reason_of_the_option(tmp_path: Path) -> None:
    path = file(tmp_path, "target: http://a:1\ninterval: 5 parsecs\n")
    with pytest.raises(SettingError, match=r"interval: '5 parsecs' is not a duration"):
        invoke("--config", str(path))


def test_without_a_target_the_agent_does_not_start() -> None:
    with pytest.raises(SettingError, match="give --target"):
        invoke()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("interval: .nan", "interval: nan is not between 0 and 8760h"),
        ("window: .inf", "window: inf is not between 0 and 8760h"),
        ("for: -5", "for: -5 is not between 0 and 8760h"),
        ("down-for: 999999999999h", "down-for: '999999999999h' is not between 0 and 8760h"),
        ("max-num-seqs: 1.5", "max-num-seqs: --max-num-seqs is '1.5', but takes a whole number"),
        ("watermark: .nan", "watermark: --watermark is 'nan', but takes a share between 0 and 1"),
        (f"thresholds: {BOMB}", "thresholds: [['x', 'x', 'x', 'x', 'x', 'x', ...], [[...]"),
    ],
)
def test_a_number_of_a_file_is_checked_as_one_of_the_command_line(tmp_path: Path, text: str, says: str) -> None:
    path = file(tmp_path, f"target: http://a:1\n{text}\n")
    with pytest.raises(SettingError) as refused:
        invoke("--config", str(path))
    assert says in str(refused.value)


def test_numbers_of_a_file_are_settings(made: list[tuple[Config, Given]], tmp_path: Path) -> None:
    text = "max-num-seqs: 64\nwatermark: 0.05\nkv-cache-memory-bytes: 34359738368\ninterval: 2\n"
    outcome = invoke("--config", str(file(tmp_path, f"target: http://a:1\n{text}")))
    assert outcome.exit_code == 0, outcome.output
    config, flags = made[0]
    assert flags.engine is not None
    assert (flags.engine.max_num_seqs, flags.engine.watermark) == (64, 0.05)
    assert flags.engine.kv_cache_memory_bytes == 32 * 2**30
    assert config.interval_seconds == 2.0
