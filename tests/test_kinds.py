"""Columns of text, bytes and objects as training reads them: samples, batches, workers, lookups; and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shmserve_client import ShmDataset
from shmserve_client.errors import BlockSizeError, ConfigError, SegmentFormatError
from shmserve_client.layout import Array, Column, Description, SourceRecord
from shmserve_client.samples import open_samples
from shmserve_client.segment import Segment
from shmserve_client.tensors import value_maker
from shmserve_client.writer import Values
from tests.processes import Daemon
from tests.segments import published, write_pieces

Serve = Callable[..., Daemon]

ROWS: list[dict[str, Any]] = [
    {
        "text": f"é{number}" * (number % 3),
        "ids": list(range(number % 4)),
        "x": number / 2,
        "meta": {"n": [number, None]},
    }
    for number in range(50)
]


@pytest.fixture
def table(tmp_path: Path, serve: Serve) -> Daemon:
    """A daemon that serves ROWS as `rows`, in two shards."""
    for number, part in enumerate((ROWS[:30], ROWS[30:])):
        (tmp_path / f"rows_{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return serve("--data", f"rows={tmp_path}")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


@pytest.mark.parametrize("lookup", ["shared", "daemon"])
def test_a_row_is_a_dict_of_its_columns(table: Daemon, lookup: Any) -> None:
    with ShmDataset("rows", lookup=lookup) as dataset:
        assert [plain(row) for row in dataset] == ROWS
        assert plain(dataset[-1]) == ROWS[-1]
        assert [plain(row) for row in dataset.__getitems__([3, 1, 1])] == [ROWS[3], ROWS[1], ROWS[1]]
        assert dataset.info.dtypes == {"text": "text", "ids": "int64", "x": "float64", "meta": "object"}


@pytest.mark.parametrize("name", ["text", "meta"])
def test_one_column_gives_its_values(table: Daemon, name: str) -> None:
    dataset = ShmDataset("rows", columns=[name], transform=lambda value: (value, 1))
    assert [dataset[index][0] for index in range(50)] == [row[name] for row in ROWS]
    offsets, nbytes = dataset.lookup([0, 1, 2])
    assert (offsets[1:] == offsets[:-1] + nbytes[:-1]).all()
    assert bytes(dataset.column(name)[2]) == (
        ROWS[2]["text"].encode() if name == "text" else msgpack.packb(ROWS[2]["meta"])
    )


def test_objects_are_new_each_time(table: Daemon) -> None:
    dataset = ShmDataset("rows", columns="meta")
    dataset[3]["n"].append("changed")
    assert dataset[3] == ROWS[3]["meta"]


@pytest.mark.parametrize("lookup", ["shared", "daemon"])
def test_a_batch_has_lists_beside_tensors(table: Daemon, lookup: Any) -> None:
    dataset = ShmDataset("rows", lookup=lookup)
    batch = dataset.batch([1, 2, 3], pad=-1)
    assert batch["text"] == [row["text"] for row in ROWS[1:4]]
    assert batch["meta"] == [row["meta"] for row in ROWS[1:4]]
    assert batch["ids"].values.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert batch["x"].values.tolist() == [0.5, 1.0, 1.5]
    assert ShmDataset("rows", columns="text").batch([2]) == [ROWS[2]["text"]]
    out = {"ids": torch.empty((3, 3), dtype=torch.int64), "x": torch.empty(3, dtype=torch.float64)}
    assert dataset.batch([1, 2, 3], out=out)["text"] == batch["text"]
    with pytest.raises(ConfigError, match="a tensor for each of the columns ids, x"):
        dataset.batch([1], out={"text": None})


def test_workers_read_it(table: Daemon) -> None:
    dataset = ShmDataset("rows")
    loader = DataLoader(dataset, batch_size=10, num_workers=2, collate_fn=list, multiprocessing_context="spawn")
    assert [plain(row) for batch in loader for row in batch] == ROWS
    view = dataset.batched()
    batched = DataLoader(view, batch_size=25, num_workers=1, collate_fn=view.collate_fn, multiprocessing_context="fork")
    assert [text for batch in batched for text in batch["text"]] == [row["text"] for row in ROWS]


def test_windows_are_over_tensors(table: Daemon) -> None:
    assert ShmDataset("rows", columns="ids", block_size=6)[0].tolist() == [0, 0, 1, 0, 1, 2]
    with pytest.raises(BlockSizeError, match="column 'text' is of the kind text, not tokens"):
        ShmDataset("rows", columns="text", block_size=2)


def test_it_is_read_without_a_daemon_having_been_started(tmp_path: Path, stop_embedded: None) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    dataset = ShmDataset.from_path(tmp_path / "rows.jsonl")
    assert [plain(row) for row in dataset] == ROWS


def write_column(shm_dir: Path, kind: str, samples: list[bytes]) -> Any:
    """A segment with a column of that kind, and these bytes for samples."""
    values = np.frombuffer(b"".join(samples), np.uint8)
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    column = Column("c", Array("uint8", values.shape), Array("int64", offsets.shape), kind=kind)
    description = Description("d", "f", len(samples), (column,), SourceRecord("k", "f", (), 1))
    return write_pieces(shm_dir, description, [[Values(values)], [Values(offsets)]])


DAMAGED = [
    ("text", b"\xff", "not UTF-8"),
    ("object", b"\xc1", "damaged"),
    ("object", b"", "damaged"),
    ("object", b"\x01\x02", "damaged"),
    ("object", b"\xc7\x01\x07x", "damaged"),
]


@pytest.mark.parametrize(("kind", "sample", "message"), DAMAGED)
def test_damage_is_an_error_of_its_sample_alone(shm_dir: Path, kind: str, sample: bytes, message: str) -> None:
    good = msgpack.packb("good") if kind == "object" else b"good"
    with published(write_column(shm_dir, kind, [good, sample, good])) as owned:
        segment = Segment.attach(owned.path, owned.header.nonce)
        samples = open_samples(segment.description, segment.array)
        make = value_maker(samples.column, None, private=False)
        assert make(samples[0], 0) == make(samples[2], 2) == "good"
        with pytest.raises(SegmentFormatError, match=rf"sample 1 of column 'c'.*{message}"):
            make(samples[1], 1)


@pytest.mark.parametrize(
    "column",
    [
        Column("c", Array("int32", (8,)), Array("int64", (3,)), kind="text"),
        Column("c", Array("uint8", (2, 4)), kind="bytes"),
        Column("c", Array("uint8", (8,)), Array("int64", (3,)), Array("int64", (2,)), Array("int64", (3,)), "object"),
    ],
)
def test_other_kinds_are_ragged_bytes(shm_dir: Path, column: Column) -> None:
    description = Description("d", "f", 2, (column,), SourceRecord("k", "f", (), 1))
    pieces = [[Values(np.zeros(array.shape, array.dtype))] for array in description.all_arrays()]
    with pytest.raises(SegmentFormatError, match="column 'c' contradicts the 2 samples"):
        write_pieces(shm_dir, description, pieces)
    assert list(shm_dir.iterdir()) == []
