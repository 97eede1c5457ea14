"""Reading a segment: attach once per process, view its arrays, be counted for as long as a view lives."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import warnings
import weakref
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import SegmentFormatError, SegmentNotFoundError, SourceFormatError, SourceNotFoundError
from .layout import (
    DESCRIPTION_OFFSET,
    DTYPES,
    HEADER,
    Array,
    Description,
    Header,
    MappedFile,
    decode_description,
    decode_header,
)
from .locks import mark_attached
from .mapping import Mapping, map_private

__all__ = ["Segment", "map_segment", "open_mapped_file", "open_segment", "read_prefix", "segment_filename"]

_MAX_SLUG: Final = 64
_DESCRIPTOR: Final = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_OWNER: Final = re.compile(r"shmserve-([0-9]+)-")


def segment_filename(name: str, nonce: bytes) -> str:
    """Return the file name of this user's segment for the dataset `name`."""
    slug = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name[:_MAX_SLUG])
    return f"shmserve-{os.geteuid()}-{slug}-{nonce.hex()[:8]}"


def _open_regular(path: str, flags: int = 0) -> int:
    """Return a read-only descriptor of the regular file at `path`. Raises SegmentFormatError for any other, OSError."""
    # Found first and opened then: to open a device, or a FIFO, may do something.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise SegmentFormatError(f"{path} is not a regular file, so not a segment")
        # O_NONBLOCK: its owner may hold a lease on it, which would have to end first.
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(found)


def open_segment(path: str) -> int:
    """Return a read-only descriptor of the regular file at `path`; links and everything else are refused.

    The one exception is a descriptor of a daemon, `/proc/PID/fd/N`, by which it hands out a segment without a name.

    Raises:
        SegmentFormatError: no regular file.
        SegmentNotFoundError: nothing there, or not for this user.
    """
    try:
        return _open_regular(path, 0 if _DESCRIPTOR.fullmatch(path) else os.O_NOFOLLOW)
    except SegmentFormatError:
        raise
    except FileNotFoundError as error:
        raise SegmentNotFoundError(
            f"no segment at {path}: its daemon has ended, or this process has another shm directory than the daemon "
            "(containers: share it with --ipc or a common volume)"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: the path holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise SegmentNotFoundError(f"cannot open the segment at {path!r}: {reason}") from error


def read_prefix(fd: int) -> tuple[Header, Description]:
    """Return the validated header and description of an open segment, whose arrays are neither mapped nor read.

    Raises:
        SegmentFormatError: not a segment, damaged, or of another layout version.
    """
    try:
        header = decode_header(os.pread(fd, HEADER.size, 0), os.fstat(fd).st_size)
        return header, decode_description(os.pread(fd, header.description_nbytes, DESCRIPTION_OFFSET), header)
    except OSError as error:
        raise SegmentFormatError(f"not a segment: it cannot be read: {error.strerror}") from error


def map_segment(fd: int, header: Header, description: Description) -> Mapping:
    """Return a private mapping of the segment and, behind it, of the files in which values stay.

    Raises:
        OutOfSharedMemoryError: the address space of this process is limited and too small.
        SourceFormatError: one of the files is not the one any more that the segment was made with.
        SourceNotFoundError: one of them is not there, or not for this user.
    """
    with ExitStack() as stack:
        behind = []
        for file in description.files:
            opened = open_mapped_file(file)
            stack.callback(os.close, opened)
            behind.append((opened, file.nbytes))
        return map_private(fd, header.total_nbytes, behind)


def open_mapped_file(file: MappedFile) -> int:
    """Return a read-only descriptor of the file, which is as it was. Raises as `map_segment`."""
    try:
        fd = _open_regular(file.path)
    except (OSError, SegmentFormatError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a regular file any more"
        raise SourceNotFoundError(
            f"cannot map {file.path}, where the values of the dataset are (--mode map): {reason} (containers: mount it "
            "under the same path)"
        ) from error
    status = os.fstat(fd)
    if (status.st_size, status.st_mtime_ns, status.st_ino) != (file.nbytes, file.mtime_ns, file.inode):
        os.close(fd)
        raise SourceFormatError(
            f"{file.path} has changed since it was served where it is (--mode map): `shmserve reload` serves it as it "
            "is now; never change a file that is mapped"
        )
    return fd


def _identity(fd: int) -> tuple[int, int]:
    """Return what tells the open file from all others: its device and inode."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_owned_as_named(fd: int, path: str) -> bool:
    """Return whether the file belongs to the user in its name, or to this one, whose number containers may differ on.

    Whoever may read a segment knows its nonce, and could put a file of their own under a name that its daemon removed.
    """
    named = _OWNER.match(os.path.basename(path))
    return named is None or os.fstat(fd).st_uid in (int(named[1]), os.geteuid())


class Segment:
    """A segment that this process has attached: one object per path and nonce, however many ask for it.

    It stays mapped, and this process counted, until the last view of its arrays is gone.
    """

    def __init__(self, path: str, nonce: bytes) -> None:
        """Use `attach`: a second object for the same segment would count and map it twice."""
        fd = open_segment(path)
        weakref.finalize(self, os.close, fd).atexit = False  # at exit others may still read views
        self.path = path
        self._fd = fd  # kept for forked children, which open the file again through it
        self._identity = _identity(fd)
        self.header, self.description = read_prefix(fd)
        if self.header.nonce != nonce or not _is_owned_as_named(fd, path):
            raise SegmentNotFoundError(
                f"the segment at {path} is another one than the daemon's: this process has another shm directory than "
                "the daemon (containers: share it with --ipc or a common volume), or the dataset was loaded anew"
            )
        self._mapping = map_segment(fd, self.header, self.description)
        mark_attached(fd)

    @classmethod
    def attach(cls, path: str, nonce: bytes) -> Segment:
        """Return the segment at `path`, mapped but not read: the time it takes does not depend on the size.

        Raises:
            OutOfSharedMemoryError: the address space of this process is limited and too small.
            SegmentFormatError: what is there is not a segment that this version reads.
            SegmentNotFoundError: it is gone, or this process sees another shm directory than the daemon.
            SourceFormatError: a file in which values stay has changed.
            SourceNotFoundError: such a file is not there.
        """
        with _attaching:
            segment = _attached.get((path, nonce))
            if segment is not None:
                return segment
            try:
                segment = _attached[path, nonce] = cls(path, nonce)
            except (SegmentFormatError, SegmentNotFoundError) as error:
                if not _DESCRIPTOR.fullmatch(path):
                    raise
                raise SegmentNotFoundError(
                    f"the segment's name was removed from under its daemon, and {path} leads there only for processes "
                    "of the same user and pid namespace, while the daemon runs: `shmserve reload` makes a new name"
                ) from error
            return segment

    @property
    def writable(self) -> bool:
        """True where views can be written to, in private; False where the kernel allows reading only."""
        return self._mapping.writable

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._mapping.__array_interface__

    def array(self, array: Array) -> NDArray[Any]:
        """Return `array` of the description: a view, zero-copy, which keeps the segment attached while it lives."""
        # numpy takes this object as the owner of the view's memory, and so keeps it alive.
        offset = self.header.position(array)
        return np.ndarray(array.shape, DTYPES[array.dtype], buffer=np.asarray(self), offset=offset)

    def _count_forked_child(self) -> None:
        """Take a lock of this process's own: the inherited description has the parent's, and shares its life."""
        if _identity(self._fd) != self._identity:
            raise OSError(errno.EBADF, "its descriptor was closed by other code")
        own = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.dup2(own, self._fd, inheritable=False)
        finally:
            os.close(own)
        mark_attached(self._fd)


_attached: weakref.WeakValueDictionary[tuple[str, bytes], Segment] = weakref.WeakValueDictionary()
_attaching = threading.Lock()


def _after_fork_in_child() -> None:
    global _attaching
    _attaching = threading.Lock()  # another thread of the parent may have held it
    for segment in list(_attached.values()):
        try:
            segment._count_forked_child()
        except OSError as error:  # reading works all the same
            warnings.warn(
                f"process {os.getpid()} is not counted as attached to {segment.path}: {error}; "
                "the daemon may remove the segment's name while it is in use",
                RuntimeWarning,
                stacklevel=1,
            )


os.register_at_fork(after_in_child=_after_fork_in_child)
