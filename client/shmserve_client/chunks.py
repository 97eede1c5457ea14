"""Chunks: some consecutive samples of one column, in memory, on their way into a segment.

Python values become the tightest column that gives the same values back: numbers, text, bytes, arrays, lists of
numbers; and msgpack objects where there is none. Chunks of one column that turned out differently are converted to the
same form afterwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import ObjectError
from .layout import DTYPES
from .objects import as_array, pack, unpack_object

__all__ = [
    "Chunk",
    "Form",
    "blobs",
    "common_form",
    "convert",
    "encode",
    "objects",
    "python_maker",
    "ragged",
    "rows",
    "texts",
]

_MAX_EXACT_FLOAT: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class Form:
    """What chunks must have in common to be one column."""

    kind: str
    dtype: str
    row_shape: tuple[int, ...] | None
    """The shape that all samples have; None for ragged ones."""
    has_shapes: bool = False
    """Whether samples are ragged with a shape each, rather than 1-d."""
    python: str = ""
    """What the samples of a tensor are in Python, as `layout.Column.python` has it."""
    is_empty: bool = field(default=False, compare=False)
    """Whether all samples are ragged tensors of no values, so that nothing tells their dtype."""
    fits_float: bool = field(default=True, compare=False)
    """Whether a float64 holds each of the values."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples of one column. Fixed-shape: `values` is (n, *shape). Ragged: `values` is 1-d, `lengths` int64 (n,).

    N-d ragged: `shapes` holds the extents of all samples, `dimensions`, int64 (n,), how many each has. A `kind` other
    than "tensor" is ragged uint8. `values` that stay in their file are a view of a mapping of it.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None = None
    shapes: NDArray[np.int64] | None = None
    dimensions: NDArray[np.int64] | None = None
    kind: str = "tensor"
    python: str = ""
    file_offset: int = -1
    """Where `values` start in their file, in bytes, if they stay there."""
    starts: NDArray[np.int64] | None = None
    """Where each sample starts in such values, int64 (n,), if they do not follow each other."""

    @property
    def count(self) -> int:
        """How many samples it has."""
        return len(self.values if self.lengths is None else self.lengths)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in a segment, about."""
        parts = (self.values, self.lengths, self.shapes, self.dimensions)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def form(self) -> Form:
        """What it is, without its samples."""
        row_shape = self.values.shape[1:] if self.lengths is None else None
        is_empty = self.kind == "tensor" and self.lengths is not None and not self.values.size
        form = Form(self.kind, self.values.dtype.name, row_shape, self.shapes is not None, self.python, is_empty)
        return replace(form, fits_float=self.fits_float)

    @property
    def fits_float(self) -> bool:
        """Whether a float64 holds each of the values."""
        values = self.values
        if values.dtype != np.int64 or not values.size:
            return True
        return bool(values.min() >= -_MAX_EXACT_FLOAT and values.max() <= _MAX_EXACT_FLOAT)

    def part(self, start: int, stop: int) -> Chunk:
        """Return its samples `[start, stop)`, as views."""
        if self.lengths is None:
            return replace(self, values=self.values[start:stop])
        first, last = self.lengths[:start].sum(), self.lengths[:stop].sum()
        part = replace(self, values=self.values[first:last], lengths=self.lengths[start:stop])
        if self.shapes is None or self.dimensions is None:
            return part
        first, last = self.dimensions[:start].sum(), self.dimensions[:stop].sum()
        return replace(part, shapes=self.shapes[first:last], dimensions=self.dimensions[start:stop])

    def samples(self) -> Iterator[Any]:
        """Yield each sample as the Python value that it was; of tensors that were none, as numbers and arrays."""
        if self.kind == "tensor" and self.python:
            yield from map(python_maker(self.python), self._views())
        else:
            yield from self._plain_samples()

    def _views(self) -> Iterator[NDArray[Any]]:
        """Yield each sample of a tensor as an array."""
        if self.lengths is None:
            for index in range(len(self.values)):
                yield self.values[index, ...]
            return
        shapes = None if self.shapes is None or self.dimensions is None else _cut(self.shapes, self.dimensions)
        for start, stop in pairwise([0, *np.cumsum(self.lengths).tolist()]):
            items = self.values[start:stop]
            yield items if shapes is None else items.reshape(next(shapes))

    def _plain_samples(self) -> Iterator[Any]:
        if self.kind == "tensor":
            yield from self.values.tolist() if self.lengths is None and self.values.ndim == 1 else self._views()
            return
        assert self.lengths is not None
        data = self.values.data
        for start, stop in pairwise([0, *np.cumsum(self.lengths).tolist()]):
            raw = bytes(data[start:stop])
            yield raw if self.kind == "bytes" else raw.decode() if self.kind == "text" else unpack_object(raw)


def python_maker(python: str) -> Callable[[NDArray[Any]], Any]:
    """Return what makes the Python value of a sample that `layout.Column.python` names, of the sample's array."""
    match python:
        case "number" | "list":
            return _to_python
        case "scalar":
            return _to_scalar
        case "tensor" if "torch" in sys.modules:
            from_numpy: Callable[[NDArray[Any]], Any] = sys.modules["torch"].from_numpy
            return from_numpy
    return _as_it_is


def _to_python(view: NDArray[Any]) -> Any:
    return view.tolist()


def _to_scalar(view: NDArray[Any]) -> Any:
    return view[()]


def _as_it_is(view: NDArray[Any]) -> Any:
    return view


def _cut(items: NDArray[np.int64], lengths: NDArray[np.int64]) -> Iterator[list[int]]:
    for start, stop in pairwise([0, *np.cumsum(lengths).tolist()]):
        yield items[start:stop].tolist()


def rows(values: NDArray[Any]) -> Chunk:
    """Return samples of one shape: `values` is (n, *shape), of a dtype that a segment holds."""
    return Chunk(np.ascontiguousarray(values))


def ragged(values: NDArray[Any], lengths: NDArray[np.int64], kind: str = "tensor") -> Chunk:
    """Return samples that follow each other in `values`, 1-d; `lengths` is in items."""
    return Chunk(np.ascontiguousarray(values), lengths, kind=kind)


def texts(values: Iterable[str]) -> Chunk:
    """Return strings. Raises ObjectError for half a surrogate pair, which UTF-8 lacks."""
    try:
        return _joined([value.encode() for value in values], "text")
    except UnicodeEncodeError as error:
        raise ObjectError(f"the string {error.object[:64]!r} has half a surrogate pair, which UTF-8 lacks") from error


def blobs(values: Sequence[bytes]) -> Chunk:
    """Return raw bytes."""
    return _joined(values, "bytes")


def objects(values: Iterable[Any], name: str = "", first: int = 0) -> Chunk:
    """Return any values that msgpack and its extensions hold.

    Args:
        values: the samples.
        name: the column's, for errors.
        first: the first one's index, for errors.

    Raises:
        ObjectError: a value that cannot be stored; the message has the path to it.
    """
    where = f"[{name!r}]" if name else ""
    return _joined([pack(value, f"[{index}]{where}") for index, value in enumerate(values, first)], "object")


def _joined(parts: Sequence[bytes], kind: str) -> Chunk:
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return Chunk(np.frombuffer(b"".join(parts), np.uint8), lengths, kind=kind)


def encode(values: Sequence[Any], name: str = "", first: int = 0) -> Chunk:
    """Return Python values as the tightest chunk that gives the same values back. Arguments and errors as `objects`."""
    types = set(map(type, values))
    if len(types) == 1:
        (only,) = types
        if only is bool:
            return Chunk(np.array(values, np.bool_), python="number")
        if only is float:
            return Chunk(np.array(values, np.float64), python="number")
        if only is int and min(values) >= -(1 << 63) and max(values) < 1 << 63:
            return Chunk(np.array(values, np.int64), python="number")
        if only is str:
            try:
                return texts(values)
            except ObjectError:
                return objects(values, name, first)  # which says where it is
        if only is bytes:
            return blobs(values)
        if only is list:
            flat = _flat_lists(values)
            if flat is not None:
                return flat
        elif as_array(values[0]) is not None:
            arrays = _arrays(values)
            if arrays is not None:
                return arrays
    return objects(values, name, first)


def _flat_lists(values: Sequence[list[Any]]) -> Chunk | None:
    """Return lists of numbers of one type; None for all other lists."""
    types = set(map(type, chain.from_iterable(values)))
    if types == {float}:
        dtype: Any = np.float64
    elif types == {bool}:
        dtype = np.bool_
    elif types <= {int}:
        dtype = np.int64
    else:
        return None
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    try:
        return Chunk(np.fromiter(chain.from_iterable(values), dtype, int(lengths.sum())), lengths, python="list")
    except OverflowError:  # beyond 64 bits
        return None


def _arrays(values: Sequence[Any]) -> Chunk | None:
    """Return arrays, numpy scalars or tensors of one dtype; None where they differ in it."""
    arrays = [as_array(value) for value in values]
    first = arrays[0]
    if first is None or any(array is None or array.dtype.name != first.dtype.name for array in arrays):
        return None
    python = "array" if type(values[0]) is np.ndarray else "scalar" if isinstance(values[0], np.generic) else "tensor"
    found = [array for array in arrays if array is not None]
    dtype = DTYPES[first.dtype.name]
    if all(array.shape == first.shape for array in found):
        return Chunk(np.stack(found).astype(dtype, copy=False), python=python)
    lengths = np.fromiter((array.size for array in found), np.int64, len(found))
    joined = np.concatenate([array.reshape(-1) for array in found]).astype(dtype, copy=False)
    if all(array.ndim == 1 for array in found):
        return Chunk(joined, lengths, python=python)
    shapes = np.array(list(chain.from_iterable(array.shape for array in found)), np.int64)
    dimensions = np.fromiter((array.ndim for array in found), np.int64, len(found))
    return Chunk(joined, lengths, shapes, dimensions, python=python)


def common_form(forms: Sequence[Form], *, numbers_widen: bool) -> Form:
    """Return the tightest form that holds chunks of these forms, of which there is at least one.

    Args:
        forms: those of chunks that have samples.
        numbers_widen: whether integers become floats where both occur, as a file's numbers may; else they become
            objects, which give back each as it was.
    """
    if empty := [form for form in forms if form.is_empty]:
        filled = [form for form in forms if not form.is_empty]
        forms = [*filled, *(replace(form, dtype=filled[0].dtype, is_empty=False) for form in empty if filled)] or empty
    if numbers_widen and len({form.python for form in forms}) > 1:
        forms = [replace(form, python="") for form in forms]
    first = forms[0]
    if all(form == first for form in forms):
        return first
    if all(form.kind == "tensor" and form.python == first.python for form in forms):
        names = {form.dtype for form in forms}
        shapes = {form.row_shape for form in forms}
        shape = first.row_shape if len(shapes) == 1 else None
        has_shapes = shape is None and any(f.has_shapes or len(f.row_shape or (1,)) != 1 for f in forms)
        if len(names) == 1 and (len(shapes) == 1 or () not in shapes):
            return Form("tensor", first.dtype, shape, has_shapes, first.python)
        fits = all(form.fits_float for form in forms)
        if numbers_widen and len(shapes) == 1 and names <= {"int64", "float64"} and fits:
            return Form("tensor", "float64", shape, has_shapes, first.python)
    return Form("object", "uint8", None)


def convert(chunk: Chunk, form: Form, name: str = "") -> Chunk:
    """Return the same samples in another form, one that `common_form` gave; `name` is the column's, for errors."""
    if chunk.form == form:
        return chunk
    if form.kind == "object":
        plain = chunk.kind == "tensor" and not chunk.python
        return objects((_to_python(each) for each in chunk._views()) if plain else chunk.samples(), name)
    values = chunk.values
    if values.dtype.name != form.dtype:
        values = values.astype(DTYPES[form.dtype])
    lengths, shapes, dimensions = chunk.lengths, chunk.shapes, chunk.dimensions
    if lengths is None and form.row_shape is None:
        row_shape = values.shape[1:]
        lengths = np.full(len(values), math.prod(row_shape), np.int64)
        shapes = np.tile(np.array(row_shape, np.int64), len(values))
        dimensions = np.full(len(values), len(row_shape), np.int64)
        values = values.reshape(-1)
    if not form.has_shapes:
        return Chunk(values, lengths, python=form.python)
    if shapes is None and lengths is not None:
        shapes, dimensions = lengths, np.ones(len(lengths), np.int64)
    return Chunk(values, lengths, shapes, dimensions, python=form.python)
