"""What lies in the directories of this user's endpoints: daemons that clients started for themselves, and old logs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from shmserve_client.endpoint import default_directories, listening, lock_path, log_path

from .lockfile import holder_of

__all__ = ["embedded_endpoints", "remove_old_logs"]


def embedded_endpoints() -> list[str]:
    """Return the sockets of the daemons that `from_path` started for this user's processes; only those that listen."""
    return [path for path in _files("e-", ".sock") if listening(path)]


def remove_old_logs(*, dry_run: bool = False) -> list[str]:
    """Remove the logs of detached daemons that have ended, and return their paths; with `dry_run` only return them."""
    paths = [
        path for path in _files("", log_path(".sock")) if holder_of(lock_path(path.removesuffix(log_path("")))) is None
    ]
    for path in paths:
        if not dry_run:
            os.unlink(path)
    return paths


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
