"""What lies in the directories of this user's endpoints: daemons that clients started for themselves, and leftovers."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shmserve_client.endpoint import default_directories, listening, log_path
from shmserve_client.locks import is_at, take_owner_lock

__all__ = ["embedded_endpoints", "is_in_use", "remove_unused_files"]


def embedded_endpoints() -> list[str]:
    """Return the sockets of the daemons that `from_path` started for this user's processes; only those that listen."""
    return [path for path in _files("e-", ".sock") if listening(path)]


def remove_unused_files(*, dry_run: bool = False) -> list[str]:
    """Remove the logs of daemons that have ended and the locks of killed starters, and return their paths.

    With `dry_run` nothing is removed.
    """
    unused = []
    for path in (*_files("", log_path(".sock")), *_files("e-", ".start")):
        with _lock(path) as is_free:
            if is_free:
                unused.append(path)
                if not dry_run:
                    os.unlink(path)
    return unused


def is_in_use(path: str) -> bool:
    """Return whether somebody holds the lock of `path`: a daemon that of its log, a starter that of its turn."""
    with _lock(path) as is_free:
        return is_free is False


@contextmanager
def _lock(path: str) -> Iterator[bool | None]:
    """Hold the lock of the file at `path`: True. False where somebody else does, None where there is no file of ours.

    Who waits for it meanwhile sees afterwards whether the file was removed, and then makes a new one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EACCES):
            raise
        yield None
        return
    try:
        yield take_owner_lock(fd) and (is_at(fd, path) or None)
    finally:
        os.close(fd)


def _files(prefix: str, suffix: str) -> Iterator[str]:
    """Yield the paths of this user's files of such names; a directory in /tmp may be anybody's."""
    for directory in default_directories():
        try:
            if os.lstat(directory).st_uid != os.geteuid():
                continue
            names = sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield from (
            os.path.join(directory, name) for name in names if name.startswith(prefix) and name.endswith(suffix)
        )
