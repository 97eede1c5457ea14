"""What a process costs in RAM, a shared segment kept apart.

Adding up resident sizes counts shared pages once per process; here pages that several processes map are divided among
them (the kernel's PSS), so that a sum over processes is real memory. Page tables are in none of the kernel's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessMemory", "measure"]


@dataclass(frozen=True)
class ProcessMemory:
    """One process, in bytes. The first two leave the segment out."""

    private: int
    """Pages that no other process has."""
    proportional: int
    """The private pages, and of the pages shared with n - 1 other processes (libraries) the n-th part."""
    segment: int
    """Of the segment, how much was touched here. It is memory of the segment, not of this process."""
    page_tables: int


def measure(pid: int, segment: str = "") -> ProcessMemory:
    """Return what the process `pid` holds at this moment; `segment` is the path of the segment, if there is one."""
    private = proportional = touched = 0
    for name, sizes in _mappings(pid):
        if segment and name == segment:
            touched += sizes["Rss"] - sizes["Anonymous"]
            private += sizes["Anonymous"]  # pages of it that this process wrote to are its own
            proportional += sizes["Anonymous"]
        else:
            private += sizes["Private_Clean"] + sizes["Private_Dirty"]
            proportional += sizes["Pss"]
    return ProcessMemory(private, proportional, touched, _page_tables(pid))


def _mappings(pid: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (path or "", sizes in bytes by the kernel's names) of each mapping."""
    name = ""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="surrogateescape").splitlines():
        if not line[0].isupper():  # the mapping's first line: address, permissions, offset, device, inode, path
            name, sizes = [*line.split(maxsplit=5), ""][5], {}
        elif line.endswith(" kB"):
            key, value, _ = line.split()
            sizes[key.rstrip(":")] = int(value) * 1024
        elif line.startswith("VmFlags:"):  # its last line
            yield name, sizes


def _page_tables(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmPTE:"):
            return int(line.split()[1]) * 1024
    return 0
