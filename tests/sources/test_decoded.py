"""Every format whose rows are decoded: what the projects' own libraries wrote, through real helpers and daemons."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.sources import SourceOptions, resolve
from shmserve_client.errors import ConfigError, SourceFormatError, SourceNotFoundError
from tests.processes import run_cli

from .decoded import DecodedCase, DecodedContract, table
from .reading import FIXTURES

MISC = json.loads((FIXTURES / "written-misc/expected.json").read_text())["expected"]
HF = json.loads((FIXTURES / "written-hf-datasets/expected.json").read_text())
MDS = json.loads((FIXTURES / "written-mosaicml-streaming/expected.json").read_text())["datasets"]
LITDATA = json.loads((FIXTURES / "written-litdata/expected.json").read_text())["datasets"]


def by_column(rows: list[dict[str, Any]], *names: str) -> dict[str, list[Any]]:
    """Return rows as columns: those named, or all in the order of the first row."""
    return {name: [row[name] for row in rows] for name in names or rows[0]}


def params(**cases: DecodedCase) -> Any:
    return [pytest.param(case, id=name) for name, case in cases.items()]


def _misc(name: str, columns: dict[str, list[Any]], **more: Any) -> DecodedCase:
    return DecodedCase(f"written-misc/{name}", columns, **more)


class TestNpz(DecodedContract):
    format = "npz"

    @pytest.fixture(params=["stored.npz", "deflated.npz"])
    def case(self, request):
        stays = tuple(MISC[request.param]) if request.param == "stored.npz" else ()
        return _misc(request.param, MISC[request.param], dtypes={"tokens": "uint16"}, stays=stays)


class TestSafetensors(DecodedContract):
    format = "safetensors"

    @pytest.fixture(
        params=params(
            fixed=_misc(
                "fixed.safetensors",
                {name: MISC["fixed.safetensors"][name] for name in ("labels", "tokens")},
                dtypes={"tokens": "uint16"},
                stays=("labels", "tokens"),
            ),
            ragged=_misc(
                "values_offsets.safetensors", {"values": MISC["values_offsets.safetensors"]}, stays=("values",)
            ),
            bfloat16=_misc("bf16.safetensors", {"x": MISC["bf16.safetensors"]}, dtypes={"x": "float32"}),
        )
    )  # fmt: skip
    def case(self, request):
        return request.param


class TestHdf5(DecodedContract):
    format = "hdf5"

    @pytest.fixture
    def case(self, tmp_path):
        h5py = pytest.importorskip("h5py")
        del h5py
        return _misc("data.h5", {}, stays=("tokens",))

    @pytest.fixture
    def shard(self, case, tmp_path):
        """The fixture's datasets differ in length: those of one length, in a file of their own."""
        h5py = pytest.importorskip("h5py")
        path = tmp_path / "data" / "rows.h5"
        path.parent.mkdir()
        with h5py.File(FIXTURES / case.path) as source, h5py.File(path, "w") as target:
            for name in ("tokens", "tokens_gzip"):
                source.copy(name, target)
        case.columns.update({name: MISC["data.h5"][name] for name in ("tokens", "tokens_gzip")})
        return path


@pytest.mark.parametrize("columns", [("ragged",), ("text",), ("tokens", "tokens_gzip")])
def test_hdf5_datasets_of_one_length_are_chosen(columns):
    pytest.importorskip("h5py")
    found = table(FIXTURES / "written-misc/data.h5", columns=columns)
    assert found == {name: MISC["data.h5"][name] for name in columns}
    with pytest.raises(SourceFormatError, match=r"differ in length \(ragged has 4, .*choose some by --columns"):
        table(FIXTURES / "written-misc/data.h5")


class TestLmdb(DecodedContract):
    format = "lmdb"

    @pytest.fixture(params=["lmdb", "lmdb/data.mdb"])
    def case(self, request):
        pytest.importorskip("lmdb")
        values = [b"".join(number.to_bytes(4, "little") for number in row) for row in MISC["lmdb"].values()]
        return _misc(request.param, {"key": list(MISC["lmdb"]), "value": values})


class TestParquet(DecodedContract):
    format = "parquet"

    @pytest.fixture(params=["t_plain.parquet", "t_snappy_2rg.parquet"])
    def case(self, request):
        pytest.importorskip("pyarrow")
        return _misc(request.param, by_column(MISC[request.param]), dtypes={"ids": "int32"})


class TestJsonl(DecodedContract):
    format = "jsonl"

    @pytest.fixture
    def case(self):
        return _misc("t.jsonl", by_column(MISC["t.jsonl"]), truncation_is_seen=False, is_named=True)


class TestText(DecodedContract):
    format = "text"

    @pytest.fixture
    def case(self):
        (lines,) = MISC["t.txt"].values()
        return _misc("t.txt", {"text": lines}, truncation_is_seen=False, is_named=True)


class TestCsv(DecodedContract):
    format = "csv"

    @pytest.fixture
    def case(self):
        pytest.importorskip("pyarrow")
        rows = [{"text": text, "label": int(label)} for text, label in MISC["t.csv"]]
        return _misc("t.csv", by_column(rows), truncation_is_seen=False, is_named=True)


class TestWebdataset(DecodedContract):
    format = "webdataset"

    @pytest.fixture
    def case(self):
        rows = MISC["samples-000000.tar"]
        columns = by_column(rows, "__key__", "cls", "json", "npy", "txt")
        return _misc("samples-000000.tar", columns, cut_nbytes=8192)


class TestTfRecord(DecodedContract):
    format = "tfrecord"

    @pytest.fixture
    def case(self):
        return _misc("r.tfrecord", by_column(MISC["r.tfrecord"], "id", "tokens"), dtypes={"id": "int64"})


class TestImageFolder(DecodedContract):
    format = "imagefolder"

    @pytest.fixture
    def case(self):
        paths = sorted(MISC["imagefolder"])
        classes = [path.partition("/")[0] for path in paths]
        columns = {
            "image": [(FIXTURES / "written-misc/imagefolder" / path).read_bytes() for path in paths],
            "label": [sorted(set(classes)).index(name) for name in classes],
            "class": classes,
            "path": paths,
        }
        return _misc("imagefolder", columns, truncation_is_seen=False)


class TestMds(DecodedContract):
    format = "mds"

    @pytest.fixture(params=[name for name in MDS if name != "ndarray_dynamic"])
    def case(self, request):
        entry = MDS[request.param]
        columns = by_column(entry["samples"], *sorted(entry["columns"]))
        for name, encoding in entry["columns"].items():
            if encoding == "bytes":
                columns[name] = [_raw(value) for value in columns[name]]
        stays = {"text_id": ("text",), "json_col": ("s",)}
        return DecodedCase(f"written-mosaicml-streaming/{request.param}", columns, stays=stays.get(request.param, ()))


def _raw(value: Any) -> bytes:
    """Return bytes that the fixture lists as the int64 numbers in them."""
    return b"".join(number.to_bytes(8, "little", signed=True) for number in value)


def test_mds_arrays_of_several_dtypes_are_objects():
    found = table(FIXTURES / "written-mosaicml-streaming/ndarray_dynamic")["tokens"]
    assert [array.tolist() for array in found] == [sample["tokens"] for sample in MDS["ndarray_dynamic"]["samples"]]


class TestLitData(DecodedContract):
    format = "litdata"

    @pytest.fixture(params=["dict", "tokens_int64"])
    def case(self, request):
        entry = LITDATA[request.param]
        columns = by_column(entry["samples"]) if "samples" in entry else {"value": entry["items_in_order"]}
        return DecodedCase(f"written-litdata/{request.param}", columns)


class TestHuggingFace(DecodedContract):
    format = "huggingface"

    @pytest.fixture(
        params=["ragged", "ragged_3shards", "shuffled_selected", "fixed_len8_uint16", "numpy_format", "array2d_f32",
                "many_batches", "datasetdict/train", "datasetdict/test"]
    )  # fmt: skip
    def case(self, request):
        pytest.importorskip("pyarrow")
        entry = HF["datasets"][request.param]
        if request.param == "many_batches":
            entry = [{"text": f"document number {number}"} for number in range(entry["n"])]
        columns = by_column(entry)
        stays = [name for name in columns if (request.param, name) != ("ragged_3shards", "label")]
        return DecodedCase(f"written-hf-datasets/{request.param}", columns, stays=tuple(stays))


def test_hugging_face_images_are_their_files(tmp_path):
    pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    found = table(FIXTURES / "written-hf-datasets/images")
    wanted = HF["datasets"]["images"]
    assert found["label"] == [row["label"] for row in wanted]
    pixels = [np.asarray(image.open(io.BytesIO(each["bytes"]))).tolist() for each in found["image"]]
    assert pixels == [row["pixels"] for row in wanted]


REFUSED = {
    "written-hf-datasets/datasetdict": (SourceFormatError, r"the datasets train, test: say which, --data train="),
    "written-litdata/dict_zstd": (SourceFormatError, "compression 'zstd' is not supported"),
    "written-mosaicml-streaming/text_id/shard.00000.mds": (SourceFormatError, "name its directory"),
    "written-misc/r.array_record": (SourceFormatError, "ArrayRecord"),
    "written-misc/g4_zstd.array_record": (SourceFormatError, "ArrayRecord"),
    "written-misc/t.pt": (SourceFormatError, "zip archive"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_supported_is_refused_by_name(path):
    error, message = REFUSED[path]
    with pytest.raises(error, match=message):
        table(FIXTURES / path)


def test_a_file_that_the_index_names_and_that_is_not_there(tmp_path):
    for folder, name in (
        ("written-mosaicml-streaming/text_id", "shard.00002.mds"),
        ("written-litdata/dict", "chunk-0-1.bin"),
        ("written-hf-datasets/ragged_3shards", "data-00001-of-00003.arrow"),
    ):
        copy = Path(shutil.copytree(FIXTURES / folder, tmp_path / Path(folder).name))
        (copy / name).unlink()
        with pytest.raises(SourceNotFoundError, match=name):
            resolve([str(copy)], SourceOptions())


@pytest.mark.parametrize("folder", ["written-mosaicml-streaming/text_id", "written-litdata/dict"])
def test_the_index_stands_for_its_directory(folder):
    directory = FIXTURES / folder
    index, whole = (resolve([str(path)], SourceOptions()) for path in (directory / "index.json", directory))
    assert index.fingerprint == whole.fingerprint


def test_a_missing_library_names_what_to_install(tmp_path):
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = run_cli("inspect", FIXTURES / "written-misc/t.arrow", env={"PYTHONPATH": path})
    assert done.returncode == 1
    assert "needs pyarrow (not here): pip install 'shmserve[arrow]'" in done.stderr


def test_a_column_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="named twice"):
        resolve([str(FIXTURES / "written-misc/t.jsonl")], SourceOptions(columns=("ids", "ids")))
