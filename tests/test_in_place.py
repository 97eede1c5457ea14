"""`--mode map`: values stay in their files, and clients map them there, behind the segment with the index."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from shmserve_client import ShmDataset
from shmserve_client.errors import BlockSizeError, SourceFormatError, SourceNotFoundError
from tests.corpora import MEGATRON, RAGGED, RAGGED_SAMPLES
from tests.processes import Daemon, run_cli, run_python, wait_until

Serve = Callable[..., Daemon]

ROWS, WIDTH = 4096, 1024


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """16 MiB of float32 rows, row i full of i."""
    np.save(tmp_path / "rows.npy", np.repeat(np.arange(ROWS, dtype=np.float32), WIDTH).reshape(ROWS, WIDTH))
    return tmp_path / "rows.npy"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    for suffix in (".bin", ".idx"):
        shutil.copy(MEGATRON / f"ragged_uint16{suffix}", tmp_path)
    return tmp_path / "ragged_uint16.bin"


def test_the_values_take_no_shared_memory(rows: Path, serve: Serve) -> None:
    daemon = serve("--data", rows, "--mode", "map")
    (segment,) = daemon.segments()
    assert segment.stat().st_blocks * 512 <= 16 << 10
    (dataset,) = json.loads(run_cli("status", "--json").stdout)["datasets"]
    (note,) = dataset["notes"]
    assert note == (
        "16.0 MiB are mapped from 1 file, which must not change: pages are read from there as they are needed"
    )
    with ShmDataset("rows", dtype="stored") as samples:
        assert [int(samples[index][-1]) for index in range(ROWS)] == list(range(ROWS))
        values = samples.column()
        assert isinstance(values, np.ndarray)
        assert values.shape == (ROWS, WIDTH)
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(rows))]
        assert len(mapped) == 1, "the file itself is what is read"
        assert dataset["segment_nbytes"] < 16 << 10


def test_workers_of_either_start_method_read_them(rows: Path, serve: Serve) -> None:
    serve("--data", rows, "--mode", "map")
    dataset = ShmDataset("rows", dtype="stored")
    assert int(pickle.loads(pickle.dumps(dataset))[7][0]) == 7
    for method in ("fork", "spawn"):
        loader = DataLoader(dataset, batch_size=512, num_workers=2, multiprocessing_context=method)
        assert [int(row) for batch in loader for row in batch[:, 0]] == list(range(ROWS)), method


def test_what_is_written_to_a_sample_stays_out_of_the_file(rows: Path, serve: Serve) -> None:
    serve("--data", rows, "--mode", "map")
    before = rows.read_bytes()
    dataset = ShmDataset("rows", dtype="stored", copy=False)
    dataset[3][:] = 0
    assert dataset[3].tolist() == [0] * WIDTH
    assert rows.read_bytes() == before
    assert int(ShmDataset("rows", dtype="stored")[4][0]) == 4


def test_shards_are_mapped_one_behind_the_other(pair: Path, tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "more").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(pair.with_suffix(suffix), tmp_path / "more")
    serve("--data", f"both={pair}", tmp_path / "more" / pair.name, "--mode", "map")
    dataset = ShmDataset("both", dtype="stored")
    assert [sample.tolist() for sample in dataset] == RAGGED_SAMPLES * 2
    assert [dataset[index].tolist() for index in (-1, 0, 6)] == [RAGGED_SAMPLES[index] for index in (5, 0, 0)]
    padded = dataset.batch([0, 6, 11])
    assert padded.values[1].tolist()[: len(RAGGED_SAMPLES[0])] == RAGGED_SAMPLES[0]
    offsets, nbytes = dataset.lookup([0, 6])
    assert nbytes.tolist() == [2 * len(RAGGED_SAMPLES[0])] * 2
    assert (offsets[1] - offsets[0]) % os.sysconf("SC_PAGESIZE") == 0
    with pytest.raises(BlockSizeError, match=r"do not follow each other in the files where they are mapped"):
        len(ShmDataset("both", block_size=4))


def test_the_daemon_looks_offsets_up_as_clients_do(pair: Path, serve: Serve) -> None:
    serve("--data", pair, "--mode", "map")
    here = ShmDataset("ragged_uint16")
    there = ShmDataset("ragged_uint16", lookup="daemon")
    for mine, told in zip(here.lookup(range(6)), there.lookup(range(6)), strict=True):
        assert mine.tolist() == told.tolist()


def test_a_changed_file_is_not_attached_until_it_is_reloaded(rows: Path, serve: Serve) -> None:
    serve("--data", rows, "--mode", "map")
    attached = ShmDataset("rows", dtype="stored")
    assert int(attached[9][0]) == 9
    np.save(rows.with_name("new.npy"), np.full((4, WIDTH), 7, np.float32))
    rows.with_name("new.npy").rename(rows)
    program = "from shmserve_client import ShmDataset; print(len(ShmDataset('rows', timeout=5)))"
    refused = run_python(
        """
        from shmserve_client import ShmDataset, errors
        try:
            ShmDataset("rows")
        except errors.SourceFormatError as error:
            print(error)
        """
    )
    assert f"{rows} has changed since it was served where it is (--mode map)" in refused.stdout
    assert "`shmserve reload`" in refused.stdout
    assert int(attached[10][0]) == 10, "those who have it mapped keep the file that was there"
    done = run_cli("reload", "rows")
    assert done.returncode == 0, done.stderr
    assert run_python(program).stdout == "4\n"
    attached.refresh()
    assert [int(row[0]) for row in attached] == [7] * 4


def test_a_file_that_is_gone_is_named_with_the_remedy(rows: Path, serve: Serve) -> None:
    serve("--data", rows, "--mode", "map")
    moved = rows.rename(rows.with_name("moved.npy"))
    with pytest.raises(SourceNotFoundError, match=r"cannot map .*rows\.npy.*mount it under the same path"):
        ShmDataset("rows")
    rows.mkdir()
    with pytest.raises(SourceNotFoundError, match="not a regular file any more"):
        ShmDataset("rows")
    rows.rmdir()
    moved.rename(rows)
    assert int(ShmDataset("rows", dtype="stored")[5][0]) == 5
    os.utime(rows, ns=(0, 0))
    with pytest.raises(SourceFormatError, match="has changed since it was served"):
        ShmDataset("rows")


def test_it_outlives_its_daemon_and_is_adopted(rows: Path, serve: Serve) -> None:
    daemon = serve("--data", rows, "--mode", "map")
    dataset = ShmDataset("rows", dtype="stored")
    (segment,) = daemon.segments()
    daemon.kill()
    assert int(dataset[100][0]) == 100
    serve("--data", rows, "--mode", "map")
    assert daemon.segments() == [segment]
    assert ShmDataset("rows").info.path == str(segment)


def test_loaded_and_mapped_are_never_taken_for_each_other(rows: Path, serve: Serve) -> None:
    daemon = serve("--data", rows, "--mode", "map")
    (mapped,) = daemon.segments()
    daemon.kill()
    second = serve("--data", rows)
    (loaded,) = second.segments()
    assert loaded != mapped
    assert loaded.stat().st_blocks * 512 > 16 << 20


def test_warm_reads_every_byte(rows: Path, serve: Serve) -> None:
    os.sync()
    fd = os.open(rows, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    cold = _cached_nbytes(rows)
    serve("--data", rows, "--mode", "map", "--warm")
    assert cold <= _cached_nbytes(rows)
    assert _cached_nbytes(rows) >= 16 << 20


def _cached_nbytes(path: Path) -> int:
    """Return how much of the file is in the page cache."""
    done = run_python(
        """
        import ctypes, mmap, os, sys

        fd = os.open(sys.argv[1], os.O_RDONLY)
        size = os.fstat(fd).st_size
        content = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(content))
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        print(sum(page & 1 for page in pages) * mmap.PAGESIZE)
        """,
        path,
    )
    return int(done.stdout)


def test_what_does_not_go_together_is_refused(rows: Path, tmp_path: Path, serve: Serve) -> None:
    serve("--data", rows)
    assert "warm is for mode map" in run_cli("load", f"other={rows}", "--warm").stderr
    refusal = run_cli("load", f"other={RAGGED}", "--mode", "map", "--vocab-size", "9")
    assert refusal.returncode == 1
    assert "mode map does not read the values, so they cannot be checked: leave out vocab-size 9" in refusal.stderr
    for name in ("a.bin", "b.bin"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name)
    refusal = run_cli("load", f"flat={tmp_path}/a.bin", tmp_path / "b.bin", "--mode", "map")
    assert refusal.returncode == 1
    assert "a.bin: its values cannot be mapped where they are" in refusal.stderr
    assert "shmserve build" in refusal.stderr


def test_verify_compares_what_is_in_the_segment(pair: Path, serve: Serve) -> None:
    daemon = serve("--data", pair, "--mode", "map", "--checksums")
    assert run_cli("verify", "ragged_uint16", "--against-source").returncode == 0
    (segment,) = daemon.segments()
    segment.chmod(0o600)
    with segment.open("r+b") as file:
        file.seek((2 << 20) + 3)
        file.write(b"\x55")
    done = run_cli("verify", "ragged_uint16", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["damaged"][0]["parts"][0]["array"] == "tokens.offsets"


def test_columns_of_a_table_are_mapped_where_they_can_be(tmp_path: Path, serve: Serve) -> None:
    pa = pytest.importorskip("pyarrow")
    texts = [f"document {number} " * (number % 5) for number in range(3000)]
    table = pa.table({"id": range(3000), "text": texts, "tokens": [[n] * (n % 4) for n in range(3000)]})
    with pa.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as stream:
        for batch in table.to_batches(1000):
            stream.write_batch(batch)
    serve("--data", tmp_path / "t.arrow", "--mode", "map")
    with ShmDataset("t", dtype="stored") as dataset:
        found = [(int(row["id"]), row["text"], row["tokens"].tolist()) for row in dataset]
        assert found == [(n, texts[n], [n] * (n % 4)) for n in range(3000)]
        assert dataset.info.notes == ("in memory, since they cannot be mapped where they are: id",)
    status = run_cli("status").stdout
    assert "are mapped from 1 file" in status


def test_readers_do_not_slow_down_when_many_attach(rows: Path, serve: Serve) -> None:
    daemon = serve("--data", rows, "--mode", "map")
    datasets = [ShmDataset("rows", dtype="stored") for _ in range(8)]
    assert {int(dataset[1][0]) for dataset in datasets} == {1}
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len([line for line in lines if line.endswith(str(rows))]) == 1, "one mapping a process"
    del datasets
    wait_until(lambda: daemon.status().datasets[0].attached_pids == [], what="nobody attached")
