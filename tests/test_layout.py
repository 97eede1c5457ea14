from __future__ import annotations

import copy
import itertools
import struct
import zlib
from dataclasses import asdict, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve_client.errors import SegmentFormatError
from shmserve_client.layout import (
    ARRAY_ALIGNMENT,
    CHUNK_NBYTES,
    DATA_ALIGNMENT,
    DESCRIPTION_OFFSET,
    DTYPES,
    HEADER,
    LAYOUT_VERSION,
    MAX_DESCRIPTION_NBYTES,
    Array,
    Checksums,
    Column,
    Description,
    Header,
    SourceRecord,
    decode_description,
    decode_header,
    encode_prefix,
    place_arrays,
)

NONCE = bytes(range(16))
RAGGED = Column(
    "tokens",
    Array("uint16", (10,)),
    offsets=Array("int64", (4,)),
    shapes=Array("int64", (5,)),
    shape_offsets=Array("int64", (4,)),
)
DESCRIPTION = Description(
    name="corpus",
    format="megatron",
    num_samples=3,
    columns=(RAGGED, Column("labels", Array("float32", (3, 2)))),
    source=SourceRecord("key", "fingerprint", ("/data/corpus.bin",), 2),
    arrays={"document_indices": Array("int64", (2,))},
    notes=("dtype assumed",),
    checksums=Checksums(),
)


def encoded(description: Description = DESCRIPTION) -> tuple[bytes, Description, int]:
    placed, data_offset, total_nbytes = place_arrays(description)
    prefix = encode_prefix(placed, data_offset=data_offset, total_nbytes=total_nbytes, nonce=NONCE, generation=7)
    return prefix, placed, total_nbytes


def decoded(prefix: bytes, file_nbytes: int) -> tuple[Header, Description]:
    header = decode_header(prefix[: HEADER.size], file_nbytes)
    start = DESCRIPTION_OFFSET
    return header, decode_description(prefix[start : start + header.description_nbytes], header)


def with_description(fields: Any) -> tuple[bytes, int]:
    """A prefix that is sound but for what its description says."""
    packed = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    total_nbytes = encoded()[2]
    values = list(HEADER.unpack_from(encoded()[0]))
    values[8], values[10] = len(packed), zlib.crc32(packed)
    return HEADER.pack(*values).ljust(DESCRIPTION_OFFSET, b"\0") + packed, total_nbytes


def test_a_prefix_comes_back_as_it_was():
    prefix, placed, total_nbytes = encoded()
    header, description = decoded(prefix, total_nbytes)
    assert description == placed
    assert header == Header(
        nonce=NONCE,
        total_nbytes=total_nbytes,
        generation=7,
        description_nbytes=len(prefix) - DESCRIPTION_OFFSET,
        data_offset=DATA_ALIGNMENT,
        description_crc32=zlib.crc32(prefix[DESCRIPTION_OFFSET:]),
    )


def test_arrays_are_placed_one_after_another_each_aligned():
    _, placed, total_nbytes = encoded()
    arrays = placed.all_arrays()
    assert [array.offset - DATA_ALIGNMENT for array in arrays] == [0, 64, 128, 192, 256, 320]
    assert placed.checksums is not None
    assert placed.checksums.values == Array("uint64", (2,), DATA_ALIGNMENT + 384)
    assert total_nbytes == placed.checksums.values.offset + 16


def test_without_checksums_the_arrays_end_the_segment():
    _, placed, total_nbytes = encoded(replace(DESCRIPTION, checksums=None))
    last = placed.all_arrays()[-1]
    assert placed.checksums is None
    assert total_nbytes == last.offset + last.nbytes


@pytest.mark.parametrize(
    ("nbytes", "chunks"),
    [(0, 0), (1, 1), (CHUNK_NBYTES - 64, 1), (CHUNK_NBYTES, 1), (CHUNK_NBYTES + 1, 2), (1 << 40, 1 << 19)],
)
def test_there_is_a_checksum_of_each_chunk_and_one_of_them_all(nbytes, chunks):
    column = Column("tokens", Array("uint8", (nbytes,)))
    prefix, placed, total_nbytes = encoded(replace(DESCRIPTION, num_samples=nbytes, columns=(column,), arrays={}))
    assert decoded(prefix, total_nbytes)[1] == placed
    assert placed.checksums is not None
    assert placed.checksums.values.shape == (chunks + 1,)
    assert placed.checksums.values.offset == DATA_ALIGNMENT + -(-nbytes // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT


def test_a_long_description_moves_the_data():
    long = replace(DESCRIPTION, notes=("x" * (3 << 20),))
    prefix, placed, total_nbytes = encoded(long)
    header, description = decoded(prefix, total_nbytes)
    assert header.data_offset == 2 * DATA_ALIGNMENT == placed.all_arrays()[0].offset
    assert description == placed


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 1 << 40)), min_size=1, max_size=6))
def test_any_arrays_are_placed_apart_and_within(specs):
    arrays = {str(number): Array(dtype, (count,)) for number, (dtype, count) in enumerate(specs)}
    prefix, placed, total_nbytes = encoded(replace(DESCRIPTION, arrays=arrays))
    assert decoded(prefix, total_nbytes)[1] == placed
    for before, after in itertools.pairwise(placed.all_arrays()):
        assert before.offset + before.nbytes <= after.offset
        assert after.offset % ARRAY_ALIGNMENT == 0


def test_every_flipped_bit_of_the_prefix_is_refused_or_harmless():
    prefix, placed, total_nbytes = encoded()
    # What says which segment this is cannot be wrong by itself, and the padding is not read.
    free = {*range(16, 32), *range(40, 48), *range(HEADER.size, DESCRIPTION_OFFSET)}
    for position, bit in itertools.product(range(len(prefix)), range(8)):
        damaged = bytearray(prefix)
        damaged[position] ^= 1 << bit
        if position in free:
            assert decoded(bytes(damaged), total_nbytes)[1] == placed
        else:
            with pytest.raises(SegmentFormatError):
                decoded(bytes(damaged), total_nbytes)


def test_every_truncation_is_refused():
    prefix, _, total_nbytes = encoded()
    for nbytes in range(len(prefix)):
        with pytest.raises(SegmentFormatError):
            decoded(prefix[:nbytes], total_nbytes)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(SegmentFormatError):
        decode_header(data, len(data))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_descriptions_are_refused(packed):
    with pytest.raises(SegmentFormatError):
        decoded(*with_description(packed))


ODD_VALUES = [None, True, 0, -1, 3, 1 << 63, 2.5, "x", "int64", b"x", [], [1], ["x"], {}, {"a": 1}, [[]] * 3, [{}]]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths_of(item, (*path, key))
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            found += paths_of(item, (*path, key))
    return found


def as_lists(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value))


@pytest.mark.parametrize("path", paths_of(as_lists(asdict(encoded()[1]))), ids=str)
def test_an_odd_value_anywhere_in_the_description_is_refused_or_of_the_right_type(path):
    """A hostile description passes its checksum: what it says must not get further than a SegmentFormatError."""
    for odd in ODD_VALUES:
        fields = as_lists(asdict(encoded()[1]))
        if path:
            parent = fields
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = copy.deepcopy(odd)
        else:
            fields = odd
        try:
            header, description = decoded(*with_description(fields))
        except SegmentFormatError:
            continue
        assert_usable(header, description)


@pytest.mark.parametrize("path", [path for path in paths_of(as_lists(asdict(encoded()[1]))) if path], ids=str)
def test_a_missing_field_is_refused(path):
    fields = as_lists(asdict(encoded()[1]))
    parent = fields
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    try:
        header, description = decoded(*with_description(fields))
    except SegmentFormatError:
        return
    assert_usable(header, description)  # one column, note or array fewer


def assert_usable(header: Header, description: Description) -> None:
    """Every type is as declared, and numpy can make a view of every array within the segment."""
    texts = [description.name, description.format, description.source.key, description.source.fingerprint]
    texts += [*description.notes, *description.source.data, *description.arrays]
    for column in description.columns:
        texts += [column.name, column.kind]
    assert {type(text) for text in texts} == {str}
    assert type(description.source.files) is int
    assert {type(description.source.dtype), type(description.source.vocab_size)} <= {str, int, type(None)}
    assert type(description.num_samples) is int
    assert type(description.stream) is bool
    memory = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (header.total_nbytes,), (0,), writeable=False)
    checksums = [description.checksums.values] if description.checksums else []
    for array in description.all_arrays() + checksums:
        assert array.offset + array.nbytes <= len(memory)
        np.lib.stride_tricks.as_strided(np.zeros(1, DTYPES[array.dtype]), array.shape, [0] * len(array.shape))


def shaped(shape: list[int]) -> dict[str, Any]:
    fields = as_lists(asdict(encoded()[1]))
    fields["arrays"]["document_indices"]["shape"] = shape
    return fields


@pytest.mark.parametrize("shape", [[1] * 65, [1 << 62, 0], [1 << 40, 1 << 40, 0], [1 << 63, 0]])
def test_shapes_that_numpy_cannot_have_are_refused(shape):
    with pytest.raises(SegmentFormatError, match="shape"):
        decoded(*with_description(shaped(shape)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": "crc32"}, "checksums by 'crc32'"),
        ({"chunk_nbytes": 1 << 20}, "of each 1048576 bytes"),
        ({"chunk_nbytes": 0}, "of each 0 bytes"),
        ({"dtype": "int64"}, "not uint64 of shape"),
        ({"shape": [3]}, "up to byte 2097560, but 2097552 bytes in all"),
        ({"shape": [1]}, "not uint64 of shape"),
        ({"shape": [2, 1]}, "not uint64 of shape"),
        ({"offset": DATA_ALIGNMENT + 320}, "inside another"),
        ({"offset": DATA_ALIGNMENT + 392}, "unaligned"),
        ({"offset": 0}, "inside another"),
        ({"offset": DATA_ALIGNMENT + (1 << 40)}, "bytes in all"),
    ],
)
def test_checksums_that_are_not_where_and_what_they_must_be_are_refused(changed, message):
    fields = as_lists(asdict(encoded()[1]))
    for key, value in changed.items():
        (fields["checksums"] if key in fields["checksums"] else fields["checksums"]["values"])[key] = value
    with pytest.raises(SegmentFormatError, match=message):
        decoded(*with_description(fields))


def test_checksums_end_the_segment():
    fields = as_lists(asdict(encoded(replace(DESCRIPTION, arrays={}))[1]))  # a segment with room behind them
    with pytest.raises(SegmentFormatError, match="up to its end at"):
        decoded(*with_description(fields))


def test_two_columns_of_one_name_are_refused():
    twice = replace(DESCRIPTION, columns=(RAGGED, RAGGED))
    prefix, _, total_nbytes = encoded(twice)
    with pytest.raises(SegmentFormatError, match="2 columns with 1 names"):
        decoded(prefix, total_nbytes)


def test_another_version_is_named():
    prefix, _, total_nbytes = encoded()
    newer = prefix[:8] + struct.pack("<I", LAYOUT_VERSION + 1) + prefix[12:]
    with pytest.raises(SegmentFormatError, match="layout version 4, this shmserve reads version 3"):
        decoded(newer, total_nbytes)


def test_a_description_cannot_be_made_huge():
    values = list(HEADER.unpack_from(encoded()[0]))
    values[8] = MAX_DESCRIPTION_NBYTES + 1
    values[9] = 2 * MAX_DESCRIPTION_NBYTES
    with pytest.raises(SegmentFormatError, match="damaged"):
        decode_header(HEADER.pack(*values), encoded()[2])
