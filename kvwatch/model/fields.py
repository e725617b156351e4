"""Reading a config.json: every value is checked, and an error names the field, the value and what was expected."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from kvwatch.errors import ModelError, UnsupportedModel

# More layers, heads or tokens than any model has: a number beyond it is a mistake, and would take hours to plan.
_HUGE = 1 << 31
_MISSING = object()

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    """A value as errors show it: cut short, however long or nested the file has it."""
    return _SHORT.repr(value)


def words(value: Any) -> str:
    """Text as it is, anything else as none: for fields that only select a rule."""
    return value if isinstance(value, str) else ""


class Fields:
    """One level of a config.json.

    A JSON null counts as absent, as vLLM treats it. Names are tried in order; the first present one counts.
    Raises ModelError for a value of the wrong kind and UnsupportedModel for a missing one: a model whose config lacks
    what its family needs is refused rather than sized by the plain formula.
    """

    def __init__(self, values: Mapping[str, Any], *, architecture: str = "?", where: str = "config.json") -> None:
        self.values = values
        self.architecture = architecture
        self.where = where

    def raw(self, *names: str) -> Any:
        """The first value present under one of the names, or None."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return None

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive whole number, such as a number of layers or heads."""
        return self._whole(names, default=default, least=1)

    def count_or_zero(self, *names: str, default: int | None = None) -> int:
        return self._whole(names, default=default, least=0)

    def optional_count(self, *names: str) -> int | None:
        """A positive whole number, or None when absent."""
        return None if self.raw(*names) is None else self.count(*names)

    def _whole(self, names: tuple[str, ...], *, default: int | None, least: int) -> int:
        name, value = self._first(names, default)
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _HUGE:
            wanted = "a positive whole number" if least else "a whole number, 0 or more"
            raise ModelError(f"{self.where}: {name} is {shown(value)}, but has to be {wanted} below 2^31")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.raw(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {names[0]} is {shown(value)}, but has to be true or false")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {name} is {shown(value)}, but has to be a finite number")
        return float(value)

    def text(self, *names: str, default: str | None = None) -> str:
        name, value = self._first(names, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.where}: {name} is {shown(value)}, but has to be text")
        return value

    def items(self, *names: str) -> list[Any] | None:
        """A list of names or numbers, or None when absent."""
        found = self.objects(*names)
        for index, value in enumerate(found or ()):
            if isinstance(value, (list, tuple, Mapping)):
                raise ModelError(
                    f"{self.where}: {names[0]}[{index}] is {shown(value)}, but has to be a name or a number"
                )
        return found

    def objects(self, *names: str) -> list[Any] | None:
        """A list of anything, or None when absent."""
        value = self.raw(*names)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) >= _HUGE:
            raise ModelError(f"{self.where}: {names[0]} is {shown(value)}, but has to be a list")
        return list(value)

    def per_layer(self, *names: str, layers: int) -> list[Any] | None:
        """A list with one entry per layer (a longer one is cut, as vLLM does by indexing it), or None when absent."""
        found = self.items(*names)
        if found is None:
            return None
        if len(found) < layers:
            raise ModelError(
                f"{self.where}: {names[0]} has {len(found)} entries for {layers} layers; each layer needs one"
            )
        return found[:layers]

    def section(self, *names: str) -> "Fields | None":
        """A nested object, or None when absent or empty."""
        for name in names:
            value = self.values.get(name)
            if value is None or value == {}:
                continue
            if not isinstance(value, Mapping):
                raise ModelError(f"{self.where}: {name} is {shown(value)}, but has to be an object")
            return Fields(value, architecture=self.architecture, where=f"{self.where}: {name}")
        return None

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return name, value
        if default is None:
            raise self.lacks(*names)
        return names[0], default

    def lacks(self, *names: str) -> UnsupportedModel:
        wanted = " or ".join(names)
        return UnsupportedModel(
            f"{self.architecture} is known, but {self.where} lacks {wanted}, without which its KV cache "
            "cannot be sized. Give the model's complete config.json."
        )
