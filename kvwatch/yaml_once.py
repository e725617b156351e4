"""YAML without surprises: safe, each key of a mapping once, and every fault of a document a YAMLError."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # << may bring keys that are there as well: those of the mapping win
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _OnceLoader(_Safe):  # type: ignore[misc]  # which of the two it is depends on the installation
    """Refuses a key that is there twice: of two values one would be lost without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return dict(super().construct_mapping(node, deep))


def load_yaml(text: str) -> Any:
    """The document. Raises yaml.YAMLError, ValueError (a date that is none) and RecursionError."""
    with _every_fault_a_yaml_error():
        return yaml.load(text, Loader=_OnceLoader)  # noqa: S506 -- it is the safe one


def load_yaml_all(text: str) -> list[Any]:
    """The documents of a file that holds several, as manifests do."""
    with _every_fault_a_yaml_error():
        return list(yaml.load_all(text, Loader=_OnceLoader))


@contextmanager
def _every_fault_a_yaml_error() -> Iterator[None]:
    try:
        yield
    except (KeyError, AttributeError, TypeError) as error:  # !!bool "xx", !!timestamp "xx"
        raise yaml.YAMLError(f"a tag does not fit its value ({error})") from error
