"""What becomes of segments whose daemon is gone: adopted, kept for those who read them, or removed; never another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve import orphans
from shmserve_client.connection import Connection
from shmserve_client.layout import HEADER
from shmserve_client.locks import take_owner_lock
from shmserve_client.protocol import Attach, Attached, DatasetStatus
from shmserve_client.segment import Segment, read_prefix
from tests.corpora import RAGGED, write_tokens
from tests.processes import Child, Daemon, run_cli, wait_until

Serve = Callable[..., Daemon]
RunGc = Callable[..., subprocess.CompletedProcess[str]]


def attach(daemon: Daemon) -> Segment:
    with Connection(daemon.endpoint, 5.0) as connection:
        reply = connection.request(Attach())
    assert isinstance(reply, Attached)
    return Segment.attach(reply.path, reply.nonce)


def tokens_of(segment: Segment) -> list[int]:
    tokens: list[int] = segment.array(segment.description.columns[0].values).tolist()
    return tokens


def only(daemon: Daemon) -> DatasetStatus:
    (status,) = daemon.status().datasets
    return status


def nonce_of(path: str | Path) -> bytes:
    nonce: bytes = HEADER.unpack(Path(path).read_bytes()[: HEADER.size])[3]
    return nonce


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "corpus.bin")


@pytest.mark.promise("F3")
def test_the_next_start_adopts_what_a_killed_daemon_left(serve: Serve, corpus: Path) -> None:
    killed = serve("--data", corpus)
    before = only(killed)
    nonce = nonce_of(before.path)
    assert not before.adopted
    killed.kill()
    again = serve("--data", corpus)
    after = only(again)
    assert after.adopted
    assert after.load_seconds < 1
    assert (after.path, nonce_of(after.path)) == (before.path, nonce)
    assert [str(path) for path in again.segments()] == [before.path]
    assert "corpus: adopted" in again.stderr
    assert tokens_of(attach(again)) == list(range(1000))


def test_clients_read_on_while_the_daemon_is_killed_and_replaced(serve: Serve, corpus: Path) -> None:
    killed = serve("--data", corpus)
    segment = attach(killed)
    killed.kill()
    assert tokens_of(segment) == list(range(1000))
    again = serve("--data", corpus)
    assert only(again).adopted
    assert only(again).attached_pids == [os.getpid()]
    assert tokens_of(segment) == list(range(1000))
    del segment


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_restart_under_attached_clients_keeps_the_segment(serve: Serve, corpus: Path, signum: signal.Signals) -> None:
    first = serve("--data", corpus)
    segment = attach(first)
    path = only(first).path
    first.send_signal(signum)
    assert first.wait(timeout_s=2.0) == 0
    assert [str(one) for one in first.segments()] == [path]
    assert not first.socket.exists()
    assert f"corpus: {path} stays for its 1 reader: the next start adopts it, `shmserve gc` removes it" in first.stderr
    second = serve("--data", corpus)
    assert only(second).adopted
    assert only(second).path == path
    del segment
    assert second.stop() == 0
    assert second.segments() == []


def test_stop_removes_the_segment_though_it_is_read(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    segment = attach(daemon)
    stopped = run_cli("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "")
    assert daemon.wait(timeout_s=1.0) == 0
    assert daemon.segments() == []
    assert tokens_of(segment) == list(range(1000))
    del segment


def rewrite(corpus: Path) -> list[object]:
    write_tokens(corpus, 1000, first=5)
    return ["--data", corpus]


def touch(corpus: Path) -> list[object]:
    os.utime(corpus, ns=(1, 1))
    return ["--data", corpus]


def replace(corpus: Path) -> list[object]:
    status = corpus.stat()
    other = write_tokens(corpus.with_name("other"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(corpus)  # the same path, size and time, but another inode
    return ["--data", corpus]


def other_option(corpus: Path) -> list[object]:
    return ["--data", corpus, "--vocab-size", 1000]


def other_name(corpus: Path) -> list[object]:
    return ["--data", f"other={corpus}"]


@pytest.mark.promise("F30")
@pytest.mark.parametrize("change", [rewrite, touch, replace, other_option, other_name])
def test_what_does_not_fit_is_loaded_anew_and_the_old_removed(
    serve: Serve, corpus: Path, change: Callable[[Path], list[object]]
) -> None:
    killed = serve("--data", corpus)
    old = only(killed).path
    killed.kill()
    again = serve(*change(corpus))
    assert not only(again).adopted
    assert [str(path) for path in again.segments()] == [only(again).path] != [old]


def test_what_does_not_fit_but_is_read_stays_until_it_is_not(
    serve: Serve, corpus: Path, shm_dir: Path, run_gc: RunGc
) -> None:
    killed = serve("--data", corpus)
    segment = attach(killed)
    old = only(killed).path
    killed.kill()
    again = serve(*rewrite(corpus))
    assert not only(again).adopted
    assert {str(path) for path in again.segments()} == {old, only(again).path}
    assert f"{old} is kept" in again.stderr
    assert Segment.attach(old, segment.header.nonce) is segment  # new workers of the old job find it
    gc = run_gc()
    assert gc.stdout == f"kept {old} (8.0 KiB): attached by {os.getpid()}\n"
    del segment
    gc = run_gc()
    assert gc.stdout == f"removed {old} (8.0 KiB)\n"
    assert [str(path) for path in again.segments()] == [only(again).path]


def test_a_look_at_an_orphan_does_not_keep_it_from_being_adopted(
    serve: Serve, corpus: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = serve("--data", corpus)
    path = only(killed).path
    killed.kill()
    fd = os.open(path, os.O_RDONLY)  # as `gc --dry-run` does, for a moment
    assert take_owner_lock(fd)
    _, description = read_prefix(fd)
    monkeypatch.setattr(orphans.time, "sleep", lambda _: os.close(fd))
    segment = orphans.adopt(description.name, description.source.fingerprint, str(shm_dir))
    assert segment is not None
    segment.unlink()
    segment.close()


def test_two_starts_at_once_share_one_orphan_without_a_quarrel(serve: Serve, corpus: Path, runtime_dir: Path) -> None:
    serve("--data", corpus).kill()
    daemons = [
        serve("--data", corpus, endpoint=f"ipc://{runtime_dir}/shmserve/{name}.sock", wait=False) for name in "abc"
    ]
    for daemon in daemons:
        daemon.wait_ready()
    assert sum(only(daemon).adopted for daemon in daemons) <= 1
    assert {only(daemon).path for daemon in daemons} == {str(path) for path in daemons[0].segments()}
    assert len(daemons[0].segments()) == 3


@pytest.mark.promise("F3")
def test_the_segment_of_a_live_daemon_is_never_adopted_nor_collected(
    serve: Serve, corpus: Path, runtime_dir: Path, shm_dir: Path, run_gc: RunGc
) -> None:
    live = serve("--data", corpus)
    live.send_signal(signal.SIGSTOP)  # alive, though it does not answer
    try:
        other = serve("--data", corpus, endpoint=f"ipc://{runtime_dir}/shmserve/other.sock")
        assert not only(other).adopted
        assert run_gc().stdout == ""
        assert len(live.segments()) == 2
    finally:
        live.send_signal(signal.SIGCONT)
    assert str(only(live).path) in map(str, live.segments())


def damaged(segment: bytes) -> bytes:
    return segment[:200] + bytes([segment[200] ^ 0xFF]) + segment[201:]


def other_version(segment: bytes) -> bytes:
    return segment[:8] + (99).to_bytes(4, "little") + segment[12:]


def truncated(segment: bytes) -> bytes:
    return segment[: len(segment) // 2]


def random_bytes(segment: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(segment))


def empty(_: bytes) -> bytes:
    return b""


@pytest.mark.promise("F5")
@pytest.mark.parametrize("make", [damaged, other_version, truncated, random_bytes, empty])
def test_rubbish_under_the_expected_name_is_replaced(
    serve: Serve, corpus: Path, make: Callable[[bytes], bytes]
) -> None:
    killed = serve("--data", corpus)
    path = Path(only(killed).path)
    killed.kill()
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(make(content))
    again = serve("--data", corpus)
    assert not only(again).adopted
    assert [str(one) for one in again.segments()] == [only(again).path]
    assert tokens_of(attach(again)) == list(range(1000))


@pytest.mark.promise("F5")
def test_what_is_no_file_of_ours_is_left_alone(
    serve: Serve, corpus: Path, shm_dir: Path, tmp_path: Path, run_gc: RunGc
) -> None:
    uid = os.geteuid()
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    names = [f"shmserve-{uid}-link-0", f"shmserve-{uid}-fifo-0", f"shmserve-{uid}-folder-0", "shmserve-99999-other-0"]
    link, fifo, folder, other = (shm_dir / name for name in names)
    link.symlink_to(precious)
    os.mkfifo(fifo)
    folder.mkdir()
    other.write_bytes(b"another user's, by its name")
    daemon = serve("--data", corpus)
    assert run_gc().returncode == 0
    assert {path.name for path in daemon.segments()} == {*names, Path(only(daemon).path).name}
    assert precious.read_bytes() == b"x"
    for path in (link, fifo, other):
        path.unlink()
    folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_that_another_user_planted_is_neither_adopted_nor_removed(
    serve: Serve, corpus: Path, shm_dir: Path
) -> None:
    killed = serve("--data", corpus)
    planted = Path(only(killed).path)
    killed.kill()
    os.chown(planted, 12345, 12345)
    again = serve("--data", corpus)
    assert not only(again).adopted
    assert planted in again.segments()
    planted.unlink()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_failed_start_leaves_what_was_there_before(
    serve: Serve, corpus: Path, tmp_path: Path, shm_dir: Path, is_read: bool
) -> None:
    killed = serve("--data", corpus)
    segment = attach(killed) if is_read else None
    killed.kill()
    broken = tmp_path / "broken.bin"
    broken.write_bytes(b"odd")
    failed = run_cli(
        *("start", "--data", corpus, "--data", broken, "--shm-dir", shm_dir, "--endpoint", killed.endpoint)
    )
    assert failed.returncode == 3
    assert only(serve("--data", corpus)).adopted
    del segment


def test_gc_lists_before_it_removes(serve: Serve, corpus: Path, shm_dir: Path, run_gc: RunGc) -> None:
    killed = serve("--data", f"docs={RAGGED}", "--data", corpus)
    killed.kill()
    dry = run_gc("--dry-run")
    assert dry.stdout.count("would remove") == 2
    assert len(killed.segments()) == 2
    report = json.loads(run_gc("--json").stdout)
    assert {Path(one["path"]) for one in report["removed"]} == {
        Path(line.split()[2]) for line in dry.stdout.splitlines()
    }
    assert report["kept"] == []
    assert killed.segments() == []
    nothing = run_gc()
    assert (nothing.stdout, nothing.stderr) == ("", f"no orphaned segments in {shm_dir}\n")


def test_a_killed_client_is_not_attached_any_more(serve: Serve, corpus: Path, tmp_path: Path) -> None:
    daemon = serve("--data", corpus)
    status = only(daemon)
    program = """
        import signal, sys
        from shmserve_client.segment import Segment
        segment = Segment.attach(sys.argv[1], bytes.fromhex(sys.argv[2]))
        signal.pause()
    """
    with Child.python(program, status.path, nonce_of(status.path).hex(), folder=tmp_path) as client:
        wait_until(lambda: only(daemon).attached_pids == [client.pid], what="the client to be counted")
        client.kill()
        wait_until(lambda: only(daemon).attached_pids == [], what="the client not to be counted")
