"""Shards of records behind a table of offsets, such as MDS and litdata write: u32 count, u32 offsets, then the records.

A record is the sizes (u32) of those fields that have no fixed one, and then the fields, one after another. All of them
are found at once, by arithmetic on the table; only fields of several lengths are copied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmserve_client.errors import SourceFormatError

from .files import read_exactly, size_of

__all__ = ["Fields", "RecordTable", "joined"]

PART_NBYTES: Final = 8 << 20

Bytes: TypeAlias = NDArray[np.uint8]
Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fields:
    """One field of some records: where each is in `data`, checked to be within it."""

    data: Bytes
    starts: Int64s
    lengths: Int64s

    def joined(self) -> Bytes:
        """Return the bytes of all, one after another."""
        return joined(self.data, self.starts, self.lengths)

    def each(self) -> Iterator[bytes]:
        """Yield the bytes of each."""
        view = memoryview(self.data.data)
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield bytes(view[start : start + length])


def joined(data: Bytes, starts: Int64s, lengths: Int64s) -> Bytes:
    """Return the pieces of `data`, which are within it, one after another."""
    if not len(starts):
        return np.empty(0, np.uint8)
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return data[starts[0] : starts[-1] + lengths[-1]]
    if (lengths == lengths[0]).all() and lengths[0] <= 64:
        return data[starts[:, None] + np.arange(lengths[0])].reshape(-1)
    view = memoryview(data.data)
    spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    return np.frombuffer(b"".join([view[start:stop] for start, stop in spans]), np.uint8)


class RecordTable:
    """The records of one shard, in its file, or in memory where that had to be decompressed."""

    def __init__(self, path: Path, content: bytes | NDArray[np.uint8] | None = None) -> None:
        """Read and check the table.

        Raises:
            SourceFormatError: the shard is truncated, or its offsets are damaged.
        """
        self._path = path
        self._content = None if content is None else np.frombuffer(content, np.uint8)
        self._nbytes = size_of(path) if content is None else len(content)
        if self._nbytes < 8:
            raise SourceFormatError(f"{path}: {self._nbytes} bytes are less than the head of a shard: it is truncated")
        self.count = int(self._read(0, 4).view("<u4")[0])
        table_nbytes = 4 * (self.count + 2)
        if table_nbytes > self._nbytes:
            raise SourceFormatError(
                f"{path}: {self._nbytes} bytes, but a table of {self.count} takes {table_nbytes}: it is truncated"
            )
        self.offsets: Int64s = self._read(4, table_nbytes - 4).view("<u4").astype(np.int64)
        if self.offsets[0] < table_nbytes or (np.diff(self.offsets) < 0).any() or self.offsets[-1] != self._nbytes:
            raise SourceFormatError(
                f"{path}: {self._nbytes} bytes, but its offsets run from {self.offsets[0]} to {self.offsets[-1]}: "
                "it is truncated or damaged"
            )

    def _read(self, start: int, nbytes: int) -> Bytes:
        if self._content is not None:
            return self._content[start : start + nbytes]
        found = np.empty(nbytes, np.uint8)
        read_exactly(self._path, start, found)
        return found

    def parts(self) -> list[Any]:
        """Return half-open ranges of records of about 8 MiB."""
        found: list[Any] = []
        start = 0
        while start < self.count or not found:
            stop = int(np.searchsorted(self.offsets, self.offsets[start] + PART_NBYTES, "right")) - 1
            stop = min(self.count, max(start + 1, stop))
            found.append([start, stop])
            start = stop
        return found

    def fields(self, start: int, stop: int, sizes: Sequence[int | None], *, sized: bool = True) -> list[Fields]:
        """Return the fields of the records `[start, stop)`.

        Args:
            start: the first record.
            stop: the one after the last.
            sizes: of each field, None for those whose size is in the record.
            sized: False where there is one field, which is the record.

        Raises:
            SourceFormatError: a record is shorter or longer than its fields.
        """
        base = int(self.offsets[start])
        data = self._read(base, int(self.offsets[stop]) - base)
        starts, stops = self.offsets[start:stop] - base, self.offsets[start + 1 : stop + 1] - base
        if not sized:
            return [Fields(data, starts, stops - starts)]
        heads = 4 * sum(size is None for size in sizes)
        self._check(starts + heads <= stops, start)
        found, position, head = [], starts + heads, starts
        for size in sizes:
            if size is None:
                lengths = data[head[:, None] + np.arange(4)].reshape(-1).view("<u4").astype(np.int64)
                head = head + 4
            else:
                lengths = np.full(len(starts), size, np.int64)
            found.append(Fields(data, position, lengths))
            position = position + lengths
            self._check(position <= stops, start)
        self._check(position == stops, start)
        return found

    def _check(self, fits: NDArray[np.bool_], first: int) -> None:
        if not fits.all():
            index = first + int(np.argmin(fits))
            raise SourceFormatError(
                f"{self._path}: the fields of sample {index} do not fit its {int(np.diff(self.offsets)[index])} bytes: "
                "the shard is damaged, or of another kind than its index says"
            )
