"""How a daemon ends: soon, whatever goes on and however often it is told, and with an exit code that is true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path, lock_path
from shmserve_client.errors import DaemonUnreachableError
from shmserve_client.protocol import Status, StatusReport
from tests.corpora import RAGGED, write_sparse, write_tokens
from tests.mounts import with_tmpfs
from tests.processes import Child, Daemon, environment, run_cli, wait_until

Serve = Callable[..., Daemon]

pytestmark = pytest.mark.promise("shutdown")

END_S = 4.0
"""From SIGTERM to the exit: twice what is promised, for a machine that is busy."""
LONG_LOAD_NBYTES = 4 << 30
CLIENTS = 50

FLOOD = """
    import os, sys, time

    from shmserve_client.connection import Connection
    from shmserve_client.errors import DaemonUnreachableError
    from shmserve_client.protocol import Lookup

    endpoint, clients = sys.argv[1], int(sys.argv[2])
    indices = bytes(8 * 1000)

    def flood():
        with Connection(endpoint, 30.0) as connection:
            connection.request(Lookup("corpus", indices, block_size=1))
            os.write(1, b".")
            try:
                while True:
                    connection.request(Lookup("corpus", indices, block_size=1))
            except DaemonUnreachableError:
                os._exit(0)

    pids = []
    for _ in range(clients):
        pid = os.fork()
        if pid == 0:
            try:
                flood()
            finally:
                os._exit(1)
        pids.append(pid)
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in pids))
"""
"""Clients that ask without a pause until the daemon is gone; its exit code is how many saw anything else."""

FULL = """
    import contextlib, ctypes, json, os, signal, subprocess, sys, time
    from pathlib import Path

    import zmq

    folder, data, shm_dir, when = Path(sys.argv[1]), *sys.argv[2:]
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that the detached daemon's exit code comes here
    endpoint, log = folder / "daemon.sock", folder / "daemon.sock.log"
    shmserve = [sys.executable, "-m", "shmserve", "--log-level", "debug"]

    def fill():
        with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(folder).f_bavail == 0

    if when == "before it starts":
        fill()
    start = ["start", "--detach", "--data", data, "--endpoint", endpoint, "--shm-dir", shm_dir]
    subprocess.run([*shmserve, *start], check=True)
    status = [*shmserve, "status", "--json", "--endpoint", endpoint]
    pid = json.loads(subprocess.run(status, check=True, stdout=subprocess.PIPE).stdout)["pid"]
    if when == "while it runs":
        fill()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 10_000)
        client.connect(f"ipc://{endpoint}")
        for _ in range(1000):
            client.send_multipart([b"each of these", b"makes it log a line"])
    subprocess.run(status, check=True, stdout=subprocess.DEVNULL)
    assert os.statvfs(folder).f_bavail == 0
    os.kill(pid, signal.SIGTERM)
    told_s = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code, time.monotonic() - told_s)
    left = {path.name for path in folder.iterdir()} - {"filler", log.name}
    assert not left, left
"""
"""A detached daemon whose log lies on a full disk; prints its exit code and how many seconds it took to end."""


def assert_nothing_left(daemon: Daemon) -> None:
    assert daemon.segments() == []
    for path in (daemon.socket, control_path(str(daemon.socket)), lock_path(str(daemon.socket))):
        assert not os.path.exists(path), f"{path} is left"


def is_loading(daemon: Daemon) -> bool:
    (status,) = daemon.status().datasets
    return status.state == "loading" and status.loaded_nbytes > 0


def test_in_the_middle_of_requests(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_tokens(tmp_path / "corpus.bin", 100_000))
    with Child.python(FLOOD, daemon.endpoint, CLIENTS, folder=tmp_path) as clients:
        wait_until(lambda: len(clients.stdout) == CLIENTS, 30, "all clients")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(END_S) == 0
        assert_nothing_left(daemon)
        assert clients.wait() == 0, clients.describe()
        assert clients.stderr == ""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("state", ["loading", "serving"])
def test_told_twice(serve: Serve, tmp_path: Path, state: str, second: signal.Signals) -> None:
    if state == "loading":
        daemon = serve("--data", write_sparse(tmp_path / "large.bin", LONG_LOAD_NBYTES), wait=False)
        wait_until(daemon.socket.exists, what="the socket")
        wait_until(lambda: is_loading(daemon), what="the first bytes")
    else:
        daemon = serve("--data", RAGGED)
    daemon.send_signal(signal.SIGTERM)
    time.sleep(0.001)
    daemon.send_signal(second)
    assert daemon.wait(END_S) == 0
    assert_nothing_left(daemon)
    assert "Traceback" not in daemon.stderr


@pytest.mark.parametrize("when", ["before it starts", "while it runs"])
def test_a_full_disk_for_the_log_changes_nothing(shm_dir: Path, runtime_dir: Path, tmp_path: Path, when: str) -> None:
    folder = runtime_dir / "full"
    folder.mkdir(mode=0o700)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(FULL))
    argv = with_tmpfs(folder, "64k", [sys.executable, program, folder, RAGGED, shm_dir, when])
    with Child(argv, folder=tmp_path) as child:
        assert child.wait(60) == 0, child.describe()
        code, took_s = child.stdout.splitlines()[-1].split()
    assert code == "0"
    assert float(took_s) < END_S
    assert list(shm_dir.iterdir()) == []


@pytest.fixture(autouse=True)
def _buffered_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is then tried again when the interpreter exits."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_output_to_a_full_disk_changes_nothing(runtime_dir: Path, shm_dir: Path, full: str) -> None:
    endpoint = f"{runtime_dir}/shmserve/daemon.sock"
    start = [sys.executable, "-m", "shmserve", "--log-level", "debug", "start", "--data", str(RAGGED)]
    with open("/dev/full", "w") as nowhere:
        outputs = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, full: nowhere}
        daemon = subprocess.Popen(
            [*start, "--shm-dir", str(shm_dir), "--endpoint", endpoint], env=environment(), **outputs
        )
    try:
        wait_until(lambda: _serves(endpoint), 30, "the dataset")
        daemon.terminate()
        assert daemon.wait(END_S) == 0
    finally:
        daemon.kill()
        daemon.wait()
    assert list(shm_dir.iterdir()) == []


@pytest.mark.parametrize("arguments", [["start", "--data", "absent.bin"], ["start", "--no-such-option"], ["stop"]])
def test_an_error_that_cannot_be_written_keeps_its_exit_code(runtime_dir: Path, arguments: list[str]) -> None:
    expected = run_cli(*arguments).returncode
    with open("/dev/full", "w") as nowhere:
        command = [sys.executable, "-m", "shmserve", *arguments]
        done = subprocess.run(command, env=environment(), stderr=nowhere, timeout=60, check=False)
    assert done.returncode == expected > 0


def _serves(endpoint: str) -> bool:
    with Connection(endpoint, 5.0) as connection, suppress(DaemonUnreachableError):
        report = connection.request(Status())
        return isinstance(report, StatusReport) and all(dataset.state == "ready" for dataset in report.datasets)
    return False


def test_exit_codes_are_true(serve: Serve, runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    small = write_tokens(tmp_path / "small.bin")
    place = ["--shm-dir", shm_dir, "--endpoint", f"ipc://{runtime_dir}/shmserve/other.sock"]
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"odd")

    assert run_cli("start", "--data", small, "--no-such-option", *place).returncode == 2
    assert run_cli("start", "surplus", "--data", small, *place).returncode == 2
    assert run_cli("start", *place).returncode == 3
    assert run_cli("start", "--data", odd, *place).returncode == 3
    assert run_cli("start", "--data", odd, "--detach", *place).returncode == 3
    assert run_cli("start", "--data", tmp_path / "absent.bin", *place).returncode == 3
    assert run_cli("stop").returncode == 1
    assert run_cli("status").returncode == 1
    daemon = serve("--data", small)
    assert run_cli("start", "--data", small, "--shm-dir", shm_dir, "--endpoint", daemon.endpoint).returncode == 3
    assert run_cli("status").returncode == 0
    assert run_cli("lookup", "small", "0").returncode == 1  # a stream has no samples without a block size
    assert run_cli("stop").returncode == 0
    assert daemon.wait(END_S) == 0
