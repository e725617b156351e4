"""Reading files that a user names: never more of them than a bound, and never forever."""

import os
import select
import stat
from pathlib import Path

from kvwatch.errors import SourceError

SILENCE_SECONDS = 60.0
"""How long a FIFO or a terminal may say nothing; `<(kubectl exec … curl …)` takes seconds to say its first word."""

_PIECE_BYTES = 1 << 20


def bounded_text(path: Path, *, limit_bytes: int) -> str:
    """A UTF-8 file, with or without a byte order mark. Raises SourceError where it has more bytes: /dev/zero, a disk
    image. OSError and UnicodeDecodeError are the caller's, who knows what the file was to be.
    """
    body = read_up_to(path, limit_bytes + 1)
    if len(body) > limit_bytes:
        raise SourceError(
            f"{path}: more than {limit_bytes:,} bytes, which such a file does not have; is it the right one?"
        )
    return body.decode("utf-8-sig")


def read_up_to(path: Path, size_bytes: int) -> bytes:
    """The first `size_bytes` of a file, fewer where it ends before.

    Raises OSError, and SourceError for a FIFO into which nobody writes: opening it the usual way would wait forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return file.read(size_bytes)
        return _awaited(descriptor, path, size_bytes)


def _awaited(descriptor: int, path: Path, size_bytes: int) -> bytes:
    """What arrives at a FIFO, a pipe or a device, up to its end."""
    arrivals = select.poll()
    arrivals.register(descriptor, select.POLLIN)
    found = bytearray()
    while len(found) < size_bytes:
        if not arrivals.poll(SILENCE_SECONDS * 1000):
            raise SourceError(
                f"{path}: nothing was written into it for {SILENCE_SECONDS:g} s; give a file, or start what writes it"
            )
        piece = os.read(descriptor, min(_PIECE_BYTES, size_bytes - len(found)))
        if not piece:
            break
        found += piece
    return bytes(found)
