"""What it costs the kernel to let processes see a dataset: page tables, which neither RSS, PSS nor USS counts.

It isolates the page tables of the data: a process opens it, notes VmPTE, reads a byte of each page, and takes the
difference. The data is zeros, since what it holds does not matter.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Case, Report, Result, benchmark, measured, served
from numpy.typing import NDArray

SIZES_GIB = (1, 2, 4)
PROCESSES = 8
NODE_GIB, NODE_PROCESSES = 100, 72
"""What the figures are extrapolated to: 8 ranks, each with 8 workers."""
PAGE_NBYTES = 4096
_FORK = multiprocessing.get_context("fork")


@contextmanager
def _zeros(nbytes: int, directory: str | None = None) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="shmserve-benchmark-", suffix=".bin", dir=directory) as file:
        file.truncate(nbytes)
        yield file.name


@contextmanager
def _copied(nbytes: int) -> Iterator[str]:
    with _zeros(nbytes) as path:
        subprocess.run(["cp", "--sparse=never", path, f"{path}.copy"], check=True)
        try:
            yield f"{path}.copy"
        finally:
            os.unlink(f"{path}.copy")


@contextmanager
def _daemon(nbytes: int) -> Iterator[str]:
    with _zeros(nbytes) as path, served(f"zeros={path}") as endpoint:
        yield endpoint


def _mapped(path: str) -> NDArray[np.uint8]:
    return np.memmap(path, np.uint8, mode="r")


def _shmserve(endpoint: str) -> NDArray[np.uint8]:
    from shmserve_client import ShmDataset

    column: Any = ShmDataset(endpoint=endpoint, block_size=1).column()
    return column.view(np.uint8)


@dataclass(frozen=True)
class Contender:
    """A way to let several processes see the same data."""

    title: str
    place: Callable[[int], AbstractContextManager[str]]
    """Holds so many bytes while it is entered, and says where: by a path, or an endpoint."""
    open: Callable[[str], NDArray[np.uint8]]


CONTENDERS = {
    "read": Contender("np.memmap of a file, read from disk", _zeros, _mapped),
    "copied": Contender("np.memmap of a file, just written by cp", _copied, _mapped),
    "shm": Contender("np.memmap of a file in /dev/shm", lambda nbytes: _zeros(nbytes, "/dev/shm"), _mapped),
    "shmserve": Contender("shmserve", _daemon, _shmserve),
}


def measure(case: Case) -> Result:
    """Return the bytes of page tables that the data takes in so many processes together."""
    with _FORK.Pool(case["processes"], maxtasksperchild=1) as pool:
        return {"nbytes": sum(pool.map(_grown, [case] * case["processes"], chunksize=1))}


def _grown(case: Case) -> int:
    data = CONTENDERS[case["contender"]].open(case["place"])
    before = _page_tables()
    data[::PAGE_NBYTES].max()
    return _page_tables() - before


def _page_tables() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPTE:"))


def _read_ahead_kib() -> int:
    """Return how much of a file on the disk of temporary files the kernel reads at once."""
    device = os.stat(tempfile.gettempdir()).st_dev
    return int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())


def run(quick: bool) -> Report:
    """Measure each contender with each size, and with the largest of them in several processes."""
    sizes_gib = (1,) if quick else SIZES_GIB
    largest = sizes_gib[-1]
    rows, data = [], {}
    for name, contender in CONTENDERS.items():
        taken = {}
        for gib in sizes_gib:
            with contender.place(gib << 30) as place:
                case = {"contender": name, "place": place}
                taken[gib] = measured(__file__, {**case, "processes": 1})["nbytes"]
                if gib == largest:
                    together = measured(__file__, {**case, "processes": PROCESSES})["nbytes"]
        node = taken[largest] / largest * NODE_GIB * NODE_PROCESSES
        rows.append(
            [
                contender.title,
                *(f"{nbytes / 2**10:,.0f}" for nbytes in taken.values()),
                f"{taken[largest] / largest / 2**10:,.0f}",
                f"{together / 2**20:,.2f}",
                f"{node / 2**30:,.2f}",
            ]
        )
        data[name] = {"one_process": taken, "processes": together}
    return Report(
        question="How much memory do the page tables of a dataset take?",
        isolates=(
            "The growth of VmPTE while a process reads a byte of each page. Page tables are memory that each process "
            "has for itself, however much of the data is shared, and that no tool counts as the process's."
        ),
        columns=[
            "the data as",
            *(f"{gib} GiB, KiB" for gib in sizes_gib),
            "KiB a GiB",
            f"{largest} GiB in {PROCESSES} processes, MiB",
            f"{NODE_GIB} GiB in {NODE_PROCESSES} processes, GiB",
        ],
        rows=rows,
        notes=[
            "The page cache keeps a file in the pieces in which it was read or written, on huge pages where they are "
            f"large: read-ahead is {_read_ahead_kib():,} KiB on this machine. With 128 KiB, which Linux has unless it "
            "is told otherwise, a file read from disk takes as much as one in /dev/shm.",
            "multiprocessing.shared_memory is a file in /dev/shm.",
            f"The last column is computed from the {largest} GiB of one process: "
            f"{NODE_PROCESSES} processes are 8 ranks with 8 workers each.",
        ],
        data=data,
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
