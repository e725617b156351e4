"""Where snapshots come from: a server, a file, standard input, a capture folder, a Prometheus-compatible history.

`parse` turns what a user types into a Source; `gather.gather` reads sources into snapshots.
"""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

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
    scheme, separator, rest = given.partition("://")
    scheme = scheme.lower()
    if separator:
        if scheme in {"prometheus+http", "prometheus+https"}:
            address = f"{scheme.removeprefix('prometheus+')}://{rest}"
            _checked(address, given)
            return Source(given=given, kind="prometheus", where=address)
        if scheme in {"http", "https"}:
            return Source(given=given, kind="url", where=page_address(given))
        raise SourceError(
            f"{given}: the scheme {scheme!r} is not known; give http://HOST:PORT, https://…, "
            "prometheus+http://HOST:9090?selector={…}, an exposition file, a capture folder, or - for standard input"
        )
    if not given:
        raise SourceError("a SOURCE is empty; give http://HOST:PORT, a file, a folder, or - for standard input")
    path = Path(given)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = f"; for a server give http://{given}" if ":" in given or given == "localhost" else ""
        raise SourceError(f"{given[:200]}: {reason}{hint}") from error
    return Source(given=given, kind="folder" if stat.S_ISDIR(mode) else "file", where=given)


def page_address(url: str) -> str:
    """A server's base address -> the address of its metrics page; an address with a path is taken as it is."""
    parts = _checked(url, url)
    path = parts.path if parts.path not in {"", "/"} else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _checked(url: str, given: str) -> SplitResult:
    """The parts of an address that can be asked. Raises SourceError, without the password if there is one."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SourceError(f"{given}: {error}; give http://HOST:PORT, for example http://127.0.0.1:8000") from error
    if parts.username is not None or parts.password is not None:
        raise SourceError(
            f"{parts.scheme}://…@{host}: the address holds a login, and addresses stand in reports, logs and alerts; "
            "give --header 'Authorization: Basic …' or 'Authorization: Bearer …'"
        )
    if not host:
        raise SourceError(f"{given}: the address has no host; give http://HOST:PORT, for example http://127.0.0.1:8000")
    return parts


def base_address(page: str) -> str:
    """The address of a metrics page -> the server's base address, where its API is."""
    parts = urlsplit(page)
    path = parts.path.removesuffix("/metrics") if parts.path.endswith("/metrics") else ""
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
