"""numpy's .npz archives: each member is a column, its first axis the samples."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, rows
from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES, is_shape

from .base import DecodedSource, SourceOptions, check_columns
from .in_place import located

__all__ = ["NpzArchive", "rows_per_chunk"]

CHUNK_NBYTES: Final = 8 << 20


@dataclass(frozen=True)
class NpzArchive(DecodedSource):
    """One .npz file, stored or deflated."""

    suffixes = (".npz",)
    format = "npz"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it is a zip archive whose first member is a .npy array."""
        if not head.startswith(b"PK\x03\x04"):
            return None
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return cls(path) if name.endswith(b".npy") or path.suffix == ".npz" else None

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows, a slice of each member at a time."""
        try:
            with zipfile.ZipFile(self.values) as archive:
                members = [name.removesuffix(".npy") for name in archive.namelist()]
                names = members if columns is None else list(columns)
                check_columns(names, members, self.values)
                readers = {name: _Member(archive, name, self.values) for name in names}
                counts = {name: reader.count for name, reader in readers.items()}
                if len(set(counts.values())) > 1:
                    raise SourceFormatError(
                        f"{self.values}: its arrays differ in length ({listed(counts)}): choose some by --columns"
                    )
                count = next(iter(counts.values()), 0)
                step = rows_per_chunk(sum(reader.row_nbytes for reader in readers.values()))
                for start in range(0, max(1, count), step):
                    wanted = min(step, count - start)
                    yield {name: reader.chunk(wanted) for name, reader in readers.items()}
                for reader in readers.values():
                    reader.finish()
        except (zipfile.BadZipFile, EOFError, KeyError, NotImplementedError) as error:
            raise SourceFormatError(f"{self.values}: truncated, or a damaged archive: {error}") from error

    locate = decode


def listed(counts: dict[str, int]) -> str:
    """Return the lengths of columns, for people."""
    return ", ".join(f"{name} has {count}" for name, count in counts.items())


def rows_per_chunk(row_nbytes: int) -> int:
    """Return how many rows of that size make a chunk."""
    return max(1, CHUNK_NBYTES // max(1, row_nbytes))


class _Member:
    """One array of the archive, read from its start to its end."""

    def __init__(self, archive: zipfile.ZipFile, name: str, path: Path) -> None:
        self._info = archive.getinfo(f"{name}.npy")
        self._file, self._where = archive.open(self._info), f"{path}: array {name!r}"
        file = self._file
        try:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version[0]}.{version[1]} is not supported")
            shape, is_fortran, dtype = getattr(np.lib.format, f"read_array_header_{version[0]}_0")(file)
        except Exception as error:  # numpy evaluates the header as Python, and passes on what that raises
            raise SourceFormatError(f"{self._where} has no readable header: {error!r}") from error
        if dtype.hasobject:
            raise SourceFormatError(
                f"{self._where} holds objects, a pickle, which is never loaded, since that runs code: leave it out by "
                "--columns, or save numbers"
            )
        if dtype.name not in DTYPES:
            raise SourceFormatError(f"{self._where} is of {dtype}, which is not supported: save numbers")
        if not shape or not is_shape(shape):
            raise SourceFormatError(f"{self._where} has the shape {shape}, so no rows: leave it out by --columns")
        self._dtype, self._row_shape = dtype, shape[1:]
        self._is_fortran = is_fortran and len(shape) > 1
        self.count = shape[0]
        self.row_nbytes = int(np.prod(self._row_shape, dtype=object)) * dtype.itemsize
        self._whole = None
        self._stored, self._crc = self._find(archive, path), 0
        if self._stored is not None:
            content, position = self._stored
            header = content[position - file.tell() : position]
            self._crc = zlib.crc32(header.data)
        if self._is_fortran:
            self._whole = iter(self._array(self._bytes(self.count * self.row_nbytes), shape[::-1]).T)

    def _find(self, archive: zipfile.ZipFile, path: Path) -> tuple[np.ndarray[Any, Any], int] | None:
        """Return the mapped file and where in it the rows start, if they are stored there as a segment has them."""
        info, nbytes = self._info, self._file.tell() + self.count * self.row_nbytes
        if info.compress_type != zipfile.ZIP_STORED or self._dtype != DTYPES[self._dtype.name] or self._is_fortran:
            return None
        content = np.memmap(path, mode="r")
        head = content[info.header_offset : info.header_offset + 30].tobytes()
        start = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        if info.file_size != nbytes or start + nbytes > content.nbytes:
            return None  # which reading it will complain about
        return content, start + self._file.tell()

    def _bytes(self, nbytes: int) -> bytearray:
        """Return the next bytes, taken piece by piece: a header that lies does not make this process take memory."""
        found = bytearray()
        while len(found) < nbytes:
            data = self._file.read(min(nbytes - len(found), CHUNK_NBYTES))
            if not data:
                raise SourceFormatError(f"{self._where} ends after {len(found)} bytes: it is truncated")
            found += data
        return found

    def _array(self, data: bytearray, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, self._dtype).reshape(shape)

    def chunk(self, count: int) -> Chunk:
        """Return the next rows, where they are in the file if they are stored there as they are."""
        if self._stored is None:
            return rows(self._read(count))
        content, position = self._stored
        data = content[position : position + count * self.row_nbytes]
        self._crc = zlib.crc32(data.data, self._crc)
        self._stored = content, position + data.nbytes
        return located(
            rows(data.view(self._dtype).reshape(count, *self._row_shape)), content.ctypes.data, content.nbytes
        )

    def _read(self, count: int) -> np.ndarray[Any, Any]:
        """Return the next rows."""
        shape = (count, *self._row_shape)
        if self._whole is None:
            found = self._array(self._bytes(count * self.row_nbytes), shape)
        else:
            found = np.array([next(self._whole) for _ in range(count)], self._dtype).reshape(shape)
        return found.astype(DTYPES[self._dtype.name], copy=False)

    def finish(self) -> None:
        """Read the end, where the archive's checksum is compared."""
        if self._stored is not None:
            if self._crc != self._info.CRC:
                raise SourceFormatError(f"{self._where} does not match its checksum: it is damaged")
            return
        if self._whole is None and self._file.read(1):
            raise SourceFormatError(f"{self._where} is longer than its header says: it is damaged")
