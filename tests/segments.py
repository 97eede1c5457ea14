"""Segments for the tests of what reads, writes and counts them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve_client.layout import Array, Column, Description, SourceRecord
from shmserve_client.owned import OwnedSegment
from shmserve_client.writer import Piece, Values, write_segment

REPOSITORY = Path(__file__).parent.parent
CHILD_ENV = {"PYTHONPATH": str(REPOSITORY)}
"""Lets a program started by a test import this module."""


def describe_tokens(dtype: str, count: int, name: str = "corpus") -> Description:
    """A flat array of `count` token ids."""
    column = Column("tokens", Array(dtype, (count,)))
    return Description(name, "raw", count, (column,), SourceRecord("key", "fingerprint", ("/data/corpus.bin",), 1))


def write_pieces(
    shm_dir: Path | str,
    description: Description,
    pieces: Sequence[Sequence[Piece]],
    *,
    progress: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None,
    cancelled: threading.Event | None = None,
    vocab_size: int | None = None,
    gid: int | None = None,
) -> OwnedSegment:
    return write_segment(
        description,
        pieces,
        shm_dir=str(shm_dir),
        progress=progress,
        cancelled=cancelled or threading.Event(),
        vocab_size=vocab_size,
        gid=gid,
    )


def write_tokens(shm_dir: Path | str, tokens: NDArray[Any], **options: Any) -> OwnedSegment:
    """A segment of one flat array."""
    return write_pieces(shm_dir, describe_tokens(tokens.dtype.name, len(tokens)), [[Values(tokens)]], **options)


@contextmanager
def published(segment: OwnedSegment) -> Iterator[OwnedSegment]:
    """The segment, which goes in the end."""
    try:
        yield segment
    finally:
        segment.unlink()
        segment.close()


class Repeated(Piece):
    """One byte, over and over: a large piece that takes no memory."""

    def __init__(self, nbytes: int, value: int = 7) -> None:
        self.nbytes = nbytes
        self.value = value

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        target[:] = self.value


def allocated_nbytes(fd: int) -> int:
    """How much memory the file takes."""
    return os.fstat(fd).st_blocks * 512


def smaps(address: int) -> dict[str, int]:
    """The figures, in bytes, of this process's mapping that starts at `address`; empty where there is none."""
    found: dict[str, int] = {}
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            key, _, rest = line.partition(" ")
            if not key.endswith(":"):
                inside = key.startswith(f"{address:x}-")
            elif inside and rest.rstrip().endswith("kB"):
                found[key[:-1]] = int(rest.split()[0]) << 10
    return found
