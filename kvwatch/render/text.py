"""Report -> text for a terminal: the verdict, the problems with their evidence, what to do now, flags for the next
rollout, and last what is unknown or fine.

Plain text, at most `width` columns, readable without colour. Colour only marks the status words.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvwatch.checks import engine_stalled, kv_cache_saturated, preemptions_sustained
from kvwatch.finding import Finding, Status
from kvwatch.proposal import Recommendation
from kvwatch.render.options_text import options_table
from kvwatch.report import EngineReport, Report

_MARK = {Status.OK: "ok", Status.UNKNOWN: "unknown", Status.WARNING: "WARNING", Status.CRITICAL: "CRITICAL"}
# Without these an engine is not called fine.
_DECIDING = frozenset(c.CHECK.id for c in (engine_stalled, preemptions_sustained, kv_cache_saturated))
_COLOUR = {Status.OK: "32", Status.UNKNOWN: "36", Status.WARNING: "33", Status.CRITICAL: "1;31"}


def report_text(report: Report, *, width: int = 80, colour: bool = False, recommendations_first: bool = False) -> str:
    """The whole report. `recommendations_first` names only the checks that found something before what to do."""
    blocks = [_headline(report, width=width, colour=colour)]
    blocks += [
        _engine(engine, width=width, colour=colour, recommendations_first=recommendations_first)
        for engine in report.engines
    ]
    if report.notes:
        blocks.append("\n".join(_wrap(f"note: {note}", width=width, indent="  ", first="") for note in report.notes))
    return "\n\n".join(blocks)


def _headline(report: Report, *, width: int, colour: bool) -> str:
    """The verdict: the worst finding in a sentence, or how many checks are fine."""
    status = report.worst
    if not report.engines:
        return _wrap(f"{_MARK[status].upper()}  no engine was read", width=width, indent="  ", first="")
    span = f"over {report.window_seconds:.0f} s" if report.window_seconds > 0 else "on a single page"
    engines = f"{len(report.engines)} engine{'s' if len(report.engines) != 1 else ''} {span}"
    findings = [finding for engine in report.engines for finding in engine.findings]
    bad = [finding for finding in findings if finding.status is status]
    if status in {Status.CRITICAL, Status.WARNING}:
        what = f"{bad[0].check}: {bad[0].summary}"
    else:
        status, what = _no_problem(findings)
    word = _MARK[status].upper()
    text = _wrap(f"{word}  {what} ({engines})", width=width, indent="  ", first="")
    return _paint(word, status, colour=colour) + text[len(word) :]


def _no_problem(findings: Sequence[Finding]) -> tuple[Status, str]:
    """OK where what would hurt now was judged, whatever else is unknown; else what was not judged, and why."""
    unjudged = [f for f in findings if f.status is Status.UNKNOWN and f.check in _DECIDING]
    if unjudged:
        return Status.UNKNOWN, f"no problem found, but {unjudged[0].check} was not judged: {unjudged[0].summary}"
    known = sum(finding.status is Status.OK for finding in findings)
    unknown = f", {len(findings) - known} unknown" if known < len(findings) else ""
    return Status.OK, f"{known} of {len(findings)} checks ok{unknown}; no problem found"


def _engine(engine: EngineReport, *, width: int, colour: bool, recommendations_first: bool) -> str:
    title = [f"{engine.key}"]
    if engine.vllm_version:
        at_least = ">= " if engine.vllm_version_source == "at least" else ""
        title.append(f"vLLM {at_least}{engine.vllm_version}")
    if engine.key.target:
        title.append(engine.key.target)
    parts = [_wrap("  ".join(title), width=width, indent="    ", first=""), _vitals(engine, width=width)]
    found = [f for f in engine.findings if f.status in {Status.CRITICAL, Status.WARNING}]
    fine = [f for f in engine.findings if f.status is Status.OK]
    unknown = _unknown(engine.findings, width=width, colour=colour)
    todo = _todo(engine, width=width)
    if recommendations_first:
        parts += [_findings(found, width=width, colour=colour), todo or _nothing_to_do(engine, width=width)]
        if engine.simulation is not None:
            parts.append(options_table(engine.options, engine.simulation, width=width))
        parts += [unknown, _names(fine, width=width, colour=colour)]
    else:
        parts += [_findings(found, width=width, colour=colour), todo if found else ""]
        if found and any(item.predicted.get("method") == "analytic" for item in engine.recommendations):
            text = (
                "These are estimates by formula; `kvwatch recommend` simulates the load and decides between settings."
            )
            parts.append(_wrap(text, width=width, indent="  "))
        parts += [unknown, _findings(fine, width=width, colour=colour)]
    return "\n".join(part for part in parts if part)


def _nothing_to_do(engine: EngineReport, *, width: int) -> str:
    if engine.worst in {Status.CRITICAL, Status.WARNING}:
        text = "No setting is proposed: none of these is ended by one. `kvwatch explain CHECK` has the runbook."
    else:
        text = "No change is proposed."
    return _wrap(text, width=width, indent="  ")


def _unknown(findings: Iterable[Finding], *, width: int, colour: bool) -> str:
    """What cannot be judged, one entry per reason: the same missing input often stops several checks."""
    by_reason: dict[str, list[str]] = {}
    for finding in findings:
        if finding.status is Status.UNKNOWN:
            by_reason.setdefault(finding.summary, []).append(finding.check)
    word = f"  {_MARK[Status.UNKNOWN]:<9}"
    lines = []
    for reason, names in by_reason.items():
        text = _wrap(f"{', '.join(names)}: {reason}", width=width, indent=" " * len(word), first=word)
        lines.append(_paint(word, Status.UNKNOWN, colour=colour) + text[len(word) :])
    return "\n".join(lines)


def _names(findings: Iterable[Finding], *, width: int, colour: bool) -> str:
    """The checks that are fine, by name only."""
    word = f"  {_MARK[Status.OK]:<9}"
    names = ", ".join(finding.check for finding in findings)
    if not names:
        return ""
    text = _wrap(names, width=width, indent=" " * len(word), first=word)
    return _paint(word, Status.OK, colour=colour) + text[len(word) :]


def _vitals(engine: EngineReport, *, width: int) -> str:
    """The line an SRE looks at first: what runs, what waits, how full, how fast, what is lost."""
    seen = engine.observed
    words: list[str] = []
    if "running_requests" in seen and "waiting_requests" in seen:
        words.append(f"running {seen['running_requests']:.0f}, waiting {seen['waiting_requests']:.0f}")
    if "kv_cache_usage_ratio" in seen:
        words.append(f"KV cache {seen['kv_cache_usage_ratio']:.0%} held")
    if "preemptions_per_second" in seen:
        words.append(f"{seen['preemptions_per_second']:.2f} preemptions/s")
    if "generation_tokens_per_second" in seen:
        words.append(f"{seen['generation_tokens_per_second']:,.0f} tokens/s out")
    if "time_to_first_token_p95_seconds" in seen:
        words.append(f"TTFT p95 {_seconds(seen['time_to_first_token_p95_seconds'])}")
    capacity = engine.capacity
    if capacity.num_gpu_blocks:
        pool = f"pool {capacity.num_gpu_blocks:,} blocks"
        if capacity.max_concurrency and capacity.max_model_len:
            pool += f" = {capacity.max_concurrency:.2f} requests of {capacity.max_model_len:,} tokens"
        words.append(pool)
    return _wrap("; ".join(words), width=width, indent="  ") if words else ""


def _findings(findings: Iterable[Finding], *, width: int, colour: bool) -> str:
    ordered = sorted(findings, key=lambda finding: -finding.status.rank)
    lines = []
    for finding in ordered:
        head = f"  {_MARK[finding.status]:<9}{finding.check:<27}"
        body = textwrap.wrap(_shown(finding.summary), max(20, width - len(head)), break_on_hyphens=False) or [""]
        lines.append(_paint(head[:11], finding.status, colour=colour) + head[11:] + body[0])
        lines += [" " * len(head) + line for line in body[1:]]
    return "\n".join(lines)


def _todo(engine: EngineReport, *, width: int) -> str:
    now = [r for r in engine.recommendations if r.apply == "now"]
    restart = [r for r in engine.recommendations if r.apply == "restart"]
    lines: list[str] = []
    if now:
        lines.append("  Now, without a restart:")
        lines += [_recommendation(r, width=width) for r in now]
    if restart:
        lines.append("  At the next rollout (a restart drops the cache and running requests):")
        lines += [_recommendation(r, width=width) for r in _joined(restart)]
    if engine.withheld:
        lines.append("  Not decided:")
        lines += [
            _wrap(f"{w.setting}: {w.reason}", width=width, indent="      ", first="    ") for w in engine.withheld
        ]
    return "\n".join(lines)


def _joined(restart: list[Recommendation]) -> list[Recommendation]:
    """Flags that were simulated together, as one entry."""
    if len(restart) < 2 or any(item.predicted != restart[0].predicted for item in restart):
        return restart
    current = ", ".join(f"{item.setting} {item.current}" for item in restart if item.current is not None)
    flags = " ".join(item.flag or "" for item in restart)
    notes = [
        note for item in restart for note in item.note.split("; ") if note and not note.startswith("together with")
    ]
    note = "; ".join([*([f"now {current}"] if current else []), *notes])
    return [replace(restart[0], flag=flags, current=None, note=note)]


def _recommendation(item: Recommendation, *, width: int) -> str:
    flag = item.flag or f"{item.setting} = {item.proposed}"
    was = f" (now {item.current})" if item.current is not None else ""
    lines = [_wrap(f"{flag}{was}", width=width, indent="      ", first="    ")]
    if item.note:
        lines.append(_wrap(item.note, width=width, indent="      "))
    lines.append(_wrap(_why(item), width=width, indent="      "))
    return "\n".join(lines)


def _why(item: Recommendation) -> str:
    because = f"because of {', '.join(item.because)}; confidence {item.confidence}"
    predicted = item.predicted
    if predicted.get("method") == "simulated":
        return f"{_effect(item)}; {because}"
    if "demand_blocks" not in predicted:
        return because
    return (
        f"with {predicted['in_flight']} in flight, requests of today's length hold at most "
        f"{float(predicted['demand_blocks']):.0f} of {int(predicted['usable_blocks']):,} blocks with probability "
        f"{float(predicted['probability']):.0%}; {because}"
    )


def _effect(item: Recommendation) -> str:
    predicted = item.predicted
    before, after = float(predicted["preemptions_per_request_now"]), float(predicted["preemptions_per_request"])
    unit = "tokens per second" if predicted["cost"] == "fitted" else "tokens per second at an assumed cost"
    change = float(predicted["output_throughput_ratio"]) - 1
    return f"simulated: {before:.2f} -> {after:.2f} preemptions per request, {change:+.0%} {unit}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _paint(text: str, status: Status, *, colour: bool) -> str:
    return f"\x1b[{_COLOUR[status]}m{text}\x1b[0m" if colour else text


def _wrap(text: str, *, width: int, indent: str, first: str | None = None) -> str:
    return textwrap.fill(
        _shown(text),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shown(text: str) -> str:
    """Names come from pages: what would move the cursor or colour the terminal is not printed."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
