"""What Arrow arrays become: the one place that knows Arrow's types, for all formats that pyarrow reads.

Numbers and booleans are scalars. Lists of numbers are ragged tensors, and tensors of one shape where every list has one
size, by its type or by what `datasets` or a tensor type declares; lists of such are ragged tensors of some dimensions.
Strings and binary are text and bytes. Times are integers of their unit, dictionaries and run ends are decoded, and
extension types are what they are stored as. All else is an object, as pyarrow gives it to Python: structs and maps are
dicts, nulls None. Decimals and calendar intervals are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shmserve_client.chunks import Chunk, objects, ragged, rows
from shmserve_client.errors import ConfigError, ObjectError, SourceFormatError
from shmserve_client.layout import DTYPES

from .extras import require

__all__ = ["EXTRA", "chunk_of", "nbytes_of"]

EXTRA: Final = "arrow"
_MAPS_SINCE: Final = 20


def chunk_of(arrays: Sequence[Any], field: Any) -> Chunk:
    """Return the values of some pyarrow arrays, one after another: of a column whose pyarrow field is `field`.

    The arrays are valid, as `validate(full=True)` has it.

    Raises:
        ConfigError: this version of pyarrow cannot convert it.
        SourceFormatError: the type, or a value, is not supported; the message has the column, but not the file.
    """
    pa = _arrow()
    if any(_is_refused(kind) for kind in _within(field.type)):
        raise SourceFormatError(
            f"column {field.name!r} of {field.type} is not supported: write it as a float64 or a string, or leave it "
            "out by --columns"
        )
    plain = [_plain(array) for array in arrays]
    array = plain[0] if len(plain) == 1 else pa.concat_arrays(plain)
    try:
        return _chunk(array, field)
    except ConfigError:
        raise
    except (KeyError, ObjectError, TypeError, ValueError) as error:
        raise SourceFormatError(
            f"column {field.name!r} of {field.type} has a value that is not supported: {error}: leave it out by "
            "--columns"
        ) from error


def nbytes_of(array: Any) -> int:
    """Return about how many bytes the values of a valid array take, decoded; at least one for each."""
    types = _arrow().types
    values = None
    if types.is_dictionary(array.type):
        values = array.dictionary
    elif types.is_run_end_encoded(array.type):
        values = array.values
    if values is None:
        return max(len(array), int(array.nbytes))
    return len(array) * max(1, int(values.nbytes) // max(1, len(values)))


def _arrow() -> Any:
    return require("pyarrow", EXTRA, "this column")


def _within(kind: Any) -> Iterator[Any]:
    """Yield the type and all types within it."""
    pa = _arrow()
    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        yield from _within(kind.storage_type)
    elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        yield from _within(kind.value_type)
    for number in range(kind.num_fields):
        yield from _within(kind.field(number).type)


def _is_refused(kind: Any) -> bool:
    types = _arrow().types
    return bool(types.is_decimal(kind) or types.is_interval(kind))


def _plain(array: Any) -> Any:
    """Return the array as one of a type without dictionaries, run ends, views, times and extensions."""
    pa = _arrow()
    if pa.types.is_run_end_encoded(array.type):
        return _plain(require("pyarrow.compute", EXTRA, "this column").run_end_decode(array))
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if isinstance(array.type, pa.FixedShapeTensorType):
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        is_bool = array.type.extension_name == "arrow.bool8"
        return array.storage.cast(pa.bool_()) if is_bool else _plain(array.storage)
    wanted = _plain_type(array.type)
    return array if wanted in (None, array.type) else array.cast(wanted)


def _plain_type(kind: Any) -> Any | None:
    """Return the type to cast to; None where pyarrow has no such cast, or, of views of lists, a wrong one."""
    pa = _arrow()
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if kind.extension_name == "arrow.bool8" else _plain_type(kind.storage_type)
    if types.is_run_end_encoded(kind):
        return None
    if types.is_dictionary(kind):
        return None if types.is_nested(kind.value_type) else _plain_type(kind.value_type)
    if types.is_temporal(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if not types.is_nested(kind):
        return kind
    fields = [kind.field(number) for number in range(kind.num_fields)]
    inner = [_plain_type(field.type) for field in fields]
    if None in inner:
        return None
    fields = [field.with_type(found) for field, found in zip(fields, inner, strict=True)]
    if types.is_struct(kind):
        return pa.struct(fields)
    if types.is_map(kind):
        entry: Any = inner[0]
        return kind if entry == kind.field(0).type else pa.map_(entry.field(0).type, entry.field(1).type)
    if types.is_list(kind):
        return pa.list_(fields[0])
    if types.is_large_list(kind):
        return pa.large_list(fields[0])
    if types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    return None


def _chunk(array: Any, field: Any) -> Chunk:
    pa = _arrow()
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        if not array.null_count and not array.storage.flatten().null_count:
            return rows(array.to_numpy_ndarray())
        return objects(value.to_numpy() if value.is_valid else None for value in array)
    if not array.null_count:
        if (numbers := _numbers(array)) is not None:
            return rows(numbers)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return _bytes_of(array, "text")
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return _bytes_of(array, "bytes")
        if (tensors := _tensors(array, _declared_shape(field))) is not None:
            return tensors
    return objects(_python_values(array, field))


def _python_values(array: Any, field: Any) -> Any:
    pa = _arrow()
    if not any(pa.types.is_map(kind) for kind in _within(array.type)):
        return array.to_pylist()
    if int(pa.__version__.partition(".")[0]) < _MAPS_SINCE:
        raise ConfigError(
            f"column {field.name!r} of {field.type} needs pyarrow {_MAPS_SINCE} or newer, this is {pa.__version__}: "
            "pip install --upgrade pyarrow"
        )
    return array.to_pylist(maps_as_pydicts="strict")


def _numbers(array: Any) -> NDArray[Any] | None:
    """Return the values of an array of numbers without nulls; None for all else."""
    types = _arrow().types
    kind = array.type
    if array.null_count or not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values if values.dtype.name in DTYPES else None


def _bytes_of(array: Any, kind: str) -> Chunk:
    """Return strings or binary without nulls, straight from the array's buffers."""
    types = _arrow().types
    is_large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, offsets_buffer, values_buffer = array.buffers()
    if not len(array):
        return ragged(np.empty(0, np.uint8), np.empty(0, np.int64), kind)
    offsets = np.frombuffer(offsets_buffer, np.int64 if is_large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    values = np.empty(0, np.uint8) if values_buffer is None else np.frombuffer(values_buffer, np.uint8)
    return ragged(values[offsets[0] : offsets[-1]], np.diff(offsets), kind)


def _declared_shape(field: Any) -> tuple[int | None, ...]:
    """Return the shape that `datasets` declares for what it stores as lists of lists, None for a size that varies."""
    metadata = field.metadata or {}
    if not metadata.get(b"ARROW:extension:name", b"").startswith(b"datasets.features.features.Array"):
        return ()
    found = json.loads(metadata.get(b"ARROW:extension:metadata", b"[]"))
    shape = found[0] if found and isinstance(found[0], list) else found
    return tuple(size if isinstance(size, int) else None for size in shape)


def _tensors(array: Any, declared: tuple[int | None, ...]) -> Chunk | None:
    """Return lists of numbers, nested so that all of a column have one shape but for their first size, or None.

    Sizes are those of the types; where a list has none, `declared` says it, and each list is checked to have it.
    """
    sizes: list[int] = []
    lengths: NDArray[np.int64] | None = None  # of the outermost lists, where they vary
    items = array
    while (found := _lengths(items)) is not None:
        if items.null_count:
            return None
        depth = len(sizes) + (lengths is not None)
        size = items.type.list_size if found is _FIXED else declared[depth] if depth < len(declared) else None
        if found is not _FIXED and (size is None or bool((found != size).any())):
            if depth:
                return None
            lengths = found
        else:
            sizes.append(size or 0)
        items = items.flatten()
    numbers = _numbers(items)
    if numbers is None or items is array:
        return None
    if lengths is None:
        return rows(numbers.reshape(len(array), *sizes))
    if not sizes:
        return ragged(numbers, lengths)
    shapes = np.empty((len(lengths), 1 + len(sizes)), np.int64)
    shapes[:, 0], shapes[:, 1:] = lengths, sizes
    dimensions = np.full(len(lengths), 1 + len(sizes), np.int64)
    return Chunk(np.ascontiguousarray(numbers), lengths * math.prod(sizes), shapes.reshape(-1), dimensions)


_FIXED: Final = np.empty(0, np.int64)
"""The lengths of lists of one size."""


def _lengths(array: Any) -> NDArray[np.int64] | None:
    """Return how many items each list of the array has, `_FIXED` for a type of one size; None where it is of others."""
    types = _arrow().types
    kind = array.type
    if types.is_fixed_size_list(kind):
        return _FIXED
    if types.is_list(kind) or types.is_large_list(kind):
        found: NDArray[np.int64] = np.diff(array.offsets.to_numpy().astype(np.int64, copy=False))
        return found
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        found = array.sizes.to_numpy().astype(np.int64)
        return found
    return None
