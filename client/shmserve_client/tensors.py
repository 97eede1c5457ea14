"""From the numpy view of a sample to what training gets: which type, whose memory, one value or a dict of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import ConfigError, SampleValueError, SegmentFormatError
from .layout import DTYPES, Column
from .objects import unpack_object
from .samples import Int64s, Samples

__all__ = [
    "DtypeOption",
    "Limits",
    "OpenColumn",
    "Transform",
    "check_dtype",
    "gathered_dtype",
    "numpy_dtype",
    "remote_reader",
    "shared_reader",
    "tensor_maker",
    "value_limits",
    "value_maker",
]

DtypeOption: TypeAlias = "torch.dtype | Literal['stored'] | None"
Transform: TypeAlias = Callable[[Any], Any]
Maker: TypeAlias = Callable[[NDArray[Any], int], Any]
"""Makes what training gets, of the view of a sample and of its index, which is for the error message alone."""

_WITHOUT_ARITHMETIC: Final = frozenset(map(np.dtype, ("uint16", "uint32", "uint64")))
"""torch can hold these, and do next to nothing with them."""


def value_maker(column: Column, dtype: DtypeOption, *, private: bool) -> Maker:
    """Return what turns views of a column's samples into values: tensors, or bytes, strings and objects, by its kind.

    Those other than tensors are copies always, and `dtype` does not matter to them. Raises ConfigError as
    `tensor_maker`; what it returns raises SegmentFormatError where the bytes are not what the column says.
    """
    check_dtype(dtype)
    match column.kind:
        case "bytes":
            return lambda view, index: view.tobytes()
        case "text":
            return partial(_text, column.name)
        case "object":
            return partial(_object, column.name)
    return tensor_maker(DTYPES[column.values.dtype], dtype, private=private)


def _text(name: str, view: NDArray[Any], index: int) -> str:
    try:
        return str(view.data, "utf-8")
    except UnicodeDecodeError as error:
        raise SegmentFormatError(f"sample {index} of column {name!r} is not UTF-8: {error}") from error


def _object(name: str, view: NDArray[Any], index: int) -> Any:
    try:
        return unpack_object(view.data)
    except SegmentFormatError as error:
        raise SegmentFormatError(f"sample {index} of column {name!r}: {error}") from error


def tensor_maker(stored: np.dtype[Any], dtype: DtypeOption, *, private: bool) -> Maker:
    """Return what turns views of dtype `stored` into tensors.

    Args:
        stored: the column's dtype.
        dtype: the tensor's dtype. None is the stored one where torch can compute with it, else int64; "stored" is the
            stored one in any case.
        private: whether each tensor has memory of its own. Else it aliases the view if its dtype is the stored one.

    Raises:
        ConfigError: `dtype` is none of these, nothing that torch converts to, or real where the stored one is complex.
    """
    check_dtype(dtype)
    if dtype == "stored":
        return _same_dtype(private)
    if dtype is None:
        return _converting(stored, np.dtype(np.int64)) if stored in _WITHOUT_ARITHMETIC else _same_dtype(private)
    if stored.kind == "c" and not dtype.is_complex:
        raise ConfigError(f"dtype {dtype}: the data is {stored.name}, which has no such value")
    target = numpy_dtype(dtype)
    if target is None:
        make = _converting_in_torch(gathered_dtype(stored, dtype), dtype)
        try:
            make(np.zeros(1, stored), 0)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"dtype {dtype}: torch does not convert {stored.name} to it") from error
        return make
    return _same_dtype(private) if target == stored else _converting(stored, target)


def check_dtype(dtype: object) -> None:
    """Raise ConfigError unless `dtype` is a DtypeOption."""
    if not (dtype is None or isinstance(dtype, torch.dtype) or (isinstance(dtype, str) and dtype == "stored")):
        raise ConfigError(
            f"dtype {dtype!r}: give None, 'stored', or a torch dtype such as torch.int64, for the tensors; what files "
            "without a header hold is stored_dtype= of from_path, and --dtype of the daemon"
        )


def gathered_dtype(stored: np.dtype[Any], dtype: torch.dtype) -> np.dtype[Any]:
    """Return what numpy converts to: `dtype`, or, where numpy lacks it, what torch then makes `dtype` of."""
    return numpy_dtype(dtype) or np.dtype(np.complex64 if stored.kind == "c" else np.float32)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return numpy's name for it, or None for what numpy lacks, such as bfloat16."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except (TypeError, RuntimeError):
        return None


def _same_dtype(private: bool) -> Maker:
    # Sample by sample, since a slice of one large tensor takes the whole storage along when a worker sends it.
    from_numpy = torch.from_numpy
    if private:
        return lambda view, index: from_numpy(view.copy())
    return lambda view, index: from_numpy(view)


def _converting(stored: np.dtype[Any], target: np.dtype[Any]) -> Maker:
    from_numpy = torch.from_numpy
    limits = value_limits(stored, target)
    if limits is None:
        return lambda view, index: from_numpy(view.astype(target))

    def make(view: NDArray[Any], index: int) -> torch.Tensor:
        if not limits.hold(view):
            raise limits.error(view, index)
        return from_numpy(view.astype(target))

    return make


def _converting_in_torch(intermediate: np.dtype[Any], dtype: torch.dtype) -> Maker:
    from_numpy = torch.from_numpy
    return lambda view, index: from_numpy(view.astype(intermediate)).to(dtype)


@dataclass(frozen=True)
class Limits:
    """The values that an integer dtype can hold: from `least` to `most`, both included."""

    least: int
    most: int
    name: str

    def hold(self, values: NDArray[Any]) -> bool:
        """Return whether all of `values` are among them; NaN is not."""
        return not values.size or (self.least <= values.min().item() and values.max().item() < self.most + 1)

    def error(self, view: NDArray[Any], index: int) -> SampleValueError:
        """Return the error for sample `index`, which they do not hold."""
        values = view.reshape(-1).tolist()
        position = next(i for i, value in enumerate(values) if not self.least <= value < self.most + 1)
        return SampleValueError(
            f"sample {index} holds {values[position]} at position {position}, which does not fit {self.name}: "
            'dtype="stored" gives the values as they are'
        )


def value_limits(stored: np.dtype[Any], target: np.dtype[Any]) -> Limits | None:
    """Return what limits a conversion to `target`, or None where any value of `stored` can be converted."""
    if target.kind not in "iu" or np.can_cast(stored, target, "safe"):
        return None
    info = np.iinfo(target)
    return Limits(int(info.min), int(info.max), target.name)


@dataclass(frozen=True)
class OpenColumn:
    """A column whose samples become what training gets."""

    samples: Samples
    make: Maker


def shared_reader(columns: Mapping[str, OpenColumn], transform: Transform | None) -> Callable[[int], Any]:
    """Return what gives sample i, its place read from the segment: a value, or a dict of them, transformed."""
    readers = {name: _reader(column) for name, column in columns.items()}
    if len(readers) == 1:
        (read,) = readers.values()
    else:

        def read(position: int) -> Any:
            return {name: read_one(position) for name, read_one in readers.items()}

    if transform is None:
        return read
    return lambda position: transform(read(position))


def _reader(column: OpenColumn) -> Callable[[int], Any]:
    view, make = column.samples.read, column.make
    return lambda position: make(view(position), position)


def remote_reader(
    columns: Mapping[str, OpenColumn],
    transform: Transform | None,
    extents: Callable[[Samples, Int64s], tuple[Int64s, Int64s]],
) -> Callable[[Int64s], list[Any]]:
    """Return what gives the list of the samples at positions, their places told by `extents`."""

    def read_column(column: OpenColumn, positions: Int64s) -> list[Any]:
        offsets, nbytes = extents(column.samples, positions)
        places = zip(positions.tolist(), offsets.tolist(), nbytes.tolist(), strict=True)
        return [column.make(column.samples.view_at(*place), place[0]) for place in places]

    def read_many(positions: Int64s) -> list[Any]:
        values = {name: read_column(column, positions) for name, column in columns.items()}
        samples: list[Any]
        if len(values) == 1:
            (samples,) = values.values()
        else:
            samples = [dict(zip(values, sample, strict=True)) for sample in zip(*values.values(), strict=True)]
        return samples if transform is None else list(map(transform, samples))

    return read_many
