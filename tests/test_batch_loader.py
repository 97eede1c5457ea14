"""`BatchLoader`: batches in order from a thread, exact states, exceptions in their place, and no thread left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shmserve_client import (
    Batch,
    BatchLoader,
    ConfigError,
    DistributedSampler,
    SampleIndexError,
    ShmDataset,
)
from tests.datasets import served_columns
from tests.processes import run_python, wait_until

COUNT = 23


@pytest.fixture
def ds(shm_dir: Path, runtime_dir: Path) -> Iterator[ShmDataset]:
    """Sample i is i + 1, i % 5 + 1 times."""
    samples = [np.full(i % 5 + 1, i + 1, np.int32) for i in range(COUNT)]
    socket = runtime_dir / "fake.sock"
    with (
        served_columns({"tokens": samples}, shm_dir=shm_dir, socket=socket),
        ShmDataset(endpoint=f"ipc://{socket}") as dataset,
    ):
        yield dataset


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    wait_until(lambda: not threads(), what="the end of all threads")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shmserve-batches")]


def samples_of(batches: Any) -> list[list[int]]:
    """Which samples each batch has, by their first items."""
    return [(batch.values[:, 0] - 1).tolist() for batch in batches]


class Recorded:
    """A sampler that notes what was drawn from it, and can be made to wait or to fail."""

    def __init__(self, indices: Any) -> None:
        self.indices = list(indices)
        self.drawn: list[int] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        for index in self.indices:
            assert self.may_go_on.wait(30)
            self.drawn.append(index)
            if isinstance(index, Exception):
                raise index
            yield index


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, COUNT, 100])
def test_batches_are_those_of_a_dataloader(ds: ShmDataset, batch_size: int, drop_last: bool) -> None:
    view = ds.batched(length=3, pad=-1)
    for sampler in (None, DistributedSampler(ds, 2, 1, shuffle=False), [5, 1, -1, 1]):
        ours = BatchLoader(view, batch_size, sampler=sampler, drop_last=drop_last)
        theirs = DataLoader(view, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=view.collate_fn)
        assert len(ours) == len(theirs)
        for batch, expected in itertools.zip_longest(ours, theirs):
            assert type(batch) is Batch
            assert torch.equal(batch.values, expected.values)
            assert torch.equal(batch.lengths, expected.lengths)


def test_a_dataset_or_a_part_of_it_is_batched_by_default(ds: ShmDataset) -> None:
    (batch,) = BatchLoader(ds, 100)
    assert torch.equal(batch.values, ds.batch(range(COUNT)).values)
    part, _ = ds.split([10, 13])
    assert samples_of(BatchLoader(part, 4)) == samples_of(
        part.batch(chosen) for chosen in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])
    )


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_thread_runs_ahead_by_prefetch_batches(ds: ShmDataset, prefetch: int) -> None:
    sampler = Recorded(range(COUNT))
    batches = iter(BatchLoader(ds, 2, sampler=sampler, prefetch=prefetch))
    assert sampler.drawn == []
    for taken in range(1, 4):
        next(batches)
        wait_until(lambda taken=taken: len(sampler.drawn) == 2 * (taken + prefetch))
    before = threads()
    assert len(before) == 1
    assert samples_of(batches) == [[i, i + 1] for i in range(6, 22, 2)] + [[22]]
    assert next(batches, None) is None


def test_a_consumer_that_is_faster_waits(ds: ShmDataset) -> None:
    sampler = Recorded(range(4))
    sampler.may_go_on.clear()
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.extend(samples_of(BatchLoader(ds, 2, sampler=sampler))))
    consumer.start()
    wait_until(threads)
    assert found == []
    sampler.may_go_on.set()
    consumer.join(30)
    assert found == [[0, 1], [2, 3]]


def test_an_exception_comes_in_its_place_with_its_traceback(ds: ShmDataset) -> None:
    taken: list[Batch] = []
    with pytest.raises(SampleIndexError, match="index 99 is out of range") as caught:
        taken.extend(BatchLoader(ds, 2, sampler=[0, 1, 2, 99, 3, 4]))
    assert samples_of(taken) == [[0, 1]]
    assert "positions" in [entry.name for entry in caught.traceback], "it shows where in the thread it was raised"
    sampler = Recorded([0, 1, 2, KeyError("broken sampler")])
    batches = iter(BatchLoader(ds, 2, sampler=sampler))
    assert samples_of([next(batches)]) == [[0, 1]]
    with pytest.raises(KeyError, match="broken sampler"):
        next(batches)
    assert next(batches, None) is None


def left_by_break(loader: BatchLoader) -> None:
    for _ in loader:
        break


def left_by_an_exception(loader: BatchLoader) -> None:
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loader]


def left_by_close(loader: BatchLoader) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()
    assert not threads(), "close waits for the thread"
    assert next(batches, None) is None
    loader.close()


def left_by_its_with_block(loader: BatchLoader) -> None:
    with loader as same:
        batches = iter(same)
        next(batches)
    assert not threads()
    assert next(batches, None) is None


def left_by_the_next_iteration(loader: BatchLoader) -> None:
    first = iter(loader)
    assert samples_of([next(first)]) == [[0, 1, 2]]
    second = iter(loader)
    assert next(first, None) is None
    assert samples_of([next(second)]) == [[0, 1, 2]]
    assert len(threads()) == 1


def left_to_the_garbage_collector(loader: BatchLoader) -> None:
    cycle: list[Any] = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [
        left_by_break,
        left_by_an_exception,
        left_by_close,
        left_by_its_with_block,
        left_by_the_next_iteration,
        left_to_the_garbage_collector,
    ],
)
def test_the_thread_ends_with_its_iteration(ds: ShmDataset, leave: Any) -> None:
    loader = BatchLoader(ds, 3)
    leave(loader)
    wait_until(lambda: not threads(), what="the end of the thread")
    assert samples_of(loader) == samples_of(BatchLoader(ds, 3)), "another iteration can follow"


def test_an_iteration_that_did_not_start_has_no_thread(ds: ShmDataset) -> None:
    loader = BatchLoader(ds, 3)
    batches = iter(loader)
    assert not threads()
    loader.close()
    assert list(batches) == []


def test_the_interpreter_ends_in_the_middle(ds: ShmDataset) -> None:
    for ending in ("", "del loader, batches", "os.kill(os.getpid(), signal.SIGINT)"):
        done = run_python(f"""
            import os, signal, sys
            from shmserve_client import BatchLoader, ShmDataset
            signal.signal(signal.SIGINT, lambda signum, frame: sys.exit(0))
            dataset = ShmDataset(endpoint="{ds.info.endpoint}")
            loader = BatchLoader(dataset, 2)
            batches = iter(loader)
            next(batches)
            {ending}
        """)
        assert done.stderr == ""


def test_a_forked_child_makes_its_own_iteration(ds: ShmDataset) -> None:
    run_python(f"""
        import os
        from shmserve_client import BatchLoader, ShmDataset
        loader = BatchLoader(ShmDataset(endpoint="{ds.info.endpoint}"), 2)
        for _ in range(20):
            batches = iter(loader)
            next(batches)
            pid = os.fork()
            if pid == 0:
                assert len(list(loader)) == {(COUNT + 1) // 2}
                loader.close()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            assert len(list(batches)) == {(COUNT - 1) // 2}
    """)


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 4, 6])
def test_a_state_is_that_of_the_batch_last_given_out(ds: ShmDataset, taken: int, prefetch: int) -> None:
    def loader(world_size: int = 1, rank: int = 0) -> BatchLoader:
        return BatchLoader(ds, 4, sampler=DistributedSampler(ds, world_size, rank, seed=3), prefetch=prefetch)

    whole = [index for batch in samples_of(loader()) for index in batch]
    stopped = loader()
    batches = iter(stopped)
    head = [index for batch in samples_of(itertools.islice(batches, taken)) for index in batch]
    state = json.loads(json.dumps(stopped.state_dict()))
    assert state["consumed"] == len(head) == min(4 * taken, COUNT)
    batches.close()
    assert stopped.state_dict() == state, "a loop that was left keeps its place"
    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert head + [index for batch in samples_of(resumed) for index in batch] == whole
    assert resumed.state_dict()["consumed"] == COUNT
    rest = []
    for rank in range(2):
        elsewhere = loader(2, rank)
        elsewhere.load_state_dict(state)
        rest += [index for batch in samples_of(elsewhere) for index in batch]
    assert Counter(whole[len(head) :]) <= Counter(rest)
    assert len(rest) - len(whole[len(head) :]) in (0, 1)


def test_loading_a_state_ends_what_runs(ds: ShmDataset) -> None:
    loader = BatchLoader(ds, 4)
    state = loader.state_dict()
    batches = iter(loader)
    first = samples_of([next(batches)])
    middle = loader.state_dict()
    loader.load_state_dict(middle)
    assert next(batches, None) is None
    assert samples_of(itertools.islice(loader, 1)) == [[4, 5, 6, 7]]
    loader.load_state_dict(state)
    assert samples_of(itertools.islice(loader, 1)) == first


def test_after_an_epoch_the_state_follows_the_sampler(ds: ShmDataset) -> None:
    sampler = DistributedSampler(ds, 1, 0)
    loader = BatchLoader(ds, 4, sampler=sampler)
    list(loader)
    assert loader.state_dict()["consumed"] == COUNT
    sampler.set_epoch(1)
    assert loader.state_dict() == sampler.state_dict()
    assert loader.state_dict()["epoch"] == 1


def test_a_sampler_without_a_state_has_none(ds: ShmDataset) -> None:
    loader = BatchLoader(ds, 4, sampler=[1, 2, 3])
    list(loader)
    for ask in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(ConfigError, match="sampler list has no state: give a DistributedSampler"):
            ask()


def test_options_that_are_impossible_say_so(ds: ShmDataset) -> None:
    for name in ("batch_size", "prefetch"):
        for value in (0, -1, 2.0, None):
            with pytest.raises(ConfigError, match=f"{name} {value!r}: give a positive integer"):
                BatchLoader(ds, **{"batch_size": 2, name: value})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here memory can be pinned")
def test_pinning_without_an_accelerator_is_an_error(ds: ShmDataset) -> None:
    with pytest.raises(ConfigError, match=r"pin_memory: .* accelerator .* Leave it out"):
        BatchLoader(ds, 2, pin_memory=True)


def test_pinning_reaches_the_values(ds: ShmDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    batches = list(BatchLoader(ds.batched(length=3), 20, pin_memory=True))
    assert pinned[-2:] == [(20, 3), (3, 3)]
    assert samples_of(batches) == [list(range(20)), [20, 21, 22]]


def test_a_thousand_iterations_leave_nothing(ds: ShmDataset) -> None:
    loader = BatchLoader(ds, 2, prefetch=3)
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        batches = itertools.islice(loader, number % 13)
        assert samples_of(batches)[:1] in ([], [[0, 1]])
    del batches
    loader.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_dataset_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset list has no batched\(\): give a ShmDataset"):
        BatchLoader([1, 2, 3], 2)  # type: ignore[arg-type]


@pytest.mark.timeout(30)
def test_a_loop_that_waits_ends_when_a_signal_handler_closes_it(ds: ShmDataset) -> None:
    sampler = Recorded(range(COUNT))
    loader = BatchLoader(ds, 4, sampler=sampler)

    def preempted(*_: object) -> None:
        loader.close()
        sampler.may_go_on.set()

    before = signal.signal(signal.SIGUSR1, preempted)
    try:
        taken = 0
        for _ in loader:
            taken += 1
            if taken == 3:  # from here on the thread waits for the sampler, and the loop soon for the thread
                sampler.may_go_on.clear()
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert 3 <= taken < 6
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(30)
def test_a_forked_child_cannot_go_on_with_the_loop_of_its_parent(ds: ShmDataset) -> None:
    loader = BatchLoader(ds, 4)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except ConfigError as error:
            os._exit(0 if "before the process was forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(batches)) == 5
    loader.close()


def test_a_copy_begins_where_its_sampler_is(ds: ShmDataset) -> None:
    loader = BatchLoader(ds, 4)
    batches = iter(loader)
    next(batches)
    again = pickle.loads(pickle.dumps(loader))
    batches.close()
    assert samples_of(again) == samples_of(loader)
