"""`MemoryMonitor`: the memory of the node and of a tree of processes over time, as CSV."""

from __future__ import annotations

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

__all__ = ["COLUMNS", "MemoryMonitor", "MemorySampler", "process_tree"]

COLUMNS: Final = (
    *("index", "mem_percent", "mem_free", "mem_available", "mem_used"),
    *("shm", "uss", "page_tables", "processes", "seconds"),
)
"""Sizes are in bytes. The first five columns are those that users of fastai logged and plotted."""
_SHARE: Final = 0.004
"""What the node's figures may take of a training loop's time; the processes' may take as much: together under 1 %."""
_clock = time.perf_counter


def process_tree(pids: Iterable[int]) -> set[int]:
    """Return these processes and all that descend from them; those that have ended are left out."""
    found: set[int] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {pid, *(child.pid for child in process.children(recursive=True))}
    return found


class MemorySampler:
    """Makes rows of `COLUMNS`, as often as it is asked, but never for more than a share of the time.

    The node's figures take some 30 us, those of processes some 4 ms for each that has torch loaded. Either part is
    taken again only when what it last took is no more than its share of the time since then.
    """

    def __init__(self, pids: Callable[[], Collection[int]], share: float) -> None:
        """Nothing is measured yet.

        Args:
            pids: gives the processes to measure, each time that they are.
            share: how much of the time the node's figures may take, and the processes' as well; in (0, 1].
        """
        self.rows = 0
        self.cost_s = 0.0
        """What all rows took together."""
        self._pids = pids
        self._share = share
        self._index = 0
        self._started_s = _clock()
        self._node_due_s = self._processes_due_s = self._started_s

    def row(self, *, is_last: bool = False) -> str | None:
        """Return one line of CSV, None when it would take too much of the time. Its index counts both.

        The last one is made whatever it takes. The cells `uss`, `page_tables` and `processes` are empty where only the
        node's figures could be taken. Processes that this one may not look into are in none of them.
        """
        index, started_s = self._index, _clock()
        self._index += 1
        if started_s < self._node_due_s and not is_last:
            return None
        node_started_s = started_s
        processes: tuple[int, int, int] | tuple[str, str, str] = ("", "", "")
        if started_s >= self._processes_due_s or is_last:
            processes = self._measure_processes()
            node_started_s = _clock()
            self._processes_due_s = started_s + (node_started_s - started_s) / self._share
        node = psutil.virtual_memory()
        cells = (index, node.percent, node.free, node.available, node.used, node.shared, *processes)
        line = f"{','.join(map(str, cells))},{started_s - self._started_s:.3f}\n"
        ended_s = _clock()
        self._node_due_s = node_started_s + (ended_s - node_started_s) / self._share
        self.rows += 1
        self.cost_s += ended_s - started_s
        return line

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

    It takes less than 1 % of the time, however often it is called: a call for which there is no time writes no row, and
    the cells of the processes are empty in rows for which there was no time to look at them. Rows are in the file at
    once, and a forked child writes none.
    """

    def __init__(self, path: str | os.PathLike[str], *, pid: int | None = None, interval: float | None = 1.0) -> None:
        """Create the file, or empty it.

        Args:
            path: the CSV file.
            pid: whose memory, together with its descendants'. Default: this process.
            interval: within a with block, the seconds from row to row; None: only when called.

        Raises:
            ConfigError: there is no such process, or the interval is not positive.
            OSError: the file cannot be written.
        """
        root = os.getpid() if pid is None else pid
        if not psutil.pid_exists(root):
            raise ConfigError(f"there is no process {root} to monitor: give the pid of one that runs")
        if interval is not None and not interval > 0:
            raise ConfigError(f"an interval of {interval} seconds: give a positive number, or None for no thread")
        self._sampler = MemorySampler(lambda: process_tree([root]), _SHARE)
        self._interval_s = interval
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = FileIO(os.fspath(path), "w")
        self._file.write(f"{','.join(COLUMNS)}\n".encode())

    def __call__(self) -> None:
        """Write a row, if there is time for one.

        Raises:
            OSError: the file system is full.
            ValueError: the monitor is closed.
        """
        if os.getpid() != self._owner:
            return
        with self._turn:
            if self._file.closed:
                raise ValueError(f"the memory monitor of {self._file.name!r} is closed: make a new one")
            self._write(self._sampler.row())

    def _write(self, row: str | None) -> None:
        if row is not None:
            self._file.write(row.encode())

    def close(self) -> None:
        """End the thread, write a last row, with all cells, and close the file. The second call does nothing."""
        self._closing.set()
        if os.getpid() == self._owner:
            if self._thread is not None:
                self._thread.join()
            with self._turn:
                if not self._file.closed:
                    with self._file:
                        self._write(self._sampler.row(is_last=True))

    def _run(self, interval_s: float) -> None:
        self()
        while not self._closing.wait(interval_s):
            self()

    def __enter__(self) -> Self:
        """Start the thread, unless the interval is None."""
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
