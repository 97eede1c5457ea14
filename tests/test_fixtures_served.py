"""Every file that the other projects' own code wrote, through a real daemon and `ShmDataset`, sample by sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shmserve_client.dataset import ShmDataset
from tests.processes import Daemon, run_cli

FIXTURES = Path(__file__).parent / "fixtures"

REFUSED = {
    "written-fairseq-0.12.2/builders/huffman.bin": "uffman",
    "written-llm.c/eval_v1.bin": "eval",
    "written-misc/zerod_f64.npy": "0-d",
}


@dataclass(frozen=True)
class Case:
    """One dataset to serve, and what it has to hold."""

    data: list[str]
    """Paths below FIXTURES."""
    samples: list[Any]
    arrays: dict[str, list[int]] = field(default_factory=dict)
    dtype: str | None = None
    """For files that do not say it."""
    stored_dtype: str | None = None
    """What the segment must hold, where the fixture says so."""
    block_size: int | None = None


def _expected(folder: str) -> Any:
    return json.loads((FIXTURES / folder / "expected.json").read_text())


def _pairs(folder: str) -> dict[str, Case]:
    """The cases of the .bin/.idx writers: `samples` (fairseq's float file: `written`) and document indices by name."""
    cases = {}
    for name, entry in _expected(folder)["datasets"].items():
        documents = entry.get("document_indices") or entry.get("doc_idx")
        arrays = {"document_indices": documents, "modes": entry.get("modes")}
        cases[f"{folder}/{name}"] = Case(
            data=[f"{folder}/{name}.bin"],
            samples=entry.get("samples", entry.get("written")),
            arrays={name: values for name, values in arrays.items() if values is not None},
            stored_dtype=entry.get("dtype"),
        )
    return cases


def _datatrove() -> dict[str, Case]:
    folder = "written-datatrove"
    datasets = _expected(folder)["datasets"]
    return {
        f"{folder}/meg": Case([f"{folder}/meg.idx"], datasets["meg"]["samples"], stored_dtype="uint16"),
        f"{folder}/00000": Case(
            [f"{folder}/00000_train.ds"], datasets["00000_train.ds"]["samples"], stored_dtype="uint16"
        ),
        # Its .metadata, which would tell the size of an item, is missing.
        f"{folder}/00001": Case([f"{folder}/00001_train.ds"], datasets["00001_train.ds"]["samples"], dtype="uint32"),
    }


def _streams() -> dict[str, Case]:
    """Flat token files: one window with all the tokens, or the windows that the fixture lists."""
    llmc, packed, olmo = (
        _expected("written-llm.c"),
        _expected("written-lit_gpt-packed"),
        _expected("written-olmo-memmap"),
    )
    cases = {}
    for name in ("gpt2_v1.bin", "llama3_v7.bin"):
        entry = llmc["datasets"][name]
        tokens = entry["tokens"]
        cases[f"llm.c/{name}"] = Case(
            [f"written-llm.c/{name}"], [tokens], stored_dtype=entry["dtype"], block_size=len(tokens)
        )
    cases["packed"] = Case(
        [f"written-lit_gpt-packed/{name}" for name in packed["files"]],
        packed["blocks_of_2049_in_order"],
        stored_dtype="uint16",
        block_size=2049,
    )
    cases["olmo/documents"] = Case(
        ["written-olmo-memmap/part-0-00000.npy"],
        [olmo["tokens"][start:stop] for start, stop in olmo["document_bounds"]],
        stored_dtype="uint16",
    )
    cases["olmo/tokens"] = Case(
        ["written-olmo-memmap/part-0-00000.npy"], [olmo["tokens"]], block_size=len(olmo["tokens"])
    )
    return cases


def _npy() -> dict[str, Case]:
    expected = _expected("written-misc")["expected"]
    names = ("fixed_u16.npy", "fortran_f32.npy", "bigendian_i4.npy", "oned_i64.npy")
    return {name: Case([f"written-misc/{name}"], expected[name]) for name in names}


NOT_IN_PLACE = ("cached-en-de", "cached_2d_int64", "packed", "fortran_f32", "bigendian_i4")
"""Stored in another form than a segment holds, or one stream in two files."""

BY_FOLDER = ("written-hf-datasets", "written-litdata", "written-mosaicml-streaming")

CASES = {
    **_pairs("written-megatron-core"),
    "written-megatron-core/empty": Case(["written-megatron-core/empty_uint16"], [], {"document_indices": [0]}),
    **_pairs("written-fairseq-0.12.2"),
    **_pairs("written-gpt-neox"),
    **_datatrove(),
    **_streams(),
    **_npy(),
}


def _served_name(case: str) -> str:
    return case.replace("/", ".")


def _config(cases: dict[str, Case], mode: str) -> str:
    lines = []
    for name, case in cases.items():
        lines += [f"[datasets.{json.dumps(_served_name(name))}]", f'mode = "{mode}"']
        lines += [f"data = {json.dumps([str(FIXTURES / path) for path in case.data])}"]
        lines += [f"dtype = {json.dumps(case.dtype)}"] if case.dtype else []
    return "\n".join(lines)


def _difference(name: str, case: Case) -> str:
    """Return what is wrong with what is served for `case`, or ""."""
    with ShmDataset(_served_name(name), dtype="stored", block_size=case.block_size) as dataset:
        samples = [sample.tolist() for sample in dataset]
        if samples != case.samples:
            return f"samples {samples} instead of {case.samples}"
        if samples and dataset[-1].tolist() != case.samples[-1]:
            return "another last sample by its negative index"
        for array, values in case.arrays.items():
            if dataset.array(array).tolist() != values:
                return f"{array} {dataset.array(array).tolist()} instead of {values}"
        (dtype,) = dataset.info.dtypes.values()
        if case.stored_dtype not in (None, dtype):
            return f"{dtype} instead of {case.stored_dtype}"
    return ""


@pytest.mark.promise("F23", "F25")
@pytest.mark.parametrize("mode", ["load", "map"])
def test_every_fixture_is_served_as_its_writer_meant_it(
    serve: Callable[..., Daemon], tmp_path: Path, mode: str
) -> None:
    cases = {name: case for name, case in CASES.items() if mode == "load" or not any(n in name for n in NOT_IN_PLACE)}
    config = tmp_path / "node.toml"
    config.write_text(_config(cases, mode))
    daemon = serve("--config", config)

    assert len(daemon.segments()) == len(cases)
    assert {name: wrong for name, case in cases.items() if (wrong := _difference(name, case))} == {}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(path: str, shm_dir: Path, runtime_dir: Path) -> None:
    refusal = run_cli("start", "--shm-dir", shm_dir, "--data", FIXTURES / path)

    assert refusal.returncode == 3, refusal
    assert refusal.stdout == ""
    (line,) = refusal.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    assert Path(path).stem in line
    assert REFUSED[path] in line
    assert not list(runtime_dir.rglob("*.sock"))


def test_no_fixture_is_forgotten() -> None:
    companions = {".json", ".txt", ".idx", ".index", ".metadata", ".gz", ".vocab"}
    files = {str(path.relative_to(FIXTURES)) for path in FIXTURES.rglob("*") if path.is_file()}
    data = {path for path in files if Path(path).suffix not in companions}
    tested = {path for case in CASES.values() for path in case.data} | set(REFUSED)

    # Those of decoded formats are served one by one by tests/sources: named there, or by their folder's expected.json.
    decoded = "".join(path.read_text() for path in (FIXTURES.parent / "sources").glob("test_*.py"))
    elsewhere = {
        path for path in data if Path(path).name in decoded or str(Path(path).parent).partition("/")[0] in BY_FOLDER
    }
    elsewhere |= {path for path in data if Path(path).parts[1] in ("imagefolder", "lmdb")}
    stems = {str(Path(path).with_suffix("")) for path in tested}
    assert {path for path in data - elsewhere if str(Path(path).with_suffix("")) not in stems} == set()
