"""What lies in the directories of this user's endpoints: daemons that clients started for themselves, and old logs."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shmserve_client.endpoint import default_directories, listening, log_path

__all__ = ["embedded_endpoints", "is_in_use", "remove_unused_files"]


def embedded_endpoints() -> list[str]:
    """Return the sockets of the daemons that `from_path` started for this user's processes; only those that listen."""
    return [path for path in _files("e-", ".sock") if listening(path)]


def remove_unused_files(*, dry_run: bool = False) -> list[str]:
    """Remove the logs of daemons that have ended and the locks of killed starters, and return their paths.

    With `dry_run` nothing is removed.
    """
    paths = [path for path in (*_files("", log_path(".sock")), *_files("e-", ".start")) if not is_in_use(path)]
    for path in paths:
        if not dry_run:
            Path(path).unlink(missing_ok=True)  # another collection may be at it, too
    return paths


def is_in_use(path: str) -> bool:
    """Return whether somebody holds the lock of `path`: a daemon that of its log, a starter that of its turn."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return False
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


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
