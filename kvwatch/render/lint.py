"""Faults of somebody's queries -> text or JSON."""

from collections.abc import Sequence
from typing import Any

from kvwatch.lint import Fault
from kvwatch.render.data import SCHEMA_VERSION, plain

SHOWN_CHARACTERS = 160
"""Of an expression; the rest is where it stands."""


def lint_data(faults: Sequence[Fault], *, version: str, expressions: int) -> dict[str, Any]:
    """The `kind: lint` document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lint",
        "vllm_version": version,
        "expressions": expressions,
        "faults": plain(faults),
    }


def lint_text(faults: Sequence[Fault], *, version: str, expressions: int) -> str:
    """One paragraph per expression, and a last line that counts."""
    lines: list[str] = []
    place: tuple[str, str, str] | None = None
    for fault in faults:
        if (fault.file, fault.where, fault.expression) != place:
            place = (fault.file, fault.where, fault.expression)
            lines += [f"{fault.file}: {fault.where}" if fault.where else fault.file, f"  {_one_line(fault.expression)}"]
        lines += [f"  - {fault.rule}: {fault.why}", f"    Instead: {fault.instead}"]
    queries = "query" if expressions == 1 else "queries"
    count = f"{len(faults)} fault{'' if len(faults) == 1 else 's'}" if faults else "no fault"
    lines.append(f"{expressions} {queries} of vLLM's metrics read against vLLM {version}: {count}")
    return "\n".join(lines)


def _one_line(expression: str) -> str:
    text = " ".join(expression.split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
