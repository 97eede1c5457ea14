"""Clients that break the rules: the daemon stays within its limits, and nobody else is hurt."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from shmserve_client.connection import Connection
from shmserve_client.endpoint import listening
from shmserve_client.protocol import MAX_REQUEST_NBYTES, Datasets, Hello, List, Status, Welcome, encode
from tests.processes import Child, Daemon, run_python, wait_until

Serve = Callable[..., Daemon]
MIB = 1 << 20
GROWTH_NBYTES = 256 * MIB
"""What clients may make the daemon store, as the listener has it."""

FLOOD = """
    import collections, resource, socket, sys

    path, count = sys.argv[1], int(sys.argv[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = collections.deque()
    for _ in range(count):
        if len(held) > hard - 100:
            held.popleft().close()
        client = socket.socket(socket.AF_UNIX)
        held.append(client)
        try:
            client.connect(path)
            client.recv(1)  # the greeting: it was accepted
        except (ConnectionError, FileNotFoundError):
            continue  # all are dropped in this moment
    print(count, flush=True)
    sys.stdin.read() if len(sys.argv) > 3 else None
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(range(64)))
    return path


@pytest.fixture
def few_descriptors(corpus: Path, runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> Iterator[Child]:
    """A daemon that may open 1,024 files at most, at `runtime_dir/s/d.sock`."""
    argv = ["sh", "-c", 'ulimit -n 1024 && exec "$@"', "sh", sys.executable, "-m", "shmserve", "start"]
    options = ["--endpoint", runtime_dir / "s" / "d.sock", "--shm-dir", shm_dir, "--data", corpus]
    with Child([*argv, *options], folder=tmp_path) as daemon:
        wait_until(lambda: listening(str(runtime_dir / "s" / "d.sock")))
        with Connection(runtime_dir / "s" / "d.sock", timeout_s=10) as client:
            wait_until(lambda: client.request(Status()).datasets[0].state == "ready")  # type: ignore[union-attr]
        yield daemon
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.describe()


def private_nbytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.promise("F34")
def test_a_flood_of_connections_takes_no_descriptor_that_is_not_there(
    few_descriptors: Child, runtime_dir: Path
) -> None:
    path = runtime_dir / "s" / "d.sock"
    stop = threading.Event()
    replies: list[object] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            with Connection(path, timeout_s=20) as client:
                while not stop.is_set():
                    replies.append(client.request(List()))
        except BaseException as error:  # reported by the test
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert run_python(FLOOD, path, 2000).stdout == "2000\n"
        answered = len(replies)
        wait_until(lambda: len(replies) > answered or failures)
    finally:
        stop.set()
        asking.join()
    assert failures == []
    assert all(reply == Datasets(["corpus"]) for reply in replies)
    assert descriptors(few_descriptors.pid) < 1024
    assert few_descriptors.stderr.count("dropped all") == 1
    assert "ulimit -n" in few_descriptors.stderr


def test_the_owners_socket_has_limits_as_well(few_descriptors: Child, runtime_dir: Path) -> None:
    run_python(FLOOD, f"{runtime_dir}/s/d.sock.ctl", 2000)
    with Connection(runtime_dir / "s" / "d.sock", timeout_s=10) as client:
        assert client.request(List()) == Datasets(["corpus"])


def test_connections_that_end_leave_nothing(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    with Connection(daemon.socket, timeout_s=10) as lasting:
        lasting.request(List())
        before = wait_until(lambda: descriptors(daemon.pid))
        inode = daemon.socket.stat().st_mode
        for _ in range(200):
            with Connection(daemon.socket, timeout_s=10) as client:
                assert isinstance(client.request(Hello("0.1.0")), Welcome)
        wait_until(lambda: descriptors(daemon.pid) <= before + 2, what="as many descriptors as before")
        assert daemon.socket.stat().st_mode == inode
        assert lasting.request(List()) == Datasets(["corpus"])
    assert "dropped all" not in daemon.stderr
    assert [path.name for path in daemon.socket.parent.iterdir() if path.name.startswith(".")] == []


def handshake(path: Path) -> socket.socket:
    """Return a connection on which ZMTP's greetings and READY commands have been exchanged."""
    raw = socket.socket(socket.AF_UNIX)
    try:
        raw.settimeout(10)
        raw.connect(str(path))
        raw.sendall(b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0" + b"NULL".ljust(52, b"\0"))
        body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
        raw.sendall(bytes([4, len(body)]) + body)
        assert raw.recv(4096)
    except BaseException:
        raw.close()
        raise
    return raw


def endless(path: Path, stop: threading.Event, sent: list[int]) -> None:
    """Send one message that never ends, on one connection after the other. (libzmq sends a message whole or not.)"""
    frame = b"\x03" + MAX_REQUEST_NBYTES.to_bytes(8, "big") + bytes(MAX_REQUEST_NBYTES)
    while not stop.is_set():
        with contextlib.suppress(OSError), handshake(path) as raw:
            while not stop.is_set():
                raw.sendall(frame)
                sent[0] += len(frame)


@pytest.mark.promise("F34")
def test_a_message_without_end_takes_no_memory_without_end(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    base = private_nbytes(daemon.pid)
    stop, sent = threading.Event(), [0]
    attacker = threading.Thread(target=endless, args=(daemon.socket, stop, sent))
    attacker.start()
    most, answered = base, 0
    try:
        with Connection(daemon.socket, timeout_s=20) as client:
            while sent[0] < 6 * GROWTH_NBYTES:
                assert client.request(List()) == Datasets(["corpus"])
                answered += 1
                most = max(most, private_nbytes(daemon.pid))
    finally:
        stop.set()
        attacker.join()
    # What comes in while the daemon does not look, at some GiB per second and on a busy machine.
    assert most - base < GROWTH_NBYTES + 512 * MIB
    assert most - base > GROWTH_NBYTES // 2, "the attack is none"
    assert answered > 10
    wait_until(lambda: private_nbytes(daemon.pid) - base < GROWTH_NBYTES, what="memory given back")
    assert daemon.stderr.count("dropped all") == 1
    with Connection(daemon.socket, timeout_s=10) as client:
        assert client.request(List()) == Datasets(["corpus"])


def test_clients_that_do_not_read_or_say_nothing_hurt_nobody(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    base = private_nbytes(daemon.pid)
    with ExitStack() as cleanup:
        context = cleanup.enter_context(zmq.Context())
        for number in range(8):
            dealer = cleanup.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.connect(f"ipc://{daemon.socket}")
            for request_id in range(500):
                dealer.send(encode(Status(), number * 1000 + request_id + 1))
        for start in (b"", b"\xff", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            raw = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            raw.connect(str(daemon.socket))
            raw.sendall(start)
        with Connection(daemon.socket, timeout_s=10) as client:
            for _ in range(100):
                assert client.request(List()) == Datasets(["corpus"])
        assert private_nbytes(daemon.pid) - base < 64 * MIB
    assert daemon.process.poll() is None


@pytest.mark.slow
def test_who_does_not_say_who_it_is_is_sent_away(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    started_s = time.monotonic()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as half:
        for raw in (silent, half):
            raw.connect(str(daemon.socket))
            raw.settimeout(30)
        half.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
        while silent.recv(4096):
            pass
        while half.recv(4096):
            pass
    assert time.monotonic() - started_s > 1


def test_a_client_that_is_dropped_gets_its_answer_all_the_same(few_descriptors: Child, runtime_dir: Path) -> None:
    path = runtime_dir / "s" / "d.sock"
    with Connection(path, timeout_s=10) as client:
        client.request(List())
        run_python(FLOOD, path, 300)
        assert client.request(List()) == Datasets(["corpus"])
        assert "dropped all" in few_descriptors.stderr
