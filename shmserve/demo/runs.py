"""The demo's processes: one daemon, and ranks that train and are measured while all of them hold what they need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypeAlias

import psutil

from shmserve_client.connection import Connection
from shmserve_client.errors import DaemonStartError, ShmserveError
from shmserve_client.protocol import DatasetStatus, Status, StatusReport

from .jobs import Job, Outcome
from .memory import ProcessMemory, file_nbytes, measure

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
            try:
                said = ready.read().strip()
                if said != "ready":
                    raise DaemonStartError(said.removeprefix("error: ") or "the daemon ended before it was ready")
                log.seek(0)
                yield Daemon(process.pid, endpoint, "".join(line for line in log if line.startswith("ready")).strip())
            finally:
                process.terminate()
                process.wait(_PATIENCE_S)


def train(dataset: str, data: str, ranks: int, workers: int, steps: int, daemon: Daemon | None = None) -> Run:
    """Return the outcome of `ranks` processes that train on `dataset` ("shmserve", "copied" or "empty").

    Raises:
        ShmserveError: a rank failed; the message ends with the last line of its own.
    """
    jobs = [Job(dataset, data, rank, ranks, workers, steps) for rank in range(ranks)]
    with ExitStack() as stack:
        processes = [_start_rank(job) for job in jobs]
        for process in processes:
            stack.enter_context(_ended(process))
        for process in processes:
            _line(process)
        for process in processes:
            _let_go(process)
        outcomes = [Outcome(**json.loads(_line(process))) for process in processes]
        run = _measured([process.pid for process in processes], outcomes, daemon)
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()  # the end of its input lets it go
        for process in processes:
            process.wait(_PATIENCE_S)
    return run


def _measured(pids: Sequence[int], outcomes: Sequence[Outcome], daemon: Daemon | None) -> Run:
    segment = daemon.dataset().path if daemon else ""
    helpers = {child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)}
    memory = {pid: measure(pid, segment) for pid in {*pids, *helpers, *([daemon.pid] if daemon else [])}}
    processes = sum(held.proportional + held.page_tables for held in memory.values())
    return Run(
        ranks=[memory[pid] for pid in pids],
        workers=[memory[pid] for outcome in outcomes for pid in outcome.workers],
        daemon=memory[daemon.pid] if daemon else None,
        total=processes + (file_nbytes(segment) if segment else 0),
        samples_per_second=sum(outcome.samples / outcome.seconds for outcome in outcomes),
        first_loss=outcomes[0].first_loss,
        last_loss=outcomes[0].last_loss,
    )


def _start_rank(job: Job) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return _start("shmserve.demo.trainer", json.dumps(asdict(job)), stdin=pipe, stdout=pipe, stderr=pipe)


def _line(process: subprocess.Popen[str]) -> str:
    """Return the rank's next line, or raise what it complained about before it ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, complaint = process.communicate()
        why = (complaint.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ShmserveError(f"a rank of the demo failed: {why}")
    return line


def _let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


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


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens in the with block, neither the process nor a child of it outlives the block."""
    with process:
        try:
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
