"""What the processes that have a segment attached hold, measured by the process that asks.

Not by the daemon: the page map of a hundred processes takes a while, and the daemon has requests to answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psutil

from shmserve_client.errors import ShmserveError
from shmserve_client.locks import AttachedProcess, attached_processes
from shmserve_client.memory import measure, segment_page_tables
from shmserve_client.protocol import DatasetStatus
from shmserve_client.segment import open_segment

__all__ = ["AttachedMemory", "DatasetMemory", "Unmeasured", "attached_pids", "measure_dataset"]

_RANK: Final = re.compile(rb"[0-9]{1,9}")
_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class AttachedMemory:
    """One process that has the segment attached."""

    pid: int
    rank: int | None
    """As torchrun, Slurm or Open MPI set it when the process was started, None where none did."""
    worker: bool
    """Whether it descends from another process that is attached, with the same rank: a DataLoader worker."""
    private_nbytes: int
    """Pages that no other process has, its copies of segment pages included, the segment left out."""
    proportional_nbytes: int
    """The same, and its share of the pages that it has in common with others: of libraries, and after a fork."""
    page_tables_nbytes: int
    """All of its page tables."""
    segment_page_tables_nbytes: int
    """Of these, what maps this segment: see `segment_page_tables`."""
    touched_nbytes: int
    """Of the segment, how much it has mapped."""
    written_nbytes: int
    """Of the segment, how much it has written to in place, or a process from which it was forked: copies."""
    written_share_nbytes: int
    """The same, divided among forked processes that share the copies; at most."""


@dataclass(frozen=True)
class Unmeasured:
    """Attached processes of which nothing more is known, and why."""

    reason: str
    pids: list[int]
    """In their own pid namespaces."""
    processes: int
    """How many; more than there are pids where the daemon only counts them."""


@dataclass(frozen=True)
class DatasetMemory:
    """One segment and all that have it attached."""

    processes: list[AttachedMemory]
    unmeasured: list[Unmeasured]
    total_nbytes: int
    """The segment once, and of each measured process its proportional memory and its page tables."""
    copied_nbytes: int
    """The same processes without the segment and their copies of its pages, each with a private copy of all of it."""


def measure_dataset(dataset: DatasetStatus) -> DatasetMemory:
    """Return what the served dataset takes in this node's memory, as far as this process may look.

    Processes that end meanwhile are left out.
    """
    processes: list[AttachedMemory] = []
    unmeasured: list[Unmeasured] = []
    try:
        with _opened(dataset.path) as fd:
            file, attached = os.fstat(fd), attached_processes(fd)
    except ShmserveError as error:
        count = len(dataset.attached_pids) + dataset.attached_elsewhere
        attached = []
        if count:
            unmeasured.append(Unmeasured(str(error), dataset.attached_pids, count))
    here, elsewhere = _by_namespace(attached)
    if here and os.readlink("/proc/self") != str(os.getpid()):  # whose numbers are those of other processes
        unmeasured.append(Unmeasured("/proc is of another pid namespace", here, len(here)))
        here = []
    refused: list[int] = []
    for pid in here:
        try:
            processes.append(_measure_attached(pid, file, here))
        except PermissionError:
            refused.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            if _is_hidden(pid):
                refused.append(pid)
    if refused:
        unmeasured.append(Unmeasured("not readable by this user", refused, len(refused)))
    if elsewhere:
        unmeasured.append(Unmeasured("in other pid namespaces", elsewhere, len(elsewhere)))
    own = sum(process.proportional_nbytes + process.page_tables_nbytes for process in processes)
    written = sum(process.written_share_nbytes for process in processes)
    return DatasetMemory(
        processes=processes,
        unmeasured=unmeasured,
        total_nbytes=dataset.segment_nbytes + own,
        copied_nbytes=dataset.segment_nbytes * len(processes) + own - written,
    )


def attached_pids(dataset: DatasetStatus) -> list[int]:
    """Return the processes of this pid namespace that have the dataset attached; none where it cannot be opened."""
    try:
        with _opened(dataset.path) as fd:
            return _by_namespace(attached_processes(fd))[0]
    except ShmserveError:
        return []


@contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = open_segment(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _by_namespace(attached: list[AttachedProcess]) -> tuple[list[int], list[int]]:
    """Return the pids in this process's pid namespace, and those in others."""
    own = os.stat("/proc/self/ns/pid").st_ino
    here = [process.pid for process in attached if process.pid_namespace == own]
    return here, [process.pid for process in attached if process.pid_namespace != own]


def _measure_attached(pid: int, file: os.stat_result, attached: list[int]) -> AttachedMemory:
    process = psutil.Process(pid)
    memory = measure(pid)
    rank = _rank(pid)
    mappings = [found for found in memory.segments if (found.device, found.inode) == (file.st_dev, file.st_ino)]
    return AttachedMemory(
        pid=pid,
        rank=rank,
        worker=any(parent.pid in attached and _has_rank(parent.pid, rank) for parent in process.parents()),
        private_nbytes=memory.private,
        proportional_nbytes=memory.proportional,
        page_tables_nbytes=memory.page_tables,
        segment_page_tables_nbytes=sum(segment_page_tables(pid, mapping) for mapping in mappings),
        touched_nbytes=sum(mapping.touched for mapping in mappings),
        written_nbytes=sum(mapping.written for mapping in mappings),
        written_share_nbytes=sum(mapping.written_share for mapping in mappings),
    )


def _has_rank(pid: int, rank: int | None) -> bool:
    """Return whether the process has this rank, as far as this user may know."""
    try:
        return _rank(pid) == rank
    except (PermissionError, ProcessLookupError):
        return False


def _is_hidden(pid: int) -> bool:
    """Return whether the process lives and /proc does not show it to this user (hidepid=2)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not os.path.exists(f"/proc/{pid}")


def _rank(pid: int) -> int | None:
    """Return the rank that the environment of the process gave it when it was started."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    ranks = [environ[name] for name in map(str.encode, _RANKS) if _RANK.fullmatch(environ.get(name, b""))]
    return int(ranks[0]) if ranks else None
