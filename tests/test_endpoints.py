"""What ended daemons and killed starters leave in the directories of endpoints, and what of it is still in use."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from shmserve.detach import _open_log
from shmserve.endpoints import is_in_use, remove_unused_files
from shmserve_client.embedded import _one_at_a_time
from tests.processes import wait_until


@pytest.fixture
def directory(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = runtime_dir / "shmserve"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr("shmserve.endpoints.default_directories", lambda: [str(directory)])
    return directory


def test_what_nobody_uses_is_removed(directory: Path) -> None:
    for name in ("daemon.sock.log", "e-0123.0.sock.log", "e-0123.start"):
        (directory / name).touch()
    (directory / "notes.txt").touch()
    names = ["daemon.sock.log", "e-0123.0.sock.log", "e-0123.start"]
    assert [os.path.basename(path) for path in remove_unused_files(dry_run=True)] == names
    assert len(list(directory.iterdir())) == 4
    assert [os.path.basename(path) for path in remove_unused_files()] == names
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_what_somebody_uses_stays(directory: Path) -> None:
    log = directory / "daemon.sock.log"
    fd = _open_log(str(log))
    with _one_at_a_time(str(directory / "e-0123.start")):
        assert is_in_use(str(log))
        assert remove_unused_files() == []
    os.close(fd)
    assert not is_in_use(str(log))
    assert remove_unused_files() == [str(log)]


def test_what_another_user_owns_is_not_asked_about(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a group's daemon is its owner's alone, and its readers ask for its status, too."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (directory / "daemon.sock.log").touch()
    with monkeypatch.context() as patch:
        patch.setattr("shmserve.endpoints.os.open", refuse)
        assert not is_in_use(str(directory / "daemon.sock.log"))
        assert remove_unused_files() == []


def test_who_waits_for_a_file_that_is_removed_makes_a_new_one(directory: Path) -> None:
    path = directory / "daemon.sock.log"
    path.touch()
    opened: list[int] = []
    with open(path) as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: opened.append(_open_log(str(path))))
        waiting.start()
        # It waits for the lock of the file that is about to go.
        wait_until(lambda: sum(str(path) in os.path.realpath(f"/proc/self/fd/{fd}") for fd in range(3, 64)) == 2)
        path.unlink()
    waiting.join(10)
    (fd,) = opened
    assert os.path.samestat(os.fstat(fd), path.stat())
    os.close(fd)
