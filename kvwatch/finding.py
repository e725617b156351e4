"""What a check says: a status, a sentence and the numbers behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """In the words of monitoring plugins; the codes are those of kvwatch_check_status."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"

    @property
    def code(self) -> int:
        return {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[self.value]

    @property
    def rank(self) -> int:
        """Order of badness: what is unknown is worse than ok and better than a warning."""
        return {"ok": 0, "unknown": 1, "warning": 2, "critical": 3}[self.value]


def worst(statuses: "list[Status] | tuple[Status, ...]") -> Status:
    """The worst status; UNKNOWN where there is none."""
    return max(statuses, key=lambda status: status.rank, default=Status.UNKNOWN)


def overall(statuses: "list[Status] | tuple[Status, ...]") -> Status:
    """One word for many findings: the worst problem; without one OK if most checks could be judged, else UNKNOWN."""
    if worst(statuses) in {Status.CRITICAL, Status.WARNING}:
        return worst(statuses)
    return Status.OK if statuses.count(Status.OK) * 2 > len(statuses) else Status.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `evaluate` of one check returns. `evidence` maps names with units to numbers or words."""

    status: Status
    summary: str
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A Verdict with the check that gave it."""

    check: str
    status: Status
    summary: str
    evidence: Mapping[str, float | int | str]
    runbook: str


def alert_name(check: str) -> str:
    """The alert of a check: VLLM and the id in camel case, KV kept upper. kv_cache_filling -> VLLMKVCacheFilling."""
    return "VLLM" + "".join("KV" if word == "kv" else word.capitalize() for word in check.split("_"))
