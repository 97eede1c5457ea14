"""The demo's processes: one daemon, and ranks that train and are measured while all of them hold what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypeAlias

import psutil

from shmserve_client.connection import Connection
from shmserve_client.errors import DaemonStartError, ShmserveError
from shmserve_client.memory import ProcessMemory, measure
from shmserve_client.protocol import DatasetStatus, Status, StatusReport

from .jobs import Job, Outcome

__all__ = ["Daemon", "Run", "serving", "train"]

_PATIENCE_S = 10.0
_FREED_AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Settings of glibc's malloc: memory that a process has freed would else stay with it, and blur the measurement."""
_Stream: TypeAlias = int | IO[str]


@dataclass(frozen=True)
class Daemon:
    """A daemon that is ready."""

    pid: int
    endpoint: str
    readiness: str
    """The line that it printed."""

    def dataset(self) -> DatasetStatus:
        """Return what it says of the one dataset that it serves."""
        with Connection(self.endpoint, timeout_s=_PATIENCE_S) as connection:
            report = connection.request(Status())
        assert isinstance(report, StatusReport)
        return report.datasets[0]


@dataclass(frozen=True)
class Run:
    """One training, measured after its last step, with all processes still there."""

    ranks: list[ProcessMemory]
    workers: list[ProcessMemory]
    daemon: ProcessMemory | None
    total: int
    """Bytes of RAM: these and the start method's helper processes, their page tables, and the segment once."""
    samples_per_second: float
    first_loss: float
    last_loss: float


@contextmanager
def serving(data: Path, folder: Path) -> Iterator[Daemon]:
    """Serve `data` for the length of a with block; the segment, the socket and the process are gone after it.

    Raises:
        DaemonStartError: it did not start; the message is the daemon's.
    """
    endpoint = f"ipc://{folder}/daemon.sock"
    read_fd, write_fd = os.pipe()
    with open(read_fd, encoding="utf-8") as ready, open(folder / "daemon.log", "w+") as log:
        try:
            process = _start(
                # Should the demo be killed, the daemon ends on its own, and takes the segment along.
                *("shmserve", "start", "--data", str(data), "--endpoint", endpoint, "--linger", "300"),
                *("--ready-fd", str(write_fd)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
            )
        finally:
            os.close(write_fd)
        with _ended(process):
            said = ready.read().strip()
            if said != "ready":
                raise DaemonStartError(said.removeprefix("error: ") or "the daemon ended before it was ready")
            log.seek(0)
            yield Daemon(process.pid, endpoint, "".join(line for line in log if line.startswith("ready")).strip())


def train(dataset: str, data: str, ranks: int, workers: int, steps: int, daemon: Daemon | None = None) -> Run:
    """Return the outcome of `ranks` processes that train on `dataset` ("shmserve", "copied" or "empty").

    Raises:
        ShmserveError: a rank failed; the message ends with the last line of its own.
    """
    jobs = [Job(dataset, data, rank, ranks, workers, steps) for rank in range(ranks)]
    with ExitStack() as stack:
        started = [stack.enter_context(_rank(job)) for job in jobs]
        for rank in started:
            rank.line()
        for rank in started:
            rank.let_go()
        outcomes = [Outcome(**json.loads(rank.line())) for rank in started]
        run = _measured([rank.process.pid for rank in started], outcomes, daemon)
        for rank in started:
            rank.stdin.close()  # the end of its input ends it
        for rank in started:
            _wait(rank.process)
    return run


def _measured(pids: Sequence[int], outcomes: Sequence[Outcome], daemon: Daemon | None) -> Run:
    dataset = daemon.dataset() if daemon else None
    helpers = {child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)}
    memory = {pid: measure(pid) for pid in {*pids, *helpers, *([daemon.pid] if daemon else [])}}
    processes = sum(held.proportional + held.page_tables for held in memory.values())
    return Run(
        ranks=[memory[pid] for pid in pids],
        workers=[memory[pid] for outcome in outcomes for pid in outcome.workers],
        daemon=memory[daemon.pid] if daemon else None,
        total=processes + (dataset.segment_nbytes if dataset else 0),
        samples_per_second=sum(outcome.samples / outcome.seconds for outcome in outcomes),
        first_loss=outcomes[0].first_loss,
        last_loss=outcomes[0].last_loss,
    )


class _Rank:
    """A trainer that runs. What it complains of goes to a file, since nobody reads a pipe while it trains."""

    def __init__(self, job: Job, complaints: IO[str]) -> None:
        pipe = subprocess.PIPE
        self.process = _start(
            "shmserve.demo.trainer", json.dumps(asdict(job)), stdin=pipe, stdout=pipe, stderr=complaints
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._complaints = complaints

    def line(self) -> str:
        """Return its next line, or raise the last one that it complained with before it ended."""
        line = self.stdout.readline()
        if not line:
            _wait(self.process)
            self._complaints.seek(0)
            why = (self._complaints.read().strip().splitlines() or [f"exit code {self.process.poll()}"])[-1]
            raise ShmserveError(f"a rank of the demo failed: {why}")
        return line

    def let_go(self) -> None:
        """Let it start to train; one that has ended says so when its next line is asked for."""
        with suppress(BrokenPipeError):
            os.write(self.stdin.fileno(), b"go\n")


@contextmanager
def _rank(job: Job) -> Iterator[_Rank]:
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        rank = _Rank(job, complaints)
        with _ended(rank.process):
            yield rank


def _start(
    module: str, *args: str, stdin: _Stream, stdout: _Stream, stderr: _Stream, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Start a module as a program, out of reach of Ctrl-C and of the settings that the user has for other daemons."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE_")}
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        env={**inherited, **_FREED_AT_ONCE},
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
        text=True,
    )


def _wait(process: subprocess.Popen[str]) -> None:
    """Return when the process has ended, or has had its time to."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE_S)


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens in the with block, neither the process nor a child of it outlives the block.

    One that still runs is asked to end, and killed when it takes too long. multiprocessing's resource tracker is not
    killed: it removes the DataLoader's semaphores from /dev/shm when all others of its group have ended, and then ends.
    """
    with process:
        try:
            yield
        finally:
            process.terminate()
            _wait(process)
            deadline = time.monotonic() + _PATIENCE_S
            while members := _group(process.pid):
                for member in members:
                    with suppress(psutil.NoSuchProcess):
                        if not _is_tracker(member) or time.monotonic() > deadline:
                            member.kill()
                time.sleep(0.01)


def _group(leader: int) -> list[psutil.Process]:
    """Return the processes of the group that `leader` leads, or led, without those that only wait to be reaped."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == leader and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_tracker(process: psutil.Process) -> bool:
    return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
