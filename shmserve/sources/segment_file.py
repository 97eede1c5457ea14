"""Segment files, as `shmserve build` writes them: a corpus that was decoded and checked once. See docs/layout.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shmserve_client.errors import SegmentFormatError, SourceFormatError
from shmserve_client.layout import (
    DESCRIPTION_OFFSET,
    HEADER,
    MAGIC,
    Array,
    Column,
    Description,
    decode_description,
    decode_header,
)
from shmserve_client.plans import ArrayPlan, ColumnPlan, RaggedPlan

from .base import ShardPlan, Source, SourceOptions
from .files import read_head, size_of
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
            header = decode_header(read_head(self.values, HEADER.size), size_of(self.values))
            prefix = read_head(self.values, DESCRIPTION_OFFSET + header.description_nbytes)
            return decode_description(prefix[DESCRIPTION_OFFSET:], header)
        except SegmentFormatError as error:
            raise SourceFormatError(f"{self.values}: {error}") from error

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
