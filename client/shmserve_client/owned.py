"""The daemon's side of a published segment: it holds the owner's lock, and decides when the name goes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import warnings

from .errors import OutOfSharedMemoryError, SegmentFormatError, SegmentNotFoundError
from .locks import take_owner_lock
from .mapping import HUGE_PAGE_NBYTES, Mapping, map_locked, map_private
from .segment import file_identity, open_segment, read_prefix

__all__ = ["OwnedSegment", "adopt_segment", "share_with_group"]


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
    """

    _closed = True  # until the constructor has taken over the descriptor

    def __init__(self, fd: int, path: str, *, huge_nbytes: int, refusal_errno: int = 0) -> None:
        """Take over `fd`, which holds the owner's lock; `write_segment` and `adopt_segment` call this."""
        self.fd = fd
        self.path = path
        self.header, self.description = read_prefix(fd)
        self.huge_nbytes = huge_nbytes
        can_be_huge = (self.header.total_nbytes - self.header.data_offset) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        self.huge_refusal = _huge_refusal(can_be_huge - huge_nbytes, refusal_errno)
        self._identity = file_identity(fd)
        self._unlinked = False
        self._locked: Mapping | None = None
        self._closed = False

    def name_exists(self) -> bool:
        """Return whether the segment can still be found under its path."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def lock_pages(self) -> None:
        """Keep the segment from being swapped until `close`.

        Raises:
            OutOfSharedMemoryError: this user may not lock so much memory.
        """
        nbytes = self.header.total_nbytes
        try:
            self._locked = map_locked(self.fd, nbytes)
        except OSError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OutOfSharedMemoryError(
                f"cannot lock the segment's {nbytes} bytes in memory, the limit is {limit} bytes ({error.strerror}): "
                "raise it (ulimit -l; docker: --ulimit memlock=-1), or start without --lock"
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
        self._locked = None
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
        gid: a group that may read the segment from now on.

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
        header, _ = read_prefix(fd)
        if gid is not None:
            share_with_group(fd, gid)
        mapping = map_private(fd, header.total_nbytes)
        mapping.bytes[header.data_offset :: HUGE_PAGE_NBYTES].sum()  # only what was touched can be seen to be huge
        return OwnedSegment(fd, path, huge_nbytes=mapping.huge_nbytes())
    except BaseException:
        os.close(fd)
        raise


def share_with_group(fd: int, gid: int) -> None:
    """Let the group read the segment."""
    os.fchown(fd, -1, gid)
    os.fchmod(fd, 0o440)


def _huge_refusal(small_nbytes: int, refusal_errno: int) -> str:
    if small_nbytes <= 0:
        return ""
    if refusal_errno in (0, errno.EINVAL):
        remedy = "use Linux 6.1 or later, or mount the shm directory with huge=within_size"
    else:
        remedy = "free memory (echo 1 > /proc/sys/vm/compact_memory joins what is free) and load again"
    reason = f" (the kernel says: {os.strerror(refusal_errno)})" if refusal_errno else ""
    return (
        f"{small_nbytes >> 20} MiB of the segment are on 4 KiB pages{reason}, which cost each process 2 MiB of page "
        f"tables per GiB: {remedy}"
    )
