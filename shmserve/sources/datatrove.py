"""datatrove's tokenized files, which nanotron's Nanoset reads: `x.ds` of bare tokens beside `x.ds.index`.

`x.ds.index` is one u64 per document, without a header: where it ends, in tokens. `x.ds.metadata`, if it is there, is
text whose first line ends in `|` and the bytes per token. Written after `datatrove/pipeline/tokens/tokenizer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES
from shmserve_client.plans import ArrayPlan, ColumnPlan, PositionList, RaggedPlan

from .base import ShardPlan, Source, SourceOptions
from .files import chunks, first_fall, missing, read_array, read_head, size_of
from .pieces import FileSpan, PositionSpan

__all__ = ["DatatroveTokens"]

SUFFIX: Final = ".ds"
DTYPE_BY_ITEMSIZE: Final = {2: "uint16", 4: "uint32"}
_METADATA_HEAD_NBYTES: Final = 4096


@dataclass(frozen=True)
class DatatroveTokens(Source):
    """One .ds file with its index."""

    suffixes = (SUFFIX, ".ds.index")
    format = "datatrove"

    values: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """Values, index, and the metadata where there are any."""
        return (self.values, self._index, self._metadata) if self._metadata.is_file() else (self.values, self._index)

    @property
    def _index(self) -> Path:
        return self.values.with_name(self.values.name + ".index")

    @property
    def _metadata(self) -> Path:
        return self.values.with_name(self.values.name + ".metadata")

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it or what it belongs to has an index of that name; the bytes say nothing."""
        values = path.with_suffix("") if path.suffix in (".index", ".metadata") else path
        shard = cls(values)
        if not values.is_file():
            if values.suffix == SUFFIX:
                raise missing(values, f", and {path} only describes what belongs there")
            return None
        if shard._index.is_file():
            return shard
        if values.suffix == SUFFIX:
            raise missing(shard._index, f", and only it tells the documents of {values}")
        return None

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return one ragged sample per document."""
        nbytes, index_nbytes = size_of(self.values), size_of(self._index)
        count, odd = divmod(index_nbytes, 8)
        if odd:
            raise SourceFormatError(
                f"{self._index}: {index_nbytes} bytes are not whole 8-byte positions: it is truncated"
            )
        tokens = self._check_ends(count)
        dtype = DTYPE_BY_ITEMSIZE.get(self._itemsize(nbytes, tokens))
        if dtype is None or nbytes != tokens * DTYPES[dtype].itemsize:
            raise SourceFormatError(
                f"{self.values}: {nbytes} bytes, but {self._index} ends at token {tokens}, which is {2 * tokens} bytes "
                f"of uint16 or {4 * tokens} of uint32: it is truncated, or the two do not belong together"
            )
        starts = (PositionList(np.zeros(1, np.int64)), PositionSpan(self._index, 0, 8 * (count - 1))) if count else ()
        return ShardPlan(
            (
                ColumnPlan(
                    "tokens",
                    ArrayPlan(dtype, (tokens,), (FileSpan(self.values, 0, nbytes),)),
                    RaggedPlan(count, starts),
                    any_dtype=tokens == 0 and not self._metadata.is_file(),
                ),
            ),
            notes=()
            if self._metadata.is_file() or tokens == 0
            else (f"no metadata: {dtype} tokens, by the sizes of file and index",),
        )

    def _check_ends(self, count: int) -> int:
        """Return the number of tokens, the ends checked to rise."""
        previous = 0
        for start, stop in chunks(count):
            ends = read_array(self._index, 8 * start, "int64", stop - start)
            at = first_fall(ends, previous)
            if at is not None:
                raise SourceFormatError(
                    f"{self._index}: document {start + at} ends at token {ends[at]}, before the one before it: "
                    "the index is damaged"
                )
            previous = int(ends[-1])
        return previous

    def _itemsize(self, nbytes: int, tokens: int) -> int:
        """Return the bytes per token that the metadata name, or else the sizes of the two files."""
        if self._metadata.is_file():
            first_line = read_head(self._metadata, _METADATA_HEAD_NBYTES).decode(errors="replace").partition("\n")[0]
            itemsize = first_line.rpartition("|")[2].strip()
            if itemsize.isdecimal():
                return int(itemsize)
        return nbytes // tokens if tokens else 2
