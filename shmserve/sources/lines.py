r"""Files of lines: JSON Lines, a table whose rows are JSON objects, and text, whose lines are the samples.

A line ends with `\n`, before which a `\r` does not count; the last may lack its end. Both may be compressed by gzip or
zstd. Nothing in such a file tells what it is, so its name decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, encode, ragged
from shmserve_client.errors import ObjectError, SourceFormatError

from .base import DecodedSource, SourceOptions, chosen
from .compressed import COMPRESSIONS, is_compressed, line_blocks
from .files import size_of

__all__ = ["JsonLines", "TextLines"]

PART_NBYTES: Final = 64 << 20
_MAX_EXACT_FLOAT: Final = 1 << 53
_NEWLINE: Final = ord("\n")


def _parts(path: Path) -> list[Any]:
    """Return ranges of bytes; a compressed file is read from its start."""
    if is_compressed(path):
        return [None]
    return [[start, start + PART_NBYTES] for start in range(0, max(1, size_of(path)), PART_NBYTES)]


def _blocks(path: Path, part: Any) -> Iterator[tuple[int, bytes]]:
    if part is None:
        return line_blocks(path, None)
    start, stop = part
    return line_blocks(path, (start, min(stop, size_of(path))))


@dataclass(frozen=True)
class JsonLines(DecodedSource):
    """One .jsonl or .ndjson file. Keys that a row lacks are None in it; integers among floats become floats."""

    suffixes = tuple(f"{suffix}{more}" for suffix in (".jsonl", ".ndjson") for more in COMPRESSIONS)
    format = "jsonl"
    columns_vary = True

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file by its name."""
        return cls(path) if path.name.endswith(cls.suffixes) and options.dtype is None else None

    def parts(self) -> list[Any]:
        """Return ranges of bytes."""
        return _parts(self.values)

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows whose lines start within the part."""
        for position, block in _blocks(self.values, part):
            rows = self._rows(position, block)
            if rows:
                names = chosen(dict.fromkeys(name for row in rows for name in row), columns)
                yield {name: self._encode([row.get(name) for row in rows], name) for name in names}

    def _rows(self, position: int, block: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in block.split(b"\n"):
            if line and not line.isspace():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise SourceFormatError(f"{self.values}: the line at byte {position}: {error}") from error
                if type(row) is not dict or not row:
                    raise SourceFormatError(
                        f"{self.values}: the line at byte {position} is not a JSON object with keys: each line is a row"
                    )
                rows.append(row)
            position += len(line) + 1
        return rows

    def _encode(self, values: list[Any], name: str) -> Chunk:
        try:
            return encode(_widened(values), name)
        except ObjectError as error:
            raise SourceFormatError(f"{self.values}: column {name!r}: {error}") from error


def _widened(values: list[Any]) -> list[Any]:
    """Return the values, integers as floats where both occur: in JSON they are one type, number."""
    types = set(map(type, values))
    if types == {int, float}:
        return _as_floats(values)
    if types == {list}:
        inner = set(map(type, chain.from_iterable(values)))
        if inner == {int, float}:
            return [_as_floats(value) for value in values]
    return values


def _as_floats(values: Sequence[Any]) -> list[Any]:
    if any(abs(value) > _MAX_EXACT_FLOAT for value in values if type(value) is int):
        return list(values)
    return list(map(float, values))


@dataclass(frozen=True)
class TextLines(DecodedSource):
    """One .txt file: a sample is a line, also a blank one, as a string."""

    suffixes = tuple(f".txt{more}" for more in COMPRESSIONS)
    may_accompany = True
    format = "text"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file by its name."""
        return cls(path) if path.name.endswith(cls.suffixes) and options.dtype is None else None

    def parts(self) -> list[Any]:
        """Return ranges of bytes."""
        return _parts(self.values)

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the lines that start within the part."""
        for position, block in _blocks(self.values, part):
            try:
                block.isascii() or block.decode()
            except UnicodeDecodeError as error:
                raise SourceFormatError(
                    f"{self.values}: byte {position + error.start} is not UTF-8: convert it, or serve it with "
                    "--dtype uint8"
                ) from error
            yield {"text": _lines(block)}


def _lines(block: bytes) -> Chunk:
    """Return the lines of a block as strings, without a loop over them."""
    if not block.endswith(b"\n"):
        block += b"\n"
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
    lengths = np.diff(ends, prepend=-1) - 1
    return ragged(np.frombuffer(block.replace(b"\n", b""), np.uint8), lengths.astype(np.int64), "text")
