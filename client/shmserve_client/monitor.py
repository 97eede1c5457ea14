"""`MemoryMonitor`: the memory of the node and of a tree of processes over time, as CSV."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from io import FileIO
from types import TracebackType
from typing import Final, Self

import psutil

from .errors import ConfigError
from .memory import measure

__all__ = [
    "COLUMNS",
    "MemoryMonitor",
    "MemorySampler",
    "check_interval",
    "is_running",
    "process_tree",
    "running_process",
]

COLUMNS: Final = (
    *("index", "mem_percent", "mem_free", "mem_available", "mem_used"),
    *("shm", "uss", "page_tables", "processes", "seconds"),
)
"""Sizes are in bytes. The first five columns are those that users of fastai logged and plotted."""
_LEAST_INTERVAL_S: Final = 0.1
"""In less, the thread would take 1 % of the time for waking up alone."""
_DAY_S: Final = 86_400.0
_SHARE: Final = 0.004
"""What the node's figures may take of a training loop's time; the processes' may take as much: together under 1 %."""
_FIRST_LOOK_S: Final = 0.02
"""What the first look at the processes is taken to cost: it has to be earned as well, in five seconds."""
_clock = time.perf_counter


def check_interval(interval_s: float, least_s: float) -> None:
    """Make sure that an interval is from `least_s` seconds to a day. Raises ConfigError for others, NaN included."""
    if not least_s <= interval_s <= _DAY_S:
        raise ConfigError(f"an interval of {interval_s} seconds: give a number from {least_s:g} to {_DAY_S:g}")


def running_process(pid: int) -> psutil.Process:
    """Return the process as it is now, so that a later one of the same number is not taken for it.

    Raises:
        ConfigError: there is none, or it has ended and only waits for its parent.
    """
    with suppress(psutil.NoSuchProcess, ValueError):  # psutil has the latter for numbers that no process can have
        process = psutil.Process(pid)
        if is_running(process):
            return process
    raise ConfigError(f"there is no process {pid} to monitor: give the pid of one that runs")


def is_running(process: psutil.Process) -> bool:
    """Return whether this very process still runs."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def process_tree(roots: Iterable[psutil.Process]) -> set[int]:
    """Return the pids of these processes and of all that descend from them; those that have ended are left out."""
    found: set[int] = set()
    for root in filter(is_running, roots):
        with suppress(psutil.NoSuchProcess):
            found |= {root.pid, *(child.pid for child in root.children(recursive=True))}
    return found


class MemorySampler:
    """Writes rows of `COLUMNS`, as often as it is asked, but never for more than a share of the time.

    The node's figures take some 30 us, those of processes some 4 ms for each that has torch loaded. Either part is
    taken again only when what it last took is no more than its share of the time since then.
    """

    def __init__(
        self, file: FileIO, pids: Callable[[], Collection[int]], share: float, *, first_look_s: float = 0.0
    ) -> None:
        """Write the header.

        Args:
            file: where the rows go; open for as long as they do.
            pids: gives the processes to measure, each time that they are.
            share: how much of the time the node's figures may take, and the processes' as well; in (0, 1].
            first_look_s: what the first look at the processes is taken to cost, in seconds: it comes when that is no
                more than its share.
        """
        self.rows = 0
        self.cost_s = 0.0
        """What all rows took together."""
        self._file = file
        self._pids = pids
        self._share = share
        self._index = 0
        self._write(",".join(COLUMNS))
        self._started_s = self._node_due_s = _clock()
        self._processes_due_s = self._started_s + first_look_s / share

    def write_row(self, *, is_last: bool = False) -> None:
        """Write one line of CSV, none when it would take too much of the time. Its index counts both.

        The last one is written whatever it takes. The cells `uss`, `page_tables` and `processes` are empty where only
        the node's figures could be taken. Processes that this one may not look into are in none of them.

        Raises:
            OSError: the file cannot be written. The row is not in it, nor is a part of it.
        """
        index, started_s = self._index, _clock()
        self._index += 1
        if started_s < self._node_due_s and not is_last:
            return
        node_started_s = started_s
        processes: tuple[int, int, int] | tuple[str, str, str] = ("", "", "")
        if started_s >= self._processes_due_s or is_last:
            processes = self._measure_processes()
            node_started_s = _clock()
            self._processes_due_s = started_s + (node_started_s - started_s) / self._share
        node = psutil.virtual_memory()
        cells = (index, node.percent, node.free, node.available, node.used, node.shared, *processes)
        try:
            self._write(f"{','.join(map(str, cells))},{started_s - self._started_s:.3f}")
            self.rows += 1
        finally:
            ended_s = _clock()
            self._node_due_s = node_started_s + (ended_s - node_started_s) / self._share
            self.cost_s += ended_s - started_s

    def _write(self, line: str) -> None:
        """Write the line, or nothing of it."""
        content = f"{line}\n".encode()
        written = self._file.write(content)
        if written < len(content):
            self._file.seek(-written, os.SEEK_CUR)
            self._file.truncate()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def _measure_processes(self) -> tuple[int, int, int]:
        """Return the sum of the private memory, that of the page tables, and how many processes were measured."""
        found = []
        for pid in self._pids():
            with suppress(ProcessLookupError, PermissionError):
                found.append(measure(pid))
        return sum(memory.private for memory in found), sum(memory.page_tables for memory in found), len(found)


class MemoryMonitor:
    """Writes the memory of the node, and of a process with all its descendants, to a CSV file.

        with MemoryMonitor("memory.csv"):                       # a row at once and one a second, from a thread
            train()

        with MemoryMonitor("memory.csv", interval=None) as monitor:
            for batch in loader:
                monitor()                                       # a row a batch

    The columns are `index` (which call, or which turn of the thread), of the node `mem_percent`, `mem_free`,
    `mem_available`, `mem_used` and `shm` as psutil has them, of the processes `uss` (the sum of their private memory,
    segments left out), `page_tables` and `processes` (how many), and `seconds` since the start; sizes are in bytes.
    `shmserve plot FILE` draws them.

    Over its time it takes less than 1 %, however often it is called, and one look at the processes more, some 4 ms for
    each: the last row, which closing writes, is complete whatever it takes. Else a call for which there is no time
    writes no row, and the cells of the processes are empty where there was none to look at them, as in the first five
    seconds. Rows are in the file at once and whole, and a forked child writes none.
    """

    def __init__(self, path: str | os.PathLike[str], *, pid: int | None = None, interval: float | None = 1.0) -> None:
        """Create the file, or empty it.

        Args:
            path: the CSV file.
            pid: whose memory, together with its descendants'. Default: this process.
            interval: within a with block, the seconds from row to row, from 0.1 to 86,400; None: only when called.

        Raises:
            ConfigError: there is no such process, or the interval is out of range.
            OSError: the file cannot be written.
        """
        self._owner = os.getpid()
        root = running_process(self._owner if pid is None else pid)
        if interval is not None:
            check_interval(interval, _LEAST_INTERVAL_S)
        self._interval_s = interval
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._was_entered = False
        self._thread: threading.Thread | None = None
        file = FileIO(os.fspath(path), "w")
        try:
            self._sampler = MemorySampler(file, lambda: process_tree([root]), _SHARE, first_look_s=_FIRST_LOOK_S)
        except BaseException:
            file.close()
            raise
        self._file = file

    def __call__(self) -> None:
        """Write a row, if there is time for one.

        Raises:
            OSError: the file system is full. No part of the row is in the file, and a later one may fit.
            ValueError: the monitor is closed.
        """
        if os.getpid() != self._owner:
            return
        with self._turn:
            self._require_open()
            self._sampler.write_row()

    def _require_open(self) -> None:
        if self._file.closed:
            raise ValueError(f"the memory monitor of {self._file.name!r} is closed: make a new one")

    def close(self) -> None:
        """End the thread, write a last row, with all cells, and close the file. The second call does nothing.

        Raises:
            OSError: the file system is full. The thread has ended and the file is closed all the same.
        """
        self._closing.set()
        if os.getpid() == self._owner:
            if self._thread is not None:
                self._thread.join()
            with self._turn:
                if not self._file.closed:
                    with self._file:
                        self._sampler.write_row(is_last=True)

    def _run(self, interval_s: float) -> None:
        """Write rows until the monitor is closed. A full disk does not end that: there may be space again later."""
        has_warned = False
        while True:
            try:
                self()
            except OSError as error:
                if not has_warned:
                    has_warned = True
                    warnings.warn(f"the memory monitor leaves out rows: {error}", RuntimeWarning, stacklevel=1)
            if self._closing.wait(interval_s):
                return

    def __enter__(self) -> Self:
        """Start the thread, unless the interval is None.

        Raises:
            RuntimeError: this is a with block of the monitor already.
            ValueError: the monitor is closed.
        """
        self._require_open()
        if self._was_entered:
            raise RuntimeError(f"the memory monitor of {self._file.name!r} has a with block already: make a new one")
        self._was_entered = True
        if self._interval_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._interval_s,), name="shmserve memory monitor", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        file = getattr(self, "_file", None)  # absent where __init__ failed
        if file is not None and not file.closed:
            if os.getpid() == self._owner:
                warnings.warn(f"the memory monitor of {file.name!r} was never closed", ResourceWarning, stacklevel=1)
            file.close()
