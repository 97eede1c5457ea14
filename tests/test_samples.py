"""What sample i is, for each kind of column, and what damaged offsets do: an error that names the sample."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmserve_client.errors import (
    BlockSizeError,
    ConfigError,
    ProtocolError,
    SampleIndexError,
    SampleTypeError,
    SegmentFormatError,
)
from shmserve_client.layout import DTYPES, Array, Column, Description, SourceRecord, place_arrays
from shmserve_client.samples import Samples, find_column, open_samples

SOURCE = SourceRecord("key", "fingerprint", ("/data/x",), 1)


class Memory:
    """A segment's arrays without a segment: what `open_samples` needs of one."""

    def __init__(self, values: NDArray[Any], count: int, *, stream: bool = False, **index: NDArray[np.int64]) -> None:
        arrays = {name: Array(array.dtype.name, array.shape) for name, array in index.items()}
        column = Column("tokens", Array(values.dtype.name, values.shape), **arrays)
        self.description, _, _ = place_arrays(Description("corpus", "test", count, (column,), SOURCE, stream=stream))
        self._arrays = dict(
            zip(
                self.description.all_arrays(),
                (values, *(index[name] for name in ("offsets", "shapes", "shape_offsets") if name in index)),
                strict=True,
            )
        )

    def array(self, array: Array) -> NDArray[Any]:
        return self._arrays[array]

    def open(self, **options: Any) -> Samples:
        return open_samples(self.description, self.array, **options)


def ragged(lengths: list[int], dtype: str = "int32") -> Memory:
    values = np.arange(sum(lengths)).astype(DTYPES[dtype])
    return Memory(
        values, len(lengths), offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    )


def as_lists(samples: Samples) -> list[Any]:
    return [sample.tolist() for sample in samples]


def test_ragged_samples_are_between_offsets() -> None:
    memory = ragged([0, 3, 0, 2, 0])
    samples = memory.open()
    assert as_lists(samples) == [[], [0, 1, 2], [], [3, 4], []]
    assert len(samples) == 5
    assert np.shares_memory(samples[1], memory.array(memory.description.columns[0].values))


def test_fixed_samples_are_rows_scalars_included() -> None:
    assert as_lists(Memory(np.arange(6).reshape(3, 2), 3).open()) == [[0, 1], [2, 3], [4, 5]]
    assert as_lists(Memory(np.arange(8).reshape(2, 2, 2), 2).open())[1] == [[4, 5], [6, 7]]
    scalars = Memory(np.arange(3.0), 3).open()
    assert as_lists(scalars) == [0.0, 1.0, 2.0]
    assert isinstance(scalars[1], np.ndarray)
    assert scalars[1].shape == ()
    assert np.shares_memory(scalars[1], scalars.values)
    assert as_lists(Memory(np.empty((0, 4)), 0).open()) == []
    assert as_lists(Memory(np.empty((2, 0)), 2).open()) == [[], []]


def n_d() -> Memory:
    """Samples of the shapes (2, 3), (), (0, 4), (1,)."""
    return Memory(
        np.arange(8),
        4,
        offsets=np.array([0, 6, 7, 7, 8]),
        shapes=np.array([2, 3, 0, 4, 1]),
        shape_offsets=np.array([0, 2, 2, 4, 5]),
    )


def test_n_d_samples_have_their_own_shapes() -> None:
    samples = n_d().open()
    assert [sample.shape for sample in samples] == [(2, 3), (), (0, 4), (1,)]
    assert as_lists(samples) == [[[0, 1, 2], [3, 4, 5]], 6, [], [7]]
    assert np.shares_memory(samples[0], samples.values)


@pytest.mark.parametrize(
    "memory", [ragged([3, 0, 4, 1]), Memory(np.arange(8), 8), Memory(np.arange(8).reshape(2, 4), 2)]
)
@pytest.mark.parametrize(
    ("block_size", "stride", "starts"),
    [
        (3, 0, [0, 3]),
        (4, 4, [0, 4]),
        (3, 2, [0, 2, 4]),
        (2, 5, [0, 5]),
        (8, 1, [0]),
        (9, 1, []),
        (1, 0, list(range(8))),
    ],
)
def test_windows_run_over_all_items(memory: Memory, block_size: int, stride: int, starts: list[int]) -> None:
    samples = memory.open(block_size=block_size, stride=stride)
    assert as_lists(samples) == [list(range(start, start + block_size)) for start in starts]
    assert len(samples) == max(0, (8 - block_size) // (stride or block_size) + 1)


def test_empty_data_has_no_windows() -> None:
    assert len(ragged([0, 0]).open(block_size=1)) == 0
    with pytest.raises(SampleIndexError, match="0 windows, since the data has 0 items and block_size is 1"):
        ragged([]).open(block_size=1)[0]


@pytest.mark.promise("F28")
def test_too_short_data_is_told_with_both_numbers() -> None:
    samples = ragged([3, 2]).open(block_size=8)
    with pytest.raises(
        SampleIndexError, match=r"index 0 .* there are 0 windows, since the data has 5 items and block_size is 8"
    ):
        samples[0]
    with pytest.raises(SampleIndexError, match=r"index 9 .* there are 2 windows of 2 items"):
        ragged([3, 2]).open(block_size=2)[9]


def test_a_stream_has_samples_only_through_a_block_size() -> None:
    stream = Memory(np.arange(10), 10, stream=True)
    with pytest.raises(BlockSizeError, match=r"stream of 10 items .* give a block_size"):
        stream.open()
    assert len(stream.open(block_size=5)) == 2
    for wrong in ({"stride": 2}, {"block_size": -1}, {"block_size": 2, "stride": -2}):
        with pytest.raises(BlockSizeError):
            ragged([1]).open(**wrong)


@pytest.mark.promise("F21")
@pytest.mark.parametrize("index", [2, np.int64(2), np.uint8(2), np.int16(-3), -3, torch.tensor(2), np.array(2)])
def test_every_integer_is_an_index(index: object) -> None:
    assert ragged([1, 1, 3, 0, 2]).open()[index].tolist() == [2, 3, 4]


@pytest.mark.promise("F21")
def test_indices_are_as_a_lists() -> None:
    samples, expected = ragged([1, 0, 2, 3]).open(), [[0], [], [1, 2], [3, 4, 5]]
    assert samples[True].tolist() == expected[True]
    for chosen in (
        slice(None),
        slice(1, 3),
        slice(None, None, -1),
        slice(-2, 99),
        slice(3, 1),
        slice(np.int64(1), None),
    ):
        assert [sample.tolist() for sample in samples[chosen]] == expected[chosen]
    for outside in (4, -5, 1 << 31, 1 << 63, -(1 << 64)):
        with pytest.raises(SampleIndexError, match=f"index {outside} is out of range: there are 4 samples"):
            samples[outside]
    for wrong in (1.0, "1", None, [1], (1, 2), np.float64(1), np.array([1, 2]), torch.tensor(1.5), slice(0.5, 2)):
        with pytest.raises(SampleTypeError, match="is no index"):
            samples[wrong]


def test_positions_are_indices_in_bulk() -> None:
    samples = ragged([1] * 5).open()
    for given in (
        [0, -1, 4],
        np.array([0, -1, 4], np.int8),
        torch.tensor([0, -1, 4]),
        range(3),
        [],
        np.array([3], np.uint64),
        np.array([3, -1], object),
        [np.int8(-1), torch.tensor([3]), torch.tensor(2)],
        {2: "b", 0: "a"},
    ):
        expected = [samples.position(index) for index in given]
        assert samples.positions(given).tolist() == expected
        assert samples.positions(given).dtype == np.int64
    given = np.array([-1, -2])
    samples.positions(given)
    assert given.tolist() == [-1, -2], "the caller's array was written to"
    assert samples.positions(iter([4, -5])).tolist() == [4, 0]
    for outside in ([0, 5], [-6], [1 << 70], np.array([1 << 63], np.uint64)):
        with pytest.raises(SampleIndexError):
            samples.positions(outside)
    for wrong in (
        *([0.5], ["x"], "x", 3, None, [[1]], [[0, 1], [2]], np.array([[1]]), np.array(3), np.array([0.5])),
        *(np.array([True, False, True]), torch.tensor([True]), torch.tensor([0.5]), torch.tensor(3)),
        *([True, False, True], (1, True), iter([True]), np.array([True], object)),
    ):
        with pytest.raises(SampleTypeError):
            samples.positions(wrong)


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (ragged([0, 3, 0, 2], "uint16"), {}),
        (n_d(), {}),
        (Memory(np.arange(12, dtype=np.float32).reshape(3, 4), 3), {}),
        (Memory(np.arange(5), 5), {}),
        (ragged([5, 6, 7], "uint8"), {"block_size": 4, "stride": 3}),
        (Memory(np.arange(30), 30, stream=True), {"block_size": 7}),
    ],
)
def test_extents_are_where_the_views_are(memory: Memory, options: dict[str, int]) -> None:
    samples = memory.open(**options)
    positions = np.arange(len(samples))[::-1]
    offsets, nbytes = samples.extents(positions)
    assert offsets.dtype == nbytes.dtype == np.int64
    samples.check_extents(positions, offsets, nbytes)
    start = samples.values.__array_interface__["data"][0] - memory.description.columns[0].values.offset
    for place in zip(positions.tolist(), offsets.tolist(), nbytes.tolist(), strict=True):
        view = samples[place[0]]
        assert view.nbytes == place[2]
        assert view.size == 0 or view.__array_interface__["data"][0] - start == place[1]
        again = samples.view_at(*place)
        assert again.shape == view.shape
        assert np.array_equal(again, view)
    for outside in (-1, len(samples)):
        with pytest.raises(SampleIndexError):
            samples.extents(np.array([0, outside]))


@pytest.mark.parametrize(
    "offsets", [[0, 2, 99], [0, -1, 3], [0, 3, 2], [-4, 2, 3], [0, 1 << 62, 3], [0, 2, -(1 << 63)]]
)
def test_damaged_offsets_are_refused_when_used(offsets: list[int]) -> None:
    samples = Memory(np.arange(3), 2, offsets=np.array(offsets, np.int64)).open()
    damaged = 0 if not 0 <= offsets[0] <= offsets[1] <= 3 else 1
    with pytest.raises(SegmentFormatError, match=f"sample {damaged} of column 'tokens'"):
        samples[damaged]
    with pytest.raises(SegmentFormatError, match=f"sample {damaged} of column 'tokens'"):
        samples.extents(np.array([damaged]))


@pytest.mark.parametrize(
    ("shapes", "shape_offsets"),
    [
        ([2, 2], [0, 2]),
        ([-2, -3], [0, 2]),
        ([-1, 6], [0, 2]),
        ([6], [0, 2]),
        ([6], [1, 0]),
        ([6], [-1, 1]),
        ([1 << 62, 4], [0, 2]),
    ],
)
def test_damaged_shapes_are_refused_when_used(shapes: list[int], shape_offsets: list[int]) -> None:
    memory = Memory(
        np.arange(6),
        1,
        offsets=np.array([0, 6]),
        shapes=np.array(shapes, np.int64),
        shape_offsets=np.array(shape_offsets, np.int64),
    )
    with pytest.raises(SegmentFormatError, match="sample 0 of column 'tokens' has 6 items, but its shape is"):
        memory.open()[0]


@pytest.mark.parametrize("shape", [[1] * 40, [0, 1 << 62, 1 << 62], [0, -1]])
def test_shapes_that_numpy_cannot_make_are_refused_when_used(shape: list[int]) -> None:
    length = 0 if 0 in shape else 1
    memory = Memory(
        np.arange(length),
        1,
        offsets=np.array([0, length]),
        shapes=np.array(shape, np.int64),
        shape_offsets=np.array([0, len(shape)]),
    )
    with pytest.raises(SegmentFormatError, match=f"has {length} items, but its shape is"):
        memory.open()[0]


@pytest.mark.parametrize(
    ("shift", "nbytes"),
    [(-4, 4), (20, 4), (16, 8), (0, -4), (2, 4), (0, 3), (0, 1 << 62), (1 << 62, 4), (-(1 << 62), 4)],
)
def test_a_daemons_word_is_checked(shift: int, nbytes: int) -> None:
    memory = ragged([2, 3])
    samples = memory.open()
    start = memory.description.columns[0].values.offset
    with pytest.raises(ProtocolError, match=r"sample 1 is .* not within column 'tokens'"):
        samples.check_extents(np.array([0, 1]), np.array([start, start + shift]), np.array([8, nbytes]))


def test_a_place_of_the_wrong_size_is_refused() -> None:
    rows = Memory(np.arange(6).reshape(3, 2), 3)
    start = rows.description.columns[0].values.offset
    for samples in (rows.open(), rows.open(block_size=2)):
        with pytest.raises(SegmentFormatError, match=r"has 1 items, but its shape is \(2,\)"):
            samples.view_at(0, start, 8)


def test_columns_are_found_by_name() -> None:
    column = Column("tokens", Array("int32", (1,)))
    one = Description("corpus", "test", 1, (column,), SOURCE)
    two = Description("corpus", "test", 1, (column, Column("mask", Array("bool", (1,)))), SOURCE)
    assert find_column(one, None) is column
    assert find_column(two, "tokens") is column
    with pytest.raises(ConfigError, match="several columns and none was named: it has 'tokens', 'mask'"):
        find_column(two, None)
    with pytest.raises(ConfigError, match="no column 'x': it has 'tokens'"):
        find_column(one, "x")


@pytest.mark.parametrize("memory", [ragged([2, 1]), n_d(), Memory(np.arange(3), 3)])
def test_samples_free_their_memory_at_once(memory: Memory) -> None:
    samples = memory.open()
    samples[0]
    gone = weakref.ref(samples.read)
    gc.disable()
    try:
        del samples
        assert gone() is None, "a cycle keeps the segment attached"
    finally:
        gc.enable()
