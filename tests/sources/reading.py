"""Reads a planned corpus as the segment's writer would, but into this process's memory, and rebuilds its samples."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.sources import Corpus, SourceOptions, resolve
from shmserve_client.layout import DTYPES, whole_pages
from shmserve_client.plans import ArrayPlan, JoinedColumn

FIXTURES = Path(__file__).parents[1] / "fixtures"


def plan(*data: Path | str, dtype: str | None = None, vocab_size: int | None = None, in_place: bool = False) -> Corpus:
    return resolve([str(path) for path in data], SourceOptions(dtype, vocab_size, in_place=in_place)).plan()


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


def read_values(column: JoinedColumn, corpus: Corpus, window_items: int = 1 << 20) -> np.ndarray:
    """Return the values of a column, also where they stay in their files: from these, each begun on a new page."""
    array = column.values
    if array.in_files is None:
        return read(array, window_items)
    content = b"".join(
        data.ljust(whole_pages(len(data)), b"\0") for data in (Path(f.path).read_bytes() for f in corpus.files)
    )
    return np.frombuffer(content, DTYPES[array.dtype], math.prod(array.shape), array.in_files).reshape(array.shape)


def read_bounds(column: JoinedColumn, window_items: int = 1 << 20) -> list[tuple[int, int]]:
    """Return the half-open range of values of each sample of a ragged column."""
    assert column.offsets is not None
    offsets = read(column.offsets, window_items)
    return list(
        pairwise(offsets) if column.stops is None else zip(offsets, read(column.stops, window_items), strict=True)
    )


def samples(corpus: Corpus, window_items: int = 1 << 20) -> list[Any]:
    """Return every sample as a nested list; those of a token stream are its tokens."""
    (column,) = corpus.columns
    values = read_values(column, corpus, window_items)
    if column.offsets is None:
        return values.tolist()
    found = [values[start:stop] for start, stop in read_bounds(column, window_items)]
    if column.shapes is not None and column.shape_offsets is not None:
        shapes, bounds = read(column.shapes, window_items), read(column.shape_offsets, window_items)
        found = [sample.reshape(shapes[bounds[i] : bounds[i + 1]]) for i, sample in enumerate(found)]
    return [sample.tolist() for sample in found]


def arrays(corpus: Corpus, window_items: int = 1 << 20) -> dict[str, list[int]]:
    return {name: read(array, window_items).tolist() for name, array in corpus.arrays.items()}
