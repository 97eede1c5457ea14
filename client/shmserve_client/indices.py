"""Indices as a list takes them, of any integer type, negative ones counted from the end: for whatever has samples."""

from __future__ import annotations

import operator
from array import array
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import SampleIndexError, SampleTypeError

__all__ = ["Indexed", "Int64s"]

Int64s: TypeAlias = NDArray[np.int64]


class Indexed:
    """Something with `count` samples: its positions are the integers in [0, count), which indices stand for."""

    count: int
    noun = "samples"

    def position(self, index: Any) -> int:
        """Return `index`, any integer, negative ones counted from the end, as one in [0, count).

        Raises:
            SampleIndexError: no sample has it.
            SampleTypeError: it is not an integer.
        """
        try:
            number = operator.index(index)
        except TypeError:
            raise _not_an_index(index) from None
        position = number + self.count if number < 0 else number
        if not 0 <= position < self.count:
            raise self._out_of_range(number)
        return position

    def positions(self, indices: Any) -> Int64s:
        """Return what `position` does for each of `indices`: a 1-d array or tensor, or anything that is iterated.

        Raises:
            SampleIndexError: no sample has one of them.
            SampleTypeError: they are not integers; or they are booleans, which would mean a mask elsewhere.
        """
        if indices.__class__ is list and bool not in set(map(type, indices)):
            # As DataLoader gives them: several times faster than one by one.
            with suppress(TypeError, OverflowError):  # what follows says which one it is
                indices = np.array(array("q", indices))
        try:
            given = np.asarray(indices) if hasattr(indices, "__array__") else None
        except (TypeError, ValueError, RuntimeError):  # a tensor that numpy cannot read
            raise _not_indices(indices) from None
        if given is None or given.dtype.kind == "O":
            try:
                iterator = iter(indices)
            except TypeError:
                raise _not_indices(indices) from None
            each = list(iterator)
            if bool in set(map(type, each)):
                raise _not_indices(each)
            return np.array([self.position(index) for index in each], np.int64)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise _not_indices(indices)
        # Negative ones are the largest as unsigned: one look at them is enough where there are none.
        if given.dtype == np.int64 and given.size and given.view(np.uint64).max() < self.count:
            return given.copy()
        outside = np.flatnonzero((given < -self.count) | (given >= self.count))
        if outside.size:
            raise self._out_of_range(int(given[outside[0]]))
        positions = given.astype(np.int64)
        positions[positions < 0] += self.count
        return positions

    def span(self, indices: slice) -> range:
        """Return the positions that a slice selects. Raises SampleTypeError where its ends are not integers."""
        try:
            return range(*indices.indices(self.count))
        except TypeError:
            raise _not_an_index(indices) from None

    def _out_of_range(self, index: int) -> SampleIndexError:
        return SampleIndexError(f"index {index} is out of range: there are {self.count} {self.noun}{self._remark()}")

    def _remark(self) -> str:
        """Return what more there is to say about the count."""
        return ""


def _not_an_index(index: object) -> SampleTypeError:
    return SampleTypeError(f"{_brief(index)} is no index: samples are indexed by integers")


def _not_indices(indices: object) -> SampleTypeError:
    return SampleTypeError(f"{_brief(indices)} is no list of indices: give integers, or a 1-d array of them")


def _brief(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"
