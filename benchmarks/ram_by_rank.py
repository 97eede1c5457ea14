"""RAM for one corpus, by the number of ranks and workers, in shmserve and in datasets that keep it in other ways."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, benchmark, installed, measured, served
from numpy.typing import NDArray

from shmserve_client.connection import Connection
from shmserve_client.protocol import Status

SAMPLES, MEAN_LENGTH = 400_000, 512
GROUPS = ((1, 0), (2, 0), (4, 0), (8, 0), (1, 2), (8, 2))
"""(ranks, workers of each rank)"""
COLUMNS = {"pss": "PSS", "uss": "USS", "page_tables": "page tables", "shmem": "shmem", "unavailable": "MemAvailable"}
READ_AT_ONCE = 256
SPARE = 0.8
"""How much of the available memory may be taken."""
_FORK = multiprocessing.get_context("fork")


class FlatTokens:
    """After the idea of fairseq's datasets: one array of values, and an index that each process has in its memory."""

    def __init__(self, prefix: str, values: NDArray[np.int32]) -> None:
        self._values = values
        index = f"{prefix}.idx"
        (count,) = np.fromfile(index, np.int64, 1, offset=18)
        self._lengths = np.fromfile(index, np.int32, count, offset=34)
        self._starts = np.fromfile(index, np.int64, count, offset=34 + self._lengths.nbytes) // values.itemsize

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Any:
        import torch

        start = self._starts[index]
        return torch.from_numpy(self._values[start : start + self._lengths[index]])


def _cached(prefix: str) -> FlatTokens:
    return FlatTokens(prefix, np.fromfile(f"{prefix}.bin", np.int32))


def _mapped(prefix: str) -> FlatTokens:
    # Writable, which a private mapping ("c") may be, or torch would warn.
    return FlatTokens(prefix, np.memmap(f"{prefix}.bin", np.int32, mode="c").view(np.ndarray))


def _tensors(prefix: str) -> list[Any]:
    return [sample.clone() for sample in _mapped(prefix)]


def _megatron(prefix: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)


def _datasets(prefix: str) -> Any:
    import datasets

    return datasets.load_from_disk(f"{prefix}.arrow").with_format("torch")


def _shmserve(endpoint: str) -> Any:
    from shmserve_client import ShmDataset

    return ShmDataset(endpoint=endpoint)


@dataclass(frozen=True)
class Contender:
    """A way to hold the corpus."""

    title: str
    open: Callable[[str], Any]
    """Opens the corpus in a rank, by its prefix, or by the endpoint of shmserve's daemon."""
    module: str
    """What is imported before the ranks are forked."""
    package: str
    """The distribution that it needs."""


CONTENDERS = {
    "tensors": Contender("list of tensors per rank", _tensors, "torch.utils.data", "torch"),
    "cached": Contender("array per rank (fairseq cached)", _cached, "torch.utils.data", "torch"),
    "mapped": Contender("np.memmap (fairseq mmap)", _mapped, "torch.utils.data", "torch"),
    "megatron": Contender(
        "Megatron IndexedDataset", _megatron, "megatron.core.datasets.indexed_dataset", "megatron-core"
    ),
    "datasets": Contender("HF datasets", _datasets, "datasets", "datasets"),
    "shmserve": Contender("shmserve", _shmserve, "shmserve_client.dataset", "shmserve"),
}


def measure(case: Case) -> Result:
    """Return what the corpus takes in each group of processes, in bytes; what it would take where that is too much."""
    contender = CONTENDERS[case["contender"]]
    warnings.simplefilter("ignore")
    importlib.import_module(contender.module)
    importlib.import_module("torch").set_num_threads(1)  # threads do not survive a fork
    found: Result = {}
    per_rank: dict[int, int] = {}
    for ranks, workers in case["groups"]:
        expected = per_rank.get(workers, 0) * ranks
        if expected > SPARE * psutil.virtual_memory().available:
            found[_label(ranks, workers)] = {"expected": expected}
            continue
        full, empty = (_group(contender, prefix, ranks, workers) for prefix in (case["full"], case["empty"]))
        found[_label(ranks, workers)] = {name: full[name] - empty[name] for name in full}
        per_rank[workers] = full["pss"] // ranks
    return found


def _group(contender: Contender, prefix: str, ranks: int, workers: int) -> dict[str, int]:
    """Return what the processes hold when every rank has read all samples, and how the node's memory has changed."""
    before = psutil.virtual_memory()
    with ExitStack() as stack:
        pids = []
        if contender.open is _shmserve:
            prefix = stack.enter_context(served(f"{prefix}.bin"))
            with Connection(prefix, timeout_s=10) as connection:
                pids.append(connection.request(Status()).pid)
        pipes = [stack.enter_context(rank(contender, prefix, workers)) for _ in range(ranks)]
        for pipe in pipes:
            pids += pipe.recv()
        after = psutil.virtual_memory()
        processes = [memory_of(pid) for pid in pids]
    return {
        **{name: sum(process[name] for process in processes) for name in processes[0]},
        "shmem": after.shared - before.shared,
        "unavailable": before.available - after.available,
    }


@contextmanager
def rank(contender: Contender, prefix: str, workers: int) -> Iterator[Pipe]:
    """A rank, there until the end of the with block; through the pipe it sends the ids of its processes when ready."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_read, args=(contender, prefix, workers, theirs, ours))
    process.start()
    theirs.close()  # so that the pipe ends with the rank, should it fail
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _read(contender: Contender, prefix: str, workers: int, pipe: Pipe, launcher_end: Pipe) -> None:
    """Read every sample once in batches that each span the corpus, so that every worker touches all of its pages."""
    from torch.utils.data import DataLoader

    launcher_end.close()
    gc.collect()  # writes to what was inherited: a rank that makes more objects would do so anyway
    dataset = contender.open(prefix)
    step = len(dataset) // READ_AT_ONCE + 1
    loader = DataLoader(
        dataset,
        batch_sampler=[range(start, len(dataset), step) or [0] for start in range(step)],
        collate_fn=_touch,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=lambda _: gc.collect(),
        persistent_workers=workers > 0,
    )
    for _ in loader:
        pass
    pipe.send([os.getpid(), *(worker.pid for worker in multiprocessing.active_children())])
    try:
        pipe.recv()
    except EOFError:  # measured
        return


def _touch(samples: list[Any]) -> int:
    """Return how many samples there are; no page of a corpus lies between two, so their first tokens touch all."""
    for sample in samples:
        if not isinstance(sample, dict):  # which those of `datasets` are, copied already
            int(sample[0])
    return len(samples)


def memory_of(pid: int) -> dict[str, int]:
    """Return what a process holds, in bytes; the page tables are in neither PSS nor USS."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    lines += Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {name: int(words[0]) << 10 for name, *words in map(str.split, lines) if words[1:] == ["kB"]}
    uss = sizes["Private_Clean:"] + sizes["Private_Dirty:"]
    return {"pss": sizes["Pss:"], "uss": uss, "page_tables": sizes["VmPTE:"]}


def _label(ranks: int, workers: int) -> str:
    return f"{ranks} x {workers}" if workers else str(ranks)


def _write_arrow(prefix: Path, lengths: NDArray[np.int32]) -> None:
    """Write the corpus `prefix`, which has samples of these lengths, as `datasets` stores it."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    tokens = pa.ListArray.from_arrays(offsets, np.fromfile(f"{prefix}.bin", np.int32))
    datasets.Dataset(pa.table({"tokens": tokens})).save_to_disk(f"{prefix}.arrow")


def run(quick: bool) -> Report:
    """Measure the contenders that are installed."""
    groups = ((1, 0), (2, 1)) if quick else GROUPS
    names = [name for name, contender in CONTENDERS.items() if installed(contender.package)]
    missing = [contender.title for name, contender in CONTENDERS.items() if name not in names]
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        corpora = {"full": ragged_lengths(1000 if quick else SAMPLES, MEAN_LENGTH), "empty": np.ones(1, np.int32)}
        for corpus, lengths in corpora.items():
            write_ragged(Path(folder, corpus), lengths)
            if "datasets" in names:
                _write_arrow(Path(folder, corpus), lengths)
        paths = {corpus: f"{folder}/{corpus}" for corpus in corpora}
        found = {name: measured(__file__, {"contender": name, "groups": groups, **paths}) for name in names}
        nbytes = os.path.getsize(f"{folder}/full.bin")
    left_out = [
        f"{CONTENDERS[name].title}, {group} (ranks x workers): left out, it would take {_mib(taken['expected'])} MiB"
        for name in names
        for group, taken in found[name].items()
        if "expected" in taken
    ]
    return Report(
        question=f"How much RAM does a corpus of {nbytes / 2**20:,.0f} MiB take, by the number of processes?",
        isolates=(
            f"{len(corpora['full']):,} samples of int32 tokens. Each rank, or its workers, has read every sample, and "
            "all are there when they are measured, shmserve's daemon included. The same processes with a corpus of one "
            "token are subtracted. PSS divides a page among the processes that map it, so that its sum has each page "
            "once, those of a segment and of the page cache, too. USS is what a process maps alone; where there is "
            "only one, that is all. Page tables are in neither."
        ),
        columns=["dataset", "ranks", "workers each", *(f"{title}, MiB" for title in COLUMNS.values())],
        rows=[
            [CONTENDERS[name].title, str(ranks), str(workers), *_cells(found[name][_label(ranks, workers)])]
            for name in names
            for ranks, workers in groups
        ],
        notes=[
            "shmem and MemAvailable (how much less of it) are of the whole node. The page cache, which np.memmap, "
            "Megatron and HF datasets read from, counts as available: it can be evicted, and must then be read again.",
            *left_out,
            *(f"{title}: not installed, see benchmarks/peers" for title in missing),
        ],
        data={"nbytes": nbytes, "titles": {name: CONTENDERS[name].title for name in names}, "found": found},
    )


def _cells(taken: dict[str, int]) -> list[str]:
    return [_mib(taken[column]) if column in taken else "" for column in COLUMNS]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


if __name__ == "__main__":
    benchmark(__file__, measure, run)
