"""Reads a planned corpus as the segment's writer would, but into this process's memory, and rebuilds its samples."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.sources import Corpus, SourceOptions, resolve
from shmserve_client.layout import DTYPES
from shmserve_client.plans import ArrayPlan

FIXTURES = Path(__file__).parents[1] / "fixtures"


def plan(*data: Path | str, dtype: str | None = None, vocab_size: int | None = None) -> Corpus:
    return resolve([str(path) for path in data], SourceOptions(dtype, vocab_size)).plan()


def read(array: ArrayPlan, window_items: int = 1 << 20) -> np.ndarray:
    """Return the array, read in windows that start and end at item boundaries, as the writer's do."""
    dtype = DTYPES[array.dtype]
    out = np.zeros(array.shape, dtype)
    target = out.reshape(-1).view(np.uint8)
    assert sum(piece.nbytes for piece in array.pieces) == target.nbytes
    end_of_previous = 0
    for piece in array.pieces:
        for start in range(0, piece.nbytes, window_items * dtype.itemsize):
            stop = min(piece.nbytes, start + window_items * dtype.itemsize)
            piece.read_into(target[end_of_previous + start : end_of_previous + stop], start)
        end_of_previous += piece.nbytes
    return out


def samples(corpus: Corpus, window_items: int = 1 << 20) -> list[Any]:
    """Return every sample as a nested list; those of a token stream are its tokens."""
    (column,) = corpus.columns
    values = read(column.values, window_items)
    if column.offsets is None:
        return values.tolist()
    offsets = read(column.offsets, window_items)
    found = [values[start:stop] for start, stop in pairwise(offsets)]
    if column.shapes is not None and column.shape_offsets is not None:
        shapes, bounds = read(column.shapes, window_items), read(column.shape_offsets, window_items)
        found = [sample.reshape(shapes[bounds[i] : bounds[i + 1]]) for i, sample in enumerate(found)]
    return [sample.tolist() for sample in found]


def arrays(corpus: Corpus, window_items: int = 1 << 20) -> dict[str, list[int]]:
    return {name: read(array, window_items).tolist() for name, array in corpus.arrays.items()}
