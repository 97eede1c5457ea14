"""The two locks on a segment's file: one that its owner holds, and one per attached process, by which they are counted.

Locks end with the open file description they were taken on, so SIGKILL leaves none behind and no heartbeat is needed. A
mapping keeps its description open: a process counts as attached until its last view is gone.

The owner's is a `flock`. It could not count readers: forked processes share one. The readers' are read locks of the
open file description (OFD), each on one byte far behind the end of the file that says who the reader is.

A daemon's lock file has a record lock instead, whose holder can be asked for: `holder_of`.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from typing import Final

__all__ = [
    "READERS",
    "AttachedProcess",
    "Holder",
    "attached_processes",
    "holder_of",
    "is_at",
    "lock_holder",
    "mark_attached",
    "take_owner_lock",
]

READERS: Final = 1 << 62
"""The byte of a reader is `READERS + (inode of its pid namespace << 22) + pid`; pids are below 2^22."""
_PID_BITS: Final = 22
_F_OFD_GETLK: Final = 36  # Linux; no Python has names for them
_F_OFD_SETLK: Final = 37
_LOOK_CPU_S: Final = 0.5
"""Many times what a thousand readers take. Whoever may read a segment may also take locks without end."""
_FLOCK: Final = struct.Struct("hhqqi4x")
"""The kernel's struct flock on 64-bit machines: type, whence, start, length (0: without end), pid."""


@dataclass(frozen=True, order=True)
class AttachedProcess:
    """A process that has a segment attached; `pid` counts in the pid namespace with the inode `pid_namespace`."""

    pid: int
    pid_namespace: int


def take_owner_lock(fd: int) -> bool:
    """Return True when this process now owns the segment, False when another one does.

    The lock lasts until the description of `fd` is closed everywhere, or `flock(LOCK_UN)`.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(fd: int, path: str) -> bool:
    """Return whether `path` still names the file of `fd`, rather than nothing or one made since."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def mark_attached(fd: int) -> None:
    """Count this process as attached for as long as the description of `fd`, its own, is open or mapped."""
    byte = READERS + (_own_pid_namespace() << _PID_BITS) + os.getpid()
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))


def attached_processes(fd: int) -> list[AttachedProcess]:
    """Return the processes that have the file of `fd` attached, sorted; not those counted on `fd`'s own description.

    A process of this pid namespace that has ended is left out: its lock may live on in the mapping that its forked
    children inherited, and these hold locks of their own. Of many thousands some are left out, so that it takes no
    longer than `_LOOK_CPU_S`.
    """
    found = []
    ranges = [(READERS, 1 << 63)]
    until_s = time.thread_time() + _LOOK_CPU_S
    while ranges and time.thread_time() < until_s:
        # The kernel names any lock of a range, so look again on both sides of each.
        start, stop = ranges.pop()
        lock = _conflicting_lock(fd, start, stop)
        if lock is not None:
            lock_start, lock_stop = lock
            ranges.extend(part for part in ((start, lock_start), (lock_stop, stop)) if part[0] < part[1])
            if lock_stop - lock_start == 1:  # anything else is not a reader's
                found.append(lock_start - READERS)
    processes = (AttachedProcess(byte & ((1 << _PID_BITS) - 1), byte >> _PID_BITS) for byte in found)
    here = _own_pid_namespace()
    return sorted(one for one in processes if one.pid_namespace != here or _is_alive(one.pid))


def _conflicting_lock(fd: int, start: int, stop: int) -> tuple[int, int] | None:
    """Return the range `[start, stop)` of some lock that a write lock on the given range would run into, or None."""
    length = 0 if stop == 1 << 63 else stop - start
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, lock_start, lock_length, _ = _FLOCK.unpack(fcntl.fcntl(fd, _F_OFD_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    return lock_start, lock_start + lock_length if lock_length else 1 << 63


def _own_pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock; pid 0 where it lives in a pid namespace that this process cannot see."""

    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid}" if self.pid else "in another pid namespace"


def lock_holder(fd: int) -> Holder | None:
    """Return which process holds a record lock on the file of `fd`, None where nobody does. Takes nothing."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else Holder(pid)


def holder_of(path: str) -> Holder | None:
    """Return which process holds the lock file at `path`, None where nobody does. Disturbs no start."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return lock_holder(fd)
    finally:
        os.close(fd)
