"""The data of the benchmarks: a ragged corpus in Megatron's layout, which most contenders read as it is."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MEAN_LENGTH = 256
VOCABULARY_SIZE = 50_000
_CODES = {"int32": 4, "uint16": 8}
_CHUNK = 1 << 16


def ragged_lengths(samples: int, mean: int = MEAN_LENGTH, seed: int = 0) -> NDArray[np.int32]:
    """Return int32 lengths, uniform in [1, 2 * mean), for a corpus of so many samples."""
    return np.random.default_rng(seed).integers(1, 2 * mean, samples, dtype=np.int32)


def write_ragged(prefix: Path, lengths: NDArray[np.int32], dtype: str = "int32") -> Path:
    """Write `prefix.bin` and `prefix.idx` with random token ids; return the path of the .bin.

    The layout is that of megatron/core/datasets/indexed_dataset.py, each sample a document.
    """
    random = np.random.default_rng(1)
    item = np.dtype(dtype)
    with open(f"{prefix}.bin", "wb") as values:
        for start in range(0, len(lengths), _CHUNK):
            count = int(lengths[start : start + _CHUNK].sum(dtype=np.int64))
            random.integers(0, VOCABULARY_SIZE, count, dtype=item).tofile(values)
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    with open(f"{prefix}.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _CODES[dtype], len(lengths), len(lengths) + 1))
        lengths.tofile(index)
        (pointers * item.itemsize).tofile(index)
        np.arange(len(lengths) + 1).astype(np.int64).tofile(index)
    return Path(f"{prefix}.bin")
