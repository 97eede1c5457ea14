"""`ShmDataset.split`: disjoint parts that are indexed like the dataset, and computed rather than stored."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, random_split

from shmserve_client import ConfigError, DistributedSampler, SampleIndexError, SampleTypeError, ShmDataset
from tests.datasets import served_columns
from tests.processes import run_python

COUNT = 101


@pytest.fixture
def ds(shm_dir: Path, runtime_dir: Path) -> Iterator[ShmDataset]:
    """Sample i is the number i, i % 5 times."""
    samples = [np.full(i % 5, i, np.int32) for i in range(COUNT)]
    socket = runtime_dir / "fake.sock"
    with (
        served_columns({"tokens": samples, "label": np.arange(COUNT)}, shm_dir=shm_dir, socket=socket),
        ShmDataset(endpoint=f"ipc://{socket}") as dataset,
    ):
        yield dataset


def labels(samples: Any) -> list[int]:
    return [sample["label"].item() for sample in samples]


def test_parts_are_disjoint_and_together_are_everything(ds: ShmDataset) -> None:
    parts = ds.split([0.7, 0.2, 0.1])
    assert list(map(len, parts)) == [71, 20, 10]
    found = [labels(part) for part in parts]
    assert sorted(itertools.chain(*found)) == list(range(COUNT))
    assert found[0] != sorted(found[0]), "they are chosen at random"
    assert repr(parts[2]) == f"DatasetSplit({ds!r}, 10 samples)"


def test_a_part_is_indexed_like_a_dataset(ds: ShmDataset) -> None:
    (_, part) = ds.split([81, 20], seed=3)
    expected = labels(part)
    assert [part[i]["label"].item() for i in range(20)] == expected
    for chosen in ([3, -1, 3], np.array([3, -1, 3]), torch.tensor([3, -1, 3])):
        assert labels(part.__getitems__(chosen)) == [expected[3], expected[-1], expected[3]]
    assert part[np.int64(2)]["label"] == part[torch.tensor(2)]["label"] == part[-18]["label"] == expected[2]
    assert labels(part[15:2:-4]) == expected[15:2:-4]
    assert part[4]["tokens"].tolist() == [expected[4]] * (expected[4] % 5)
    with pytest.raises(SampleIndexError, match="index 20 is out of range: there are 20 samples in this split"):
        part[20]
    with pytest.raises(IndexError):
        part.__getitems__([0, -21])
    with pytest.raises(SampleTypeError):
        part[1.0]


def test_batches_are_those_of_the_dataset(ds: ShmDataset) -> None:
    (part, _) = ds.split([20, 81])
    in_dataset = labels(part)
    wanted = [5, -1, 5, 0]
    batch = part.batch(wanted, length=3, pad=-1)
    expected = ds.batch([in_dataset[i] for i in wanted], length=3, pad=-1)
    for name in ("tokens", "label"):
        assert torch.equal(batch[name].values, expected[name].values)
        assert torch.equal(batch[name].lengths, expected[name].lengths)
    view = part.batched(length=3)
    found = [batch["label"].values for batch in DataLoader(view, batch_size=7, collate_fn=view.collate_fn)]
    assert torch.cat(found).tolist() == in_dataset


def test_seeds_have_parts_of_their_own_which_stay(ds: ShmDataset) -> None:
    first, again, other = (labels(ds.split([30, 71], seed=seed)[0]) for seed in (0, 0, 1))
    assert first == again
    assert sorted(first) != sorted(other)
    assert first[:8] == [17, 74, 37, 2, 29, 96, 4, 24], "a change here mixes the validation into the training data"


@pytest.mark.parametrize(
    "lengths",
    [[0.9, 0.1], [0.5, 0.25, 0.25], [1 / 3] * 3, [0.29, 0.71], [1.0], [1], [1 / 128] * 128, [50, 51], [0, 101], [101]],
)
@pytest.mark.filterwarnings("ignore:Length of split at index")
def test_lengths_are_taken_as_by_random_split(ds: ShmDataset, lengths: list[float]) -> None:
    assert list(map(len, ds.split(lengths))) == list(map(len, random_split(ds, lengths)))


@pytest.mark.parametrize(
    "lengths", [[], [0.5, 0.4], [50, 50], [102, -1], [1.5, -0.5], [50.0, 51.0], ["a"], 0.9, None, [float("nan")]]
)
def test_other_lengths_are_refused(ds: ShmDataset, lengths: Any) -> None:
    with pytest.raises(ConfigError, match="give fractions that sum to 1, or counts that sum to 101"):
        ds.split(lengths)


def test_fractions_may_be_float32(ds: ShmDataset) -> None:
    for fractions in ([0.9, 0.1], [0.7, 0.2, 0.1]):
        assert [*map(len, ds.split(torch.tensor(fractions)))] == [*map(len, ds.split(fractions))]  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[1.5, -0.5], [2, -1], [1, -1]])
def test_negative_lengths_of_nothing_are_refused(shm_dir: Path, runtime_dir: Path, lengths: Any) -> None:
    socket = runtime_dir / "fake.sock"
    with (
        served_columns({"label": np.arange(0)}, shm_dir=shm_dir, socket=socket),
        ShmDataset(endpoint=f"ipc://{socket}") as empty,
        pytest.raises(ConfigError, match="counts that sum to 0"),
    ):
        empty.split(lengths)


def test_a_part_travels_as_a_specification(ds: ShmDataset, tmp_path: Path) -> None:
    (_, part) = ds.split([0.9, 0.1])
    pickled = pickle.dumps(part)
    assert len(pickled) < 4096
    path = tmp_path / "part.pickle"
    path.write_bytes(pickled)
    run_python(
        """
        import pathlib, pickle, sys
        part = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
        assert [sample["label"].item() for sample in part] == eval(sys.argv[2])
        """,
        path,
        labels(part),
    )


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_draw_from_a_part(ds: ShmDataset, context: str) -> None:
    (part, _) = ds.split([40, 61])
    loader = DataLoader(
        part,
        batch_size=8,
        sampler=DistributedSampler(part, 2, 1),
        num_workers=2,
        multiprocessing_context=context,
        collate_fn=labels,
    )
    in_order = labels(part)
    assert list(itertools.chain(*loader)) == [in_order[i] for i in DistributedSampler(part, 2, 1)]
