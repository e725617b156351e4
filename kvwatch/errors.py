"""The exception tree. Whatever a user can cause is a KvwatchError; the CLI prints its text and exits 2.

    KvwatchError
    ├── ExpositionError      a /metrics page that cannot be read
    ├── NoData               a metric or a span of time that is not there; a check turns it into UNKNOWN
    ├── SourceError          an address, file or folder that cannot be fetched
    ├── SinkError            a report or alert that cannot be delivered
    ├── ModelError           a model description that cannot be used
    │   └── UnsupportedModel an architecture whose KV layout kvwatch does not know
    ├── SettingError         a flag, file key or value that cannot be used
    └── CapacityError        vLLM itself would refuse to start with these settings

A message says what failed, with the value, why it matters, and the flag or command to try next.
"""

import re
import reprlib


class KvwatchError(Exception):
    """Base of every error that a user can cause and mend."""


class ExpositionError(KvwatchError):
    """A page that is not a Prometheus text exposition, or not whole, or too large."""


class NoData(KvwatchError):  # noqa: N818 -- it names a condition that checks handle, not a failure
    """The window lacks what was asked for. `what` names the metric or the span."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class SourceError(KvwatchError):
    """A source that cannot be reached or read."""


class SinkError(KvwatchError):
    """An address to which alerts cannot be sent."""


class ModelError(KvwatchError):
    """A config.json or model name that cannot be used."""


class UnsupportedModel(ModelError):  # noqa: N818 -- reads as the condition it names
    """An architecture whose KV layout is not known, refused rather than sized by the plain formula."""


class SettingError(KvwatchError):
    """A flag, environment variable, file key or value that cannot be used."""


class CapacityError(KvwatchError):
    """Settings with which vLLM itself would refuse to start."""


_SHORT = reprlib.Repr()  # a few aliases of YAML stand for more text than memory holds
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60
# All of C0 and C1 but the line feed, the separators that some terminals take for one, and what turns text around.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def shown(value: object) -> str:
    """A value as an error shows it: one short line, whatever it is."""
    if value is None:
        return "missing"
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """Text from elsewhere without what would move a terminal's cursor; a line feed stays."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
