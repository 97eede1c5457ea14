"""Pieces that read from files: spans of bytes, some of them changed in place on their way into the segment."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmserve_client.layout import DTYPES
from shmserve_client.plans import Positions
from shmserve_client.writer import Piece

from .files import read_exactly

__all__ = [
    "FORTRAN_MAX_COLUMNS",
    "FORTRAN_WHOLE_NBYTES",
    "FileSpan",
    "FortranRows",
    "PositionSpan",
    "ShiftedSpan",
    "SwappedSpan",
]

FORTRAN_WHOLE_NBYTES = 32 << 20
FORTRAN_MAX_COLUMNS = 1 << 16


@dataclass(frozen=True, slots=True)
class FileSpan(Piece):
    """The bytes `[offset, offset + nbytes)` of a file, as they are."""

    path: Path
    offset: int
    nbytes: int

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Read the bytes `[start, start + len(target))` of the span into `target`."""
        read_exactly(self.path, self.offset + start, target)

    def origin(self, start: int) -> str:
        """Return the byte's file and position."""
        return f"byte {self.offset + start} of {self.path}"


@dataclass(frozen=True, slots=True)
class SwappedSpan(FileSpan):
    """A span of big-endian items, written little-endian."""

    swapped_nbytes: int
    """The unit whose bytes are reversed: an item's size, half of it for complex numbers."""

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Read the span's bytes into `target` and reverse each unit there."""
        read_exactly(self.path, self.offset + start, target)
        target.view(f"u{self.swapped_nbytes}").byteswap(inplace=True)


@dataclass(frozen=True, slots=True)
class ShiftedSpan(FileSpan):
    """A span of values that are stored with an offset, such as fairseq's old token ids, which are id + 1."""

    dtype: str
    add: int

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Read the span's bytes into `target` and add `add` to each item there, modulo the dtype's range."""
        read_exactly(self.path, self.offset + start, target)
        items = target.view(DTYPES[self.dtype])
        # An unsigned dtype takes no negative operand; adding its complement is the same, modulo its range.
        items += items.dtype.type(self.add % (1 << 8 * items.itemsize) if items.dtype.kind == "u" else self.add)


@dataclass(frozen=True, slots=True)
class PositionSpan(Positions):
    """Int64 numbers of a file's index, each `// divide + add`: byte pointers become positions in items."""

    path: Path
    offset: int
    nbytes: int
    divide: int = 1
    add: int = 0

    def shifted(self, by: int) -> PositionSpan:
        """Return the same positions, each `by` larger."""
        return replace(self, add=self.add + by)

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Read the index's bytes into `target` and turn them into positions there."""
        read_exactly(self.path, self.offset + start, target)
        positions = target.view("<i8")
        if self.divide != 1:
            positions //= self.divide
        if self.add:
            positions += self.add


@dataclass(frozen=True, slots=True)
class FortranRows(FileSpan):
    """An array that its file holds in Fortran order, written in C order.

    In such a file an item of all rows lies together: n numbers for each position in a row. A window of rows is
    gathered from there with one read per position and then transposed; a file of up to FORTRAN_WHOLE_NBYTES is read in
    one go, and one of more than FORTRAN_MAX_COLUMNS positions besides would need too many reads.
    """

    dtype: str
    shape: tuple[int, ...]
    swapped: bool

    def origin(self, start: int) -> str:
        """Return the byte's file; its position there is another, and tells nobody anything."""
        return str(self.path)

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Fill `target` with the array's bytes `[start, start + len(target))`, counted in C order."""
        row_nbytes = self.nbytes // self.shape[0]
        first, last = start // row_nbytes, -(-(start + target.nbytes) // row_nbytes)
        rows = self._rows(first, last).reshape(-1).view(np.uint8)
        target[:] = rows[start - first * row_nbytes :][: target.nbytes]

    def _rows(self, first: int, last: int) -> NDArray[np.generic]:
        """Return the rows [first, last) in C order."""
        count, *row_shape = self.shape
        dtype = DTYPES[self.dtype].newbyteorder(">") if self.swapped else DTYPES[self.dtype]
        columns = math.prod(row_shape)
        if self.nbytes <= FORTRAN_WHOLE_NBYTES:
            whole = np.empty((columns, count), dtype)
            read_exactly(self.path, self.offset, whole.reshape(-1).view(np.uint8))
            stored = whole[:, first:last]
        else:
            stored = np.empty((columns, last - first), dtype)
            for column in range(columns):
                offset = self.offset + (column * count + first) * dtype.itemsize
                read_exactly(self.path, offset, stored[column].view(np.uint8))
        rows = stored.reshape(*reversed(row_shape), last - first).transpose()
        return np.ascontiguousarray(rows, DTYPES[self.dtype])
