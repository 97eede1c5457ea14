"""`ShmDataset.from_path`: a daemon where there is none, one for all who ask, gone when nobody needs it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shmserve_client import (
    ConfigError,
    DaemonStartError,
    EndpointError,
    ShmDataset,
    ShmserveError,
    SourceFormatError,
    SourceNotFoundError,
)
from shmserve_client import embedded as embedded_module
from shmserve_client.connection import Connection
from shmserve_client.protocol import Status, StatusReport
from tests.corpora import RAGGED
from tests.fake_daemon import FakeDaemon, serving
from tests.processes import Child, Daemon, run_cli, wait_until

Serve = Callable[..., Daemon]
RunGc = Callable[..., subprocess.CompletedProcess[str]]
LINGER_S = 1.0
"""Less than from_path grants outside of these tests, which is:"""
GRANTED_LINGER_S = embedded_module._LEAST_LINGER_S


class Embedded:
    """What from_path has started: their directory, their sockets, and what they say."""

    def __init__(self, runtime_dir: Path, shm_dir: Path) -> None:
        self.directory = runtime_dir / "shmserve"
        self.shm_dir = shm_dir
        self.env = {"SHMSERVE_SHM_DIR": str(shm_dir)}
        """For children that call from_path."""

    def sockets(self) -> list[Path]:
        return sorted(self.directory.glob("e-*.sock"))

    def status(self, socket: Path | None = None) -> StatusReport:
        (only,) = [socket] if socket else self.sockets()
        with Connection(only, timeout_s=10) as connection:
            report = connection.request(Status())
        assert isinstance(report, StatusReport)
        return report

    def wait_gone(self) -> None:
        """Return when the daemons have ended by themselves, with their sockets and segments."""
        wait_until(lambda: not self.sockets() and not list(self.shm_dir.iterdir()), 15, "the daemons' own end")
        assert not list(self.directory.glob("*.start"))


@pytest.fixture
def embedded(runtime_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Embedded]:
    monkeypatch.setattr("shmserve_client.embedded._LEAST_LINGER_S", LINGER_S)
    started = Embedded(runtime_dir, shm_dir)
    for name, value in started.env.items():
        monkeypatch.setenv(name, value)
    yield started
    started.wait_gone()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.npy"
    np.save(path, np.arange(12, dtype=np.int32).reshape(6, 2))
    return path


def test_a_daemon_is_started_used_again_and_ends(embedded: Embedded, corpus: Path) -> None:
    with ShmDataset.from_path(corpus, linger=LINGER_S) as first:
        assert first[1].tolist() == [2, 3]
        report = embedded.status()
        with ShmDataset.from_path(str(corpus), linger=LINGER_S, block_size=4) as second:
            assert second[1].tolist() == [4, 5, 6, 7]
            assert embedded.status().pid == report.pid
            assert second.info.path == first.info.path
        assert report.datasets[0].data == [str(corpus)]
        time.sleep(2 * LINGER_S)  # not a wait for something, but for nothing to happen
        assert embedded.status().pid == report.pid, "it ended while somebody had its segment"
    embedded.wait_gone()


def test_the_daemon_is_on_its_own(embedded: Embedded, corpus: Path) -> None:
    with ShmDataset.from_path(corpus, linger=LINGER_S):
        daemon = psutil.Process(embedded.status().pid)
        assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)
        assert daemon.ppid() != os.getpid()
        targets = {number: os.readlink(f"/proc/{daemon.pid}/fd/{number}") for number in (0, 1, 2)}
        log = f"{embedded.sockets()[0]}.log"
        assert targets[0] == "/dev/null"
        assert targets[2] == log
        ours = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)} - {"/dev/null"}
        theirs = {os.readlink(f"/proc/{daemon.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{daemon.pid}/fd")}
        assert not ours & theirs, "it holds this process's terminal or pipes"
        assert "corpus" in Path(log).read_text()


@pytest.mark.promise("F7")
def test_many_processes_share_one_daemon_and_one_load(embedded: Embedded, corpus: Path, tmp_path: Path) -> None:
    count = 32
    program = """
        import sys, time, pathlib
        from shmserve_client import ShmDataset
        dataset = ShmDataset.from_path(sys.argv[1], linger=3.0)
        assert dataset[5].tolist() == [10, 11]
        print(dataset.info.path, flush=True)
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.02)
    """
    done = tmp_path / "done"
    children = [Child.python(program, corpus, done, folder=tmp_path, env=embedded.env) for _ in range(count)]
    try:
        wait_until(lambda: all(child.stdout or child.process.poll() for child in children), 100, "all to attach")
        assert not [child.describe() for child in children if not child.stdout]
        report = embedded.status()
        assert len({child.stdout for child in children}) == 1, [child.describe() for child in children]
        assert set(report.datasets[0].attached_pids) == {child.pid for child in children}
        assert len(list(embedded.shm_dir.iterdir())) == 1
        log = Path(f"{embedded.sockets()[0]}.log").read_text()
        assert len(re.findall(r"(?m)^ready: ", log)) == 1, log
        done.touch()
        assert [child.wait() for child in children] == [0] * count
        assert "".join(child.stderr for child in children) == ""
    finally:
        done.touch()
        for child in children:
            child.close()


def test_the_nodes_daemon_is_used_where_it_serves_the_files(
    serve: Serve, embedded: Embedded, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = serve("--data", f"mine={corpus}", "--vocab-size", 50)
    (tmp_path / "link").symlink_to(corpus)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for data, options in [
        (corpus, {}),
        ("corpus.npy", {"vocab_size": 50}),
        (tmp_path, {}),
        ("*.npy", {}),
        ("link", {}),
        ("~/corpus.npy", {}),
    ]:
        with ShmDataset.from_path(data, **options) as dataset:
            assert (dataset.name, dataset[0].tolist()) == ("mine", [0, 1])
            assert daemon.status().datasets[0].attached_pids == [os.getpid()]
    assert embedded.sockets() == []
    with ShmDataset.from_path(corpus, vocab_size=100, linger=LINGER_S) as other:
        assert other.name == "corpus", "who asks for a check gets that check"
        assert len(embedded.sockets()) == 1
    daemon.stop()


def test_a_pair_is_one_source_however_it_is_named(embedded: Embedded, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(RAGGED.with_suffix(suffix), tmp_path / f"pair{suffix}")
    with ShmDataset.from_path(tmp_path / "pair", linger=LINGER_S) as first:
        for name in ("pair.bin", "pair.idx", ""):
            with ShmDataset.from_path(tmp_path / name, linger=LINGER_S) as again:
                assert again.info.path == first.info.path
        assert len(embedded.sockets()) == 1


def test_daemons_that_hang_cost_all_processes_one_wait(
    serve: Serve, embedded: Embedded, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = serve("--data", f"other={RAGGED}")
    with ShmDataset.from_path(corpus, linger=LINGER_S):
        slot = embedded.status()
        for pid in (node.pid, slot.pid):
            os.kill(pid, signal.SIGSTOP)
        program = """
            import sys, time
            from shmserve_client import ShmDataset
            started_s = time.monotonic()
            dataset = ShmDataset.from_path(sys.argv[1], linger=3.0, timeout=2.0)
            assert dataset[5].tolist() == [10, 11]
            print(time.monotonic() - started_s, dataset.info.path, flush=True)
            sys.stdin.read()
        """
        children = [Child.python(program, corpus, folder=tmp_path, env=embedded.env) for _ in range(4)]
        try:
            assert [child.wait(60) for child in children] == [0] * 4
        finally:
            for child in children:
                child.close()
            for pid in (node.pid, slot.pid):
                os.kill(pid, signal.SIGCONT)
        answers = [child.stdout.split() for child in children]
        assert len({path for _, path in answers}) == 1, "one new daemon for all"
        node.stop()
        # Two waits of 2 s, side by side; one after the other would be 8 s more for the last.
        assert max(float(took_s) for took_s, _ in answers) < 10


def test_changed_files_are_loaded_anew(embedded: Embedded, corpus: Path) -> None:
    with ShmDataset.from_path(corpus, linger=LINGER_S) as old:
        np.save(corpus, np.full((2, 2), 7, np.int32))
        with ShmDataset.from_path(corpus, linger=LINGER_S) as new:
            assert (len(new), new[0].tolist()) == (2, [7, 7])
            assert (len(old), old[5].tolist()) == (6, [10, 11])
            assert len(embedded.sockets()) == 2
            with ShmDataset.from_path(corpus, linger=LINGER_S) as again:
                assert again.info.path == new.info.path
                assert len(embedded.sockets()) == 2


def test_several_paths_are_the_shards_of_one_dataset(embedded: Embedded, tmp_path: Path) -> None:
    for number, path in enumerate(("b=1.bin", "a.bin")):
        (tmp_path / path).write_bytes(np.full(3, number, np.uint32).tobytes())
    paths = [tmp_path / "b=1.bin", tmp_path / "a.bin"]
    with ShmDataset.from_path(*paths, stored_dtype="uint32", vocab_size=2, block_size=6, linger=LINGER_S) as dataset:
        assert dataset[0].tolist() == [0, 0, 0, 1, 1, 1]
        assert dataset.info.data == tuple(map(str, paths))
        assert dataset.info.dtypes == {"tokens": "uint32"}


@pytest.mark.parametrize(
    ("content", "options", "error", "told"),
    [
        (None, {}, SourceNotFoundError, r"corpus\.bin: no such file"),
        (b"PK\3\4 and so on", {}, SourceFormatError, r"corpus\.bin"),
        (b"\1\0", {"stored_dtype": "uint61"}, ConfigError, "dtype 'uint61' is not known"),
        (b"\1\0", {"vocab_size": 0}, ConfigError, "vocab_size 0 must be at least 1"),
        (b"", {}, DaemonStartError, r"corpus\.bin"),
        (b"\1\0\2\0\xff\xff", {"vocab_size": 100}, DaemonStartError, "65535"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    embedded: Embedded,
    tmp_path: Path,
    content: bytes | None,
    options: dict[str, Any],
    error: type[ShmserveError],
    told: str,
) -> None:
    path = tmp_path / "corpus.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=told) as caught:
        ShmDataset.from_path(path, block_size=2, linger=LINGER_S, **options)
    message = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in message
    assert not message.startswith("error:")
    assert embedded.sockets() == []
    with pytest.raises(ConfigError, match="no data: give at least one path"):
        ShmDataset.from_path()


def test_the_settings_of_another_daemon_do_not_reach_it(
    embedded: Embedded, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DATA", "/nowhere"), ("BLOCK_SIZE", "3"), ("READY_FD", "99"), ("LINGER", "no number")):
        monkeypatch.setenv(f"SHMSERVE_{name}", value)
    with ShmDataset.from_path(corpus, linger=LINGER_S) as dataset:
        assert dataset[0].tolist() == [0, 1]


def test_ctrl_c_ends_the_script_and_not_the_daemon(embedded: Embedded, corpus: Path, tmp_path: Path) -> None:
    program = """
        import sys, signal
        from shmserve_client import ShmDataset
        dataset = ShmDataset.from_path(sys.argv[1], linger=1.0)
        print(dataset[0].tolist(), flush=True)
        signal.pause()
    """
    with Child.python(program, corpus, folder=tmp_path, env=embedded.env) as child:
        wait_until(lambda: child.stdout, 60, "the dataset")
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        assert child.wait() != 0
        assert child.stderr.splitlines()[-1] == "KeyboardInterrupt"
        assert embedded.status().datasets[0].state == "ready"


def test_a_daemon_that_was_killed_is_replaced(embedded: Embedded, corpus: Path) -> None:
    first = ShmDataset.from_path(corpus, linger=LINGER_S)
    os.kill(embedded.status().pid, signal.SIGKILL)
    assert first[2].tolist() == [4, 5]
    with ShmDataset.from_path(corpus, linger=LINGER_S) as second:
        assert second[2].tolist() == [4, 5]
        report = embedded.status()
        assert report.datasets[0].adopted
        assert second.info.path == first.info.path
    first.close()


def test_without_linger_it_still_gets_attached(
    embedded: Embedded, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmserve_client.embedded._LEAST_LINGER_S", GRANTED_LINGER_S)
    with ShmDataset.from_path(corpus, linger=0.0) as dataset:
        assert dataset[2].tolist() == [4, 5]


def test_the_slot_of_a_daemon_that_is_ending_is_left_alone(embedded: Embedded, corpus: Path) -> None:
    with ShmDataset.from_path(corpus, linger=LINGER_S):
        (socket,) = embedded.sockets()
        socket.rename(socket.with_suffix(".away"))  # as when it has closed its socket, and still has its lock
        with ShmDataset.from_path(corpus, linger=LINGER_S) as second:
            assert second[2].tolist() == [4, 5]
            assert [path.name[-7:] for path in embedded.sockets()] == [".1.sock"]
        socket.with_suffix(".away").rename(socket)


def test_a_module_in_the_current_directory_does_no_harm(embedded: Embedded, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('the wrong module')")
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        "sys.path.pop(0)\n"  # a script that is started elsewhere, with this as its current directory
        "from shmserve_client import ShmDataset\n"
        "print(ShmDataset.from_path(sys.argv[1], linger=1.0)[0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, program, corpus], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")


def test_a_guess_about_the_files_is_a_warning(embedded: Embedded, tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "corpus.bin")
    options = {"block_size": 10, "linger": LINGER_S}
    with pytest.warns(UserWarning, match=r"dataset 'corpus': .*stored_dtype=") as caught:
        ShmDataset.from_path(tmp_path / "corpus.bin", **options)
    assert any("did you mean" in str(warning.message) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ShmDataset.from_path(tmp_path / "corpus.bin", stored_dtype="uint32", **options)


@pytest.mark.parametrize("options", [{"timeout": "x"}, {"linger": float("nan")}])
def test_what_is_no_time_is_refused_before_anything_starts(
    embedded: Embedded, corpus: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="give a number of seconds"):
        ShmDataset.from_path(corpus, **options)
    assert embedded.sockets() == []


def test_a_daemon_in_a_directory_of_others_is_not_asked(embedded: Embedded, corpus: Path, tmp_path: Path) -> None:
    with ShmDataset.from_path(corpus, linger=LINGER_S):
        (socket,) = embedded.sockets()
    embedded.wait_gone()
    embedded.directory.chmod(0o777)
    nonce = secrets.token_bytes(16)
    with FakeDaemon(socket, serving(str(tmp_path / "theirs"), nonce)) as theirs:
        with pytest.raises(EndpointError, match="open to other users"):
            ShmDataset.from_path(corpus)
        assert theirs.requests == []
    embedded.directory.chmod(0o700)


def test_a_starter_that_is_killed_leaves_its_turn_to_the_daemon(
    embedded: Embedded, tmp_path: Path, run_gc: RunGc
) -> None:
    large = tmp_path / "large.bin"
    with open(large, "wb") as file:
        file.truncate(1 << 30)
    program = """
        import sys
        from shmserve_client import ShmDataset
        ShmDataset.from_path(sys.argv[1], stored_dtype="uint16", block_size=8)
    """
    with Child.python(program, large, folder=tmp_path, env=embedded.env) as first:
        wait_until(embedded.sockets, 20, "the daemon's socket")
        first.kill()  # not its session: what it started goes on
        with ShmDataset.from_path(large, stored_dtype="uint16", block_size=8, linger=LINGER_S) as dataset:
            assert dataset[0].tolist() == [0] * 8
            assert len(embedded.sockets()) == 1
            daemon = psutil.Process(embedded.status().pid)
    daemon.terminate()  # it lingers as long as the one that was killed wanted
    (turn,) = embedded.directory.glob("*.start")  # nobody had to wait for it
    assert str(turn) in run_gc().stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stored_dtype": np.uint16}, "stored_dtype .* a numpy name"),
        ({"vocab_size": "a"}, "vocab_size 'a'"),
        ({"vocab_size": 1 << 70}, "vocab_size 1180591620717411303424"),
    ],
)
def test_what_is_no_option_of_a_source_is_refused(
    embedded: Embedded, corpus: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShmserveError, match=message):
        ShmDataset.from_path(corpus, **options)
    assert embedded.sockets() == []


def test_it_may_stay_for_ever(embedded: Embedded, corpus: Path) -> None:
    with ShmDataset.from_path(corpus, linger=float("inf"), vocab_size=np.int64(12)) as dataset:
        assert dataset[0].tolist() == [0, 1]
    assert run_cli("stop", "--endpoint", embedded.sockets()[0]).returncode == 0
