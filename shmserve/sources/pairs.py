"""Pairs: an index `corpus.idx` beside its values `corpus.bin`, asked for by either half or by the prefix `corpus`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shmserve_client.errors import SourceFormatError

from .base import HEAD_NBYTES
from .files import missing, read_head, size_of

__all__ = ["DTYPE_BY_CODE", "FLOATS_BY_CODE", "MMIDIDX", "PAIR_SUFFIXES", "TNTIDX", "Pair", "index_of", "open_pair"]

MMIDIDX = b"MMIDIDX\0\0"
TNTIDX = b"TNTIDX\0\0"
_MAGICS = (MMIDIDX, TNTIDX)
PAIR_SUFFIXES = (".bin", ".idx")

DTYPE_BY_CODE: Final = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    8: "uint16",
    # Only fairseq writes these two, since 2021.
    9: "uint32",
    10: "uint64",
}
FLOATS_BY_CODE: Final = {6: ("float64", "float32"), 7: ("float32", "float64")}
"""The writers mean different things by these codes: pointers and sizes decide, and an empty file takes the first."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two files, and the index's size in bytes and first HEAD_NBYTES bytes."""

    index: Path
    values: Path
    nbytes: int
    head: bytes


def index_of(values: Path) -> Path | None:
    """Return the index beside this file, unless that belongs to another one: `corpus.log` is not half of a pair."""
    index, named = (values.with_suffix(suffix) for suffix in (".idx", ".bin"))
    return index if values != index and index.is_file() and (values == named or not named.exists()) else None


def open_pair(path: Path, head: bytes, magic: bytes, header: struct.Struct) -> tuple[Pair, tuple[int, ...]] | None:
    """Return the pair that the file `path` is half of, and what its index's header says; None for other magics.

    Args:
        path: either half.
        head: its first HEAD_NBYTES bytes.
        magic: what the index starts with.
        header: magic, version, which must be 1, and the fields that are returned.

    Raises:
        SourceNotFoundError: the values are missing.
        SourceFormatError: the two names are swapped, the values are no regular file, or the index is truncated or of
            another version.
    """
    files = _find_pair(path, head)
    if files is None:
        return None
    index, values, head = files
    if not head.startswith(magic):
        return None
    nbytes = size_of(index)
    if nbytes < header.size:
        raise SourceFormatError(f"{index}: truncated: {nbytes} bytes, its header alone has {header.size}")
    _, version, *fields = header.unpack_from(head)
    if version != 1:
        name = magic.rstrip(b"\0").decode()
        raise SourceFormatError(f"{index}: {name} version {version}, only version 1 is supported")
    return Pair(index, values, nbytes, head), tuple(fields)


def _find_pair(path: Path, head: bytes) -> tuple[Path, Path, bytes] | None:
    """Return (index, values, head of the index) where the index starts with a known magic, or None.

    Raises:
        SourceNotFoundError: the values are missing.
        SourceFormatError: the two names are swapped, or the values are no regular file.
    """
    if not head.startswith(_MAGICS):
        index = index_of(path)
        if index is None:
            return None
        head = read_head(index, HEAD_NBYTES)
        return (index, path, head) if head.startswith(_MAGICS) else None
    values = path.with_suffix(".bin")
    if values == path:
        raise SourceFormatError(f"{path}: an index, by its first bytes: name it .idx, and its values .bin")
    if not values.is_file():
        raise missing(values, f", and {path} is only the index of what belongs there")
    return path, values, head
