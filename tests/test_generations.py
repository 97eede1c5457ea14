"""Datasets that come, change and go while a daemon runs: every process reads one generation, whole."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.catalog import Catalog, Failed, Loading, Ready
from shmserve.config import DatasetConfig
from shmserve.sources import resolve
from shmserve.sources.base import SourceOptions
from shmserve_client import ShmDataset
from shmserve_client.errors import (
    BlockSizeError,
    DatasetClosedError,
    DatasetNotFoundError,
    SegmentNotFoundError,
    ShmserveError,
)
from tests.corpora import write_sparse
from tests.processes import Child, Daemon, run_cli, wait_until
from tests.segments import write_tokens as write_segment_of

Serve = Callable[..., Daemon]

pytestmark = pytest.mark.promise("generations")


class Corpus:
    """A file of int32 samples, each of which holds the number of the version over and over."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "corpus.npy"

    def write(self, version: int, samples: int = 1000, width: int = 64) -> None:
        """Replace the file by that version, in one step, as careful people do."""
        temporary = self.path.with_suffix(".new")
        with open(temporary, "wb") as file:
            np.save(file, np.full((samples, width), version, np.int32))
        temporary.rename(self.path)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path)
    corpus.write(1)
    return corpus


@pytest.fixture
def daemon(serve: Serve, corpus: Corpus) -> Daemon:
    return serve("--data", corpus.path)


def command(daemon: Daemon, *args: object) -> subprocess.CompletedProcess[str]:
    return run_cli(*args, "--endpoint", daemon.endpoint)


def reload(daemon: Daemon, name: str = "corpus") -> None:
    done = command(daemon, "reload", name)
    assert done.returncode == 0, done.stderr


def is_whole(dataset: ShmDataset, version: int) -> bool:
    values = dataset.column()
    return isinstance(values, np.ndarray) and bool((values == version).all())


def test_those_attached_read_on_and_new_ones_get_the_new(daemon: Daemon, corpus: Corpus) -> None:
    first = ShmDataset(endpoint=daemon.endpoint)
    (before,) = daemon.segments()
    corpus.write(2, samples=500)
    reload(daemon)

    second = ShmDataset(endpoint=daemon.endpoint)
    assert is_whole(first, 1)
    assert is_whole(second, 2)
    assert (len(first), len(second)) == (1000, 500)
    assert (first.info.generation, second.info.generation) == (1, 2)
    report = daemon.status()
    (retired,) = report.retired
    assert (retired.name, retired.generation, retired.path) == ("corpus", 1, str(before))
    assert retired.attached_pids == [os.getpid()]
    assert 1000 * 64 * 4 <= retired.segment_nbytes < 2 << 20
    (status,) = report.datasets
    assert (status.generation, status.reload_state, status.source_changed) == (2, "", False)

    view = first[7]
    del first
    gc.collect()
    assert [segment.generation for segment in daemon.status().retired] == [1], "a sample still aliases it"
    del view
    gc.collect()
    wait_until(lambda: before not in daemon.segments(), what="the old memory was given back")
    wait_until(lambda: not daemon.status().retired)
    assert is_whole(second, 2)


def test_workers_of_those_attached_find_their_generation(daemon: Daemon, corpus: Corpus) -> None:
    first = ShmDataset(endpoint=daemon.endpoint)
    frozen = pickle.dumps(first)
    corpus.write(2)
    reload(daemon)

    program = """
        import pickle
        import sys

        dataset = pickle.loads(bytes.fromhex(sys.argv[1]))
        print(sorted(set(dataset.column().ravel().tolist())), dataset.info.generation)
    """
    with Child.python(program, frozen.hex(), folder=corpus.path.parent) as worker:
        assert worker.wait() == 0, worker.describe()
        assert worker.stdout == "[1] 1\n"
    assert is_whole(first, 1)


def test_the_daemon_resolves_indices_of_each_generation(daemon: Daemon, corpus: Corpus) -> None:
    first = ShmDataset(endpoint=daemon.endpoint, lookup="daemon")
    corpus.write(2, samples=2000)
    reload(daemon)

    second = ShmDataset(endpoint=daemon.endpoint, lookup="daemon")
    assert [sample[0].item() for sample in first.__getitems__([0, 999])] == [1, 1]
    assert [sample[0].item() for sample in second.__getitems__([0, 1999])] == [2, 2]
    assert first.refresh()
    assert [sample[0].item() for sample in first.__getitems__([0, 1999])] == [2, 2]


def test_refresh_moves_a_dataset_on(daemon: Daemon, corpus: Corpus) -> None:
    with ShmDataset(endpoint=daemon.endpoint, dtype=None) as ds:
        old_sample = ds[3]
        assert not ds.refresh()
        corpus.write(2, samples=1500, width=8)
        reload(daemon)
        assert (len(ds), ds[3].tolist()) == (1000, [1] * 64)

        assert ds.refresh()
        assert (len(ds), ds[1499].tolist(), ds.info.generation) == (1500, [2] * 8, 2)
        assert [sample.tolist() for sample in ds.__getitems__([3])] == [[2] * 8]
        assert ds.batch([0, 1]).values.tolist() == [[2] * 8] * 2
        assert old_sample.tolist() == [1] * 64
        assert pickle.loads(pickle.dumps(ds)).info.generation == 2
        assert not ds.refresh()
        del old_sample
    with pytest.raises(DatasetClosedError):
        ds.refresh()


def test_a_refresh_that_fails_changes_nothing(daemon: Daemon, corpus: Corpus) -> None:
    ds = ShmDataset(endpoint=daemon.endpoint, block_size=64)
    np.save(corpus.path, np.ones((10, 2, 2), np.complex64))
    with open(corpus.path, "wb") as file:
        np.save(file, np.arange(10, dtype=np.int32))
    reload(daemon)
    assert ds.refresh(), "a stream has windows as well"
    assert len(ds) == 0

    assert command(daemon, "unload", "corpus").returncode == 0
    with pytest.raises(DatasetNotFoundError, match="no dataset 'corpus' here, the daemon serves none"):
        ds.refresh()
    assert (len(ds), ds.info.generation) == (0, 2)


def test_options_that_do_not_fit_the_new_generation(daemon: Daemon, corpus: Corpus) -> None:
    ds = ShmDataset(endpoint=daemon.endpoint)
    tokens = corpus.path.with_name("tokens.npy")
    np.save(tokens, np.arange(100, dtype=np.int32))
    tokens.rename(corpus.path)
    reload(daemon)

    later = ShmDataset(endpoint=daemon.endpoint)
    assert (later.info.num_samples, later.info.generation) == (100, 2)
    assert ds.refresh()
    assert ds[99].item() == 99
    raw = corpus.path.with_name("raw.bin")
    np.arange(100, dtype=np.uint16).tofile(raw)
    assert command(daemon, "load", f"stream={raw}", "--dtype", "uint16").returncode == 0
    with pytest.raises(BlockSizeError):
        ShmDataset("stream", endpoint=daemon.endpoint)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
        (lambda path: path.write_text("text, and not an array\n" * 100), "text is not tokens"),
    ],
    ids=["gone", "truncated", "of another format"],
)
def test_a_reload_that_fails_changes_nothing(
    daemon: Daemon, corpus: Corpus, spoil: Callable[[Path], Any], reason: str
) -> None:
    before = daemon.segments()
    first = ShmDataset(endpoint=daemon.endpoint)
    spoil(corpus.path)

    done = command(daemon, "reload", "corpus")

    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert daemon.segments() == before
    assert not first.refresh()
    assert is_whole(ShmDataset(endpoint=daemon.endpoint), 1)
    (status,) = daemon.status().datasets
    assert (status.state, status.generation, status.reload_state) == ("ready", 1, "failed")
    assert reason in status.reload_error
    shown = command(daemon, "status")
    assert shown.returncode == 0
    assert "reload    failed, this is served as before: " in shown.stdout

    corpus.write(3)
    reload(daemon)
    assert first.refresh()
    assert is_whole(first, 3)
    (status,) = daemon.status().datasets
    assert (status.generation, status.reload_state, status.reload_error) == (2, "", "")


def test_a_reload_without_room_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    source = tmp_path / "tokens.bin"
    write_sparse(source, 1 << 20)
    daemon = serve("--data", source, "--dtype", "uint16")
    before = daemon.segments()
    write_sparse(source, 1 << 40)

    done = command(daemon, "reload", "tokens")

    assert done.returncode == 1
    assert "out of" in done.stderr or "needs" in done.stderr
    assert daemon.segments() == before
    (status,) = daemon.status().datasets
    assert (status.state, status.reload_state) == ("ready", "failed")


@pytest.mark.slow
def test_each_of_64_processes_sees_one_generation_whole(daemon: Daemon, corpus: Corpus) -> None:
    program = """
        import json
        import os
        import sys

        from shmserve_client.attaching import attach_served
        from shmserve_client.protocol import Attach

        endpoint, processes = sys.argv[1], int(sys.argv[2])

        def reader(stop, out):
            counts = {}
            while not os.path.exists(stop):
                attached, segment = attach_served(
                    endpoint, Attach("corpus"), timeout_s=60, patience_s=60
                )
                values = segment.array(segment.description.columns[0].values)
                version = int(values[0, 0])
                assert (values == version).all(), "a mix of generations"
                assert values.shape[0] == 1000 + version, "the length of another generation"
                generation = segment.header.generation
                counts[generation] = counts.get(generation, 0) + 1
                del values, segment
            os.write(out, (json.dumps(counts) + "\\n").encode())  # short: one write, whole

        stop = sys.argv[3]
        read_end, write_end = os.pipe()
        children = []
        for _ in range(processes):
            child = os.fork()
            if not child:
                status = 1
                try:
                    reader(stop, write_end)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        print("ready", flush=True)
        os.close(write_end)
        with open(read_end) as lines:
            for line in lines:
                print(line, end="")
        sys.exit(any(os.waitpid(child, 0)[1] for child in children))
    """
    corpus.write(1, samples=1001)
    reload(daemon)
    stop = corpus.path.with_name("stop")
    endpoint = daemon.endpoint.removeprefix("ipc://")
    with Child.python(program, endpoint, 64, stop, folder=corpus.path.parent) as readers:
        wait_until(lambda: "ready" in readers.stdout, 60)
        for version in range(2, 12):
            corpus.write(version, samples=1000 + version)
            reload(daemon)
        stop.touch()
        assert readers.wait(60) == 0, readers.describe()
        assert readers.stderr == ""
    counts = [json.loads(line) for line in readers.stdout.splitlines()[1:]]
    assert len(counts) == 64
    assert {int(generation) for of_one in counts for generation in of_one} >= {3, 5, 7, 9}, "they ran meanwhile"
    wait_until(lambda: len(daemon.segments()) == 1, what="only the last generation is left")


def test_more_datasets_are_loaded_and_unloaded(daemon: Daemon, corpus: Corpus) -> None:
    tokens = corpus.path.with_name("tokens.bin")
    np.arange(1000, dtype=np.uint16).tofile(tokens)
    done = command(
        daemon,
        "load",
        f"more={tokens}",
        "--dtype",
        "uint16",
        "--vocab-size",
        1000,
        "--block-size",
        101,
        "--stride",
        100,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "more: loaded in" in done.stderr
    more = ShmDataset("more", endpoint=daemon.endpoint)
    assert (len(more), more[1][:2].tolist()) == (9, [100, 101])
    assert command(daemon, "ls").stdout.splitlines() == ["corpus", "more"]

    again = command(daemon, "load", f"more={tokens}")
    assert again.returncode == 1
    assert again.stderr.startswith("error: a dataset 'more' is here already: ")

    gone = command(daemon, "unload", "more")
    assert (gone.returncode, gone.stderr) == (0, "unloaded more; 1 reader of it left\n")
    with pytest.raises(DatasetNotFoundError, match="no dataset 'more' here, the daemon serves corpus"):
        ShmDataset("more", endpoint=daemon.endpoint)
    assert more[8][-1].item() == 900
    assert len(daemon.segments()) == 2
    more.close()
    del more
    gc.collect()
    wait_until(lambda: len(daemon.segments()) == 1)


def test_what_could_not_be_loaded_says_why_and_can_be_tried_again(daemon: Daemon, corpus: Corpus) -> None:
    late = corpus.path.with_name("late.npy")
    for _ in range(2):
        done = command(daemon, "load", f"late={late}")
        assert done.returncode == 1
        assert done.stderr == f"error: {late}: no such file, directory or prefix of a .bin/.idx pair\n"
    shown = command(daemon, "status", "late")
    assert shown.returncode == 1
    assert "late: failed, " in shown.stdout
    np.save(late, np.ones((3, 2), np.int32))
    reload(daemon, "late")
    assert len(ShmDataset("late", endpoint=daemon.endpoint)) == 3
    assert command(daemon, "status").returncode == 0


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["reload", "other"], "no dataset 'other' here, the daemon serves corpus"),
        (["unload", "other"], "no dataset 'other' here, the daemon serves corpus"),
        (["load", "a/b=x", "--stride", 3], "stride 3 without a block-size"),
        (["load", "x", "--vocab-size", 0], "vocab-size 0 must be at least 1"),
    ],
)
def test_impossible_orders_are_refused(daemon: Daemon, args: list[object], reason: str) -> None:
    done = command(daemon, *args)
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_unload_gives_up_loading(daemon: Daemon, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    write_sparse(large, 6 << 30)
    argv = ["load", f"large={large}", "--dtype", "uint16", "--endpoint", daemon.endpoint]
    with Child(["python", "-m", "shmserve", *argv], folder=tmp_path) as loading:
        wait_until(lambda: any(one.name == "large" and one.loaded_nbytes for one in daemon.status().datasets))
        busy = command(daemon, "reload", "large")
        assert busy.returncode == 1
        assert "dataset 'large' is being loaded" in busy.stderr
        assert command(daemon, "unload", "large").returncode == 0
        assert loading.wait() == 1
        assert "no dataset 'large' here" in loading.stderr
    assert [one.name for one in daemon.status().datasets] == ["corpus"]
    assert command(daemon, "load", f"large={daemon.status().datasets[0].data[0]}").returncode == 0
    assert len(daemon.segments()) == 2


def test_nothing_is_ordered_before_the_start_is_over(serve: Serve, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    write_sparse(large, 6 << 30)
    daemon = serve("--data", large, "--dtype", "uint16", wait=False)
    wait_until(daemon.socket.exists)
    wait_until(lambda: daemon.status().datasets[0].loaded_nbytes)
    done = command(daemon, "unload", "large")
    assert done.returncode == 1
    assert "the daemon still loads what it was started with" in done.stderr


def test_sigterm_leaves_what_is_read_of_every_generation(
    daemon: Daemon, corpus: Corpus, run_gc: Callable[..., Any]
) -> None:
    first = ShmDataset(endpoint=daemon.endpoint)
    corpus.write(2)
    reload(daemon)
    (old,) = [segment.path for segment in daemon.status().retired]

    assert daemon.stop() == 0

    assert [str(path) for path in daemon.segments()] == [old]
    assert f"corpus: {old} stays for its 1 reader: `shmserve gc`" in daemon.stderr
    assert is_whole(first, 1)
    del first
    gc.collect()
    run_gc()
    assert daemon.segments() == []


@pytest.mark.promise("F3")
def test_after_a_kill_the_last_generation_is_adopted(daemon: Daemon, corpus: Corpus, serve: Serve) -> None:
    first = ShmDataset(endpoint=daemon.endpoint)
    reload(daemon)  # of the same files: both generations fit them
    second = ShmDataset(endpoint=daemon.endpoint)
    daemon.kill()

    again = serve("--data", corpus.path)

    (status,) = again.status().datasets
    assert (status.adopted, status.generation, status.path) == (True, 2, second.info.path)
    assert is_whole(first, 1)
    assert is_whole(second, 1)
    assert len(again.segments()) == 2
    first.close()
    second.close()
    del first, second
    gc.collect()
    wait_until(lambda: [str(path) for path in again.segments()] == [status.path], what="only the adopted one is left")


def test_a_watch_that_comes_late_does_not_bring_back_a_former_generation(shm_dir: Path, corpus: Corpus) -> None:
    config = DatasetConfig("corpus", (str(corpus.path),))
    catalog = Catalog([config])
    resolved = resolve(config.data, SourceOptions())
    first, second = (Ready(write_segment_of(shm_dir, np.full(10, number)), resolved, False, 0.0) for number in (1, 2))
    try:
        assert catalog.put(config, first)
        assert catalog.put_successor(config, Loading())
        assert catalog.put(config, second)
        catalog.mark_changed(first, True)
        assert catalog.get("corpus").state is second
        assert catalog.retired == (first.segment,)
        catalog.mark_changed(second, True)
        assert catalog.ready()["corpus"].source_changed

        catalog.remove(config)
        other = DatasetConfig("corpus", ("/other",))
        catalog.add(other)
        assert not catalog.put(config, Failed(ShmserveError("of the former"))), "the same name, but another dataset"
        assert catalog.get("corpus").state == Loading()
        catalog.release_retired()
        assert catalog.retired == ()
        assert list(shm_dir.iterdir()) == []
    finally:
        for ready in (first, second):
            ready.segment.close()


@pytest.mark.promise("F4")
def test_a_segment_without_a_name_is_handed_out_until_a_reload(daemon: Daemon, corpus: Corpus) -> None:
    first = ShmDataset(endpoint=daemon.endpoint)
    (path,) = daemon.segments()
    path.unlink()

    second = ShmDataset(endpoint=daemon.endpoint)
    assert second.info.path.startswith(f"/proc/{daemon.pid}/fd/")
    assert is_whole(first, 1)
    assert is_whole(second, 1)
    program = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1]))[0][0].item())"
    with Child.python(program, pickle.dumps(second).hex(), folder=corpus.path.parent) as worker:
        assert worker.wait() == 0, worker.describe()
        assert worker.stdout == "1\n"
    shown = command(daemon, "status")
    assert shown.returncode == 0
    assert f"{path} was removed from under the daemon" in shown.stdout
    assert daemon.segments() == [], "no second copy"

    reload(daemon)
    assert len(daemon.segments()) == 1
    assert second.refresh()
    assert second.info.path == str(daemon.segments()[0])


@pytest.mark.promise("F4")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for another pid namespace")
def test_a_segment_without_a_name_is_out_of_reach_elsewhere(daemon: Daemon, tmp_path: Path) -> None:
    (path,) = daemon.segments()
    path.unlink()
    program = tmp_path / "attach.py"
    program.write_text(f"from shmserve_client import ShmDataset\nShmDataset(endpoint={daemon.endpoint!r}, timeout=5)\n")
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "python", program]
    with Child(argv, folder=tmp_path) as elsewhere:
        assert elsewhere.wait() == 1
        assert "SegmentNotFoundError: the segment's name was removed from under its daemon" in elsewhere.stderr
    assert issubclass(SegmentNotFoundError, FileNotFoundError)


def test_an_embedded_daemon_waits_for_readers_of_every_generation(
    corpus: Corpus, runtime_dir: Path, serve: Serve
) -> None:
    daemon = serve("--data", corpus.path, "--linger", 1)
    first = ShmDataset(endpoint=daemon.endpoint)
    corpus.write(2)
    reload(daemon)
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.process.wait(4)
    first.close()
    del first
    gc.collect()
    assert daemon.wait() == 0


def test_a_reload_ends_with_the_daemon(daemon: Daemon, corpus: Corpus, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    write_sparse(large, 6 << 30)
    argv = ["load", f"large={large}", "--dtype", "uint16", "--endpoint", daemon.endpoint]
    with Child(["python", "-m", "shmserve", *argv], folder=tmp_path) as loading:
        wait_until(lambda: any(one.name == "large" and one.loaded_nbytes for one in daemon.status().datasets))
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(5) == 0
        assert loading.wait() == 1
        assert loading.stderr.startswith("error: ") or "\nerror: " in loading.stderr
    assert daemon.segments() == []
