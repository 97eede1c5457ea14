"""What a person sees on stderr while datasets load: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

from shmserve_client.errors import printable

from .text import duration, percent, size

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Progress", "harmless", "open_progress", "settle"]

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES: Final = 5.0
_PAST: Final = {"read": "read", "writ": "written"}


@contextmanager
def harmless(stream: TextIO) -> Iterator[None]:
    """Run the block, which writes to `stream`: that nobody reads it, or a disk is full, must not end a daemon."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # nor will anybody read what follows
            _discard(stream)
        log.debug("could not write to %s: %s", stream.name, error)


def settle(stream: TextIO) -> None:
    """Write what `stream` still holds, or drop it: the interpreter's exit, which tries again, would fail over it."""
    try:
        stream.flush()
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(sink, stream.fileno())
    os.close(sink)


class Progress:
    """Lines on a stream. The loader calls it, from one thread at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = self._verb = ""
        self._started_s = self._said_s = 0.0

    def say(self, line: str) -> None:
        """Show one line."""
        with harmless(self._stream):
            self._stream.write(printable(line) + "\n")
            self._stream.flush()

    def start(self, name: str, total_nbytes: int, verb: str = "load") -> None:
        """Show that `total_nbytes` bytes of the dataset `name` are about to be loaded, or what else the verb says."""
        self._name, self._verb = name, verb
        self._started_s = self._said_s = time.monotonic()
        self.say(f"{name}: {verb}ing {size(total_nbytes)}")

    def advance(self, done_nbytes: int, total_nbytes: int) -> None:
        """Show that the first `done_nbytes` bytes are loaded; called as often as you like."""
        now_s = time.monotonic()
        if now_s - self._said_s >= _SECONDS_BETWEEN_LINES:
            self._said_s = now_s
            rate = done_nbytes / (now_s - self._started_s)
            left = f", {size(rate)}/s, {duration((total_nbytes - done_nbytes) / rate)} left" if rate else ""
            done = f"{size(done_nbytes)} of {size(total_nbytes)} ({percent(done_nbytes, total_nbytes)} %)"
            self.say(f"{self._name}: {_PAST.get(self._verb, self._verb + 'ed')} {done}{left}")

    def close(self) -> None:
        """Show no more progress; idempotent. `say` still works."""


class _Bar(Progress):
    """The same as a bar with bytes, rate and time left, which is gone after `close`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        # Only here: a daemon without a terminal does not carry rich in its memory.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._bar: TaskID | None = None

    def say(self, line: str) -> None:
        with harmless(self._stream):
            self._bars.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def start(self, name: str, total_nbytes: int, verb: str = "load") -> None:
        self._started_s = time.monotonic()
        with harmless(self._stream):
            self._bars.start()
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = self._bars.add_task(f"{name}: {verb}ing", total=total_nbytes, rate="")

    def advance(self, done_nbytes: int, total_nbytes: int) -> None:
        if self._bar is not None:
            rate = done_nbytes / max(time.monotonic() - self._started_s, 1e-9)
            self._bars.update(
                self._bar, completed=done_nbytes, total=total_nbytes, rate=f"{size(rate)}/s" if rate else ""
            )

    def close(self) -> None:
        with harmless(self._stream):
            self._bars.stop()


def open_progress(stream: TextIO) -> Progress:
    """Return what shows progress on `stream`: a bar where it is a terminal."""
    return _Bar(stream) if stream.isatty() else Progress(stream)
