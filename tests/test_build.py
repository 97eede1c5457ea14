"""`shmserve build`, and what it writes: loaded without decoding it again, or mapped where it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve.sources import SourceOptions, resolve
from shmserve_client import ShmDataset
from shmserve_client.errors import ConfigError, SourceFormatError
from tests.corpora import RAGGED, RAGGED_SAMPLES
from tests.mounts import with_tmpfs
from tests.processes import Child, Daemon, run_cli

Serve = Callable[..., Daemon]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    done = run_cli("build", RAGGED, tmp_path / "ragged.seg", "--checksums")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/ragged.seg: 6 samples, ")
    return tmp_path / "ragged.seg"


@pytest.mark.parametrize("mode", ["load", "map"])
def test_it_is_served_as_its_source_is(built: Path, serve: Serve, mode: str) -> None:
    daemon = serve("--data", built, "--mode", mode)
    with ShmDataset("ragged", dtype="stored") as dataset:
        assert [sample.tolist() for sample in dataset] == RAGGED_SAMPLES
        assert dataset.array("document_indices").tolist() == [0, 2, 3, 6]
        assert dataset.info.path == str(daemon.segments()[0])
        assert daemon.status().datasets[0].attached_pids == [os.getpid()]


@pytest.mark.parametrize("mode", ["load", "map"])
def test_shards_are_joined(built: Path, tmp_path: Path, serve: Serve, mode: str) -> None:
    again = tmp_path / "ragged_2.seg"
    again.write_bytes(built.read_bytes())
    serve("--data", f"both={built}", again, "--mode", mode)
    with ShmDataset("both", dtype="stored") as dataset:
        assert [sample.tolist() for sample in dataset] == RAGGED_SAMPLES * 2
        assert dataset.array("document_indices").tolist() == [0, 2, 3, 6, 8, 9, 12]


def test_build_refuses_to_overwrite_and_leaves_nothing_behind(built: Path, tmp_path: Path) -> None:
    before = built.read_bytes()
    done = run_cli("build", RAGGED, built)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{built} exists already: remove it first" in done.stderr
    assert built.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["ragged.seg"]
    done = run_cli("build", RAGGED, tmp_path / "absent" / "x.seg")
    assert done.returncode == 1
    assert "cannot write" in done.stderr


def test_a_source_that_fails_leaves_no_file(tmp_path: Path) -> None:
    done = run_cli("build", RAGGED, tmp_path / "x.seg", "--vocab-size", "2")
    assert done.returncode == 1
    assert "outside the vocabulary [0, 2)" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [83, 200, (2 << 20) - 1, -1])
def test_a_truncated_file_is_refused(built: Path, kept: int) -> None:
    content = built.read_bytes()
    built.write_bytes(content[:kept])
    with pytest.raises(SourceFormatError, match=r"ragged\.seg: segment"):
        resolve([str(built)], SourceOptions()).plan()


def test_columns_are_chosen_from_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = Path(__file__).parent / "fixtures/written-misc/t_plain.parquet"
    assert run_cli("build", table, tmp_path / "t.seg").returncode == 0
    plan = resolve([str(tmp_path / "t.seg")], SourceOptions(columns=("s",))).plan()
    assert [column.name for column in plan.columns] == ["s"]
    with pytest.raises(ConfigError, match="no column 'x': it has 'ids', 's'"):
        resolve([str(tmp_path / "t.seg")], SourceOptions(columns=("x",))).plan()
    assert run_cli("build", table, tmp_path / "s.seg", "--columns", "s").returncode == 0
    assert len(resolve([str(tmp_path / "s.seg")], SourceOptions()).plan().columns) == 1


def test_a_disk_without_room_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    np.save(tmp_path / "rows.npy", np.zeros((1 << 20, 4)))
    argv = [sys.executable, "-m", "shmserve", "build", tmp_path / "rows.npy", folder / "rows.seg"]
    with Child(with_tmpfs(folder, "4m", argv), folder=tmp_path) as build:
        assert build.wait() == 1
        assert f"error: cannot write {folder}/rows.seg (33" in build.stderr
        assert build.stderr.endswith("bytes): No space left on device\n")
