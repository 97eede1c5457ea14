"""Files that may be compressed as a whole, by gzip or zstd, as streams of blocks that end between lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from shmserve_client.errors import SourceFormatError

from .extras import require

__all__ = ["COMPRESSIONS", "is_compressed", "line_blocks", "open_stream"]

COMPRESSIONS: Final = ("", ".gz", ".zst")
"""What may follow the suffix of such a file."""
BLOCK_NBYTES: Final = 4 << 20
MAX_LINE_NBYTES: Final = 1 << 30


def is_compressed(path: Path) -> bool:
    """Return whether its name says that it is compressed as a whole."""
    return path.suffix in COMPRESSIONS[1:]


def open_stream(path: Path) -> Iterator[bytes]:
    """Yield the file's content, decompressed, in blocks of any size.

    Raises:
        ConfigError: a library is missing.
        SourceFormatError: it is truncated or damaged.
    """
    if path.suffix in (".zst", ".zstd"):
        return _zstd(path)
    return _gzip(path) if path.suffix == ".gz" else _plain(path)


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(BLOCK_NBYTES), b"")


def _gzip(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) as file:
            yield from iter(lambda: file.read(BLOCK_NBYTES), b"")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceFormatError(f"{path}: truncated, or no gzip: {error}") from error


def _zstd(path: Path) -> Iterator[bytes]:
    zstandard = require("zstandard", "compressed", str(path))
    with path.open("rb") as file:
        try:
            yield from _frames(zstandard.ZstdDecompressor(), file, path)
        except zstandard.ZstdError as error:
            raise SourceFormatError(f"{path}: damaged, or no zstd: {error}") from error


def _frames(decompressor: Any, file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield what the frames of a file hold, one after another."""
    frame = None
    data = file.read(BLOCK_NBYTES // 8)
    while data:
        frame = frame or decompressor.decompressobj()
        if block := frame.decompress(data):
            yield block
        data = frame.unused_data or file.read(BLOCK_NBYTES // 8)
        if frame.eof:
            frame = None
    if frame is not None:
        raise SourceFormatError(f"{path}: it ends within its data: it is truncated")


def line_blocks(path: Path, part: tuple[int, int] | None) -> Iterator[tuple[int, bytes]]:
    r"""Yield (position, block): whole lines, each with its `\n` but for the file's last, about 4 MiB at a time.

    Args:
        path: the file.
        part: the lines that start within this half-open range of bytes; None for all of them.

    Raises:
        SourceFormatError: the file is damaged, or has a line of more than 1 GiB.
    """
    position, rest = 0, b""
    if part is None:
        stream = open_stream(path)
    else:
        position, stream = _from(path, *part)
    for data in stream:
        block = rest + data
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if len(rest) > MAX_LINE_NBYTES:
            raise SourceFormatError(
                f"{path}: more than {MAX_LINE_NBYTES} bytes without a line's end: not lines of text"
            )
        if end:
            yield position, block[:end]
            position += end
    if rest:
        yield position, rest


def _from(path: Path, start: int, stop: int) -> tuple[int, Iterator[bytes]]:
    """Return where the first line starts at or after `start`, and blocks from there to the end of the last before."""
    if start:
        with path.open("rb") as file:
            file.seek(start - 1)
            start += len(file.readline()) - 1
    return start, _between(path, start, stop)


def _between(path: Path, start: int, stop: int) -> Iterator[bytes]:
    if start >= stop:
        return
    with path.open("rb") as file:
        file.seek(start)
        while (left := stop - file.tell()) > 0:
            yield file.read(min(left, BLOCK_NBYTES))
        file.seek(stop - 1)
        if file.read(1) != b"\n":  # the last line goes on behind the part
            yield file.readline()
