"""Segments whose daemon is gone: found by the owner's lock, which ended with it; adopted when they fit, else removed.

A segment that a live daemon owns is never touched, whoever's it is and whatever became of pids: only the lock counts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from shmserve_client.errors import (
    ConfigError,
    SegmentFormatError,
    SegmentNotFoundError,
    ShmserveError,
    SourceFormatError,
    SourceNotFoundError,
)
from shmserve_client.layout import Description, Header
from shmserve_client.locks import AttachedProcess, attached_processes, is_at, take_owner_lock
from shmserve_client.owned import OwnedSegment, adopt_segment
from shmserve_client.segment import open_segment, read_prefix

__all__ = ["Collected", "Leftover", "adopt", "collect"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
"""For how long at most a collection, or its dry run, holds the lock of a segment that it looks at."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A segment of a daemon that is gone, and the memory it takes."""

    path: str
    nbytes: int
    attached: tuple[AttachedProcess, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed, and what it kept because processes still read it."""

    removed: tuple[Leftover, ...]
    kept: tuple[Leftover, ...]


def _segment_paths(shm_dir: str) -> list[str]:
    """Return the paths in `shm_dir` that this user's daemons may have left, by their names alone."""
    prefix = f"shmserve-{os.geteuid()}-"
    try:
        names = sorted(os.listdir(shm_dir))
    except OSError as error:
        raise ConfigError(
            f"cannot read the shm directory {shm_dir}: {error.strerror}: choose another with --shm-dir"
        ) from error
    return [os.path.join(shm_dir, name) for name in names if name.startswith(prefix)]


def adopt(name: str, fingerprint: str, shm_dir: str, *, gid: int | None = None) -> OwnedSegment | None:
    """Return the segment of `name` that an ended daemon loaded from the very same files, now owned by this process.

    None where there is no such segment; of several generations it is the last. With `gid`, that group may read the
    segment from now on.
    """
    fitting: list[tuple[int, str]] = []
    for path in _segment_paths(shm_dir):
        try:
            header, description = _prefix_of(path)
        except (SegmentFormatError, SegmentNotFoundError) as error:
            log.debug("%s cannot be adopted: %s", path, error)
            continue
        if description.name == name and description.source.fingerprint == fingerprint:
            fitting.append((header.generation, path))
    for _, path in sorted(fitting, reverse=True):
        try:
            deadline_s = time.monotonic() + _LOOK_S
            while (segment := adopt_segment(path, gid=gid)) is None and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S / 10)
            if segment is not None:
                return segment
        except (SegmentFormatError, SegmentNotFoundError, SourceFormatError, SourceNotFoundError) as error:
            log.debug("%s cannot be adopted: %s", path, error)
    return None


def _prefix_of(path: str) -> tuple[Header, Description]:
    fd = open_segment(path)
    try:
        if (uid := os.fstat(fd).st_uid) != os.geteuid():  # anybody can make files of such names, any number of them
            raise SegmentNotFoundError(f"{path} belongs to the user {uid}")
        return read_prefix(fd)
    finally:
        os.close(fd)


def collect(shm_dir: str, *, dry_run: bool = False) -> Collected:
    """Remove this user's segments that nobody owns or reads, damaged ones and those of other versions included.

    Args:
        shm_dir: The directory of the segments.
        dry_run: Report the same, but remove nothing.
    """
    removed: list[Leftover] = []
    kept: list[Leftover] = []
    for path in _segment_paths(shm_dir):
        with _orphan(path) as fd:
            if fd is None:
                continue
            leftover = Leftover(path, os.fstat(fd).st_blocks * 512, tuple(attached_processes(fd)))
            (kept if leftover.attached else removed).append(leftover)
            if not leftover.attached and not dry_run:
                os.unlink(path)
                log.info("removed the orphaned segment %s (%d bytes)", path, leftover.nbytes)
    return Collected(tuple(removed), tuple(kept))


@contextmanager
def _orphan(path: str) -> Iterator[int | None]:
    """Open the file at `path` and hold its owner's lock; None where it is not this user's or somebody owns it."""
    try:
        fd = open_segment(path)
    except ShmserveError as error:
        log.debug("%s is left alone: %s", path, error)
        yield None
        return
    try:
        yield fd if os.fstat(fd).st_uid == os.geteuid() and take_owner_lock(fd) and is_at(fd, path) else None
    finally:
        os.close(fd)
