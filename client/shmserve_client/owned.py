"""The daemon's side of a published segment: it holds the owner's lock, and decides when the name goes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import OutOfSharedMemoryError, SegmentFormatError, SegmentNotFoundError
from .layout import DESCRIPTION_OFFSET, DTYPES, Array
from .locks import is_at, take_owner_lock
from .mapping import HUGE_PAGE_NBYTES, Mapping, map_locked, map_private
from .samples import Samples, open_samples
from .segment import map_segment, open_segment, read_prefix

__all__ = ["OwnedSegment", "adopt_segment", "set_readers"]

_MAX_OPENED: Final = 64
_SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class OwnedSegment:
    """A published segment whose owner's lock this process holds until `close`, or until it ends.

    `close` gives up the ownership and leaves the segment to be adopted. `unlink` removes its name; the memory goes with
    the last process that has it attached. The owner is not counted as attached.

    Attributes:
        fd: open for reading at least, until `close`.
        path: where it was published.
        header: validated.
        description: validated.
        huge_nbytes: how many of its bytes are on huge pages.
        huge_refusal: why some 2 MiB steps are not, what that costs and the remedy; empty when all are.
        generation: which version of the dataset it is.
    """

    _closed = True  # until the constructor has taken over the descriptor

    def __init__(self, fd: int, path: str, *, refusal_errno: int = 0) -> None:
        """Take over `fd`, which holds the owner's lock; `write_segment` and `adopt_segment` call this."""
        self.fd = fd
        self.path = path
        self.header, self.description = read_prefix(fd)
        self.generation = self.header.generation
        data_offset, total_nbytes = self.header.data_offset, self.header.total_nbytes
        touched = map_private(fd, total_nbytes)
        touched.bytes[data_offset::HUGE_PAGE_NBYTES].sum()  # only what was touched can be seen to be huge
        self.huge_nbytes = touched.huge_nbytes()
        # Another, or all would count as of this process; by its name, so that memory tools can tell what it is.
        self._mapping: Mapping | None = self._map(lambda fd, nbytes: map_segment(fd, self.header, self.description))
        can_be_huge = (total_nbytes - data_offset) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        self.huge_refusal = _huge_refusal(can_be_huge - self.huge_nbytes, refusal_errno)
        self._unlinked = False
        self._locked: Mapping | None = None
        self._samples: dict[tuple[str | None, int, int], Samples] = {}
        self._closed = False

    def _map(self, map_file: Callable[[int, int], Mapping]) -> Mapping:
        fd = open_segment(self.path)
        try:
            return map_file(fd, self.header.total_nbytes)
        finally:
            os.close(fd)

    def name_exists(self) -> bool:
        """Return whether the segment, until `close`, can still be found under its path."""
        return is_at(self.fd, self.path)

    def open_path(self) -> str:
        """Return where the segment can be opened until `close`: its path or, where somebody removed that, a descriptor.

        The descriptor is of use to processes of the same user and pid namespace.
        """
        return self.path if self.name_exists() else f"/proc/{os.getpid()}/fd/{self.fd}"

    def array(self, array: Array) -> NDArray[Any]:
        """Return `array` of the description: the owner's own view, until `close`, which does not count as attached."""
        return np.ndarray(
            array.shape, DTYPES[array.dtype], buffer=np.asarray(self._mapping), offset=self.header.position(array)
        )

    def samples(self, column: str | None, block_size: int, stride: int) -> Samples:
        """Return what `open_samples` does, from memory where it was asked for before; until `close`. Raises as it."""
        asked = (column, block_size, stride)
        samples = self._samples.get(asked)
        if samples is None:
            samples = open_samples(self.description, self.array, column=column, block_size=block_size, stride=stride)
            if len(self._samples) >= _MAX_OPENED:  # whoever asks for that many tries them all
                self._samples.clear()
            self._samples[asked] = samples
        return samples

    def lock_pages(self) -> None:
        """Keep the segment from being swapped until `close`.

        Raises:
            OutOfSharedMemoryError: this user may not lock so much memory.
        """
        head_nbytes = DESCRIPTION_OFFSET + self.header.description_nbytes
        data_offset, nbytes = self.header.data_offset, self.header.total_nbytes
        try:
            # What is between them is a hole, which locking would fill.
            ranges = ((0, head_nbytes), (data_offset, nbytes))
            self._locked = self._map(lambda fd, nbytes: map_locked(fd, nbytes, ranges=ranges))
        except OSError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OutOfSharedMemoryError(
                f"cannot lock the segment's {nbytes - data_offset} bytes in memory, the limit is {limit} bytes "
                f"({error.strerror}): raise it (ulimit -l; docker: --ulimit memlock=-1), or start without --lock"
            ) from error

    def unlink(self) -> None:
        """Remove the name, if it still is this segment's. Call before `close`, or never: then it may be another's."""
        if self._unlinked:
            return
        if self._closed:
            raise ValueError(f"{self.path} was closed: another process may own it now")
        if self.name_exists():
            os.unlink(self.path)
        self._unlinked = True

    def close(self) -> None:
        """Give up the ownership. The name, if it was not unlinked, stays for a later owner."""
        if self._closed:
            return
        self._closed = True
        self._locked = self._mapping = None
        self._samples.clear()
        fcntl.flock(self.fd, fcntl.LOCK_UN)  # a mapping made from fd would hold it on
        os.close(self.fd)

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"{self.path} was not closed", ResourceWarning, source=self, stacklevel=2)
            self.close()


def adopt_segment(path: str, *, gid: int | None = None) -> OwnedSegment | None:
    """Return the segment at `path` that an ended daemon left, now owned by this process; None if it has a live owner.

    Args:
        path: of a segment of this user.
        gid: a group that may read the segment from now on; None for this user alone.

    Raises:
        SegmentFormatError: not a segment that this version reads, or another user's.
        SegmentNotFoundError: it is gone.
    """
    fd = open_segment(path)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise SegmentFormatError(f"{path} belongs to the user {status.st_uid}, so it is not this user's segment")
        if not take_owner_lock(fd):
            os.close(fd)
            return None
        if os.fstat(fd).st_nlink == 0:  # its owner removed it before the lock came free
            raise SegmentNotFoundError(f"the segment at {path} is gone")
        read_prefix(fd)  # what is no segment is not given to anybody
        set_readers(fd, gid)
        return OwnedSegment(fd, path)
    except BaseException:
        os.close(fd)
        raise


def set_readers(fd: int, gid: int | None) -> None:
    """Let this user read the segment and, unless it is None, the group `gid`; nobody else, whoever could before."""
    if gid is not None:
        os.fchown(fd, -1, gid)
    os.fchmod(fd, 0o400 if gid is None else 0o440)


def _huge_refusal(small_nbytes: int, refusal_errno: int) -> str:
    if small_nbytes <= 0:
        return ""
    reason = f" (the kernel says: {os.strerror(refusal_errno)})" if refusal_errno else ""
    return (
        f"{small_nbytes >> 20} MiB of the segment are on 4 KiB pages{reason}, which cost each process 2 MiB of page "
        f"tables per GiB: {_huge_remedy(refusal_errno)}"
    )


def _huge_remedy(refusal_errno: int) -> str:
    if "THP_enabled:\t0" in Path("/proc/self/status").read_text("ascii", "replace"):
        return (
            "start the daemon where huge pages are not switched off for its process (by prctl's PR_SET_THP_DISABLE, "
            "which processes inherit)"
        )
    if refusal_errno == 0:  # adopted: whoever loaded it knew why
        return "run shmserve stop and start, which loads it again and tells the reason if there still is one"
    if refusal_errno != errno.EINVAL:
        return "free memory (echo 1 > /proc/sys/vm/compact_memory joins what is free) and load again"
    if _SHMEM_ENABLED.exists() and "[deny]" in _SHMEM_ENABLED.read_text("ascii"):
        return f"allow them (echo never > {_SHMEM_ENABLED} gives them only to those who ask) and load again"
    return "use Linux 6.1 or later, or mount the shm directory with huge=within_size"
