"""Where snapshots come from: a server, a file, standard input, a capture folder, a Prometheus-compatible history.

`parse` turns what a user types into a Source; `gather.gather` reads sources into snapshots.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from kvwatch.errors import SourceError

Kind = Literal["url", "prometheus", "file", "folder", "stdin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source as given. `where` is the page's address, the history's address with its query, or a path."""

    given: str
    kind: Kind
    where: str

    @property
    def is_live(self) -> bool:
        """Whether asking again later gives another page."""
        return self.kind == "url"


def parse(given: str) -> Source:
    """A SOURCE argument -> Source. Raises SourceError with what would be accepted."""
    if given == "-":
        return Source(given=given, kind="stdin", where="-")
    scheme, separator, _ = given.partition("://")
    if separator:
        if scheme in {"prometheus+http", "prometheus+https"}:
            return Source(given=given, kind="prometheus", where=given.removeprefix("prometheus+"))
        if scheme in {"http", "https"}:
            return Source(given=given, kind="url", where=page_address(given))
        raise SourceError(
            f"{given}: the scheme {scheme!r} is not known; give http://HOST:PORT, https://…, "
            "prometheus+http://HOST:9090?selector={…}, an exposition file, a capture folder, or - for standard input"
        )
    path = Path(given)
    if path.is_dir():
        return Source(given=given, kind="folder", where=given)
    if path.exists():
        return Source(given=given, kind="file", where=given)
    hint = f"; for a server give http://{given}" if ":" in given or given == "localhost" else ""
    raise SourceError(f"{given}: no such file or folder{hint}")


def page_address(url: str) -> str:
    """A server's base address -> the address of its metrics page; an address with a path is taken as it is."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise SourceError(f"{url}: the address has no host; give http://HOST:PORT, for example http://127.0.0.1:8000")
    try:
        _ = parts.port
    except ValueError as error:
        raise SourceError(f"{url}: {error}; give a port between 1 and 65535") from error
    path = parts.path if parts.path not in {"", "/"} else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def base_address(page: str) -> str:
    """The address of a metrics page -> the server's base address, where its API is."""
    parts = urlsplit(page)
    path = parts.path.removesuffix("/metrics") if parts.path.endswith("/metrics") else ""
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
