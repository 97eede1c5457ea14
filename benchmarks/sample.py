"""What one random sample of a ragged corpus costs, with shmserve and with what else can hold such a corpus.

It isolates `dataset[i]`, in one process and without a DataLoader: finding the sample, and making the object that comes
out. The data is in memory, and all of the samples have been fetched before they are timed. Nothing else reads their
tokens, so a contender that copies or converts a sample pays for it, and one that gives a view does not.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best, installed, ratio, served, timed
from numpy.typing import NDArray

SAMPLES = 200_000
FETCHED = 2_000
BLOCK_SIZE = 256
ROUNDS = 3
REFERENCE = "tensor"
"""The contender that the others are compared with."""


class Slices:
    """An array of values, of which sample i is `values[offsets[i] : offsets[i + 1]]`."""

    def __init__(self, prefix: str, values: NDArray[np.int32]) -> None:
        self._values = values
        self._offsets = np.load(f"{prefix}.npy")

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self._values[self._offsets[index] : self._offsets[index + 1]]


class Lmdb:
    """One value of bytes for each sample, read within one transaction, without a copy."""

    def __init__(self, prefix: str) -> None:
        import lmdb

        self._transaction = lmdb.open(f"{prefix}.lmdb", readonly=True, lock=False).begin(buffers=True)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return np.frombuffer(self._transaction.get(index.to_bytes(8)), np.int32)


def _shmserve(endpoint: str, **options: Any) -> Any:
    from shmserve_client import ShmDataset

    return ShmDataset(endpoint=endpoint, **options)


def _views(endpoint: str) -> Any:
    return _shmserve(endpoint).column()


def _widened(endpoint: str) -> Any:
    import torch

    return _shmserve(endpoint, dtype=torch.int64)


def _windows(endpoint: str) -> Any:
    return _shmserve(endpoint, block_size=BLOCK_SIZE, stride=BLOCK_SIZE // 2)  # more windows than samples


def _tensors(prefix: str) -> list[Any]:
    import torch

    return [torch.from_numpy(sample.copy()) for sample in _mapped(prefix)]


def _mapped(prefix: str) -> Slices:
    return Slices(prefix, np.memmap(f"{prefix}.bin", np.int32, mode="r"))


def _megatron(prefix: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)


def _datasets(prefix: str) -> Any:
    import datasets

    return datasets.load_from_disk(f"{prefix}.arrow")


def _datasets_torch(prefix: str) -> Any:
    return _datasets(prefix).with_format("torch")


def _datasets_numpy(prefix: str) -> Any:
    return _datasets(prefix).with_format("numpy")


def _mmap_ninja(prefix: str) -> Any:
    from mmap_ninja.ragged import RaggedMmap

    return RaggedMmap(f"{prefix}.ninja")


def _tensordict(prefix: str) -> Any:
    import torch
    from tensordict import MemoryMappedTensor

    shapes = torch.from_numpy(np.diff(np.load(f"{prefix}.npy"))).unsqueeze(1)
    return MemoryMappedTensor.from_filename(f"{prefix}.bin", torch.int32, shapes)


@dataclass(frozen=True)
class Contender:
    """A way to hold the corpus, and to get a sample of it."""

    title: str
    open: Callable[[str], Any]
    """Opens the corpus, by its prefix, or by the endpoint of shmserve's daemon."""
    package: str
    """The distribution that it needs."""


CONTENDERS = {
    "view": Contender("shmserve, `ds.column()[i]`", _views, "torch"),
    REFERENCE: Contender("shmserve, `ds[i]`", _shmserve, "torch"),
    "int64": Contender("shmserve, `ds[i]`, `dtype=torch.int64`", _widened, "torch"),
    "window": Contender(f"shmserve, `ds[i]`, `block_size={BLOCK_SIZE}`", _windows, "torch"),
    "tensors": Contender("list of tensors", _tensors, "torch"),
    "mapped": Contender("np.memmap, sliced by hand", _mapped, "numpy"),
    "lmdb": Contender("lmdb and np.frombuffer", Lmdb, "lmdb"),
    "megatron": Contender("Megatron IndexedDataset", _megatron, "megatron-core"),
    "mmap_ninja": Contender("mmap-ninja RaggedMmap", _mmap_ninja, "mmap-ninja"),
    "tensordict": Contender("tensordict MemoryMappedTensor, nested", _tensordict, "tensordict"),
    "datasets numpy": Contender("HF datasets, numpy format", _datasets_numpy, "datasets"),
    "datasets torch": Contender("HF datasets, torch format", _datasets_torch, "datasets"),
}


def measure(case: Case) -> Result:
    """Return the seconds that one sample takes, and what comes out."""
    warnings.simplefilter("ignore")
    contender = CONTENDERS[case["contender"]]
    dataset = contender.open(case["endpoint"] if contender.title.startswith("shmserve") else case["prefix"])
    indices = np.random.default_rng(0).integers(0, case["samples"], FETCHED).tolist()

    def fetch() -> None:
        for index in indices:
            dataset[index]

    sample = dataset[0]
    if isinstance(sample, dict):
        sample = sample["tokens"]
    gives = f"{type(sample).__name__}, {str(sample.dtype).removeprefix('torch.')}"
    return {"s": timed(fetch, repeat=5) / len(indices), "gives": gives}


def _write(prefix: str, samples: int) -> int:
    """Write the corpus in Megatron's layout, and in those of the contenders that have their own; return its bytes."""
    lengths = ragged_lengths(samples)
    nbytes = write_ragged(Path(prefix), lengths).stat().st_size
    offsets = np.zeros(samples + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    np.save(f"{prefix}.npy", offsets)
    corpus = _mapped(prefix)
    if installed("lmdb"):
        import lmdb

        with (
            lmdb.open(f"{prefix}.lmdb", map_size=10 * nbytes + (1 << 30)) as environment,
            environment.begin(write=True) as transaction,
        ):
            for index, sample in enumerate(corpus):
                transaction.put(index.to_bytes(8), sample.tobytes(), append=True)
    if installed("mmap-ninja"):
        from mmap_ninja.ragged import RaggedMmap

        RaggedMmap.from_generator(f"{prefix}.ninja", iter(corpus), batch_size=1 << 16)
    if installed("datasets"):
        import datasets
        import pyarrow as pa

        datasets.disable_progress_bars()
        tokens = pa.ListArray.from_arrays(offsets.astype(np.int32), np.fromfile(f"{prefix}.bin", np.int32))
        datasets.Dataset(pa.table({"tokens": tokens})).save_to_disk(f"{prefix}.arrow")
    return nbytes


def run(quick: bool) -> Report:
    """Measure the contenders that are installed, in turn."""
    samples = 2_000 if quick else SAMPLES
    names = [name for name, contender in CONTENDERS.items() if installed(contender.package)]
    missing = [contender.title for name, contender in CONTENDERS.items() if name not in names]
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        prefix = f"{folder}/corpus"
        nbytes = _write(prefix, samples)
        with served(f"{prefix}.bin") as endpoint:
            corpus = {"prefix": prefix, "endpoint": endpoint, "samples": samples}
            cases = [{"contender": name, **corpus} for name in names]
            found = dict(zip(names, alternated(__file__, cases, 1 if quick else ROUNDS), strict=True))
    return Report(
        question="How long does one random sample of a ragged corpus take?",
        isolates=(
            f"`dataset[i]` for {FETCHED:,} random i, in one process without a DataLoader: finding the sample, and "
            "making the object that comes out. A copy or a conversion counts; nothing else reads the tokens. The "
            f"corpus has {samples:,} samples of {nbytes // samples // 4:,} int32 tokens on average, and is in memory."
        ),
        columns=["dataset", "a sample is", "us a sample", f"against {CONTENDERS[REFERENCE].title}"],
        rows=[
            [
                CONTENDERS[name].title,
                results[0]["gives"],
                f"{best(results, 's') * 1e6:,.2f}",
                f"{ratio(found[REFERENCE], results, 's'):,.2f}x",
            ]
            for name, results in found.items()
        ],
        notes=[
            "A list of tensors has nothing to find or to make, but each process has a copy.",
            "tensordict holds such a corpus as a nested tensor, which goes through all sizes for each sample.",
            *(f"{title}: not installed, see benchmarks/peers." for title in missing),
        ],
        data={"titles": {name: CONTENDERS[name].title for name in names}, "found": found},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
