"""What sample i of a column is: which items of the segment, and in which shape. Client and daemon both ask here.

Reading one sample is the hot path of training, so each kind of column has one function for it that does nothing else.
The offsets in a segment are not trusted: they are checked when they are used, since checking all of them at the start
would read gigabytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import BlockSizeError, ConfigError, ProtocolError, SegmentFormatError
from .indices import Indexed, Int64s
from .layout import MAX_DIMENSIONS, Array, Column, Description, is_shape

__all__ = ["Int64s", "Samples", "find_column", "open_samples"]

ArrayReader: TypeAlias = Callable[[Array], NDArray[Any]]
"""Gives the numpy view of an array of the segment."""
SampleReader: TypeAlias = Callable[[int], NDArray[Any]]
"""Gives sample i as a view; its caller has checked that 0 <= i < count. It must not hold the Samples that holds it: a
cycle would keep the segment attached until the next garbage collection."""


class Samples(Indexed, ABC):
    """The samples of one column, indexed like a list of numpy views; the views alias the segment and keep it mapped."""

    shape: tuple[int, ...] | None = None
    """The shape that all samples have where it belongs to the column; None where their first axis can be chosen."""

    def __init__(self, column: Column, values: NDArray[Any], count: int, read: SampleReader) -> None:
        """Hold `count` samples among the 1-d `values` of `column`."""
        self.column: Final = column
        self.values: Final = values
        self.count = count
        self.read: Final = read

    @abstractmethod
    def _bounds(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        """Return the half-open item ranges (starts, stops) of the samples, unchecked."""

    @abstractmethod
    def first_axes(self, positions: Int64s, counts: Int64s) -> tuple[Int64s, tuple[int, ...]]:
        """Return (lengths, others) of samples that have so many items: their first extents, and all other extents.

        Raises:
            ConfigError: the other extents differ between these samples, or one of them has no axis.
            SegmentFormatError: such a sample does not have that many items.
        """

    @abstractmethod
    def _shaped(self, index: int, items: NDArray[Any]) -> NDArray[Any]:
        """Return the 1-d `items` of sample `index` in its shape. Raises SegmentFormatError where they do not fit it."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        """Return a view of the sample; for a slice, a list of views. Indices are as a list's."""
        if index.__class__ is int and 0 <= index < self.count:
            return self.read(index)
        if isinstance(index, slice):
            return [self.read(i) for i in self.span(index)]
        return self.read(self.position(index))

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self.read, range(self.count))

    def extents(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return (offsets, nbytes) of the samples in bytes, each int64; offsets count from where `Array.offset` does.

        Args:
            positions: 1-d, each in [0, count): negative ones are not counted from the end here.

        Raises:
            SampleIndexError: one of them is not.
            SegmentFormatError: the segment's own offsets are damaged there.
        """
        outside = positions.view(np.uint64) >= self.count  # negative ones are the largest
        if outside.any():
            raise self._out_of_range(int(positions[outside.argmax()]))
        starts, stops = self.ranges(positions)
        itemsize = self.values.itemsize
        return self.column.values.offset + starts * itemsize, (stops - starts) * itemsize

    def ranges(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return (starts, stops) of the samples, half-open ranges of `values`, each int64.

        Args:
            positions: 1-d, as `positions` returns them.

        Raises:
            SegmentFormatError: the segment's own offsets are damaged there.
        """
        starts, stops = self._bounds(positions)
        # As unsigned numbers: one that is negative is larger than any other, and than the end.
        unsigned_stops = stops.view(np.uint64)
        damaged = (starts.view(np.uint64) > unsigned_stops) | (unsigned_stops > len(self.values))
        if damaged.any():
            first = damaged.argmax()
            raise _damaged(self.column.name, int(positions[first]), int(starts[first]), int(stops[first]), self.values)
        return starts, stops

    def check_extents(self, positions: Int64s, offsets: Int64s, nbytes: Int64s) -> None:
        """Raise ProtocolError unless what a daemon says of each sample lies within the column, on item boundaries."""
        starts = offsets - self.column.values.offset
        end, itemsize = self.values.nbytes, self.values.itemsize
        # A sum that overflows is of something beyond the end already.
        outside = (starts < 0) | (starts > end) | (nbytes < 0) | (nbytes > end) | (starts + nbytes > end)
        wrong = np.flatnonzero(outside | (starts % itemsize != 0) | (nbytes % itemsize != 0))
        if wrong.size:
            first = wrong[0]
            raise ProtocolError(
                f"the daemon says that sample {positions[first]} is {nbytes[first]} bytes at {offsets[first]}, "
                f"which is not within column {self.column.name!r}"
            )

    def view_at(self, position: int, offset: int, nbytes: int) -> NDArray[Any]:
        """Return the sample as a view of the `nbytes` bytes at `offset`, which `check_extents` has accepted.

        Raises:
            SegmentFormatError: such a sample does not have that many bytes.
        """
        start = (offset - self.column.values.offset) // self.values.itemsize
        return self._shaped(position, self.values[start : start + nbytes // self.values.itemsize])


class _Ragged(Samples):
    """Sample i is `values[starts[i]:stops[i]]`; where none are scattered, each starts where the one before stops."""

    def __init__(self, column: Column, array: ArrayReader, offsets: Array) -> None:
        self.offsets: Int64s = array(offsets)
        self.starts, self.stops = _starts_and_stops(column, array, self.offsets)
        values = array(column.values)
        super().__init__(column, values, len(self.starts), _ragged_reader(column.name, values, self.starts, self.stops))

    def _bounds(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        return self.starts[indices], self.stops[indices]

    def first_axes(self, positions: Int64s, counts: Int64s) -> tuple[Int64s, tuple[int, ...]]:
        return counts, ()

    def _shaped(self, index: int, items: NDArray[Any]) -> NDArray[Any]:
        return items


class _RaggedNd(Samples):
    """The same, where sample i has the shape `shapes[shape_offsets[i]:shape_offsets[i + 1]]`."""

    def __init__(self, column: Column, array: ArrayReader, offsets: Array, shapes: Array, shape_offsets: Array) -> None:
        self.offsets: Int64s = array(offsets)
        self.starts, self.stops = _starts_and_stops(column, array, self.offsets)
        self.shapes: Int64s = array(shapes)
        self.shape_offsets: Int64s = array(shape_offsets)
        values = array(column.values)
        read = _ragged_nd_reader(column.name, values, self.starts, self.stops, self.shapes, self.shape_offsets)
        super().__init__(column, values, len(self.starts), read)

    def _bounds(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        return self.starts[indices], self.stops[indices]

    def first_axes(self, positions: Int64s, counts: Int64s) -> tuple[Int64s, tuple[int, ...]]:
        name, first = self.column.name, 0
        lengths = np.empty_like(counts)
        others: tuple[int, ...] = ()
        for number, (index, count) in enumerate(zip(positions.tolist(), counts.tolist(), strict=True)):
            shape = _shape_of(name, index, count, self.shapes, self.shape_offsets)
            if not shape:
                raise ConfigError(f"sample {index} of column {name!r} is a scalar: a batch pads samples with an axis")
            if number == 0:
                first, others = index, tuple(shape[1:])
            if tuple(shape[1:]) != others:
                raise ConfigError(
                    f"samples {first} and {index} of column {name!r} have the extents {list(others)} and {shape[1:]} "
                    "behind the first: a batch pads the first axis only, so take them one by one"
                )
            lengths[number] = shape[0]
        return lengths, others

    def _shaped(self, index: int, items: NDArray[Any]) -> NDArray[Any]:
        return items.reshape(_shape_of(self.column.name, index, len(items), self.shapes, self.shape_offsets))


class _Fixed(Samples):
    """Sample i is `values[i]`; all have one shape, which may be that of a scalar."""

    def __init__(self, column: Column, array: ArrayReader) -> None:
        rows = array(column.values)
        self.shape: tuple[int, ...] = rows.shape[1:]
        super().__init__(column, rows.reshape(-1), len(rows), _fixed_reader(rows))

    def _bounds(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        length = math.prod(self.shape)
        return indices * length, (indices + 1) * length

    def first_axes(self, positions: Int64s, counts: Int64s) -> tuple[Int64s, tuple[int, ...]]:
        _expect_shape(self.column.name, positions, counts, self.shape)
        return np.full_like(counts, self.shape[0] if self.shape else 1), self.shape[1:]

    def _shaped(self, index: int, items: NDArray[Any]) -> NDArray[Any]:
        if math.prod(self.shape) != len(items):
            raise _misshapen(self.column.name, index, len(items), self.shape)
        return items.reshape(self.shape)


class _Windows(Samples):
    """Sample i is the items `[i * stride, i * stride + block_size)` of all the column's items, joined."""

    noun = "windows"

    def __init__(self, column: Column, array: ArrayReader, block_size: int, stride: int) -> None:
        self._block_size, self._stride = block_size, stride
        values = array(column.values).reshape(-1)
        count = max(0, (len(values) - block_size) // stride + 1)
        super().__init__(column, values, count, _window_reader(values, block_size, stride))

    def _bounds(self, indices: Int64s) -> tuple[Int64s, Int64s]:
        starts = indices * self._stride
        return starts, starts + self._block_size

    def first_axes(self, positions: Int64s, counts: Int64s) -> tuple[Int64s, tuple[int, ...]]:
        _expect_shape(self.column.name, positions, counts, (self._block_size,))
        return counts, ()

    def _shaped(self, index: int, items: NDArray[Any]) -> NDArray[Any]:
        if len(items) != self._block_size:
            raise _misshapen(self.column.name, index, len(items), (self._block_size,))
        return items

    def _remark(self) -> str:
        if self.count:
            return f" of {self._block_size} items"
        return f", since the data has {len(self.values)} items and block_size is {self._block_size}"


def _starts_and_stops(column: Column, array: ArrayReader, offsets: Int64s) -> tuple[Int64s, Int64s]:
    return (offsets[:-1], offsets[1:]) if column.stops is None else (offsets, array(column.stops))


def _ragged_reader(name: str, values: NDArray[Any], starts: Int64s, stops: Int64s) -> SampleReader:
    total = len(values)
    start_of, stop_of = starts.data, stops.data  # memoryviews give Python integers, several times faster than arrays

    def read(index: int) -> NDArray[Any]:
        start, stop = start_of[index], stop_of[index]
        if 0 <= start <= stop <= total:
            return values[start:stop]
        raise _damaged(name, index, start, stop, values)

    return read


def _ragged_nd_reader(
    name: str, values: NDArray[Any], starts: Int64s, stops: Int64s, shapes: Int64s, shape_offsets: Int64s
) -> SampleReader:
    read_flat = _ragged_reader(name, values, starts, stops)

    def read(index: int) -> NDArray[Any]:
        items = read_flat(index)
        return items.reshape(_shape_of(name, index, len(items), shapes, shape_offsets))

    return read


def _fixed_reader(rows: NDArray[Any]) -> SampleReader:
    def read(index: int) -> NDArray[Any]:
        row: NDArray[Any] = rows[index, ...]  # without the ellipsis a scalar would be a copy, and no array
        return row

    return read


def _window_reader(values: NDArray[Any], block_size: int, stride: int) -> SampleReader:
    def read(index: int) -> NDArray[Any]:
        start = index * stride
        return values[start : start + block_size]

    return read


def _shape_of(name: str, index: int, length: int, shapes: Int64s, shape_offsets: Int64s) -> list[int]:
    """Return the shape that sample `index`, of `length` items, has in an N-d ragged column."""
    start, stop = shape_offsets[index : index + 2].tolist()
    if not 0 <= start <= stop <= len(shapes) or stop - start > MAX_DIMENSIONS:
        raise _misshapen(name, index, length, f"[{start}, {stop}) of {len(shapes)} extents")
    shape: list[int] = shapes[start:stop].tolist()
    if not is_shape(shape) or math.prod(shape) != length:
        raise _misshapen(name, index, length, shape)
    return shape


def _expect_shape(name: str, positions: Int64s, counts: Int64s, shape: tuple[int, ...]) -> None:
    wrong = np.flatnonzero(counts != math.prod(shape))
    if wrong.size:
        raise _misshapen(name, int(positions[wrong[0]]), int(counts[wrong[0]]), shape)


def _damaged(name: str, index: int, start: int, stop: int, values: NDArray[Any]) -> SegmentFormatError:
    return SegmentFormatError(
        f"segment is damaged: sample {index} of column {name!r} is [{start}, {stop}) of {len(values)} items"
    )


def _misshapen(name: str, index: int, length: int, shape: object) -> SegmentFormatError:
    return SegmentFormatError(f"sample {index} of column {name!r} has {length} items, but its shape is {shape}")


def find_column(description: Description, name: str | None) -> Column:
    """Return the column called `name`, or the only one.

    Raises:
        ConfigError: there is no such column, or several and none was named.
    """
    columns = description.columns
    found = columns if name is None else [column for column in columns if column.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(column.name) for column in columns)
    wanted = "several columns and none was named" if name is None else f"no column {name!r}"
    raise ConfigError(f"dataset {description.name!r} has {wanted}: it has {names}")


def open_samples(
    description: Description, array: ArrayReader, *, column: str | None = None, block_size: int = 0, stride: int = 0
) -> Samples:
    """Return the samples of one column, in time that does not depend on how many there are.

    Args:
        description: what the segment says of itself, checked by `layout.decode_description`.
        array: gives the view of one of its arrays.
        column: the column's name; may be None where there is only one.
        block_size: items of each window over the joined values; 0 for the samples as they are stored.
        stride: items from one window to the next; 0 for block_size.

    Raises:
        BlockSizeError: block_size or stride is negative, a stride has no block_size, or a stream has no block_size.
        ConfigError: there is no such column.
    """
    chosen = find_column(description, column)
    if block_size < 0 or stride < 0:
        raise BlockSizeError(f"block_size {block_size} and stride {stride} must be positive")
    if block_size and chosen.kind != "tensor":
        raise BlockSizeError(
            f"block_size {block_size}: column {chosen.name!r} is of the kind {chosen.kind}, not tokens"
        )
    if block_size and chosen.stops is not None:
        raise BlockSizeError(
            f"block_size {block_size}: the samples of column {chosen.name!r} do not follow each other in the files "
            "where they are mapped (--mode map): load it, or write it as one file by `shmserve build`"
        )
    if block_size:
        return _Windows(chosen, array, block_size, stride or block_size)
    if stride:
        raise BlockSizeError(f"stride {stride} without block_size: give both, or neither for the stored samples")
    if description.stream:
        raise BlockSizeError(
            f"dataset {description.name!r} is a stream of {math.prod(chosen.values.shape)} items without samples of "
            "its own: give a block_size (--block-size)"
        )
    if chosen.offsets is None:
        return _Fixed(chosen, array)
    if chosen.shapes is None or chosen.shape_offsets is None:
        return _Ragged(chosen, array, chosen.offsets)
    return _RaggedNd(chosen, array, chosen.offsets, chosen.shapes, chosen.shape_offsets)
