"""Staging: where chunks wait, in an unnamed file, until the sizes of all arrays are known and the segment is written.

Each byte is taken out of the file as it goes into the segment, so that both together never take much more memory than
the segment. What waits is written by calls, which fail where memory runs short, and never send a signal.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunk, Form
from .errors import SourceFormatError
from .layout import DTYPES
from .plans import ArrayPlan, ColumnPlan, Positions, RaggedPlan
from .writer import Piece

__all__ = ["StagedChunk", "Staging"]

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """Where the parts of a chunk wait in their file: offsets in bytes; -1 for a part that it does not have."""

    kind: str
    dtype: str
    count: int
    items: int
    """How many values it has, those of all samples; for rows of one shape, how many rows."""
    row_shape: list[int] | None
    """The shape of each sample; None where the chunk is ragged."""
    values: int
    starts: int = -1
    shapes: int = -1
    extents: int = 0
    """How many extents `shapes` has."""
    shape_starts: int = -1
    flat: bool = True
    """Whether all samples are 1-d."""
    python: str = ""
    fits_float: bool = True
    file: str = ""
    """The file that its values stay in, where `values` is an offset; "" for one whose values wait."""
    stops: int = -1
    """Of such samples, where each ends."""

    @property
    def nbytes(self) -> int:
        """How many bytes its values and offsets have, but for those that stay in a file."""
        positions = (self.starts >= 0) + (self.stops >= 0) + (self.shape_starts >= 0)
        return (0 if self.file else self.values_nbytes) + 8 * (self.extents + self.count * positions)

    @property
    def values_nbytes(self) -> int:
        """How many bytes its values have."""
        return self.items * math.prod(self.row_shape or ()) * DTYPES[self.dtype].itemsize

    @property
    def form(self) -> Form:
        """What it is, without its samples."""
        row_shape = None if self.row_shape is None else tuple(self.row_shape)
        is_empty = self.kind == "tensor" and self.starts >= 0 and self.items == 0
        return Form(self.kind, self.dtype, row_shape, self.shapes >= 0, self.python, is_empty, self.fits_float)


class Staging:
    """One such file, and who appends to it; other processes may read what is there already."""

    def __init__(self, fd: int, *, keep: bool = False) -> None:
        """Use the file `fd`, which stays the caller's; `keep` leaves in it what is read, to be read again."""
        self._fd = fd
        self._keep = keep
        self._end = os.fstat(fd).st_size

    @property
    def written_nbytes(self) -> int:
        """How many bytes were appended in all."""
        return self._end

    @property
    def nbytes(self) -> int:
        """How much memory the file takes now."""
        return os.fstat(self._fd).st_blocks * 512

    def append(self, chunk: Chunk, file: str = "", *, in_place: bool = False) -> StagedChunk:
        """Write the chunk's parts behind what is there. Raises OSError (ENOSPC) where there is no room.

        Args:
            chunk: what to write.
            file: the file in which values can be that do not have to be written; "" for none.
            in_place: whether they will be used there, where other samples may lie between.
        """
        stays = bool(file) and chunk.file_offset >= 0
        staged = StagedChunk(
            kind=chunk.kind,
            dtype=chunk.values.dtype.name,
            count=chunk.count,
            items=len(chunk.values),
            row_shape=list(chunk.values.shape[1:]) if chunk.lengths is None else None,
            values=chunk.file_offset if stays else self._write(chunk.values),
            python=chunk.python,
            fits_float=not stays and chunk.fits_float,
            file=file if stays else "",
        )
        if chunk.lengths is None:
            return staged
        starts = _starts(chunk.lengths) if chunk.starts is None else chunk.starts
        staged = replace(staged, starts=self._write(starts))
        if in_place and stays:
            staged = replace(staged, stops=self._write(starts + chunk.lengths))
        if chunk.shapes is None or chunk.dimensions is None:
            return staged
        return replace(
            staged,
            shapes=self._write(chunk.shapes),
            extents=len(chunk.shapes),
            shape_starts=self._write(_starts(chunk.dimensions)),
            flat=bool((chunk.dimensions == 1).all()),
        )

    def _write(self, values: NDArray[Any]) -> int:
        start = self._end
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        while data:
            written = os.pwrite(self._fd, data, self._end)
            self._end += written
            data = data[written:]
        return start

    def load(self, staged: StagedChunk) -> Chunk:
        """Return the chunk in memory again."""
        shape = (staged.items, *(staged.row_shape or ()))
        if staged.file:
            values = np.empty(shape, DTYPES[staged.dtype])
            with open(staged.file, "rb") as file:
                _read(file.fileno(), values.reshape(-1).view(np.uint8), staged.values)
        else:
            values = self._array(staged.values, staged.dtype, shape)
        lengths = shapes = dimensions = None
        if staged.starts >= 0:
            lengths = _lengths(self._array(staged.starts, "int64", (staged.count,)), staged.items)
        if staged.shapes >= 0:
            shapes = self._array(staged.shapes, "int64", (staged.extents,))
            dimensions = _lengths(self._array(staged.shape_starts, "int64", (staged.count,)), staged.extents)
        return Chunk(values, lengths, shapes, dimensions, staged.kind, staged.python)

    def _array(self, offset: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        array = np.empty(shape, DTYPES[dtype])
        _read(self._fd, array.reshape(-1).view(np.uint8), offset)
        return array

    def plan(self, name: str, staged: StagedChunk, origin: str, span: Piece | None = None) -> ColumnPlan:
        """Return the chunk as a part of the column `name`.

        Args:
            name: the column's.
            staged: the chunk.
            origin: where it comes from, for people.
            span: its values, if they stay in a file.
        """
        shape = (staged.items, *(staged.row_shape or ()))
        if span is None:
            values = self._plan(staged.values, staged.dtype, shape, origin)
        else:
            values = ArrayPlan(staged.dtype, shape, (span,))
        if staged.starts < 0:
            return ColumnPlan(name, values, kind=staged.kind, python=staged.python)
        shapes = None
        shape_starts: tuple[Positions, ...] = ()
        if staged.shapes >= 0:
            shapes = self._plan(staged.shapes, "int64", (staged.extents,), origin)
            shape_starts = self._positions(staged.shape_starts, staged.count)
        starts = self._positions(staged.starts, staged.count)
        stops = self._positions(staged.stops, staged.count) if staged.stops >= 0 else ()
        ragged = RaggedPlan(staged.count, starts, shapes, shape_starts, staged.flat, stops)
        return ColumnPlan(name, values, ragged, staged.kind, staged.python)

    def _plan(self, offset: int, dtype: str, shape: tuple[int, ...], origin: str) -> ArrayPlan:
        nbytes = int(np.prod(shape, dtype=object)) * DTYPES[dtype].itemsize
        return ArrayPlan(dtype, shape, (_StagedBytes(self, offset, nbytes, origin),) if nbytes else ())

    def _positions(self, offset: int, count: int) -> tuple[Positions, ...]:
        return (_StagedPositions(self, offset, 8 * count, 0),) if count else ()

    def take(self, target: NDArray[np.uint8], offset: int) -> None:
        """Fill `target` with the bytes from `offset`, and give their memory back."""
        _read(self._fd, target, offset)
        if self._keep:
            return
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + target.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if first < last and _libc.fallocate(self._fd, mode, first, last - first):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True, slots=True)
class _StagedBytes(Piece):
    """Bytes that wait."""

    staging: Staging
    offset: int
    nbytes: int
    where: str

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        self.staging.take(target, self.offset + start)

    def origin(self, start: int) -> str:
        return self.where


@dataclass(frozen=True, slots=True)
class _StagedPositions(Positions):
    """Int64 positions that wait, each to be moved on by `add`."""

    staging: Staging
    offset: int
    nbytes: int
    add: int

    def shifted(self, by: int) -> _StagedPositions:
        return replace(self, add=self.add + by)

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        self.staging.take(target, self.offset + start)
        positions = target.view("<i8")
        positions += self.add


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.cumsum(lengths, dtype=np.int64)
    starts -= lengths
    return starts


def _lengths(starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    return np.diff(starts, append=np.int64(end))


def _read(fd: int, target: NDArray[np.uint8], offset: int) -> None:
    done = 0
    while done < target.nbytes:
        count = os.preadv(fd, [target[done:].data], offset + done)
        if count == 0:
            raise SourceFormatError("what was decoded is gone: its file was truncated by somebody else")
        done += count
