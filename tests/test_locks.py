from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve_client.locks import READERS, AttachedProcess, attached_processes, mark_attached, take_owner_lock
from tests.processes import Child, wait_until

HERE = os.stat("/proc/self/ns/pid").st_ino


@pytest.fixture
def path(shm_dir: Path) -> Iterator[Path]:
    file = shm_dir / "file"
    file.write_bytes(b"segment")
    yield file
    file.unlink()


@pytest.fixture
def owner(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def pids(fd: int) -> list[int]:
    return [process.pid for process in attached_processes(fd)]


ATTACH = """
    import os, sys, time
    from shmserve_client.locks import mark_attached

    fd = os.open(sys.argv[1], os.O_RDONLY)
    mark_attached(fd)
    print("attached", flush=True)
    time.sleep(60)
"""


def test_one_owner_at_a_time(path, owner):
    other = os.open(path, os.O_RDONLY)
    assert take_owner_lock(owner)
    assert take_owner_lock(owner)
    assert not take_owner_lock(other)
    fcntl.flock(owner, fcntl.LOCK_UN)
    assert take_owner_lock(other)
    os.close(other)
    assert take_owner_lock(owner)


def test_a_killed_owner_leaves_no_lock(path, owner, tmp_path):
    code = """
        import os, sys, time
        from shmserve_client.locks import take_owner_lock

        assert take_owner_lock(os.open(sys.argv[1], os.O_RDONLY))
        print("owned", flush=True)
        time.sleep(60)
    """
    with Child.python(code, path, folder=tmp_path) as child:
        wait_until(lambda: "owned" in child.stdout)
        assert not take_owner_lock(owner)
        child.kill()
        assert take_owner_lock(owner)


def test_an_attached_process_is_seen_by_the_owner_and_by_another_reader(path, owner):
    assert attached_processes(owner) == []
    reader, other = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    mark_attached(reader)
    assert attached_processes(owner) == attached_processes(other) == [AttachedProcess(os.getpid(), HERE)]
    os.close(reader)
    assert attached_processes(owner) == []
    os.close(other)


def test_a_process_counts_once_however_often_it_attaches(path, owner):
    readers = [os.open(path, os.O_RDONLY) for _ in range(3)]
    for reader in readers:
        mark_attached(reader)
    assert pids(owner) == [os.getpid()]
    for reader in readers:
        os.close(reader)


def test_twenty_processes_are_counted_until_they_are_killed(path, owner, tmp_path):
    # One interpreter that forks: twenty starts of an interpreter would test the machine.
    code = """
        import os, sys, time
        from shmserve_client.locks import mark_attached

        for _ in range(20):
            if os.fork() == 0:
                mark_attached(os.open(sys.argv[1], os.O_RDONLY))
                os.write(1, b"%d\\n" % os.getpid())  # in one piece, which print does not promise
                time.sleep(60)
                os._exit(0)
        for _ in range(20):
            os.wait()
    """
    with Child.python(code, path, folder=tmp_path) as child:
        wait_until(lambda: child.stdout.count("\n") == 20)
        readers = sorted(map(int, child.stdout.split()))
        assert pids(owner) == readers
        for pid in readers[::2]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pids(owner) == readers[1::2], what="only the living being counted")
        for pid in readers[1::2]:
            os.kill(pid, signal.SIGKILL)
        assert child.wait() == 0
        assert pids(owner) == []


def test_sigkill_of_a_reader_leaves_nothing(path, owner, tmp_path):
    with Child.python(ATTACH, path, folder=tmp_path) as child:
        wait_until(lambda: "attached" in child.stdout)
        assert pids(owner) == [child.pid]
        child.kill()
        assert pids(owner) == []


def test_a_lock_that_a_forked_child_inherited_does_not_count_for_its_ended_parent(path, owner, tmp_path):
    code = """
        import os, sys, time
        from shmserve_client.locks import mark_attached

        inherited = os.open(sys.argv[1], os.O_RDONLY)
        mark_attached(inherited)
        if os.fork() == 0:
            own = os.open(sys.argv[1], os.O_RDONLY)
            mark_attached(own)
            print(os.getpid(), flush=True)
            time.sleep(60)
        os.wait()
    """
    with Child.python(code, path, folder=tmp_path) as parent:
        wait_until(lambda: "\n" in parent.stdout)
        child = int(parent.stdout)
        assert pids(owner) == sorted([parent.pid, child])
        parent.kill()
        assert pids(owner) == [child]


def test_a_process_of_another_pid_namespace_is_counted_under_it(path, owner):
    """Its pid means nothing here, so whether it lives is not asked."""
    reader = os.open(path, os.O_RDONLY)
    elsewhere = AttachedProcess(pid=(1 << 22) - 1, pid_namespace=HERE - 1)
    byte = READERS + (elsewhere.pid_namespace << 22) + elsewhere.pid
    lock(reader, byte, 1)
    assert attached_processes(owner) == [elsewhere]
    os.close(reader)


@pytest.mark.parametrize(("start", "length"), [(READERS, 0), (READERS + 5, 1000), (0, 0), (0, 7)])
def test_locks_of_other_programs_are_not_counted(path, owner, start, length):
    other = os.open(path, os.O_RDONLY)
    lock(other, start, length)
    assert attached_processes(owner) == []
    os.close(other)


def lock(fd: int, start: int, length: int) -> None:
    fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, start, length, 0))
