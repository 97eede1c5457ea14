"""Promises on shared memory, kept by whole daemons and clients: too little of it, leftovers, other mounts, who pays."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from shmserve_client import ShmDataset
from shmserve_client.endpoint import lock_path
from tests.corpora import RAGGED, write_sparse, write_tokens
from tests.mounts import with_tmpfs
from tests.processes import Child, Daemon, run_python, wait_until

Serve = Callable[..., Daemon]

MIB = 1 << 20


@pytest.fixture
def memory_cgroup() -> Iterator[Callable[[int], Path]]:
    """A factory of real memory cgroups with a limit in bytes, below this process's own."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    is_v1 = "memory" in own
    parent = Path("/sys/fs/cgroup/memory" + own["memory"]) if is_v1 else Path("/sys/fs/cgroup" + own.get("", "/"))
    made: list[Path] = []

    def make(limit_nbytes: int) -> Path:
        group = parent / f"shmserve-test-{os.getpid()}-{len(made)}"
        try:
            group.mkdir()
            made.append(group)
            (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_nbytes))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        return group

    try:
        yield make
    finally:
        for group in made:
            wait_until(lambda: _removed(group), what=f"{group} to be empty")  # noqa: B023


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def used_nbytes(group: Path) -> int:
    (file,) = [path for name in ("memory.usage_in_bytes", "memory.current") if (path := group / name).exists()]
    return int(file.read_text())


def in_cgroup(group: Path, argv: list[object]) -> list[object]:
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', group, *argv]


def start_of(data: Path, shm_dir: Path, endpoint: str) -> list[object]:
    return [sys.executable, "-m", "shmserve", "start", "--data", data, "--shm-dir", shm_dir, "--endpoint", endpoint]


@pytest.mark.promise("F1")
@pytest.mark.parametrize("limit", ["tmpfs", "cgroup"])
def test_a_daemon_without_room_says_so_and_leaves_nothing(
    shm_dir: Path, runtime_dir: Path, tmp_path: Path, memory_cgroup: Callable[[int], Path], limit: str
) -> None:
    data = write_sparse(tmp_path / "corpus.bin", 256 * MIB)
    endpoint = f"ipc://{runtime_dir}/shmserve/daemon.sock"
    start = start_of(data, shm_dir, endpoint)
    argv = in_cgroup(memory_cgroup(128 * MIB), start) if limit == "cgroup" else with_tmpfs(shm_dir, "64m", start)
    with Child(argv, folder=tmp_path) as daemon:
        assert daemon.wait() == 3, daemon.describe()
        error = daemon.stderr.splitlines()[-1]
    assert error.startswith("error: the segment needs 256.0 MiB, but "), error
    assert ("memory limit of 128.0 MiB" if limit == "cgroup" else "(tmpfs, 64.0 MiB)") in error
    assert list(shm_dir.iterdir()) == []
    assert not Path(endpoint.removeprefix("ipc://")).exists()


@pytest.mark.promise("F2")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    "ending", ["raise SystemExit(7)", "raise RuntimeError", "os._exit(7)", "os.kill(os.getpid(), 9)"]
)
def test_a_rank_may_end_in_the_middle_of_an_epoch(serve: Serve, tmp_path: Path, ending: str) -> None:
    np.save(tmp_path / "corpus.npy", np.arange(64 * 8).reshape(64, 8))
    daemon = serve("--data", tmp_path / "corpus.npy")
    program = f"""
        import os, sys
        from torch.utils.data import DataLoader
        from shmserve_client import ShmDataset

        sys.excepthook = lambda *_: os._exit(7)  # the traceback is the program's own affair
        dataset = ShmDataset(endpoint="{daemon.endpoint}", lookup="daemon")
        for batch in DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="fork"):
            {ending}
    """
    with Child.python(program, folder=tmp_path) as rank:
        assert rank.wait() == (-9 if "kill" in ending else 7), rank.describe()
        assert rank.stderr == ""
    # Its workers, which torch ends in its own time, were killed with its session.
    wait_until(lambda: daemon.status().datasets[0].attached_pids == [], what="all to be gone")
    assert len(daemon.segments()) == 1
    assert ShmDataset(endpoint=daemon.endpoint)[63].tolist() == list(range(63 * 8, 64 * 8))


@pytest.mark.promise("F3")
def test_the_same_command_works_after_a_kill_of_the_whole_group(
    shm_dir: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    data = write_tokens(tmp_path / "corpus.bin")
    endpoint = f"ipc://{runtime_dir}/shmserve/daemon.sock"
    program = """
        import subprocess, sys, time
        from pathlib import Path
        started, endpoint, *start = sys.argv[1:]
        daemon = subprocess.Popen(start)
        from shmserve_client.connection import Connection
        from shmserve_client.errors import ShmserveError
        from shmserve_client.protocol import Attach
        from shmserve_client.segment import Segment
        while True:
            try:
                with Connection(endpoint, 10.0) as connection:
                    attached = connection.request(Attach("corpus"))
                break
            except ShmserveError:
                assert daemon.poll() is None
                time.sleep(0.01)
        segment = Segment.attach(attached.path, attached.nonce)
        assert segment.array(segment.description.columns[0].values).tolist() == list(range(1000))
        Path(started).touch()
        time.sleep(600)
    """
    for attempt in range(4):
        started = tmp_path / f"started-{attempt}"
        arguments = (started, endpoint, *start_of(data, shm_dir, endpoint))
        with Child.python(program, *arguments, folder=tmp_path) as group:
            wait_until(started.exists, 60, "daemon and client")
            assert len(list(shm_dir.iterdir())) == 1
            os.killpg(group.pid, signal.SIGKILL)
    with Child(start_of(data, shm_dir, endpoint), folder=tmp_path) as daemon:
        wait_until(lambda: daemon.stdout.startswith("ready"), 30, "the daemon")
        assert "corpus: adopted" in daemon.stderr
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


@pytest.mark.promise("F3")
def test_a_pid_that_is_in_use_again_does_not_matter(serve: Serve, tmp_path: Path) -> None:
    """Locks say who lives: a number in a file, which some other process has by now, says nothing."""
    killed = serve("--data", write_tokens(tmp_path / "corpus.bin"))
    killed.kill()
    Path(lock_path(str(killed.socket))).write_text(f"{os.getpid()}\n")
    again = serve("--data", tmp_path / "corpus.bin")
    assert again.status().datasets[0].adopted
    assert len(again.segments()) == 1


@pytest.mark.promise("F6")
@pytest.mark.parametrize("other", ["empty", "a segment of the same name"])
def test_a_container_with_another_dev_shm_is_told_so(serve: Serve, shm_dir: Path, tmp_path: Path, other: str) -> None:
    daemon = serve("--data", f"corpus={RAGGED}")
    (segment,) = daemon.segments()
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys
            from pathlib import Path
            from shmserve_client import ShmDataset
            from shmserve_client.errors import ShmserveError
            endpoint, segment, content = sys.argv[1:]
            assert not Path(segment).exists()
            if content:
                Path(segment).write_bytes(Path(content).read_bytes())
            try:
                print(ShmDataset(endpoint=endpoint, timeout=5)[0])
            except ShmserveError as error:
                print(error)
        """)
    )
    content: str | Path = ""
    if other != "empty":  # the same bytes, but for the nonce
        header = segment.read_bytes()
        elsewhere = serve("--data", f"corpus={RAGGED}", endpoint=f"ipc://{tmp_path}/other.sock")
        (another,) = set(elsewhere.segments()) - {segment}
        content = tmp_path / "segment"
        content.write_bytes(another.read_bytes())
        assert content.read_bytes() != header
    argv = with_tmpfs(shm_dir, "16m", [sys.executable, program, daemon.endpoint, segment, content])
    with Child(argv, folder=tmp_path) as client:
        assert client.wait() == 0, client.describe()
        assert "another shm directory than the daemon" in client.stdout, client.describe()


@pytest.mark.promise("F9")
def test_a_reader_pays_for_no_page_of_the_segment(
    serve: Serve, tmp_path: Path, memory_cgroup: Callable[[int], Path]
) -> None:
    nbytes = 64 * MIB
    daemon = serve("--data", write_sparse(tmp_path / "corpus.bin", nbytes))
    (segment,) = daemon.segments()
    assert segment.stat().st_blocks * 512 >= nbytes, "a hole is left"
    program = """
        import sys, time
        from pathlib import Path
        from shmserve_client.connection import Connection
        from shmserve_client.protocol import Attach
        from shmserve_client.segment import Segment
        with Connection(sys.argv[1], 10.0) as connection:
            attached = connection.request(Attach())
        values = Segment.attach(attached.path, attached.nonce)
        values = values.array(values.description.columns[0].values)
        print("attached", flush=True)
        while not Path(sys.argv[2]).exists():
            time.sleep(0.01)
        assert not values.any()
        print("read", flush=True)
        time.sleep(600)
    """
    go, group = tmp_path / "go", memory_cgroup(512 * MIB)
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    with Child(in_cgroup(group, [sys.executable, file, daemon.endpoint, go]), folder=tmp_path) as reader:
        wait_until(lambda: "attached" in reader.stdout, 30, "the reader")
        before = used_nbytes(group)
        go.touch()
        wait_until(lambda: "read" in reader.stdout, 30, "all to be read")
        assert used_nbytes(group) - before < nbytes // 4, reader.describe()


@pytest.mark.promise("F10")
def test_counts_are_those_of_the_source_and_not_of_pages(serve: Serve, tmp_path: Path) -> None:
    counts = [0, 1, 511, 512, 513, 262_143, 262_144, 262_145]  # of eight bytes, around a page and around 2 MiB
    for count in counts:
        np.save(tmp_path / f"of_{count}.npy", np.arange(count))
    daemon = serve(*(argument for count in counts for argument in ("--data", tmp_path / f"of_{count}.npy")))
    for count in counts:
        dataset = ShmDataset(f"of_{count}", endpoint=daemon.endpoint)
        assert len(dataset) == count
        assert [int(sample) for sample in dataset[-2:]] == list(range(count))[-2:]
        with pytest.raises(IndexError):
            dataset[count]
        assert daemon.status(f"of_{count}").datasets[0].num_samples == count
        dataset.close()


@pytest.mark.promise("F20")
def test_thousands_of_files_need_few_descriptors(
    serve: Serve, runtime_dir: Path, shm_dir: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(2500):
        (shards / f"part_{number}.bin").write_bytes(np.full(4, number, np.uint16).tobytes())
    endpoint = f"ipc://{runtime_dir}/shmserve/daemon.sock"
    limited = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh"]
    argv = [*limited, *start_of(shards, shm_dir, endpoint), "--dtype", "uint16"]
    with Child(argv, folder=tmp_path) as daemon:
        wait_until(lambda: daemon.stdout.startswith("ready"), 60, "the daemon")
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 60
        held = run_python(
            """
            import os, sys
            from shmserve_client import ShmDataset
            before = len(os.listdir("/proc/self/fd"))
            dataset = ShmDataset("shards", endpoint=sys.argv[1], block_size=4)
            assert [int(sample[0]) for sample in dataset] == list(range(2500))
            mapped = sum("shmserve-" in line for line in open("/proc/self/maps"))
            print(len(os.listdir("/proc/self/fd")) - before, mapped)
            """,
            endpoint,
        ).stdout
        descriptors, mappings = map(int, held.split())
        assert descriptors <= 2
        assert mappings <= 2
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
