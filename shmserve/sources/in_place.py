"""In place: values that stay in the files that they came from, where clients map them, rather than being loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmserve_client.chunks import Chunk
from shmserve_client.layout import DTYPES, MappedFile, whole_pages
from shmserve_client.plans import (
    ArrayPlan,
    ColumnPlan,
    JoinedColumn,
    PositionList,
    Positions,
    RaggedPlan,
    join_column,
    join_shapes,
)
from shmserve_client.writer import Values

from .pieces import FileSpan

__all__ = ["FilesInPlace", "join_in_place", "located"]


def located(chunk: Chunk, address: int, nbytes: int) -> Chunk:
    """Return the chunk, its values said to stay in their file if they are in the mapping of it at `address`."""
    start = chunk.values.ctypes.data - address
    is_inside = 0 <= start <= start + chunk.values.nbytes <= nbytes and chunk.values.nbytes > 0
    return replace(chunk, file_offset=start) if is_inside else chunk


class FilesInPlace:
    """The files in which values stay, in the order in which they were asked for, each from a page of its own on."""

    def __init__(self) -> None:
        self._starts: dict[Path, int] = {}
        self._files: list[MappedFile] = []
        self._end = 0

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """What readers are told of them."""
        return tuple(self._files)

    def position(self, span: FileSpan) -> int:
        """Return where the span starts among the files, which have its own from now on; in bytes."""
        if span.path not in self._starts:
            status = os.stat(span.path)
            self._starts[span.path] = self._end
            self._files.append(MappedFile(os.fspath(span.path), status.st_size, status.st_mtime_ns, status.st_ino))
            self._end += whole_pages(status.st_size)
        return self._starts[span.path] + span.offset


def join_in_place(parts: Sequence[ColumnPlan], files: FilesInPlace) -> JoinedColumn | None:
    """Return the column of all parts, as `join_column` does, its values in their files; None where they cannot stay.

    They can where they are there byte for byte and aligned. Rows of one shape that do not follow each other are ragged.
    """
    spans = [_span(part) for part in parts]
    found = [span for span in spans if span is not None]
    itemsize = DTYPES[parts[0].values.dtype].itemsize
    if not found or len(found) < sum(bool(part.values.nbytes) for part in parts):
        return None
    if any(span.offset % itemsize for span in found):
        return None
    follow = all(one.path == next.path and one.offset + one.nbytes == next.offset for one, next in pairwise(found))
    if not follow and parts[0].ragged is None:
        if len(parts[0].values.shape) == 1:  # of scalars, to say where they are takes more than they do
            return None
        parts = list(map(_as_ragged, parts))
    ragged = [part.ragged for part in parts if part.ragged is not None]
    start = min(map(files.position, found))
    if follow and not any(plan.stops for plan in ragged):
        joined = join_column(parts)
        return replace(joined, values=replace(joined.values, pieces=(), in_files=start))
    end = max(files.position(span) + span.nbytes for span in found)
    starts: list[Positions] = []
    stops: list[Positions] = []
    for part, plan, span in zip(parts, ragged, spans, strict=True):
        by = 0 if span is None else (files.position(span) - start) // itemsize
        starts += [piece.shifted(by) for piece in plan.starts]
        stops += [
            piece.shifted(by) for piece in plan.stops or (_Stops(plan.starts, part.values.shape[0], 8 * plan.count),)
        ]
    count = sum(part.count for part in parts)
    shapes, shape_offsets = join_shapes(ragged, count)
    first = parts[0]
    return JoinedColumn(
        first.name,
        first.kind,
        first.python,
        ArrayPlan(first.values.dtype, ((end - start) // itemsize,), (), in_files=start),
        ArrayPlan("int64", (count,), tuple(starts)),
        shapes,
        shape_offsets,
        ArrayPlan("int64", (count,), tuple(stops)),
    )


def _as_ragged(part: ColumnPlan) -> ColumnPlan:
    """Return rows of one shape as samples that have it each."""
    count, *row_shape = part.values.shape
    items = math.prod(row_shape)
    shapes = None
    shape_starts: tuple[Positions, ...] = ()
    if len(row_shape) > 1:
        shapes = ArrayPlan("int64", (count * len(row_shape),), (Values(np.tile(np.array(row_shape, np.int64), count)),))
        shape_starts = (PositionList(np.arange(count, dtype=np.int64) * len(row_shape)),)
    starts = (PositionList(np.arange(count, dtype=np.int64) * items),)
    values = replace(part.values, shape=(count * items,))
    ragged = RaggedPlan(count, starts, shapes, shape_starts, flat=len(row_shape) == 1)
    return replace(part, values=values, ragged=ragged)


def _span(part: ColumnPlan) -> FileSpan | None:
    """Return where the part's values are in a file, if there are some and they are stored as a segment has them."""
    pieces = [piece for piece in part.values.pieces if piece.nbytes]
    return pieces[0] if len(pieces) == 1 and type(pieces[0]) is FileSpan else None


@dataclass(frozen=True, slots=True)
class _Stops(Positions):
    """Where each sample stops of those that start at `starts`, the last one at `end`; all moved on by `add`."""

    starts: tuple[Positions, ...]
    end: int
    nbytes: int
    add: int = 0

    def shifted(self, by: int) -> _Stops:
        return replace(self, add=self.add + by)

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        start, piece_start = start + 8, 0
        for piece in self.starts:
            low, high = max(start, piece_start), min(start + target.nbytes, piece_start + piece.nbytes)
            if low < high:
                piece.read_into(target[low - start : high - start], low - piece_start)
            piece_start += piece.nbytes
        positions = target.view("<i8")
        if start + target.nbytes > piece_start:
            positions[-1] = self.end
        positions += self.add
