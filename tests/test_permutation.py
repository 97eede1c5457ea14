"""`Permutation`: a bijection, the same for ever, and as random as a shuffle in all that training could notice.

The statistics compare counts with what chance gives. Their seeds are fixed, so they pass or fail for good; that they
can fail is shown by a network of two rounds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shmserve_client import permutation
from shmserve_client.permutation import Permutation

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 100, 255, 256, 257, 1000, 65_536, 99_991)


def whole(size: int, *seed: int) -> NDArray[np.int64]:
    return Permutation(size, *seed)(np.arange(size))


def deviation(counts: NDArray[np.int64]) -> float:
    """How far counts of equally likely events are from equal: chi-square, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    assert expected >= 5, "too few events for the test to mean anything"
    freedom = counts.size - 1
    return float((np.square(counts - expected).sum() / expected - freedom) / math.sqrt(2 * freedom))


def correlation(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """The correlation of two orders, in the standard deviations of independent ones."""
    return float(np.corrcoef(first, second)[0, 1] * math.sqrt(len(first)))


@pytest.mark.parametrize("size", SIZES)
def test_every_index_comes_exactly_once(size: int) -> None:
    for seed in range(5):
        assert np.array_equal(np.sort(whole(size, seed)), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 10**8, 2**62])
def test_one_position_is_as_many(size: int) -> None:
    order = Permutation(size, 3, 4)
    positions = np.unique(np.linspace(0, size - 1, 50, dtype=np.int64).clip(0, size - 1))
    indices = order(positions)
    assert [order(position) for position in positions.tolist()] == indices.tolist()
    assert indices.dtype == np.int64
    assert len(set(indices.tolist())) == len(positions)
    assert 0 <= indices.min() <= indices.max() < size


def test_positions_are_left_as_they_are() -> None:
    positions = np.arange(10)[::2]
    Permutation(10, 0)(positions)
    assert positions.tolist() == [0, 2, 4, 6, 8]


def test_nothing_has_no_order() -> None:
    assert Permutation(0, 0)(np.arange(0)).tolist() == []


def test_the_order_is_the_same_for_ever() -> None:
    """A change here breaks the resumption of every run that an earlier version has started."""
    assert whole(10, 0, 0).tolist() == [4, 3, 1, 8, 9, 7, 2, 6, 0, 5]
    assert Permutation(10**9, 1, 2)(np.arange(5)).tolist() == [410072214, 547603681, 85568433, 686251139, 949612580]


def test_any_integers_are_seeds_and_all_differ() -> None:
    seeds = [(), (0,), (0, 0), (1, 0), (0, 1), (-1,), (1,), (2**64,), (2**64 + 1,), (-(2**200),), (12, 3), (1, 23)]
    orders = {tuple(whole(50, *seed).tolist()) for seed in seeds}
    assert len(orders) == len(seeds)
    assert whole(50, np.int64(7)).tolist() == whole(50, 7).tolist()
    with pytest.raises(TypeError):
        Permutation(50, 1.5)  # type: ignore[arg-type]


def order_counts(size: int, seeds: int) -> NDArray[np.int64]:
    counts = dict.fromkeys(itertools.permutations(range(size)), 0)
    for seed in range(seeds):
        order = Permutation(size, seed)
        counts[tuple([order(position) for position in range(size)])] += 1
    return np.array(list(counts.values()))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_of_a_few_samples_all_orders_are_equally_likely(size: int) -> None:
    assert abs(deviation(order_counts(size, 20_000))) < 4


@pytest.mark.parametrize("size", [4, 5])
def test_that_two_rounds_are_too_few_for_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS_OF_FEW", 2)
    assert deviation(order_counts(size, 20_000)) > 100


@pytest.mark.parametrize("size", [6, 9, 13, 16, 20])
def test_each_index_is_as_likely_at_each_position(size: int) -> None:
    orders = np.array([whole(size, seed) for seed in range(3000)])
    counts = np.array([np.bincount(orders[:, position], minlength=size) for position in range(size)])
    # The counts of a position sum up, as those of an index do: (n - 1)^2 degrees of freedom, not n^2 - 1.
    freedom = (size - 1) ** 2
    chi_square = np.square(counts - 3000 / size).sum() / (3000 / size)
    assert abs(chi_square - freedom) / math.sqrt(2 * freedom) < 4


def neighbours(order: NDArray[np.int64], cells: int = 30) -> NDArray[np.int64]:
    """How often a value of bucket a is followed by one of bucket b, as counts[a, b]."""
    buckets = order * cells // len(order)
    return np.bincount(buckets[:-1] * cells + buckets[1:], minlength=cells * cells)


def steps(order: NDArray[np.int64], cells: int = 1000) -> NDArray[np.int64]:
    """How often the difference to the next value, modulo the size, falls into each bucket."""
    return np.bincount(np.diff(order) % len(order) * cells // len(order), minlength=cells)


@pytest.mark.parametrize("size", [300_000, 2**18, 250_007])
@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_have_nothing_to_do_with_each_other(size: int, seed: int) -> None:
    order = whole(size, seed)
    assert abs(deviation(neighbours(order))) < 4
    assert abs(deviation(steps(order))) < 4
    assert abs(correlation(order[:-1], order[1:])) < 4
    assert abs(correlation(order, np.arange(size))) < 4
    for block in np.array_split(order, 20):  # what a rank or a batch sees is spread over the dataset
        assert abs(deviation(np.bincount(block * 100 // size, minlength=100))) < 4.5


def test_that_two_rounds_are_too_few_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", 2)
    assert abs(deviation(steps(whole(300_000, 0)))) > 100


def test_epochs_and_seeds_have_nothing_to_do_with_each_other() -> None:
    size = 100_000
    for one, other in [((0, 0), (0, 1)), ((0, 1), (0, 2)), ((0, 0), (1, 0)), ((0, 1), (1, 0)), ((0,), (0, 0))]:
        first, second = whole(size, *one), whole(size, *other)
        assert abs(correlation(first, second)) < 4
        assert np.count_nonzero(first == second) < 8, "about one index keeps its place by chance"
        assert abs(deviation(np.bincount((first - second) % size * 100 // size, minlength=100))) < 4


def test_the_first_index_of_the_epochs_is_any() -> None:
    firsts = np.array([Permutation(10**6, 0, epoch)(0) for epoch in range(20_000)])
    assert abs(deviation(np.bincount(firsts * 100 // 10**6, minlength=100))) < 4
    assert abs(correlation(firsts[:-1], firsts[1:])) < 4


def test_positions_that_are_floats_are_refused() -> None:
    with pytest.raises(TypeError):
        Permutation(10, 0)(np.array([1.0, 2.0]))
