"""`ds.batch` and `ds.batched`: the same as plain indexing, padded by hand, in every dtype and by every path."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from shmserve_client import (
    Batch,
    BatchedDataset,
    ConfigError,
    DatasetClosedError,
    SampleIndexError,
    SampleTypeError,
    SampleValueError,
    SegmentFormatError,
    ShmDataset,
)
from shmserve_client.layout import DTYPES
from tests.datasets import served_columns

Open = Callable[..., ShmDataset]
COUNT = 8
LENGTHS = (3, 0, 7, 1, 0, 12, 5, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "ragged": {"columns": ["ragged"]},
    "ragged_nd": {"columns": ["ragged_nd"]},
    "fixed": {"columns": ["fixed"]},
    "scalar": {"columns": ["scalar"]},
    "windows": {"columns": ["ragged"], "block_size": 5, "stride": 3},
}
"""How to open a dataset of each kind of samples."""
CAN_BE_CUT = ("ragged", "ragged_nd", "windows")

pytestmark = pytest.mark.filterwarnings(
    # torch's advice on the number of workers, on machines with fewer cores than workers.
    "ignore:This DataLoader will create:UserWarning"
)


@pytest.fixture
def serve(shm_dir: Path, runtime_dir: Path) -> Iterator[Callable[[dict[str, Any]], Open]]:
    """Serves columns, and returns what opens datasets of them."""
    with ExitStack() as stack:

        def start(columns: dict[str, Any]) -> Open:
            daemon = stack.enter_context(served_columns(columns, shm_dir=shm_dir, socket=runtime_dir / "fake.sock"))
            return lambda **options: ShmDataset(endpoint=daemon.path, **options)

        yield start


def columns_of(dtype: np.dtype[Any]) -> dict[str, Any]:
    def numbered(*shape: int) -> NDArray[Any]:
        return (np.arange(np.prod(shape, dtype=int)) % 100 + 1).astype(dtype).reshape(shape)

    return {
        "ragged": [numbered(length) for length in LENGTHS],
        "ragged_nd": [numbered(length, 2, 3) for length in LENGTHS],
        "fixed": numbered(COUNT, 4, 2),
        "scalar": numbered(COUNT),
    }


def by_hand(ds: ShmDataset, indices: Any, *, length: int | None = None, pad: Any = 0) -> tuple[Any, Any]:
    """What a batch is, from plain indexing: the rows as arrays, and how much of each is of the sample."""
    samples = [ds[index].numpy() for index in indices]
    if samples[0].ndim == 0:
        return np.stack(samples), [1] * len(samples)
    length = max(map(len, samples)) if length is None else length
    rows = np.full((len(samples), length, *samples[0].shape[1:]), pad, samples[0].dtype)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = sample[:length]
    return rows, [min(length, len(sample)) for sample in samples]


def assert_equal(batch: Batch, expected: tuple[Any, Any]) -> None:
    rows, lengths = expected
    assert batch.values.shape == rows.shape
    assert batch.values.tolist() == rows.tolist()
    assert batch.lengths.dtype == torch.int64
    assert batch.lengths.tolist() == lengths


@pytest.mark.parametrize("lookup", ["shared", "daemon"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_batch_is_its_samples_padded(serve: Any, kind: str, lookup: str) -> None:
    ds = serve(columns_of(np.dtype(np.int32)))(lookup=lookup, **OPTIONS[kind])
    plain = serve_again(ds, **OPTIONS[kind])
    lengths = st.none() | st.integers(0, 15) if kind in CAN_BE_CUT else st.none()

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(-len(ds), len(ds) - 1), min_size=1, max_size=20), lengths, st.integers(-2, 3))
    def check(indices: list[int], length: int | None, pad: int) -> None:
        expected = by_hand(plain, indices, length=length, pad=pad)
        for given_as in (indices, np.array(indices), torch.tensor(indices), map(np.int32, indices)):
            assert_equal(ds.batch(given_as, length, pad), expected)
        view = ds.batched(length, pad)
        assert_equal(view.__getitems__(indices), expected)
        out = torch.full((len(indices) + 2, *expected[0].shape[1:]), 77)
        batch = ds.batch(indices, length, pad, out=out)
        assert_equal(batch, expected)
        assert batch.values.data_ptr() == out.data_ptr()
        assert (out[len(indices) :] == 77).all()

    check()


def serve_again(ds: ShmDataset, **options: Any) -> ShmDataset:
    return ShmDataset(endpoint=ds.info.endpoint, **options)


@pytest.mark.parametrize("name", DTYPES)
def test_by_default_integers_are_int64_and_others_as_stored(serve: Any, name: str) -> None:
    open_dataset = serve(columns_of(DTYPES[name]))
    for options in OPTIONS.values():
        ds = open_dataset(**options)
        batch = ds.batch(range(-3, 3))
        assert_equal(batch, by_hand(ds, range(-3, 3)))
        is_integer = "int" in name
        assert batch.values.dtype == (torch.int64 if is_integer else getattr(torch, name))
        stored = ds.batch([5, 1], dtype="stored", pad=1)
        assert stored.values.dtype == getattr(torch, name)
        assert_equal(stored, by_hand(ds, [5, 1], pad=1))


CONVERTED_TO = (
    *(torch.uint8, torch.int32, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex64),
)


@pytest.mark.parametrize("name", DTYPES)
def test_another_dtype_is_converted_as_samples_are(serve: Any, name: str) -> None:
    open_dataset = serve(columns_of(DTYPES[name]))
    for dtype, kind in itertools.product(CONVERTED_TO, ("ragged", "fixed")):
        plain = open_dataset(**OPTIONS[kind])
        if name.startswith("complex") and not dtype.is_complex:
            with pytest.raises(ConfigError, match=f"the data is {name}"):
                plain.batch([0], dtype=dtype)
            continue
        batch = plain.batch(range(COUNT), dtype=dtype, pad=1)
        converted = open_dataset(dtype=dtype, **OPTIONS[kind])
        assert batch.values.dtype == dtype
        assert torch.equal(converted.batch(range(COUNT), pad=1).values, batch.values)
        for row, sample in zip(batch.values, converted, strict=True):
            assert torch.equal(row[: len(sample)], sample)
            assert (row[len(sample) :] == 1).all()


def test_what_the_dtype_cannot_hold_is_refused_with_its_place(serve: Any) -> None:
    samples = [np.array(values, np.int64) for values in ([1, 2], [3, 300, -1], [70_000])]
    ds = serve({"tokens": samples})()
    with pytest.raises(SampleValueError, match="sample 1 holds 300 at position 1, which does not fit uint8"):
        ds.batch([0, 1, 2], dtype=torch.uint8)
    assert ds.batch([0, 1], length=1, dtype=torch.uint8).values.tolist() == [[1], [3]], "what is cut off is not asked"
    windows = serve_again(ds, block_size=2)
    with pytest.raises(SampleValueError, match="sample 2 holds 70000 at position 1"):
        windows.batch([0, 2], dtype=torch.int16)


@pytest.mark.parametrize("stored", [np.uint16, np.int64, np.float32])
@pytest.mark.parametrize(
    ("dtype", "pad", "fits"),
    [
        (None, -100, True),
        (torch.int64, 1 << 62, True),
        (torch.int64, 1 << 63, False),
        (torch.int64, 0.5, False),
        (torch.int64, float("nan"), False),
        (torch.uint8, -1, False),
        (torch.uint8, 256, False),
        (torch.float16, 70_000, False),
        (torch.float32, 0.1, True),
        (torch.float32, float("-inf"), True),
        (torch.bfloat16, 0.5, True),
        (torch.float32, 1j, False),
        (torch.float32, "0", False),
        (torch.float32, None, False),
        (torch.float32, [0, 1], False),
        (torch.bool, 1, True),
        (torch.bool, 2, False),
    ],
)
def test_the_pad_has_to_fit_the_dtype_not_the_stored_one(
    serve: Any, stored: Any, dtype: Any, pad: Any, fits: bool
) -> None:
    ds = serve({"tokens": [np.ones(2, stored), np.ones(1, stored)]})()
    if fits:
        values = ds.batch([0, 1], pad=pad, dtype=dtype).values
        assert values[1, 1] == torch.tensor(pad).to(values.dtype)
        assert (values[0] == 1).all()
    else:
        with pytest.raises(ConfigError, match=r"pad .* does not fit torch"):
            ds.batch([0, 1], pad=pad, dtype=dtype)


def test_several_columns_make_a_dict_of_batches(serve: Any) -> None:
    for lookup in ("shared", "daemon"):
        ds = serve(columns_of(np.dtype(np.uint16)))(lookup=lookup)
        batches = ds.batch([2, -1, 2], length=6, pad=-1)
        assert list(batches) == ["ragged", "ragged_nd", "fixed", "scalar"]
        for name, batch in batches.items():
            one = serve_again(ds, columns=name)
            expected = by_hand(one, [2, -1, 2], length=6 if name in CAN_BE_CUT else None, pad=-1)
            assert_equal(batch, expected)
        out = {name: torch.zeros(4, *batch.values.shape[1:], dtype=torch.int64) for name, batch in batches.items()}
        again = ds.batch([2, -1, 2], pad=-1, out=out)
        for name, batch in again.items():
            assert torch.equal(batch.values, batches[name].values)
            assert batch.values.data_ptr() == out[name].data_ptr()
        for wrong in (out["fixed"], {"fixed": out["fixed"]}):
            with pytest.raises(
                ConfigError, match="out: give a dict with a tensor for each of the columns ragged, ragg"
            ):
                ds.batch([0], out=wrong)
        ds.close()


def test_an_empty_list_gives_an_empty_batch(serve: Any) -> None:
    open_dataset = serve(columns_of(np.dtype(np.int32)))
    shapes = {"ragged": (0, 0), "ragged_nd": (0, 0), "fixed": (0, 4, 2), "scalar": (0,), "windows": (0, 0)}
    for kind, shape in shapes.items():
        ds = open_dataset(**OPTIONS[kind])
        batch = ds.batch([])
        assert batch.values.shape == shape
        assert batch.lengths.shape == (0,)
        if kind in CAN_BE_CUT:
            assert ds.batch(np.array([], np.int64), length=7).values.shape == (0, 7)


def test_a_batch_is_private(serve: Any) -> None:
    open_dataset = serve(columns_of(np.dtype(np.int64)))
    for options in OPTIONS.values():
        ds = open_dataset(**options)
        before = ds[2].tolist()
        ds.batch([2, 2]).values.zero_()
        assert ds[2].tolist() == before


def test_nd_samples_have_to_agree_behind_the_first_axis(serve: Any) -> None:
    shapes = ((2, 3), (4, 3), (2, 5), (0, 3), ())
    ds = serve({"picture": [np.ones(shape, np.uint8) for shape in shapes]})()
    assert ds.batch([0, 1, 3]).values.shape == (3, 4, 3)
    assert ds.batch([2]).values.shape == (1, 2, 5)
    with pytest.raises(ConfigError, match=r"samples 1 and 2 of column 'picture' have the extents \[3\] and \[5\]"):
        ds.batch([1, 2])
    with pytest.raises(ConfigError, match="sample 4 of column 'picture' is a scalar"):
        ds.batch([4])


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 3),
        torch.zeros(1, 3, dtype=torch.int64),
        torch.zeros(2, 4, dtype=torch.int64),
        torch.zeros(2, 3, 1, dtype=torch.int64),
        torch.zeros(2, 6, dtype=torch.int64)[:, ::2],
        torch.zeros(2, 3, dtype=torch.int64, device="meta"),
        torch.zeros(2, 3, dtype=torch.int64).to_sparse(),
        np.zeros((2, 3), np.int64),
        {"tokens": torch.zeros(2, 3, dtype=torch.int64)},
    ],
    ids=["dtype", "rows", "length", "axes", "strides", "device", "layout", "array", "dict"],
)
def test_an_out_that_does_not_fit_is_refused(serve: Any, out: Any) -> None:
    ds = serve({"tokens": [np.ones(2, np.int32), np.ones(5, np.int32)]})()
    with pytest.raises(
        ConfigError, match=r"out is .*: give a contiguous CPU tensor, torch.int64 \[2, 3\] or with more"
    ):
        ds.batch([0, 1], length=3, out=out)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 3, dtype=torch.complex64, requires_grad=True),
        torch.zeros(2, 3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(2, 3, dtype=torch.complex64)),  # the imaginary part of a conj() is one
    ],
    ids=["gradient", "conj", "neg"],
)
def test_an_out_that_numpy_cannot_write_to_is_refused(serve: Any, out: torch.Tensor) -> None:
    ds = serve(columns_of(np.dtype(np.complex64)))(columns=["ragged"])
    with pytest.raises(ConfigError, match=r"out is torch.complex64 \[2, 3\] on cpu: .*, without gradient"):
        ds.batch([0, 2], out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_out_of_inference_mode_is_filled_there_alone(serve: Any, dtype: torch.dtype) -> None:
    ds = serve(columns_of(np.dtype(np.float32)))(columns=["ragged"])
    with torch.inference_mode():
        out = torch.empty(2, 3, dtype=dtype)
        assert ds.batch([0, 2], out=out, dtype=dtype).values.tolist() == [[1, 2, 3]] * 2
    with pytest.raises(ConfigError, match="out is"):
        ds.batch([0, 2], out=out, dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.complex32, torch.float8_e5m2, torch.float8_e4m3fn, torch.float32, torch.complex64]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_numbers_beyond_int64_are_converted_as_samples_are(serve: Any, dtype: torch.dtype) -> None:
    ds = serve({"big": np.array([1 << 63, (1 << 64) - 1, 3 << 40, 5], np.uint64)})(dtype=dtype)
    samples = [sample.to(torch.complex64).item() for sample in ds]
    assert repr(ds.batch(range(4)).values.to(torch.complex64).tolist()) == repr(samples)  # where NaN is NaN
    assert samples[3] == 5


def test_without_a_length_out_has_it(serve: Any) -> None:
    ds = serve({"tokens": [np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)]})()
    for dtype in (torch.int64, torch.bfloat16):
        out = torch.empty(2, 1, dtype=dtype)
        batch = ds.batch([0, 1], dtype=dtype, out=out)
        assert out.tolist() == [[1], [3]]
        assert batch.lengths.tolist() == [1, 1]
        assert ds.batch([0], dtype=dtype, out=torch.empty(1, 4, dtype=dtype)).values.tolist() == [[1, 2, 0, 0]]
    with pytest.raises(ConfigError, match=r"out is torch.int64 \[3\] on cpu"):
        ds.batch([0], out=torch.zeros(3, dtype=torch.int64))


def test_options_that_are_impossible_say_so(serve: Any) -> None:
    open_dataset = serve(columns_of(np.dtype(np.int32)))
    ds = open_dataset(columns=["ragged"])
    for make in (lambda **options: ds.batch([0], **options), ds.batched):
        for length in (-1, 1.5, "3", 1 << 70):
            with pytest.raises(ConfigError, match=f"length {length!r}: give a number of items"):
                make(length=length)
        for dtype in ("int64", [], np.int64):
            with pytest.raises(ConfigError, match=r"dtype .*: give None, 'stored', or a torch dtype"):
                make(dtype=dtype)
    for columns in ("fixed", ["fixed", "scalar"]):
        with pytest.raises(ConfigError, match="length 3: these samples all have one shape"):
            open_dataset(columns=columns).batch([0], length=3)
    transformed = open_dataset(transform=lambda sample: sample)
    for batch in (transformed.batched, lambda: transformed.batch([0])):
        with pytest.raises(ConfigError, match="has a transform, which works on samples"):
            batch()
    with pytest.raises(SampleIndexError, match="index 8 is out of range"):
        ds.batch([0, 8])
    for wrong in (3, [0.5], [[1]], np.array([True]), [True, False], [None], torch.ones(1, requires_grad=True)):
        with pytest.raises(SampleTypeError):
            ds.batch(wrong)
    with pytest.raises(SampleIndexError):
        ds.batch([1 << 70])
    ds.close()
    with pytest.raises(DatasetClosedError):
        ds.batch([0])


def test_damaged_offsets_are_refused(serve: Any) -> None:
    ds = serve(columns_of(np.dtype(np.int32)))(columns=["ragged"])
    ds.column("ragged").offsets[3] = 1 << 40  # in the private mapping
    with pytest.raises(SegmentFormatError, match="segment is damaged: sample 2 of column 'ragged'"):
        ds.batch([0, 2])
    nd = serve_again(ds, columns=["ragged_nd"])
    nd.column("ragged_nd").shapes[3] = 2
    with pytest.raises(SegmentFormatError, match="sample 1 of column 'ragged_nd' has 0 items, but its shape is"):
        nd.batch([0, 1])


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_a_dataloader_gets_ready_batches(serve: Any, workers: int, method: str | None) -> None:
    ds = serve(columns_of(np.dtype(np.int32)))(columns=["ragged", "scalar"])
    view = ds.batched(length=4, pad=-1)
    loader = DataLoader(
        view,
        batch_size=3,
        shuffle=False,
        collate_fn=view.collate_fn,
        num_workers=workers,
        multiprocessing_context=method,
    )
    assert len(loader) == 3
    for batch, indices in zip(loader, ([0, 1, 2], [3, 4, 5], [6, 7]), strict=True):
        for name, expected in ds.batch(indices, length=4, pad=-1).items():
            assert type(batch[name]) is Batch
            assert torch.equal(batch[name].values, expected.values)
            assert torch.equal(batch[name].lengths, expected.lengths)


def test_a_view_is_small_and_indexed_by_sample(serve: Any) -> None:
    ds = serve(columns_of(np.dtype(np.int32)))(columns=["ragged"])
    view = ds.batched(length=2)
    assert isinstance(view, BatchedDataset)
    assert len(view) == len(ds) == COUNT
    assert_equal(view[-1], by_hand(ds, [-1], length=2))
    assert len(list(view)) == COUNT
    pickled = pickle.dumps(view)
    assert len(pickled) < 4096
    assert_equal(pickle.loads(pickled)[2], by_hand(ds, [2], length=2))
    pickle.dumps(view.collate_fn)
    assert [type(sample) for sample in ds.__getitems__([0, 1])] == [torch.Tensor] * 2, "plain batches stay lists"


def test_a_batch_of_the_daemon_s_answers_is_one_request(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = serve(columns_of(np.dtype(np.int32)))(columns=["ragged"], lookup="daemon")
    ds.batch([0])
    remote = ds._attached.remote
    asked = []
    ask = remote._ask
    monkeypatch.setattr(
        remote, "_ask", lambda column, positions: asked.append(len(positions)) or ask(column, positions)
    )
    ds.batch([5, 1, 1, -1], length=3)
    assert asked == [4]
    ds.close()


@pytest.mark.parametrize("columns", [["scalar"], ["ragged"], ["scalar", "ragged"]])
def test_a_forgotten_collate_fn_is_named(serve: Any, columns: list[str]) -> None:
    ds = serve(columns_of(np.dtype(np.int32)))(columns=columns)
    with pytest.raises(ConfigError, match=r"give the DataLoader collate_fn=view\.collate_fn"):
        next(iter(DataLoader(ds.batched(), batch_size=4)))


def test_a_subclass_that_makes_its_own_samples_is_not_batched_without_them(serve: Any) -> None:
    class Negated(ShmDataset):
        def __getitem__(self, index: Any) -> Any:
            return -super().__getitem__(index)

    ds = serve(columns_of(np.dtype(np.int32)))(columns=["ragged"])
    negated = Negated(endpoint=f"ipc://{ds.info.endpoint}", columns=["ragged"])
    assert torch.equal(negated[0], -ds[0])
    with pytest.raises(ConfigError, match="Negated makes samples of its own"):
        negated.batch([0])


def test_samples_without_any_item_are_padding(serve: Any) -> None:
    ds = serve({"empty": [np.empty(0, np.int32)] * 3})()
    values, lengths = ds.batch([0, 2], length=4, pad=7)
    assert values.tolist() == [[7] * 4] * 2
    assert lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        (3.4e38, torch.bfloat16),
        (torch.ones((), requires_grad=True), None),
        (torch.ones((), dtype=torch.bfloat16), None),
        ([[1], [1, 2]], None),
    ],
)
def test_a_pad_that_cannot_be_one_is_refused(serve: Any, pad: Any, dtype: Any) -> None:
    ds = serve(columns_of(np.dtype(np.float32)))(columns=["ragged"])
    with pytest.raises(ConfigError, match="does not fit"):
        ds.batch([0], length=3, pad=pad, dtype=dtype)


def test_torch_s_way_to_ask_for_a_batch_by_its_indices(serve: Any) -> None:
    view = serve(columns_of(np.dtype(np.int32)))(columns=["ragged"]).batched(length=4)
    assert torch.equal(view[[2, 0]].values, view.__getitems__([2, 0]).values)
