"""Where daemons listen: directories that can be trusted, sockets that somebody listens on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve_client import endpoint
from shmserve_client.errors import DaemonUnreachableError, EndpointError


@pytest.fixture
def listener(runtime_dir: Path) -> Iterator[Path]:
    """A socket that somebody listens on, where this user's daemon would be."""
    endpoint.ensure_directory(str(runtime_dir / "shmserve"))
    path = runtime_dir / "shmserve" / endpoint.DEFAULT_NAME
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        yield path


@pytest.mark.parametrize("given", ["ipc:///run/x/a.sock", "/run/x/a.sock", "ipc:///run/x/../x/./a.sock"])
def test_an_endpoint_is_a_path(given: str) -> None:
    assert endpoint.parse_endpoint(given) == "/run/x/a.sock"


@pytest.mark.parametrize(
    "given",
    ["udp://127.0.0.1:5555", "inproc://x", "ipc://relative", "relative", "ipc://@abstract", "/run/", "", "/a\0b", 5],
)
def test_other_addresses_are_refused(given: Any) -> None:
    with pytest.raises(EndpointError, match=r"ipc:///path"):
        endpoint.parse_endpoint(given)


@pytest.mark.parametrize("given", ["tcp://127.0.0.1:5555", "tcp://[::1]:1", "tcp://node-7.example.org:65535"])
def test_an_endpoint_of_tcp_stays_as_it_is(given: str) -> None:
    assert endpoint.parse_endpoint(given) == endpoint.address_of(given) == given
    assert endpoint.is_tcp(given)
    assert not endpoint.is_tcp("/run/a.sock")
    assert endpoint.address_of("/run/a.sock") == "ipc:///run/a.sock"


@pytest.mark.parametrize(
    "given", ["tcp://", "tcp://host", "tcp://*:5", "tcp://host:0", "tcp://::1:5", "tcp://u@host:5"]
)
def test_what_is_no_host_and_port_is_refused(given: str) -> None:
    with pytest.raises(EndpointError):
        endpoint.parse_endpoint(given)


def test_the_longest_path_still_makes_both_sockets(runtime_dir: Path) -> None:
    longest = f"{runtime_dir}/".ljust(endpoint.MAX_SOCKET_PATH_NBYTES - len(".ctl"), "x")
    assert endpoint.parse_endpoint(longest) == longest
    for path in (longest, endpoint.control_path(longest)):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
        os.unlink(path)


@pytest.mark.promise("F15")
def test_a_longer_path_is_refused_with_both_numbers() -> None:
    with pytest.raises(EndpointError, match=r"has 104 bytes, a socket's path may have 103"):
        endpoint.parse_endpoint("/" + "x" * 103)
    with pytest.raises(EndpointError, match="has 105 bytes"):
        endpoint.parse_endpoint("/" + "ü" * 52)


def test_the_runtime_directory_comes_first(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert endpoint.default_directories() == [
        f"{runtime_dir}/shmserve",
        f"/run/user/{uid}/shmserve",
        f"/tmp/shmserve-{uid}",
    ]
    assert endpoint.default_endpoint() == f"{runtime_dir}/shmserve/daemon.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "not/absolute")
    assert endpoint.default_directories()[0] == f"/run/user/{uid}/shmserve"
    monkeypatch.setenv("SHMSERVE_ENDPOINT", "ipc:///run/mine.sock")
    assert endpoint.default_endpoint() == "/run/mine.sock"


@pytest.mark.promise("F15")
def test_a_directory_that_is_missing_or_too_long_is_passed_over(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir / "gone"))
    assert endpoint.default_directory() != f"{runtime_dir}/gone/shmserve"
    deep = runtime_dir / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert endpoint.default_directory() != f"{deep}/shmserve"


def test_a_directory_that_is_there_needs_no_writable_parent(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(runtime_dir))
    assert endpoint.default_directory() != f"{runtime_dir}/shmserve"
    (runtime_dir / "shmserve").mkdir(mode=0o700)
    assert endpoint.default_directory() == f"{runtime_dir}/shmserve"


def test_a_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    previous = os.umask(0)
    try:
        endpoint.ensure_directory(str(folder))
    finally:
        os.umask(previous)
    assert folder.stat().st_mode & 0o7777 == 0o700
    endpoint.ensure_directory(str(folder))  # again, as the next daemon does
    endpoint.ensure_directory(str(folder), gid=os.getegid())
    assert folder.stat().st_mode & 0o7777 == 0o710
    endpoint.ensure_directory(str(folder))


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o720, 0o701])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "loose"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(EndpointError, match=rf"mode {mode:04o}, open to other users: put the socket into a directory"):
        endpoint.ensure_directory(str(folder))


@pytest.mark.promise("F19")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused_by_daemon_and_client(runtime_dir: Path, listener: Path) -> None:
    assert endpoint.find_endpoint() == str(listener)
    os.chown(listener.parent, 12345, -1)
    with pytest.raises(EndpointError, match="belongs to uid 12345, not to uid 0"):
        endpoint.ensure_directory(str(listener.parent))
    assert str(listener) not in endpoint.find_endpoints()
    os.chown(listener.parent, 0, -1)


def test_a_link_or_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(EndpointError, match="is not a directory"):
            endpoint.ensure_directory(str(tmp_path / name))
    with pytest.raises(EndpointError, match="No such file or directory: choose another --endpoint"):
        endpoint.ensure_directory(str(tmp_path / "no" / "parent"))


def test_listening(listener: Path) -> None:
    assert endpoint.listening(str(listener))
    assert not endpoint.listening(str(listener.parent / "missing"))
    assert not endpoint.listening("/" + "x" * 200)


def test_a_full_backlog_counts_as_listening(listener: Path) -> None:
    waiting = []
    try:
        for _ in range(8):  # nobody accepts: the kernel queues few and then refuses to
            client = socket.socket(socket.AF_UNIX)
            waiting.append(client)
            client.setblocking(False)
            try:
                client.connect(str(listener))
            except BlockingIOError:
                break
        else:
            pytest.fail("the backlog never filled")
        assert endpoint.listening(str(listener))
    finally:
        for client in waiting:
            client.close()


def test_a_socket_whose_daemon_died_is_not_listening(runtime_dir: Path) -> None:
    path = runtime_dir / "left.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
    assert path.is_socket()
    assert not endpoint.listening(str(path))


def test_the_client_finds_the_daemon(listener: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint.find_endpoints()[0] == endpoint.find_endpoint() == str(listener)
    assert endpoint.find_endpoint(f"ipc://{listener}") == str(listener)
    monkeypatch.setenv("SHMSERVE_ENDPOINT", f"ipc://{listener.parent}/other.sock")
    assert endpoint.find_endpoints() == []
    with pytest.raises(DaemonUnreachableError, match=rf"{listener.parent}/other.sock \(nobody listens\): start one"):
        endpoint.find_endpoint()


def test_without_a_daemon_the_error_names_every_place(runtime_dir: Path) -> None:
    if endpoint.find_endpoints():
        pytest.skip("a daemon of this user runs on this machine")
    with pytest.raises(DaemonUnreachableError) as caught:
        endpoint.find_endpoint()
    message = str(caught.value)
    assert all(directory in message for directory in [*endpoint.default_directories(), "/run/shmserve"])
    assert message.count("(nobody listens)") == 1
    assert "`shmserve start --data PATH`" in message


def test_a_place_is_probed_once(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that comes up between two probes must not make an error without a reason."""
    reasons = iter(["nobody listens"])
    monkeypatch.setattr(endpoint, "_probe", lambda path, timeout_s: next(reasons))
    with pytest.raises(DaemonUnreachableError, match=rf"no daemon at {runtime_dir}/x \(nobody listens\): start"):
        endpoint.find_endpoint(f"{runtime_dir}/x")
