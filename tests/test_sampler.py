"""`DistributedSampler`: torch's shares, in constant memory, and resumed exactly."""

from __future__ import annotations

import itertools
import json
import pickle
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shmserve_client import ConfigError, DistributedSampler
from tests.processes import run_python

LENGTHS = (0, 1, 2, 3, 5, 8, 13, 24)
WORLDS = (1, 2, 3, 4, 7, 16)


def shares(length: int, world_size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(length), world_size, rank, **options) for rank in range(world_size)]


def dealt(samplers: list[DistributedSampler]) -> list[int]:
    """What all ranks yield, in the order of the epoch."""
    return list(itertools.chain.from_iterable(zip(*samplers, strict=True)))


def advanced(samplers: list[DistributedSampler], turns: int) -> list[int]:
    """What all ranks yield in their next iteration's first `turns` turns; they stop there."""
    iterators = [iter(sampler) for sampler in samplers]
    return [next(iterator) for _ in range(turns) for iterator in iterators]


def resumed(state: dict[str, Any], world_size: int, **options: Any) -> list[DistributedSampler]:
    samplers = shares(state["dataset_length"], world_size, **options)
    for sampler in samplers:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_shares_are_those_of_torch(length: int, world_size: int, drop_last: bool) -> None:
    for sampler in shares(length, world_size, shuffle=False, drop_last=drop_last):
        theirs = torch.utils.data.DistributedSampler(
            range(length),  # type: ignore[arg-type]
            world_size,
            sampler.rank,
            shuffle=False,
            drop_last=drop_last,
        )
        assert isinstance(sampler, torch.utils.data.DistributedSampler)
        assert list(sampler) == list(theirs)
        assert len(sampler) == len(theirs) == sampler.num_samples == theirs.num_samples
        assert sampler.total_size == theirs.total_size


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_shuffled_shares_are_the_same_positions_of_one_order(length: int, world_size: int, drop_last: bool) -> None:
    (order,) = map(list, shares(length, 1, seed=3))
    assert sorted(order) == list(range(length))
    in_order = dealt(shares(length, world_size, shuffle=False, drop_last=drop_last))
    shuffled = dealt(shares(length, world_size, seed=3, drop_last=drop_last))
    assert shuffled == [order[position] for position in in_order]


@pytest.mark.promise("F31")
def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = DistributedSampler(range(1000), 1, 0, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first != second
    assert list(DistributedSampler(range(1000), 1, 0, seed=2)) not in (first, second)
    assert sorted(first) == sorted(second) == list(range(1000))


def test_chunks_join_without_a_seam() -> None:
    (order,) = map(list, shares(50_001, 1))
    assert sorted(order) == list(range(50_001))
    assert dealt(shares(50_001, 2)) == [*order, order[0]]


@pytest.mark.promise("F31")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@settings(deadline=None)  # the machine may be busy
@given(length=st.integers(0, 60), world_size=st.integers(1, 9), data=st.data())
def test_a_resumed_epoch_is_the_rest_of_it(
    shuffle: bool, drop_last: bool, length: int, world_size: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
    samplers = shares(length, world_size, **options)
    for sampler in samplers:
        sampler.set_epoch(4)
    turns = data.draw(st.integers(0, len(samplers[0])))
    before = advanced(samplers, turns)
    (state,) = {json.dumps(sampler.state_dict()) for sampler in samplers}

    rest = resumed(json.loads(state), world_size, **options)

    uninterrupted = shares(length, world_size, **options)
    for sampler in uninterrupted:
        sampler.set_epoch(4)
    expected = dealt(uninterrupted)
    assert sum(map(len, rest)) == len(expected) - len(before)
    assert before + dealt(rest) == expected


@settings(deadline=None)
@given(
    length=st.integers(1, 200),
    stops=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=4),
    last=st.integers(1, 9),
)
def test_an_epoch_stopped_again_and_again_has_each_sample_once(
    length: int, stops: list[tuple[int, int]], last: int
) -> None:
    state = DistributedSampler(range(length), 1, 0).state_dict()
    seen: list[int] = []
    for world_size, turns in stops:
        samplers = resumed(state, world_size)
        seen += advanced(samplers, min(turns, len(samplers[0])))
        state = samplers[0].state_dict()
    end = resumed(state, last)
    seen += dealt(end)

    order = list(DistributedSampler(range(length), 1, 0))
    assert seen[:length] == order
    assert len(seen) - length < max(last, *(world_size for world_size, _ in stops)), "padding, at the very end only"
    assert end[0].state_dict()["consumed"] == length


@pytest.mark.promise("F31")
def test_three_stops_in_one_epoch() -> None:
    state = DistributedSampler(range(1000), 4, 0, seed=7).state_dict()
    seen: list[int] = []
    for world_size, turns in [(4, 60), (2, 100), (8, 33)]:
        samplers = resumed(state, world_size)
        seen += advanced(samplers, turns)
        state = samplers[-1].state_dict()
    seen += dealt(resumed(state, 1))
    assert Counter(seen) == Counter(range(1000))


def test_a_loaded_position_is_used_once() -> None:
    sampler = DistributedSampler(range(100), 2, 0)
    whole = list(sampler)
    (resumed_sampler,) = resumed({**sampler.state_dict(), "consumed": 40}, 1)[:1]
    assert len(resumed_sampler) == 60
    iterator = iter(resumed_sampler)
    assert resumed_sampler.state_dict()["consumed"] == 40
    assert len(list(iterator)) == 60
    with pytest.warns(UserWarning, match="epoch 0 is over, and the same order follows: call set_epoch"):
        assert list(resumed_sampler)[::2] == whole


def test_iterators_keep_the_place_where_they_were_made() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    whole = list(DistributedSampler(range(10), 1, 0))
    first = iter(sampler)
    sampler.load_state_dict({**sampler.state_dict(), "consumed": 7})
    second = iter(sampler)
    sampler.set_epoch(1)
    assert list(first) == whole
    assert list(second) == whole[7:]


def test_a_finished_epoch_has_nothing_left_and_the_next_is_whole() -> None:
    sampler = DistributedSampler(range(10), 3, 0, drop_last=True)
    list(sampler)
    for world_size in (1, 3, 5):  # also where the tail left out would be enough for all ranks
        again = resumed(sampler.state_dict(), world_size, drop_last=True)[0]
        again.set_epoch(0)
        assert len(again) == 0
        assert list(again) == []
        again.set_epoch(1)
        assert len(list(again)) == len(again) == 10 // world_size


def test_the_same_epoch_keeps_the_position_and_another_forgets_it() -> None:
    state = {**DistributedSampler(range(10), 1, 0).state_dict(), "epoch": 2, "consumed": 4}
    sampler = resumed(state, 1)[0]
    assert sampler.epoch == 2
    sampler.set_epoch(2)
    assert (len(sampler), sampler.state_dict()) == (6, state)
    sampler.set_epoch(3)
    assert (len(sampler), sampler.state_dict()["consumed"]) == (10, 0)
    sampler.load_state_dict(state)  # in the middle of an epoch: back to it
    assert (sampler.epoch, len(sampler)) == (2, 6)
    sampler.set_epoch(3)
    sampler.load_state_dict({**state, "consumed": 10})  # at its end: the later epoch stays
    assert (sampler.epoch, len(sampler)) == (3, 10)


def test_the_state_brings_seed_and_shuffle() -> None:
    state = DistributedSampler(range(10), 1, 0, seed=5).state_dict()
    sampler = DistributedSampler(range(10), 1, 0, shuffle=False)
    sampler.load_state_dict(state)
    assert list(sampler) == list(DistributedSampler(range(10), 1, 0, seed=5))


def test_other_states_are_refused() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    state = sampler.state_dict()
    missing = {name: value for name, value in state.items() if name != "seed"}
    for wrong in (None, {}, missing, {**state, "more": 1}, {**state, "consumed": 1.0}, {**state, "epoch": True}):
        with pytest.raises(ConfigError, match="does not have epoch, consumed, seed, shuffle, dataset_length"):
            sampler.load_state_dict(wrong)
    with pytest.raises(ConfigError, match="of a dataset of 11 samples, this one has 10"):
        sampler.load_state_dict({**state, "dataset_length": 11})
    for consumed in (-1, 11):
        with pytest.raises(ConfigError, match=f"has consumed {consumed} of 10"):
            sampler.load_state_dict({**state, "consumed": consumed})
    assert sampler.state_dict() == state


def test_the_world_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    sampler = DistributedSampler(range(10))
    assert (sampler.num_replicas, sampler.rank) == (4, 3)
    assert DistributedSampler(range(10), rank=1).num_replicas == 4
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ConfigError, match=r"\$RANK is 'x'"):
        DistributedSampler(range(10))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match=r"not initialised, and \$WORLD_SIZE is ''.*torchrun, or give num_replicas"):
        DistributedSampler(range(10))


def test_the_world_comes_from_torch_distributed() -> None:
    run_python(
        """
        import torch.distributed as dist
        from shmserve_client import DistributedSampler
        dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
        sampler = DistributedSampler(range(10))
        assert (sampler.num_replicas, sampler.rank) == (1, 0)
        dist.destroy_process_group()
        """,
        env={"WORLD_SIZE": "4", "RANK": "3"},
    )


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid rank 2"):
        DistributedSampler(range(10), 2, 2)


@pytest.mark.promise("F31")
def test_memory_does_not_grow_with_the_dataset() -> None:
    sampler = DistributedSampler(range(10**9), 8, 3)
    assert len(pickle.dumps(sampler)) < 1024
    tracemalloc.start()
    try:
        drawn = set(itertools.islice(sampler, 100_000))
        del drawn
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in itertools.islice(sampler, 100_000):
            pass
        assert tracemalloc.get_traced_memory()[1] - before < 3 << 20
    finally:
        tracemalloc.stop()


def test_pickles_go_on_alike() -> None:
    sampler = resumed({**DistributedSampler(range(100), 1, 0).state_dict(), "consumed": 30}, 2)[1]
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_data_loader(workers: int) -> None:
    sampler = DistributedSampler(range(100), 2, 1)
    loader = DataLoader(range(100), batch_size=8, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(loader) == 7
        assert torch.cat(list(loader)).tolist() == list(shares_of_epoch(epoch))


def shares_of_epoch(epoch: int) -> list[int]:
    sampler = DistributedSampler(range(100), 2, 1)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 3, 7])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata calls
def test_in_a_stateful_data_loader(workers: int, batches: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        sampler = DistributedSampler(range(100), 2, 1)
        return stateful.StatefulDataLoader(range(100), batch_size=8, sampler=sampler, num_workers=workers)

    loader = make()
    loader.sampler.set_epoch(5)
    iterator = iter(loader)
    before = [next(iterator) for _ in range(batches)]
    if batches == len(loader):
        assert next(iterator, None) is None
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del iterator

    again = make()
    again.load_state_dict(state)
    finished = batches == 7
    again.sampler.set_epoch(6 if finished else 5)  # as a training loop does, before it iterates
    after = list(again)
    expected = shares_of_epoch(5)
    if finished:
        assert torch.cat(before).tolist() == expected
        assert torch.cat(after).tolist() == shares_of_epoch(6)
    else:
        assert torch.cat(before + after).tolist() == expected
    again.sampler.set_epoch(7)
    assert torch.cat(list(again)).tolist() == shares_of_epoch(7)


def test_a_loop_that_begins_before_the_loaded_epoch_is_told_so() -> None:
    stopped = DistributedSampler(range(100), 1, 0)
    stopped.set_epoch(3)
    indices = iter(stopped)
    assert len([next(indices) for _ in range(10)]) == 10
    resumed = DistributedSampler(range(100), 1, 0)
    resumed.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match=r"epoch 3, and epoch 0 starts anew: .* begin at sampler\.epoch"):
        resumed.set_epoch(0)
    assert len(list(resumed)) == 100


@pytest.mark.parametrize("numbers", [{"rank": 1.0}, {"num_replicas": 2.0}, {"seed": None}, {"rank": "1"}])
def test_numbers_that_are_no_integers_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=": give integers"):
        DistributedSampler(range(1000), **{"num_replicas": 2, "rank": 1, **numbers})
