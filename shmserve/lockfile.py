"""The lock that makes a daemon the only one at its endpoint. The lock decides, never the socket or a pid in a file.

It is a POSIX record lock: the kernel drops it when the process ends, however it ends, and tells who holds it without
taking it. It also goes when the process closes any descriptor of the file, so in the
daemon only this module opens it.
"""

from __future__ import annotations

import errno
import fcntl
import os

from shmserve_client.errors import AlreadyRunningError, EndpointError
from shmserve_client.locks import is_at, lock_holder

__all__ = ["LockFile"]


class LockFile:
    """The lock at `path`, held from construction to `release` or the end of the process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = _acquire(path)

    def release(self) -> None:
        """Remove the file and drop the lock. Idempotent."""
        if self._fd >= 0:
            if is_at(self._fd, self.path):
                os.unlink(self.path)  # while it is locked: a start that gets the lock later sees that it is not the one
            os.close(self._fd)
            self._fd = -1


def _acquire(path: str) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EndpointError(f"cannot open the lock file {path}: {error.strerror}") from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(fd, path):
                return fd
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                os.close(fd)
                raise EndpointError(f"cannot lock {path}: {error.strerror}") from error
            holder = lock_holder(fd)
            if holder is not None:
                os.close(fd)
                endpoint = path.removesuffix(".lock")
                raise AlreadyRunningError(
                    f"already running ({holder}) at {endpoint}: stop it first, or give another --endpoint"
                ) from error
        os.close(fd)  # its last holder removed the file, or has just let go of it: once more
