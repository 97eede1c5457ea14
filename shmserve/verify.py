"""Verifying: are the bytes of a segment still those that were loaded, and are they those of the source?

The segment is read by calls, not mapped: they return what everybody has mapped, a page that the memory has lost is an
error and no signal, and whoever verifies is not counted as attached.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shmserve_client.checksums import checksum
from shmserve_client.errors import ConfigError, SegmentFormatError, SegmentNotFoundError, SourceFormatError
from shmserve_client.filling import Span, spans_within
from shmserve_client.layout import CHUNK_NBYTES, DTYPES, Array, Checksums, Column, Description
from shmserve_client.segment import open_segment, read_prefix
from shmserve_client.writer import place_pieces

from .decoding import plan_corpus
from .loader import describe
from .sources import Resolved, resolve
from .sources.base import SourceOptions

__all__ = ["DamagedChunk", "Difference", "Part", "Verified", "verify"]

_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Part:
    """The items `[start, stop)` of an array, and the half-open range of samples that they belong to.

    `samples` is None where an item belongs to none, or where the offsets that would tell are in doubt, too.
    """

    array: str
    start: int
    stop: int
    samples: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class DamagedChunk:
    """Something in the bytes `[start, stop)` of the segment is not as it was loaded."""

    start: int
    stop: int
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Difference:
    """A stretch of the source that is not as the segment has it; told is the first byte of all that differ."""

    byte: int
    """From the segment's start."""
    array: str
    item: int
    sample: int | None
    origin: str
    """Where in the source it is; empty where nothing can be said."""
    nbytes: int
    """How many bytes of the stretch differ."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a segment was found to be."""

    name: str
    path: str
    nbytes: int
    """How many bytes were looked at: those of the arrays, and what is between them."""
    chunks: int
    """How many chunks were compared with their checksums; 0 where there are none, or where these are damaged."""
    checksums_damaged: bool
    """Whether the checksums themselves are not as they were written."""
    damaged: list[DamagedChunk]
    source_files: int | None
    """How many files the segment was compared with; None where it was not."""
    differences: list[Difference]


def verify(
    path: str, nonce: bytes, *, against_source: bool, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verified:
    """Return what became of the segment at `path` since it was loaded.

    Args:
        path: of the segment, as the daemon names it.
        nonce: what its header must hold.
        against_source: whether to read the source again and compare each byte.
        progress: called with the bytes done and in all, from several threads, one call at a time.

    Raises:
        ConfigError: the segment has no checksums, and is not to be compared with its source.
        SegmentFormatError: its header or description is damaged.
        SegmentNotFoundError: it is gone, or this process sees another shm directory than the daemon.
        SourceNotFoundError: a file of the source is gone.
        SourceFormatError: the source has changed since it was loaded, or does so meanwhile.
    """
    fd = open_segment(path)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        header, description = read_prefix(fd)
        if header.nonce != nonce:
            raise SegmentNotFoundError(
                f"the segment at {path} is another one than the daemon's: this process has another shm directory than "
                "the daemon (containers: share it with --ipc or a common volume), or the dataset was loaded anew"
            )
        checksums = description.checksums
        if checksums is None and not against_source:
            raise ConfigError(
                f"{description.name!r} was loaded without checksums: start the daemon with --checksums and load it "
                "again, or compare it with its source, by --against-source"
            )
        resolved, spans = stack.enter_context(_source(description)) if against_source else (None, [])
        sums = None if checksums is None else _read_checksums(fd, checksums)
        comparison = _Comparison(header.data_offset, sums, spans)
        stop = header.total_nbytes if checksums is None else checksums.values.offset
        _walk(fd, header.data_offset, stop, comparison, progress)
        if resolved is not None and resolved.changed():
            raise SourceFormatError(f"{', '.join(resolved.data)} changed while it was compared: try again")
        places = _Places(fd, description)
        damaged = [(start, min(start + CHUNK_NBYTES, stop)) for start in sorted(comparison.damaged)]
        differing = sorted(comparison.differences.values(), key=lambda found: found.first)
        places.doubt([(found.first, found.first + 1) for found in differing] if against_source else damaged)
        return Verified(
            name=description.name,
            path=path,
            nbytes=stop - header.data_offset,
            chunks=0 if sums is None else len(sums),
            checksums_damaged=checksums is not None and sums is None,
            damaged=[DamagedChunk(start, end, places.parts(start, end)) for start, end in damaged],
            source_files=None if resolved is None else len(resolved.files),
            differences=[_difference(places, found) for found in differing],
        )


@contextmanager
def _source(description: Description) -> Iterator[tuple[Resolved, list[Span]]]:
    """Give the source as it is now, and where in the segment each of its pieces should be."""
    record = description.source
    options = SourceOptions(
        record.dtype, record.vocab_size, record.columns, record.decode, in_place=bool(description.files)
    )
    resolved = resolve(record.data, options)
    if resolved.fingerprint != record.fingerprint:
        raise SourceFormatError(
            f"{', '.join(record.data)} changed since it was loaded: `shmserve reload {description.name}` serves it as "
            "it is now"
        )
    with plan_corpus(resolved, shm_dir=None) as planned:
        found, pieces = describe(description.name, resolved, planned.corpus)
        arrays = description.all_arrays()
        if [(array.dtype, array.shape) for array in found.all_arrays()] != [(one.dtype, one.shape) for one in arrays]:
            raise SourceFormatError(
                f"{', '.join(record.data)} has other arrays than were loaded from it: its index was changed, and its "
                f"modification time set back; `shmserve reload {description.name}` serves it as it is now"
            )
        yield resolved, place_pieces(arrays, pieces)


def _read(fd: int, target: NDArray[np.uint8], start: int) -> None:
    done = 0
    while done < target.nbytes:
        count = os.preadv(fd, [target[done:].data], start + done)
        if count == 0:
            raise SegmentFormatError(f"the segment was truncated: nothing is left at byte {start + done}")
        done += count


def _read_checksums(fd: int, checksums: Checksums) -> NDArray[np.uint64] | None:
    """Return the checksum of each chunk; None where they are damaged themselves."""
    stored = np.empty(checksums.values.shape, DTYPES["uint64"])
    _read(fd, stored.view(np.uint8), checksums.values.offset)
    sums: NDArray[np.uint64] = stored[:-1]
    return sums if checksum(sums.view(np.uint8)) == int(stored[-1]) else None


def _walk(
    fd: int,
    start: int,
    stop: int,
    compare: Callable[[NDArray[np.uint8], int], None],
    progress: Callable[[int, int], None],
) -> None:
    """Call `compare` with each chunk of `[start, stop)` of the file and where it starts, by several threads."""
    lock = threading.Lock()
    starts = iter(range(start, stop, CHUNK_NBYTES))
    done_nbytes = 0
    stopping = False

    def work() -> None:
        nonlocal done_nbytes
        buffer = np.empty(CHUNK_NBYTES, np.uint8)
        while not stopping:
            with lock:
                position = next(starts, None)
            if position is None:
                break
            chunk = buffer[: stop - position]
            _read(fd, chunk, position)
            compare(chunk, position)
            with lock:
                done_nbytes += chunk.nbytes
                progress(done_nbytes, stop - start)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shmserve-verify") as threads:
        try:
            for finished in as_completed([threads.submit(work) for _ in range(_THREADS)]):
                finished.result()
        finally:  # an interrupt of this thread, and a failure of one, end the others
            stopping = True


@dataclass(frozen=True, slots=True)
class _Differing:
    """A span of the source whose bytes differ, first at `first` of the segment, `nbytes` in all."""

    span: Span
    first: int
    nbytes: int


class _Comparison:
    """Compares chunks of the segment with their checksums and with the source; several threads call it.

    Attributes:
        damaged: where the chunks start that do not match their checksum.
        differences: by the span's start, what differs from the source.
    """

    def __init__(self, data_offset: int, sums: NDArray[np.uint64] | None, spans: Sequence[Span]) -> None:
        self._data_offset = data_offset
        self._sums = sums
        self._spans = spans
        self._lock = threading.Lock()
        self.damaged: list[int] = []
        self.differences: dict[int, _Differing] = {}

    def __call__(self, chunk: NDArray[np.uint8], start: int) -> None:
        if self._sums is not None and checksum(chunk) != int(self._sums[(start - self._data_offset) // CHUNK_NBYTES]):
            with self._lock:
                self.damaged.append(start)
        if not self._spans:
            return
        wanted = np.empty_like(chunk)
        for span in spans_within(self._spans, start, start + chunk.nbytes):
            part = span.read(wanted, start)
            differing = np.flatnonzero(chunk[part] != wanted[part])
            if len(differing):
                self._add(_Differing(span, start + part.start + int(differing[0]), len(differing)))

    def _add(self, found: _Differing) -> None:
        key = found.span.start
        with self._lock:
            before = self.differences.get(key, _Differing(found.span, found.first, 0))
            first, nbytes = min(before.first, found.first), before.nbytes + found.nbytes
            self.differences[key] = _Differing(found.span, first, nbytes)


@dataclass(frozen=True, slots=True)
class _Named:
    """An array of the segment and what it is called; `column` is the one whose samples it tells of."""

    name: str
    array: Array
    column: Column | None = None

    def items_within(self, start: int, stop: int) -> range:
        """Return which items have bytes in `[start, stop)` of the segment."""
        itemsize = DTYPES[self.array.dtype].itemsize
        low, high = max(0, start - self.array.offset), min(self.array.nbytes, stop - self.array.offset)
        return range(low // itemsize, -(-high // itemsize)) if low < high else range(0)


def _named_arrays(description: Description) -> Iterator[_Named]:
    for column in description.columns:
        if not column.values.in_files:
            yield _Named(f"{column.name}.values", column.values, column)
        for name in ("offsets", "stops", "shapes", "shape_offsets"):
            array = getattr(column, name)
            if array is not None:
                yield _Named(f"{column.name}.{name}", array, column)
    for name, array in description.arrays.items():
        yield _Named(name, array)


class _Places:
    """Says of bytes of the segment to which arrays, items and samples they belong."""

    def __init__(self, fd: int, description: Description) -> None:
        self._fd = fd
        self._description = description
        self._arrays = list(_named_arrays(description))
        self._doubted: set[int] = set()

    def doubt(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take no array's word that has bytes in one of the half-open ranges."""
        self._doubted = {
            named.array.offset for named in self._arrays if any(named.items_within(*within) for within in ranges)
        }

    def parts(self, start: int, stop: int) -> list[Part]:
        """Return what has bytes in `[start, stop)`."""
        return [
            Part(named.name, items.start, items.stop, self._samples(named, items))
            for named in self._arrays
            if (items := named.items_within(start, stop))
        ]

    def _samples(self, named: _Named, items: range) -> tuple[int, int] | None:
        column, count = named.column, self._description.num_samples
        if column is None or named.array is column.shapes or self._description.stream:
            return None
        if named.array is not column.values:  # item i is the end of one sample and the start of the next
            return max(0, items.start - 1), min(count, items.stop)
        if column.offsets is None:
            row = math.prod(column.values.shape[1:])
            return items.start // row, -(-items.stop // row)
        if column.offsets.offset in self._doubted:
            return None
        offsets, start_of = range(count + 1), self._reader(column.offsets)
        return (
            max(0, bisect_right(offsets, items.start, key=start_of) - 1),
            min(count, bisect_left(offsets, items.stop, key=start_of)),
        )

    def _reader(self, array: Array) -> Callable[[int], int]:
        """Return what reads a single item of an int64 array."""

        def item(index: int) -> int:
            return int.from_bytes(os.pread(self._fd, 8, array.offset + 8 * index), "little", signed=True)

        return item


def _difference(places: _Places, found: _Differing) -> Difference:
    (part,) = places.parts(found.first, found.first + 1)
    return Difference(
        byte=found.first,
        array=part.array,
        item=part.start,
        sample=part.samples[0] if part.samples is not None else None,
        origin=found.span.origin(found.first - found.span.start),
        nbytes=found.nbytes,
    )
