"""Whatever lies under a segment's name is refused, or all that it says it has lies within it and reads as one array."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shmserve_client.layout import (
    DESCRIPTION_OFFSET,
    DTYPES,
    HEADER,
    Array,
    Checksums,
    Column,
    Description,
    SourceRecord,
    decode_description,
    decode_header,
    encode_prefix,
    place_arrays,
)

from .mutations import NUMBERS, mutated
from .targets import NONCE, check_segment, segment_file

pytestmark = pytest.mark.promise("fuzzing")

in_one_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = st.sampled_from(sorted(DTYPES))
text = st.text(max_size=12)
hostile = st.sampled_from(NUMBERS) | st.integers(-3, 40) | st.integers(-(1 << 63), (1 << 63) - 1)


def columns(count: int, name: str) -> st.SearchStrategy[Column]:
    """Columns of `count` samples, of each kind, as a writer would describe them."""
    index = Array("int64", (count + 1,))
    items = st.builds(Array, dtypes, st.tuples(st.integers(0, 200)))
    shapes = st.builds(Array, st.just("int64"), st.tuples(st.integers(0, 50)))
    rows = st.lists(st.integers(0, 4), max_size=3).map(lambda shape: (count, *shape))
    return (
        st.builds(Column, st.just(name), st.builds(Array, dtypes, rows))
        | st.builds(Column, st.just(name), items, st.just(index))
        | st.builds(Column, st.just(name), items, st.just(index), shapes, st.just(index))
    )


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    count = draw(st.integers(0, 12))
    names = draw(st.lists(text, min_size=1, max_size=3, unique=True))
    return Description(
        name=draw(text),
        format=draw(text),
        num_samples=count,
        columns=tuple(draw(columns(count, name)) for name in names),
        source=SourceRecord("key", "fingerprint", tuple(draw(st.lists(text, max_size=2))), 1),
        arrays=draw(st.dictionaries(text, st.builds(Array, dtypes, st.tuples(st.integers(0, 30))), max_size=2)),
        stream=draw(st.booleans()),
        notes=tuple(draw(st.lists(text, max_size=2))),
        checksums=draw(st.none() | st.just(Checksums())),
    )


def prefix_of(description: Description) -> tuple[bytes, Description, int, int]:
    """Return (prefix, description with its offsets, data_offset, total_nbytes)."""
    placed, data_offset, total_nbytes = place_arrays(description)
    prefix = encode_prefix(placed, data_offset=data_offset, total_nbytes=total_nbytes, nonce=NONCE, generation=1)
    return prefix, placed, data_offset, total_nbytes


@pytest.mark.promise("F5")
@in_one_folder
@given(descriptions())
def test_every_description_comes_back_and_reads_within_its_segment(shm_dir: Path, description: Description) -> None:
    prefix, placed, data_offset, total_nbytes = prefix_of(description)
    header = decode_header(prefix[: HEADER.size], total_nbytes)
    assert decode_description(prefix[DESCRIPTION_OFFSET:], header) == placed
    assert check_segment(shm_dir, prefix, bytes(total_nbytes - data_offset))


def indices(count: int) -> st.SearchStrategy[list[int]]:
    """Offsets of `count` samples: such as there should be, but for a few; or any."""
    sizes = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    sound = sizes.map(lambda each: np.cumsum([0, *each]).tolist())
    damage = st.dictionaries(st.integers(0, count), hostile, max_size=2)
    return st.builds(lambda offsets, other: [other.get(i, o) for i, o in enumerate(offsets)], sound, damage) | st.lists(
        hostile, min_size=count + 1, max_size=count + 1
    )


@pytest.mark.promise("F5")
@in_one_folder
@given(st.data(), st.integers(0, 6), dtypes)
def test_offsets_and_shapes_are_never_believed(shm_dir: Path, data: st.DataObject, count: int, dtype: str) -> None:
    values = np.arange(data.draw(st.integers(0, 60))).astype(dtype)
    extents = np.array(data.draw(st.lists(hostile | st.integers(0, 6), max_size=12)), np.int64)
    arrays: list[NDArray[Any]] = [values, np.array(data.draw(indices(count)), np.int64)]
    if data.draw(st.booleans()):
        arrays += [extents, np.array(data.draw(indices(count)), np.int64)]
    column = Column("c", *(Array(array.dtype.name, array.shape) for array in arrays))
    description = Description("d", "f", count, (column,), SourceRecord("k", "f", (), 1))
    prefix, placed, data_offset, total_nbytes = prefix_of(description)
    assert check_segment(shm_dir, prefix, filled(placed, arrays, data_offset, total_nbytes))


def filled(placed: Description, arrays: Sequence[NDArray[Any]], data_offset: int, total_nbytes: int) -> bytes:
    """Return the data area with the arrays in their places."""
    data = bytearray(total_nbytes - data_offset)
    for array, values in zip(placed.all_arrays(), arrays, strict=True):
        start = array.offset - data_offset
        data[start : start + array.nbytes] = values.tobytes()
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where in a tree of lists and maps something could be put."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, child in children for place in places(child, (*path, key))]


@st.composite
def mutated_fields(draw: st.DrawFn, fields: Any) -> Any:
    """Put something else in a few places of a description: a number, a part from elsewhere in it, or nothing."""
    fields = copy.deepcopy(fields)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from([place for place in places(fields) if place]))
        parent = fields
        for key in where[:-1]:
            parent = parent[key]
        elsewhere = fields
        for key in draw(st.sampled_from(places(fields))):
            elsewhere = elsewhere[key]
        parent[where[-1]] = copy.deepcopy(
            draw(hostile | st.just(elsewhere) | dtypes | st.none() | st.lists(hostile, max_size=3) | st.booleans())
        )
    return fields


@pytest.mark.promise("F5")
@settings(in_one_folder, max_examples=300)
@given(st.data(), descriptions(), st.binary(max_size=64))
def test_a_description_that_lies_is_refused_or_reads_within_its_segment(
    shm_dir: Path, data: st.DataObject, description: Description, rest: bytes
) -> None:
    """Its checksum is right: who writes what is not true can compute one, too."""
    prefix, placed, data_offset, total_nbytes = prefix_of(description)
    packed = data.draw(
        mutated_fields(msgpack.unpackb(msgpack.packb(asdict(placed)))).map(msgpack.packb)
        | mutated(prefix[DESCRIPTION_OFFSET:])
    )
    content = (rest * 4096)[: total_nbytes - data_offset].ljust(total_nbytes - data_offset, b"\xff")
    check_segment(shm_dir, *segment_file(packed, content))


@pytest.mark.promise("F5")
@in_one_folder
@given(st.data(), descriptions(), st.integers(-100, 100))
def test_a_header_that_lies_is_refused(shm_dir: Path, data: st.DataObject, description: Description, more: int) -> None:
    prefix, _, data_offset, total_nbytes = prefix_of(description)
    header = data.draw(mutated(prefix[: HEADER.size]))
    changed = header.ljust(DESCRIPTION_OFFSET, b"\0")[:DESCRIPTION_OFFSET] + prefix[DESCRIPTION_OFFSET:]
    check_segment(shm_dir, changed, bytes(max(0, total_nbytes - data_offset + more)))
