"""Clients by TCP: with keys or on the loopback interface, asking and attaching, and never giving orders."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shmserve_client import ShmDataset
from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path, host_and_port, is_loopback, listening
from shmserve_client.errors import ConfigError, DaemonUnreachableError, EndpointError, ProtocolError, ShmserveError
from shmserve_client.keys import add_client, make_keys
from shmserve_client.protocol import Datasets, List, Stop
from tests.processes import Daemon, run_cli, run_python, wait_until

Serve = Callable[..., Daemon]
LIST = Datasets(["corpus"])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(range(64)))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def open_daemon(serve: Serve, corpus: Path) -> Daemon:
    return serve("--data", corpus, "--block-size", 4, "--tcp", "127.0.0.1:0")


@pytest.fixture
def keyed_daemon(serve: Serve, corpus: Path, keys: Path) -> Daemon:
    return serve("--data", corpus, "--block-size", 4, "--tcp", "127.0.0.1:0", "--keys", keys)


def tcp(daemon: Daemon) -> str:
    return daemon.status().tcp_endpoint


def ask(endpoint: str, keys: Path | None = None, timeout_s: float = 10) -> object:
    with Connection(endpoint, timeout_s, keys) as client:
        return client.request(List())


def test_clients_attach_and_look_up_by_tcp(open_daemon: Daemon) -> None:
    endpoint = tcp(open_daemon)
    assert host_and_port(endpoint)[1] > 0
    with (
        ShmDataset("corpus", endpoint=endpoint, dtype="stored") as dataset,
        ShmDataset(endpoint=endpoint, lookup="daemon") as remote,
    ):
        assert dataset.info.endpoint == endpoint
        assert dataset[1].tolist() == remote[1].tolist() == [2312 + 514 * i for i in range(4)]
        assert pickle.loads(pickle.dumps(remote))[-1].tolist() == dataset[-1].tolist()
    assert ask(str(open_daemon.socket)) == LIST


def test_the_real_address_is_announced(open_daemon: Daemon) -> None:
    endpoint = tcp(open_daemon)
    assert f"{open_daemon.socket} and {endpoint} (pid" in open_daemon.stdout
    assert f"{open_daemon.socket} and {endpoint}\n" in run_cli("status", "--endpoint", open_daemon.endpoint).stdout


def test_the_commands_ask_by_tcp(keyed_daemon: Daemon, keys: Path) -> None:
    where = {"SHMSERVE_ENDPOINT": tcp(keyed_daemon), "SHMSERVE_KEYS": str(keys)}
    assert run_cli("ls", env=where).stdout == "corpus\n"
    status = run_cli("status", "--json", env=where)
    assert status.returncode == 0, status
    assert json.loads(status.stdout)["tcp_endpoint"] == tcp(keyed_daemon)
    looked_up = run_cli("lookup", "corpus", 1, "--endpoint", tcp(keyed_daemon), "--keys", keys)
    assert looked_up.stdout.split()[::2] == ["1", "8"], looked_up


def test_orders_are_not_taken_by_tcp(open_daemon: Daemon) -> None:
    endpoint = tcp(open_daemon)
    for command in (["stop"], ["unload", "corpus"], ["reload", "corpus"], ["load", "corpus.bin"]):
        refused = run_cli(*command, "--endpoint", endpoint)
        assert refused.returncode == 1
        assert refused.stderr == (
            f"error: the daemon at {endpoint} takes orders from its own node alone: give its ipc endpoint, "
            "with --endpoint there\n"
        )
    with pytest.raises(EndpointError):
        control_path(endpoint)
    with Connection(endpoint, timeout_s=10) as client, pytest.raises(ProtocolError, match="op 'stop'"):
        client.request(Stop())
    assert ask(endpoint) == LIST


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "[::]", "example.org"])
def test_other_machines_are_let_in_only_with_keys(corpus: Path, runtime_dir: Path, shm_dir: Path, host: str) -> None:
    refused = run_cli("start", "--data", corpus, "--shm-dir", shm_dir, "--tcp", f"{host}:0")
    assert refused.returncode == 3
    assert refused.stderr == (
        f"error: tcp {host}:0 can be reached from other machines, so it needs keys: make them with `shmserve keys "
        "DIR`, and give --keys DIR\n"
    )
    assert not (runtime_dir / "shmserve").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


def test_with_keys_any_address_will_do(serve: Serve, corpus: Path, keys: Path) -> None:
    daemon = serve("--data", corpus, "--tcp", "0.0.0.0:0", "--keys", keys)
    port = host_and_port(tcp(daemon))[1]
    assert ask(f"tcp://127.0.0.1:{port}", keys) == LIST


@pytest.mark.parametrize("with_keys", [False, True])
def test_ipv6(serve: Serve, corpus: Path, keys: Path, with_keys: bool) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    daemon = serve("--data", corpus, "--tcp", "[::1]:0", *(["--keys", keys] if with_keys else []))
    assert tcp(daemon).startswith("tcp://[::1]:")
    assert ask(tcp(daemon), keys if with_keys else None) == LIST


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.0.0.1:", ":5555", "127.0.0.1:65536", "127.0.0.1:-1", "::1:5", "[127.0.0.1]:5", "a b:5"],
)
def test_what_is_no_address_is_refused(corpus: Path, runtime_dir: Path, shm_dir: Path, address: str) -> None:
    with pytest.raises(EndpointError):
        host_and_port(address)
    refused = run_cli("start", "--data", corpus, "--shm-dir", shm_dir, "--tcp", address)
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1
    assert "error: " in refused.stderr


def test_an_address_in_use_is_refused(corpus: Path, runtime_dir: Path, shm_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = run_cli("start", "--data", corpus, "--shm-dir", shm_dir, "--tcp", address)
    assert refused.returncode == 3
    assert f"error: cannot listen at tcp://{address}: Address already in use: choose another --tcp\n" in refused.stderr


def test_the_configuration_file_says_it_as_well(serve: Serve, corpus: Path, keys: Path, tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'tcp = "127.0.0.1:0"\nkeys = "keys"\n[datasets.corpus]\ndata = "{corpus.name}"\n')
    daemon = serve("--config", config)
    assert ask(tcp(daemon), keys) == LIST
    with pytest.raises(DaemonUnreachableError, match="only clients with keys in"):
        ask(tcp(daemon))


def test_a_daemon_listens_to_tcp_beside_its_socket_only(corpus: Path, runtime_dir: Path, shm_dir: Path) -> None:
    refused = run_cli("start", "--data", corpus, "--shm-dir", shm_dir, "--endpoint", "tcp://127.0.0.1:5555")
    assert refused.returncode == 3
    assert "give the path of a socket, and TCP beside it as --tcp HOST:PORT" in refused.stderr


def test_listed_clients_are_let_in_and_others_are_told(keyed_daemon: Daemon, keys: Path, tmp_path: Path) -> None:
    endpoint = tcp(keyed_daemon)
    box = add_client(keys, "box")  # while the daemon runs
    assert ask(endpoint, keys) == ask(endpoint, box) == ask(str(keyed_daemon.socket)) == LIST

    make_keys(tmp_path / "other")
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "client.key_secret").write_bytes((tmp_path / "other" / "client.key_secret").read_bytes())
    (stranger / "client.key_secret").chmod(0o600)
    (stranger / "daemon.key").write_bytes((keys / "daemon.key").read_bytes())
    for theirs, message in (
        (None, r"lets only clients with keys in, .* give keys=DIR"),
        (tmp_path / "other", r"does not have the key .*other/daemon\.key"),
        (stranger, r"does not list the key .*stranger/client\.key_secret"),
    ):
        started_s = time.monotonic()
        with pytest.raises(DaemonUnreachableError, match=message):
            ask(endpoint, theirs, timeout_s=30)
        assert time.monotonic() - started_s < 15
    assert ask(endpoint, keys) == LIST


def test_keys_for_a_daemon_without_any_are_an_error(open_daemon: Daemon, keys: Path) -> None:
    with pytest.raises(DaemonUnreachableError, match=r"does not have the key .*, or one without keys"):
        ask(tcp(open_daemon), keys, timeout_s=30)
    with Connection(open_daemon.socket, 10, keys) as client:  # a socket of the node needs none, and ignores them
        assert client.request(List()) == LIST


def test_a_client_that_is_taken_off_the_list_does_not_get_in_again(keyed_daemon: Daemon, keys: Path) -> None:
    endpoint = tcp(keyed_daemon)
    box = add_client(keys, "box")
    with Connection(endpoint, 10, box) as client:
        assert client.request(List()) == LIST
        (keys / "clients" / "box.key").unlink()
        assert client.request(List()) == LIST  # it is in
        client.close()
        with pytest.raises(DaemonUnreachableError, match="does not list the key"):
            client.request(List())
    assert ask(endpoint, keys) == LIST


def test_a_dataset_takes_keys_and_its_pickles_only_their_path(keyed_daemon: Daemon, keys: Path) -> None:
    with ShmDataset(endpoint=tcp(keyed_daemon), keys=keys, lookup="daemon") as dataset:
        pickled = pickle.dumps(dataset)
        secret = (keys / "client.key_secret").read_text().split('secret-key = "')[1].split('"')[0]
        assert secret.encode() not in pickled
        assert str(keys).encode() in pickled
        assert pickle.loads(pickled)[0].tolist() == dataset[0].tolist()
        assert dataset.refresh() is False


def test_keys_that_cannot_be_used_are_an_error(keyed_daemon: Daemon, keys: Path, corpus: Path, shm_dir: Path) -> None:
    (keys / "client.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ask(tcp(keyed_daemon), keys)
    (keys / "daemon.key_secret").chmod(0o644)
    other = keys.parent / "d" / "other.sock"
    args = ["--data", corpus, "--shm-dir", shm_dir, "--endpoint", other, "--tcp", "127.0.0.1:0", "--keys", keys]
    refused = run_cli("start", *args)
    assert refused.returncode == 3
    assert "chmod 600 it\n" in refused.stderr
    assert not other.exists()


def test_nobody_there_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert listening(endpoint)
    assert not listening(endpoint)
    started_s = time.monotonic()
    with pytest.raises(DaemonUnreachableError, match=rf"no daemon at {endpoint} \(nobody listens\): .*--tcp HOST:PORT"):
        ask(endpoint, timeout_s=30)
    assert time.monotonic() - started_s < 10


def test_a_host_that_does_not_answer_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(3)]
        try:
            for client in waiting:  # nobody accepts: the kernel lets few wait and ignores the rest
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            started_s = time.monotonic()
            with pytest.raises(DaemonUnreachableError, match=r"no connection within 0\.5 s"):
                ask(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.5)
            assert time.monotonic() - started_s < 5
        finally:
            for client in waiting:
                client.close()


def test_what_is_no_daemon_is_an_error_in_time(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for theirs in (None, keys):  # it accepts, and says nothing
            with pytest.raises(DaemonUnreachableError, match=r"did not answer within 0\.5 s"):
                ask(endpoint, theirs, timeout_s=0.5)


@pytest.mark.promise("F34")
def test_a_flood_by_tcp_hurts_nobody(serve: Serve, corpus: Path, keys: Path) -> None:
    daemon = serve("--data", corpus, "--tcp", "127.0.0.1:0", "--keys", keys)
    endpoint = tcp(daemon)
    with Connection(endpoint, 20, keys) as client:
        assert client.request(List()) == LIST
        run_python(
            """
            import collections, socket, sys

            held = collections.deque(maxlen=500)
            for number in range(1500):
                held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30))
                if number % 3:
                    held[-1].sendall(bytes([255, 0, number % 256]) * (number % 50))
            """,
            host_and_port(endpoint)[1],
        )
        assert client.request(List()) == LIST
    assert ask(endpoint, keys) == ask(str(daemon.socket)) == LIST
    wait_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) < 100, what="descriptors given back")


def test_a_dropped_client_by_tcp_gets_its_answer(serve: Serve, corpus: Path, keys: Path) -> None:
    daemon = serve("--data", corpus, "--tcp", "127.0.0.1:0", "--keys", keys)
    with Connection(tcp(daemon), 20, keys) as client:
        client.request(List())
        daemon_port = host_and_port(client.path)[1]
        daemon.kill()
        again = serve("--data", corpus, "--tcp", f"127.0.0.1:{daemon_port}", "--keys", keys)
        assert client.request(List()) == LIST
        assert again.process.poll() is None


def test_without_keys_zmq_auth_is_not_imported(open_daemon: Daemon) -> None:
    run_python(
        """
        import sys
        from shmserve_client.connection import Connection
        from shmserve_client.protocol import List

        with Connection(sys.argv[1], 10) as client:
            client.request(List())
        assert "zmq.auth" not in sys.modules
        """,
        tcp(open_daemon),
    )


def test_errors_of_keys_are_ours(tmp_path: Path) -> None:
    for keys in (tmp_path, tmp_path / "nowhere"):
        with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ShmserveError, match="shmserve keys DIR"):
            ask(f"tcp://127.0.0.1:{server.getsockname()[1]}", keys)
