"""Finding a model by the name people type, among the names known offline."""

import difflib
from collections.abc import Collection

from kvwatch.errors import ModelError

_CLOSE_NAMES = 5


def match(name: str, known_names: Collection[str]) -> str:
    """The known hub name that `name` means: the whole name, or its unique ending after a "/", in any case.

    "Llama-3.1-70B-Instruct" finds "meta-llama/Llama-3.1-70B-Instruct".
    Raises ModelError, with close names, when none or several fit: a sibling's shape is no substitute.
    """
    wanted = name.strip().strip("/").lower()
    whole = [known for known in known_names if known.lower() == wanted]
    found = whole or [known for known in known_names if known.lower().endswith(f"/{wanted}")]
    if wanted and len(found) == 1:
        return found[0]
    if wanted and found:
        raise ModelError(f"model {name!r} can be {', '.join(sorted(found))}. Give the whole name.")
    close = _close(wanted, known_names)
    hint = f" Close names: {', '.join(close)}." if close else ""
    raise ModelError(
        f"model {name!r} is not among the {len(known_names)} that kvwatch knows offline, and kvwatch fetches nothing "
        f"from the hub. Pass the path of its config.json, or of the folder that holds it, as --model.{hint}"
    )


def _close(wanted: str, known_names: Collection[str]) -> list[str]:
    """Names that resemble the wanted one, best first, judged without the organisation."""
    by_ending: dict[str, list[str]] = {}
    for known in sorted(known_names):
        by_ending.setdefault(known.lower().rpartition("/")[2], []).append(known)
    endings = difflib.get_close_matches(wanted.rpartition("/")[2], by_ending, n=_CLOSE_NAMES, cutoff=0.6)
    return [known for ending in endings for known in by_ending[ending]][:_CLOSE_NAMES]
