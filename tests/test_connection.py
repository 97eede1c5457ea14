"""One request, one reply, or an error in time: whatever the daemon does meanwhile."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve_client import connection
from shmserve_client.connection import Connection, attach_when_ready
from shmserve_client.errors import (
    ConfigError,
    DaemonUnreachableError,
    DatasetNotFoundError,
    DatasetNotReadyError,
    EndpointError,
    ProtocolError,
    ShmserveError,
)
from shmserve_client.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Datasets,
    Failure,
    Hello,
    List,
    Lookup,
    Request,
    Welcome,
    encode,
)
from tests.fake_daemon import Answer, FakeDaemon, answering
from tests.processes import Daemon, run_python, wait_until

Serve = Callable[..., Daemon]
WELCOME = Welcome("0.1.0", 1, 2)
WHERE = Attached("corpus", "/dev/shm/x", b"n" * 16, 0, 0)


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "fake.sock"


def welcome(request_id: int, request: Request) -> Iterable[bytes]:
    return [encode(WELCOME, request_id)]


def test_a_reply_comes_back(path: Path) -> None:
    with FakeDaemon(path, welcome) as daemon, Connection(path, timeout_s=10) as client:
        assert [client.request(Hello("0.1.0")) for _ in range(3)] == [WELCOME] * 3
        assert daemon.requests == [Hello("0.1.0")] * 3


@pytest.mark.parametrize(
    ("code", "error"), [("dataset-not-found", DatasetNotFoundError), ("of-a-newer-version", ShmserveError)]
)
def test_a_refusal_is_raised_as_its_class(path: Path, code: str, error: type[ShmserveError]) -> None:
    with FakeDaemon(path, answering(lambda request: Failure(code, "no such thing"))), Connection(path, 10) as client:
        with pytest.raises(error, match=r"^no such thing$") as caught:
            client.request(List())
        assert type(caught.value) is error


def test_nobody_there_is_an_error_at_once(path: Path) -> None:
    started_s = time.monotonic()
    with Connection(path, timeout_s=30) as client, pytest.raises(DaemonUnreachableError, match="nobody listens"):
        client.request(List())
    assert time.monotonic() - started_s < 5
    with pytest.raises(EndpointError, match="udp:// is not supported"):
        Connection("udp://127.0.0.1:1", 1)


def test_silence_is_an_error_in_time(path: Path) -> None:
    with FakeDaemon(path, lambda request_id, request: []), Connection(path, timeout_s=0.3) as client:
        started_s = time.monotonic()
        with pytest.raises(DaemonUnreachableError, match=r"did not answer within 0\.3 s"):
            client.request(List())
        assert 0.3 <= time.monotonic() - started_s < 3


def test_replies_to_other_requests_are_dropped(path: Path) -> None:
    def with_noise(request_id: int, request: Request) -> Iterable[bytes]:
        return [
            encode(Datasets(["late"]), request_id - 1),
            encode(Datasets(["of nobody"]), request_id + 1000),
            encode(Datasets([str(request_id)]), request_id),
            encode(Datasets(["twice"]), request_id),
        ]

    with FakeDaemon(path, with_noise), Connection(path, timeout_s=10) as client:
        assert [client.request(List()) for _ in range(5)] == [Datasets([str(i + 1)]) for i in range(5)]


@pytest.mark.promise("F13")
def test_a_late_reply_is_not_the_next_requests(path: Path) -> None:
    answered = threading.Event()

    def slow_at_first(request_id: int, request: Request) -> Iterable[bytes]:
        if isinstance(request, Hello):
            answered.wait(10)
        return [encode(WELCOME if isinstance(request, Hello) else Datasets([]), request_id)]

    with FakeDaemon(path, slow_at_first), Connection(path, timeout_s=0.3) as client:
        with pytest.raises(DaemonUnreachableError):
            client.request(Hello("0.1.0"))
        answered.set()
        client.timeout_s = 10
        assert client.request(List()) == Datasets([])


def test_a_refusal_of_an_unreadable_request_reaches_it(path: Path) -> None:
    refusal = encode(Failure("protocol", "could not read that"), 0)
    with (
        FakeDaemon(path, lambda request_id, request: [refusal]),
        Connection(path, 10) as client,
        pytest.raises(ProtocolError, match="could not read that"),
    ):
        client.request(List())


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (
            encode(WELCOME, 1).replace(b"\xa1v\x01", b"\xa1v\x02"),
            rf"protocol version 2, this side speaks version {PROTOCOL_VERSION}",
        ),
        (encode(Hello("x"), 1), "op 'hello'"),
    ],
)
def test_nonsense_is_a_protocol_error_and_the_next_request_works(path: Path, frame: bytes, message: str) -> None:
    replies = iter([[frame], [encode(WELCOME, 2)]])
    with FakeDaemon(path, lambda request_id, request: next(replies)), Connection(path, 10) as client:
        with pytest.raises(ProtocolError, match=message):
            client.request(Hello("0.1.0"))
        assert client.request(Hello("0.1.0")) == WELCOME


def test_a_reply_over_the_limit_is_not_taken(path: Path) -> None:
    huge = bytes(17 << 20)
    with (
        FakeDaemon(path, lambda request_id, request: [huge]),
        Connection(path, timeout_s=10) as client,
        pytest.raises(DaemonUnreachableError, match=r"not a shmserve daemon, or its answer has more than 16777216"),
    ):
        client.request(Lookup("x", b""))


def test_closing_is_immediate_and_idempotent(path: Path) -> None:
    with FakeDaemon(path, lambda request_id, request: []):
        client = Connection(path, timeout_s=0.1)
        with pytest.raises(DaemonUnreachableError):
            client.request(List())
        started_s = time.monotonic()
        client.close()
        client.close()
        assert time.monotonic() - started_s < 1


def test_a_closed_connection_connects_anew(path: Path) -> None:
    with FakeDaemon(path, welcome), Connection(path, 10) as client:
        client.request(Hello("0.1.0"))
        client.close()
        assert client.request(Hello("0.1.0")) == WELCOME


def test_threads_share_a_connection(path: Path) -> None:
    wrong: list[object] = []

    def ask(client: Connection, name: str) -> None:
        for _ in range(50):
            reply = client.request(Attach(name))
            if reply != Datasets([name]):
                wrong.append(reply)

    echo = answering(lambda request: Datasets([request.name or ""] if isinstance(request, Attach) else []))
    with FakeDaemon(path, echo), Connection(path, 10) as client:
        threads = [threading.Thread(target=ask, args=(client, f"name-{i}")) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_the_daemon_may_restart_between_two_requests(path: Path) -> None:
    with Connection(path, timeout_s=10) as client:
        for _ in range(3):
            with FakeDaemon(path, welcome):
                started_s = time.monotonic()
                assert client.request(Hello("0.1.0")) == WELCOME
                assert time.monotonic() - started_s < 5


def test_a_request_outlives_the_daemon_that_took_it(path: Path) -> None:
    taken = threading.Event()

    def take_and_say_nothing(request_id: int, request: Request) -> Iterable[bytes]:
        taken.set()
        return []

    replies: list[object] = []
    with Connection(path, timeout_s=20) as client:
        asking = threading.Thread(target=lambda: replies.append(client.request(Hello("0.1.0"))))
        with FakeDaemon(path, take_and_say_nothing):
            asking.start()
            assert taken.wait(10)
        with FakeDaemon(path, welcome):
            asking.join(5)
            assert not asking.is_alive()
    assert replies == [WELCOME]


def test_a_daemon_that_goes_for_good_is_an_error_soon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RETURN_S", 0.2)
    taken = threading.Event()

    def take_and_say_nothing(request_id: int, request: Request) -> Iterable[bytes]:
        taken.set()
        return []

    failures: list[BaseException] = []

    def ask(client: Connection) -> None:
        try:
            client.request(List())
        except DaemonUnreachableError as error:
            failures.append(error)

    with Connection(path, timeout_s=60) as client:
        asking = threading.Thread(target=ask, args=(client,))
        with FakeDaemon(path, take_and_say_nothing):
            asking.start()
            assert taken.wait(10)
        asking.join(10)
        (failure,) = failures
        assert re.search(r"ended during the request and did not come back within 0\.2 s", str(failure))


@pytest.mark.parametrize("timeout", [-1, float("nan"), "x", None, 10**400])
def test_what_is_no_timeout_is_refused(path: Path, timeout: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout .*: give a number of seconds from 0 up"):
        Connection(path, timeout)


def test_a_timeout_may_be_infinite(path: Path) -> None:
    for timeout_s in (float("inf"), 1e300, np.float32(10)):
        with FakeDaemon(path, welcome), Connection(path, timeout_s) as client:
            assert client.request(Hello("0.1.0")) == WELCOME


def test_a_request_over_the_limit_is_not_sent(path: Path) -> None:
    with FakeDaemon(path, welcome) as daemon, Connection(path, timeout_s=30) as client:
        started_s = time.monotonic()
        with pytest.raises(ProtocolError, match=r"request of 6000.. bytes: 528384 are the limit"):
            client.request(Attach("x" * 600_000))
        assert time.monotonic() - started_s < 5
        assert client.request(Hello("0.1.0")) == WELCOME
        assert daemon.requests == [Hello("0.1.0")]


def test_a_stopped_daemon_answers_after_it_continues(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").write_bytes(bytes(range(64)))
    daemon = serve("--data", tmp_path / "corpus.bin")
    with Connection(daemon.socket, timeout_s=0.5) as client:
        assert client.request(List()) == Datasets(["corpus"])
        daemon.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DaemonUnreachableError, match="did not answer"):
                client.request(List())
        finally:
            daemon.send_signal(signal.SIGCONT)
        client.timeout_s = 5
        reply = client.request(Hello("0.1.0"))
        assert isinstance(reply, Welcome)
        assert reply.pid == daemon.pid


def test_a_forked_child_has_a_connection_of_its_own(path: Path) -> None:
    with FakeDaemon(path, welcome), Connection(path, timeout_s=10) as client:
        client.request(Hello("0.1.0"))
        children = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = 0 if [client.request(Hello("0.1.0")) for _ in range(20)] == [WELCOME] * 20 else 2
                    client.close()
                finally:
                    os._exit(code)
            children.append(pid)
        assert [client.request(Hello("0.1.0")) for _ in range(20)] == [WELCOME] * 20
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
        assert client.request(Hello("0.1.0")) == WELCOME


@pytest.mark.promise("F16")
def test_an_interpreter_exits_at_once_with_an_open_connection(path: Path) -> None:
    with FakeDaemon(path, welcome):
        done = run_python(
            """
            import sys, time
            from shmserve_client.connection import Connection
            from shmserve_client.protocol import Hello
            client = Connection(sys.argv[1], timeout_s=10)
            client.request(Hello("0.1.0"))
            print(time.time(), flush=True)
            """,
            path,
        )
        assert done.stderr == ""
        assert time.time() - float(done.stdout) < 2


def test_attaching_waits_while_the_dataset_loads(path: Path) -> None:
    loading = Failure("dataset-not-ready", "'corpus' is still loading, 35 %")
    replies = iter([loading, loading, loading, WHERE])
    with FakeDaemon(path, answering(lambda request: next(replies))) as daemon:
        assert attach_when_ready(str(path), Attach("corpus"), timeout_s=10, patience_s=10) == WHERE
        assert daemon.requests == [Attach("corpus")] * 4


def test_attaching_gives_up_in_time(path: Path) -> None:
    loading = Failure("dataset-not-ready", "'corpus' is still loading, 35 %")
    with FakeDaemon(path, answering(lambda request: loading)):
        started_s = time.monotonic()
        with pytest.raises(DatasetNotReadyError, match=r"35 %, after 0\.3 s: allow more with timeout="):
            attach_when_ready(str(path), Attach("corpus"), timeout_s=10, patience_s=0.3)
        assert time.monotonic() - started_s < 3


@pytest.mark.promise("F1")
def test_attaching_notices_a_daemon_that_fails_to_load(path: Path) -> None:
    loading = Failure("dataset-not-ready", "'corpus' is still loading, 35 %")
    daemon = FakeDaemon(path, answering(lambda request: loading))
    failures: list[BaseException] = []

    def attach() -> None:
        try:
            attach_when_ready(str(path), Attach("corpus"), timeout_s=30, patience_s=60)
        except DaemonUnreachableError as error:
            failures.append(error)

    with daemon:
        attaching = threading.Thread(target=attach)
        attaching.start()
        wait_until(lambda: len(daemon.requests) > 2)
    attaching.join(10)
    assert len(failures) == 1


def test_another_reply_than_asked_for_is_a_protocol_error(path: Path) -> None:
    answer: Answer = welcome
    with FakeDaemon(path, answer), pytest.raises(ProtocolError, match="Welcome"):
        attach_when_ready(str(path), Attach("corpus"), timeout_s=10, patience_s=10)


def test_another_dataset_than_asked_for_is_a_protocol_error(path: Path) -> None:
    with FakeDaemon(path, answering(lambda request: WHERE)):
        assert attach_when_ready(str(path), Attach(), timeout_s=10, patience_s=10) == WHERE
        with pytest.raises(ProtocolError, match="answered with dataset 'corpus' when asked for 'other'"):
            attach_when_ready(str(path), Attach("other"), timeout_s=10, patience_s=10)


def test_too_few_descriptors_are_an_error_and_no_abort(runtime_dir: Path) -> None:
    done = run_python(
        """
        import os, resource, socket, sys
        from shmserve_client.connection import Connection
        from shmserve_client.errors import DaemonUnreachableError
        from shmserve_client.protocol import List

        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sys.argv[1])
        listener.listen()
        Connection(sys.argv[1], 0.1)  # so that nothing has to be imported any more
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        for free in range(15):
            try:
                Connection(sys.argv[1], 0.1).request(List())
            except DaemonUnreachableError as error:
                print(free, error)
            os.close(taken.pop())
        """,
        runtime_dir / "a.sock",
    )
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(15))
    assert all("ulimit -n" in line for line in lines)
