"""What processes hold in RAM, segments kept apart, as the kernel tells it in /proc.

Adding up resident sizes counts a shared page once per process. Private memory counts the pages that no other process
has, but takes a segment that only one process has mapped for that process's own, and page tables are in none of the
kernel's sizes. So the mappings of segments, known by their files' names, are taken out here, and page tables added.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .mapping import HUGE_PAGE_NBYTES

__all__ = ["ProcessMemory", "SegmentMapping", "measure", "segment_page_tables"]

_SEGMENT: Final = re.compile(
    # Every pattern here begins with the newline before its line: that is four times as fast as re.MULTILINE and ^.
    rb"\n([0-9a-f]+)-([0-9a-f]+) \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) +/.*"
    rb"/shmserve-\d+-[^/\n]+-[0-9a-f]{8}(?: \(deleted\))?(?=\n)"
)
_PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PAGES_PER_TABLE: Final = HUGE_PAGE_NBYTES // _PAGE_NBYTES
_GIB: Final = 1 << 30
_PIECE_NBYTES: Final = 512 << 20
"""Of the address range, what is looked at in one go: 1 MiB of page map."""


@dataclass(frozen=True)
class SegmentMapping:
    """A segment as one process has it mapped, at the addresses `[start, stop)`; sizes in bytes."""

    device: int
    inode: int
    start: int
    stop: int
    touched: int
    """Pages of the segment that this process has mapped. They are the segment's memory, not the process's."""
    written: int
    """Pages that it wrote to, or that one did from which it was forked: copies, the segment is as it was. Those that
    were swapped are not in it."""
    written_share: int
    """The same, what forked processes share divided among them; at most, since the kernel does not tell it exactly."""
    huge: int
    """Of the touched ones, what is mapped by huge pages."""


@dataclass(frozen=True)
class ProcessMemory:
    """One process, in bytes. The first two leave segments out, but hold the process's own copies of their pages."""

    private: int
    """Pages that no other process has. What forked processes still share is private to none of them."""
    proportional: int
    """The private pages, and of the pages shared with n - 1 other processes (libraries) the n-th part."""
    page_tables: int
    segments: tuple[SegmentMapping, ...]

    @property
    def touched(self) -> int:
        """How many bytes of segments are mapped, those that it wrote to left out."""
        return sum(segment.touched for segment in self.segments)


def measure(pid: int) -> ProcessMemory:
    """Return what the process `pid` holds at this moment. It takes some 4 ms for a process that has torch loaded.

    Raises:
        PermissionError: it is another user's, or is protected from this one.
        ProcessLookupError: it has ended.
    """
    smaps = _read(pid, "smaps")
    if not smaps:  # a zombie has no memory any more
        raise ProcessLookupError(f"process {pid} has ended")
    private = _sum(rb"Private_(?:Clean|Dirty)", smaps)
    proportional = _sum(rb"Pss", smaps)
    segments = []
    for found in _SEGMENT.finditer(smaps):
        figures = smaps[found.end() : smaps.index(b"VmFlags:", found.end())]
        start, stop, major, minor = (int(field, 16) for field in found.groups()[:4])
        written = _sum(rb"Anonymous", figures)
        huge = _sum(rb"(?:Shmem|File)PmdMapped", figures)
        device = os.makedev(major, minor)
        touched = _sum(rb"Rss", figures) - written
        # These figures are of the copies and of the segment's own pages together: take for copies as much as can be.
        segment_private, segment_proportional = _sum(rb"Private_(?:Clean|Dirty)", figures), _sum(rb"Pss", figures)
        written_share = min(written, segment_proportional)
        segments.append(SegmentMapping(device, int(found[5]), start, stop, touched, written, written_share, huge))
        private += min(written, segment_private) - segment_private
        proportional += written_share - segment_proportional
    return ProcessMemory(private, proportional, _sum(rb"VmPTE", _read(pid, "status")), tuple(segments))


def segment_page_tables(pid: int, segment: SegmentMapping) -> int:
    """Return the bytes of page tables that map `segment` in the process `pid`, read from its page map.

    A range of 2 MiB in which any small page is mapped takes a table of 4 KiB. Above these and the huge pages is one for
    each GiB of addresses; those in which nothing was touched count as well, unless the ranges touched are fewer, and
    at both ends those that map a neighbour, too. Left out are tables whose pages were all dropped or swapped, and the
    levels above: 4 KiB for each 512 GiB.

    It takes up to 7 ms per GiB, and next to nothing where the only small pages are those at the segment's two ends.

    Raises:
        PermissionError: it is another user's, or is protected from this one.
        ProcessLookupError: it has ended.
    """
    huge_ranges = segment.huge // HUGE_PAGE_NBYTES
    small_ranges = _small_ranges(pid, segment)
    gibs = -(-segment.stop // _GIB) - segment.start // _GIB
    return (small_ranges + min(gibs, huge_ranges + small_ranges)) * _PAGE_NBYTES


def _small_ranges(pid: int, segment: SegmentMapping) -> int:
    """Return in how many ranges of 2 MiB small pages are mapped."""
    small_pages = (segment.touched + segment.written - segment.huge) // _PAGE_NBYTES
    partial = full = 0
    for pages in _pages_by_range(pid, segment):
        if small_pages <= 0:  # all have been seen: whatever else is mapped is huge
            return partial
        is_partial = (pages > 0) & (pages < _PAGES_PER_TABLE)
        partial += int(np.count_nonzero(is_partial))
        full += int(np.count_nonzero(pages == _PAGES_PER_TABLE))
        small_pages -= int(pages[is_partial].sum())
    # A full range is a huge page or 512 small ones. The process may have gone on meanwhile, hence the 0.
    return partial + max(0, full - segment.huge // HUGE_PAGE_NBYTES)


def _pages_by_range(pid: int, segment: SegmentMapping) -> Iterator[NDArray[np.int64]]:
    """Yield for the ranges of 2 MiB, piece by piece, how many pages are mapped; the last piece comes first.

    It and the first one hold what small pages there are in a segment on huge pages.
    """
    first = segment.start - segment.start % HUGE_PAGE_NBYTES
    bounds = list(range(first, segment.stop, _PIECE_NBYTES))
    with _open(pid, "pagemap") as pagemap:
        for bound in bounds[-1:] + bounds[:-1]:
            start, stop = max(bound, segment.start), min(bound + _PIECE_NBYTES, segment.stop)
            entries = np.zeros(_PIECE_NBYTES // _PAGE_NBYTES, np.int64)
            wanted = entries[(start - bound) // _PAGE_NBYTES : (stop - bound) // _PAGE_NBYTES]
            pagemap.seek(start // _PAGE_NBYTES * entries.itemsize)
            if pagemap.readinto(wanted.data) < wanted.nbytes:
                raise ProcessLookupError(f"process {pid} has ended")
            # The highest bit, that of the sign, says that the page is there.
            yield np.count_nonzero(entries.reshape(-1, _PAGES_PER_TABLE) < 0, axis=1)


def _open(pid: int, name: str) -> FileIO:
    try:
        return FileIO(f"/proc/{pid}/{name}")
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None


def _read(pid: int, name: str) -> bytes:
    with _open(pid, name) as file:
        return file.read()


def _sum(field: bytes, lines: bytes) -> int:
    """Return the sum of a field of smaps or status over `lines`, in bytes; the kernel gives it in KiB."""
    return sum(map(int, re.findall(rb"\n%b:\s+(\d+)" % field, lines))) << 10
