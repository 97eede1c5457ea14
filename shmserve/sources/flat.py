"""Files of nothing but tokens: nanoGPT's `train.bin`, OLMo's `.npy` without a header, and whatever --dtype describes.

Nothing in such a file says what it is, so it comes last, after every format that can be told by its bytes. OLMo-core
writes `part.csv.gz` beside `part.npy`: one row `start,end` per document, in tokens; then the documents are the samples.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES
from shmserve_client.plans import ArrayPlan, ColumnPlan, PositionList, RaggedPlan

from .base import ShardPlan, Source, SourceOptions
from .files import read_array, size_of
from .pieces import FileSpan
from .refused import refuse

__all__ = ["FlatTokens"]

ASSUMED_DTYPE: Final = "uint16"
SAMPLED_WORDS: Final = 4096
SMALLEST_GUESS_WORDS: Final = 64
MAX_ROW_LENGTH: Final = 1 << 16
"""Of OLMo's bounds, which go on with names and paths."""
MAX_EMPTY_ROWS: Final = 1 << 20
"""Of the same. A compressed file of 1 MB can be of 10^9 blank lines, or of as many empty documents."""
TINY: Final = 16
"""The upper 16 bits of a 32-bit token id stay below this for any vocabulary under 2^20."""


@dataclass(frozen=True)
class FlatTokens(Source):
    """One headerless file."""

    suffixes = (".bin", ".npy")
    format = "raw"

    values: Path
    bounds: Path | None
    """OLMo's document bounds."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Values, and the bounds where there are any."""
        return (self.values,) if self.bounds is None else (self.values, self.bounds)

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file, unless its bytes are known to be something else or nothing says that they are tokens."""
        refuse(path, options)
        if path.suffix not in cls.suffixes and options.dtype is None:
            raise SourceFormatError(
                f"{path}: nothing in it tells its format (it starts with {head[:8]!r}): if it holds bare tokens, "
                "say which, for example --dtype uint16"
            )
        bounds = path.with_suffix(".csv.gz")
        return cls(path, bounds if bounds.is_file() else None)

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return the tokens as a stream, or as ragged documents where their bounds are known."""
        dtype = options.dtype or ASSUMED_DTYPE
        nbytes, itemsize = size_of(self.values), DTYPES[dtype].itemsize
        if nbytes == 0:
            raise SourceFormatError(f"{self.values}: the file is empty")
        if nbytes % itemsize:
            raise SourceFormatError(
                f"{self.values}: {nbytes} bytes are not a whole number of {dtype} tokens ({itemsize} bytes each): "
                "it is truncated, or --dtype should name another dtype"
            )
        tokens = nbytes // itemsize
        return ShardPlan(
            (
                ColumnPlan(
                    "tokens",
                    ArrayPlan(dtype, (tokens,), (FileSpan(self.values, 0, nbytes),)),
                    None if self.bounds is None else _documents(self.bounds, tokens),
                ),
            ),
            stream=self.bounds is None,
            notes=() if options.dtype else self._notes(tokens),
        )

    def _notes(self, tokens: int) -> tuple[str, ...]:
        assumed = f"no header: {ASSUMED_DTYPE} tokens are assumed, --dtype says otherwise"
        words = read_array(self.values, 0, "uint16", min(tokens, SAMPLED_WORDS))
        low, high = words[0::2], words[1::2]
        if len(words) >= SMALLEST_GUESS_WORDS and high.max() < TINY <= low.max():
            return (
                assumed,
                "every second 16-bit word is tiny, as in 32-bit tokens: did you mean --dtype uint32 or int32?",
            )
        return (assumed,)


def _documents(bounds: Path, tokens: int) -> RaggedPlan:
    """Return the documents of OLMo's bounds, which must cover all tokens in order; 8 bytes of memory each."""
    starts = array("q")
    end = 0
    try:
        with bounds.open("rb") as file, gzip.open(file, "rt", encoding="utf-8", errors="replace") as rows:
            for number, row in enumerate(iter(lambda: rows.readline(MAX_ROW_LENGTH), ""), 1):
                if len(row) == MAX_ROW_LENGTH:
                    raise SourceFormatError(f"{bounds}: row {number} has {MAX_ROW_LENGTH} characters or more")
                if number > tokens + MAX_EMPTY_ROWS:
                    raise SourceFormatError(
                        f"{bounds}: more than {number - 1} rows, but the file beside it has only {tokens} tokens"
                    )
                if row.isspace():
                    continue
                start, stop = map(int, row.split(",", 2)[:2])
                if start != end or stop < start:
                    raise SourceFormatError(
                        f"{bounds}: row {number} is the document [{start}, {stop}), but the one before ends at {end}: "
                        "documents must follow each other"
                    )
                starts.append(start)
                end = stop
    except SourceFormatError:
        raise
    except (ValueError, OverflowError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceFormatError(f"{bounds}: not rows of start,end in tokens, compressed by gzip: {error}") from error
    if end != tokens:
        raise SourceFormatError(
            f"{bounds}: the documents end at token {end}, but the file beside it has {tokens} tokens"
        )
    return RaggedPlan(len(starts), (PositionList(np.frombuffer(starts, np.int64)),))
