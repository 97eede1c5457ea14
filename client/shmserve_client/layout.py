"""The segment's byte layout: header, description, arrays. `docs/layout.md` is the same in prose, and normative.

    0                 header, HEADER.size bytes, little-endian
    128               description: one msgpack map
    data_offset       the arrays, each aligned to ARRAY_ALIGNMENT; data_offset is a multiple of DATA_ALIGNMENT
                      after them their checksums, one of each CHUNK_NBYTES from data_offset
    total_nbytes      end of the segment

Values may also stay in the files that they came from: those follow the segment, in readers' memory, page by page.

Nothing here touches a file: it all works on bytes, so that a hostile segment can be judged before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Final

import msgpack
import numpy as np

from .errors import SegmentFormatError
from .records import shown, typed, unpack

__all__ = [
    "ARRAY_ALIGNMENT",
    "CHECKSUM_ALGORITHM",
    "CHUNK_NBYTES",
    "DATA_ALIGNMENT",
    "DESCRIPTION_OFFSET",
    "DTYPES",
    "HEADER",
    "KINDS",
    "LAYOUT_VERSION",
    "MAGIC",
    "MAX_DIMENSIONS",
    "MAX_ITEMS",
    "NONCE_NBYTES",
    "Array",
    "Checksums",
    "Column",
    "Description",
    "Header",
    "MappedFile",
    "SourceRecord",
    "decode_description",
    "decode_header",
    "encode_prefix",
    "file_offsets",
    "is_shape",
    "place_arrays",
    "whole_pages",
]

MAGIC: Final = b"SHMSERVE"
LAYOUT_VERSION: Final = 3
NONCE_NBYTES: Final = 16
HEADER: Final = struct.Struct("<8sII16sQQQQQQI")
"""magic, layout version, header size, nonce, total_nbytes, generation, flags (0), description offset, description
nbytes, data offset, CRC-32 of the description."""
DESCRIPTION_OFFSET: Final = 128
ARRAY_ALIGNMENT: Final = 64
DATA_ALIGNMENT: Final = 2 << 20
CHUNK_NBYTES: Final = DATA_ALIGNMENT
CHECKSUM_ALGORITHM: Final = "xxh3_64"
MAX_DESCRIPTION_NBYTES: Final = 64 << 20
MAX_FILES: Final = 1 << 15
"""So many can be mapped: the kernel allows a process 65530 mappings (vm.max_map_count)."""
MAX_DIMENSIONS: Final = 32
MAX_ITEMS: Final = 1 << 59
"""The items of an array are fewer, an empty axis counted as one: so numpy counts them, in bytes and in 64 bits."""

DTYPES: Final = {
    # By way of its string: newbyteorder alone gives a dtype whose memoryviews have a format that Python cannot index.
    name: np.dtype(np.dtype(name).newbyteorder("<").str)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    )
}
"""The dtypes that a segment may hold, by their numpy names, as little-endian numpy dtypes."""

KINDS: Final = ("tensor", "bytes", "text", "object")
"""What the items of a sample are: numbers, raw bytes, a string as UTF-8, or any value as msgpack (see `objects`)."""


@dataclass(frozen=True)
class Array:
    """One array: `nbytes` bytes in C order from `offset`, counted from the start of the segment, or of its files."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    in_files: bool = False
    """Whether it lies in the files that the description names."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Column:
    """One field of every sample.

    Fixed-shape (`offsets` is None): sample i is `values[i]`, and `values.shape[0]` is the number of samples.
    Ragged: `values` is 1-d and sample i is `values[offsets[i]:offsets[i + 1]]`; `offsets` is n+1 int64, in items.
    Scattered: the same as `values[offsets[i]:stops[i]]`, both n int64; only of values that stay in files.
    N-d ragged: sample i has the shape `shapes[shape_offsets[i]:shape_offsets[i + 1]]`, both int64.

    The samples of a `kind` other than "tensor" are ragged uint8 values.
    """

    name: str
    values: Array
    offsets: Array | None = None
    shapes: Array | None = None
    shape_offsets: Array | None = None
    kind: str = "tensor"
    python: str = ""
    """What the samples of a tensor were in Python: "number", "list", "array", "scalar" or "tensor"; "" for none."""
    stops: Array | None = None


@dataclass(frozen=True)
class MappedFile:
    """A file in which values stay; readers map it, once it is found to be the one that was planned with."""

    path: str
    nbytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class SourceRecord:
    """Where a segment's bytes came from; what decides whether a later start may adopt it."""

    key: str
    """Hash of the format, the options and the files' device, inode, size and mtime."""
    fingerprint: str
    """Hash of the options and of each file's path, size, mtime_ns and inode: the same answer, however it was asked."""
    data: tuple[str, ...]
    """The paths as they were given, made absolute."""
    files: int
    """How many files were read."""
    dtype: str | None = None
    """The dtype option that they were read with."""
    vocab_size: int | None = None
    """The vocabulary that the values were checked against."""
    columns: tuple[str, ...] | None = None
    """The columns that were chosen; None for all."""
    decode: int | None = None
    """The pixels of a side to which images were decoded; None where they were not."""


@dataclass(frozen=True)
class Checksums:
    """What tells whether a bit of the arrays has changed: one number for each chunk of `chunk_nbytes` bytes.

    The chunks lie side by side from data_offset to `values`, where the last one ends; gaps between arrays count as the
    zeros that they are. The last number is not a chunk's, but the checksum of those before it.
    """

    values: Array = Array("uint64", (1,))
    """Set by `place_arrays`."""
    algorithm: str = CHECKSUM_ALGORITHM
    chunk_nbytes: int = CHUNK_NBYTES


@dataclass(frozen=True)
class Description:
    """What a segment holds. `stream` marks a flat token file: it has samples only through a block_size."""

    name: str
    format: str
    num_samples: int
    columns: tuple[Column, ...]
    source: SourceRecord
    arrays: dict[str, Array] = field(default_factory=dict)
    """Arrays of the dataset rather than of a sample, such as Megatron's `document_indices` and `modes`."""
    stream: bool = False
    table: bool = False
    """Whether a sample is a map of its columns also where there is one column; said of published dicts."""
    notes: tuple[str, ...] = ()
    """What was assumed while reading, for people."""
    checksums: Checksums | None = None
    files: tuple[MappedFile, ...] = ()
    """Those in which values stay, in the order in which they follow the segment."""

    def all_arrays(self) -> list[Array]:
        """Every array that is in the segment, in the order in which they are placed; the checksums come after them."""
        found: list[Array] = []
        for column in self.columns:
            parts = (column.values, column.offsets, column.stops, column.shapes, column.shape_offsets)
            found.extend(part for part in parts if part is not None and not part.in_files)
        return found + list(self.arrays.values())


@dataclass(frozen=True)
class Header:
    """The fixed header, decoded."""

    nonce: bytes
    total_nbytes: int
    generation: int
    description_nbytes: int
    data_offset: int
    description_crc32: int

    def position(self, array: Array) -> int:
        """Return where the array is in a mapping of the segment and, behind it, of its files."""
        return array.offset + (whole_pages(self.total_nbytes) if array.in_files else 0)


def whole_pages(nbytes: int) -> int:
    """Return the size of the pages that hold so many bytes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_offsets(sizes: Sequence[int]) -> list[int]:
    """Return where files of these sizes in bytes start when each begins a page, and where the last page ends."""
    return list(accumulate(map(whole_pages, sizes), initial=0))


def place_arrays(description: Description) -> tuple[Description, int, int]:
    """Return the description with every array's offset set, the data area's offset, and the segment's total bytes."""
    data_offset = DATA_ALIGNMENT
    while True:
        placed, end = _with_checksums(*_placed_from(description, data_offset), data_offset)
        if DESCRIPTION_OFFSET + len(_pack_description(placed)) <= data_offset:
            return placed, data_offset, end
        data_offset += DATA_ALIGNMENT


def _placed_from(description: Description, position: int) -> tuple[Description, int]:
    def place(array: Array) -> Array:
        nonlocal position
        if array.in_files:
            return array
        start = -(-position // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        position = start + array.nbytes
        return replace(array, offset=start)

    def place_optional(array: Array | None) -> Array | None:
        return None if array is None else place(array)

    columns = tuple(
        replace(
            column,
            values=place(column.values),
            offsets=place_optional(column.offsets),
            stops=place_optional(column.stops),
            shapes=place_optional(column.shapes),
            shape_offsets=place_optional(column.shape_offsets),
        )
        for column in description.columns
    )
    arrays = {name: place(array) for name, array in description.arrays.items()}
    return replace(description, columns=columns, arrays=arrays), position


def _with_checksums(description: Description, end: int, data_offset: int) -> tuple[Description, int]:
    if description.checksums is None:
        return description, end
    start = -(-end // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
    values = Array("uint64", _checksums_shape(start, data_offset), start)
    return replace(description, checksums=replace(description.checksums, values=values)), start + values.nbytes


def _checksums_shape(start: int, data_offset: int) -> tuple[int]:
    """Return the shape of the checksums that start at `start`: one of each chunk before it, and their own."""
    return (-(-(start - data_offset) // CHUNK_NBYTES) + 1,)


def encode_prefix(
    description: Description, *, data_offset: int, total_nbytes: int, nonce: bytes, generation: int
) -> bytes:
    """Return header and description as the bytes that a segment starts with."""
    packed = _pack_description(description)
    header = HEADER.pack(
        MAGIC,
        LAYOUT_VERSION,
        HEADER.size,
        nonce,
        total_nbytes,
        generation,
        0,
        DESCRIPTION_OFFSET,
        len(packed),
        data_offset,
        zlib.crc32(packed),
    )
    return header.ljust(DESCRIPTION_OFFSET, b"\0") + packed


def _pack_description(description: Description) -> bytes:
    try:
        packed: bytes = msgpack.packb(asdict(description), use_bin_type=True)
    except OverflowError as error:
        raise SegmentFormatError(f"dataset {description.name!r} has a size beyond 2^64: {error}") from error
    return packed


def decode_header(head: bytes, file_nbytes: int) -> Header:
    """Return the header of a file of `file_nbytes` bytes that starts with `head`.

    Raises:
        SegmentFormatError: not a segment, another layout version, or sizes that contradict each other.
    """
    if head[: len(MAGIC)] == MAGIC and len(head) < HEADER.size:
        raise SegmentFormatError(f"segment is damaged: {len(head)} bytes are less than its header")
    if head[: len(MAGIC)] != MAGIC:
        raise SegmentFormatError(f"not a shmserve segment: it starts with {head[:8]!r}, not {MAGIC!r}")
    (_, version, header_nbytes, nonce, total, generation, flags, description_offset, description_nbytes, data, crc) = (
        HEADER.unpack_from(head)
    )
    if version != LAYOUT_VERSION:
        raise SegmentFormatError(
            f"segment of layout version {version}, this shmserve reads version {LAYOUT_VERSION}: "
            "use the same shmserve version in the daemon and in training"
        )
    if header_nbytes != HEADER.size or description_offset != DESCRIPTION_OFFSET or flags != 0:
        raise SegmentFormatError(
            f"segment header is damaged: {header_nbytes} bytes, description at {description_offset}, flags {flags}"
        )
    if total != file_nbytes:
        raise SegmentFormatError(f"segment is damaged: the header says {total} bytes, the file has {file_nbytes}")
    if (
        description_nbytes > MAX_DESCRIPTION_NBYTES
        or data % DATA_ALIGNMENT
        or not DESCRIPTION_OFFSET + description_nbytes <= data
        or not DESCRIPTION_OFFSET + description_nbytes <= total
    ):
        raise SegmentFormatError(
            f"segment header is damaged: {description_nbytes} bytes of description, data at {data}, {total} in all"
        )
    return Header(nonce, total, generation, description_nbytes, data, crc)


def decode_description(packed: bytes, header: Header) -> Description:
    """Return the description, every array of it checked to lie inside the segment.

    Raises:
        SegmentFormatError: damaged, or it names arrays outside the segment or of contradicting shapes.
    """
    if len(packed) != header.description_nbytes or zlib.crc32(packed) != header.description_crc32:
        raise SegmentFormatError("segment is damaged: the description does not match its checksum")
    fields = unpack(packed, SegmentFormatError, "segment description")
    description: Description = typed(Description, fields, "segment description", SegmentFormatError)
    _check(description, header)
    return description


def _check(description: Description, header: Header) -> None:
    end_of_previous = header.data_offset
    checksums = description.checksums
    in_files = [column.values for column in description.columns if column.values.in_files]
    arrays = [*description.all_arrays(), *([checksums.values] if checksums else [])]
    for array in (*arrays, *in_files):
        if array.dtype not in DTYPES:
            raise SegmentFormatError(f"segment has an array of the unknown dtype {shown(array.dtype)}")
        if not is_shape(array.shape):
            raise SegmentFormatError(f"segment has an array of the shape {array.shape[:MAX_DIMENSIONS]}")
    for array in arrays:
        if array.offset % ARRAY_ALIGNMENT or array.offset < end_of_previous:
            raise SegmentFormatError(f"segment has an array at offset {array.offset}, unaligned or inside another")
        end_of_previous = array.offset + array.nbytes
        if end_of_previous > header.total_nbytes:
            raise SegmentFormatError(
                f"segment has an array up to byte {end_of_previous}, but {header.total_nbytes} bytes in all"
            )
    _check_files(description, in_files)
    if checksums is not None:
        _check_checksums(checksums, header)
    count = description.num_samples
    names = [column.name for column in description.columns]
    if count < 0 or not names or len(set(names)) < len(names):
        raise SegmentFormatError(f"segment of {count} samples has {len(names)} columns with {len(set(names))} names")
    for column in description.columns:
        if column.kind not in KINDS:
            raise SegmentFormatError(f"column {shown(column.name)} is of the unknown kind {shown(column.kind)}")
        if not _consistent(column, count):
            raise SegmentFormatError(f"column {shown(column.name)} contradicts the {count} samples of its dataset")


def _check_files(description: Description, in_files: Sequence[Array]) -> None:
    files = description.files
    for file in files:
        if not 0 < file.nbytes < 1 << 62 or not file.path.startswith("/") or "\0" in file.path:
            raise SegmentFormatError(f"segment has values in {file.nbytes} bytes of the file {shown(file.path)}")
    if len(files) > MAX_FILES or sum(file.nbytes for file in files) >= 1 << 62:
        raise SegmentFormatError(f"segment has values in {len(files)} files of more bytes than there can be")
    end = file_offsets([file.nbytes for file in files[:-1]])[-1] + files[-1].nbytes if files else 0
    for array in in_files:
        if array.offset < 0 or array.offset % DTYPES[array.dtype].itemsize or array.offset + array.nbytes > end:
            raise SegmentFormatError(
                f"segment has values of {array.dtype} from byte {array.offset} to {array.offset + array.nbytes} of "
                f"its files, which have {end}"
            )
    others = [part for c in description.columns for part in (c.offsets, c.stops, c.shapes, c.shape_offsets)]
    if any(part is not None and part.in_files for part in (*others, *description.arrays.values())):
        raise SegmentFormatError("segment has an array in its files that is not of values")


def _check_checksums(checksums: Checksums, header: Header) -> None:
    values = checksums.values
    if (checksums.algorithm, checksums.chunk_nbytes) != (CHECKSUM_ALGORITHM, CHUNK_NBYTES):
        raise SegmentFormatError(
            f"segment has checksums by {shown(checksums.algorithm)} of each {checksums.chunk_nbytes} bytes, "
            f"this shmserve knows {CHECKSUM_ALGORITHM} of each {CHUNK_NBYTES}: "
            "use the same shmserve version in the daemon and here"
        )
    shape = _checksums_shape(values.offset, header.data_offset)
    if (values.dtype, values.shape) != ("uint64", shape) or values.offset + values.nbytes != header.total_nbytes:
        raise SegmentFormatError(
            f"segment has checksums of the dtype {shown(values.dtype)} and shape {values.shape[:MAX_DIMENSIONS]} at "
            f"byte {values.offset}, not uint64 of shape {shape} up to its end at {header.total_nbytes}"
        )


def is_shape(shape: Sequence[int]) -> bool:
    """Return whether numpy can have the shape, for any dtype; it counts an empty axis as if it had one item."""
    return len(shape) <= MAX_DIMENSIONS and min(shape, default=0) >= 0 and math.prod(n or 1 for n in shape) < MAX_ITEMS


def _consistent(column: Column, count: int) -> bool:
    values, offsets, stops = column.values, column.offsets, column.stops
    shapes, shape_offsets = column.shapes, column.shape_offsets
    if column.kind != "tensor" and (values.dtype != "uint8" or offsets is None or shapes is not None):
        return False
    index = [("int64", (count + 1,))]
    if offsets is None:
        others = (stops, shapes, shape_offsets)
        return others == (None, None, None) and len(values.shape) > 0 and values.shape[0] == count
    if stops is None:
        ragged = len(values.shape) == 1 and [(offsets.dtype, offsets.shape)] == index
    else:
        scattered = [("int64", (count,))] * 2
        ragged = len(values.shape) == 1 and [(each.dtype, each.shape) for each in (offsets, stops)] == scattered
    if shapes is None or shape_offsets is None:
        return ragged and shapes is shape_offsets
    return (
        ragged
        and shapes.dtype == "int64"
        and len(shapes.shape) == 1
        and [(shape_offsets.dtype, shape_offsets.shape)] == index
    )
