"""Expected renderings, one file each in tests/golden/. KVWATCH_UPDATE_GOLDEN=1 writes them anew: read the diff."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def golden(name: str, actual: str) -> str:
    """The expected text, to be compared with `actual`."""
    path = FOLDER / name
    if os.environ.get("KVWATCH_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual, encoding="utf-8")
    return path.read_text(encoding="utf-8")
