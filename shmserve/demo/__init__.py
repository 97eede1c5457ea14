"""`shmserve demo`: serves a corpus that every machine has, trains on it, and shows the memory with and without sharing.

The corpus is written by `corpus`, a rank is the program `trainer`, `runs` starts and measures processes (one of them:
`memory`), and `report` prints the tables.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from rich.console import Console

from shmserve.text import count
from shmserve_client.errors import ConfigError

from .corpus import write_corpus
from .report import print_report, processes
from .runs import serving, train

__all__ = ["run_demo"]

_CORPUS_NBYTES = 128 << 20


def run_demo(ranks: int = 4, workers: int = 2, steps: int = 100) -> None:
    """Print what `ranks` training processes with `workers` DataLoader workers each hold, with and without sharing.

    Nothing is left in the end, neither files nor processes nor shared memory, also after Ctrl-C and SIGTERM.

    Raises:
        ConfigError: torch is not installed.
        ShmserveError: a process of the demo failed; the message is its own.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the demo trains with torch, which is not installed: pip install 'shmserve[torch]'")
    console = Console(highlight=False)
    with _sigterm_as_exit(), tempfile.TemporaryDirectory(prefix="shmserve-demo-") as name:
        folder = Path(name)
        corpus = write_corpus(folder / "stdlib", _affordable_nbytes(ranks * (1 + workers)))
        tokens_file = str(corpus.tokens_file)
        console.print(
            f"corpus: {corpus.files:,} source files of Python's standard library, {corpus.repeats:.1f} times over: "
            f"{corpus.tokens:,} tokens, {corpus.nbytes / 2**20:.0f} MiB",
            soft_wrap=True,
        )
        with serving(corpus.tokens_file, folder) as daemon:
            console.print(daemon.readiness, soft_wrap=True)
            console.print(f"training on it: {processes(ranks, workers)}, {count(steps, 'step')} ...")
            shared = train("shmserve", daemon.endpoint, ranks, workers, steps, daemon)
        console.print("the same with a copy in each process ...")
        copied = train("copied", tokens_file, ranks, workers, steps)
        console.print("the same without the data, to know what the program itself takes ...")
        empty = train("empty", tokens_file, ranks, workers, steps)
        console.print()
        print_report(console, corpus.nbytes, shared, copied, empty)


def _affordable_nbytes(processes: int) -> int:
    """Return the corpus's size: 128 MiB, or what a small machine or container can hold `processes` copies of."""
    shared: int = shutil.disk_usage("/dev/shm").free
    memory: int = psutil.virtual_memory().available
    return min(_CORPUS_NBYTES, shared // 4, memory // (4 * processes)) & ~1


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Within the with block, SIGTERM unwinds the stack as Ctrl-C does, so that everything is cleaned up."""
    before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
