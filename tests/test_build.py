"""`shmserve build`, and what it writes: loaded without decoding it again, or mapped where it is."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve.sources import SourceOptions, resolve
from shmserve_client import ShmDataset
from shmserve_client.errors import ConfigError, DatasetFailedError, SourceFormatError
from shmserve_client.writer import Values, write_segment_file
from tests.corpora import RAGGED, RAGGED_SAMPLES
from tests.mounts import with_tmpfs
from tests.processes import Child, Daemon, run_cli, run_python
from tests.segments import describe_tokens

Serve = Callable[..., Daemon]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    done = run_cli("build", RAGGED, tmp_path / "ragged.seg", "--checksums")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/ragged.seg: 6 samples, ")
    return tmp_path / "ragged.seg"


def rewrite(path: Path, tokens: list[int]) -> None:
    """Replace a segment file by another one, in its place."""
    path.unlink()
    write_segment_file(
        describe_tokens("uint16", len(tokens), "ragged"),
        [[Values(np.array(tokens, np.uint16))]],
        os.fspath(path),
        progress=lambda done, total: None,
        cancelled=threading.Event(),
        vocab_size=None,
    )


@pytest.mark.parametrize("mode", ["load", "map"])
def test_it_is_served_as_its_source_is(built: Path, serve: Serve, mode: str) -> None:
    daemon = serve("--data", built, "--mode", mode)
    with ShmDataset("ragged", dtype="stored") as dataset:
        assert [sample.tolist() for sample in dataset] == RAGGED_SAMPLES
        assert dataset.array("document_indices").tolist() == [0, 2, 3, 6]
        assert dataset.info.path == (str(built) if mode == "map" else str(daemon.segments()[0]))
        assert daemon.status().datasets[0].attached_pids == [os.getpid()]
    assert len(daemon.segments()) == (mode == "load")


def test_shards_are_joined(built: Path, tmp_path: Path, serve: Serve) -> None:
    again = tmp_path / "ragged_2.seg"
    again.write_bytes(built.read_bytes())
    serve("--data", f"both={built}", again)
    with ShmDataset("both", dtype="stored") as dataset:
        assert [sample.tolist() for sample in dataset] == RAGGED_SAMPLES * 2
        assert dataset.array("document_indices").tolist() == [0, 2, 3, 6, 8, 9, 12]


def test_a_file_that_is_mapped_outlives_the_daemon_and_is_nobodys(built: Path, serve: Serve) -> None:
    before = built.read_bytes()
    first = serve("--data", built, "--mode", "map")
    second = serve("--data", built, "--mode", "map", "--warm", endpoint=f"{first.endpoint}.2")
    dataset = ShmDataset("ragged", endpoint=second.endpoint, dtype="stored")
    for daemon in (first, second):
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.describe()
    assert [sample.tolist() for sample in dataset] == RAGGED_SAMPLES
    assert built.read_bytes() == before


def test_what_is_written_to_a_sample_stays_out_of_the_file(built: Path, serve: Serve) -> None:
    serve("--data", built, "--mode", "map")
    before = built.read_bytes()
    dataset = ShmDataset("ragged", dtype="stored", copy=False)
    dataset[0][:] = 0
    assert dataset[0].tolist() == [0] * len(RAGGED_SAMPLES[0])
    assert built.read_bytes() == before


def test_a_changed_file_is_not_attached_until_it_is_reloaded(built: Path, serve: Serve) -> None:
    serve("--data", built, "--mode", "map")
    attached = ShmDataset("ragged", dtype="stored")
    rewrite(built, [7, 8, 9])
    program = "from shmserve_client import ShmDataset; ShmDataset('ragged', timeout=5)"
    with pytest.raises(DatasetFailedError, match=r"ragged\.seg was changed since .*shmserve reload ragged"):
        ShmDataset("ragged")
    assert [sample.tolist() for sample in attached] == RAGGED_SAMPLES
    done = run_cli("reload", "ragged")
    assert done.returncode == 0, done.stderr
    assert "generation 2" in done.stderr + done.stdout
    assert ShmDataset("ragged", dtype="stored", block_size=3)[0].tolist() == [7, 8, 9]
    assert [sample.tolist() for sample in attached] == RAGGED_SAMPLES
    run_python(program)


def test_only_segment_files_are_mapped(serve: Serve, built: Path) -> None:
    serve("--data", built)
    refusal = run_cli("load", f"raw={RAGGED}", "--mode", "map")
    assert refusal.returncode == 1
    assert f"mode map serves one segment file: make it by `shmserve build {RAGGED} raw.seg`" in refusal.stderr
    refusal = run_cli("load", f"other={built}", "--mode", "map", "--vocab-size", "9")
    assert "give dtype, vocab-size and columns to `shmserve build`" in refusal.stderr
    assert "warm is for mode map" in run_cli("load", f"other={built}", "--warm").stderr


def test_verify_finds_a_flipped_bit_in_the_file(built: Path, serve: Serve) -> None:
    serve("--data", built, "--mode", "map")
    assert run_cli("verify", "ragged").returncode == 0
    status = built.stat()
    with built.open("r+b") as file:
        file.seek(2 << 20)
        byte = file.read(1)[0]
        file.seek(2 << 20)
        file.write(bytes([byte ^ 1]))
    os.utime(built, ns=(status.st_atime_ns, status.st_mtime_ns))
    done = run_cli("verify", "ragged", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["damaged"][0]["parts"][0]["array"] == "tokens.values"


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
