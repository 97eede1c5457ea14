"""Maps segments into this process at addresses where the kernel can use 2 MiB pages. All ctypes of the project is here.

The mmap module cannot choose an address, and a file mapped at an odd one never gets huge pages, however it is stored.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import OutOfSharedMemoryError
from .layout import file_offsets, whole_pages

__all__ = ["HUGE_PAGE_NBYTES", "Mapping", "map_locked", "map_private", "map_shared"]

HUGE_PAGE_NBYTES: Final = 2 << 20
_PROT_NONE: Final = 0
# Linux's numbers, which Python's mmap module has no names for.
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_COLLAPSE: Final = 25  # since Linux 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """The bytes of a file, and of files behind it, at `[address, address + nbytes)` of this process.

    They are there until the last view of them is gone. The open description of each stays open for as long, and with it
    the locks taken on it.
    """

    def __init__(self, address: int, nbytes: int, writable: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        # Not at exit: other finalizers may still read views then, and the kernel unmaps everything anyway.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, not self.writable)}

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """A view of the whole range, which keeps the mapping alive, as do all views made from it."""
        return np.asarray(self)  # a new one each time: kept as an attribute it would be a cycle

    def collapse(self, start: int) -> int:
        """Put the 2 MiB from byte `start` on one huge page, holes as zeros; return 0, or the errno of the refusal.

        At least one page of the range must exist, or it is EINVAL, and that by a write. On a tmpfs that gives huge
        pages by itself (huge=within_size, huge=always), fallocate makes one that counts as never written; collapse maps
        it as it is, and the kernel clears it when it is next read otherwise, with all that was written through here.
        """
        refused: int = _libc.madvise(self.address + start, HUGE_PAGE_NBYTES, _MADV_COLLAPSE)
        return ctypes.get_errno() if refused else 0

    def huge_nbytes(self) -> int:
        """Return how many bytes of the range this process has touched and sees through huge pages."""
        found_kib = 0
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
            inside = False
            for line in smaps:
                key, _, rest = line.partition(" ")
                if not key.endswith(":"):  # the first line of a range: "start-end permissions ..."
                    inside = int(key.partition("-")[0], 16) == self.address
                elif inside and key in ("ShmemPmdMapped:", "FilePmdMapped:"):
                    found_kib += int(rest.split()[0])
        return found_kib << 10


def map_private(fd: int, nbytes: int, behind: Sequence[tuple[int, int]] = ()) -> Mapping:
    """Return a mapping of the file's first `nbytes` bytes for a reader: what is written to it stays in this process.

    Behind it are other files, given by descriptor and size, each from a page of its own on (`layout.file_offsets`).

    It is writable, because torch warns of arrays that are not and an in-place write should not be a SIGSEGV. Where the
    kernel takes each private page for promised memory (`vm.overcommit_memory=2`) and refuses, it is read-only.

    Raises:
        OutOfSharedMemoryError: the address space has no room for it (`ulimit -v`).
    """
    try:
        return _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, behind)
    except OutOfSharedMemoryError:
        return _map(fd, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE, behind)


def map_shared(fd: int, nbytes: int) -> Mapping:
    """Return a mapping through which the loader writes the file's first `nbytes` bytes. Raises as `map_private`."""
    return _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)


def map_locked(fd: int, nbytes: int, *, ranges: Sequence[tuple[int, int]]) -> Mapping:
    """Return a read-only mapping of the file's first `nbytes` bytes that keeps some in memory, never swapped.

    Args:
        fd: the file.
        nbytes: up to its end.
        ranges: the half-open ranges of bytes to keep while the mapping lives, each from a page's start. A hole in
            them is filled with zeros, and takes memory from then on.

    Raises:
        OSError: the kernel refuses to lock so much.
        OutOfSharedMemoryError: as `map_private`.
    """
    # Shared: to lock a private mapping is to copy it.
    mapping = _map(fd, nbytes, mmap.PROT_READ, mmap.MAP_SHARED)
    for start, stop in ranges:
        if stop > start and _libc.mlock(mapping.address + start, stop - start):
            raise _os_error()
    return mapping


def _map(fd: int, nbytes: int, protection: int, flags: int, behind: Sequence[tuple[int, int]] = ()) -> Mapping:
    files = [(fd, nbytes), *behind]
    *offsets, end = file_offsets([size for _, size in files])
    total_nbytes = offsets[-1] + files[-1][1]
    try:
        address = _reserve(end)
        try:
            for (file, size), offset in zip(files, offsets, strict=True):
                _mmap(address + offset, size, protection, flags | _MAP_FIXED, file)
        except OSError:
            _libc.munmap(address, end)
            raise
    except OSError as error:
        raise OutOfSharedMemoryError(
            f"cannot map {total_nbytes} bytes into this process: {error.strerror}: raise its limit (ulimit -v"
            f"{'; of files, sysctl vm.max_map_count' if behind else ''})"
        ) from error
    # Advice only: a kernel without transparent huge pages refuses it, and small pages are right there.
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    return Mapping(address, total_nbytes, bool(protection & mmap.PROT_WRITE))


def _reserve(nbytes: int) -> int:
    """Return a 2 MiB-aligned address with `nbytes` bytes of address space, inaccessible and free of cost."""
    length = whole_pages(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(None, length + HUGE_PAGE_NBYTES, _PROT_NONE, flags, -1)
    aligned = -(-start // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    if aligned > start:
        _libc.munmap(start, aligned - start)
    _libc.munmap(aligned + length, start + HUGE_PAGE_NBYTES - aligned)
    return aligned


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped: int | None = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        raise _os_error()
    return mapped


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
