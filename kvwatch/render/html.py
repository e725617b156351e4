"""Report -> one self-contained page: the verdict and what to do now first, then each engine, the worst first.

Everything from outside is escaped, and a content security policy allows nothing but the page's own style and script.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from typing import TYPE_CHECKING

from kvwatch import __version__
from kvwatch.checks import ALL
from kvwatch.finding import Finding, Status, overall
from kvwatch.render.html_assets import SCRIPT, STYLE
from kvwatch.report import EngineReport, Report

if TYPE_CHECKING:
    from kvwatch.proposal import Recommendation, SettingOption, SimulationBasis

_WORD = {Status.OK: "OK", Status.UNKNOWN: "UNKNOWN", Status.WARNING: "WARNING", Status.CRITICAL: "CRITICAL"}
_ICON_COLOUR = {
    Status.OK: "%231b6e36",
    Status.UNKNOWN: "%2364748b",
    Status.WARNING: "%23d98300",
    Status.CRITICAL: "%23c5221f",
}
_MEANING = {check.id: check.summary.rstrip(".") for check in ALL}
_BAD = (Status.CRITICAL, Status.WARNING)


def report_html(
    report: Report | None,
    *,
    at_seconds: float | None = None,
    interval_seconds: float | None = None,
    stale: str | None = None,
) -> str:
    """The page. `at_seconds` is the report's unix time; with an interval the page fetches itself anew.

    `report` is None before the first round. `stale` says why the report is not what is now: then nothing in it is
    called current.
    """
    status, headline, more = _verdict(report, stale)
    old = " class='is-old'" if stale else ""
    live = f" data-interval='{max(1.0, interval_seconds):g}'" if interval_seconds else ""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
        f"<noscript><meta http-equiv='refresh' content='{max(1, round(interval_seconds))}'></noscript>"
        if interval_seconds
        else "",
        f"<title>{_WORD[status]} - kvwatch</title><link rel='icon' href=\"{_icon(status)}\">",
        f"<style>{STYLE}</style></head><body{old}{live}>",
        f"<header><p class='lost' hidden></p><div class='verdict {status.value}'>",
        f"<p><span class='word'>{_WORD[status]}</span></p><h1>{escape(headline)}</h1>{more}",
        f"<p class='soft'>{_as_of(report, at_seconds)}</p></div></header>",
        f"<main>{_body(report)}</main>",
        f"<footer class='soft'>kvwatch {escape(__version__)}{_links(interval_seconds)}</footer>",
        f"<script>{SCRIPT}</script>" if interval_seconds else "",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


# The top of the page --------------------------------------------------------------------------------------------------


def _verdict(report: Report | None, stale: str | None) -> tuple[Status, str, str]:
    """Status, the headline, and under it what was measured and what to do now, as HTML."""
    if report is None:
        return Status.UNKNOWN, "No data yet: the first round of scrapes is not finished", ""
    if stale:
        return Status.UNKNOWN, f"kvwatch itself is not keeping up: {stale}; what stands below is old", ""
    if not report.engines:
        return Status.UNKNOWN, "No engine was read", ""
    findings = [(engine, finding) for engine in report.engines for finding in engine.findings]
    if report.worst in _BAD:
        engine, finding = next((e, f) for e, f in findings if f.status is report.worst)
        where = f" ({engine.key}, {engine.key.target})" if len(report.engines) > 1 else ""
        measured = f"<p>{escape(finding.summary + where)}</p>"
        headline = _MEANING[finding.check] if engine.observed else "There is no current page of an engine"
        return report.worst, headline, measured + _first_change(engine)
    statuses = [finding.status for _, finding in findings]
    known = statuses.count(Status.OK)
    sentence = f"No problem found: {known} of {len(findings)} checks ok, {len(findings) - known} unknown"
    return overall(statuses), sentence, ""


def _first_change(engine: EngineReport) -> str:
    now = [item for item in engine.recommendations if item.apply == "now"]
    if not now:
        return ""
    return f"<p class='now'>Now: {escape(now[0].note or _change(now[0]))}</p>"


def _as_of(report: Report | None, at_seconds: float | None) -> str:
    words = []
    if at_seconds is not None:
        words.append(f"as of {datetime.fromtimestamp(at_seconds, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
    if report is not None:
        count = len(report.engines)
        words.append(f"{count} engine{'s' if count != 1 else ''}")
        if any(engine.observed for engine in report.engines):
            words.append(f"over {report.window_seconds:.0f} s" if report.window_seconds > 0 else "on a single page")
    return ", ".join(words)


def _links(interval_seconds: float | None) -> str:
    if not interval_seconds:
        return ""
    return (
        f", refreshed every {interval_seconds:g} s - <a href='api/v1/report'>JSON</a> - <a href='metrics'>metrics</a>"
    )


def _policy() -> str:
    def source(text: str) -> str:
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {source(STYLE)}; script-src {source(SCRIPT)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _icon(status: Status) -> str:
    shape = f"<circle cx='8' cy='8' r='7' fill='{_ICON_COLOUR[status]}'/>"
    return f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>{shape}</svg>"


# Engines --------------------------------------------------------------------------------------------------------------


def _body(report: Report | None) -> str:
    if report is None:
        return ""
    fleet = _fleet(report.engines) if len(report.engines) > 1 else ""
    engines = "".join(_engine(engine, f"e{number}") for number, engine in enumerate(report.engines))
    notes = "".join(f"<p class='soft'>note: {escape(note)}</p>" for note in report.notes)
    return fleet + engines + notes


def _fleet(engines: Sequence[EngineReport]) -> str:
    """One row per engine, so that the bad ones of many are found."""
    rows = []
    for number, engine in enumerate(engines):
        bad = ", ".join(finding.check for finding in engine.findings if finding.status in _BAD)
        seen, status = engine.observed, overall([finding.status for finding in engine.findings])
        rows.append(
            f"<tr><td><span class='word {status.value}'>{_WORD[status]}</span> "
            f"<a href='#e{number}'>{escape(str(engine.key))}</a> {escape(bad)}"
            f"<br><span class='soft'>{escape(engine.key.target)}</span></td>"
            f"<td class='number'>{_count(seen.get('running_requests'))}</td>"
            f"<td class='number'>{_count(seen.get('waiting_requests'))}</td>"
            f"<td class='number'>{_share(seen.get('kv_cache_usage_ratio'))}</td></tr>"
        )
    head = (
        "<tr><th>engine</th><th class='number'>running</th><th class='number'>waiting</th>"
        "<th class='number'>KV</th></tr>"
    )
    return f"<section class='engine'><table class='fleet'>{head}{''.join(rows)}</table></section>"


def _engine(engine: EngineReport, anchor: str) -> str:
    bad = sorted((f for f in engine.findings if f.status in _BAD), key=lambda f: -f.status.rank)
    now = [item for item in engine.recommendations if item.apply == "now"]
    later = [item for item in engine.recommendations if item.apply == "restart"]
    parts = [
        f"<section class='engine' id='{anchor}'><h2>{escape(str(engine.key))}</h2>",
        f"<p class='soft'>{escape(_subtitle(engine))}</p>",
        _vitals(engine),
        _section("Found", [_finding(finding, anchor) for finding in bad]),
        _section("Now, without a restart", [_recommendation(item, anchor) for item in now]),
        _section(
            "At the next rollout (a restart drops the cache and running requests)",
            [_recommendation(item, anchor) for item in later],
        ),
        _section(
            "Not decided",
            [f"<li class='change'>{escape(w.setting)}: {escape(w.reason)}</li>" for w in engine.withheld],
        ),
        _options(engine.options, engine.simulation),
        _rest(engine, anchor),
        "</section>",
    ]
    return "".join(parts)


def _subtitle(engine: EngineReport) -> str:
    words = [engine.key.target] if engine.key.target else []
    if engine.vllm_version:
        at_least = ">= " if engine.vllm_version_source == "at least" else ""
        words.append(f"vLLM {at_least}{engine.vllm_version}")
    if engine.restarts:
        words.append("restarted inside the window")
    if not engine.observed:
        last = "never read" if engine.at_seconds is None else f"last read {_clock(engine.at_seconds)} UTC"
        words.append(last)
    return ", ".join(words)


def _vitals(engine: EngineReport) -> str:
    seen, capacity = engine.observed, engine.capacity
    tiles = [
        ("running", _count(seen.get("running_requests")), ""),
        ("waiting", _count(seen.get("waiting_requests")), ""),
        ("KV held", _share(seen.get("kv_cache_usage_ratio")), _bar(seen.get("kv_cache_usage_ratio"))),
        ("preempt/s", _rate(seen.get("preemptions_per_second")), ""),
        ("tokens/s out", _count(seen.get("generation_tokens_per_second")), ""),
        ("TTFT p95", _seconds(seen.get("time_to_first_token_p95_seconds")), ""),
        ("ITL p95", _seconds(seen.get("inter_token_latency_p95_seconds")), ""),
        ("pool blocks", _count(capacity.num_gpu_blocks), ""),
    ]
    shown = [f"<div><dt>{name}</dt><dd>{text}</dd>{more}</div>" for name, text, more in tiles if text]
    return f"<dl class='vitals'>{''.join(shown)}</dl>" if shown else ""


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    width = 100 * min(1.0, max(0.0, share))
    full = " class='full'" if share >= 0.95 else ""
    return (
        f"<svg{full} viewBox='0 0 100 6' preserveAspectRatio='none' aria-hidden='true'>"
        f"<rect width='{width:.1f}' height='6'/></svg>"
    )


def _section(title: str, items: Iterable[str]) -> str:
    listed = "".join(items)
    return f"<h3>{escape(title)}</h3><ul>{listed}</ul>" if listed else ""


def _finding(finding: Finding, anchor: str) -> str:
    evidence = "".join(
        f"<tr><td>{escape(name)}</td><td class='number'>{escape(_plain(value))}</td></tr>"
        for name, value in finding.evidence.items()
    )
    return (
        f"<li class='finding'><span class='word {finding.status.value}'>{_WORD[finding.status]}</span> "
        f"<b>{escape(finding.check)}</b><p>{escape(finding.summary)}</p>"
        f"<details id='{anchor}-{finding.check}'><summary>runbook and evidence</summary>"
        f"<p><a href='{escape(finding.runbook)}' rel='noreferrer'>{escape(finding.check)}</a> or "
        f"<code>kvwatch explain {escape(finding.check)}</code></p><table>{evidence}</table></details></li>"
    )


def _recommendation(item: Recommendation, anchor: str) -> str:
    was = f" <span class='soft'>now {escape(_plain(item.current))}</span>" if item.current is not None else ""
    predicted = "".join(
        f"<tr><td>{escape(name)}</td><td class='number'>{escape(_plain(value))}</td></tr>"
        for name, value in item.predicted.items()
    )
    return (
        f"<li class='change'><span class='setting'><code>{escape(_change(item))}</code></span>{was}"
        f"<p>{escape(item.note)}</p>"
        f"<details id='{anchor}-{escape(item.setting)}'><summary>why</summary>"
        f"<p>because of {escape(', '.join(item.because))}; confidence {escape(item.confidence)}</p>"
        f"<table>{predicted}</table></details></li>"
    )


def _options(options: Sequence[SettingOption], basis: SimulationBasis | None) -> str:
    """What each combination of settings did in the simulation, relative to the present ones."""
    if basis is None or not options:
        return ""
    heads = ("", "preempt/req", "tokens/s", "max-num-seqs", "watermark", "TTFT p99", "ITL p99")
    rows = []
    for option in options:
        cells = (
            _rate(option.preemptions_per_request),
            _share(option.output_throughput_ratio),
            _count(option.max_num_seqs),
            f"{option.watermark:g}",
            _share(option.ttft_p99_ratio),
            _share(option.itl_p99_ratio),
        )
        name = option.name if option.gateway_max_in_flight is None else f"gateway {option.gateway_max_in_flight}"
        numbers = "".join(f"<td class='number'>{cell}</td>" for cell in cells)
        rows.append(f"<tr><td>{escape(name)}</td>{numbers}</tr>")
    head = "".join(f"<th class='number'>{name}</th>" for name in heads)
    return (
        f"<h3>Simulated ({escape(basis.objective)}, {basis.draws} draws of {basis.requests} requests)</h3>"
        f"<div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
        f"<p class='soft'>The present settings give {basis.simulated_preemptions_per_request:.2f} preemptions per "
        f"request in the simulation; {basis.observed_preemptions_per_request:.2f} were seen.</p>"
    )


def _rest(engine: EngineReport, anchor: str) -> str:
    """Checks that are unknown, with the reason, and those that are fine, folded away."""
    parts = []
    for status in (Status.UNKNOWN, Status.OK):
        findings = [finding for finding in engine.findings if finding.status is status]
        if findings:
            rows = "".join(
                f"<tr><td>{escape(finding.check)}</td><td>{escape(finding.summary)}</td></tr>" for finding in findings
            )
            parts.append(
                f"<details class='rest' id='{anchor}-{status.value}'><summary>{len(findings)} "
                f"{'unknown' if status is Status.UNKNOWN else 'ok'}</summary><table>{rows}</table></details>"
            )
    return "".join(parts)


# Words and numbers ----------------------------------------------------------------------------------------------------


def _change(item: Recommendation) -> str:
    return item.flag or f"{item.setting} = {_plain(item.proposed)}"


def _plain(value: float | str) -> str:
    if isinstance(value, (str, bool)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _clock(unix_seconds: float) -> str:
    return f"{datetime.fromtimestamp(unix_seconds, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
