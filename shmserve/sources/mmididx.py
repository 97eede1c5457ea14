"""MMIDIDX pairs: fairseq's `mmap` and the Megatron family's indexed datasets, which share a magic but not a layout.

    0   9 bytes  MMIDIDX, two zeros            0   9 bytes  MMIDIDX, two zeros
    9   u64      version, 1                    9   u64      version, 1
    17  u8       dtype code                    17  u8       dtype code
    18  u64      N sequences                   18  u64      N sequences
    26  i32[N]   lengths in tokens             26  u64      D
        i64[N]   byte pointers                 34  i32[N]   lengths in tokens
                                                   i64[N]   byte pointers
        fairseq                                    i64[D]   document_indices
                                                   i8[N]    modes, in multimodal files only

No field names the layout, but the file's size does, exactly. Written after `fairseq/data/indexed_dataset.py` and
`megatron/core/datasets/indexed_dataset.py`; GPT-NeoX, Megatron-DeepSpeed, NeMo and datatrove write the second as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Self

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES
from shmserve_client.plans import ArrayPlan, ColumnPlan, RaggedPlan
from shmserve_client.writer import Piece

from .base import ShardPlan, Source, SourceOptions
from .documents import plan_documents
from .files import size_of
from .pairs import DTYPE_BY_CODE, FLOATS_BY_CODE, MMIDIDX, PAIR_SUFFIXES, open_pair
from .pieces import FileSpan, PositionSpan
from .runs import Entries, Run

__all__ = ["MmapPair"]

HEADER: Final = struct.Struct("<9sQBQ")
"""magic, version, dtype code, number of sequences; Megatron's number of document indices, a u64, follows."""


@dataclass(frozen=True)
class MmapPair(Source):
    """One MMIDIDX pair."""

    suffixes = PAIR_SUFFIXES

    index: Path
    values: Path
    code: int
    count: int
    documents: int | None
    """Length of document_indices; None in fairseq's layout."""
    multimodal: bool

    @property
    def format(self) -> str:
        """Which of the two layouts."""
        return "fairseq-mmap" if self.documents is None else "megatron"

    @property
    def files(self) -> tuple[Path, Path]:
        """Values and index."""
        return self.values, self.index

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the pair if its index is MMIDIDX, of whichever layout has exactly its size."""
        opened = open_pair(path, head, MMIDIDX, HEADER)
        if opened is None:
            return None
        pair, (code, count) = opened
        nbytes = pair.nbytes
        if code not in DTYPE_BY_CODE and code not in FLOATS_BY_CODE:
            raise SourceFormatError(f"{pair.index}: unknown dtype code {code}, known are 1 to 10")
        if nbytes == HEADER.size + 12 * count:
            return cls(pair.index, pair.values, code, count, None, multimodal=False)
        documents = int.from_bytes(pair.head[HEADER.size : HEADER.size + 8], "little")
        megatron_nbytes = HEADER.size + 8 + 12 * count + 8 * documents
        if nbytes not in (megatron_nbytes, megatron_nbytes + count) or nbytes < HEADER.size + 8:
            raise SourceFormatError(
                f"{pair.index}: {nbytes} bytes, but an index of {count} sequences has {HEADER.size + 12 * count} "
                f"(fairseq), {megatron_nbytes} or, with modes, {megatron_nbytes + count} (Megatron): "
                "it is truncated, or of a version that is not supported"
            )
        return cls(pair.index, pair.values, code, count, documents, multimodal=nbytes != megatron_nbytes)

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return one ragged sample per sequence, with Megatron's documents and modes."""
        dtype = self._dtype()
        itemsize = DTYPES[dtype].itemsize
        runs = self._entries.runs(self.values, itemsize)
        tokens = runs[-1].first_item + runs[-1].items if runs else 0
        notes: tuple[str, ...] = ()
        if self.documents is None and self.code in FLOATS_BY_CODE:
            notes = (f"values are {dtype} as they were written; fairseq's own reader truncates them to integers",)
        values_nbytes = size_of(self.values)
        if tokens * itemsize > values_nbytes:
            notes += (f"its sequences overlap: {values_nbytes} bytes are stored as {tokens * itemsize}",)
        documents, document_notes = plan_documents(self.index, self._document_indices, self.documents, self.count)
        return ShardPlan(
            (
                ColumnPlan(
                    "tokens",
                    ArrayPlan(
                        dtype,
                        (tokens,),
                        tuple(FileSpan(self.values, run.source_offset, run.items * itemsize) for run in runs),
                    ),
                    RaggedPlan(self.count, tuple(self._starts(run, itemsize) for run in runs)),
                    any_dtype=self.code in FLOATS_BY_CODE and tokens == 0,
                ),
            ),
            documents=documents,
            modes=self._plan_modes(),
            notes=notes + document_notes,
        )

    @property
    def _entries(self) -> Entries:
        lengths = HEADER.size if self.documents is None else HEADER.size + 8
        return Entries(self.index, lengths, lengths + 4 * self.count, self.count)

    @property
    def _document_indices(self) -> int:
        return HEADER.size + 8 + 12 * self.count

    def _dtype(self) -> str:
        if self.code in DTYPE_BY_CODE:
            return DTYPE_BY_CODE[self.code]
        candidates = FLOATS_BY_CODE[self.code] if self.documents is not None else ("float64", "float32")
        spacing, nbytes = self._entries.spacing(), size_of(self.values)
        by_spacing = (dtype for dtype in candidates if DTYPES[dtype].itemsize == spacing)
        by_size = (dtype for dtype in candidates if self._entries.end(DTYPES[dtype].itemsize) == nbytes)
        return next(chain(by_spacing, by_size), candidates[0])

    def _starts(self, run: Run, itemsize: int) -> PositionSpan:
        return PositionSpan(
            self.index,
            self._entries.pointers_offset + 8 * run.first_sequence,
            8 * run.sequences,
            divide=itemsize,
            add=run.first_item - run.source_offset // itemsize,
        )

    def _plan_modes(self) -> tuple[Piece, ...] | None:
        if not self.multimodal or self.documents is None:
            return None
        return (FileSpan(self.index, self._document_indices + 8 * self.documents, self.count),)
