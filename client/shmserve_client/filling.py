"""Fills the unnamed file of a segment: takes memory for 2 MiB, on one huge page if possible, then reads into it.

A write to a page that the tmpfs or the cgroup cannot give is SIGBUS, so memory is taken by calls that fail instead.
Memory taken beforehand for the whole file would be on small pages, which a huge page must then be copied from.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import ShmserveError, SourceFormatError, VocabularyError
from .mapping import HUGE_PAGE_NBYTES, map_shared

__all__ = ["Filling", "Span", "ValueCheck", "WindowCheck", "spans_within"]

_THREADS: Final = 2
"""One reads while the other waits for the kernel to clear a huge page; a third gained nothing on a local disk."""
_ROOM_CHECK_NBYTES: Final = 256 << 20
"""A limit of the cgroup that is reached ends in SIGKILL, and others take memory in the meantime."""
_MAX_REFUSALS_IN_A_ROW: Final = 8
"""A kernel that has run out of huge pages takes long over each refusal, so asking ends."""


@dataclass(frozen=True)
class Span:
    """The bytes `[start, stop)` of the file, and what reads them: `read_into(target, offset from start)`."""

    start: int
    stop: int
    read_into: Callable[[NDArray[np.uint8], int], None]
    origin: Callable[[int], str]
    """Says where the byte at an offset from start comes from."""

    def read(self, window: NDArray[np.uint8], window_start: int) -> slice:
        """Read the part of the span that lies in a window of the file into it; return which of its bytes that is.

        Raises:
            SourceFormatError: the source has changed or cannot be read.
        """
        low, high = max(window_start, self.start), min(window_start + window.nbytes, self.stop)
        part = slice(low - window_start, max(low, high) - window_start)
        if low < high:
            try:
                self.read_into(window[part], low - self.start)
            except ShmserveError:
                raise
            except OSError as error:
                raise SourceFormatError(f"a source file has changed or failed while it was read: {error}") from error
        return part


def spans_within(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield those of the spans, in ascending order and apart, that have bytes in `[start, stop)`, or are empty."""
    position = max(0, bisect_right(spans, start, key=attrgetter("start")) - 1)
    while position < len(spans) and spans[position].start < stop:
        yield spans[position]
        position += 1


WindowCheck: TypeAlias = Callable[[NDArray[np.uint8], int], None]
"""Called with each window's bytes and where in the file they start, once they are read and while they are in the
processor's cache; by several threads, in any order."""


@dataclass(frozen=True)
class ValueCheck:
    """Token ids at `[start, stop)` of the file, each of which must lie in `[0, vocab_size)`."""

    start: int
    stop: int
    dtype: np.dtype[Any]
    vocab_size: int
    origin: Callable[[int], str]
    """Says where a byte of the file comes from."""

    def __call__(self, window: NDArray[np.uint8], window_start: int) -> None:
        """Check the values in the file's bytes from `window_start`, while they are in the processor's cache.

        Raises:
            VocabularyError: names the first value that is outside, its position among all values, and where it is from.
        """
        low, high = max(self.start, window_start), min(self.stop, window_start + window.nbytes)
        if low >= high:
            return
        values = window[low - window_start : high - window_start].view(self.dtype)
        unsigned = values.view(f"u{self.dtype.itemsize}")  # negative ids become the largest
        # No larger than the dtype's own end, behind which are the negative ones.
        end = min(self.vocab_size, int(np.iinfo(self.dtype).max) + 1)
        if int(unsigned.max()) >= end:
            first = int(np.argmax(unsigned >= end))
            position = (low - self.start) // self.dtype.itemsize + first
            raise VocabularyError(
                f"token id {values[first]} at position {position} is outside the vocabulary [0, {self.vocab_size}) "
                f"({self.origin(low + first * self.dtype.itemsize)}): the data, the dtype or --vocab-size is wrong"
            )


class Filling:
    """One pass over the bytes `[start, total_nbytes)` of a file, in windows of 2 MiB; `start` is a multiple of that."""

    def __init__(
        self,
        fd: int,
        *,
        start: int,
        total_nbytes: int,
        spans: Sequence[Span],
        checks: Sequence[WindowCheck],
        check_room: Callable[[int], None],
        progress: Callable[[int, int], None],
        cancelled: threading.Event,
    ) -> None:
        """Prepare; the spans are in ascending order and do not overlap. Gaps between them stay zeros.

        `check_room` is called now and then with the bytes that are still to be taken.
        """
        self._fd = fd
        self._mapping = map_shared(fd, total_nbytes)
        self._bytes = self._mapping.bytes
        self._start, self._stop = start, total_nbytes
        self._spans = spans
        self._checks = checks
        self._check_room = check_room
        self._progress = progress
        self._cancelled = cancelled
        self._lock = threading.Lock()  # for all below
        self._next_start = start
        self._done_nbytes = 0
        self._stopping = False
        self._failures: list[tuple[int, BaseException]] = []
        self._refusals_in_a_row = 0
        self.refusal_errno = 0
        """Why the kernel last refused a huge page; 0 when it never did."""

    def run(self) -> None:
        """Read every span into its place. Raises what a span, a check or `progress` raises, CancelledError, OSError.

        Of several failures the one nearest to the start is raised, as if a single thread had read.
        """
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shmserve-fill") as threads:
            try:
                wait([threads.submit(self._fill_windows) for _ in range(_THREADS)])
            finally:  # an interrupt of this thread ends the others
                self._stopping = True
        if self._failures:
            raise min(self._failures, key=itemgetter(0))[1]
        if self._next_start < self._stop:
            raise CancelledError("loading was cancelled")

    def _fill_windows(self) -> None:
        while (start := self._take_window()) is not None:
            stop = min(start + HUGE_PAGE_NBYTES, self._stop)
            try:
                if (start - self._start) % _ROOM_CHECK_NBYTES == 0:
                    self._check_room(self._stop - start)
                self._take_memory(start, stop)
                window = self._bytes[start:stop]
                for span in spans_within(self._spans, start, stop):
                    span.read(window, start)
                for check in self._checks:
                    check(window, start)
                with self._lock:
                    self._done_nbytes += stop - start
                    self._progress(self._done_nbytes, self._stop - self._start)
            except BaseException as error:  # for `run` to raise
                with self._lock:
                    self._failures.append((start, error))

    def _take_window(self) -> int | None:
        with self._lock:
            start = self._next_start
            if start >= self._stop or self._failures or self._stopping or self._cancelled.is_set():
                return None
            self._next_start += HUGE_PAGE_NBYTES
            return start

    def _take_memory(self, start: int, stop: int) -> None:
        """Allocate the window, so that no write to it can fail.

        The last one, unless it is whole, stays on small pages: a huge page would take up to 2 MiB more of everybody's
        memory, to save each process 4 KiB of page table.
        """
        if stop - start == HUGE_PAGE_NBYTES and self._refusals_in_a_row < _MAX_REFUSALS_IN_A_ROW:
            # What is empty cannot be collapsed. Not posix_fallocate: see Mapping.collapse.
            os.pwrite(self._fd, b"\0", start)
            refusal = self._mapping.collapse(start)
            if refusal == errno.EAGAIN:  # somebody else, such as compaction, had the page in hand
                refusal = self._mapping.collapse(start)
            with self._lock:
                self._refusals_in_a_row = self._refusals_in_a_row + 1 if refusal else 0
                self.refusal_errno = refusal or self.refusal_errno
            if not refusal:
                return
        os.posix_fallocate(self._fd, start, stop - start)
