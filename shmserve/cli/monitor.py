"""`shmserve monitor` and `shmserve plot`: memory over time, as CSV and as a picture."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

import click
import psutil

from shmserve.attached import attached_pids
from shmserve.endpoints import embedded_endpoints
from shmserve.text import count, duration
from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint, find_endpoints, lock_path, parse_endpoint
from shmserve_client.errors import ConfigError, ShmserveError, printable
from shmserve_client.locks import holder_of
from shmserve_client.monitor import MemorySampler, check_interval, is_running, process_tree, running_process
from shmserve_client.protocol import DatasetStatus, Status, StatusReport

from .options import Command, ask, endpoint_option, keys_option, option

__all__ = ["monitor", "plot"]

_FIRST_TIMEOUT_S: Final = 10.0
_TIMEOUT_S: Final = 1.0
_ASK_EVERY_S: Final = 10.0
_SHARE: Final = 0.05
_LEAST_INTERVAL_S: Final = 0.01


def _check_interval(ctx: click.Context, parameter: click.Parameter, value: float) -> float:
    try:
        check_interval(value, _LEAST_INTERVAL_S)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command(cls=Command)
@click.argument("pids", metavar="[PID]...", type=click.IntRange(1), nargs=-1)
@option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where to.  [default: stdout]"
)
@option(
    "--interval",
    type=float,
    callback=_check_interval,
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds from row to row, from 0.01 to 86400.",
)
@endpoint_option
@keys_option
def monitor(
    pids: tuple[int, ...], output: Path | None, interval: float, endpoint: str | None, keys: str | None
) -> None:
    """Write the memory of the node and of processes over time, as CSV, until interrupted or until they have ended.

    The processes are those of the PIDs and all that descend from them; without any, the daemon, without --endpoint
    those that from_path started as well, and all that have their datasets attached.

    Rows take a tenth of one core's time at most, after the first one: where there are many processes, it looks at them
    in some rows only.
    """
    watched = _Trees(pids) if pids else _Served(endpoint, keys)
    interrupted = threading.Event()
    signums = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is to go on
        signums.append(signal.SIGHUP)
    for signum in signums:
        signal.signal(signum, lambda signum, frame: interrupted.set())
    with FileIO(sys.stdout.fileno() if output is None else output, "w", closefd=output is not None) as file:
        sampler = MemorySampler(file, watched.pids, _SHARE)
        while watched.is_running():
            sampler.write_row()
            if interrupted.wait(interval):
                break
    took = f", one took {_short_duration(sampler.cost_s / sampler.rows)} on average" if sampler.rows else ""
    click.echo(f"{count(sampler.rows, 'row')}{took}", err=True)


def _short_duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else duration(seconds)


class _Trees:
    """The given processes and all that descend from them, for as long as one of the given ones runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._roots = [running_process(pid) for pid in pids]

    def pids(self) -> Collection[int]:
        return process_tree(self._roots)

    def is_running(self) -> bool:
        return any(map(is_running, self._roots))


class _Served:
    """The daemons and all that have their datasets attached, for as long as one of them runs.

    Daemons are asked now and then for what they serve. Who has it attached is told by the segments' locks: a daemon
    that hangs or was killed hides nobody.
    """

    def __init__(self, endpoint: str | None, keys: str | None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._daemons: dict[str, list[psutil.Process]] = {}
        self._datasets: dict[str, DatasetStatus] = {}
        """What was served at any time, by the segment's path."""
        self._attached: dict[str, list[psutil.Process]] = {}
        for path in self._endpoints() or [find_endpoint()]:
            self._ask(path, _FIRST_TIMEOUT_S)
        self._ask_again_s = time.monotonic() + _ASK_EVERY_S
        self._look()

    def _endpoints(self) -> list[str]:
        return [parse_endpoint(self._endpoint)] if self._endpoint else [*find_endpoints()[:1], *embedded_endpoints()]

    def _ask(self, path: str, timeout_s: float) -> None:
        with suppress(PermissionError):  # another user's daemon, whose memory is not to be seen either
            # Not the report's pid: it counts in the daemon's pid namespace.
            holder = holder_of(lock_path(path))
            self._daemons[path] = _running([holder.pid] if holder is not None else [])
        with Connection(path, timeout_s, self._keys) as connection:
            report = ask(connection, Status(), StatusReport)
        self._datasets.update({dataset.path: dataset for dataset in report.datasets if dataset.state == "ready"})

    def _look(self) -> None:
        for path, dataset in self._datasets.items():
            # After `shmserve stop` the name is gone, and training goes on: stay with those that are known.
            if os.path.exists(path):
                self._attached[path] = _running(attached_pids(dataset))

    def _processes(self) -> list[psutil.Process]:
        return [process for found in (self._daemons, self._attached) for group in found.values() for process in group]

    def pids(self) -> Collection[int]:
        self._look()
        return {process.pid for process in self._processes() if is_running(process)}

    def is_running(self) -> bool:
        if time.monotonic() >= self._ask_again_s:  # here, since waiting for a daemon is not what a row costs
            for path in self._endpoints():
                with suppress(ShmserveError):  # training goes on without it, and what it served is known
                    self._ask(path, _TIMEOUT_S)
            self._ask_again_s = time.monotonic() + _ASK_EVERY_S
        return any(map(is_running, self._processes()))


def _running(pids: Collection[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(ConfigError):  # it has just ended
            found.append(running_process(pid))
    return found


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

    target = output or (path.with_suffix(".png") if path.suffix == ".csv" else Path(f"{path}.png"))
    plot_memory(path, target)
    click.echo(f"wrote {printable(str(target))}", err=True)
