"""Files that are known not to hold tokens: told by name, with what to do, instead of served as garbage."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from shmserve_client.errors import SourceFormatError

from .base import SourceOptions
from .files import read_head
from .pairs import index_of

__all__ = ["is_refused_by_name", "refuse"]

_CONVERT: Final = "is not supported: write its tokens as a .npy array, a .bin/.idx pair or a raw .bin"
_PICKLE: Final = "is never loaded, since that runs code: write its tokens as a .npy array or a raw .bin"
_COMPRESSED: Final = "is not supported: decompress the file"
_DAMAGED: Final = "does not start as one: it is damaged, or has the wrong name"

_MAGICS: Final[tuple[tuple[bytes, str, str], ...]] = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes,", _CONVERT),
    (b"PK\x05\x06", "an empty zip archive", "holds nothing to serve"),
    (b"GGUF", "a GGUF model", "holds weights, not a corpus"),
    (b"HUFFIDX\0\0", "fairseq's Huffman index", "is not supported: preprocess the text with --dataset-impl mmap"),
    (b"MMIDRET\0\0", "a RETRO index", _CONVERT),
    (b"KNNRETM", "a RETRO neighbours' index", _CONVERT),
    (
        struct.pack("<i", 20240522),
        "an llm.c evaluation file",
        "is not supported: it holds questions, not a token stream",
    ),
    (b"\xff\xd8\xff", "a JPEG image", _CONVERT),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _CONVERT),
    (b"\x7fELF", "an ELF program or library", "is not a corpus"),
    (b"SQLite format 3\0", "an SQLite database", _CONVERT),
    (b"\x1f\x8b\x08", "gzip", _COMPRESSED),
    (b"\x28\xb5\x2f\xfd", "zstd", _COMPRESSED),
    (b"\xfd7zXZ\0", "xz", _COMPRESSED),
    (b"BZh91AY&SY", "bzip2", _COMPRESSED),
    (b"\x04\x22\x4d\x18", "lz4", _COMPRESSED),
)
_SUFFIXES: Final[dict[str, tuple[str, str]]] = {
    ".array_record": ("ArrayRecord", _CONVERT),
    ".arrow": ("an Arrow file", _DAMAGED),
    ".feather": ("a Feather file", _DAMAGED),
    ".h5": ("an HDF5 file", _DAMAGED),
    ".hdf5": ("an HDF5 file", _DAMAGED),
    ".npz": ("a .npz archive", _DAMAGED),
    ".parquet": ("a Parquet file", _DAMAGED),
    ".pickle": ("a pickle", _PICKLE),
    ".pkl": ("a pickle", _PICKLE),
    ".pt": ("a pickle", _PICKLE),
    ".pth": ("a pickle", _PICKLE),
    ".safetensors": ("a safetensors file", _DAMAGED),
    ".seg": ("a segment file", _DAMAGED),
    ".tar": ("a tar archive", _DAMAGED),
    ".tfrecord": ("a TFRecord file", _DAMAGED),
}
_SAMPLE_NBYTES: Final = 1 << 16
_MAX_JSON_NBYTES: Final = 64 << 20


def refuse(path: Path, options: SourceOptions) -> None:
    """Return only where nothing is known against reading the file as bare tokens.

    Raises:
        SourceFormatError: the file's bytes, or its name where bytes cannot tell, belong to another format.
    """
    sample = read_head(path, _SAMPLE_NBYTES)
    known = _by_content(path, sample, options) or _SUFFIXES.get(path.suffix.lower())
    if known is not None:
        what, reason = known
        raise SourceFormatError(f"{path}: {what} {reason}")
    index = index_of(path)
    if index is not None:
        refuse(index, options)


def is_refused_by_name(path: Path) -> bool:
    """Return whether files of that name are of a format of their own, so that their bytes are no samples."""
    return path.suffix.lower() in _SUFFIXES


def _by_content(path: Path, sample: bytes, options: SourceOptions) -> tuple[str, str] | None:
    for magic, what, reason in _MAGICS:
        if sample.startswith(magic):
            return what, reason
    if path.suffix == ".idx":
        return "not an index of a known kind:", f"it starts with {sample[:9]!r}"
    if _is_pickle(sample, path):
        return _SUFFIXES[".pickle"]
    if _is_quickdraw(sample):
        return "QuickDraw drawings", _CONVERT
    if _is_shard_of_index(path):
        return "a shard of the dataset that index.json beside it describes,", "is served with its directory: name that"
    if options.dtype is None and _is_text(sample):
        return "text", "is not tokens: tokenize it first, or serve its bytes with --dtype uint8"
    return None


def _is_pickle(sample: bytes, path: Path) -> bool:
    """Tell whether it starts as pickles do and ends with their STOP; two bytes alone could be a token."""
    if (
        len(sample) < 4
        or sample[0] != 0x80
        or sample[1] not in range(2, 6)
        or sample[2] not in b"\x95\x8a}](cX\x8cK\x88\x89N"
    ):
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"."


def _is_quickdraw(sample: bytes) -> bool:
    """Tell whether three drawings follow each other: key, country, recognised, timestamp, strokes of x and y bytes."""
    position = 0
    for _ in range(3):
        head = sample[position : position + 17]
        if len(head) < 17 or not (head[8:10].isalpha() and head[8:10].isupper() and head[10] < 2):
            return False
        position += 17
        for _ in range(int.from_bytes(head[15:17], "little")):
            points = int.from_bytes(sample[position : position + 2], "little")
            position += 2 + 2 * points
            if points == 0 or position > len(sample):
                return False
    return True


def _is_shard_of_index(path: Path) -> bool:
    index = path.parent / "index.json"
    if not index.is_file() or index.stat().st_size > _MAX_JSON_NBYTES:
        return False
    return b'"%b"' % os.fsencode(path.name) in index.read_bytes()


def _is_text(sample: bytes) -> bool:
    try:
        text = sample.decode()
    except UnicodeDecodeError as error:
        if len(sample) - error.start > 3:  # not merely a character that the sample's end cuts in two
            return False
        text = sample[: error.start].decode()
    return bool(text) and all(character.isprintable() or character in "\n\r\t\f" for character in text)
