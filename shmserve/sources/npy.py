"""True .npy files, as numpy.save writes them: a sample is a row of the first axis."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES, MAX_DIMENSIONS, is_shape
from shmserve_client.plans import ArrayPlan, ColumnPlan
from shmserve_client.writer import Piece

from .base import ShardPlan, Source, SourceOptions
from .files import size_of
from .pieces import FORTRAN_MAX_COLUMNS, FORTRAN_WHOLE_NBYTES, FileSpan, FortranRows, SwappedSpan

__all__ = ["NpyArray"]

MAGIC: Final = b"\x93NUMPY"


@dataclass(frozen=True)
class NpyArray(Source):
    """One .npy file."""

    suffixes = (".npy",)
    format = "npy"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts with numpy's magic."""
        return cls(path) if head.startswith(MAGIC) else None

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return the array's rows; those of a 1-d array are scalars."""
        shape, fortran, stored, offset = self._header()
        if not shape:
            raise SourceFormatError(f"{self.values}: a single number (0-d array) has no samples")
        if not is_shape(shape):
            raise SourceFormatError(
                f"{self.values}: its header says an array of the shape {shape}: it is damaged, or has more than the "
                f"{MAX_DIMENSIONS} dimensions or the size that are supported"
            )
        dtype = self._dtype(stored)
        nbytes, needed = size_of(self.values), offset + math.prod(shape) * stored.itemsize
        if nbytes != needed:
            raise SourceFormatError(
                f"{self.values}: {nbytes} bytes, but its header says {dtype} of the shape {shape}, which is {needed} "
                "bytes: it is truncated, or holds more than one array"
            )
        piece = self._piece(shape, fortran and len(shape) > 1, stored, offset, dtype)
        return ShardPlan((ColumnPlan("values", ArrayPlan(dtype, shape, (piece,))),))

    def _header(self) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
        """Return (shape, whether in Fortran order, dtype as stored, where the values start)."""
        with self.values.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Python 2 wrote, or of what a damaged header is as Python
            try:
                version = np.lib.format.read_magic(file)
                if version == (1, 0):
                    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                elif version == (2, 0):
                    shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
                else:
                    raise ValueError(f"version {version[0]}.{version[1]} is not supported")
                if bool in map(type, shape):
                    raise ValueError(f"shape {shape} has a bool")
            except OSError:
                raise
            except Exception as error:  # numpy evaluates the header as Python, and passes on what that raises
                raise SourceFormatError(f"{self.values}: not a readable .npy header: {error!r}") from error
            return shape, fortran, dtype, file.tell()

    def _dtype(self, stored: np.dtype[np.generic]) -> str:
        if stored.hasobject:
            raise SourceFormatError(
                f"{self.values}: an object array is a pickle, which is never loaded, since that runs code: "
                "save the samples as one numeric array"
            )
        if stored.names is not None:
            raise SourceFormatError(
                f"{self.values}: a structured array ({', '.join(stored.names)}) is not supported: save one field"
            )
        if stored.name not in DTYPES:
            raise SourceFormatError(f"{self.values}: an array of {stored} is not supported: save it as numbers")
        return stored.name

    def _piece(
        self, shape: tuple[int, ...], fortran: bool, stored: np.dtype[np.generic], offset: int, dtype: str
    ) -> Piece:
        swapped = stored != DTYPES[dtype]
        nbytes = math.prod(shape) * stored.itemsize
        if fortran:
            columns = math.prod(shape[1:])
            if nbytes > FORTRAN_WHOLE_NBYTES and columns > FORTRAN_MAX_COLUMNS:
                raise SourceFormatError(
                    f"{self.values}: an array in Fortran order with {columns} numbers in a row is not supported (up to "
                    f"{FORTRAN_MAX_COLUMNS} are): save numpy.ascontiguousarray of it"
                )
            return FortranRows(self.values, offset, nbytes, dtype, shape, swapped)
        if swapped:
            return SwappedSpan(self.values, offset, nbytes, stored.itemsize // (2 if stored.kind == "c" else 1))
        return FileSpan(self.values, offset, nbytes)
