"""The agent's settings: kvwatch.yaml -> defaults of the options, and all options together -> Config.

Every key of the file is the name of an option of `kvwatch agent`, with `-` or `_`, and its value is checked by that
option's own type; `thresholds` is the one mapping besides:

    target: [http://127.0.0.1:8000]
    listen: 0.0.0.0:9109
    interval: 5s
    header: {Authorization: Bearer TOKEN}
    alertmanager: http://alertmanager:9093
    max-num-seqs: 256
    thresholds: {hold_seconds: 60}
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvwatch.errors import SettingError, shown
from kvwatch.files import bounded_text
from kvwatch.thresholds import DEFAULTS, Thresholds

MAX_FILE_BYTES = 1024 * 1024
MINIMUM_INTERVAL_SECONDS = 0.2
MAXIMUM_ROUNDS_KEPT = 1000  # pages of one engine held in memory, about 25 KB each
MAXIMUM_TARGETS = 64
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the agent runs with. Raises SettingError for values that do not work together.

    for_seconds: how long a condition must hold before its alert fires; down_for_seconds: the same for a target that
    cannot be read; keep_firing_seconds: how long it must be gone before the alert is resolved.
    """

    targets: tuple[str, ...]
    host: str
    port: int
    interval_seconds: float = 5.0
    window_seconds: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict)
    alertmanagers: tuple[str, ...] = ()
    for_seconds: float | None = None  # None: what the alert rules use, by severity (Thresholds.alert_*)
    down_for_seconds: float = 300.0  # a rollout leaves a target without an engine for minutes
    keep_firing_seconds: float | None = None
    limits: Thresholds = DEFAULTS

    def __post_init__(self) -> None:
        if not self.targets:
            raise SettingError(
                "no engine to watch: give --target http://HOST:8000, or `target:` in the file of --config"
            )
        if len(self.targets) > MAXIMUM_TARGETS:
            raise SettingError(f"{len(self.targets)} targets are more than the {MAXIMUM_TARGETS} one agent watches")
        twice = sorted({target for target in self.targets if self.targets.count(target) > 1})
        if twice:
            raise SettingError(f"--target {twice[0]} is given twice; each engine is watched once")
        if self.interval_seconds < MINIMUM_INTERVAL_SECONDS:
            raise SettingError(f"--interval {self.interval_seconds:g}s is too short; 5s is usual")
        if self.window_seconds < 2 * self.interval_seconds:
            raise SettingError(
                f"--window {self.window_seconds:g}s holds fewer than three pages at --interval "
                f"{self.interval_seconds:g}s, too few for rates that last; give at least twice the interval"
            )
        if self.window_seconds > MAXIMUM_ROUNDS_KEPT * self.interval_seconds:
            raise SettingError(
                f"--window {self.window_seconds:g}s would hold more than {MAXIMUM_ROUNDS_KEPT} pages in memory; "
                "shorten it or lengthen --interval (Prometheus is the place for history)"
            )


def listen_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT` -> host and port. Raises SettingError; every interface must be asked for by name."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535 or (":" in host and not text.startswith("[")):
        raise SettingError(f"--listen {text!r} is not HOST:PORT, for example 127.0.0.1:9109 or [::1]:9109")
    if not host:
        raise SettingError(
            f"--listen {text!r} names no host: give 127.0.0.1{text}, or 0.0.0.0{text} for every interface"
        )
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """What a file gives: option name (with `_`) -> value in that option's own type, and the thresholds."""

    options: Mapping[str, Any]
    limits: Thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionKind:
    """What the file may hold for one option. `convert` raises ValueError with the reason."""

    convert: Callable[[Any], Any]
    is_list: bool = False
    is_flag: bool = False


def read_config(path: Path, options: Mapping[str, OptionKind]) -> FileSettings:
    """kvwatch.yaml -> FileSettings.

    Raises SettingError naming the key's path for what cannot be used, SourceError for a file without an end.
    """
    document = _load(path)
    values: dict[str, Any] = {}
    limits = DEFAULTS
    for key, value in document.items():
        where, name = f"{path}: {key}", str(key).replace("-", "_")
        if name == "thresholds":
            limits = _thresholds(value, where)
        elif name not in options:
            raise SettingError(f"{where}: there is no such setting; {_known((*options, 'thresholds'), name)}")
        elif name in values:
            raise SettingError(f"{where}: it stands there twice, once with - and once with _")
        else:
            values[name] = _converted(options[name], value, where)
    return FileSettings(options=values, limits=limits)


def _load(path: Path) -> dict[Any, Any]:
    import yaml  # noqa: PLC0415 -- an agent without a file does not need it

    from kvwatch.yaml_once import load_yaml  # noqa: PLC0415 -- it imports yaml

    try:
        document = load_yaml(bounded_text(path, limit_bytes=MAX_FILE_BYTES))
    except OSError as error:
        raise SettingError(f"{path}: {error.strerror}; --config wants a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingError(f"{path}: not readable as YAML: {' '.join(str(error).split())[:300]}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingError(f"{path}: the file is a {type(document).__name__}, not a mapping such as `interval: 5s`")
    return document


def _converted(kind: OptionKind, value: Any, where: str) -> Any:
    if not kind.is_list:
        return _scalar(kind, value, where)
    if isinstance(value, dict):  # header: {Authorization: Bearer TOKEN}
        value = [f"{name}: {text}" for name, text in value.items()]
    items = value if isinstance(value, list) else [value]
    return tuple(_scalar(kind, item, f"{where}[{index}]") for index, item in enumerate(items))


def _scalar(kind: OptionKind, value: Any, where: str) -> Any:
    if isinstance(value, bool) != kind.is_flag or not isinstance(value, (str, int, float)):
        wanted = "true or false" if kind.is_flag else "text or a number"
        raise SettingError(f"{where}: {shown(value)} is not {wanted}")
    try:
        return kind.convert(value)
    except ValueError as error:
        raise SettingError(f"{where}: {error}") from error


def _thresholds(value: Any, where: str) -> Thresholds:
    if not isinstance(value, dict):
        raise SettingError(f"{where}: {shown(value)} is not a mapping such as {{hold_seconds: 60}}")
    kinds = {entry.name: type(getattr(DEFAULTS, entry.name)) for entry in fields(Thresholds)}
    changed: dict[str, Any] = {}
    for name, number in value.items():
        if name not in kinds:
            raise SettingError(f"{where}.{name}: there is no such threshold; {_known(kinds, str(name))}")
        whole = kinds[name] is int
        if isinstance(number, bool) or not isinstance(number, int if whole else (int, float)) or not 0 <= number < 1e9:
            raise SettingError(
                f"{where}.{name}: {shown(number)} is not a {'whole ' if whole else ''}number from 0 upwards"
            )
        changed[name] = number if whole else float(number)
    return replace(DEFAULTS, **changed)


def _known(names: Iterable[str], wrong: str) -> str:
    import difflib  # noqa: PLC0415 -- only a mistake needs it

    names = sorted(names)
    close = difflib.get_close_matches(wrong, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)}"
