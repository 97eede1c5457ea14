"""Plans: the arrays that a segment will hold, as pieces that are read when the writer asks for them.

A dataset is planned part by part (the shards of a corpus, the chunks of decoded rows), and the parts are joined without
anything being read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from .layout import DTYPES, Array, Column
from .writer import Piece, Values

__all__ = [
    "ArrayPlan",
    "ColumnPlan",
    "JoinedColumn",
    "PositionList",
    "Positions",
    "RaggedPlan",
    "concatenate",
    "join_column",
    "join_shapes",
]


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """An array to be written: dtype, shape, and the pieces that follow each other in its bytes."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    in_files: int | None = None
    """Where it starts, in bytes, among the files in which values stay; None for one that is written."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def array(self) -> Array:
        """Return what the segment says of it, not placed yet where it is written."""
        return Array(self.dtype, self.shape, self.in_files or 0, self.in_files is not None)


class Positions(Piece, ABC):
    """A piece of int64 positions that can be moved on by the length of the parts before."""

    @abstractmethod
    def shifted(self, by: int) -> Positions:
        """Return the same positions, each `by` larger."""


class PositionList(Values, Positions):
    """Int64 positions that are in memory."""

    def __init__(self, positions: NDArray[np.int64]) -> None:
        super().__init__(positions)
        self._positions = positions

    def shifted(self, by: int) -> PositionList:
        """Return the same positions, each `by` larger."""
        return PositionList(self._positions + by)


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """How `values` divides into samples: int64 starts, relative to this part's first value, without the last end.

    Samples that do not follow each other also have `stops`; their values can only be left where they are.
    N-d samples also have `shapes` (int64, 1-d) and, again without the last end, `shape_starts`; `flat` says that all of
    this part's are 1-d, so that the shapes tell nothing where no other part's do.
    """

    count: int
    starts: tuple[Positions, ...]
    shapes: ArrayPlan | None = None
    shape_starts: tuple[Positions, ...] = ()
    flat: bool = False
    stops: tuple[Positions, ...] = ()


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """One part's share of a column.

    `values` is 1-d and divided by `ragged` into samples; or, where `ragged` is None, its first axis counts the samples.
    """

    name: str
    values: ArrayPlan
    ragged: RaggedPlan | None = None
    kind: str = "tensor"
    python: str = ""
    any_dtype: bool = False
    """It has no values, and nothing else tells their dtype: it is that of the other parts."""

    @property
    def count(self) -> int:
        """How many samples the part has."""
        return self.values.shape[0] if self.ragged is None else self.ragged.count


@dataclass(frozen=True, slots=True)
class JoinedColumn:
    """A column of the whole dataset."""

    name: str
    kind: str
    python: str
    values: ArrayPlan
    offsets: ArrayPlan | None = None
    shapes: ArrayPlan | None = None
    shape_offsets: ArrayPlan | None = None
    stops: ArrayPlan | None = None

    def column(self) -> Column:
        """Return what the segment says of it, not placed yet."""
        offsets, stops, shapes, shape_offsets = (
            None if plan is None else plan.array()
            for plan in (self.offsets, self.stops, self.shapes, self.shape_offsets)
        )
        return Column(self.name, self.values.array(), offsets, shapes, shape_offsets, self.kind, self.python, stops)

    def arrays(self) -> list[ArrayPlan]:
        """Return the plans of what is to be written, in the order of `Description.all_arrays`."""
        plans = (self.values, self.offsets, self.stops, self.shapes, self.shape_offsets)
        return [plan for plan in plans if plan is not None and plan.in_files is None]


def join_column(parts: Sequence[ColumnPlan]) -> JoinedColumn:
    """Return the column of all parts, in their order; they agree in kind, dtype and shape."""
    values = concatenate([part.values for part in parts])
    ragged = [part.ragged for part in parts if part.ragged is not None]
    offsets = shapes = shape_offsets = None
    if ragged:
        count = sum(part.count for part in parts)
        offsets = _offsets([plan.starts for plan in ragged], [part.values.shape[0] for part in parts], count)
        shapes, shape_offsets = join_shapes(ragged, count)
    first = parts[0]
    return JoinedColumn(first.name, first.kind, first.python, values, offsets, shapes, shape_offsets)


def concatenate(arrays: Sequence[ArrayPlan]) -> ArrayPlan:
    """Return the arrays as one, along the first axis."""
    shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
    return ArrayPlan(arrays[0].dtype, shape, tuple(chain.from_iterable(array.pieces for array in arrays)))


def _offsets(starts: Sequence[Sequence[Positions]], lengths: Sequence[int], count: int) -> ArrayPlan:
    """Return the `count` starts of all parts, each moved on by the lengths of those before, and the last end."""
    *bases, end = accumulate(lengths, initial=0)
    moved = (piece.shifted(base) for pieces, base in zip(starts, bases, strict=True) for piece in pieces)
    return ArrayPlan("int64", (count + 1,), (*moved, PositionList(np.array([end]))))


def join_shapes(ragged: Sequence[RaggedPlan], count: int) -> tuple[ArrayPlan | None, ArrayPlan | None]:
    """Return the shapes of the samples of all parts, and their `count` + 1 offsets; None where all are 1-d."""
    shapes = [plan.shapes for plan in ragged if plan.shapes is not None]
    if all(plan.flat for plan in ragged) or not shapes:
        return None, None
    starts = [plan.shape_starts for plan in ragged]
    return concatenate(shapes), _offsets(starts, [shape.shape[0] for shape in shapes], count)
