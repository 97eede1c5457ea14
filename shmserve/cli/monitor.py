"""`shmserve monitor` and `shmserve plot`: memory over time, as CSV and as a picture."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

import click
import psutil

from shmserve.attached import attached_pids
from shmserve.text import duration
from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint, lock_path
from shmserve_client.errors import ConfigError, DaemonUnreachableError, printable
from shmserve_client.locks import holder_of
from shmserve_client.monitor import COLUMNS, MemorySampler, process_tree
from shmserve_client.protocol import Status, StatusReport

from .options import Command, ask, endpoint_option, option

__all__ = ["monitor", "plot"]

_TIMEOUT_S: Final = 10.0
_SHARE: Final = 0.05


@click.command(cls=Command)
@click.argument("pids", metavar="[PID]...", type=click.IntRange(1), nargs=-1)
@option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where to.  [default: stdout]"
)
@option(
    "--interval",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds from row to row.",
)
@endpoint_option
def monitor(pids: tuple[int, ...], output: Path | None, interval: float, endpoint: str | None) -> None:
    """Write the memory of the node and of processes over time, as CSV, until interrupted or until they have ended.

    The processes are those of the PIDs and all that descend from them; without any, the daemon and all that have its
    datasets attached. It takes a tenth of one core's time at most: where there are many processes, it looks at them in
    some rows only.
    """
    watched = _Trees(pids) if pids else _Served(find_endpoint(endpoint))
    interrupted = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: interrupted.set())
    sampler = MemorySampler(watched.pids, _SHARE)
    with nullcontext(sys.stdout) if output is None else open(output, "w", encoding="utf-8") as file:
        click.echo(",".join(COLUMNS), file)
        while watched.is_running():
            row = sampler.row()
            if row is not None:
                click.echo(row, file, nl=False)  # flushes
            if interrupted.wait(interval):
                break
    took = duration(sampler.cost_s / sampler.rows) if sampler.rows else "no time"
    click.echo(f"{sampler.rows} rows, one took {took} on average", err=True)


class _Trees:
    """The given processes and all that descend from them, for as long as one of the given ones runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._roots = {pid: _running(pid) for pid in pids}
        missing = [pid for pid, process in self._roots.items() if process is None]
        if missing:
            raise ConfigError(f"there is no process {missing[0]} to monitor: give the pid of one that runs")

    def pids(self) -> Collection[int]:
        return process_tree(self._roots)

    def is_running(self) -> bool:
        return any(map(_is_running, self._roots.values()))


class _Served:
    """The daemon and all that have its datasets attached, found anew each time, for as long as one of them runs."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found = self._find()

    def _find(self) -> dict[int, psutil.Process | None]:
        with Connection(self._path, _TIMEOUT_S) as connection:
            report = ask(connection, Status(), StatusReport)
        pids = [pid for dataset in report.datasets if dataset.state == "ready" for pid in attached_pids(dataset)]
        with suppress(PermissionError):  # another user's daemon, whose memory is not to be seen either
            # Not the report's pid: it counts in the daemon's pid namespace.
            holder = holder_of(lock_path(self._path))
            pids += [holder.pid] if holder is not None else []
        return {pid: _running(pid) for pid in pids}

    def pids(self) -> Collection[int]:
        with suppress(DaemonUnreachableError):  # training goes on without it: stay with those that are known
            self._found = self._find()
        return self._found

    def is_running(self) -> bool:
        return any(map(_is_running, self._found.values()))


def _running(pid: int) -> psutil.Process | None:
    """Return the process as it is now, so that a later one of the same number is not taken for it."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_running(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@click.command(cls=Command)
@click.argument("path", metavar="FILE.csv", type=click.Path(path_type=Path, dir_okay=False))
@option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The picture: .png, .svg or .pdf.  [default: FILE.png]",
)
def plot(path: Path, output: Path | None) -> None:
    """Draw what `monitor` or a MemoryMonitor wrote. A CSV with the first five of its columns will do."""
    from shmserve.plot import plot_memory

    target = output or path.with_suffix(".png")
    plot_memory(path, target)
    click.echo(f"wrote {printable(str(target))}", err=True)
