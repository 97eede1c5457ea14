"""What answers at the endpoint is no daemon, or one that lies: the client gives one clear error, and leaves nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from shmserve_client import ShmDataset
from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path
from shmserve_client.errors import (
    BlockSizeError,
    DaemonUnreachableError,
    ProtocolError,
    SegmentFormatError,
    SegmentNotFoundError,
    ShmserveError,
)
from shmserve_client.protocol import (
    MAX_REPLY_NBYTES,
    Attach,
    Attached,
    Control,
    Datasets,
    Hello,
    List,
    Load,
    Lookup,
    Message,
    Offsets,
    Reload,
    Reply,
    Request,
    Status,
    Stop,
    Unload,
    Welcome,
    encode,
)
from shmserve_client.segment import Segment
from tests.fake_daemon import Answer, FakeDaemon, answering, serving
from tests.processes import Daemon, run_python, wait_until
from tests.segments import published, write_tokens

pytestmark = pytest.mark.promise("trust")

Serve = Callable[..., Daemon]

TOKENS = np.arange(1000, dtype=np.int32)
NONCE = bytes(range(16))
TIMEOUT_S = 2.0
PATIENCE_S = 20.0
"""Far more than the timeout, for machines that are busy."""
MIB = 1 << 20


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "fake.sock"


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Every thread of ZeroMQ ends with its connection; whoever answers here starts and ends his own within the test."""
    before = set(os.listdir("/proc/self/task"))
    yield
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= before, what="no thread being left")


def error_of(action: Callable[[], object]) -> ShmserveError:
    """Return the error that ends `action`, which is one line and comes in time."""
    started_s = time.monotonic()
    with pytest.raises(ShmserveError) as caught:
        action()
    assert time.monotonic() - started_s < PATIENCE_S
    message = str(caught.value)
    assert 0 < len(message) < 4001
    assert "\n" not in message
    return caught.value


def attach_at(path: Path, answer: Answer) -> ShmserveError:
    with FakeDaemon(path, answer):
        return error_of(lambda: ShmDataset(endpoint=str(path), timeout=TIMEOUT_S))


def naming(where: str, nonce: bytes = NONCE, **options: int) -> Answer:
    """The frames of a daemon that sends everybody to `where`."""
    return answering(lambda request: Attached("corpus", where, nonce, **{"block_size": 0, "stride": 0, **options}))


@pytest.mark.promise("F6")
def test_another_nonce_is_another_segment(path: Path, shm_dir: Path) -> None:
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        for nonce in (bytes(16), b"", segment.header.nonce + b"x", segment.header.nonce[:-1], bytes(MIB)):
            error = attach_at(path, naming(segment.path, nonce))
            assert isinstance(error, SegmentNotFoundError)
            assert "another one than the daemon's" in str(error)


@pytest.mark.parametrize(
    "where",
    [
        *("/etc/passwd", "/dev/zero", "/dev/full", "/dev/fuse", "/dev", "/", "", "corpus", "../..", "~/corpus"),
        *("/proc/self/mem", "/proc/self/maps", "/proc/kmsg", "/proc/self/fd/0", "/proc/self/ns/pid", "/proc/1/fd"),
        *("/proc/self/fd/../mem", "/proc/0/fd/0", "/proc/99999999/fd/1", "/proc/1/fd/99999999999999999999"),
        *("/proc/1/fd/0\n", "/proc/1/fd/\N{SUPERSCRIPT ONE}", "/proc//1/fd/0"),
        *("/dev/shm/a\0b", "/" + "x" * 1000, "/\x1b[2J"),
    ],
)  # fmt: skip
def test_a_path_to_something_else_is_refused(path: Path, where: str) -> None:
    assert isinstance(attach_at(path, naming(where)), SegmentNotFoundError | SegmentFormatError)


def make_fifo(place: Path, _: Path) -> None:
    os.mkfifo(place)


def make_socket(place: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))


def make_folder(place: Path, _: Path) -> None:
    place.mkdir()


def make_link(place: Path, segment: Path) -> None:
    place.symlink_to(segment)


def make_link_to_a_descriptor(place: Path, segment: Path) -> None:
    place.symlink_to("/proc/self/fd/0")


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_folder, make_link, make_link_to_a_descriptor])
def test_what_is_no_regular_file_is_refused_even_with_a_segment_behind_it(
    path: Path, shm_dir: Path, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    place = tmp_path / "place"
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        make(place, Path(segment.path))
        error = attach_at(path, naming(str(place), segment.header.nonce))
    assert isinstance(error, SegmentFormatError)
    assert "is not a regular file" in str(error)


def test_a_device_is_not_even_opened(path: Path) -> None:
    """To open one may do something: end a watchdog's patience, rewind a tape, become somebody's terminal."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        fcntl.ioctl(master, 0x40045431, struct.pack("i", 0))  # TIOCSPTLCK: unlock it
        (number,) = struct.unpack("i", fcntl.ioctl(master, 0x80045430, bytes(4)))  # TIOCGPTN
        terminal = f"/dev/pts/{number}"
        assert isinstance(attach_at(path, naming(terminal)), SegmentFormatError)
        with pytest.raises(BlockingIOError):
            os.read(master, 1)
        os.close(os.open(terminal, os.O_RDONLY | os.O_NOCTTY))
        with pytest.raises(OSError, match="Input/output error"):  # so it would have been seen
            os.read(master, 1)
    finally:
        os.close(master)


class TestADescriptorOfADaemon:
    """`/proc/PID/fd/N` is the one link that is followed: to a segment with the right nonce, and nothing else."""

    def test_it_leads_to_a_segment_without_a_name(self, path: Path, shm_dir: Path) -> None:
        with published(write_tokens(shm_dir, TOKENS)) as segment:
            os.unlink(segment.path)
            where = f"/proc/{os.getpid()}/fd/{segment.fd}"
            with FakeDaemon(path, naming(where, segment.header.nonce, block_size=10)):
                dataset = ShmDataset(endpoint=str(path), timeout=TIMEOUT_S)
            assert dataset[1].tolist() == list(range(10, 20))
            dataset.close()
            del dataset

    def test_another_nonce_is_refused(self, path: Path, shm_dir: Path) -> None:
        with published(write_tokens(shm_dir, TOKENS)) as segment:
            error = attach_at(path, naming(f"/proc/{os.getpid()}/fd/{segment.fd}", bytes(16)))
        assert isinstance(error, SegmentNotFoundError)

    def test_what_is_no_segment_is_refused(self, path: Path, tmp_path: Path) -> None:
        receiver, sender = os.pipe()
        try:
            with open(__file__) as file, open("/dev/null") as device, socket.socket(socket.AF_UNIX) as unbound:
                for fd in (receiver, sender, file.fileno(), device.fileno(), unbound.fileno()):
                    error = attach_at(path, naming(f"/proc/{os.getpid()}/fd/{fd}"))
                    assert isinstance(error, SegmentNotFoundError | SegmentFormatError)
        finally:
            os.close(receiver)
            os.close(sender)

    @pytest.mark.parametrize(
        "form", ["/proc/self/fd/{0}", "/proc/thread-self/fd/{0}", "/dev/fd/{0}", "/proc/{1}/fd/{0}/"]
    )
    def test_no_other_form_is_followed(self, path: Path, shm_dir: Path, form: str) -> None:
        with published(write_tokens(shm_dir, TOKENS)) as segment:
            error = attach_at(path, naming(form.format(segment.fd, os.getpid()), segment.header.nonce))
        assert isinstance(error, SegmentNotFoundError | SegmentFormatError)

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
    def test_another_users_descriptors_stay_closed(self, shm_dir: Path) -> None:
        shm_dir.chmod(0o755)
        with published(write_tokens(shm_dir, TOKENS)) as segment:
            os.chmod(segment.path, 0o444)  # so it is /proc that keeps them out
            done = run_python(
                """
                import os, sys
                from shmserve_client.errors import SegmentNotFoundError
                from shmserve_client.segment import Segment

                path, where, nonce = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
                os.setgroups([]); os.setgid(65534); os.setuid(65534)
                Segment.attach(path, nonce)
                try:
                    Segment.attach(where, nonce)
                except SegmentNotFoundError as error:
                    print(error)
                """,
                segment.path,
                f"/proc/{os.getpid()}/fd/{segment.fd}",
                segment.header.nonce.hex(),
            )
        assert "only for processes of the same user" in done.stdout


@pytest.mark.parametrize("options", [{"block_size": -1}, {"block_size": 10, "stride": -5}, {"stride": 3}])
def test_impossible_windows_are_refused(path: Path, shm_dir: Path, options: dict[str, int]) -> None:
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        error = attach_at(path, naming(segment.path, segment.header.nonce, **options))
    assert isinstance(error, BlockSizeError)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 1, "stride": (1 << 64) - 1}, {"block_size": (1 << 64) - 1}, {"block_size": 1 << 63, "stride": 1}],
)
def test_windows_far_beyond_the_data_are_none(path: Path, shm_dir: Path, options: dict[str, int]) -> None:
    with (
        published(write_tokens(shm_dir, TOKENS)) as segment,
        FakeDaemon(path, answering(lambda _: Welcome("", 0, 0))) as fake,
    ):
        fake.answer = naming(segment.path, segment.header.nonce, **options)
        try:
            dataset = ShmDataset(endpoint=str(path), timeout=TIMEOUT_S)
        except BlockSizeError:
            return
        for index in range(len(dataset)):
            assert dataset[index].tolist() == dataset.batch([index]).values[0].tolist() == [0]
            assert [int(one[0]) for one in dataset.lookup([index])][1] == 4
        dataset.close()


GARBAGE: dict[str, Answer] = {
    "no bytes": lambda number, _: [b""],
    "random bytes": lambda number, _: [np.random.default_rng(0).bytes(1000)],
    "16 MiB of zeros": lambda number, _: [bytes(MAX_REPLY_NBYTES)],
    "16 MiB of maps": lambda number, _: [b"\xdd\x00\xff\xff\xff" + b"\x80" * (MAX_REPLY_NBYTES - 5)],
    "16 MiB of depth": lambda number, _: [b"\x91" * MAX_REPLY_NBYTES],
    "over the limit": lambda number, _: [bytes(MAX_REPLY_NBYTES + 1)],
    "half a reply": lambda number, _: [encode(Attached("c", "/x", NONCE, 0, 0), number)[:-10]],
    "a reply and more": lambda number, _: [encode(Attached("c", "/x", NONCE, 0, 0), number) + b"\0"],
    "another version": lambda number, _: [encode(Welcome("1", 1, 1), number).replace(b"\xa1v\x01", b"\xa1v\x02")],
    "another reply": lambda number, _: [encode(Welcome("1", 1, 1), number)],
    "names": lambda number, _: [encode(Datasets(["corpus"] * 200_000), number)],
    "a request": lambda number, _: [encode(Hello("1"), number)],
    "an order": lambda number, _: [encode(Stop(), number)],
}  # fmt: skip


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.promise("F34")
def test_a_reply_that_is_none_is_an_error(path: Path, answer: Answer) -> None:
    error = attach_at(path, answer)
    assert isinstance(error, ProtocolError | DaemonUnreachableError)


@pytest.mark.promise("F13")
def test_replies_to_other_requests_are_no_replies(path: Path) -> None:
    """None of them is taken, however many; what would be an answer to the first request comes after it was given up."""
    answered: list[int] = []

    def answer(number: int, request: Request) -> list[bytes]:
        answered.append(number)
        others = [number - 1, number + 1, (1 << 63) - 1, *range(1000, 3000)]
        return [encode(Attached("corpus", "/etc/passwd", NONCE, 0, 0), other) for other in others]

    error = attach_at(path, answer)
    assert isinstance(error, DaemonUnreachableError)
    assert f"did not answer within {TIMEOUT_S:g} s" in str(error)
    assert answered


def test_a_dataset_that_never_stays_is_given_up(path: Path) -> None:
    """Each answer names another segment, as after a reload, and none of them is there."""
    paths = (f"/dev/shm/shmserve-test-absent-{number}" for number in range(10_000))
    error = attach_at(path, lambda number, _: [encode(Attached("corpus", next(paths), NONCE, 0, 0), number)])
    assert isinstance(error, SegmentNotFoundError)
    assert int(next(paths).rpartition("-")[2]) < 1000


@contextlib.contextmanager
def flooding(path: Path, frame: bytes) -> Iterator[None]:
    """A daemon that sends `frame` to each client without end, as fast as it is taken."""
    stop, ready = threading.Event(), threading.Event()

    def run() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 1)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.bind(f"ipc://{path}")
            ready.set()
            client = None
            while not stop.is_set():
                if router.poll(0 if client else 20):
                    client = router.recv_multipart()[0]
                if client:
                    with contextlib.suppress(zmq.Again):
                        try:
                            router.send_multipart([client, frame], zmq.NOBLOCK)
                        except zmq.ZMQError as error:
                            if error.errno != zmq.EHOSTUNREACH:
                                raise
                            client = None
                    time.sleep(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


def test_replies_without_end_take_no_memory_without_end(path: Path) -> None:
    """A client that is not reading has two of them waiting: here it is stopped in between."""
    frame = encode(Offsets(bytes(MAX_REPLY_NBYTES - 1000), b""), (1 << 63) - 1)
    with flooding(path, frame):
        done = run_python(
            """
            import sys, time
            from shmserve_client.connection import Connection
            from shmserve_client.errors import DaemonUnreachableError
            from shmserve_client.protocol import Hello

            def peak_kib():  # not getrusage's, which starts with the parent's
                with open("/proc/self/status") as status:
                    return int(status.read().split("VmHWM:")[1].split()[0])

            before_kib = peak_kib()
            with Connection(sys.argv[1], 1.0) as connection:
                socket, _ = connection._connect()
                connection._send(socket, b"")
                time.sleep(3)  # it reads nothing: ZeroMQ's own thread does
                print(peak_kib() - before_kib)
                try:
                    connection.request(Hello("test"))
                except DaemonUnreachableError as error:
                    print(error)
            """,
            path,
        )
    grown_kib, message = done.stdout.splitlines()
    assert 16 << 10 < int(grown_kib) < 192 << 10
    assert "did not answer within 1 s" in message


def zmtp(kind: bytes = b"ROUTER") -> bytes:
    """The greeting of ZMTP 3.0 without security, and the command by which a socket says what it is."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return greeting + b"\x04" + bytes([len(ready)]) + ready


LISTENERS: dict[str, bytes | None] = {
    "hangs up": None,
    "says nothing": b"",
    "speaks HTTP": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "sends noise": np.random.default_rng(0).bytes(1 << 16),
    "sends zeros": bytes(1 << 16),
    "stops within the greeting": zmtp()[:20],
    "asks for another mechanism": zmtp().replace(b"NULL", b"XYZZ"),
    "is a PUB socket": zmtp(b"PUB"),
    "promises a frame of 2^63-1 bytes": zmtp() + b"\x02" + struct.pack(">Q", (1 << 63) - 1),
    "promises a command of 2^63-1 bytes": zmtp() + b"\x06" + struct.pack(">Q", (1 << 63) - 1),
    "sends empty frames": zmtp() + b"\x00\x00" * 1000,
    "sends parts that never end": zmtp() + b"\x01\x00" * 1000,
    "sends unknown commands": zmtp() + b"\x04\x05\x04NOPE" * 100,
}


@pytest.mark.parametrize("said", LISTENERS.values(), ids=LISTENERS)
def test_a_listener_that_is_no_daemon_is_told_from_one(path: Path, said: bytes | None) -> None:
    """It takes what comes, says its piece to each connection, and keeps it open unless it hangs up."""
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as accepted:
        listening.bind(str(path))
        listening.listen()

        def run() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                if said is None:
                    client.close()
                    continue
                accepted.callback(client.close)
                with contextlib.suppress(OSError):
                    client.sendall(said)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            error = error_of(lambda: ShmDataset(endpoint=str(path), timeout=TIMEOUT_S))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert isinstance(error, DaemonUnreachableError | ProtocolError)
    assert str(path) in str(error) or isinstance(error, ProtocolError)


@pytest.mark.parametrize(
    "lie",
    [
        lambda offset, count: Offsets(b"", b""),
        lambda offset, count: Offsets(bytes(8 * count + 8), bytes(8 * count + 8)),
        lambda offset, count: Offsets(bytes(8 * count), bytes(8 * count)),
        lambda offset, count: spans([-8] * count, [8] * count),
        lambda offset, count: spans([offset] * count, [-4] * count),
        lambda offset, count: spans([offset] * count, [1 << 62] * count),
        lambda offset, count: spans([(1 << 63) - 4] * count, [(1 << 63) - 1] * count),
        lambda offset, count: spans([offset + 1] * count, [4] * count),
        lambda offset, count: spans([offset] * count, [3] * count),
        lambda offset, count: Welcome("1", 1, 1),
    ],
)
def test_lookups_that_point_elsewhere_are_refused(path: Path, shm_dir: Path, lie: Callable[[int, int], Reply]) -> None:
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        offset = segment.description.columns[0].values.offset
        honest = serving(segment.path, segment.header.nonce, block_size=10)

        def answer(number: int, request: Request) -> Any:
            if isinstance(request, Lookup):
                return [encode(lie(offset, len(request.indices) // 8), number)]
            return honest(number, request)

        with FakeDaemon(path, answer):
            dataset = ShmDataset(endpoint=str(path), timeout=TIMEOUT_S, lookup="daemon")
            for action in (
                lambda: dataset[0],
                lambda: dataset.__getitems__([0, 5]),
                lambda: dataset.batch([0, 5]),
                lambda: dataset.lookup([1]),
            ):
                assert isinstance(error_of(action), ProtocolError)
            dataset.close()


def spans(offsets: list[int], nbytes: list[int]) -> Offsets:
    return Offsets(np.array(offsets, "<i8").tobytes(), np.array(nbytes, "<i8").tobytes())


ORDERS: dict[type, Message] = {
    Stop: Stop(),
    Load: Load("more", ["/etc/passwd"]),
    Reload: Reload("corpus"),
    Unload: Unload("corpus"),
}
QUESTIONS: dict[type, Message] = {
    Hello: Hello("test"),
    List: List(),
    Attach: Attach("corpus"),
    Lookup: Lookup("corpus", bytes(8), block_size=1),
    Status: Status(),
}


@pytest.mark.promise("F34")
def test_each_socket_refuses_what_is_said_at_the_other(serve: Serve, tmp_path: Path) -> None:
    assert set(ORDERS) == set(typing.get_args(Control))
    assert set(QUESTIONS) == set(typing.get_args(Request))
    corpus = tmp_path / "corpus.bin"
    corpus.write_bytes(bytes(64))
    daemon = serve("--data", corpus)
    with Connection(daemon.endpoint, 10.0) as clients, Connection(control_path(str(daemon.socket)), 10.0) as owner:
        for said_at, messages in ((clients, ORDERS), (owner, QUESTIONS)):
            for message in messages.values():
                with pytest.raises(ProtocolError, match="this socket takes"):
                    said_at.request(message)
    report = daemon.status()
    assert [(dataset.name, dataset.state, dataset.generation) for dataset in report.datasets] == [
        ("corpus", "ready", 1)
    ]
    assert report.datasets[0].reload_state == ""
    attached = Segment.attach(report.datasets[0].path, _nonce(daemon))
    assert attached.header.total_nbytes
    del attached


def _nonce(daemon: Daemon) -> bytes:
    with Connection(daemon.endpoint, 10.0) as connection:
        reply = connection.request(Attach("corpus"))
    assert isinstance(reply, Attached)
    return reply.nonce
