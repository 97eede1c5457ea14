"""safetensors files: tensors with as many rows are columns; `values` and `offsets` are one ragged column.

Layout after https://github.com/huggingface/safetensors: a u64 of the header's size, the header in JSON, the tensors.
numpy has no bfloat16: such values are widened to float32, which holds them exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmserve_client.chunks import Chunk, ragged, rows
from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import is_shape

from .base import DecodedSource, SourceOptions, check_columns
from .files import read_exactly, size_of
from .in_place import located
from .npz import listed, rows_per_chunk

__all__ = ["SafetensorsFile"]

MAX_HEADER_NBYTES: Final = 100 << 20
DTYPE_BY_NAME: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return its rows `[start, stop)`."""
        stored = "uint16" if self.dtype == "bfloat16" else self.dtype
        found = np.empty((stop - start, *self.shape[1:]), np.dtype(stored).newbyteorder("<"))
        read_exactly(self.path, self.offset + start * self.row_nbytes, found.reshape(-1).view(np.uint8))
        if self.dtype == "bfloat16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found

    def view(self, content: NDArray[np.uint8], start: int, stop: int) -> NDArray[Any]:
        """Return the same as a view of the file's content, if its rows can be used as they are stored."""
        if self.dtype == "bfloat16":
            return self.read(start, stop)
        stored = content[self.offset + start * self.row_nbytes : self.offset + stop * self.row_nbytes]
        return stored.view(np.dtype(self.dtype).newbyteorder("<")).reshape(stop - start, *self.shape[1:])


_Read: TypeAlias = Callable[[_Tensor, int, int], NDArray[Any]]
"""Returns some rows of a tensor."""


@dataclass(frozen=True)
class SafetensorsFile(DecodedSource):
    """One .safetensors file."""

    suffixes = (".safetensors",)
    format = "safetensors"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if a header of its size could start it."""
        fits = 8 + int.from_bytes(head[:8], "little") <= size_of(path)
        return cls(path) if head[8:9] == b"{" and (fits or path.suffix in cls.suffixes) else None

    def parts(self) -> list[Any]:
        """Return the ranges of rows."""
        tensors = self._tensors()
        if _is_ragged(tensors):
            return [None]
        counts = {tensor.shape[0] for tensor in tensors.values() if tensor.shape}
        step = 8 * rows_per_chunk(sum(tensor.row_nbytes for tensor in tensors.values()))
        return [[start, start + step] for start in range(0, max(1, max(counts, default=0)), step)]

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows in the range, as views of the mapped file, all but bfloat16."""
        content = np.memmap(self.values, mode="r")
        for found in self._rows(part, columns, lambda tensor, start, stop: tensor.view(content, start, stop)):
            yield {name: located(chunk, content.ctypes.data, content.nbytes) for name, chunk in found.items()}

    locate = decode

    def _rows(self, part: Any, columns: tuple[str, ...] | None, read: _Read) -> Iterator[dict[str, Chunk]]:
        tensors = self._tensors()
        if _is_ragged(tensors):
            yield from self._ragged(tensors["values"], tensors["offsets"], read)
            return
        names = list(tensors) if columns is None else list(columns)
        check_columns(names, list(tensors), self.values)
        chosen = {name: tensors[name] for name in names}
        for name, tensor in chosen.items():
            if not tensor.shape:
                raise SourceFormatError(f"{self.values}: {name!r} is a single number: leave it out by --columns")
        counts = {name: tensor.shape[0] for name, tensor in chosen.items()}
        if len(set(counts.values())) > 1:
            raise SourceFormatError(
                f"{self.values}: its tensors differ in length ({listed(counts)}): choose some by --columns"
            )
        count = next(iter(counts.values()))
        step = rows_per_chunk(sum(tensor.row_nbytes for tensor in chosen.values()))
        start, stop = part[0], min(part[1], count)
        for first in range(start, max(stop, start + 1), step):
            last = max(first, min(first + step, stop))
            yield {name: rows(read(tensor, first, last)) for name, tensor in chosen.items()}

    def _ragged(self, values: _Tensor, offsets: _Tensor, read: _Read) -> Iterator[dict[str, Chunk]]:
        bounds = offsets.read(0, offsets.shape[0]).astype(np.int64)
        lengths = np.diff(bounds)
        if bounds[0] != 0 or bounds[-1] != values.shape[0] or (lengths < 0).any():
            raise SourceFormatError(
                f"{self.values}: offsets must rise from 0 to the {values.shape[0]} values: they are damaged"
            )
        step = rows_per_chunk(values.itemsize)
        first = 0
        while first < len(lengths) or first == 0:
            last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + step, "right")) - 1)
            last = min(last, len(lengths))
            yield {"values": ragged(read(values, int(bounds[first]), int(bounds[last])), lengths[first:last])}
            first = max(last, 1)

    def _tensors(self) -> dict[str, _Tensor]:
        """Return the tensors, in the order in which they lie, each checked to be within the file."""
        nbytes = size_of(self.values)
        head = np.empty(8, np.uint8)
        read_exactly(self.values, 0, head)
        header_nbytes = int(head.view("<u8")[0])
        if header_nbytes > min(MAX_HEADER_NBYTES, nbytes - 8):
            raise SourceFormatError(
                f"{self.values}: {nbytes} bytes, but its header is said to have {header_nbytes}: it is truncated"
            )
        text = np.empty(header_nbytes, np.uint8)
        read_exactly(self.values, 8, text)
        try:
            header = json.loads(text.tobytes())
            header.pop("__metadata__", None)
            found = sorted(
                (entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceFormatError(f"{self.values}: its header is damaged: {error!r}") from error
        tensors = {}
        end = 0
        for span, name, dtype, shape in found:
            tensors[name] = self._tensor(name, dtype, shape, span, end, 8 + header_nbytes)
            end = span[1]
        if 8 + header_nbytes + end != nbytes:
            raise SourceFormatError(
                f"{self.values}: {nbytes} bytes, but its header says {8 + header_nbytes + end}: it is truncated"
            )
        if not tensors:
            raise SourceFormatError(f"{self.values}: there are no tensors in it")
        return tensors

    def _tensor(self, name: str, dtype: Any, shape: Any, span: Any, end: int, data: int) -> _Tensor:
        if dtype not in DTYPE_BY_NAME:
            raise SourceFormatError(f"{self.values}: {name!r} is of {dtype!r}, which is not supported")
        if not all(type(number) is int for number in (*shape, *span)) or not is_shape(shape):
            raise SourceFormatError(f"{self.values}: {name!r} has the shape {shape} at {span}: the header is damaged")
        tensor = _Tensor(self.values, data + span[0], DTYPE_BY_NAME[dtype], shape)
        if span[0] != end or span[1] - span[0] != math.prod(shape) * tensor.itemsize:
            raise SourceFormatError(
                f"{self.values}: {name!r}, {dtype} of shape {shape}, is said to be at {span} of the data, after {end}: "
                "the header is damaged"
            )
        return tensor


def _is_ragged(tensors: dict[str, _Tensor]) -> bool:
    """Return whether they are the values and the n+1 offsets of a ragged column."""
    if tensors.keys() != {"values", "offsets"}:
        return False
    values, offsets = tensors["values"], tensors["offsets"]
    return len(values.shape) == 1 and len(offsets.shape) == 1 and offsets.dtype in ("int64", "int32", "uint64")
