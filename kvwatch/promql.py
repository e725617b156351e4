"""PromQL as `kvwatch lint` reads it: Grafana's variables replaced, then the tree of promql-parser.

promql-parser is in the extra `lint` and imported when the first expression is read. Its nodes are told apart by the
name of their class, so that no other module needs it.
"""

import re
from collections.abc import Iterator
from typing import Any

from kvwatch.errors import KvwatchError, SettingError

_VARIABLE = re.compile(r"\$\{(\w+)(?:\.[\w.]+)?(?::[^}]*)?\}|\$(\w+)|\[\[(\w+)(?::\w+)?\]\]")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`')
_IN_A_LIST_OF_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*$")
COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})


class NotPromQL(KvwatchError):  # noqa: N818 -- names what it is, as NoData does
    """An expression that Prometheus would refuse."""


class MadeOfVariables(KvwatchError):  # noqa: N818
    """An expression whose metric names only Grafana knows, since variables are part of them."""


def parse(text: str) -> Any:
    """The tree of an expression. Raises NotPromQL, MadeOfVariables, and SettingError without promql-parser."""
    try:
        import promql_parser  # noqa: PLC0415 -- optional, and only lint pays for it
    except ModuleNotFoundError:
        raise SettingError("kvwatch lint needs promql-parser (the extra `lint`): pip install promql-parser") from None
    try:
        return promql_parser.parse(without_variables(text))
    except ValueError as error:
        raise NotPromQL(str(error)) from None


def without_variables(text: str) -> str:
    """An expression with something fitting in place of each variable of Grafana. Raises MadeOfVariables."""
    pieces: list[str] = []
    place = 0
    for string in _STRING.finditer(text):
        pieces.append(_outside(text[place : string.start()], "".join(pieces)))
        pieces.append(_VARIABLE.sub("variable", string[0]))
        place = string.end()
    pieces.append(_outside(text[place:], "".join(pieces)))
    return "".join(pieces)


def _outside(text: str, before: str) -> str:
    """Text without strings; what a variable stands for follows from its neighbours."""
    found = ""
    place = 0
    for variable in _VARIABLE.finditer(text):
        found += text[place : variable.start()]
        place = variable.end()
        earlier, later = before + found, text[variable.end() :]
        found += _stand_in(earlier, later, text)
    return found + text[place:]


def _stand_in(earlier: str, later: str, text: str) -> str:
    in_range = earlier.rfind("[") > earlier.rfind("]")
    if in_range or re.search(r"\boffset\s+-?$", earlier):
        return "5m"
    if re.search(r"[\w:]$", earlier) or re.match(r"[\w:]", later):
        raise MadeOfVariables(f"{text.strip()!r}: a name is made of a variable")
    if _IN_A_LIST_OF_LABELS.search(earlier):
        return "variable"
    if re.match(r"\s*\(", later):
        return "sum"
    return "1"


def kind(node: Any) -> str:
    """VectorSelector, MatrixSelector, Call, AggregateExpr, BinaryExpr, ParenExpr, UnaryExpr, NumberLiteral, …"""
    return type(node).__name__


def parts(node: Any) -> tuple[Any, ...]:
    """What a node is made of, from left to right."""
    match kind(node):
        case "BinaryExpr":
            return (node.lhs, node.rhs)
        case "Call":
            return tuple(node.args)
        case "AggregateExpr":
            return (node.expr,) if node.param is None else (node.param, node.expr)
        case "MatrixSelector":
            return (node.vector_selector,)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            return (node.expr,)
        case _:
            return ()


def nodes(node: Any) -> Iterator[Any]:
    """A node and all below it, outermost first."""
    yield node
    for part in parts(node):
        yield from nodes(part)


def selectors(node: Any) -> Iterator[Any]:
    return (one for one in nodes(node) if kind(one) == "VectorSelector")


def matchers(selector: Any) -> list[tuple[str, str, str]]:
    """(label, operator, value) of a selector; operators are Equal, NotEqual, Re, NotRe."""
    return [(one.name, str(one.op).rpartition(".")[2], one.value) for one in selector.matchers.matchers]


def metric_name(selector: Any) -> str | None:
    """The one name a selector asks for; None where it asks for none or for several."""
    if selector.name:
        return str(selector.name)
    return next((value for label, how, value in matchers(selector) if (label, how) == ("__name__", "Equal")), None)


def function(node: Any) -> str | None:
    """The function of a call, in lower case."""
    return str(node.func.name).lower() if kind(node) == "Call" else None


def aggregation(node: Any) -> str | None:
    return str(node.op).lower() if kind(node) == "AggregateExpr" else None


def operator(node: Any) -> str | None:
    """+ - * / == and or unless …; `bool` left out."""
    return str(node.op).split()[0].lower() if kind(node) == "BinaryExpr" else None


def returns_bool(node: Any) -> bool:
    return bool(node.modifier and node.modifier.return_bool)


def number(node: Any) -> float | None:
    """The value of a literal, behind parentheses and signs too."""
    match kind(node):
        case "NumberLiteral":
            return float(node.val)
        case "ParenExpr":
            return number(node.expr)
        case "UnaryExpr":
            inner = number(node.expr)
            return None if inner is None else -inner
        case _:
            return None


def grouping(node: Any) -> tuple[str, frozenset[str]] | None:
    """("by" or "without", labels) of an aggregation; None where it has neither."""
    if node.modifier is None:
        return None
    how = "by" if str(node.modifier.type).endswith("By") else "without"
    return how, frozenset(node.modifier.labels)
