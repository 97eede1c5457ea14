"""Reading of source files: by position, read-only, never mapped, one descriptor at a time; remote ones by ranges.

A file is opened for each read. So pieces have no state (any thread, any process), no more descriptors are open than
threads read, for any number of shards, and none of them is on a file that was replaced. A mapping would be shorter to
write, but a source that is truncated under it is SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve_client.errors import ShmserveError, SourceFormatError, SourceNotFoundError

from .remote import RemotePath

__all__ = ["chunks", "first_fall", "missing", "read_array", "read_exactly", "read_head", "size_of"]

CHUNK_ITEMS = 1 << 17
"""How many entries of an index are in memory at once while it is checked."""


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges that cut `count` index entries into parts of bounded memory."""
    for start in range(0, count, CHUNK_ITEMS):
        yield start, min(count, start + CHUNK_ITEMS)


def first_fall(numbers: NDArray[np.int64], previous: int) -> int | None:
    """Return where the numbers, of which there is at least one, first are less than the one before, or None.

    They are compared, not subtracted: the difference of two damaged ones may wrap to a positive number.
    """
    falls = np.concatenate(([numbers[0] < previous], numbers[1:] < numbers[:-1]))
    return int(falls.argmax()) if falls.any() else None


def missing(path: Path, remark: str = "") -> ShmserveError:
    """Return the error for a `path` where a file should be and is none; `remark` goes on where there is nothing."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have a name with a NUL in it
        return SourceNotFoundError(f"{path}: no such file{remark}")
    except OSError as error:
        return SourceFormatError(f"{path}: cannot be read: {error.strerror}")
    return SourceFormatError(f"{path}: {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")


def size_of(path: Path) -> int:
    """Return the file's size in bytes; raise SourceNotFoundError where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise SourceNotFoundError(f"{path}: no such file") from None


def read_head(path: Path, nbytes: int) -> bytes:
    """Return the file's first `nbytes` bytes, fewer where it is shorter."""
    if isinstance(path, RemotePath):
        return path.read_head(nbytes)
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), nbytes, 0)


def read_exactly(path: Path, offset: int, target: NDArray[np.uint8]) -> None:
    """Fill `target` with the file's bytes from `offset`; raise SourceFormatError where the file ends before."""
    if isinstance(path, RemotePath):
        path.read_exactly(offset, target)
        return
    view, done = memoryview(target.data), 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while done < target.nbytes:
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise SourceFormatError(
                    f"{path} changed while it was read: {target.nbytes} bytes wanted at byte {offset}, "
                    f"it ends at byte {offset + done}; start again when it is complete"
                )
            done += count
    finally:
        os.close(fd)


def read_array(path: Path, offset: int, dtype: str, count: int) -> NDArray[Any]:
    """Return `count` little-endian items from byte `offset` of the file, in memory of their own."""
    items = np.empty(count, np.dtype(dtype).newbyteorder("<"))
    read_exactly(path, offset, items.view(np.uint8))
    return items
