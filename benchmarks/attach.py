"""How long a process takes until it has the dataset, by the number of samples: in a rank, and in a DataLoader worker.

It isolates attaching: imports come before. A rank attaches in a fresh process, asking the daemon. A worker gets the
dataset as a pickle: one fresh process pickles it, another unpickles it and takes a sample; these times add up. The time
to the first batch shows all of it together, from making the iterator of a DataLoader with spawned workers to what its
first worker brings. Most of that is starting the workers, which import torch: the same without data shows how much.
"""

from __future__ import annotations

import importlib
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best, installed, measured, served

from shmserve_client.connection import Connection
from shmserve_client.protocol import Status

SIZES = (10_000, 1_000_000, 100_000_000)
MEAN_LENGTH = 4
WORKERS = (1, 8, 32)
ROUNDS = 3
BATCH_SIZE = 8


def _shmserve(case: Case) -> Any:
    from shmserve_client import ShmDataset

    return ShmDataset(endpoint=case["endpoint"])


def _megatron(case: Case) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(case["prefix"])


def _arrays(case: Case) -> Any:
    values = np.fromfile(f"{case['prefix']}.bin", np.uint16)
    offsets = [0, *np.cumsum(ragged_lengths(case["samples"], MEAN_LENGTH)).tolist()]
    return [values[start:stop] for start, stop in pairwise(offsets)]


def _nothing(case: Case) -> Any:
    return range(case["samples"])


@dataclass(frozen=True)
class Contender:
    """A way to hold the corpus."""

    title: str
    open: Callable[[Case], Any]
    module: str
    """What a process imports before it opens the corpus, or unpickles it."""
    package: str
    """The distribution that it needs."""


CONTENDERS = {
    "shmserve": Contender("shmserve", _shmserve, "shmserve_client.dataset", "torch"),
    "megatron": Contender(
        "Megatron IndexedDataset", _megatron, "megatron.core.datasets.indexed_dataset", "megatron-core"
    ),
    "arrays": Contender("list of arrays", _arrays, "numpy", "numpy"),
    "nothing": Contender("no data", _nothing, "numpy", "torch"),
}


def measure(case: Case) -> Result:
    """Return the seconds that a step of the case takes, once: a process attaches only once."""
    warnings.simplefilter("ignore")
    contender = CONTENDERS[case["contender"]]
    importlib.import_module(contender.module)
    if case["step"] == "first batch":
        return {"s": _first_batch(contender.open(case), case["workers"])}
    if case["step"] == "rank":
        started_s = time.perf_counter()
        dataset = contender.open(case)
        opened_s = time.perf_counter()
        pickled = pickle.dumps(dataset)
        pickled_s = time.perf_counter()
        Path(case["pickle"]).write_bytes(pickled)
        return {"open_s": opened_s - started_s, "pickle_s": pickled_s - opened_s, "nbytes": len(pickled)}
    pickled = Path(case["pickle"]).read_bytes()
    started_s = time.perf_counter()
    pickle.loads(pickled)[case["samples"] // 2]
    return {"unpickle_s": time.perf_counter() - started_s}


def _first_batch(dataset: Any, workers: int) -> float:
    from torch.utils.data import DataLoader

    # The batch is only the number of its samples: how batches travel is another question.
    loader = DataLoader(
        dataset, batch_size=BATCH_SIZE, collate_fn=len, num_workers=workers, multiprocessing_context="spawn"
    )
    started_s = time.perf_counter()
    batches = iter(loader)
    next(batches)
    return time.perf_counter() - started_s


def _daemon_nbytes(endpoint: str) -> int:
    """Return the daemon's own memory, the segment not counted."""
    with Connection(endpoint, timeout_s=10) as connection:
        nbytes: int = connection.request(Status()).private_nbytes
    return nbytes


def run(quick: bool) -> Report:
    """Measure attaching corpora of each size, and first batches with each number of workers."""
    sizes = (100, 1_000, 10_000) if quick else SIZES
    counts = (1,) if quick else WORKERS
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder, ExitStack() as daemons:
        corpora = []
        for samples in sizes:
            data = write_ragged(Path(folder, str(samples)), ragged_lengths(samples, MEAN_LENGTH), "uint16")
            endpoint = daemons.enter_context(served(data))
            corpora.append({"samples": samples, "prefix": str(data.with_suffix("")), "endpoint": endpoint})
        small, middle, large = corpora
        planned = [
            ("shmserve", small, ()),
            ("shmserve", middle, ()),
            ("shmserve", large, counts),
            ("megatron", large, ()),
            ("arrays", middle, counts[:2]),
            ("nothing", middle, counts),
        ]
        plan = [
            ({"contender": name, "pickle": f"{corpus['prefix']}.{name}", **corpus}, workers)
            for name, corpus, workers in planned
            if installed(CONTENDERS[name].package)
        ]
        steps = [{"step": step, **case} for case, _ in plan for step in ("rank", "worker")]
        found = alternated(__file__, steps, 1 if quick else ROUNDS)
        batches = [
            {count: measured(__file__, {"step": "first batch", "workers": count, **case})["s"] for count in workers}
            for case, workers in plan
        ]
        daemon_nbytes = {corpus["samples"]: _daemon_nbytes(corpus["endpoint"]) for corpus in corpora}
    rows, figures = [], []
    for (case, _), rank, worker, first_batch_s in zip(plan, found[::2], found[1::2], batches, strict=True):
        figure = {
            "contender": case["contender"],
            "samples": case["samples"],
            "open_s": best(rank, "open_s"),
            "pickle_nbytes": rank[0]["nbytes"],
            "pickle_and_attach_s": best(rank, "pickle_s") + best(worker, "unpickle_s"),
            "daemon_nbytes": daemon_nbytes[case["samples"]] if case["contender"] == "shmserve" else None,
            "first_batch_s": first_batch_s,
        }
        figures.append(figure)
        rows.append(_row(figure, counts))
    return Report(
        question="How long does it take until a rank and a worker have the dataset, by the number of samples?",
        isolates=(
            "The first attach in a fresh process, without its imports. A worker's is that of pickling in one process, "
            "and of unpickling and taking a sample in another. The first batch is all of it: from making the iterator "
            "of a DataLoader with spawned workers, which import torch, to what the first of them brings, measured once."
        ),
        columns=[
            *("dataset", "samples", "a rank opens it, ms", "pickle, bytes", "pickle and attach in a worker, ms"),
            "daemon's own memory, MiB",
            *(f"first batch of {count} worker{'s' * (count > 1)}, s" for count in counts),
        ],
        rows=rows,
        notes=[
            "A list of arrays is made from the file by each rank, and pickled whole for each worker, one after the "
            "other: more workers are left out for the time it takes. Of separate tensors, spawned workers can be sent "
            "only as many as there are file descriptors.",
            *(
                f"{contender.title}: not installed, see benchmarks/peers."
                for contender in CONTENDERS.values()
                if not installed(contender.package)
            ),
        ],
        data={"figures": figures},
    )


def _row(figure: dict[str, Any], counts: tuple[int, ...]) -> list[str]:
    batches = figure["first_batch_s"]
    return [
        CONTENDERS[figure["contender"]].title,
        f"{figure['samples']:,}",
        f"{figure['open_s'] * 1e3:,.2f}",
        f"{figure['pickle_nbytes']:,}",
        f"{figure['pickle_and_attach_s'] * 1e3:,.2f}",
        "" if figure["daemon_nbytes"] is None else f"{figure['daemon_nbytes'] / 2**20:,.0f}",
        *(f"{batches[count]:,.1f}" if count in batches else "" for count in counts),
    ]


if __name__ == "__main__":
    benchmark(__file__, measure, run)
