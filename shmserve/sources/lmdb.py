"""LMDB databases: a sample is a key and its value, in the order of the keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, blobs, texts
from shmserve_client.errors import SourceFormatError

from .base import HEAD_NBYTES, DecodedSource, SourceOptions
from .extras import require
from .files import read_exactly, read_head, size_of

__all__ = ["LmdbDatabase"]

EXTRA: Final = "lmdb"
CHUNK_NBYTES: Final = 8 << 20
MAGIC: Final = b"\xde\xc0\xef\xbe"
_META_NBYTES: Final = 152
"""A page's head and the MDB_meta behind it (`liblmdb/mdb.c`): page size at 40, last page at 136, txnid at 144."""


@dataclass(frozen=True)
class LmdbDatabase(DecodedSource):
    """One database: its directory, the data.mdb in that, or a file of another name."""

    suffixes = (".mdb", ".lmdb")
    format = "lmdb"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if its first page is that of a database."""
        return cls(path) if head[16:20] == MAGIC else None

    @classmethod
    def recognise_directory(cls, directory: Path) -> Sequence[Self] | None:
        """Return the database of which data.mdb is in the directory."""
        data = directory / "data.mdb"
        if not data.is_file():
            return None
        found = cls.recognise(data, read_head(data, HEAD_NBYTES), SourceOptions())
        if found is None:
            raise SourceFormatError(f"{data}: not an LMDB database of this machine's byte order: it is damaged")
        return [found]

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield keys, as text where all of a chunk are UTF-8, and values, as bytes."""
        self._check_size()
        lmdb = require("lmdb", EXTRA, str(self.values))
        try:
            with lmdb.open(str(self.values), subdir=False, readonly=True, lock=False, max_dbs=0) as database:
                keys: list[bytes] = []
                values: list[bytes] = []
                nbytes = 0
                with database.begin(buffers=False) as transaction:
                    for key, value in transaction.cursor():
                        keys.append(key)
                        values.append(value)
                        nbytes += len(key) + len(value)
                        if nbytes >= CHUNK_NBYTES:
                            yield {"key": _keys(keys), "value": blobs(values)}
                            keys, values, nbytes = [], [], 0
                if keys:
                    yield {"key": _keys(keys), "value": blobs(values)}
        except lmdb.Error as error:
            raise SourceFormatError(f"{self.values}: truncated, or a damaged database: {error}") from error

    def _check_size(self) -> None:
        """Refuse a file that ends before its last page, which would be a signal in who maps it."""
        head = read_head(self.values, _META_NBYTES)
        page_nbytes = int.from_bytes(head[40:44], "little")
        if len(head) == _META_NBYTES and page_nbytes >= _META_NBYTES:
            second = np.empty(_META_NBYTES, np.uint8)
            read_exactly(self.values, page_nbytes, second)
            metas = [(int.from_bytes(meta[144:152], "little"), meta) for meta in (head, second.tobytes())]
            last = int.from_bytes(max(metas)[1][136:144], "little")
            if (last + 1) * page_nbytes <= size_of(self.values):
                return
        raise SourceFormatError(f"{self.values}: {size_of(self.values)} bytes: it ends before its last page: truncated")


def _keys(keys: list[bytes]) -> Chunk:
    try:
        return texts([key.decode() for key in keys])
    except UnicodeDecodeError:
        return blobs(keys)
