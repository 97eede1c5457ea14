"""What a person sees on stderr while datasets load: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TextIO

from .text import duration, percent, size

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Progress", "open_progress"]

_SECONDS_BETWEEN_LINES: Final = 5.0


class Progress:
    """Lines on a stream. The loader calls it, from one thread at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = ""
        self._started_s = self._said_s = 0.0

    def say(self, line: str) -> None:
        """Show one line."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def start(self, name: str, total_nbytes: int) -> None:
        """Show that `total_nbytes` bytes of the dataset `name` are about to be loaded."""
        self._name = name
        self._started_s = self._said_s = time.monotonic()
        self.say(f"{name}: loading {size(total_nbytes)}")

    def advance(self, done_nbytes: int, total_nbytes: int) -> None:
        """Show that the first `done_nbytes` bytes are loaded; called as often as you like."""
        now_s = time.monotonic()
        if now_s - self._said_s >= _SECONDS_BETWEEN_LINES:
            self._said_s = now_s
            rate = done_nbytes / (now_s - self._started_s)
            left = f", {duration((total_nbytes - done_nbytes) / rate)} left" if rate else ""
            done = f"{size(done_nbytes)} of {size(total_nbytes)} ({percent(done_nbytes, total_nbytes)} %)"
            self.say(f"{self._name}: loaded {done}, {size(rate)}/s{left}")

    def close(self) -> None:
        """Show no more progress; idempotent. `say` still works."""


class _Bar(Progress):
    """The same as a bar with bytes, rate and time left, which is gone after `close`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        # Only here: a daemon without a terminal does not carry rich in its memory.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._bar: TaskID | None = None

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self, name: str, total_nbytes: int) -> None:
        self._bars.start()
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = self._bars.add_task(name, total=total_nbytes)

    def advance(self, done_nbytes: int, total_nbytes: int) -> None:
        if self._bar is not None:
            self._bars.update(self._bar, completed=done_nbytes, total=total_nbytes)

    def close(self) -> None:
        self._bars.stop()


def open_progress(stream: TextIO) -> Progress:
    """Return what shows progress on `stream`: a bar where it is a terminal."""
    return _Bar(stream) if stream.isatty() else Progress(stream)
