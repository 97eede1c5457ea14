"""Typed records out of msgpack bytes, for messages and descriptions alike: nothing is converted, guessed or let by.

The bytes may come from anybody: what they can cost is bounded before anything looks at what they say.
"""

from __future__ import annotations

import types
import typing
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final

import msgpack

from .errors import ShmserveError

__all__ = ["MAX_ITEMS", "shown", "typed", "unpack"]

MAX_ITEMS: Final = 1 << 18
_MAX_SHOWN: Final = 128


def unpack(packed: bytes, error: type[ShmserveError], what: str, *, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Return the map that `packed` is, every key in it a string.

    Args:
        packed: One msgpack value, and nothing after it.
        error: What to raise.
        what: The bytes, as the message calls them.
        max_items: How many items an array or a map may have, and how many arrays and maps there may be in all: a byte
            on the wire can be an object of 64 bytes.

    Raises:
        ShmserveError: `error`, when it is anything else.
    """
    seen = 0

    def bounded(container: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > max_items:
            raise ValueError(f"more than {max_items} arrays and maps")
        if type(container) is dict and any(type(key) is not str for key in container):
            raise ValueError("a key is not a string")
        return container

    try:
        value = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
            max_array_len=max_items,
            max_map_len=max_items,
            object_hook=bounded,
            list_hook=bounded,
        )
    except Exception as cause:  # which errors the unpacker has for which damage is its own affair
        raise error(f"{what} is not msgpack that is read here: {type(cause).__name__}: {cause}") from cause
    if type(value) is not dict:
        raise error(f"{what} is a {type(value).__name__}, not a map")
    return value


def typed(hint: Any, value: Any, where: str, error: type[ShmserveError]) -> Any:
    """Return what `unpack` gave as the type that `hint` declares: dataclasses, lists, tuples, dicts, or nil.

    Raises:
        ShmserveError: `error`, naming the place in `where`, when a field is missing, unknown or of another type.
    """
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else typed(of[0], value, where, error)
    if origin in (list, tuple) and type(value) is list:
        return origin(typed(of[0], item, f"{where}[{number}]", error) for number, item in enumerate(value))
    if origin is dict and type(value) is dict:
        return {key: typed(of[1], item, f"{where}[{shown(key)}]", error) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint) and type(value) is dict:
        hints = _type_hints(hint)
        if value.keys() != hints.keys():
            different = ", ".join(shown(name) for name in sorted(value.keys() ^ hints.keys())[:8])
            raise error(f"malformed: {where} has missing or unknown fields: {different}")
        return hint(
            **{
                # The same as `typed` would say, without the name of a place that nobody will read.
                name: field if type(field) is hints[name] else typed(hints[name], field, f"{where}.{name}", error)
                for name, field in value.items()
            }
        )
    if type(value) is not hint:
        expected = hint.__name__ if type(hint) is type else hint
        raise error(f"malformed: {where} is a {type(value).__name__}, not {expected}")
    return value


@cache
def _type_hints(record: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(record)


def shown(value: Any) -> str:
    """Return a value that somebody sent as a short part of a message."""
    if isinstance(value, str | bytes):
        value = value[:_MAX_SHOWN]
    elif not isinstance(value, int | float | None):
        return f"a {type(value).__name__}"
    return repr(value)
