"""A workload file's mapping -> Workload, strictly: an unknown key or a wrong type is an error that names its place.

    engine: {vllm_version: "0.32.0", num_gpu_blocks: 2048, block_size: 16, max_num_seqs: 32, watermark: 0.05}
    cost: {step_seconds: 0.02, per_token_seconds: 1.0e-5, per_kv_token_seconds: 1.0e-8}
    clients: 28
    requests:
      - {at_seconds: 0.0, prompt_tokens: 900, output_tokens: 700}

`engine` takes the fields of SchedulerSettings; without `max_model_len` no request is too long. `requests_file` and
`request_log` name files instead of `requests`; reading them is kvwatch.sources.workload_files' work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from kvwatch.errors import SettingError, shown
from kvwatch.flag_releases import EVICT_UNHASHED_FIRST_SINCE, V1_SINCE, check_supported, has_flag
from kvwatch.simulation import CostModel, KvGroup, Request, Retry, SchedulerSettings, Workload
from kvwatch.simulator import check_fits
from kvwatch.versions import Version, parse_version, version_text

NOT_IN_EVERY_RELEASE = (
    "scheduler_reserve_full_isl",
    "watermark",
    "max_num_active_seqs",
    "long_prefill_token_threshold_adaptive",
)
REQUEST_SOURCES = ("requests", "requests_file", "request_log")
_WORKLOAD_KEYS = ("engine", "cost", "clients", "retry", *REQUEST_SOURCES)
_DERIVED = ("evict_unhashed_first",)  # settled by vllm_version, not by a flag
_T = TypeVar("_T")


def workload_from(mapping: Any, *, requests: Sequence[Request] | None = None) -> Workload:
    """A whole workload. `requests` stands in for the keys that name files. Raises SettingError."""
    top = _mapping(mapping, "the workload", _WORKLOAD_KEYS)
    if requests is None:
        items = top.get("requests")
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise SettingError(
                f"requests is {shown(items)}; a workload needs a list of requests, or requests_file or request_log "
                "with a file's name."
            )
        requests = tuple(request_from(item, f"requests[{index}]") for index, item in enumerate(items))
    if not requests:
        raise SettingError("the workload has no requests, so there is nothing to simulate. Add some to `requests`.")
    clients = top.get("clients")
    if clients is not None and (not _is_integer(clients) or clients < 1):
        raise SettingError(
            f"clients is {shown(clients)}; it must be a whole number of at least 1. Leave it out for "
            "requests that come at their at_seconds."
        )
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    engine, version = _engine_from(top.get("engine"), longest_request_tokens=longest)
    for index, request in enumerate(requests):
        check_fits(engine, request, index)
    return Workload(
        engine=engine,
        cost=_build(CostModel, top.get("cost"), "cost"),
        requests=tuple(requests),
        clients=clients,
        retry=None if top.get("retry") is None else _build(Retry, top["retry"], "retry"),
        vllm_version=None if version is None else version_text(version),
    )


def request_from(mapping: Any, where: str) -> Request:
    """One request. `where` names it in errors, for example `requests[3]` or `load.jsonl:4`."""
    request = _build(Request, mapping, where)
    if request.prefix is not None and not request.prefix_tokens:
        raise SettingError(
            f"{where} names the prefix {request.prefix!r} but not how many tokens of it it shares. Add prefix_tokens."
        )
    return request


def _engine_from(mapping: Any, *, longest_request_tokens: int) -> tuple[SchedulerSettings, Version | None]:
    known = ("vllm_version", *(f.name for f in fields(SchedulerSettings) if f.name not in _DERIVED))
    given = dict(_mapping(mapping, "engine", known))
    text = given.pop("vllm_version", None)
    if text is not None and not isinstance(text, str):
        raise SettingError(f'engine.vllm_version is {shown(text)}; write it in quotes, like "0.32.0".')
    version = None if text is None else parse_version(text)
    if version is not None:
        if version < V1_SINCE:
            raise SettingError(
                f"engine.vllm_version is {version_text(version)}; the simulator models the V1 scheduler, which is "
                f"vLLM's default since {version_text(V1_SINCE)}."
            )
        for name in NOT_IN_EVERY_RELEASE:
            # Off is what a version without the flag does, so a file may say so.
            if given.get(name):
                check_supported(
                    name,
                    version,
                    said=f"engine.{name} is set",
                    remedy="Remove it or raise engine.vllm_version.",
                )
        if not has_flag("scheduler_reserve_full_isl", version):
            given["scheduler_reserve_full_isl"] = False
        given["evict_unhashed_first"] = version >= EVICT_UNHASHED_FIRST_SINCE
    if isinstance(given.get("groups"), list):
        groups = given["groups"]
        given["groups"] = tuple(_build(KvGroup, group, f"engine.groups[{i}]") for i, group in enumerate(groups))
    if given.get("max_model_len") is None:
        given["max_model_len"] = longest_request_tokens
    return _build(SchedulerSettings, given, "engine"), version


def _build(kind: type[_T], mapping: Any, where: str) -> _T:
    """A dataclass from a mapping of its fields, each of the annotated type."""
    names = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
    given = _mapping(mapping, where, tuple(names))
    for name, field in names.items():
        if name not in given:
            if field.default is MISSING:
                raise SettingError(f"{where} has no {name}, which must be given.")
            continue
        _check_type(given[name], _annotation(field.type), f"{where}.{name}")
    try:
        return kind(**given)
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from error


def _annotation(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def _check_type(value: Any, annotation: str, where: str) -> None:
    if value is None and "None" in annotation:
        return
    is_right, wanted = _TYPES[annotation]
    if not is_right(value):
        hint = " YAML reads 1e-5 as text; write 1.0e-5." if annotation == "float" and isinstance(value, str) else ""
        raise SettingError(f"{where} is {shown(value)}; it must be {wanted}.{hint}")


def _mapping(value: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingError(f"{where} is {shown(value)}; it must be a mapping with {', '.join(known)}.")
    for key in value:
        if key not in known:
            raise SettingError(f"{where} has the unknown key {shown(key)}; known are {', '.join(known)}.")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_integer, "a whole number"),
    "int | None": (_is_integer, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str | None": (lambda value: isinstance(value, str), "text; put it in quotes"),
    "tuple[kvwatch.simulation.KvGroup, ...]": (
        lambda value: isinstance(value, tuple),
        "a list of {block_size, window_tokens, max_blocks}",
    ),
}
