"""Pairs: an index `corpus.idx` beside its values `corpus.bin`, asked for by either half or by the prefix `corpus`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shmserve_client.errors import SourceFormatError

from .base import HEAD_NBYTES
from .files import missing, read_head

__all__ = ["DTYPE_BY_CODE", "FLOATS_BY_CODE", "MMIDIDX", "PAIR_SUFFIXES", "TNTIDX", "Pair", "find_pair", "index_of"]

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
    """The two files, and the first HEAD_NBYTES bytes of the index."""

    index: Path
    values: Path
    head: bytes


def index_of(values: Path) -> Path | None:
    """Return the index beside this file, unless that belongs to another one: `corpus.log` is not half of a pair."""
    index, named = (values.with_suffix(suffix) for suffix in (".idx", ".bin"))
    return index if values != index and index.is_file() and (values == named or not named.exists()) else None


def find_pair(path: Path, head: bytes) -> Pair | None:
    """Return the pair whose index starts with a known magic and that the file `path` is half of, or None.

    Raises:
        SourceNotFoundError: the values are missing.
        SourceFormatError: the two names are swapped, or the values are no regular file.
    """
    if not head.startswith(_MAGICS):
        index = index_of(path)
        if index is None:
            return None
        head = read_head(index, HEAD_NBYTES)
        return Pair(index, path, head) if head.startswith(_MAGICS) else None
    values = path.with_suffix(".bin")
    if values == path:
        raise SourceFormatError(f"{path}: an index, by its first bytes: name it .idx, and its values .bin")
    if not values.is_file():
        raise missing(values, f", and {path} is only the index of what belongs there")
    return Pair(path, values, head)
