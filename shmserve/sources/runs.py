"""How an index's sequences lie in their values' file: byte pointers and lengths, checked and cut into runs.

Every writer puts the sequences one after another, which is one run. Pointers may jump all the same, so nothing here
assumes that they do not: where one does, another run begins, and sequences that share bytes are copied once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shmserve_client.errors import SourceFormatError

from .files import chunks, read_array, size_of

__all__ = ["MAX_RUNS", "Entries", "Run"]

MAX_RUNS: Final = 1 << 16
"""Each run is a piece to read of its own; more of them mean an index that was shuffled, not written."""


@dataclass(slots=True)
class Run:
    """Sequences whose bytes follow each other without a gap."""

    first_sequence: int
    sequences: int
    source_offset: int
    """Where the run starts in the values' file, in bytes."""
    first_item: int
    """Where it starts among the items of all runs."""
    items: int


@dataclass(frozen=True, slots=True)
class Entries:
    """The two arrays of an index: `count` int32 lengths in items, and as many int64 pointers in bytes of the values."""

    index: Path
    lengths_offset: int
    pointers_offset: int
    count: int

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (first sequence, lengths, pointers) in parts of bounded memory."""
        for start, stop in chunks(self.count):
            lengths = read_array(self.index, self.lengths_offset + 4 * start, "int32", stop - start).astype(np.int64)
            yield start, lengths, read_array(self.index, self.pointers_offset + 8 * start, "int64", stop - start)

    def end(self, itemsize: int) -> int:
        """Return the byte after the last one that any sequence uses, for items of this many bytes."""
        return max((int((pointers + lengths * itemsize).max()) for _, lengths, pointers in self), default=0)

    def spacing(self) -> float:
        """Return how many bytes the first sequence that is not empty has per item, up to the next one; 0 if unknown."""
        for _, lengths, pointers in self:
            filled = np.flatnonzero(lengths[:-1] > 0)
            if len(filled):
                pointer, following = pointers[filled[0] : filled[0] + 2].tolist()
                return float((following - pointer) / lengths[filled[0]])
        return 0

    def runs(self, values: Path, itemsize: int) -> list[Run]:
        """Return the runs of all sequences, in the order of the sequences, for items of this many bytes.

        Raises:
            SourceFormatError: a length or pointer is impossible, or the values' file is larger or smaller than needed.
        """
        values_nbytes = size_of(values)
        runs: list[Run] = []
        items = expected = end = 0
        for first, lengths, pointers in self:
            ends = pointers + lengths * itemsize  # may overflow, but only where the pointer itself is bad
            follows = np.concatenate(([expected], ends[:-1]))
            bad = (lengths < 0) | (pointers < 0) | (pointers > values_nbytes) | (ends > values_nbytes)
            bad |= (pointers % itemsize != 0) | _wrapped(pointers, follows)
            if bad.any():
                at = int(bad.argmax())
                length, pointer = int(lengths[at]), int(pointers[at])
                raise SourceFormatError(
                    f"{self.index}: sequence {first + at} has {length} items of {itemsize} bytes at byte {pointer} of "
                    f"{values}, {self._reason(length, pointer, int(follows[at]), itemsize, values_nbytes)}"
                )
            breaks = np.flatnonzero(pointers != follows)
            if not runs:
                breaks = np.union1d(breaks, [0])
            if len(runs) + len(breaks) > MAX_RUNS:
                raise SourceFormatError(
                    f"{self.index}: its sequences lie in more than {MAX_RUNS} separate places of {values}: "
                    "write the pair again, the values in the order of the index"
                )
            before = np.concatenate(([0], np.cumsum(lengths)))
            cuts = [*breaks.tolist(), len(lengths)]
            if cuts[0] > 0:
                runs[-1].sequences += cuts[0]
                runs[-1].items += int(before[cuts[0]])
            for start, stop in pairwise(cuts):
                span = int(before[stop] - before[start])
                runs.append(Run(first + start, stop - start, int(pointers[start]), items + int(before[start]), span))
            items += int(before[-1])
            expected, end = int(ends[-1]), max(end, int(ends.max()))
        if end != values_nbytes:
            raise SourceFormatError(
                f"{values}: {values_nbytes} bytes, but {self.index} needs {end} ({self.count} sequences, {itemsize} "
                "bytes an item): it is truncated, or the two are not a pair"
            )
        return runs

    def _reason(self, length: int, pointer: int, expected: int, itemsize: int, values_nbytes: int) -> str:
        """Return why that sequence is bad, given where it would start if it followed the one before."""
        if length < 0:
            return "a negative length: the index is damaged"
        if expected > pointer and (expected - pointer) % (1 << 32) == 0:
            return (
                f"which has {values_nbytes} bytes: the pointer wrapped at 2^31, it should be {expected}; "
                "write the index again with 64-bit pointers"
            )
        if 0 <= pointer <= values_nbytes - length * itemsize:
            return "which is not at an item's boundary: the index is damaged"
        return (
            f"which has {values_nbytes} bytes where the index needs {self.end(itemsize)}: "
            "it is truncated, or the two are not a pair"
        )


def _wrapped(pointers: NDArray[np.int64], follows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell for each pointer whether it is where it should be but for a multiple of 2^32: it was computed in 32 bits."""
    behind = follows - pointers
    wrapped: NDArray[np.bool_] = (behind > 0) & (behind % (1 << 32) == 0)
    return wrapped
