"""Report -> the vLLM flags that it proposes for the next rollout, to be pasted into a command line."""

from kvwatch.report import EngineReport, Report


def report_args(report: Report) -> str:
    """A line of flags for each engine for which a restart is proposed; empty where there is none.

    Where the report has several engines, a shell comment behind the flags says which of them the line is for.
    """
    found = [(engine, flags) for engine in report.engines if (flags := _flags(engine))]
    if len(report.engines) == 1:
        return "\n".join(flags for _, flags in found)
    return "\n".join(f"{flags}  # {_comment(engine)}" for engine, flags in found)


def _flags(engine: EngineReport) -> str:
    return " ".join(item.flag for item in engine.recommendations if item.apply == "restart" and item.flag)


def _comment(engine: EngineReport) -> str:
    """Names come from outside: none may end the comment, for the line is made to be pasted."""
    text = f"{engine.key} on {engine.key.target}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)
