"""One daemon per endpoint: the lock, who holds it, and what ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.lockfile import LockFile
from shmserve_client.errors import AlreadyRunningError, EndpointError
from shmserve_client.locks import holder_of
from tests.processes import Child, wait_until

HOLD = """
    import signal, sys
    from shmserve.lockfile import LockFile
    lock = LockFile(sys.argv[1])
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "daemon.sock.lock")


def test_the_second_is_told_who_is_first(path: str, tmp_path: Path) -> None:
    with Child.python(HOLD, path, folder=tmp_path) as first:
        wait_until(lambda: first.stdout, what="the lock")
        with pytest.raises(AlreadyRunningError, match=rf"already running \(pid {first.pid}\) at .*/daemon.sock: stop"):
            LockFile(path)
        holder = holder_of(path)
        assert holder is not None
        assert holder.pid == first.pid


def test_a_killed_holder_leaves_a_file_that_is_in_nobodys_way(path: str, tmp_path: Path) -> None:
    with Child.python(HOLD, path, folder=tmp_path) as first:
        wait_until(lambda: first.stdout, what="the lock")
        first.kill()
    assert Path(path).exists()
    assert holder_of(path) is None
    LockFile(path).release()
    assert not Path(path).exists()


def test_asking_for_the_holder_takes_nothing(path: str, tmp_path: Path) -> None:
    Path(path).touch()
    assert holder_of(path) is None
    with Child.python(HOLD, path, folder=tmp_path) as other:
        wait_until(lambda: other.stdout, what="the lock")


def test_no_file_no_holder(path: str) -> None:
    assert holder_of(path) is None
    assert not Path(path).exists()


def test_release_is_idempotent_and_spares_the_file_of_another(path: str) -> None:
    lock = LockFile(path)
    os.unlink(path)
    Path(path).touch()
    lock.release()
    lock.release()
    assert Path(path).exists()


def test_many_at_once_one_gets_it(path: str, tmp_path: Path) -> None:
    contend = """
        import signal, sys
        from shmserve.lockfile import LockFile
        from shmserve_client.errors import AlreadyRunningError
        sys.stdin.read()
        try:
            lock = LockFile(sys.argv[1])
        except AlreadyRunningError:
            print("refused", flush=True)
        else:
            print("held", flush=True)
            signal.pause()
    """
    children = [Child.python(contend, path, folder=tmp_path) for _ in range(6)]
    try:
        wait_until(lambda: all(child.stdout for child in children), what="all answers")
        assert sorted(child.stdout for child in children) == ["held\n"] + ["refused\n"] * 5
    finally:
        for child in children:
            child.close()


def test_a_link_in_its_place_is_refused(path: str, tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(EndpointError, match="cannot open the lock file"):
        LockFile(path)
    assert not (tmp_path / "elsewhere").exists()
