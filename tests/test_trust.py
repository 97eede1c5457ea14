"""Who may read, attach and control: the promises of docs/security.md, tried by processes of other users."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve_client import locks
from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path, lock_path, log_path
from shmserve_client.errors import SegmentNotFoundError
from shmserve_client.locks import READERS, attached_processes
from shmserve_client.protocol import Attach, Attached, DatasetStatus, Hello, Welcome
from shmserve_client.segment import Segment
from tests.processes import Child, Daemon, run_cli, run_python, wait_until
from tests.segments import published, write_tokens

Serve = Callable[..., Daemon]

pytestmark = [
    pytest.mark.promise("trust"),
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which only root can"),
]

GROUP = 54_321
NOBODY = 65_534
TOKENS = np.arange(1000, dtype=np.uint16)

BECOME = """
    import encodings.ascii, fcntl, json, os, signal, socket, sys

    import numpy as np
    import zmq.auth

    import shmserve.cli
    import shmserve_client.endpoint, shmserve_client.locks
    from shmserve_client.connection import Connection
    from shmserve_client.protocol import *
    from shmserve_client.segment import Segment

    def become(uid, groups=()):
        os.setgroups(groups)
        os.setgid(uid)
        os.setuid(uid)

    def outcome(action, *args):
        try:
            return action(*args)
        except Exception as error:
            return type(error).__name__

"""
"""What a program needs to become another user: it imports first, since that user may not read these files."""

ATTEMPTS = BECOME + """
    def connect(path):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            return "connected"

    def open_file(path, flags):
        os.close(os.open(path, flags))
        return "opened"

    def ask(path, message):
        with Connection(path, 10.0) as connection:
            return type(connection.request(message)).__name__

    def read_all(path, nonce):
        segment = Segment.attach(path, nonce)
        return segment.array(segment.description.columns[0].values).tolist()

    def write_in_place(path, nonce):
        segment = Segment.attach(path, nonce)
        segment.array(segment.description.columns[0].values)[:] = 7
        return "written"

    def write_through(path):
        import mmap
        fd = os.open(path, os.O_RDONLY)
        try:
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            return "mapped"
        finally:
            os.close(fd)

    def reopen(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            return open_file(f"/proc/self/fd/{fd}", os.O_RDWR)
        finally:
            os.close(fd)

    def change_mode(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(fd, 0o666)
        finally:
            os.close(fd)

    def own(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            return shmserve_client.locks.take_owner_lock(fd)
        finally:
            os.close(fd)

    def plant(path, own_file):
        open(own_file, "w").close()
        try:
            os.rename(own_file, path)
        finally:
            os.unlink(own_file)

    def command(*args):
        sys.argv = ["shmserve", *args]
        try:
            shmserve.cli.main()
        except SystemExit as end:
            return end.code

    uid, groups, given = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    endpoint, segment, nonce, daemon = given["endpoint"], given["segment"], bytes.fromhex(given["nonce"]), given["pid"]
    folder = os.path.dirname(endpoint)
    become(uid, groups)
    attempts = {
        "list the folder": (os.listdir, folder),
        "make a file in it": (open_file, folder + "/mine", os.O_WRONLY | os.O_CREAT),
        "connect": (connect, endpoint),
        "connect as the owner": (connect, endpoint + ".ctl"),
        "say hello": (ask, endpoint, Hello("1")),
        "list": (ask, endpoint, List()),
        "ask where it is": (ask, endpoint, Attach("corpus")),
        "look up": (ask, endpoint, Lookup("corpus", bytes(8), block_size=1)),
        "ask how it is": (ask, endpoint, Status()),
        "stop by the clients' socket": (ask, endpoint, Stop()),
        "stop": (ask, endpoint + ".ctl", Stop()),
        "remove the socket": (os.unlink, endpoint),
        "replace the socket": (plant, endpoint, os.path.dirname(folder) + "/mine"),
        "read the lock": (open_file, endpoint + ".lock", os.O_RDONLY),
        "see who holds the lock": (shmserve_client.locks.holder_of, endpoint + ".lock"),
        "kill the daemon": (os.kill, daemon, 15),
        "open its memory": (open_file, f"/proc/{daemon}/mem", os.O_RDONLY),
        "list its descriptors": (os.listdir, f"/proc/{daemon}/fd"),
        "read": (read_all, segment, nonce),
        "write to a view": (write_in_place, segment, nonce),
        "open to write": (open_file, segment, os.O_RDWR),
        "open anew to write": (reopen, segment),
        "map to write": (write_through, segment),
        "truncate": (os.truncate, segment, 0),
        "give a mode": (os.chmod, segment, 0o666),
        "give an open file a mode": (change_mode, segment),
        "own": (own, segment),
        "remove the segment": (os.unlink, segment),
        "replace the segment": (plant, segment, os.path.dirname(segment) + "/mine"),
        "shmserve ls": (command, "ls", "--endpoint", endpoint),
        "shmserve status": (command, "status", "--endpoint", endpoint),
        "shmserve lookup": (command, "lookup", "corpus", "0", "--block-size", "8", "--endpoint", endpoint),
        "shmserve stop": (command, "stop", "--endpoint", endpoint),
    }
    found = {name: outcome(*attempt) for name, attempt in attempts.items()}
    with open(given["result"], "w") as file:
        json.dump(found, file)
"""  # fmt: skip

DENIED = "PermissionError"
UNREACHABLE = "DaemonUnreachableError"
TO_NOBODY = {
    "list the folder": DENIED,
    "make a file in it": DENIED,
    "connect": DENIED,
    "connect as the owner": DENIED,
    "say hello": UNREACHABLE,
    "list": UNREACHABLE,
    "ask where it is": UNREACHABLE,
    "look up": UNREACHABLE,
    "ask how it is": UNREACHABLE,
    "stop by the clients' socket": UNREACHABLE,
    "stop": UNREACHABLE,
    "remove the socket": DENIED,
    "replace the socket": DENIED,
    "read the lock": DENIED,
    "see who holds the lock": DENIED,
    "kill the daemon": DENIED,
    "open its memory": DENIED,
    "list its descriptors": DENIED,
    "read": "SegmentNotFoundError",
    "write to a view": "SegmentNotFoundError",
    "open to write": DENIED,
    "open anew to write": DENIED,
    "map to write": DENIED,
    "truncate": DENIED,
    "give a mode": DENIED,
    "give an open file a mode": DENIED,
    "own": DENIED,
    "remove the segment": DENIED,
    "replace the segment": DENIED,
    "shmserve ls": 1,
    "shmserve status": 1,
    "shmserve lookup": 1,
    "shmserve stop": 1,
}
TO_THE_GROUP = {
    **TO_NOBODY,
    "connect": "connected",
    "say hello": "Welcome",
    "list": "Datasets",
    "ask where it is": "Attached",
    "look up": "Offsets",
    "ask how it is": "StatusReport",
    "stop by the clients' socket": "ProtocolError",
    "read": TOKENS.tolist(),
    "write to a view": "written",
    "own": False,
    "shmserve ls": 0,
    "shmserve status": 0,
    "shmserve lookup": 0,
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.bin"
    path.write_bytes(TOKENS.tobytes())
    return path


@pytest.fixture
def open_shm(shm_dir: Path, runtime_dir: Path) -> Path:
    """The shm directory as /dev/shm is, and that above the sockets' as /tmp: sticky, and for all."""
    shm_dir.chmod(0o1777)
    runtime_dir.chmod(0o1777)
    return shm_dir


def only(daemon: Daemon) -> DatasetStatus:
    (dataset,) = daemon.status().datasets
    return dataset


def nonce_of(daemon: Daemon) -> bytes:
    with Connection(daemon.endpoint, 10.0) as connection:
        reply = connection.request(Attach())
    assert isinstance(reply, Attached)
    return reply.nonce


def attempts_of(daemon: Daemon, uid: int, *groups: int) -> dict[str, Any]:
    """Return how far another user gets with the daemon and its segment."""
    result = daemon.shm_dir / "result"
    given = {
        "endpoint": str(daemon.socket),
        "segment": only(daemon).path,
        "nonce": nonce_of(daemon).hex(),
        "pid": daemon.pid,
        "result": str(result),
    }
    run_python(ATTEMPTS, uid, json.dumps(groups), json.dumps(given))
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return found


def is_unharmed(daemon: Daemon, uid: int = 0) -> bool:
    """Return whether it serves what it was given, under its own socket."""
    with Connection(daemon.endpoint, 10.0) as connection:
        welcome = connection.request(Hello("test"))
    assert isinstance(welcome, Welcome)
    segment = Segment.attach(only(daemon).path, nonce_of(daemon))
    tokens = segment.array(segment.description.columns[0].values)
    return (welcome.pid, welcome.uid) == (daemon.pid, uid) and tokens.tolist() == TOKENS.tolist()


@pytest.mark.promise("F19", "F34")
def test_another_user_can_do_nothing(serve: Serve, open_shm: Path, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    assert attempts_of(daemon, NOBODY) == TO_NOBODY
    assert is_unharmed(daemon)


@pytest.mark.promise("F19", "F17")
def test_a_member_of_the_group_can_read_and_nothing_more(serve: Serve, open_shm: Path, corpus: Path) -> None:
    daemon = serve("--data", corpus, "--group", GROUP)
    assert attempts_of(daemon, NOBODY, GROUP) == TO_THE_GROUP
    assert is_unharmed(daemon)


@pytest.mark.promise("F19")
def test_who_is_not_in_the_group_can_do_nothing(serve: Serve, open_shm: Path, corpus: Path) -> None:
    daemon = serve("--data", corpus, "--group", GROUP)
    assert attempts_of(daemon, NOBODY, GROUP + 1) == TO_NOBODY
    assert is_unharmed(daemon)


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.promise("F19")
def test_the_modes_are_those_of_the_page(runtime_dir: Path, shm_dir: Path, corpus: Path, group: int | None) -> None:
    """Whatever the umask says."""
    endpoint = runtime_dir / "shmserve" / "daemon.sock"
    options = [] if group is None else ["--group", group]
    previous = os.umask(0)
    try:
        started = run_cli(
            *("start", "--detach", "--endpoint", endpoint, "--shm-dir", shm_dir, "--data", corpus, *options)
        )
    finally:
        os.umask(previous)
    assert started.returncode == 0, started.stderr
    try:
        (segment,) = shm_dir.iterdir()
        paths = {
            "folder": endpoint.parent,
            "socket": endpoint,
            "owner's socket": Path(control_path(str(endpoint))),
            "lock": Path(lock_path(str(endpoint))),
            "log": Path(log_path(str(endpoint))),
            "segment": segment,
        }
        found = {name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) for name, path in paths.items()}
    finally:
        assert run_cli("stop", "--endpoint", endpoint).returncode == 0
    own = os.getegid()
    shared = {"folder": (0o710, group), "socket": (0o660, group), "segment": (0o440, group)}
    assert found == {
        "folder": (0o700, own),
        "socket": (0o600, own),
        "owner's socket": (0o600, own),
        "lock": (0o600, own),
        "log": (0o600, own),
        "segment": (0o400, own),
        **(shared if group is not None else {}),
    }


@pytest.fixture
def user() -> int:
    """A user that nobody is."""
    uid = 2_000_000 + os.getpid()
    with pytest.raises(KeyError):
        pwd.getpwuid(uid)
    return uid


@pytest.fixture
def foreign_directory(user: int) -> Iterator[Path]:
    """Where that user's daemon would listen, made by somebody else."""
    path = Path(f"/tmp/shmserve-{user}")
    try:
        yield path
    finally:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


START_AND_SEARCH = BECOME + """
    user, shm_dir, corpus = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.pop("XDG_RUNTIME_DIR", None)
    become(user)
    print(json.dumps(shmserve_client.endpoint.find_endpoints()))
    sys.stdout.flush()
    for args in (["start", "--shm-dir", shm_dir, "--data", corpus], ["ls"], ["stop"], ["gc", "--shm-dir", shm_dir]):
        sys.argv = ["shmserve", *args]
        try:
            shmserve.cli.main()
        except SystemExit as end:
            print(args[0], end.code, flush=True)
"""  # fmt: skip


def make_for_all(path: Path, _: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_for_one(path: Path, _: Path) -> None:
    path.mkdir(mode=0o755)


def make_link(path: Path, theirs: Path) -> None:
    path.symlink_to(theirs)


@pytest.mark.parametrize("make", [make_for_all, make_for_one, make_link])
@pytest.mark.promise("F19")
def test_a_directory_made_by_another_user_is_refused_by_daemon_and_client(
    open_shm: Path,
    corpus: Path,
    runtime_dir: Path,
    user: int,
    foreign_directory: Path,
    make: Callable[[Path, Path], None],
) -> None:
    """A link is refused even where it leads to a directory that is the user's own."""
    theirs = runtime_dir / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, user, user)
    make(foreign_directory, theirs)
    with socket.socket(socket.AF_UNIX) as hostile:
        # Through the directory's descriptor: of the link it is the target's.
        hostile.bind(str(foreign_directory / "daemon.sock"))
        (foreign_directory / "daemon.sock").chmod(0o666)
        hostile.listen()
        hostile.setblocking(False)
        done = run_python(START_AND_SEARCH, user, open_shm, corpus)
        assert done.stdout.split("\n") == ["[]", "start 3", "ls 1", "stop 1", "gc 0", ""]
        assert done.stderr.count(f"{foreign_directory}/daemon.sock (") == 2
        reason = f"{foreign_directory} is not a directory" if make is make_link else "belongs to uid 0, not to uid"
        assert done.stderr.count(reason) == 3
        while True:  # a probe is all that came: it connected, and asked nothing
            try:
                client, _ = hostile.accept()
            except BlockingIOError:
                break
            with client:
                assert client.recv(1) == b""
    assert {path.name for path in foreign_directory.iterdir()} == {"daemon.sock"}
    assert list(open_shm.iterdir()) == []


DAEMON_OF = BECOME + """
    user, endpoint, shm_dir, corpus = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    become(user)
    sys.argv = ["shmserve", "start", "--endpoint", endpoint, "--shm-dir", shm_dir, "--data", corpus]
    shmserve.cli.main()
"""  # fmt: skip


@pytest.mark.promise("F19")
def test_daemons_of_two_users_share_a_node(
    serve: Serve, open_shm: Path, runtime_dir: Path, corpus: Path, user: int, tmp_path: Path
) -> None:
    """The same corpus, under the same name, in the same shm directory."""
    theirs = runtime_dir / "theirs"
    theirs.mkdir(mode=0o700)
    copied = theirs / "corpus.bin"
    shutil.copy(corpus, copied)
    for path in (theirs, copied):
        os.chown(path, user, user)
    endpoint = theirs / "daemon.sock"
    with Child.python(DAEMON_OF, user, endpoint, open_shm, copied, folder=tmp_path) as other:
        wait_until(lambda: "ready: corpus" in other.stdout, 30, "the other user's daemon")
        own = serve("--data", corpus)
        owners = {path.name.split("-")[1]: path.stat().st_uid for path in open_shm.iterdir()}
        assert owners == {"0": 0, str(user): user}
        assert is_unharmed(own)
        other.send_signal(signal.SIGTERM)
        assert other.wait() == 0
    assert [path.stat().st_uid for path in open_shm.iterdir()] == [0]


def plant_fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def plant_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def plant_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def plant_folder(path: Path, _: Path) -> None:
    path.mkdir()


def plant_bomb(path: Path, _: Path) -> None:
    """A file that takes a while to be read, if somebody does."""
    path.write_bytes(b"SHMSERVE\x01\0\0\0")
    os.truncate(path, 1 << 40)


PLANTED = [plant_fifo, plant_socket, plant_link, plant_folder, plant_bomb]


@pytest.mark.promise("F3", "F5", "F19")
def test_what_others_plant_under_our_names_is_neither_used_nor_touched(
    serve: Serve, open_shm: Path, corpus: Path, tmp_path: Path, run_gc: Callable[..., Any]
) -> None:
    """Neither by start nor by gc: not even a true copy of what would be adopted. A lease on one delays nobody."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    killed = serve("--data", corpus)
    left = Path(only(killed).path)
    killed.kill()
    os.chown(left, NOBODY, NOBODY)
    planted = {left}
    for number, plant in enumerate(PLANTED):
        path = open_shm / f"shmserve-0-corpus-{number:08x}"
        plant(path, precious)
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        planted.add(path)
    leased = open_shm / "shmserve-0-corpus-000000ff"
    shutil.copy(left, leased)
    planted.add(leased)
    with open(leased, "rb+") as file:
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for the lease back
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.fchown(file.fileno(), NOBODY, NOBODY)
            again = serve("--data", corpus)
            assert run_gc().returncode == 0
        finally:
            signal.signal(signal.SIGIO, signal.SIG_DFL)
    assert not only(again).adopted
    assert set(again.segments()) == {*planted, Path(only(again).path)}
    assert is_unharmed(again)
    assert precious.read_bytes() == b"x"
    for path in planted:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


HOLD = (
    BECOME
    + """
    become(65534, [54321])
    fd = os.open(sys.argv[1], os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    print("locked", flush=True)
    signal.pause()
"""
)


@pytest.mark.promise("F3")
def test_a_reader_that_takes_the_owners_lock_costs_a_copy_until_it_is_gone(
    serve: Serve, open_shm: Path, corpus: Path, tmp_path: Path, run_gc: Callable[..., Any]
) -> None:
    """It can do so once the daemon is dead. The next start loads anew, and what was left goes in the end."""
    killed = serve("--data", corpus, "--group", GROUP)
    left = Path(only(killed).path)
    with Child.python(HOLD, left, folder=tmp_path) as member:
        killed.kill()
        wait_until(lambda: member.stdout, 30, "the member's lock")
        again = serve("--data", corpus, "--group", GROUP)
        assert not only(again).adopted
        assert left.exists()
        assert is_unharmed(again)
    run_gc()
    assert again.segments() == [Path(only(again).path)]


def hold_locks(path: str, count: int) -> list[int]:
    """Take read locks on so many bytes where readers have theirs, as any reader could, and return the descriptors."""
    descriptor = os.open(path, os.O_RDONLY)
    for number in range(count):
        lock = locks._FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, READERS + 2 * number + 2, 1, 0)
        fcntl.fcntl(descriptor, locks._F_OFD_SETLK, lock)
    return [descriptor]


def test_locks_without_end_do_not_hold_up_who_counts_them(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        held = hold_locks(segment.path, 3000)
        assert len(attached_processes(segment.fd)) == 3000
        monkeypatch.setattr(locks, "_LOOK_CPU_S", 0.001)
        assert 0 < len(attached_processes(segment.fd)) < 3000
        for descriptor in held:
            os.close(descriptor)


def test_a_daemon_answers_while_a_reader_holds_thousands_of_locks(serve: Serve, open_shm: Path, corpus: Path) -> None:
    daemon = serve("--data", corpus, "--group", GROUP)
    held = hold_locks(only(daemon).path, 3000)
    dataset = only(daemon)
    assert len(dataset.attached_pids) + dataset.attached_elsewhere > 0
    assert is_unharmed(daemon)
    for descriptor in held:
        os.close(descriptor)
    wait_until(lambda: only(daemon).attached_elsewhere == 0, what="nobody being counted")


@pytest.mark.promise("F6", "F19")
def test_a_file_of_another_user_under_a_removed_name_is_not_the_segment(shm_dir: Path) -> None:
    """Its nonce is right: who may read a segment knows it. A pickle from before would lead there."""
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        path, nonce = segment.path, segment.header.nonce
        content = Path(path).read_bytes()
    Path(path).write_bytes(content)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(SegmentNotFoundError, match="another one than the daemon's"):
        Segment.attach(path, nonce)
    os.chown(path, 0, 0)
    attached = Segment.attach(path, nonce)
    assert attached.header.nonce == nonce
    del attached
    os.unlink(path)


@pytest.mark.promise("F19")
def test_a_detached_daemon_imports_nothing_from_where_it_was_started(
    runtime_dir: Path, shm_dir: Path, corpus: Path, tmp_path: Path
) -> None:
    """The folder may be one in which others can write, such as /tmp."""
    there, trace = tmp_path / "there", tmp_path / "trace"
    there.mkdir()
    for module in ("click", "msgpack", "numpy", "shmserve", "zmq"):
        (there / f"{module}.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    started = run_python(
        """
        import os, sys
        from shmserve.cli import main

        os.chdir(sys.argv.pop(1))
        main()
        """,
        *(there, "start", "--detach", "--data", corpus, "--shm-dir", shm_dir),
    )
    assert started.stdout.startswith("ready: corpus")
    assert run_cli("stop", "--endpoint", runtime_dir / "shmserve" / "daemon.sock").returncode == 0
    assert not trace.exists()


def test_the_page_names_tests_that_there_are() -> None:
    here = Path(__file__).parent
    page = (here.parent / "docs" / "security.md").read_text()
    files = {name: (here / name).read_text() for name in re.findall(r"`(test_\w+\.py)`", page)}
    assert "test_trust.py" in files
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) > 5
    assert [name for name in named if not any(f"def {name}(" in text for text in files.values())] == []
