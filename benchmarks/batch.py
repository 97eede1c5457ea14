"""What a padded batch of a ragged corpus costs, with shmserve and with what else can hold such a corpus.

It isolates how one process comes from the indices of 64 samples to an int64 tensor of 64 x 1024 in memory of its own,
without workers and in one thread: finding the samples, cutting, padding and converting them. The data is in memory, and
what is timed has been read before; but it lies anywhere in a corpus that is larger than most caches, as in training.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best, installed, ratio, served
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from shmserve_client import Batch, BatchLoader, DistributedSampler, ShmDataset

SAMPLES = 250_000
MEAN_LENGTH = 1024
LENGTH = 1024
BATCH_SIZE = 64
TIMED_TOGETHER = 50
"""Batches: the least time that so many took, one after the other, is what counts."""
BATCHES = 3_000
ROUNDS = 3
STEP_S = 0.002
REFERENCE = "megatron"
"""The contender that the others are compared with."""

Indices = list[int]
Open = Callable[[Case, Indices], Iterator[torch.Tensor]]


def _pad(samples: list[Any]) -> torch.Tensor:
    """The usual collate function for samples of different lengths."""
    cut = [torch.as_tensor(sample[:LENGTH]).to(torch.int64) for sample in samples]
    return pad_sequence(cut, batch_first=True)


def _pad_by_rows(samples: list[Any]) -> torch.Tensor:
    """The fastest that we know: numpy, row by row."""
    rows = np.zeros((len(samples), LENGTH), np.int64)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = sample[:LENGTH]
    return torch.from_numpy(rows)


def _pad_columns(samples: list[dict[str, Any]]) -> torch.Tensor:
    return _pad([sample["tokens"] for sample in samples])


def _loaded(dataset: Any, indices: Iterable[int], collate: Callable[[Any], Any]) -> Iterator[Any]:
    return iter(DataLoader(dataset, BATCH_SIZE, sampler=indices, collate_fn=collate))


def _batches_of(indices: Indices) -> Iterator[Indices]:
    return (indices[start : start + BATCH_SIZE] for start in range(0, len(indices), BATCH_SIZE))


def _megatron(case: Case, indices: Indices, collate: Callable[[Any], Any] = _pad) -> Iterator[Any]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return _loaded(IndexedDataset(case["prefix"]), indices, collate)


def _megatron_by_rows(case: Case, indices: Indices) -> Iterator[Any]:
    return _megatron(case, indices, _pad_by_rows)


def _datasets(case: Case, indices: Indices) -> Iterator[Any]:
    import datasets

    return _loaded(datasets.load_from_disk(f"{case['prefix']}.arrow").with_format("torch"), indices, _pad_columns)


def _samples(case: Case, indices: Indices) -> Iterator[Any]:
    return _loaded(ShmDataset(endpoint=case["endpoint"]), indices, _pad)


def _batched(case: Case, indices: Indices) -> Iterator[Any]:
    view = ShmDataset(endpoint=case["endpoint"]).batched(length=LENGTH)
    return _loaded(view, indices, view.collate_fn)


def _batch(case: Case, indices: Indices) -> Iterator[Any]:
    dataset = ShmDataset(endpoint=case["endpoint"])
    return (dataset.batch(chosen, length=LENGTH) for chosen in _batches_of(indices))


def _out(case: Case, indices: Indices) -> Iterator[Any]:
    dataset = ShmDataset(endpoint=case["endpoint"])
    out = torch.empty(BATCH_SIZE, LENGTH, dtype=torch.int64)
    return (dataset.batch(chosen, out=out) for chosen in _batches_of(indices))


def _loader(case: Case, indices: Indices) -> Iterator[Any]:
    view = ShmDataset(endpoint=case["endpoint"]).batched(length=LENGTH)
    return iter(BatchLoader(view, BATCH_SIZE, sampler=indices))


@dataclass(frozen=True)
class Contender:
    """A way to get the batches of these indices, one after the other."""

    title: str
    open: Open
    package: str = "torch"
    """The distribution that it needs."""
    batches: int = BATCHES
    step_s: float = 0.0
    """How long the training, which leaves the CPU alone, takes between two batches; this is not part of the time."""


CONTENDERS = {
    REFERENCE: Contender("Megatron IndexedDataset, DataLoader, pad_sequence", _megatron, "megatron-core"),
    "megatron by rows": Contender(
        "Megatron IndexedDataset, DataLoader, numpy row by row", _megatron_by_rows, "megatron-core"
    ),
    "datasets": Contender("HF datasets, torch format, DataLoader, pad_sequence", _datasets, "datasets", 300),
    "samples": Contender("shmserve, DataLoader(ds), pad_sequence", _samples),
    "batched": Contender("shmserve, DataLoader(ds.batched(length=1024))", _batched),
    "batch": Contender("shmserve, ds.batch(indices, length=1024)", _batch),
    "out": Contender("shmserve, ds.batch(indices, out=...)", _out),
    "loader": Contender("shmserve, BatchLoader, as fast as it can", _loader),
    "loader step": Contender(
        f"shmserve, BatchLoader, wait beside steps of {STEP_S * 1000:.0f} ms", _loader, batches=500, step_s=STEP_S
    ),
}


def measure(case: Case) -> Result:
    """Return the seconds that a batch takes, or that a training step waits for it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(
        1
    )  # as in a worker; torch would start others for some of these copies, which take longer then
    contender = CONTENDERS[case["contender"]]
    indices = list(islice(DistributedSampler(range(case["samples"]), 1, 0), case["batches"] * BATCH_SIZE))
    for batch in contender.open(case, indices):  # to warm up
        values = batch.values if isinstance(batch, Batch) else batch
    assert values.shape == (BATCH_SIZE, LENGTH)
    assert values.dtype == torch.int64
    batches = contender.open(case, indices)
    times = []
    for _ in range(case["batches"] // TIMED_TOGETHER):
        waited_s = 0.0
        for _ in range(TIMED_TOGETHER):
            if contender.step_s:
                time.sleep(contender.step_s)
            started_s = time.perf_counter()
            next(batches)
            waited_s += time.perf_counter() - started_s
        times.append(waited_s / TIMED_TOGETHER)
    return {"s": min(times)}


def _write(prefix: str, samples: int) -> int:
    """Write the corpus in Megatron's layout, and for datasets in its own; return its bytes."""
    lengths = ragged_lengths(samples, MEAN_LENGTH)
    nbytes = write_ragged(Path(prefix), lengths).stat().st_size
    if installed("datasets"):
        import datasets
        import pyarrow as pa

        datasets.disable_progress_bars()
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(offsets, np.fromfile(f"{prefix}.bin", np.int32))
        datasets.Dataset(pa.table({"tokens": tokens})).save_to_disk(f"{prefix}.arrow")
    return nbytes


def run(quick: bool) -> Report:
    """Measure the contenders that are installed, in turn."""
    samples = 8_000 if quick else SAMPLES
    names = [name for name, contender in CONTENDERS.items() if installed(contender.package)]
    missing = [contender.title for name, contender in CONTENDERS.items() if name not in names]
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        prefix = f"{folder}/corpus"
        nbytes = _write(prefix, samples)
        with served(f"{prefix}.bin") as endpoint:
            corpus = {"prefix": prefix, "endpoint": endpoint, "samples": samples}
            cases = [
                {"contender": name, "batches": 100 if quick else CONTENDERS[name].batches, **corpus} for name in names
            ]
            found = dict(zip(names, alternated(__file__, cases, 1 if quick else ROUNDS), strict=True))
    reference = REFERENCE if REFERENCE in found else "samples"
    return Report(
        question=f"How long does a padded batch of {BATCH_SIZE} samples of a ragged corpus take?",
        isolates=(
            f"From {BATCH_SIZE} random indices to an int64 tensor of {BATCH_SIZE} x {LENGTH}, in one thread of one "
            f"process. The corpus has {samples:,} samples of {nbytes // samples // 4:,} int32 tokens on average, "
            f"{nbytes >> 20:,} MiB, and is in memory; the least time of {TIMED_TOGETHER} batches in a row."
        ),
        columns=["batches by", "us a batch", f"as fast as {CONTENDERS[reference].title}"],
        rows=[
            [
                CONTENDERS[name].title,
                f"{best(results, 's') * 1e6:,.0f}",
                "" if CONTENDERS[name].step_s else f"{ratio(results, found[reference], 's'):.1f}x",
            ]
            for name, results in found.items()
        ],
        notes=[
            "BatchLoader's thread works while the training does something else; what is left then is the wait.",
            *(f"{title}: not installed, see benchmarks/peers." for title in missing),
        ],
        data={"titles": {name: CONTENDERS[name].title for name in names}, "found": found},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
