"""The demo's results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shmserve.text import count
from shmserve_client.memory import ProcessMemory

from .runs import Run

__all__ = ["print_report", "processes"]


def processes(ranks: int, workers: int) -> str:
    """Return how many processes train, such as `4 ranks x 2 workers`."""
    return f"{count(ranks, 'rank')} x {count(workers, 'worker')}" if workers else count(ranks, "rank")


def print_report(console: Console, corpus_nbytes: int, shared: Run, copied: Run, empty: Run) -> None:
    """Print what the three runs took in all, what one process of them holds, and the ratio."""
    workers = len(shared.workers) // len(shared.ranks)
    totals = _table(
        f"{processes(len(shared.ranks), workers)}, all processes at one moment",
        ("the dataset", "RAM in all", "for the data", "samples/s", "loss of rank 0"),
    )
    for name, run in (("in shmserve", shared), ("copied", copied)):
        loss = f"{run.first_loss:.3f} to {run.last_loss:.3f}"
        totals.add_row(name, _mib(run.total), _mib(run.total - empty.total), f"{run.samples_per_second:,.0f}", loss)
    totals.add_row("left out", _mib(empty.total), "", f"{empty.samples_per_second:,.0f}", "")
    console.print(totals)

    held = _table(
        "what one process holds, on average",
        ("process", "private", "page tables", "segment touched", "private, copied"),
    )
    for name, ours, theirs in (("rank", shared.ranks, copied.ranks), ("worker", shared.workers, copied.workers)):
        if ours:
            held.add_row(name, *_held(ours), _mib(fmean(process.private for process in theirs)))
    if shared.daemon:
        held.add_row("daemon", *_held([shared.daemon]), "")
    console.print(held)

    with_sharing, without = shared.total - empty.total, copied.total - empty.total
    console.print(
        f"{_mib(corpus_nbytes)} of data took {_mib(with_sharing)} of RAM in shmserve and {_mib(without)} copied, "
        f"{without / with_sharing:.1f} times as much.",
        soft_wrap=True,
    )
    if workers:
        console.print(
            "Copied: each rank reads the file, and hands the dataset to its workers, which are started by forkserver,\n"
            "the default from Python 3.14 on. Under fork, the default before, workers share their rank's copy:\n"
            f"at least {_mib(corpus_nbytes * len(copied.ranks))} here.",
            soft_wrap=True,
        )


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _held(processes: Sequence[ProcessMemory]) -> list[str]:
    return [
        _mib(fmean(process.private for process in processes)),
        f"{fmean(process.page_tables for process in processes) / 2**20:,.1f} MiB",
        _mib(fmean(process.touched for process in processes)),
    ]


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
