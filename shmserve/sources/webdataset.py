"""webdataset's tar archives: the members that share a name up to its first dot are a sample.

Each extension is a column, besides `__key__`. What its name alone makes certain is decoded, as webdataset does by
default: text, integers (`cls`, `id`, `index`), `json` and `npy`; all else, such as images, is bytes. A pickle is never
loaded.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, encode
from shmserve_client.errors import ConfigError, ObjectError, SourceFormatError

from .base import DecodedSource, SourceOptions, chosen

__all__ = ["TarArchive"]

CHUNK_NBYTES: Final = 8 << 20
PART_NBYTES: Final = 64 << 20
MAX_MEMBER_NBYTES: Final = 1 << 31
KEY: Final = "__key__"
TEXT: Final = frozenset(("txt", "text", "transcript"))
INTEGERS: Final = frozenset(("cls", "cls2", "id", "index", "inx"))
PICKLES: Final = frozenset(("pkl", "pickle", "pyd", "pth", "pt"))
COMPRESSED: Final = (".tar.gz", ".tgz")


@dataclass(frozen=True)
class TarArchive(DecodedSource):
    """One archive; a compressed one is read from its start to its end."""

    suffixes = (".tar", *COMPRESSED)
    format = "webdataset"
    columns_vary = True

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if its first block is that of an archive, or by its name where it is compressed."""
        if path.name.endswith(COMPRESSED):
            return cls(path)
        with path.open("rb") as file:
            file.seek(257)
            return cls(path) if file.read(5) == b"ustar" else None

    def parts(self) -> list[Any]:
        """Return ranges of bytes, each of whole samples."""
        if self.values.name.endswith(COMPRESSED):
            return [None]
        found: list[Any] = []
        start, key, at = 0, None, 0
        with self._opened(0) as archive:
            for member in archive:
                stem = _key_of(member)[0]
                if stem != key and at - start >= PART_NBYTES:
                    found.append([start, at])
                    start = at
                key, at = stem, _end_of(member)
        self._check_end(at)
        return [*found, [start, at]]

    def _check_end(self, end: int) -> None:
        """Refuse an archive without the blocks of zeros at its end: it was cut between two members."""
        with self.values.open("rb") as file:
            file.seek(end)
            if len(tail := file.read(512)) < 512 or any(tail):
                raise SourceFormatError(f"{self.values}: the archive has no end mark at byte {end}: it is truncated")

    @contextmanager
    def _opened(self, start: int) -> Iterator[tarfile.TarFile]:
        mode: Any = "r|gz" if self.values.name.endswith(COMPRESSED) else "r:"
        with self.values.open("rb") as file:
            file.seek(start)
            with tarfile.open(fileobj=file, mode=mode) as archive:
                yield archive

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the samples whose members lie in the range."""
        start, stop = part or (0, None)
        rows: list[dict[str, Any]] = []
        nbytes = 0
        try:
            for sample in self._samples(start, stop):
                nbytes += sum(map(len, sample.values()))
                rows.append(self._decoded(sample, columns))
                if nbytes >= CHUNK_NBYTES:
                    yield self._chunks(rows)
                    rows, nbytes = [], 0
        except (tarfile.TarError, EOFError, OSError) as error:
            raise SourceFormatError(f"{self.values}: truncated, or a damaged archive: {error}") from error
        if rows:
            yield self._chunks(rows)

    def _samples(self, start: int, stop: int | None) -> Iterator[dict[str, bytes]]:
        sample: dict[str, bytes] = {}
        with self._opened(start) as archive:
            for member in archive:
                if stop is not None and start + member.offset >= stop:
                    break
                stem, extension = _key_of(member)
                if not member.isreg() or not extension or PurePosixPath(stem).name.startswith((".", "__")):
                    continue
                if member.size > MAX_MEMBER_NBYTES:
                    raise SourceFormatError(f"{self.values}: {member.name} has {member.size} bytes: 2 GiB are the most")
                if sample and sample[KEY] != stem.encode("utf-8", "surrogateescape"):
                    yield sample
                    sample = {}
                sample.setdefault(KEY, stem.encode("utf-8", "surrogateescape"))
                if extension in sample:
                    raise SourceFormatError(f"{self.values}: {member.name} is there twice: rename one")
                content = archive.extractfile(member)
                data = content.read() if content is not None else b""
                if len(data) != member.size:
                    raise SourceFormatError(f"{self.values}: {member.name} ends early: the archive is truncated")
                sample[extension] = data
        if sample:
            yield sample

    def _decoded(self, sample: dict[str, bytes], columns: tuple[str, ...] | None) -> dict[str, Any]:
        names = chosen(sample, columns)
        return {name: self._value(name, sample[name], sample[KEY]) for name in names}

    def _value(self, extension: str, data: bytes, key: bytes) -> Any:
        kind = extension.rpartition(".")[2].lower()
        where = f"{self.values}: {key.decode(errors='replace')}.{extension}"
        if kind in PICKLES:
            raise ConfigError(
                f"{where} is a pickle, which is never loaded, since that runs code: leave it out by --columns"
            )
        try:
            if kind in TEXT or extension == KEY:
                return data.decode()
            if kind in INTEGERS:
                return int(data)
            if kind == "json":
                return json.loads(data)
            if kind == "npy":
                return np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, RecursionError, EOFError) as error:
            raise SourceFormatError(f"{where} cannot be decoded: {error}") from error
        return data

    def _chunks(self, rows: list[dict[str, Any]]) -> dict[str, Chunk]:
        names = dict.fromkeys(name for row in rows for name in row)
        try:
            return {name: encode([row.get(name) for row in rows], name) for name in names}
        except ObjectError as error:
            raise SourceFormatError(f"{self.values}: {error}") from error


def _key_of(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return what names the sample, and the extension: the file's name up to its first dot, and what follows."""
    folder, slash, name = member.name.removeprefix("./").rpartition("/")
    stem, _, extension = name.partition(".")
    return f"{folder}{slash}{stem}", extension


def _end_of(member: tarfile.TarInfo) -> int:
    """Return where the next member starts: contents are filled up to blocks of 512 bytes."""
    return member.offset_data + -(-member.size // 512) * 512 if member.isreg() else member.offset_data
