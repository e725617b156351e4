"""A capture: a folder of <unix_ms>.prom files, one page each, written by `kvwatch record`."""

from collections.abc import Iterator
from pathlib import Path

from kvwatch.errors import ExpositionError, SourceError
from kvwatch.exposition import MAX_PAGE_BYTES, decode, read_samples
from kvwatch.files import read_up_to
from kvwatch.snapshot import Snapshot, snapshots

SUFFIX = ".prom"


def page_times(folder: Path) -> list[tuple[int, Path]]:
    """(unix milliseconds, file) of every page, ascending. Raises SourceError if there is none.

    Ten digits are seconds, as `date +%s` gives them: as milliseconds they would lie in 1970.
    """
    try:
        pages = sorted((_unix_ms(path.stem), path) for path in folder.iterdir() if _is_page(path))
    except OSError as error:
        raise SourceError(f"{folder}: {error.strerror}") from error
    if not pages:
        raise SourceError(f"{folder}: no page named <unix_ms>{SUFFIX}; `kvwatch record URL --output DIR` writes them")
    return pages


def read_capture(folder: Path, *, target: str, notes: list[str]) -> Iterator[Snapshot]:
    """Snapshots of all pages. A page that cannot be read is left out and noted; if none can, SourceError."""
    unreadable: list[str] = []
    pages = page_times(folder)
    for unix_ms, path in pages:
        try:
            yield from read_page(path, at_seconds=unix_ms / 1000, target=target)
        except (ExpositionError, SourceError) as error:
            unreadable.append(f"{path.name}: {str(error).removeprefix(f'{path}: ')}")
    if len(unreadable) == len(pages):
        raise SourceError(f"{folder}: none of its {len(pages)} pages can be read; the first: {unreadable[0]}")
    if unreadable:
        notes.append(f"{folder}: {len(unreadable)} of {len(pages)} pages left out; the first: {unreadable[0]}")


def read_page(path: Path, *, at_seconds: float, target: str) -> tuple[Snapshot, ...]:
    """One exposition file -> snapshots. Raises ExpositionError or SourceError."""
    try:
        body = read_up_to(path, MAX_PAGE_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    return snapshots(read_samples(decode(body)), at_seconds=at_seconds, target=target)


def _is_page(path: Path) -> bool:
    return path.suffix == SUFFIX and path.stem.isascii() and path.stem.isdigit()


def _unix_ms(digits: str) -> int:
    return int(digits) * 1000 if len(digits) == 10 else int(digits)
