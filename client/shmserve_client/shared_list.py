"""`SharedList`: Python objects in shared memory, as the list that they were. Neither torch nor a daemon is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from .chunks import python_maker
from .indices import Indexed
from .layout import Column
from .objects import unpack_object
from .samples import open_samples
from .segment import Segment

__all__ = ["SharedList"]


class _Objects(Indexed):
    """The positions that indices stand for."""

    noun = "objects"

    def __init__(self, count: int) -> None:
        self.count = count


class SharedList(Sequence[Any]):
    """A list of the objects that were published: each access makes the object anew, equal to the one that was given.

    Arrays and tensors are views of the shared memory; what is written to one in place is seen by this process alone.
    Pickles hold the place and not the objects, so that DataLoader workers cost nothing; they attach when first used.
    """

    def __init__(self, name: str, path: str, nonce: bytes) -> None:
        """Use `publish`. Raises as `Segment.attach`."""
        self.name = name
        self._path = path
        self._nonce = nonce
        self._open()

    def _open(self) -> None:
        self.segment = Segment.attach(self._path, self._nonce)
        description = self.segment.description
        self._length = description.num_samples
        self._indices = _Objects(self._length)
        readers = {column.name: _reader(self.segment, column) for column in description.columns}
        self._read: Callable[[int], Any]
        if description.table:
            pairs = tuple(readers.items())
            self._read = lambda index: {name: read(index) for name, read in pairs}
        else:
            (self._read,) = readers.values()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return the object, or for a slice a list of them; indices are as a list's.

        Raises:
            SampleIndexError: there is none of that index.
            SampleTypeError: it is not an integer or a slice.
            SegmentFormatError: the segment is damaged there.
        """
        if index.__class__ is int and 0 <= index < self._length:
            return self._read(index)
        if isinstance(index, slice):
            return [self._read(position) for position in self._indices.span(index)]
        return self._read(self._indices.position(index))

    def __getitems__(self, indices: Any) -> list[Any]:
        """Return the list of these objects, as a DataLoader asks for a batch. Raises as `__getitem__`."""
        read = self._read
        return [read(position) for position in self._indices.positions(indices).tolist()]

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(self._length))

    def __repr__(self) -> str:
        return f"SharedList({self.name!r}, {self._length} objects)"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str, str, bytes]]:
        return type(self), (self.name, self._path, self._nonce)


def _reader(segment: Segment, column: Column) -> Callable[[int], Any]:
    """Return what gives object i of the column. It must not hold the list, which holds it: see `samples`."""
    name = column.name
    if column.kind == "tensor" and column.python == "number" and column.offsets is None:
        values = segment.array(column.values)
        numbers = values.data  # a memoryview gives Python numbers, several times faster than the array
        return lambda index: numbers[index]
    samples = open_samples(segment.description, segment.array, column=name)
    match column.kind:
        case "text":
            return _bytes_reader(segment, column, samples.read, lambda data: str(data, "utf-8"))
        case "bytes":
            return _bytes_reader(segment, column, samples.read, bytes)
        case "object":
            return _bytes_reader(segment, column, samples.read, unpack_object)
    view, make = samples.read, python_maker(column.python)
    return lambda index: make(view(index))


def _bytes_reader(
    segment: Segment, column: Column, check: Callable[[int], Any], make: Callable[[memoryview], Any]
) -> Callable[[int], Any]:
    """Return what makes object i of its bytes, without an array in between, which would take as long again."""
    assert column.offsets is not None
    values, offsets = segment.array(column.values).data, segment.array(column.offsets).data
    nbytes = len(values)

    def read(index: int) -> Any:
        start, stop = offsets[index], offsets[index + 1]
        if 0 <= start <= stop <= nbytes:
            return make(values[start:stop])
        return check(index)  # which says what is wrong

    return read
