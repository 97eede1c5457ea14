"""Private memory of DataLoader workers over two epochs: Python objects inherited by fork, against shmserve."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from corpora import write_ragged
from harness import Case, Report, Result, benchmark, measured, served

TITLES = {"lists": "list of Python lists", "shmserve": "shmserve"}
EPOCHS, WORKERS = 2, 4
BATCH_SIZE, LENGTH = 8, 64
FLAT_MIB = 5.0


class TokenLists:
    """The tokens as Python objects, of which each one that is read has its reference count written to."""

    def __init__(self, tokens_file: str) -> None:
        self._samples = np.fromfile(tokens_file, np.int32).reshape(-1, LENGTH).tolist()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.tensor(self._samples[index], dtype=torch.int32)


def measure(case: Case) -> Result:
    """Return the private memory in MiB of each worker, the largest first, after the first and each `every` batches."""
    from torch.utils.data import DataLoader

    from shmserve_client import ShmDataset

    warnings.simplefilter("ignore")  # torch advises against more workers than cores, which do no harm here
    dataset = ShmDataset(endpoint=case["source"]) if case["contender"] == "shmserve" else TokenLists(case["source"])
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    batches: list[int] = []
    private: list[list[float]] = []
    for epoch in range(EPOCHS):
        for number, _ in enumerate(loader, epoch * len(loader) + 1):
            if number == 1 or number % case["every"] == 0:
                batches.append(number)
                pids = [worker.pid for worker in multiprocessing.active_children()]
                private.append(sorted(map(_private_mib, pids), reverse=True))
    return {"batches": batches, "private_mib": private}


def _private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return round(kib / 1024, 2)


def run(quick: bool) -> Report:
    """Measure both."""
    batches = 40 if quick else 12_000
    found = {}
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        tokens_file = write_ragged(Path(folder, "tokens"), np.full(batches * BATCH_SIZE, LENGTH, np.int32))
        every = batches // 40
        found["lists"] = measured(__file__, {"contender": "lists", "source": str(tokens_file), "every": every})
        with served(tokens_file) as endpoint:
            found["shmserve"] = measured(__file__, {"contender": "shmserve", "source": endpoint, "every": every})
    rows = []
    for name, series in found.items():
        largest = dict(zip(series["batches"], map(max, series["private_mib"]), strict=True))
        first, second, third = (largest[number] for number in (1, batches, 2 * batches))
        flat = "yes" if third - second <= FLAT_MIB else "no"
        rows.append([TITLES[name], *(f"{mib:,.1f}" for mib in (first, second, third, third - second)), flat])
    return Report(
        question="Does a worker's private memory grow while it reads?",
        isolates=(
            f"{batches:,} batches of {BATCH_SIZE} samples of {LENGTH} int32 tokens an epoch, in shuffled order, by "
            f"{WORKERS} forked workers that live for {EPOCHS} epochs. Private memory (USS) is that of the worker that "
            f"has most, torch's own included; flat means that epoch 2 adds at most {FLAT_MIB:.0f} MiB."
        ),
        columns=[
            "dataset",
            "first batch, MiB",
            "after epoch 1, MiB",
            "after epoch 2, MiB",
            "epoch 2 adds, MiB",
            "flat",
        ],
        rows=rows,
        notes=[
            "A worker inherits the lists without a copy. What it reads has its reference count written to, and that "
            "copies the page: private memory grows towards a copy of all the lists in each worker."
        ],
        data={"batches_per_epoch": batches, "titles": TITLES, "series": found},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
