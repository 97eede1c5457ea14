"""Hundreds of clients at once, and those that are silent, stopped, never read or never cease: no other one suffers."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from numpy.typing import NDArray

from shmserve_client.connection import Connection
from shmserve_client.protocol import MAX_INDICES, Lookup, Offsets, encode
from tests.processes import Child, Daemon, run_cli, wait_until

Serve = Callable[..., Daemon]

CLIENTS = 256
KILLED = 12
SAMPLES = 5000
LONGEST = 60
INDICES = 64
SILENT = 100
GROWTH_NBYTES = 8 << 20
"""What the allocator may keep of one more crowd. Two pages left of each connection would be more."""
ANSWER_S = 10.0
"""How long an answer may take on a machine that is busy with other things; a client that starves gets none."""
QUEUES_NBYTES = 64 << 20
"""More than one client's queues in the daemon can hold, at 16 replies of 1 MiB."""

CROWD = """
    import json, os, random, signal, sys, time, traceback
    from pathlib import Path

    import numpy as np

    from shmserve_client.attaching import attach_served
    from shmserve_client.protocol import Attach
    from shmserve_client.remote import RemoteOffsets
    from shmserve_client.samples import open_samples

    endpoint, folder, go = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    clients, to_kill, indices, visits = map(int, sys.argv[4:])
    lengths = np.load(folder / "lengths.npy")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    values = np.fromfile(folder / "corpus.bin", np.uint16)
    wait_fd, go_fd = os.pipe()

    def visit(choose, wait):
        attached, segment = attach_served(endpoint, Attach("corpus"), timeout_s=60, patience_s=60)
        samples = open_samples(segment.description, segment.array)
        assert len(samples) == len(lengths)
        remote = RemoteOffsets(endpoint, 60, name=attached.name, nonce=attached.nonce, block_size=0, stride=0)
        if wait:
            os.read(wait_fd, 1)  # until every client is attached
        for _ in range(5):
            positions = choose.integers(0, len(lengths), indices)
            offsets, nbytes = remote.extents(samples, positions)
            np.testing.assert_array_equal(offsets, samples.column.values.offset + 2 * starts[positions])
            np.testing.assert_array_equal(nbytes, 2 * lengths[positions])
            found = [samples.view_at(*where) for where in zip(positions.tolist(), offsets, nbytes, strict=True)]
            expected = [values[starts[position] : starts[position + 1]] for position in positions]
            np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
        remote.close()

    def start(number):
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.close(go_fd)
            choose = np.random.default_rng(number)
            for count in range(visits):
                visit(choose, wait=count == 0)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    living = {start(number) for number in range(clients)}
    while not go.exists():
        time.sleep(0.01)
    os.dup2(wait_fd, go_fd)  # nobody can write any more, which ends the waiting
    ended, killed = [], 0
    while killed < to_kill:
        time.sleep(random.uniform(0, 0.05))
        victim = random.choice(sorted(living))
        os.kill(victim, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
        if status == -signal.SIGKILL:
            killed += 1
        else:  # it had just ended
            ended.append(status)
        living.remove(victim)
        living.add(start(clients + killed + len(ended)))
    ended += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in living]
    print(json.dumps({"succeeded": ended.count(0), "failed": len(ended) - ended.count(0), "killed": killed}))
"""

FLOOD = """
    import signal, sys
    from pathlib import Path

    import zmq

    endpoint, frame, reads = sys.argv[1], Path(sys.argv[2]).read_bytes(), sys.argv[3] == "True"
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 16)
    socket.setsockopt(zmq.RCVHWM, 1)  # what it does not read is to stay with the daemon
    socket.connect(endpoint)
    while True:
        try:
            while True:
                socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            print("full", flush=True)
        if reads:
            socket.recv()
            while socket.poll(0):
                socket.recv()
        else:
            socket.poll(None, zmq.POLLOUT)
"""

STOPPED_AND_CONTINUED = """
    import sys
    from pathlib import Path

    from shmserve_client.connection import Connection
    from shmserve_client.protocol import Lookup

    endpoint, indices, done = sys.argv[1], Path(sys.argv[2]).read_bytes(), Path(sys.argv[3])
    with Connection(endpoint, 60) as connection:
        expected = connection.request(Lookup("corpus", indices))
        while not done.exists():
            assert connection.request(Lookup("corpus", indices)) == expected
            print("answered", flush=True)
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A Megatron pair of samples whose lengths are in lengths.npy beside it."""
    choose = np.random.default_rng(0)
    lengths = choose.integers(0, LONGEST, SAMPLES, dtype=np.int32)
    np.save(tmp_path / "lengths.npy", lengths)
    choose.integers(0, 65_536, lengths.sum(), dtype=np.uint16).tofile(tmp_path / "corpus.bin")
    pointers = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, SAMPLES, SAMPLES + 1)
    documents = np.arange(SAMPLES + 1, dtype=np.int64)
    (tmp_path / "corpus.idx").write_bytes(
        header + b"".join(array.tobytes() for array in (lengths, pointers, documents))
    )
    return tmp_path / "corpus.bin"


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def crowd(daemon: Daemon, folder: Path, number: int, visits: int) -> dict[str, int]:
    """Let a crowd attach, look up and detach while some of it are killed; return how many ended in which way."""
    go = folder / f"go-{number}"
    arguments = [daemon.endpoint, folder, go, CLIENTS, KILLED, INDICES, visits]
    with Child.python(CROWD, *arguments, folder=folder) as program:

        def attached() -> bool:
            assert program.process.poll() is None, program.describe()
            return len(daemon.status().datasets[0].attached_pids) == CLIENTS

        wait_until(attached, 100, "all clients to be attached")
        go.touch()
        assert program.wait(100) == 0, program.describe()
        assert program.stderr == ""
        ended: dict[str, int] = json.loads(program.stdout)
    wait_until(lambda: not daemon.status().datasets[0].attached_pids, what="the clients not to be counted any more")
    return ended


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.promise("load", "F2")
def test_256_clients_come_and_go_and_some_are_killed(serve: Serve, corpus: Path, tmp_path: Path) -> None:
    daemon = serve("--data", corpus)
    for number in range(2):  # to warm up
        crowd(daemon, tmp_path, number, visits=1)
    descriptors_before, private_before = descriptors(daemon), daemon.status().private_nbytes

    ended = crowd(daemon, tmp_path, 2, visits=4)

    assert ended["succeeded"] >= CLIENTS
    assert (ended["failed"], ended["killed"]) == (0, KILLED)
    # libzmq closes the connections of those who went when it comes to it.
    wait_until(lambda: descriptors(daemon) <= descriptors_before, what=f"{descriptors_before} open descriptors again")
    assert daemon.status().private_nbytes <= private_before + GROWTH_NBYTES
    assert len(daemon.segments()) == 1


def asks(daemon: Daemon, corpus: Path, requests: int = 100) -> float:
    """Return the longest time in seconds that a well-behaved client waits for one of so many right answers."""
    lengths = np.load(corpus.with_name("lengths.npy"))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    choose = np.random.default_rng(1)
    longest_s = 0.0
    with Connection(daemon.endpoint, ANSWER_S) as connection:
        first = _extents(connection, np.zeros(1, np.int64))[0][0]
        for _ in range(requests):
            indices = choose.integers(0, SAMPLES, INDICES)
            asked_s = time.monotonic()
            offsets, nbytes = _extents(connection, indices)
            longest_s = max(longest_s, time.monotonic() - asked_s)
            np.testing.assert_array_equal(offsets - first, 2 * starts[indices])
            np.testing.assert_array_equal(nbytes, 2 * lengths[indices])
    return longest_s


def _extents(connection: Connection, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    reply = connection.request(Lookup("corpus", indices.tobytes()))
    assert isinstance(reply, Offsets)
    return np.frombuffer(reply.offsets, np.int64), np.frombuffer(reply.nbytes, np.int64)


@pytest.mark.promise("load")
def test_clients_that_say_nothing_cost_others_nothing(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    asks(daemon, corpus)
    descriptors_before = descriptors(daemon)
    with zmq.Context() as context, ExitStack() as silent:
        for _ in range(SILENT):
            connected = silent.enter_context(socket.socket(socket.AF_UNIX))
            connected.connect(str(daemon.socket))  # and never says that it speaks ZeroMQ
            dealer = silent.enter_context(context.socket(zmq.DEALER))
            dealer.connect(daemon.endpoint)
        wait_until(lambda: descriptors(daemon) > 2 * SILENT, 30, f"{2 * SILENT} connections")
        assert asks(daemon, corpus) < ANSWER_S
        assert daemon.status().private_nbytes < 100 << 20
    wait_until(lambda: descriptors(daemon) <= descriptors_before, what="the connections to be closed")


@pytest.mark.promise("load")
@pytest.mark.parametrize("reads", [True, False])
def test_a_flood_of_requests_starves_nobody(serve: Serve, corpus: Path, tmp_path: Path, reads: bool) -> None:
    daemon = serve("--data", corpus)
    asks(daemon, corpus)
    private_before = daemon.status().private_nbytes
    # Who does not read asks for replies of 1 MiB.
    indices = np.zeros(INDICES if reads else MAX_INDICES, np.int64)
    frame = tmp_path / "frame"
    frame.write_bytes(encode(Lookup("corpus", indices.tobytes()), 1))
    with Child.python(FLOOD, daemon.endpoint, frame, reads, folder=tmp_path) as flood:
        wait_until(lambda: flood.stdout.count("full") > 20, 30, "the flood")
        assert asks(daemon, corpus) < ANSWER_S
        assert daemon.status().private_nbytes < private_before + QUEUES_NBYTES
        assert flood.process.poll() is None, flood.describe()
        # Nor does it keep the owner from what is only the owner's.
        assert run_cli("stop").returncode == 0
        assert daemon.wait() == 0


@pytest.mark.promise("load", "F13")
def test_a_client_that_is_stopped_in_mid_request_costs_others_nothing(
    serve: Serve, corpus: Path, tmp_path: Path
) -> None:
    daemon = serve("--data", corpus)
    indices, done = tmp_path / "indices", tmp_path / "done"
    indices.write_bytes((np.arange(MAX_INDICES, dtype=np.int64) % SAMPLES).tobytes())
    with Child.python(STOPPED_AND_CONTINUED, daemon.endpoint, indices, done, folder=tmp_path) as stopped:
        for _ in range(10):
            answered = stopped.stdout.count("answered")
            wait_until(lambda: stopped.stdout.count("answered") > answered, what="an answer")  # noqa: B023
            stopped.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED, what="it to stop")
            assert asks(daemon, corpus, requests=10) < ANSWER_S
            stopped.send_signal(signal.SIGCONT)
        done.touch()
        assert stopped.wait() == 0, stopped.describe()
        assert stopped.stderr == ""
