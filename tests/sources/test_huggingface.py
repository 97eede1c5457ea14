"""Directories of Hugging Face `datasets`: saved ones, those of several splits, caches, and what they leave out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from shmserve.sources import SourceOptions, resolve
from shmserve_client.errors import SourceFormatError, SourceNotFoundError

from .decoded import plain, table
from .reading import FIXTURES


def written(path: Path, array: Any, metadata: dict[str, str] | None = None) -> Path:
    schema = pa.schema([pa.field("x", array.type, metadata=metadata)])
    with pa.ipc.new_stream(path, schema) as writer:
        writer.write_batch(pa.record_batch([array], schema=schema))
    return path


def saved(directory: Path, **state: Any) -> Path:
    """Make what save_to_disk writes, of three rows in two files."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, values in zip(names, ([0, 1], [2]), strict=True):
        written(directory / name, pa.array(values))
    content = {"_data_files": [{"filename": name} for name in names], "_split": "train", **state}
    (directory / "state.json").write_text(json.dumps(content))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def cached(directory: Path, counts: dict[str, list[int]], **splits: Any) -> Path:
    """Make what load_dataset keeps of splits whose files have so many rows; `splits` is what is said of them."""
    directory.mkdir(parents=True, exist_ok=True)
    first = 0
    for split, lengths in counts.items():
        for shard, length in enumerate(lengths):
            numbered = f"-{shard:05d}-of-{len(lengths):05d}" if len(lengths) > 1 else ""
            written(directory / f"wiki-text-{split}{numbered}.arrow", pa.array(range(first, first + length)))
            first += length
    (directory / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    return directory


def test_shards_are_in_the_order_of_the_state(tmp_path: Path) -> None:
    directory = saved(tmp_path / "d")
    assert table(directory) == {"x": [0, 1, 2]}
    reverse = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (1, 0)]
    assert table(saved(directory, _data_files=reverse)) == {"x": [2, 0, 1]}


def test_files_that_the_state_does_not_name_are_left_alone(tmp_path: Path) -> None:
    directory = saved(tmp_path / "d")
    written(directory / "cache-0123456789abcdef.arrow", pa.array([9]))
    assert table(directory) == {"x": [0, 1, 2]}


def test_a_file_by_itself_is_an_arrow_stream(tmp_path: Path) -> None:
    path = saved(tmp_path / "d") / "data-00001-of-00002.arrow"
    assert resolve([str(path)], SourceOptions()).format == "arrow"
    assert table(path) == {"x": [2]}


def test_the_directorys_own_files_belong_to_the_dataset(tmp_path: Path) -> None:
    directory = saved(tmp_path / "d")
    for name in ("state.json", "dataset_info.json", "data-00001-of-00002.arrow"):
        resolved = resolve([str(directory)], SourceOptions())
        path = directory / name
        path.write_bytes(path.read_bytes() + b" ")
        assert resolved.changed()


def test_a_selection_may_have_other_rows_than_the_info_says(tmp_path: Path) -> None:
    directory = saved(tmp_path / "d")
    (directory / "dataset_info.json").write_text(json.dumps({"splits": {"train": {"num_examples": 1000}}}))
    assert table(directory) == {"x": [0, 1, 2]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "indices apart from its data.*save it again"),
        ({"_data_files": []}, "damaged"),
        ({"_data_files": None}, "damaged"),
        ({"_data_files": [{"filename": 1}]}, "damaged"),
        ({"_data_files": [{"filename": "../outside.arrow"}]}, "damaged"),
        ({"_data_files": ["data-00000-of-00002.arrow"]}, "damaged"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    written(tmp_path / "outside.arrow", pa.array([9]))
    with pytest.raises(SourceFormatError, match=message):
        resolve([str(saved(tmp_path / "d", **state))], SourceOptions())


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_what_is_no_json_is_refused(tmp_path: Path, name: str, text: str) -> None:
    directory = saved(tmp_path / "d")
    (directory / name).write_text(text, "latin-1")
    with pytest.raises(SourceFormatError, match=f"{name}: (not JSON|not a JSON object)"):
        resolve([str(directory)], SourceOptions())


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    directory = saved(tmp_path / "d")
    path = directory / "data-00001-of-00002.arrow"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceFormatError, match=r"data-00001-of-00002\.arrow: not an Arrow file"):
        resolve([str(directory)], SourceOptions())
    path.unlink()
    with pytest.raises(SourceNotFoundError, match=r"data-00001-of-00002\.arrow: no such file, which state\.json names"):
        resolve([str(directory)], SourceOptions())


def test_another_programs_state_is_none(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 1}')
    (tmp_path / "tokens.bin").write_bytes(bytes(8))
    assert resolve([str(tmp_path)], SourceOptions("uint16")).format == "raw"


def test_splits_are_listed_as_they_are_to_be_named(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FIXTURES / "written-hf-datasets/datasetdict", tmp_path / "a b"))
    with pytest.raises(SourceFormatError) as refusal:
        resolve([str(directory)], SourceOptions())
    assert str(refusal.value) == (
        f"{directory}: it holds the datasets train, test: say which, --data train='{directory}/train' "
        f"--data test='{directory}/test'"
    )
    assert table(directory / "train")


@pytest.mark.parametrize("splits", [None, "train", [], [1], {}])
def test_a_list_of_splits_that_is_none_is_refused(tmp_path: Path, splits: Any) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(SourceFormatError, match=r"dataset_dict\.json: damaged: it lists no splits"):
        resolve([str(tmp_path)], SourceOptions())


def test_a_cache_of_one_split(tmp_path: Path) -> None:
    directory = cached(tmp_path / "c", {"train": [3]}, train={"num_examples": 3})
    written(directory / "cache-0123456789abcdef.arrow", pa.array([9]))
    assert resolve([str(directory)], SourceOptions()).format == "huggingface"
    assert table(directory) == {"x": [0, 1, 2]}
    assert table(directory / "dataset_info.json") == {"x": [0, 1, 2]}


def test_a_cache_of_several_files(tmp_path: Path) -> None:
    directory = cached(tmp_path / "c", {"train": [2, 0, 3]}, train={"num_examples": 5, "shard_lengths": [2, 0, 3]})
    assert table(directory) == {"x": [0, 1, 2, 3, 4]}
    (directory / "wiki-text-train-00001-of-00003.arrow").unlink()
    with pytest.raises(SourceNotFoundError, match=r"wiki-text-train-00001-of-00003\.arrow: no such file"):
        resolve([str(directory)], SourceOptions())


def test_a_cache_of_several_splits(tmp_path: Path) -> None:
    directory = cached(tmp_path / "c", {"train": [2, 2], "train.v2": [1]})
    with pytest.raises(SourceFormatError) as refusal:
        resolve([str(directory)], SourceOptions())
    assert str(refusal.value) == (
        f"{directory}: it holds the splits train, train.v2: say which, "
        f"--data train='{directory}/wiki-text-train-*-of-00002.arrow' "
        f"--data train.v2={directory}/wiki-text-train.v2.arrow"
    )
    assert table(f"{directory}/wiki-text-train-*-of-00002.arrow") == {"x": [0, 1, 2, 3]}
    assert table(directory / "wiki-text-train.v2.arrow") == {"x": [4]}


@pytest.mark.parametrize(
    ("counts", "said"),
    [([3], {"num_examples": 4}), ([2, 3], {"num_examples": 5, "shard_lengths": [3, 2]})],
    ids=["one file", "two files"],
)
def test_a_cache_that_is_incomplete_is_refused(tmp_path: Path, counts: list[int], said: dict[str, Any]) -> None:
    directory = cached(tmp_path / "c", {"train": counts}, train=said)
    with pytest.raises(SourceFormatError, match=r"\.arrow: \d rows, but dataset_info\.json says \d: it is incomplete"):
        table(directory)


@pytest.mark.parametrize("said", [None, {}, {"num_examples": None}, {"num_examples": "3"}, {"shard_lengths": [1, 2]}])
def test_what_the_info_does_not_tell_is_not_checked(tmp_path: Path, said: Any) -> None:
    assert table(cached(tmp_path / "c", {"train": [3]}, train=said)) == {"x": [0, 1, 2]}


def test_an_info_without_arrow_files_is_another_formats(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "part.csv").write_text("a\n1\n")
    assert resolve([str(tmp_path)], SourceOptions()).format == "csv"


def declared(shape: list[Any]) -> dict[str, str]:
    name = f"datasets.features.features.Array{len(shape)}DExtensionType"
    return {"ARROW:extension:name": name, "ARROW:extension:metadata": json.dumps([shape, "int32"])}


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ([2, 2], np.arange(12).reshape(3, 2, 2).tolist()),
        ([1, 2, 3], np.arange(12).reshape(2, 1, 2, 3).tolist()),
        ([None, 2], [[[1, 2]], [], [[3, 4], [5, 6]]]),
    ],
    ids=str,
)
def test_arrays_have_the_shape_that_is_declared(tmp_path: Path, shape: list[Any], values: list[Any]) -> None:
    kind = pa.int32()
    for _ in shape:
        kind = pa.list_(kind)
    path = written(tmp_path / "x.arrow", pa.array(values, kind), declared(shape))
    (corpus,) = {source.values for source in resolve([str(path)], SourceOptions()).shards}
    assert table(corpus) == {"x": values}
    (shard,) = resolve([str(path)], SourceOptions()).shards
    (chunk,) = (chunks["x"] for part in shard.parts() for chunks in shard.decode(part, None))
    assert chunk.kind == "tensor"
    assert chunk.values.dtype == np.int32
    assert (chunk.lengths is None) == (None not in shape)


def test_arrays_of_another_shape_than_declared_are_what_they_are(tmp_path: Path) -> None:
    values = [[[1], [2, 3]], [[4, 5], [6]]]  # as many numbers as two of the declared shape would have
    path = written(tmp_path / "x.arrow", pa.array(values), declared([2, 2]))
    assert plain(table(path)["x"]) == values


def test_lists_of_one_length_stay_ragged_where_nothing_declares_it(tmp_path: Path) -> None:
    path = written(tmp_path / "x.arrow", pa.array([[1, 2], [3, 4]]))
    (shard,) = resolve([str(path)], SourceOptions()).shards
    (chunk,) = (chunks["x"] for part in shard.parts() for chunks in shard.decode(part, None))
    assert chunk.lengths.tolist() == [2, 2]


def test_images_keep_bytes_and_path(tmp_path: Path) -> None:
    images = [{"bytes": b"\x89PNG", "path": "a.png"}, {"bytes": None, "path": "b.png"}, None]
    path = written(tmp_path / "x.arrow", pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    assert table(path) == {"x": images}
