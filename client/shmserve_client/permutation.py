"""A shuffled order that is computed, not stored: position i has index p(i), and p is a bijection that a key chooses.

A Feistel network over a grid of `rows * columns >= size` cells, whose two halves are a cell's row and column: each
round adds to one half a number drawn from the other, modulo that half's extent. Where a cell lies beyond `size`, the
network is applied again until one does not. Both are in Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(2002), as the generalized Feistel cipher and cycle walking. The numbers are drawn by the mixer of SplitMix64 (Steele,
Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), keyed by SHAKE-256 of the seed.

The order of each seed and size is a promise: a run that is resumed by a later version goes on in the same order.
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from typing import Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Permutation"]

_ROUNDS: Final = 8
_ROUNDS_OF_FEW: Final = 20
"""For sizes below 256. Of 5 samples, 12 rounds are seen to prefer some orders: each halves what is left of that."""
_WORD: Final = 2**64 - 1
_Cell = TypeVar("_Cell", int, NDArray[np.uint64])


class Permutation:
    """A bijection of [0, size) in O(1) memory; other seeds give orders that have nothing to do with each other."""

    def __init__(self, size: int, *seed: int) -> None:
        """Choose the order.

        Args:
            size: from 0 to 2^62.
            seed: any integers, such as a seed and an epoch.
        """
        self.size: Final = size
        ceil_root = math.isqrt(max(size - 1, 0)) + 1
        self._rows = ceil_root + ceil_root % 2  # even: additions to a half of odd extent are even permutations, all
        self._columns = max(-(-size // self._rows), 1)
        rounds = _ROUNDS if size >= 256 else _ROUNDS_OF_FEW
        words = hashlib.shake_256(repr(tuple(map(operator.index, seed))).encode()).digest(8 * rounds)
        self._keys: tuple[int, ...] = struct.unpack(f"<{rounds}Q", words)

    @overload
    def __call__(self, positions: int) -> int: ...
    @overload
    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def __call__(self, positions: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return the index at each position, as a new array, or as an int for an int.

        Args:
            positions: 1-d int64, or one Python int; each in [0, size), which is not checked.

        Raises:
            TypeError: they are floats.
        """
        if isinstance(positions, int):
            index = self._moved(positions)
            while index >= self.size:
                index = self._moved(index)
            return index
        indices = self._moved(positions.astype(np.int64, casting="safe", copy=False).view(np.uint64))
        while (beyond := np.flatnonzero(indices >= self.size)).size:
            indices[beyond] = self._moved(indices[beyond])
        return indices.view(np.int64)

    def _moved(self, cell: _Cell) -> _Cell:
        row, column = cell // self._columns, cell % self._columns
        for key_of_row, key_of_column in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mixed(column, key_of_row)) % self._rows
            column = (column + _mixed(row, key_of_column)) % self._columns
        return row * self._columns + column


def _mixed(half: _Cell, key: int) -> _Cell:
    """Return 62 bits, so that adding a half to them does not overflow. Arrays wrap by themselves, ints are masked."""
    word = half ^ key
    word ^= word >> 30
    word *= 0xBF58476D1CE4E5B9
    word &= _WORD
    word ^= word >> 27
    word *= 0x94D049BB133111EB
    word &= _WORD
    word ^= word >> 31
    return word >> 2  # type: ignore[return-value]  # numpy's stubs take uint64 ^ int for signed
