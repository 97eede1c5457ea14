"""Starts a daemon that outlives its starter: a session of its own, a log file, and a pipe that says how it went."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence

from shmserve_client.endpoint import ensure_directory, log_path
from shmserve_client.errors import DaemonStartError
from shmserve_client.locks import is_at

__all__ = ["start_detached"]

_READY = "ready"
_ERROR = "error: "


def start_detached(args: Sequence[str], endpoint: str) -> None:
    """Return when the daemon that `shmserve *args` makes serves everything; it logs beside `endpoint`.

    Args:
        args: The command line of a start in the foreground, without the command's name.
        endpoint: Where that daemon will listen.

    Raises:
        DaemonStartError: it could not start; the message is its own, where it got to say one.
    """
    ensure_directory(os.path.dirname(endpoint))
    log = log_path(endpoint)
    receiver, sender = os.pipe()
    with open(receiver, encoding="utf-8", errors="replace") as announcement:
        try:
            log_fd = _open_log(log)
            try:
                daemon = subprocess.Popen(
                    [sys.executable, "-P", "-m", "shmserve", *args, "--ready-fd", str(sender)],
                    stdin=subprocess.DEVNULL,
                    stdout=log_fd,
                    stderr=log_fd,
                    pass_fds=(sender,),
                    start_new_session=True,
                )
            finally:
                os.close(log_fd)
        finally:
            os.close(sender)
        try:
            said = announcement.readline().rstrip("\n")
        except BaseException:  # Ctrl-C: whoever gives up waiting gives up the daemon
            daemon.terminate()
            raise
    if said == _READY:
        daemon.returncode = 0  # it runs on: that its Popen goes is not to be warned of
        return
    daemon.wait()
    if said.startswith(_ERROR):
        raise DaemonStartError(said.removeprefix(_ERROR))
    raise DaemonStartError(f"the daemon ended with exit code {daemon.returncode} before it was ready: see {log}")


def _open_log(path: str) -> int:
    """Return the log, opened and locked: the daemon keeps the lock, by which its log is known to be in use."""
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise DaemonStartError(f"cannot open the log {path}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        if is_at(fd, path):
            return fd
        os.close(fd)  # it was removed meanwhile, as an unused one
