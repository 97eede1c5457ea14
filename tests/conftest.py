"""Fixtures that every test may use, and the check that no test leaves anything behind."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path, listening
from shmserve_client.protocol import Stop
from tests.processes import Daemon, run_python, wait_until

pytest_plugins = ["tests.reliability"]

SHM = Path("/dev/shm")
TEST_PREFIX = "shmserve-test-"
LEAK_PATIENCE_S = 5.0
PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note whether the test itself passed: after a failure, its traceback keeps objects alive that are no leak.

    What was printed is made such text as can be sent from one process of the test run to another.
    """
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def _no_daemon_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHMSERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A passed test leaves no child process, no open descriptor and no entry in /dev/shm."""
    children, descriptors, shared = _children(), _descriptors(), _shared()
    yield
    if not request.node.stash.get(PASSED, False):
        return
    if _descriptors() - descriptors:
        gc.collect()
    left_in_shared = _shared() - shared
    _expect_empty(lambda: _descriptors() - descriptors, "open descriptors")
    _expect_empty(lambda: _children() - children, "child processes")
    _expect_empty(lambda: unused(left_in_shared & _shared()), "entries in /dev/shm")


def _expect_empty(left: Callable[[], set[object]], what: str) -> None:
    try:
        wait_until(lambda: not left(), LEAK_PATIENCE_S)
    except AssertionError:
        pytest.fail(f"the test left {what}: {left()}", pytrace=False)


def _helpers() -> set[int | None]:
    """Pids and descriptors of multiprocessing's own two helpers, which live as long as the interpreter."""
    tracker, forkserver = multiprocessing.resource_tracker._resource_tracker, multiprocessing.forkserver._forkserver
    return {tracker._pid, tracker._fd, forkserver._forkserver_pid, forkserver._forkserver_alive_fd}


def _children() -> set[object]:
    return {child for child in psutil.Process().children(recursive=True) if child.pid not in _helpers()}


def _descriptors() -> set[object]:
    found: set[object] = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one that listed the folder
        if number not in _helpers():
            found.add((number, target))
    return found


def _shared() -> set[object]:
    """Names in /dev/shm that shmserve or torch made, other than the tests' own folders: other programs use it, too."""
    return {name for name in os.listdir(SHM) if name.startswith(("shmserve-", "torch_")) and TEST_PREFIX not in name}


def unused(names: set[object]) -> set[object]:
    """Return those entries of /dev/shm that no process has mapped: one that is in use is another program's."""
    if not names:
        return names
    used = [line for maps in Path("/proc").glob("[0-9]*/maps") for line in _lines(maps) if str(SHM) in line]
    # By inode: what a semaphore's user has mapped bears the name under which glibc made it.
    mapped = {line.split()[4] for line in used}
    inside = {line.partition(f"{SHM}/")[2].partition("/")[0] for line in used}
    with os.scandir(SHM) as entries:
        return {
            entry.name
            for entry in entries
            if entry.name in names and entry.name not in inside and str(entry.inode()) not in mapped
        }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []  # a process that is gone, or another user's


@pytest.fixture
def shm_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh directory in shared memory; a passed test leaves it empty."""
    folder = Path(tempfile.mkdtemp(prefix=TEST_PREFIX, dir=SHM))
    try:
        yield folder
        if request.node.stash.get(PASSED, False):
            _expect_empty(lambda: set(folder.iterdir()), f"files in {folder}")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def runtime_dir(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh XDG_RUNTIME_DIR with a short path; whatever still runs with it after the test is ended, and is a leak."""
    folder = Path(tempfile.mkdtemp(prefix=TEST_PREFIX, dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    try:
        yield folder
        if request.node.stash.get(PASSED, False):
            _expect_empty(lambda: {process.pid for process in _running_with(folder)}, "processes")
    finally:
        for process in _running_with(folder):
            process.kill()
        shutil.rmtree(folder)


@pytest.fixture
def stop_embedded(runtime_dir: Path) -> Iterator[None]:
    """Stops the daemons in the end that from_path and publish have started, rather than waiting for their linger."""
    yield
    for endpoint in runtime_dir.rglob("e-*.sock"):
        if listening(str(endpoint)):
            with Connection(control_path(str(endpoint)), 10) as connection:
                connection.request(Stop())


@pytest.fixture
def run_gc(shm_dir: Path, runtime_dir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`shmserve gc` in the test's directories alone: else it would remove the logs that this user's daemons left."""
    program = """
        import sys

        from shmserve_client import endpoint

        directory = sys.argv.pop(1)
        endpoint.default_directories = lambda: [directory]  # before anybody imports it

        from shmserve.cli import main

        main()
    """
    return lambda *args: run_python(program, runtime_dir / "shmserve", "gc", "--shm-dir", shm_dir, *args)


def _running_with(runtime_dir: Path) -> list[psutil.Process]:
    """Return the processes that were started with this XDG_RUNTIME_DIR, detached daemons included."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue  # gone, a zombie, or another user's
        if environ.get("XDG_RUNTIME_DIR") == str(runtime_dir) and process.pid not in _helpers():
            found.append(process)
    return found


@pytest.fixture
def serve(
    request: pytest.FixtureRequest, shm_dir: Path, runtime_dir: Path, tmp_path: Path
) -> Iterator[Callable[..., Daemon]]:
    """A factory of daemons: `serve("--data", path, ...)` returns one that is ready, at the default endpoint.

    `endpoint=` gives another, `wait=False` returns at once, `env=` adds to its environment. In the end each must exit
    with 0 and take its socket along, unless the test killed it.
    """
    daemons: list[Daemon] = []

    def start(
        *args: object, endpoint: str | None = None, wait: bool = True, env: dict[str, str] | None = None
    ) -> Daemon:
        address = endpoint or f"ipc://{runtime_dir}/shmserve/daemon.sock"
        daemon = Daemon(*args, endpoint=address, shm_dir=shm_dir, folder=tmp_path, env=env)
        daemons.append(daemon)
        if wait:
            daemon.wait_ready()
        return daemon

    try:
        yield start
    finally:
        gc.collect()  # a view that is still mapped here would make SIGTERM keep the segment
        for daemon in daemons:
            daemon.close()
            request.node.add_report_section("teardown", "daemon", daemon.describe())
    if request.node.stash.get(PASSED, False):
        for daemon in daemons:
            assert daemon.was_killed or daemon.process.returncode == 0, daemon.describe()
        if daemons and not daemons[-1].was_killed:
            assert not daemons[-1].socket.exists(), f"the daemon left its socket\n{daemons[-1].describe()}"
