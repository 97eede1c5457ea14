"""Decoding by helper processes: in bounded memory, whoever is killed, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmserve.decoding import plan_corpus
from shmserve.sources import SourceOptions, resolve
from shmserve_client import ShmDataset
from shmserve_client.errors import SourceFormatError
from tests.mounts import with_tmpfs
from tests.processes import Child, Daemon, run_cli, wait_until
from tests.sources.decoded import table
from tests.test_promises_memory import start_of

pa = pytest.importorskip("pyarrow")

Serve = Callable[..., Daemon]

MIB = 1 << 20


def write_numbers(path: Path, nbytes: int, *, batches: int = 64) -> Path:
    """Write an Arrow file with one column of 1,024 int64 a row, counted on through all rows."""
    rows = nbytes // 8192
    with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("n", _row_type())])) as writer:
        for part in np.array_split(np.arange(rows), batches):
            values = (part[:, None] * 1024 + np.arange(1024)).reshape(-1)
            writer.write_batch(
                pa.record_batch([pa.FixedSizeListArray.from_arrays(pa.array(values), 1024)], names=["n"])
            )
    return path


def _row_type() -> object:
    return pa.list_(pa.int64(), 1024)


def helpers_of(pid: int) -> list[psutil.Process]:
    """Return the processes that decode for a daemon."""
    return [child for child in psutil.Process(pid).children() if "shmserve.decoder" in child.cmdline()]


@pytest.fixture
def decoding(tmp_path: Path, shm_dir: Path, runtime_dir: Path) -> Callable[[], tuple[Child, psutil.Process]]:
    """A factory of daemons, each with one of its helpers stopped before it has decoded all."""
    data = write_numbers(tmp_path / "numbers.arrow", 64 * MIB)
    endpoint = f"ipc://{runtime_dir}/shmserve/daemon.sock"

    def start() -> tuple[Child, psutil.Process]:
        daemon = Child(start_of(data, shm_dir, endpoint), folder=tmp_path)
        (helper,) = wait_until(lambda: helpers_of(daemon.pid)[:1], what="a helper")
        helper.suspend()
        return daemon, helper

    return start


def test_the_rows_of_all_parts_are_in_order(tmp_path: Path, serve: Serve) -> None:
    serve("--data", f"n={write_numbers(tmp_path / 'numbers.arrow', 24 * MIB)}")
    with ShmDataset("n") as dataset:
        assert len(dataset) == 3072
        values = dataset.column()
        assert values.shape == (3072, 1024)
        np.testing.assert_array_equal(values.reshape(-1), np.arange(3072 * 1024))


def test_memory_is_little_more_than_the_segment(tmp_path: Path, shm_dir: Path, runtime_dir: Path) -> None:
    data = write_numbers(tmp_path / "numbers.arrow", 96 * MIB)
    # An eighth of it is kept free for batches, so that the segment and what waits have 1.1 times the segment.
    argv = with_tmpfs(shm_dir, f"{121 * MIB}", start_of(data, shm_dir, f"ipc://{runtime_dir}/shmserve/daemon.sock"))
    with Child(argv, folder=tmp_path) as daemon:
        wait_until(lambda: "ready" in daemon.stdout or daemon.process.poll() is not None, 60, "the daemon")
        assert "ready" in daemon.stdout, daemon.describe()
        assert not helpers_of(daemon.pid)


def test_too_little_memory_is_refused_and_nothing_is_left(tmp_path: Path, shm_dir: Path, runtime_dir: Path) -> None:
    data = write_numbers(tmp_path / "numbers.arrow", 96 * MIB)
    argv = with_tmpfs(shm_dir, f"{48 * MIB}", start_of(data, shm_dir, f"ipc://{runtime_dir}/shmserve/daemon.sock"))
    with Child(argv, folder=tmp_path) as daemon:
        assert daemon.wait(60) == 3, daemon.describe()
        error = daemon.stderr.splitlines()[-1]
    assert error.startswith("error: the segment needs "), error
    assert f"{shm_dir} (tmpfs, 48.0 MiB)" in error
    assert "--shm-dir" in error


def test_a_helper_that_is_killed_is_an_error_that_names_the_file(
    decoding: Callable[[], tuple[Child, psutil.Process]], shm_dir: Path
) -> None:
    daemon, helper = decoding()
    with daemon:
        helper.kill()
        assert daemon.wait() == 3, daemon.describe()
        error = daemon.stderr.splitlines()[-1]
    assert error.startswith("error: "), error
    assert "numbers.arrow: the process that decodes it was killed by signal 9" in error
    assert not list(shm_dir.iterdir())


def test_sigterm_ends_it_in_the_middle(decoding: Callable[[], tuple[Child, psutil.Process]], shm_dir: Path) -> None:
    daemon, helper = decoding()
    with daemon:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(2) == 0, daemon.describe()
    assert not helper.is_running()
    assert not list(shm_dir.iterdir())


def test_helpers_end_with_a_daemon_that_is_killed(decoding: Callable[[], tuple[Child, psutil.Process]]) -> None:
    daemon, helper = decoding()
    with daemon:
        daemon.kill()
        helper.resume()
        wait_until(lambda: not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE, what="the helper's end")


def test_other_datasets_are_served_on_when_one_cannot_be_decoded(tmp_path: Path, serve: Serve) -> None:
    good, bad = write_numbers(tmp_path / "good.arrow", MIB), write_numbers(tmp_path / "bad.arrow", MIB)
    with bad.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))
        file.truncate(MIB // 2)
    serve("--data", good)
    refusal = run_cli("load", bad)
    assert refusal.returncode == 1
    assert f"{bad}: cannot be decoded, it is damaged or not supported: " in refusal.stderr
    assert len(refusal.stderr.strip().splitlines()[-1:]) == 1
    assert len(ShmDataset("good")) == 128


def test_cancelling_ends_it(tmp_path: Path) -> None:
    resolved = resolve([str(write_numbers(tmp_path / "numbers.arrow", MIB))], SourceOptions())
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError), plan_corpus(resolved, shm_dir=None, cancelled=cancelled):
        pass


def test_progress_counts_the_bytes_of_the_source(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "numbers.arrow", 2 * MIB, batches=8)
    told: list[tuple[int, int]] = []
    resolved = resolve([str(data)], SourceOptions())
    with plan_corpus(resolved, shm_dir=None, progress=lambda done, total: told.append((done, total))):
        pass
    total = data.stat().st_size
    assert told[0] == (0, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] >= total - 8


def test_chunks_of_several_forms_become_one_column(tmp_path: Path) -> None:
    first, second = tmp_path / "part0.arrow", tmp_path / "part1.arrow"
    for path, values in ((first, pa.array([1, 2])), (second, pa.array([0.5]))):
        with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema([("x", values.type)])) as writer:
            writer.write_batch(pa.record_batch([values], names=["x"]))
    assert table(first, second) == {"x": [1.0, 2.0, 0.5]}


def test_shards_with_other_columns_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        path = tmp_path / f"part{number}.arrow"
        with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, pa.schema([(name, pa.int64())])) as writer:
            writer.write_batch(pa.record_batch([pa.array([1])], names=[name]))
    with pytest.raises(SourceFormatError, match=r"part1.arrow has the columns b, .*part0.arrow has a: choose some"):
        table(tmp_path)


def test_vocab_size_is_checked_in_the_first_column(tmp_path: Path, serve: Serve) -> None:
    path = tmp_path / "ids.arrow"
    schema = pa.schema([("text", pa.string()), ("ids", pa.list_(pa.int32()))])
    with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(["a"]), pa.array([[1, 99]], pa.list_(pa.int32()))], schema=schema))
    with pytest.raises(SourceFormatError, match=r"the values of column 'text', text, are not token ids"):
        table(path, vocab_size=100)
    serve("--data", f"ids={path}", "--columns", "ids", "--vocab-size", "100")
    refusal = run_cli("load", f"again={path}", "--columns", "ids,text", "--vocab-size", "99")
    assert refusal.returncode == 1
    assert "token id 99 at position 1 is outside the vocabulary" in refusal.stderr
