"""ShmDataset in one process: samples, indices, windows, options, errors, lifetime."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmserve_client import (
    BlockSizeError,
    ConfigError,
    DaemonUnreachableError,
    DatasetClosedError,
    DatasetFailedError,
    DatasetNotFoundError,
    DatasetNotReadyError,
    EndpointError,
    ProtocolError,
    SampleIndexError,
    SampleTypeError,
    SegmentNotFoundError,
    ShmDataset,
)
from shmserve_client.locks import attached_processes
from shmserve_client.protocol import MAX_INDICES, Attach, Attached, Failure, Lookup, Offsets, Request
from tests.datasets import served_columns
from tests.fake_daemon import FakeDaemon, answering
from tests.processes import wait_until

RAGGED = [np.array(sample, np.int32) for sample in ([5, 6, 7], [], [8], [9, 10])]


class Served:
    """Serves columns as "corpus" and opens datasets of them."""

    def __init__(self, stack: ExitStack, shm_dir: Path, socket: Path) -> None:
        self._stack = stack
        self._shm_dir = shm_dir
        self._socket = socket
        self.daemon: FakeDaemon

    def columns(self, columns: Any, **options: Any) -> None:
        serving = served_columns(columns, shm_dir=self._shm_dir, socket=self._socket, **options)
        self.daemon = self._stack.enter_context(serving)

    def open(self, **options: Any) -> ShmDataset:
        return ShmDataset(endpoint=f"ipc://{self._socket}", **options)


@pytest.fixture
def served(shm_dir: Path, runtime_dir: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(stack, shm_dir, runtime_dir / "fake.sock")
        gc.collect()


def as_lists(samples: Any) -> list[Any]:
    return [sample.tolist() for sample in samples]


def test_a_dataset_is_like_a_list(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open()
    expected = [[5, 6, 7], [], [8], [9, 10]]
    assert len(ds) == 4
    assert as_lists(ds) == as_lists(ds[:]) == as_lists(ds.__getitems__(range(4))) == expected
    assert ds[0].dtype == torch.int32
    assert ds[-1].tolist() == ds[np.int64(3)].tolist() == ds[torch.tensor(3)].tolist() == [9, 10]
    assert as_lists(ds[::-2]) == [[9, 10], []]
    for chosen in ([3, 1, 1], np.array([3, 1, 1]), torch.tensor([3, 1, 1]), [np.int32(3), -3, 1]):
        assert as_lists(ds.__getitems__(chosen)) == [[9, 10], [], []]
    with pytest.raises(SampleIndexError, match="index 4 is out of range: there are 4 samples"):
        ds[4]
    with pytest.raises(IndexError):
        ds.__getitems__([0, -5])
    for wrong in (1.0, "1", None, [0]):
        with pytest.raises(SampleTypeError):
            ds[wrong]
    for remote in (ds, served.open(lookup="daemon")):
        for wrong in (5, torch.tensor(3), None, np.array([True, False]), [[0, 1], [2]], [0.5]):
            with pytest.raises(SampleTypeError):
                remote.__getitems__(wrong)
        assert as_lists(remote.__getitems__([torch.tensor(3), 1])) == [[9, 10], []]
    assert repr(ds) == "ShmDataset('corpus', 4 samples)"


@pytest.mark.promise("F21")
def test_iteration_ends_however_it_is_done(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open()
    by_index = []
    for i in range(99):
        try:
            by_index.append(ds[i])
        except IndexError:
            break
    assert as_lists(by_index) == as_lists(iter(ds)) == as_lists(ds)


def test_several_columns_make_a_dict(served: Served) -> None:
    labels = np.array([3, 2, 1, 0], np.int64)
    pictures = [np.arange(size * 2, dtype=np.uint8).reshape(2, size) for size in (1, 3, 0, 2)]
    served.columns({"tokens": RAGGED, "label": labels, "picture": pictures})
    ds = served.open()
    assert {name: value.tolist() for name, value in ds[0].items()} == {
        "tokens": [5, 6, 7],
        "label": 3,
        "picture": [[0], [1]],
    }
    assert list(served.open(columns=["label", "tokens"])[2]) == ["label", "tokens"]
    only = served.open(columns=["label"])
    assert only[1].shape == ()
    assert as_lists(only) == [3, 2, 1, 0]
    assert as_lists(served.open(columns="label", block_size=2)) == [[3, 2], [1, 0]]
    remote = served.open(lookup="daemon")
    for index in range(4):
        assert all(torch.equal(remote[index][name], value) for name, value in ds[index].items())
    with pytest.raises(BlockSizeError, match="with the columns tokens, label, picture"):
        served.open(block_size=2)
    with pytest.raises(ConfigError, match="no column 'x': it has 'tokens', 'label', 'picture'"):
        served.open(columns=["x"])
    with pytest.raises(ConfigError, match="columns is empty"):
        served.open(columns=[])
    with pytest.raises(ConfigError, match="samples have tokens, label, picture, name one"):
        ds.lookup([0])
    assert ds.lookup([0], column="label")[1].tolist() == [8]


def test_windows_are_over_all_items(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open(block_size=4, stride=2)
    assert as_lists(ds) == [[5, 6, 7, 8], [7, 8, 9, 10]]
    assert as_lists(served.open(block_size=2)) == [[5, 6], [7, 8], [9, 10]]
    assert as_lists(served.open(block_size=np.int64(6))) == [[5, 6, 7, 8, 9, 10]]
    short = served.open(block_size=7)
    assert len(short) == 0
    assert list(short) == []
    with pytest.raises(IndexError, match="0 windows, since the data has 6 items and block_size is 7"):
        short[0]
    assert (ds.info.num_samples, ds.info.stored_samples, ds.info.block_size, ds.info.stride) == (2, 4, 4, 2)
    for wrong in (0, -1, 2.0, "2", "true", 1 << 62, 2**70):
        with pytest.raises(BlockSizeError, match=r"is not a positive number of items below 2\^62"):
            served.open(block_size=wrong)
        with pytest.raises(BlockSizeError, match="is not a positive number of items"):
            served.open(block_size=2, stride=wrong)
    with pytest.raises(BlockSizeError, match="stride 2 without block_size"):
        served.open(block_size=None, stride=2)


def test_the_daemons_block_size_is_a_default(served: Served) -> None:
    served.columns({"tokens": RAGGED}, block_size=3, stride=2)
    assert as_lists(served.open()) == [[5, 6, 7], [7, 8, 9]]
    assert as_lists(served.open(stride=3)) == [[5, 6, 7], [8, 9, 10]]
    assert as_lists(served.open(block_size=5)) == [[5, 6, 7, 8, 9]]
    assert as_lists(served.open(block_size=None)) == [[5, 6, 7], [], [8], [9, 10]]


def test_a_stream_needs_a_block_size(served: Served) -> None:
    served.columns({"tokens": np.arange(10, dtype=np.uint16)}, stream=True)
    with pytest.raises(BlockSizeError, match=r"'corpus' is a stream of 10 items .* give a block_size"):
        served.open()
    assert as_lists(served.open(block_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_true_array_of_one_axis_gives_scalars(served: Served) -> None:
    served.columns({"values": np.array([1.5, 2.5])})
    ds = served.open()
    assert ds[1].shape == ()
    assert as_lists(ds) == [1.5, 2.5]
    assert as_lists(served.open(block_size=2)) == [[1.5, 2.5]]


def test_stored_columns_and_arrays_are_numpy_views(served: Served) -> None:
    documents = np.array([0, 2, 4], np.int64)
    served.columns(
        {"tokens": RAGGED, "row": np.arange(8, dtype=np.uint16).reshape(4, 2)}, arrays={"documents": documents}
    )
    ds = served.open(columns=["row"], block_size=3)
    assert ds.array("documents").tolist() == [0, 2, 4]
    assert ds.column("row").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    tokens = ds.column("tokens")
    assert [tokens[i].tolist() for i in range(-4, 0)] == as_lists(tokens) == [[5, 6, 7], [], [8], [9, 10]]
    assert (tokens.values.tolist(), tokens.offsets.tolist()) == ([5, 6, 7, 8, 9, 10], [0, 3, 3, 4, 6])
    with pytest.raises(ConfigError, match="no array 'modes': it has documents"):
        ds.array("modes")
    with pytest.raises(ConfigError, match="several columns"):
        ds.column()


def test_info_says_what_it_is(served: Served) -> None:
    served.columns({"tokens": RAGGED}, arrays={"documents": np.zeros(2, np.int64)})
    info = served.open().info
    assert (info.name, info.format, info.num_samples, info.stored_samples) == ("corpus", "test", 4, 4)
    assert (info.dtypes, info.arrays, info.block_size, info.stride) == ({"tokens": "int32"}, ("documents",), None, None)
    assert (info.data, info.notes, info.generation) == (("/data/corpus",), ("made for a test",), 1)
    assert os.stat(info.path).st_size == info.nbytes
    assert info.endpoint == served.daemon.path


@pytest.mark.parametrize("lookup", ["shared", "daemon"])
def test_lookup_says_where_the_bytes_are(served: Served, lookup: str) -> None:
    served.columns({"tokens": RAGGED})
    for options in ({}, {"block_size": 2, "stride": 1}):
        ds = served.open(lookup=lookup, **options)
        offsets, nbytes = ds.lookup([-1, 0, 1])
        segment = Path(ds.info.path).read_bytes()
        for index, offset, size in zip([-1, 0, 1], offsets, nbytes, strict=True):
            assert np.frombuffer(segment[offset : offset + size], np.int32).tolist() == ds[index].tolist()
        assert ds.lookup([])[0].shape == (0,)
        with pytest.raises(SampleIndexError):
            ds.lookup([99])
        with pytest.raises(SampleTypeError):
            ds.lookup([0.5])


def test_the_daemon_is_asked_once_per_batch(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open(lookup="daemon")
    served.daemon.requests.clear()
    assert as_lists(ds.__getitems__([3, -4, 3])) == [[9, 10], [5, 6, 7], [9, 10]]
    (request,) = served.daemon.requests
    assert isinstance(request, Lookup)
    assert np.frombuffer(request.indices, np.int64).tolist() == [3, 0, 3]
    assert ds[2].tolist() == [8]
    assert as_lists(ds[1:]) == [[], [8], [9, 10]]
    assert len(served.daemon.requests) == 3
    many = np.full(MAX_INDICES + 5, 2)
    served.daemon.requests.clear()
    assert ds.lookup(many)[1].tolist() == [4] * len(many)
    assert [len(request.indices) // 8 for request in served.daemon.requests] == [MAX_INDICES, 5]


def test_a_daemon_that_points_elsewhere_is_not_believed(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open(lookup="daemon")
    nowhere = np.array([0, 1 << 40], np.int64).tobytes()
    sizes = np.array([8, 8], np.int64).tobytes()
    for reply in (Offsets(nowhere, sizes), Offsets(nowhere, sizes[:8]), Offsets(b"", b""), Attached("", "", b"", 0, 0)):
        served.daemon.answer = answering(lambda request, reply=reply: reply)
        with pytest.raises(ProtocolError, match="the daemon"):
            ds.__getitems__([0, 1])


def test_reading_asks_the_daemon_nothing(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open()
    served.daemon.requests.clear()
    list(ds), ds[1:3], ds.lookup([0]), ds.info, pickle.loads(pickle.dumps(ds))[0]
    assert served.daemon.requests == []


@pytest.mark.promise("F17")
def test_samples_outlive_the_dataset(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open()
    with ds as entered:
        assert entered is ds
        sample, view = ds[0], ds.column("tokens")[3]
        fd = os.open(ds.info.path, os.O_RDONLY)
    try:
        ds.close()
        with pytest.raises(DatasetClosedError, match="dataset 'corpus' is closed"):
            ds[0]
        for use in (len, list, lambda ds: ds.__getitems__([0]), lambda ds: ds.lookup([0]), lambda ds: ds.info):
            with pytest.raises(ValueError, match="is closed"):
                use(ds)
        assert repr(ds) == "ShmDataset('corpus', closed)"
        assert sample.tolist() == [5, 6, 7]
        assert view.tolist() == [9, 10]
        assert [process.pid for process in attached_processes(fd)] == [os.getpid()]
        del sample, view
        wait_until(lambda: not attached_processes(fd), what="detaching")
    finally:
        os.close(fd)


@pytest.mark.promise("F17")
def test_writing_in_place_stays_in_this_process(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open()
    before = Path(ds.info.path).read_bytes()
    ds[0].fill_(0)
    assert ds[0].tolist() == [0, 0, 0], "a view was asked for, so this process sees its own write"
    assert Path(ds.info.path).read_bytes() == before


@pytest.mark.promise("F11")
def test_a_pickle_is_small_and_keeps_the_options(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    options = {
        "block_size": 3,
        "stride": 2,
        "dtype": torch.int64,
        "transform": double,
        "lookup": "daemon",
        "columns": ["tokens"],
    }
    ds = served.open(**options)
    unused = pickle.dumps(ds)
    expected = as_lists(ds)
    assert expected == [[10, 12, 14], [14, 16, 18]]
    for pickled in (unused, pickle.dumps(ds), pickle.dumps(pickle.loads(pickle.dumps(ds)))):
        assert len(pickled) < 4096
        again = pickle.loads(pickled)
        assert repr(again) == "ShmDataset('corpus', not attached yet)"
        assert as_lists(again) == expected
        assert again[0].dtype == torch.int64
        assert again.info == ds.info
    assert as_lists(copy.deepcopy(ds)) == as_lists(copy.copy(ds)) == expected
    for untouched in (copy.copy(ds), copy.copy(ds)):
        assert len(untouched) == 2
    ds.close()
    with pytest.raises(DatasetClosedError):
        pickle.loads(pickle.dumps(ds))[0]


def double(sample: torch.Tensor) -> torch.Tensor:
    return sample.mul_(2)


def test_a_subclass_keeps_what_it_adds(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    ds = Named(endpoint=f"ipc://{served.daemon.path}")
    ds.label = "mine"
    again = pickle.loads(pickle.dumps(ds))
    assert (again.label, again[0].tolist(), type(again)) == ("mine", [5, 6, 7], Named)


class Named(ShmDataset):
    label = ""


@pytest.mark.parametrize("lookup", ["shared", "daemon"])
def test_what_a_subclass_makes_of_a_sample_reaches_a_batch(served: Served, lookup: str) -> None:
    served.columns({"tokens": RAGGED})
    ds = Summed(endpoint=served.daemon.path, lookup=lookup)
    assert [ds[0], *ds.__getitems__([3, -2]), *ds[1:3], *ds] == [18, 19, 8, 0, 8, 18, 0, 8, 19]


class Summed(ShmDataset):
    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return sample if isinstance(sample, list) else int(sample.sum())


def test_all_datasets_of_a_process_share_one_mapping(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    first, second = served.open(), served.open(block_size=2)
    copied = pickle.loads(pickle.dumps(first))
    assert first[0].data_ptr() == second[0].data_ptr() == copied[0].data_ptr()


def test_threads_may_attach_at_once(served: Served) -> None:
    served.columns({"tokens": RAGGED})
    copied = pickle.loads(pickle.dumps(served.open()))
    barrier = threading.Barrier(8)
    found: list[Any] = []

    def read() -> None:
        barrier.wait()
        found.append(as_lists(copied))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[[5, 6, 7], [], [8], [9, 10]]] * 8


def test_no_daemon_is_an_error_at_once(runtime_dir: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(DaemonUnreachableError, match=f"{runtime_dir}/none.sock .*shmserve start --data"):
        ShmDataset("corpus", endpoint=f"ipc://{runtime_dir}/none.sock")
    assert time.monotonic() - started_s < 5
    with pytest.raises(DaemonUnreachableError, match=r"tcp://localhost:1 \(nobody listens\).*--tcp HOST:PORT"):
        ShmDataset("corpus", endpoint="tcp://localhost:1")
    with pytest.raises(EndpointError, match="http://localhost"):
        ShmDataset("corpus", endpoint="http://localhost:1")


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (Failure("dataset-not-found", "several are served: a, b"), DatasetNotFoundError),
        (Failure("dataset-failed", "'corpus': no such file"), DatasetFailedError),
        (Failure("dataset-not-ready", "'corpus' is still loading"), DatasetNotReadyError),
    ],
)
def test_what_the_daemon_refuses_is_raised(runtime_dir: Path, failure: Failure, error: type[Exception]) -> None:
    with (
        FakeDaemon(runtime_dir / "fake.sock", answering(lambda request: failure)) as daemon,
        pytest.raises(error, match=failure.message),
    ):
        ShmDataset("corpus", endpoint=daemon.path, timeout=0.2)


@pytest.mark.promise("F6")
def test_another_shm_directory_is_an_error(served: Served, tmp_path: Path) -> None:
    served.columns({"tokens": RAGGED})
    ds = served.open()
    real = ds.info.path

    def elsewhere(request: Request) -> Attached:
        assert isinstance(request, Attach)
        return Attached("corpus", f"{tmp_path}/missing", b"n" * 16, 0, 0)

    served.daemon.answer = answering(elsewhere)
    with pytest.raises(SegmentNotFoundError, match="another shm directory than the daemon"):
        served.open()
    served.daemon.answer = answering(lambda request: Attached("corpus", real, b"n" * 16, 0, 0))
    with pytest.raises(SegmentNotFoundError, match="another shm directory than"):
        served.open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup": "remote"}, "lookup 'remote'"),
        ({"dtype": "int64"}, "dtype 'int64': give None.* what files without a header hold is stored_dtype="),
        ({"dtype": torch.bits8}, "dtype torch.bits8: torch does not convert int32 to it"),
        ({"timeout": float("nan")}, "timeout nan: give a number of seconds"),
        ({"timeout": "x"}, "timeout 'x': give a number of seconds"),
        ({"dtype": np.int64}, "dtype"),
    ],
)
def test_impossible_options_are_refused(served: Served, options: dict[str, Any], message: str) -> None:
    served.columns({"tokens": RAGGED})
    with pytest.raises(ConfigError, match=message):
        served.open(**options)


def test_attaching_and_reading_leave_no_descriptor_open(served: Served) -> None:
    served.columns({"tokens": RAGGED})

    def use() -> None:
        for lookup in ("shared", "daemon"):
            ds = served.open(lookup=lookup)
            list(ds)

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        use()
    gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, what="all descriptors closed")
