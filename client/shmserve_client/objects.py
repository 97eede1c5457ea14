"""Python values as msgpack, for columns of the kind "object". Never pickle: nothing that is read runs code.

Beyond msgpack's own types there are extension types: ARRAY is a msgpack array of dtype name, shape and bytes in C
order; TUPLE a msgpack array of the items; INTEGER a number beyond 64 bits, as decimal digits; TENSOR as ARRAY, given
back as a torch tensor where torch is loaded; SCALAR as ARRAY, a numpy scalar.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import numpy as np

from .errors import ObjectError, SegmentFormatError
from .layout import DTYPES, is_shape

__all__ = ["ARRAY", "INTEGER", "SCALAR", "TENSOR", "TUPLE", "as_array", "pack", "unpack_object"]

ARRAY: Final = 1
TUPLE: Final = 2
INTEGER: Final = 3
TENSOR: Final = 4
SCALAR: Final = 5

_MAX_DEPTH: Final = 511
"""How deep values nest; as msgpack's writer has it."""


def pack(value: Any, where: str = "") -> bytes:
    """Return the value as msgpack: None, bool, int, float, str, bytes, list, tuple, dict, arrays and tensors.

    Args:
        value: what to store. Subclasses of these types are refused, since they would come back as something else.
        where: what the value is called in an error, such as "[17]".

    Raises:
        ObjectError: it holds something else; the message names the place and the type.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_default, strict_types=True, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        place, reason = next(_unpackable(value, where, 0), (where, str(error)))
        raise ObjectError(f"{place or 'the value'} cannot be stored: {reason}") from error
    return packed


def unpack_object(packed: Any) -> Any:
    """Return the value of these bytes, a new one each time.

    Raises:
        SegmentFormatError: they are not what `pack` writes.
    """
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False, ext_hook=_extension)
    except Exception as error:  # which errors the unpacker has for which damage is its own affair
        raise SegmentFormatError(
            f"an object of the segment is damaged: {type(error).__name__}: {str(error) or 'no msgpack'}"
        ) from error


def as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array, numpy scalar or tensor as an array; None for all else, and for dtypes that cannot be stored."""
    if _is_tensor(value):
        if value.is_sparse or value.is_quantized or value.dtype not in _storable_tensors():
            return None
        value = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    elif type(value) is not np.ndarray and not isinstance(value, np.generic):
        return None
    array = np.asarray(value)
    return array if array.dtype.name in DTYPES else None


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # where it is not loaded there are no tensors
    return torch is not None and type(value) is torch.Tensor


def _storable_tensors() -> frozenset[Any]:
    torch = sys.modules["torch"]
    names = (name for name in DTYPES if hasattr(torch, name))
    return frozenset(getattr(torch, name) for name in names)


def _default(value: Any) -> Any:
    if type(value) is tuple:
        return msgpack.ExtType(TUPLE, _pack_plain(list(value)))
    if type(value) is int:  # beyond 64 bits
        return msgpack.ExtType(INTEGER, str(value).encode())
    array = as_array(value)
    if array is None:
        raise TypeError(type(value).__name__)
    code = TENSOR if _is_tensor(value) else SCALAR if isinstance(value, np.generic) else ARRAY
    stored = np.ascontiguousarray(array, DTYPES[array.dtype.name])
    return msgpack.ExtType(code, _pack_plain([array.dtype.name, list(array.shape), stored.tobytes()]))


def _pack_plain(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_default, strict_types=True, use_bin_type=True)
    return packed


def _extension(code: int, data: bytes) -> Any:
    if code == TUPLE:
        return tuple(_unpack_list(data))
    if code == INTEGER:
        return int(data)
    if code not in (ARRAY, SCALAR, TENSOR):
        raise ValueError(f"extension type {code}")
    name, shape, raw = _unpack_list(data)
    if not is_shape(shape):
        raise ValueError(f"shape {shape}")
    array = np.frombuffer(raw, DTYPES[name]).reshape(shape).copy()
    if code == SCALAR:
        return array[()]
    return sys.modules["torch"].from_numpy(array) if code == TENSOR and "torch" in sys.modules else array


def _unpack_list(data: bytes) -> list[Any]:
    value = msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=_extension)
    if type(value) is not list:
        raise ValueError(f"a {type(value).__name__} in an extension type")
    return value


def _unpackable(value: Any, where: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (place, reason) of each thing within `value` that cannot be stored."""
    if depth > _MAX_DEPTH:
        yield where, f"it nests deeper than {_MAX_DEPTH} levels, or holds itself"
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _unpackable(item, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) not in (str, int, bytes, bool, type(None), float):
                yield where, f"a key of it is a {type(key).__qualname__}: use strings or numbers"
            yield from _unpackable(item, f"{where}[{key!r}]", depth + 1)
    elif type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            yield where, f"the string {value[:64]!r} has half a surrogate pair, which UTF-8 lacks"
    elif type(value) not in (type(None), bool, int, float, bytes) and as_array(value) is None:
        yield (
            where,
            f"it is a {type(value).__module__}.{type(value).__qualname__}, not None, a number, a string, bytes, a "
            "list, tuple or dict of these, or an array or tensor of numbers",
        )
