"""HDF5 files, by h5py: datasets with as many rows are columns, those in groups are called `group/name`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, blobs, encode, rows, texts
from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES

from .base import DecodedSource, SourceOptions, check_columns
from .extras import require
from .in_place import located
from .npz import listed, rows_per_chunk

__all__ = ["Hdf5File"]

EXTRA: Final = "hdf5"
ROWS_PER_PART: Final = 1 << 16
RAGGED_ROWS: Final = 4096
"""How many rows of no fixed size are read at a time."""


@dataclass(frozen=True)
class Hdf5File(DecodedSource):
    """One HDF5 file. Links to other files are not followed."""

    suffixes = (".h5", ".hdf5")
    format = "hdf5"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts as one does."""
        return cls(path) if head.startswith(b"\x89HDF\r\n\x1a\n") else None

    def parts(self) -> list[Any]:
        """Return ranges of rows."""
        with self._opened() as file:
            counts = [dataset.shape[0] for dataset in self._datasets(file).values() if dataset.shape]
        return [[start, start + ROWS_PER_PART] for start in range(0, max([1, *counts]), ROWS_PER_PART)]

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows in the range."""
        with self._opened() as file:
            datasets = self._datasets(file)
            names = list(datasets) if columns is None else list(columns)
            check_columns(names, list(datasets), self.values)
            chosen = {name: datasets[name] for name in names}
            for name, dataset in chosen.items():
                if not dataset.shape:
                    raise SourceFormatError(f"{self.values}: {name!r} has no rows: leave it out by --columns")
            counts = {name: dataset.shape[0] for name, dataset in chosen.items()}
            if len(set(counts.values())) > 1:
                raise SourceFormatError(
                    f"{self.values}: its datasets differ in length ({listed(counts)}): choose some by --columns"
                )
            start, stop = part[0], min(part[1], next(iter(counts.values())))
            if start > stop:
                return  # of a dataset that was not chosen
            step = min(_step(dataset) for dataset in chosen.values())
            for first in range(start, max(stop, start + 1), step):
                last = max(first, min(first + step, stop))
                yield {name: self._chunk(name, dataset, first, last) for name, dataset in chosen.items()}

    locate = decode

    def _opened(self) -> Any:
        h5py = require("h5py", EXTRA, str(self.values))
        try:
            return h5py.File(self.values, "r", locking=False)
        except OSError as error:
            raise SourceFormatError(f"{self.values}: truncated, or no HDF5: {error}") from error

    def _datasets(self, file: Any) -> dict[str, Any]:
        """Return the datasets, in the order of their names."""
        h5py = require("h5py", EXTRA, str(self.values))
        found: dict[str, Any] = {}

        def visit(name: str, item: Any) -> None:  # links, soft or external, are not visited
            if isinstance(item, h5py.Dataset):
                found[name] = item

        file.visititems(visit)
        if not found:
            raise SourceFormatError(f"{self.values}: there are no datasets in it")
        return found

    def _chunk(self, name: str, dataset: Any, start: int, stop: int) -> Chunk:
        h5py = require("h5py", EXTRA, str(self.values))
        if h5py.check_string_dtype(dataset.dtype) is not None:
            values = dataset[start:stop]
            if values.ndim == 1:
                try:
                    return texts(value.decode() for value in values)
                except UnicodeDecodeError:
                    return blobs(list(values))
            raise SourceFormatError(f"{self.values}: {name!r} holds arrays of strings: leave it out by --columns")
        if h5py.check_vlen_dtype(dataset.dtype) is not None:
            return encode(list(dataset[start:stop]), name)
        if dataset.dtype.name not in DTYPES:
            raise SourceFormatError(
                f"{self.values}: {name!r} is of {dataset.dtype}, which is not supported: leave it out by --columns"
            )
        dtype, offset = DTYPES[dataset.dtype.name], dataset.id.get_offset()
        if offset is None or dataset.dtype != dtype or dtype.kind not in "iuf" or dataset.external:
            return rows(np.asarray(dataset[start:stop], dtype))
        row_nbytes = math.prod(dataset.shape[1:]) * dtype.itemsize  # one piece, without filters
        content = np.memmap(self.values, mode="r")
        stored = content[offset + start * row_nbytes : offset + stop * row_nbytes]
        values = stored.view(dtype).reshape(stop - start, *dataset.shape[1:])
        return located(rows(values), content.ctypes.data, content.nbytes)


def _step(dataset: Any) -> int:
    if dataset.dtype.kind == "O":
        return RAGGED_ROWS
    return rows_per_chunk(int(np.prod(dataset.shape[1:], dtype=object)) * int(dataset.dtype.itemsize))
