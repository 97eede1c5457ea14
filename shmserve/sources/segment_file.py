"""Segment files, as `shmserve build` writes them: a corpus that was decoded and checked once. See docs/layout.md."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shmserve_client.errors import SegmentFormatError, SourceFormatError
from shmserve_client.layout import MAGIC, Array, Column, Description
from shmserve_client.plans import ArrayPlan, ColumnPlan, RaggedPlan
from shmserve_client.segment import read_prefix

from .base import ShardPlan, Source, SourceOptions
from .files import missing
from .pieces import FileSpan, PositionSpan

__all__ = ["SegmentFile"]


@dataclass(frozen=True)
class SegmentFile(Source):
    """One segment file."""

    suffixes = (".seg",)
    format = "segment"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts with the magic of segments."""
        return cls(path) if head.startswith(MAGIC) else None

    def description(self) -> Description:
        """Return what the file says of itself, checked. Raises SourceFormatError where it is damaged."""
        try:
            fd = os.open(self.values, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise missing(self.values) from None
        try:
            return read_prefix(fd)[1]
        except SegmentFormatError as error:
            raise SourceFormatError(f"{self.values}: {error}") from error
        finally:
            os.close(fd)

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return its columns as they are; nothing is decoded again."""
        description = self.description()
        arrays = description.arrays
        documents, modes = arrays.get("document_indices"), arrays.get("modes")
        return ShardPlan(
            tuple(self._column(column, description.num_samples) for column in description.columns),
            stream=description.stream,
            documents=None
            if documents is None
            else (PositionSpan(self.values, documents.offset + 8, documents.nbytes - 8),),
            modes=None if modes is None else (self._span(modes),),
            notes=description.notes,
        )

    def _column(self, column: Column, count: int) -> ColumnPlan:
        ragged = None
        if column.offsets is not None:
            has_shapes = column.shapes is not None and column.shape_offsets is not None
            ragged = RaggedPlan(
                count,
                (PositionSpan(self.values, column.offsets.offset, 8 * count),),
                self._plan(column.shapes) if has_shapes and column.shapes is not None else None,
                (PositionSpan(self.values, column.shape_offsets.offset, 8 * count),)
                if has_shapes and column.shape_offsets is not None
                else (),
            )
        return ColumnPlan(column.name, self._plan(column.values), ragged, column.kind, column.python)

    def _plan(self, array: Array) -> ArrayPlan:
        return ArrayPlan(array.dtype, array.shape, (self._span(array),))

    def _span(self, array: Array) -> FileSpan:
        return FileSpan(self.values, array.offset, array.nbytes)
