"""A dataset without a daemon of one's own: use the node's, or have exactly one process start one for this source.

Such a daemon has an endpoint named after the source, which is its files as they are now, however they were asked for:
`e-<key>.<n>.sock`. The number `n` counts slots, because one that is ending, hangs or checked another vocabulary keeps
its slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from .attaching import attach_served
from .endpoint import default_directory, ensure_directory, find_endpoints, listening, lock_path, log_path, refusal
from .errors import (
    ConfigError,
    DaemonStartError,
    DaemonUnreachableError,
    DatasetNotFoundError,
    EndpointError,
    OutOfSharedMemoryError,
    SegmentFormatError,
    SegmentNotFoundError,
    ShmserveError,
)
from .locks import holder_of
from .owned import adopt_segment
from .protocol import Attach, Failure, error_from
from .segment import Segment
from .urls import absolute

__all__ = ["Served", "remove_orphan", "serve", "serve_built"]

log = logging.getLogger(__name__)

_LEAST_LINGER_S: Final = 5.0
"""A new daemon lingers from the moment it is ready, and the process that started it has yet to attach."""
_OTHERS_TIMEOUT_S: Final = 5.0
"""A daemon that this user's clients share may have nothing to do with the source: one that hangs is passed over."""
_PASSED_ON: Final = ("SHMSERVE_SHM_DIR", "SHMSERVE_LOG_LEVEL")
"""The settings that also hold for a daemon started here; the others speak of another daemon."""

_Mark: TypeAlias = tuple[int, int, int]


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
        vocab_size: every token id must be below it; None accepts what was checked against any.
        linger_s: how many seconds a new daemon stays without clients, five at least.
        timeout_s: how many seconds a daemon's answer may take; the loading may take as long as it needs.

    Raises:
        SourceNotFoundError: a file is missing.
        SourceFormatError: a file is of no known format, or the files are not shards of one corpus.
        ConfigError: an option is out of its range.
        DaemonStartError: a new daemon could not start or load; the message holds its own.
        DaemonUnreachableError: the new daemon does not answer in time.
        EndpointError: there is no directory for its socket that is this user's alone.
        SegmentNotFoundError: the new daemon's segment is in another shm directory than this process sees.
    """
    if not data:
        raise ConfigError("no data: give at least one path")
    key = _key(data, dtype, vocab_size)
    question = Attach(source_key=key, vocab_size=vocab_size)
    directory = default_directory()
    silent: set[_Mark] = set()
    served = _find(find_endpoints(), question, min(timeout_s, _OTHERS_TIMEOUT_S), silent) or _find(
        _slots(key, directory), question, timeout_s, silent
    )
    if served is not None:
        return served
    ensure_directory(directory)
    with _one_at_a_time(os.path.join(directory, f"e-{key[:16]}.start")) as turn:
        # Only a slot can be new. One that hung is not asked again: here, that would add up over all who wait.
        served = _find(_slots(key, directory), question, timeout_s, silent)
        if served is not None:
            return served
        endpoint = _free_slot(key, directory)
        dataset = ["--data", *map(absolute, data)]
        if dtype is not None:
            dataset += ["--dtype", dtype]
        if vocab_size is not None:
            dataset += ["--vocab-size", str(vocab_size)]
        _start(turn, endpoint, dataset, max(linger_s, _LEAST_LINGER_S))
        try:
            return _attach(endpoint, question, timeout_s)
        except DatasetNotFoundError:
            raise DaemonStartError(f"{', '.join(data)}: changed meanwhile, start again when complete") from None


def serve_built(
    key: str,
    name: str,
    build: Callable[[], contextlib.AbstractContextManager[str]],
    *,
    linger_s: float,
    timeout_s: float,
) -> Served:
    """Return the dataset of that key, served by the daemon that has it, or by a new one that takes over what is built.

    Args:
        key: tells it from all others, in 16 hex digits or more.
        name: what it is called.
        build: gives the path of a segment that nobody owns, until it is taken over; called where no daemon has it.
        linger_s: how many seconds a new daemon stays without clients, five at least.
        timeout_s: how many seconds a daemon's answer may take; building may take as long as it needs.

    Raises:
        DaemonStartError: a new daemon could not start; the message holds its own.
        DaemonUnreachableError: the new daemon does not answer in time.
        EndpointError: there is no directory for its socket that is this user's alone.
        SegmentNotFoundError: the daemon's segment is in another shm directory than this process sees.
        ShmserveError: as `build`.
    """
    directory = default_directory()
    silent: set[_Mark] = set()
    question = Attach(name)
    served = _find(_slots(key, directory), question, timeout_s, silent)
    if served is not None:
        return served
    ensure_directory(directory)
    with _one_at_a_time(os.path.join(directory, f"e-{key[:16]}.start")) as turn:
        served = _find(_slots(key, directory), question, timeout_s, silent)
        if served is not None:
            return served
        endpoint = _free_slot(key, directory)
        with build() as path:
            _start(turn, endpoint, ["--data", f"{name}={path}", "--adopt"], max(linger_s, _LEAST_LINGER_S))
            return _attach(endpoint, question, timeout_s)


def remove_orphan(path: str) -> None:
    """Remove the segment at `path` if nobody owns it."""
    with contextlib.suppress(SegmentNotFoundError, SegmentFormatError):
        segment = adopt_segment(path)
        if segment is not None:
            segment.unlink()
            segment.close()


def _key(data: Sequence[str], dtype: str | None, vocab_size: int | None) -> str:
    """Return the key of the source as its files are now. Raises the error that it has."""
    # A program of the daemon's side, which knows the formats. It reads no more than the files' heads.
    done = subprocess.run(
        [sys.executable, "-m", "shmserve.sources"],
        input=json.dumps({"data": list(data), "dtype": dtype, "vocab_size": vocab_size}),
        capture_output=True,
        text=True,
        errors="replace",
        env=_environment(),
        check=False,
    )
    if done.returncode:
        raise DaemonStartError(f"cannot tell what {', '.join(data)} is: {_last_line(done.stderr, done.returncode)}")
    answer = json.loads(done.stdout)
    if "key" not in answer:
        raise error_from(Failure(answer["code"], answer["message"]))
    key: str = answer["key"]
    return key


def _find(endpoints: Iterable[str], question: Attach, timeout_s: float, silent: set[_Mark]) -> Served | None:
    """Return the dataset from the first daemon that has it; those that hang go into `silent`, and are not asked."""
    for endpoint in endpoints:
        mark, started_s = _mark(endpoint), time.monotonic()
        if mark is None or mark in silent:
            continue
        try:
            return _attach(endpoint, question, timeout_s)
        except DaemonUnreachableError:  # it is ending, or hangs
            if time.monotonic() - started_s >= timeout_s:
                silent.add(mark)
        except OutOfSharedMemoryError:  # this process's own limit, which no other daemon can help
            raise
        except ShmserveError as error:  # it serves other files, could not load these, is of another version, ending ...
            log.debug("not served by the daemon at %s: %s", endpoint, error)
    return None


def _mark(endpoint: str) -> _Mark | None:
    """Return what tells this socket from an earlier or later one at its path; None if there is none."""
    try:
        status = os.lstat(endpoint)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _attach(endpoint: str, question: Attach, timeout_s: float) -> Served:
    attached, segment = attach_served(endpoint, question, timeout_s=timeout_s, patience_s=float("inf"))
    return Served(endpoint, attached.name, segment)


def _slot(key: str, directory: str, number: int) -> str:
    return os.path.join(directory, f"e-{key[:16]}.{number}.sock")


def _slots(key: str, directory: str) -> list[str]:
    """Return the sockets of the embedded daemons that there are for this source; only where nobody else makes any."""
    if refusal(directory):
        return []
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), f"e-{key[:16]}.*.sock")))
    return [path for path in paths if path.removesuffix(".sock").rpartition(".")[2].isdecimal()]


def _free_slot(key: str, directory: str) -> str:
    """Return a slot without a daemon, also without one that has closed its socket and is about to end."""
    slots = (_slot(key, directory, number) for number in itertools.count())
    return next(slot for slot in slots if not listening(slot) and holder_of(lock_path(slot)) is None)


@contextlib.contextmanager
def _one_at_a_time(path: str) -> Iterator[int]:
    """Hold the lock file `path` while the block runs, and remove it afterwards; gives the descriptor that holds it."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EndpointError(f"cannot open the lock file {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink == 0:
                continue  # who held it before has removed this file: those who come now lock another one
            try:
                yield fd
            finally:
                with contextlib.suppress(FileNotFoundError):  # a session's runtime directory is emptied at logout
                    os.unlink(path)
            return
        finally:
            os.close(fd)


def _start(turn: int, endpoint: str, dataset: Sequence[str], linger_s: float) -> None:
    """Return when a new daemon at `endpoint` serves what the arguments `dataset` say.

    Raises DaemonStartError with what it had to say.

    `turn` is the lock that says whose turn it is to start one: it lasts until this start is over, even when this
    process is killed.
    """
    command = [sys.executable, "-m", "shmserve", "start", "--detach", "--endpoint", f"ipc://{endpoint}"]
    if linger_s < math.inf:
        command += ["--linger", str(linger_s)]
    command += dataset
    # A file rather than a pipe: nothing that inherits it can keep this process waiting.
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env=_environment(),
            start_new_session=True,  # a Ctrl-C here is not for the daemon
            pass_fds=(turn,),
            check=False,
        )
        messages.seek(0)
        said = messages.read()
    if done.returncode:
        reason = _last_line(said, done.returncode)
        path = log_path(endpoint)
        raise DaemonStartError(f"{reason} (log: {path})" if os.path.exists(path) else reason)


def _last_line(said: str, exit_code: int) -> str:
    lines = said.splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
    return errors[-1] if errors else f"exit code {exit_code}"


def _environment() -> dict[str, str]:
    """Return the environment without the settings of another daemon; modules come from no current directory."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE_") or name in _PASSED_ON
    }
    return {**inherited, "PYTHONSAFEPATH": "1"}
