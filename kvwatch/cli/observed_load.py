"""A SOURCE as the workload of `kvwatch simulate`: sample it, choose the engine, reconstruct what it is offered."""

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

import click

from kvwatch.checks.check import EngineView, engine_view
from kvwatch.cli.engine_flags import engine_facts, given
from kvwatch.cli.judge import read_sources
from kvwatch.errors import NoData, SettingError
from kvwatch.flag_releases import FIRST_RELEASE, has_flag
from kvwatch.settings_now import Assumption, Origin
from kvwatch.simulation import Workload
from kvwatch.study import preemptions_per_request, trial_of
from kvwatch.versions import parse_version, version_text
from kvwatch.vllm_metrics import PREEMPTIONS, REQUEST_SUCCESS
from kvwatch.window import Window, windows
from kvwatch.workload import offered_load


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLoad:
    """The workload of one engine, what it rests on, and what was left out of its source."""

    name: str
    workload: Workload
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]


def observed_load(
    ctx: click.Context,
    source: str,
    *,
    window_seconds: float,
    headers: tuple[str, ...],
    engine: str | None,
    model_name: str | None,
    told: Mapping[str, Any],
    with_watermark: bool,
) -> ObservedLoad:
    """SOURCE -> ObservedLoad. `told` holds the options of `engine_options`; `with_watermark`: one is to be simulated.

    Raises SourceError if it cannot be read, SettingError if it has several engines and no choice was made, NoData if
    its pages do not show the load.
    """
    known = given(ctx, told)
    found = read_sources(ctx, (source,), window_seconds=window_seconds, headers=headers)
    made = windows(found.snapshots)
    window = chosen_window(made, source, engine=engine, model_name=model_name)
    facts = engine_facts(made, found.facts, known)[window.key.target]
    view = engine_view(window, facts)
    shown = "stdin" if source == "-" else source
    where = "" if window.key.target in shown else f", {window.key.target}"
    name = f"{shown}{where}, {window.key}"
    try:
        workload, assumptions = _reconstructed(view)
    except NoData as missing:
        raise NoData(
            f"{name}: its load cannot be reconstructed: {missing}. Sample a longer --window while requests run, or "
            "describe the load in a workload file (docs/simulate.md)"
        ) from missing
    notes = (*found.notes, *found.failures, *(_watermark_note(view) if with_watermark else ()))
    return ObservedLoad(name=name, workload=workload, assumptions=assumptions, notes=notes)


def _watermark_note(view: EngineView) -> tuple[str, ...]:
    """The engine may be older than the flag, where its pages tell no release that has it."""
    least = view.window.latest.vllm_version_at_least
    if view.facts.vllm_version or least is None or has_flag("watermark", parse_version(least)):
        return ()
    came = version_text(FIRST_RELEASE["watermark"])
    note = f"--watermark came with vLLM {came}, and the pages tell only that this one is at least {least}"
    return (f"{note}; give --vllm-version",)


def chosen_window(made: tuple[Window, ...], source: str, *, engine: str | None, model_name: str | None) -> Window:
    """The only engine, or the one that --engine and --model-name leave. Raises SettingError that lists them all."""
    left = [
        window
        for window in made
        if (engine is None or window.key.engine == engine)
        and (model_name is None or window.key.model_name == model_name)
    ]
    if len(left) == 1:
        return left[0]
    listed = "".join(
        f"\n  --model-name {quote(window.key.model_name)} --engine {quote(window.key.engine)}  {window.key.target}"
        for window in (left or made)
    )
    if not left:
        raise SettingError(f"{source} has no engine of that --model-name and --engine. It has:{listed}")
    names = {(window.key.model_name, window.key.engine) for window in left}
    narrower = (
        "" if len(names) > 1 else " Those differ in their target only: give one as SOURCE, or a narrower selector."
    )
    raise SettingError(f"{source} has {len(left)} engines, and one is simulated; choose it:{listed}{narrower}")


def _reconstructed(view: EngineView) -> tuple[Workload, tuple[Assumption, ...]]:
    load = offered_load(view)
    trial, fit = trial_of(view, load)
    told, seen = view.facts.vllm_version, view.window.latest.vllm_version_at_least
    cost_origin: Origin = "derived" if fit else "assumed"
    costs = tuple(
        Assumption(name=name, value=float(f"{getattr(trial.cost, name):.3g}"), origin=cost_origin)
        for name in ("step_seconds", "per_token_seconds", "per_kv_token_seconds")
    )
    more = [
        Assumption(name="window_seconds", value=round(view.window.duration_seconds, 1), origin="observed"),
        Assumption(name="finished_requests", value=round(load.observations), origin="observed"),
        Assumption(name="lengths_from", value=load.source, origin="observed"),
    ]
    if (preempted := _preempted(view.window)) is not None:
        more.append(Assumption(name="preemptions_per_request", value=round(preempted, 3), origin="observed"))
    if fit:
        more.append(Assumption(name="cost_error_ratio", value=round(fit.error_ratio, 4), origin="derived"))
    if told:
        origin: Origin = "given" if view.facts.source_of("vllm_version") == "given" else "observed"
        more.append(Assumption(name="vllm_version", value=told, origin=origin))
    elif seen:
        more.append(Assumption(name="vllm_version", value=f"at least {seen}", origin="derived"))
    workload = Workload(
        engine=load.settings,
        cost=trial.cost,
        requests=trial.draws[0],
        clients=load.clients,
        # a version that the page only bounds from below refuses no flag
        vllm_version=told,
    )
    return workload, (*load.assumptions, *costs, *more)


def _preempted(window: Window) -> float | None:
    """What was seen, to compare with what is simulated: in the window, else since the engine started."""
    try:
        return preemptions_per_request(window)
    except NoData:
        preempted, finished = window.latest.get(PREEMPTIONS), window.latest.get(REQUEST_SUCCESS)
        return None if preempted is None or not finished else preempted / finished
