"""TNTIDX pairs: fairseq's legacy datasets ("lazy", "cached") and the same layout as the Megatron family wrote it.

    0   8 bytes   TNTIDX, two zeros
    8   u64       version, 1
    16  u64       dtype code
    24  u64       bytes per item
    32  u64       N items
    40  u64       S
        u64       D, in Megatron's kind only
        i64[N+1]  dim_offsets: item i has the shape sizes[dim_offsets[i]:dim_offsets[i + 1]]
        i64[N+1]  data_offsets: where its values start in the .bin, in values
        i64[S]    sizes
        i64[D]    document_indices, in Megatron's kind only

The file's size tells the two apart, exactly. fairseq stores every token id plus one (it began in Lua) and subtracts it
on reading; Megatron's kind does not. Written after `fairseq/data/indexed_dataset.py` and GPT-NeoX's
`megatron/data/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES, MAX_DIMENSIONS, MAX_ITEMS
from shmserve_client.plans import ArrayPlan, ColumnPlan, RaggedPlan

from .base import ShardPlan, Source, SourceOptions
from .documents import plan_documents
from .files import chunks, first_fall, read_array, size_of
from .pairs import DTYPE_BY_CODE, FLOATS_BY_CODE, PAIR_SUFFIXES, TNTIDX, open_pair
from .pieces import FileSpan, PositionSpan, ShiftedSpan

__all__ = ["LegacyPair"]

HEADER: Final = struct.Struct("<8sQQQQQ")
"""magic, version, dtype code, item size, number of items N, number of sizes S."""


@dataclass(frozen=True)
class LegacyPair(Source):
    """One TNTIDX pair."""

    suffixes = PAIR_SUFFIXES

    index: Path
    values: Path
    dtype: str
    count: int
    sizes: int
    documents: int | None
    """Length of document_indices; None in fairseq's kind."""

    @property
    def format(self) -> str:
        """Which of the two kinds."""
        return "fairseq-legacy" if self.documents is None else "megatron-legacy"

    @property
    def files(self) -> tuple[Path, Path]:
        """Values and index."""
        return self.values, self.index

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the pair if its index is TNTIDX, of whichever kind has exactly its size."""
        opened = open_pair(path, head, TNTIDX, HEADER)
        if opened is None:
            return None
        pair, (code, itemsize, count, sizes) = opened
        nbytes = pair.nbytes
        known = (DTYPE_BY_CODE[code],) if code in DTYPE_BY_CODE else FLOATS_BY_CODE.get(code, ())
        dtype = next((name for name in known if DTYPES[name].itemsize == itemsize), None)
        if dtype is None:
            raise SourceFormatError(f"{pair.index}: dtype code {code} with items of {itemsize} bytes is not known")
        fairseq_nbytes = HEADER.size + 8 * (2 * (count + 1) + sizes)
        if nbytes == fairseq_nbytes:
            return cls(pair.index, pair.values, dtype, count, sizes, None)
        documents = int.from_bytes(pair.head[HEADER.size : HEADER.size + 8], "little")
        megatron_nbytes = fairseq_nbytes + 8 + 8 * documents
        if nbytes == megatron_nbytes:
            return cls(pair.index, pair.values, dtype, count, sizes, documents)
        raise SourceFormatError(
            f"{pair.index}: {nbytes} bytes, but an index of {count} items has {fairseq_nbytes} (fairseq) or "
            f"{megatron_nbytes} (Megatron): it is truncated, or of a version that is not supported"
        )

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return one ragged sample per item, N-d where any item is; fairseq's ids have their 1 subtracted."""
        values, flat = self._check()
        nbytes = values * DTYPES[self.dtype].itemsize
        if self.documents is None:
            piece: FileSpan = ShiftedSpan(self.values, 0, nbytes, self.dtype, add=-1)
        else:
            piece = FileSpan(self.values, 0, nbytes)
        documents, notes = plan_documents(self.index, self._sizes + 8 * self.sizes, self.documents, self.count)
        return ShardPlan(
            (
                ColumnPlan(
                    "tokens",
                    ArrayPlan(self.dtype, (values,), (piece,)),
                    RaggedPlan(
                        self.count,
                        (PositionSpan(self.index, self._data_offsets, 8 * self.count),),
                        ArrayPlan("int64", (self.sizes,), (FileSpan(self.index, self._sizes, 8 * self.sizes),)),
                        (PositionSpan(self.index, self._dim_offsets, 8 * self.count),),
                        flat,
                    ),
                ),
            ),
            documents=documents,
            notes=notes,
        )

    @property
    def _dim_offsets(self) -> int:
        return HEADER.size if self.documents is None else HEADER.size + 8

    @property
    def _data_offsets(self) -> int:
        return self._dim_offsets + 8 * (self.count + 1)

    @property
    def _sizes(self) -> int:
        return self._data_offsets + 8 * (self.count + 1)

    def _check(self) -> tuple[int, bool]:
        """Return (number of values, whether every item is 1-d) of an index that agrees with itself and its values."""
        values = dims = 0
        flat = True
        for start, stop in [*chunks(self.count)] or [(0, 0)]:  # no items have the two first entries, too
            dim_offsets = read_array(self.index, self._dim_offsets + 8 * start, "int64", stop - start + 1)
            data_offsets = read_array(self.index, self._data_offsets + 8 * start, "int64", stop - start + 1)
            falls = first_fall(dim_offsets, dims) is not None
            if falls or dim_offsets[0] != dims or dim_offsets[-1] > self.sizes:
                raise SourceFormatError(
                    f"{self.index}: the dimensions of the items {start} to {stop - 1} are not among its {self.sizes} "
                    "sizes: the index is damaged"
                )
            ndims = np.diff(dim_offsets)
            sizes = read_array(self.index, self._sizes + 8 * dims, "int64", int(dim_offsets[-1]) - dims)
            bad = np.diff(data_offsets) != _lengths(sizes, dim_offsets - dims, ndims)
            falls = first_fall(data_offsets, values) is not None
            if falls or data_offsets[0] != values or bad.any() or (sizes < 0).any():
                raise SourceFormatError(
                    f"{self.index}: item {start + int(bad.argmax() if bad.any() else 0)} does not start where the one "
                    "before ends, or its size does not fit in between: the index is damaged"
                )
            bad = (ndims > MAX_DIMENSIONS) | (_lengths(np.maximum(sizes, 1), dim_offsets - dims, ndims) >= MAX_ITEMS)
            if bad.any():
                at = int(bad.argmax())
                raise SourceFormatError(
                    f"{self.index}: item {start + at} has {ndims[at]} dimensions, or such that numpy has no array of "
                    f"their size: up to {MAX_DIMENSIONS} are supported"
                )
            values, dims, flat = int(data_offsets[-1]), int(dim_offsets[-1]), flat and bool((ndims == 1).all())
        if dims != self.sizes:
            raise SourceFormatError(f"{self.index}: {self.sizes} sizes for {dims} dimensions: the index is damaged")
        itemsize = DTYPES[self.dtype].itemsize
        if size_of(self.values) != values * itemsize:
            raise SourceFormatError(
                f"{self.values}: {size_of(self.values)} bytes, but {self.index} needs {values * itemsize} "
                f"({self.count} items, {values} values of {itemsize} bytes): it is truncated, or the two are not a pair"
            )
        return values, flat


def _lengths(sizes: NDArray[np.int64], starts: NDArray[np.int64], ndims: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the product of each item's sizes; as floats, which do not wrap and are exact up to 2^53."""
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no item's length
        products = np.multiply.reduceat(np.append(sizes, 1).astype(np.float64), starts[:-1])
    products[ndims == 0] = 1  # a scalar, where reduceat gives the next item's first size
    return products
