"""Python objects as rows of a table, a batch at a time: what both publishing and sources of Python code do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from .errors import ObjectError

__all__ = ["VALUE", "all_have", "batched", "common_keys"]

_CHUNK_NBYTES: Final = 8 << 20
_FIRST_CHUNK: Final = 64
VALUE: Final = "value"
"""The column of objects that are not dicts of the same keys."""


def batched(values: Iterable[Any], taken_nbytes: list[int]) -> Iterator[list[Any]]:
    """Yield the values in lists of about 8 MiB, as far as `taken_nbytes` tells: the caller adds what each took."""
    waiting: list[Any] = []
    wanted, total = _FIRST_CHUNK, 0
    for value in iterated(values):
        waiting.append(value)
        if len(waiting) == wanted:
            yield waiting
            total += wanted
            wanted = max(1, min(4 * wanted, total * _CHUNK_NBYTES // max(1, sum(taken_nbytes))))
            waiting = []
    if waiting:
        yield waiting


def iterated(values: Any) -> Iterator[Any]:
    """Yield the objects; those of a map-style dataset, which may have no end of its own, by their indices."""
    if not hasattr(values, "__iter__") and hasattr(values, "__getitem__") and hasattr(values, "__len__"):
        return (values[index] for index in range(len(values)))
    try:
        return iter(values)
    except TypeError:
        raise ObjectError(
            f"a {type(values).__name__} cannot be published: give a list, or what can be iterated"
        ) from None


def common_keys(values: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the keys that all values have, where they are dicts of the same strings; None where they are not."""
    if type(values[0]) is not dict or not values[0] or any(type(key) is not str for key in values[0]):
        return None
    keys = tuple(values[0])
    return keys if all_have(values, keys) else None


def all_have(values: Sequence[Any], keys: tuple[str, ...]) -> bool:
    """Return whether all values are dicts with these keys, in this order."""
    return all(type(value) is dict and tuple(value) == keys for value in values)
