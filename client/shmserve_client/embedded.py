"""A dataset without a daemon of one's own: use the node's, or have exactly one process start one for this source.

Such a daemon has an endpoint named after the source: `e-<key>.<n>.sock`. The number `n` counts slots, because a daemon
whose files have changed since it loaded them keeps its slot until its last client has gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .connection import attach_when_ready
from .endpoint import default_directory, ensure_directory, find_endpoints, listening, lock_path, log_path, source_key
from .errors import (
    ConfigError,
    DaemonStartError,
    DaemonUnreachableError,
    DatasetFailedError,
    DatasetNotFoundError,
    ProtocolError,
    SegmentNotFoundError,
)
from .protocol import Attach
from .segment import Segment

__all__ = ["Served", "serve"]

_LEAST_LINGER_S: Final = 5.0
"""A new daemon lingers from the moment it is ready, and the process that started it has yet to attach."""
_PASSED_ON: Final = ("SHMSERVE_SHM_DIR", "SHMSERVE_LOG_LEVEL")
"""The settings that also hold for a daemon started here; the others speak of another daemon."""


@dataclass(frozen=True)
class Served:
    """A dataset that is served: its daemon, its name there, and its segment, which keeps that daemon from ending."""

    endpoint: str
    name: str
    segment: Segment


def serve(
    data: Sequence[str], dtype: str | None, vocab_size: int | None, *, linger_s: float, timeout_s: float
) -> Served:
    """Return the dataset of the source `data`, served by whichever daemon has it, or by a new one.

    Args:
        data: files, directories, globs or prefixes: the shards of one dataset.
        dtype: the items of files without a header.
        vocab_size: every token id must be below it.
        linger_s: how many seconds a new daemon stays without clients, five at least.
        timeout_s: how many seconds a daemon's answer may take; the loading may take as long as it needs.

    Raises:
        DaemonStartError: a new daemon could not start or load; the message holds its own.
        SegmentNotFoundError: the new daemon's segment is in another shm directory than this process sees.
    """
    if not data:
        raise ConfigError("no data: give at least one path")
    key = source_key(data, dtype, vocab_size)
    directory = default_directory()
    served = _find(key, directory, timeout_s)
    if served is not None:
        return served
    ensure_directory(directory)
    with _one_at_a_time(os.path.join(directory, f"e-{key[:16]}.start")):
        served = _find(key, directory, timeout_s)
        if served is not None:
            return served
        endpoint = _free_slot(key, directory)
        _start(endpoint, data, dtype, vocab_size, max(linger_s, _LEAST_LINGER_S))
        return _attach(endpoint, key, timeout_s)


def _find(key: str, directory: str, timeout_s: float) -> Served | None:
    """Return the dataset from the first daemon that serves the source as its files are now."""
    for endpoint in [*find_endpoints(), *_slots(key, directory)]:
        try:
            return _attach(endpoint, key, timeout_s)
        except (
            DaemonUnreachableError,  # it is ending, or hangs
            DatasetNotFoundError,  # it serves something else, or the files have changed
            DatasetFailedError,  # a daemon of our own will say why
            ProtocolError,  # it is of another version
            SegmentNotFoundError,  # it is ending, or is in another container
        ):
            continue
    return None


def _attach(endpoint: str, key: str, timeout_s: float) -> Served:
    question = Attach(source_key=key)
    attached = attach_when_ready(endpoint, question, timeout_s=timeout_s, patience_s=float("inf"))
    return Served(endpoint, attached.name, Segment.attach(attached.path, attached.nonce))


def _slot(key: str, directory: str, number: int) -> str:
    return os.path.join(directory, f"e-{key[:16]}.{number}.sock")


def _slots(key: str, directory: str) -> list[str]:
    """Return the sockets of the embedded daemons that there are for this source, the newest slot last."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = (re.fullmatch(rf"e-{key[:16]}\.(\d+)\.sock", name) for name in names)
    return [_slot(key, directory, number) for number in sorted(int(match[1]) for match in found if match)]


def _free_slot(key: str, directory: str) -> str:
    slots = (_slot(key, directory, number) for number in itertools.count())
    return next(slot for slot in slots if not listening(slot) and not _is_locked(lock_path(slot)))


def _is_locked(path: str) -> bool:
    """Return whether a daemon holds its lock file, as one does that has closed its socket and is about to end.

    The lock is taken for a moment: nobody else can want it, since starting a daemon of this source takes its turn.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _one_at_a_time(path: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs, and remove it afterwards."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink == 0:
                continue  # who held it before has removed this file: those who come now lock another one
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):  # a session's runtime directory is emptied at logout
                    os.unlink(path)
            return
        finally:
            os.close(fd)


def _start(endpoint: str, data: Sequence[str], dtype: str | None, vocab_size: int | None, linger_s: float) -> None:
    """Return when a new daemon at `endpoint` serves the data. Raises DaemonStartError with what it had to say."""
    command = [sys.executable, "-m", "shmserve", "start", "--detach", "--endpoint", f"ipc://{endpoint}"]
    command += ["--linger", str(linger_s)]
    for path in data:
        command += ["--data", f"{_dataset_name(data)}={os.path.abspath(path)}"]
    if dtype is not None:
        command += ["--dtype", dtype]
    if vocab_size is not None:
        command += ["--vocab-size", str(vocab_size)]
    # A file rather than a pipe: nothing that inherits it can keep this process waiting.
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env=_environment(),
            start_new_session=True,  # a Ctrl-C here is not for the daemon
            check=False,
        )
        messages.seek(0)
        lines = messages.read().splitlines()
    if done.returncode:
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
        reason = errors[-1] if errors else f"exit code {done.returncode}"
        log = log_path(endpoint)
        raise DaemonStartError(f"{reason} (log: {log})" if os.path.exists(log) else reason)


def _environment() -> dict[str, str]:
    """Return the environment without the settings of another daemon; modules come from no current directory."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE_") or name in _PASSED_ON
    }
    return {**inherited, "PYTHONSAFEPATH": "1"}


def _dataset_name(data: Sequence[str]) -> str:
    """Return the name under which a daemon of our own serves the data, as one dataset however many paths there are."""
    stem = os.path.basename(os.path.abspath(data[0])).partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "_", stem)[:64] or "data"
