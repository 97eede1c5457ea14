"""The daemon as a process: what it answers, what it survives, and what is left when it ends."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from shmserve.server import _reply_to_frame
from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path, lock_path, parse_endpoint
from shmserve_client.errors import DaemonUnreachableError, DatasetNotReadyError, ProtocolError
from shmserve_client.protocol import (
    MAX_INDICES,
    MAX_REQUEST_NBYTES,
    Attach,
    Attached,
    Failure,
    Hello,
    Lookup,
    Offsets,
    Reply,
    Status,
    StatusReport,
    Stop,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)
from shmserve_client.segment import Segment
from tests.corpora import RAGGED, RAGGED_SAMPLES, write_sparse, write_tokens
from tests.processes import Child, Daemon, environment, run_cli, wait_until

Serve = Callable[..., Daemon]

A_LONG_LOAD_NBYTES = 4 << 30


@contextmanager
def dealer(path: str | Path) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket, for what our own client would never send."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"ipc://{path}")
        yield client


def receive(client: zmq.Socket[bytes], timeout_s: float = 5.0) -> bytes:
    assert client.poll(int(timeout_s * 1000)), "no reply"
    return client.recv()


def attach(daemon: Daemon, name: str | None = None) -> Segment:
    """Attach this very process."""
    with Connection(daemon.endpoint, 5.0) as connection:
        reply = connection.request(Attach(name))
    assert isinstance(reply, Attached)
    return Segment.attach(reply.path, reply.nonce)


def is_serving(daemon: Daemon) -> bool:
    with Connection(daemon.endpoint, 5.0) as connection:
        return connection.request(Hello("test")) == Welcome(_version(), daemon.pid, os.geteuid())


def _version() -> str:
    from shmserve_client.version import __version__

    return __version__


def assert_nothing_left(daemon: Daemon) -> None:
    assert daemon.segments() == []
    for path in (daemon.socket, control_path(str(daemon.socket)), lock_path(str(daemon.socket))):
        assert not os.path.exists(path), f"{path} is left"


def test_a_daemon_serves_what_it_was_given(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    segment = attach(daemon)
    with Connection(daemon.endpoint, 5.0) as connection:
        reply = connection.request(Lookup("ragged_uint16", np.arange(len(RAGGED_SAMPLES), dtype="<i8").tobytes()))
    assert isinstance(reply, Offsets)
    content = np.asarray(segment)
    for sample, offset, nbytes in zip(
        RAGGED_SAMPLES, np.frombuffer(reply.offsets, "<i8"), np.frombuffer(reply.nbytes, "<i8"), strict=True
    ):
        assert content[offset : offset + nbytes].view("<u2").tolist() == sample
    (status,) = daemon.status().datasets
    assert status.attached_pids == [os.getpid()]
    del segment, content


def test_two_datasets_in_one_daemon(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", f"docs={RAGGED}", "--data", write_tokens(tmp_path / "val.bin"))
    assert [dataset.name for dataset in daemon.status().datasets] == ["docs", "val"]
    assert len(daemon.segments()) == 2
    assert daemon.stdout.startswith("ready: docs (megatron, 6 samples, ")
    assert daemon.stdout.count("\n") == 1
    assert ", val (raw, 1,000 tokens, " in daemon.stdout
    assert daemon.stdout.endswith(f" on {daemon.endpoint} (pid {daemon.pid})\n")


@pytest.mark.promise("shutdown")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_leaves_nothing(serve: Serve, signum: signal.Signals) -> None:
    daemon = serve("--data", RAGGED)
    assert len(daemon.segments()) == 1
    daemon.send_signal(signum)
    assert daemon.wait(timeout_s=2.0) == 0
    assert_nothing_left(daemon)
    assert daemon.stderr.count("Traceback") == 0


def test_under_nohup_a_hangup_does_not_end_it(runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{runtime_dir}/shmserve/daemon.sock"
    start = f"trap '' HUP; exec python -m shmserve start --data {RAGGED} --shm-dir {shm_dir} --endpoint {endpoint}"
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    with Child(["sh", "-c", start], folder=tmp_path, env={"PATH": path}) as daemon:
        wait_until(lambda: daemon.stdout.startswith("ready"), 20, what="the daemon")
        daemon.send_signal(signal.SIGHUP)
        with Connection(endpoint, 5.0) as connection:
            assert isinstance(connection.request(Hello("test")), Welcome)


@pytest.mark.promise("shutdown")
def test_it_answers_while_it_loads_and_ends_in_the_middle(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_sparse(tmp_path / "large.bin", A_LONG_LOAD_NBYTES), wait=False)
    wait_until(daemon.socket.exists, what="the socket")
    wait_until(lambda: daemon.status().datasets[0].loaded_nbytes > 0, what="the first bytes")
    (status,) = daemon.status().datasets
    assert status.state == "loading"
    assert 0 < status.loaded_nbytes < A_LONG_LOAD_NBYTES
    assert A_LONG_LOAD_NBYTES <= status.segment_nbytes < A_LONG_LOAD_NBYTES + (4 << 20)
    with (
        Connection(daemon.endpoint, 5.0) as connection,
        pytest.raises(DatasetNotReadyError, match=r"'large' is still loading \(.* of 4.0 GiB, \d+ %\)"),
    ):
        connection.request(Attach("large"))
    assert daemon.segments() == []  # nothing can be seen of a segment before it is whole
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout_s=2.0) == 0
    assert_nothing_left(daemon)
    assert daemon.stdout == ""


def test_a_kill_while_loading_leaves_no_memory_behind(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_sparse(tmp_path / "large.bin", A_LONG_LOAD_NBYTES), wait=False)
    wait_until(daemon.socket.exists, what="the socket")
    wait_until(lambda: daemon.status().datasets[0].loaded_nbytes > 0, what="the first bytes")
    daemon.kill()
    assert daemon.segments() == []
    again = serve("--data", f"large={write_tokens(tmp_path / 'small.bin')}")
    assert again.status().datasets[0].state == "ready"


@pytest.mark.promise("shutdown")
def test_a_loader_that_hangs_does_not_keep_it(runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    program = """
        import sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        import shmserve.server
        def hang(_):  # as a read from a file server that is gone does
            with ThreadPoolExecutor() as pool:
                pool.submit(time.sleep, 60)
        shmserve.server.Loader.run = hang
        sys.argv[1:] = ["start", "--data", "x.bin", "--endpoint", sys.argv[1]]
        shmserve.cli.main()
    """
    program = program.replace("import shmserve.server", "import shmserve.cli, shmserve.server")
    endpoint = f"{runtime_dir}/shmserve/daemon.sock"
    with Child.python(program, endpoint, folder=tmp_path) as daemon:
        wait_until(lambda: os.path.exists(control_path(endpoint)), what="the socket")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout_s=3.0) == 0
        assert not os.path.exists(endpoint)
        assert "still reading the source" in daemon.stderr


def test_a_look_at_the_source_that_hangs_holds_up_nobody(runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    program = """
        import sys, time
        import shmserve.cli, shmserve.watch
        shmserve.watch.Watch.look = lambda _: time.sleep(60)  # as a file server that is gone has it
        shmserve.watch._LEAST_PAUSE_S = 0
        sys.argv[1:] = ["start", "--data", *sys.argv[1:]]
        shmserve.cli.main()
    """
    endpoint = f"{runtime_dir}/shmserve/daemon.sock"
    args = (RAGGED, "--shm-dir", shm_dir, "--endpoint", endpoint)
    with Child.python(program, *args, folder=tmp_path) as daemon:
        wait_until(lambda: daemon.stdout.startswith("ready"), 20, what="the daemon")
        with Connection(endpoint, 2.0) as connection:
            assert _is_ready(connection.request(Status()))
            assert isinstance(connection.request(Attach()), Attached)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout_s=2.0) == 0


@pytest.mark.promise("F14")
def test_a_second_daemon_is_refused_and_the_first_serves_on(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    second = run_cli("start", "--data", RAGGED, "--endpoint", daemon.endpoint, "--shm-dir", daemon.shm_dir)
    assert second.returncode == 3
    assert f"error: already running (pid {daemon.pid}) at {daemon.socket}: stop it first" in second.stderr
    assert is_serving(daemon)
    assert len(daemon.segments()) == 1


def test_two_daemons_at_two_endpoints_leave_each_other_alone(serve: Serve, runtime_dir: Path) -> None:
    first = serve("--data", RAGGED)
    second = serve("--data", RAGGED, endpoint=f"ipc://{runtime_dir}/shmserve/second.sock")
    assert not second.status().datasets[0].adopted
    assert len(first.segments()) == 2
    assert second.stop() == 0
    assert [str(path) for path in first.segments()] == [first.status().datasets[0].path]
    assert is_serving(first)


@pytest.mark.promise("F14")
def test_a_socket_left_by_a_killed_daemon_is_in_nobodys_way(serve: Serve) -> None:
    serve("--data", RAGGED).kill()
    daemon = serve("--data", RAGGED)
    assert is_serving(daemon)


def test_a_file_in_the_place_of_the_socket_is_refused_and_kept(runtime_dir: Path, shm_dir: Path) -> None:
    folder = runtime_dir / "shmserve"
    folder.mkdir(mode=0o700)
    precious = folder / "corpus.bin"
    precious.write_bytes(b"tokens")
    done = run_cli("start", "--data", RAGGED, "--endpoint", precious, "--shm-dir", shm_dir)
    assert done.returncode == 3
    assert done.stderr == f"error: {precious} exists and is not a socket: choose another --endpoint\n"
    assert precious.read_bytes() == b"tokens"
    assert os.listdir(folder) == ["corpus.bin"]


@pytest.mark.promise("F19")
def test_nobody_else_can_reach_it(serve: Serve, runtime_dir: Path) -> None:
    daemon = serve("--data", RAGGED)
    assert _mode(runtime_dir / "shmserve") == 0o700
    assert _mode(daemon.socket) == _mode(control_path(str(daemon.socket))) == 0o600
    assert [_mode(path) for path in daemon.segments()] == [0o400]


@pytest.mark.promise("F19")
@pytest.mark.parametrize("restart", [False, True])
def test_a_group_can_read_but_not_command(serve: Serve, runtime_dir: Path, restart: bool) -> None:
    if restart:
        serve("--data", RAGGED).kill()
    daemon = serve("--data", RAGGED, "--group", os.getgid())
    assert _mode(runtime_dir / "shmserve") == 0o710
    assert _mode(daemon.socket) == 0o660
    assert _mode(control_path(str(daemon.socket))) == 0o600
    assert [_mode(path) for path in daemon.segments()] == [0o440]
    assert daemon.status().datasets[0].adopted == restart


def _mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_its_own_memory_is_small_and_holds_no_torch(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_sparse(tmp_path / "tokens.bin", 256 << 20), "--block-size", "8")
    with Connection(daemon.endpoint, 5.0) as connection:
        indices = np.linspace(0, (32 << 20) - 1, MAX_INDICES).astype("<i8").tobytes()
        connection.request(Lookup("tokens", indices, block_size=4))  # touches pages all over the segment
    assert daemon.status().private_nbytes < 60 << 20
    mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "numpy" in mapped


def test_locked_pages_are_locked(serve: Serve) -> None:
    daemon = serve("--data", RAGGED, "--lock")
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    (locked,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmLck:"))
    assert int(locked) << 10 >= daemon.status().datasets[0].segment_nbytes - (2 << 20)


@pytest.mark.skipif(not (shutil.which("prlimit") and shutil.which("setpriv")), reason="needs util-linux")
def test_a_lock_that_the_limit_forbids_is_refused(runtime_dir: Path, shm_dir: Path) -> None:
    limits = ["prlimit", "--memlock=0"] + (["setpriv", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else [])
    start = [sys.executable, "-m", "shmserve", "start", "--data", str(RAGGED), "--shm-dir", str(shm_dir), "--lock"]
    done = subprocess.run([*limits, *start], env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "ulimit -l" in done.stderr
    assert list(shm_dir.iterdir()) == []


def test_linger_ends_it_when_nothing_is_attached_any_more(serve: Serve) -> None:
    daemon = serve("--data", RAGGED, "--linger", "0.5")
    segment = attach(daemon)
    pid = daemon.pid
    since = time.monotonic()
    while time.monotonic() - since < 3:  # several times the linger time
        assert daemon.process.poll() is None, "ended under an attached process"
        assert daemon.status().datasets[0].attached_pids == [os.getpid()]
        time.sleep(0.1)
    del segment
    assert daemon.wait(timeout_s=5.0) == 0
    assert_nothing_left(daemon)
    assert pid == daemon.pid


def test_an_answered_attach_counts_as_use(serve: Serve) -> None:
    daemon = serve("--data", RAGGED, "--linger", "2")
    since = time.monotonic()
    while time.monotonic() - since < 4:  # each time a client may be about to map the segment
        with Connection(daemon.endpoint, 5.0) as connection:
            assert isinstance(connection.request(Attach()), Attached)
        time.sleep(0.2)
    segment = attach(daemon)
    wait_until(lambda: daemon.status().datasets[0].attached_pids, what="the lock")
    del segment
    assert daemon.wait(timeout_s=6.0) == 0


def test_linger_counts_from_readiness(serve: Serve) -> None:
    daemon = serve("--data", RAGGED, "--linger", "0")
    assert daemon.wait(timeout_s=5.0) == 0
    assert_nothing_left(daemon)


@pytest.mark.promise("F34")
def test_the_owners_verbs_are_not_for_the_clients_socket(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    with Connection(daemon.endpoint, 5.0) as connection, pytest.raises(ProtocolError, match="the op 'stop'"):
        connection.request(Stop())
    with Connection(control_path(str(daemon.socket)), 5.0) as connection, pytest.raises(ProtocolError, match="'hello'"):
        connection.request(Hello("test"))
    assert is_serving(daemon)


@pytest.mark.promise("F34")
@pytest.mark.parametrize("which", ["clients", "owner"])
def test_random_truncated_and_oversized_frames_leave_it_serving(serve: Serve, which: str) -> None:
    daemon = serve("--data", RAGGED)
    path = str(daemon.socket) if which == "clients" else control_path(str(daemon.socket))
    rng = random.Random(0)
    whole = encode(Lookup("ragged_uint16", bytes(8)), 7)
    with dealer(path) as client:
        for _ in range(500):
            frame = rng.randbytes(rng.randrange(200)) if rng.random() < 0.5 else whole[: rng.randrange(len(whole))]
            client.send(frame)
            _, reply = decode_reply(receive(client))
            assert isinstance(reply, Failure)
            assert reply.code == "protocol"
        client.send(b"\0" * (MAX_REQUEST_NBYTES + 1))  # costs the sender its connection, and nobody else anything
        client.send_multipart([b"", encode(Hello("x"), 1)])
        client.send_multipart([b"a"] * 50)
        client.send_multipart([encode(Hello("x"), 1), b""])
    assert is_serving(daemon)


def test_no_message_however_made_ends_it(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    attach = {"v": 1, "id": 1, "op": "attach", "name": None, "source_key": None, "vocab_size": None}
    values: list[object] = [
        2**64 - 1,
        -(2**63),
        1.5,
        True,
        None,
        "\ud800",
        b"\xff",
        [],
        {},
        [[[]]],
        {"a": {}},
        "x" * 9000,
    ]
    frames = [msgpack.packb({**attach, b"x": 1, "y": 1})]
    frames += [
        msgpack.packb({**attach, key: value}, unicode_errors="surrogatepass")
        for key in (*attach, "other", b"bytes")
        for value in values
    ]
    frames += [
        encode(Lookup("ragged_uint16", bytes(8), column, block_size, stride), 1)
        for column in (None, "x" * 9000)
        for block_size in (-1, 1, 2**62, 2**64 - 1)
        for stride in (-(2**63), 1, 2**64 - 1)
    ]
    with dealer(daemon.socket) as client:
        client.send(msgpack.packb(attach))
        _, reply = decode_reply(receive(client))
        assert isinstance(reply, Attached)  # what each of the others spoils in one place
        for frame in frames:
            client.send(frame)
            _, reply = decode_reply(receive(client))
            assert len(repr(reply)) < 5000
            assert not isinstance(reply, Failure) or "internal error" not in reply.message, frame
    assert is_serving(daemon)


def test_a_reply_that_cannot_be_sent_is_an_error_and_no_end(serve: Serve) -> None:
    daemon = serve("--data", f"docs={RAGGED}", "--block-size", 2**62 - 1, "--stride", 2**62 - 1)
    assert daemon.status().datasets[0].block_size == 2**62 - 1

    def unsendable(_: object) -> Reply:
        return Attached("a", "/dev/shm/x", b"", 1 << 70, 0)

    def broken(_: object) -> Reply:
        raise RuntimeError("a\nfault")

    for reply_to, word in ((unsendable, "cannot be sent"), (broken, r"internal error: RuntimeError: a\nfault")):
        number, reply = decode_reply(_reply_to_frame(encode(Status(), 9), decode_request, reply_to))
        assert isinstance(reply, Failure)
        assert number == 9
        assert word in reply.message

    def fails(_: bytes) -> tuple[int, object]:
        raise RecursionError("deep")

    number, reply = decode_reply(_reply_to_frame(encode(Status(), 9), fails, unsendable))
    assert (number, type(reply)) == (9, Failure)


@pytest.mark.promise("shutdown")
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["a reader that is gone", "closed"])
def test_output_that_nobody_takes_does_not_end_it(
    runtime_dir: Path, shm_dir: Path, tmp_path: Path, how: str, closed: str
) -> None:
    program = """
        import os, signal, sys
        how, number, *command = sys.argv[1:]
        os.close(int(number))
        if how != "closed":
            receiver, sender = os.pipe()
            os.dup2(sender, int(number), inheritable=True)
            for fd in {receiver, sender} - {int(number)}:
                os.close(fd)
        os.execv(sys.executable, [sys.executable, "-m", "shmserve", *command])
    """
    endpoint = f"{runtime_dir}/shmserve/daemon.sock"
    command = ["--log-level", "info", "start", "--data", RAGGED, "--shm-dir", shm_dir]
    with Child.python(program, how, {"stdout": 1, "stderr": 2}[closed], *command, folder=tmp_path) as daemon:
        wait_until(lambda: os.path.exists(endpoint), 20, what="the socket")
        with Connection(endpoint, 5.0) as connection:
            wait_until(lambda: _is_ready(connection.request(Status())), what="the dataset")
            connection.request(Status())
        assert all(not os.readlink(f"/proc/{daemon.pid}/fd/{fd}").startswith("socket:") for fd in (0, 1, 2))
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout_s=3.0) == 0
    assert list(shm_dir.iterdir()) == []


def _is_ready(reply: Reply) -> bool:
    return isinstance(reply, StatusReport) and all(dataset.state == "ready" for dataset in reply.datasets)


def test_bytes_that_are_not_even_zeromq_leave_it_serving(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    rng = random.Random(0)
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(2)
            client.connect(str(daemon.socket))
            client.sendall(rng.randbytes(rng.randrange(1, 200)))
    assert is_serving(daemon)


def test_every_request_of_a_quick_client_is_answered(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", RAGGED)
    busy = [Child.python("while True: pass", folder=tmp_path) for _ in range(2)]  # or libzmq's threads keep up anyway
    with busy[0], busy[1], dealer(daemon.socket) as client:
        for request_id in range(10_000):
            client.send(encode(Hello("test"), request_id))
            assert decode_reply(receive(client))[0] == request_id


def test_a_failure_carries_the_id_of_its_request(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    with dealer(daemon.socket) as client:
        client.send(encode(Stop(), 42))
        assert decode_reply(receive(client))[0] == 42
        client.send(b"nonsense")
        assert decode_reply(receive(client))[0] == 0


def test_a_client_that_does_not_read_costs_nobody(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_tokens(tmp_path / "tokens.bin", 200_000))
    frame = encode(Lookup("tokens", bytes(8 * MAX_INDICES), block_size=1), 1)
    with dealer(daemon.socket) as deaf:
        deaf.setsockopt(zmq.SNDHWM, 1000)
        for _ in range(100):  # replies of 1 MiB each that nobody takes
            deaf.send(frame)
        deadline = time.monotonic() + 20
        asked = 0
        while asked < 50 and time.monotonic() < deadline:
            assert is_serving(daemon)
            asked += 1
        assert asked == 50
        assert daemon.status().private_nbytes < 160 << 20


def test_clients_that_come_and_go_leave_nothing_in_it(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    assert is_serving(daemon)
    wait_until(lambda: len(list(descriptors.iterdir())) < 60, what="the first connection to close")
    before = len(list(descriptors.iterdir()))
    for _ in range(50):
        assert is_serving(daemon)
    wait_until(lambda: len(list(descriptors.iterdir())) <= before, what="50 connections to close")


def test_after_the_end_a_client_is_told_at_once(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    assert daemon.stop() == 0
    with Connection(daemon.endpoint, 30.0) as connection, pytest.raises(DaemonUnreachableError):
        connection.request(Status())


@pytest.mark.promise("F30")
def test_the_source_is_never_written_and_may_go_once_loaded(serve: Serve, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.bin")
    path.chmod(0o400)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    daemon = serve("--data", path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    path.unlink()
    wait_until(lambda: daemon.status().datasets[0].source_changed, what="the daemon to notice")
    segment = attach(daemon)
    tokens = segment.array(segment.description.columns[0].values)
    assert tokens.tolist() == list(range(1000))
    del segment, tokens


@pytest.mark.promise("F29")
def test_shards_are_joined_in_natural_order_and_the_order_is_said(serve: Serve, tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write_tokens(tmp_path / f"part_{number}.bin", 4, first=number)
    daemon = serve("--data", f"all={tmp_path}/part_*.bin")
    segment = attach(daemon)
    tokens = segment.array(segment.description.columns[0].values)
    assert tokens.tolist() == [1, 2, 3, 4, 2, 3, 4, 5, 10, 11, 12, 13]
    assert "all: 3 shards in this order: part_1.bin, part_2.bin, part_10.bin\n" in daemon.stderr
    del segment, tokens


def test_the_readiness_pipe_says_why_not(runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    daemon = Daemon(
        "--data",
        tmp_path / "nope.bin",
        endpoint=f"ipc://{runtime_dir}/shmserve/daemon.sock",
        shm_dir=shm_dir,
        folder=tmp_path,
        env=None,
    )
    try:
        with pytest.raises(AssertionError, match=r"error: .*nope\.bin"):
            daemon.wait_ready()
        assert daemon.wait() == 3
    finally:
        daemon.close()


def test_status_as_json_is_the_report(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    report = json.loads(run_cli("status", "--json").stdout)
    assert report["served"] is True
    assert report["pid"] == daemon.pid
    assert report["datasets"][0]["num_samples"] == len(RAGGED_SAMPLES)


@pytest.mark.promise("shutdown")
def test_signals_that_come_again_change_nothing(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    daemon.send_signal(signal.SIGTERM)
    while daemon.process.poll() is None:  # through all of its end, the interpreter's own included
        daemon.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert_nothing_left(daemon)


def test_it_ends_when_whoever_started_it_waits_no_longer(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_sparse(tmp_path / "large.bin", A_LONG_LOAD_NBYTES), wait=False)
    wait_until(daemon.socket.exists, what="the socket")
    wait_until(lambda: daemon.status().datasets[0].loaded_nbytes > 0, what="the first bytes")
    daemon.wait_no_longer()
    assert daemon.wait(timeout_s=2.0) == 0
    assert_nothing_left(daemon)


def test_it_uses_as_many_descriptors_as_it_may(serve: Serve, runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    """libzmq aborts the process when it finds none for a client."""
    endpoint = f"ipc://{runtime_dir}/shmserve/daemon.sock"
    start = f"ulimit -Sn 64; exec {sys.executable} -m shmserve start --data {RAGGED} --shm-dir {shm_dir}"
    with Child(["sh", "-c", f"{start} --endpoint {endpoint}"], folder=tmp_path) as daemon, ExitStack() as clients:
        wait_until(lambda: daemon.stdout.startswith("ready"), 20, what="the daemon")
        for _ in range(80):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(10)
            client.connect(parse_endpoint(endpoint))
        with Connection(endpoint, 5.0) as connection:
            assert isinstance(connection.request(Hello("test")), Welcome)
