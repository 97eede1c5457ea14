"""From a question to an attached segment: where it is says the daemon, and it may be loaded anew in between."""

from __future__ import annotations

from typing import Final

from .connection import attach_when_ready
from .errors import SegmentNotFoundError
from .protocol import Attach, Attached
from .segment import Segment

__all__ = ["attach_served"]

_MAX_MOVES: Final = 100


def attach_served(
    path: str, question: Attach, *, timeout_s: float, patience_s: float, keys: str | None = None
) -> tuple[Attached, Segment]:
    """Return what the daemon at `path` answers to `question`, and the segment that it names, attached.

    Raises:
        OutOfSharedMemoryError: the address space of this process is limited and too small.
        SegmentFormatError: what is there is not a segment that this version reads.
        SegmentNotFoundError: this process sees another shm directory than the daemon.
        ShmserveError: as `attach_when_ready`.
    """
    attached = attach_when_ready(path, question, timeout_s=timeout_s, patience_s=patience_s, keys=keys)
    for _ in range(_MAX_MOVES):
        try:
            return attached, Segment.attach(attached.path, attached.nonce)
        except SegmentNotFoundError:
            previous = attached
            attached = attach_when_ready(path, question, timeout_s=timeout_s, patience_s=patience_s, keys=keys)
            if (attached.path, attached.nonce) == (previous.path, previous.nonce):
                raise
    return attached, Segment.attach(attached.path, attached.nonce)
