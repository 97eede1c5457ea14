"""Where daemons listen on this node, and how a client finds them. Nothing here needs ZeroMQ.

An endpoint is the path of a UNIX socket, written as such or as `ipc://` and the path. Beside the socket lie the owner's
socket (`control_path`), the lock (`lock_path`) and the log (`log_path`). A daemon that also listens to TCP has a second
endpoint for its clients, `tcp://HOST:PORT`, which is kept as it is written.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from typing import Final

from .errors import DaemonUnreachableError, EndpointError

__all__ = [
    "DEFAULT_NAME",
    "MAX_SOCKET_PATH_NBYTES",
    "address_of",
    "control_path",
    "default_directories",
    "default_directory",
    "default_endpoint",
    "ensure_directory",
    "find_endpoint",
    "find_endpoints",
    "host_and_port",
    "is_loopback",
    "is_tcp",
    "listening",
    "lock_path",
    "log_path",
    "parse_endpoint",
    "refusal",
]

DEFAULT_NAME: Final = "daemon.sock"
MAX_SOCKET_PATH_NBYTES: Final = 107
"""Longer paths do not fit into sockaddr_un; libzmq then makes no socket and reports no error."""
_TCP: Final = "tcp://"
_NODE_DIRECTORY: Final = "/run/shmserve"
_LONGEST_NAME_NBYTES: Final = 40
"""Room for the longest socket name that is made here: an embedded daemon's, with its `.ctl`."""
_PROBE_TIMEOUT_S: Final = 5.0
"""How long a host may take to accept a connection; sockets of this node answer at once."""


def is_tcp(endpoint: str) -> bool:
    """Return whether the endpoint, as `parse_endpoint` returns it, is that of TCP."""
    return endpoint.startswith(_TCP)


def address_of(endpoint: str) -> str:
    """Return the endpoint as ZeroMQ and people write it: `ipc:///path`, or `tcp://HOST:PORT`."""
    return endpoint if is_tcp(endpoint) else f"ipc://{endpoint}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of `HOST:PORT`, with or without `tcp://`; an IPv6 address stands in brackets, `[::1]:5555`.

    Raises:
        EndpointError: it is not that.
    """
    host, separator, port = address.removeprefix(_TCP).rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65_535
    if not (separator and bare and is_port) or any(char in "[]/@*" or char.isspace() for char in bare):
        raise EndpointError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:5555 or [::1]:5555")
    if (":" in bare) is (bare == host):
        raise EndpointError(f"{address!r}: the address in [] is that of IPv6, such as [::1]:5555, and no other is")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this node can reach what listens at `host`: an address, or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def control_path(path: str) -> str:
    """Return the owner's socket of the daemon at `path`.

    Raises:
        EndpointError: `path` is an endpoint of TCP, where no orders are taken.
    """
    if is_tcp(path):
        raise EndpointError(
            f"the daemon at {path} takes orders from its own node alone: give its ipc endpoint, with --endpoint there"
        )
    return path + ".ctl"


def lock_path(path: str) -> str:
    """Return the lock file that the daemon at `path` holds as long as it lives."""
    return path + ".lock"


def log_path(path: str) -> str:
    """Return where the daemon at `path` logs once it is detached."""
    return path + ".log"


def parse_endpoint(endpoint: str) -> str:
    """Return the absolute socket path that `endpoint` (`ipc:///path` or the path alone) names, or `tcp://HOST:PORT`.

    Raises:
        EndpointError: no string, another transport, a relative path, or a path that no socket can have; no host and
            port that one can connect to.
    """
    if not isinstance(endpoint, str) or "\0" in endpoint:
        raise EndpointError(f"endpoint {endpoint!r} is not the path of a socket, such as ipc:///path/of/the.sock")
    if is_tcp(endpoint):
        if host_and_port(endpoint)[1] == 0:
            raise EndpointError(
                f"endpoint {endpoint!r}: 0 stands for any free port where a daemon starts, name the port"
            )
        return endpoint
    scheme, separator, rest = endpoint.partition("://")
    if separator and scheme != "ipc":
        raise EndpointError(
            f"endpoint {endpoint!r}: {scheme}:// is not supported, give ipc:///path/of/the.sock or tcp://HOST:PORT"
        )
    path = rest if separator else endpoint
    if not os.path.isabs(path) or path.endswith("/"):
        raise EndpointError(
            f"endpoint {endpoint!r} is not the absolute path of a socket, such as ipc:///path/of/the.sock"
        )
    # The owner's socket is asked through the same door, and has nothing beside it that is longer.
    nbytes = len(os.fsencode(path if path.endswith(control_path("")) else control_path(path)))
    if nbytes > MAX_SOCKET_PATH_NBYTES:
        raise EndpointError(
            f"endpoint {path!r} has {len(os.fsencode(path))} bytes, a socket's path may have "
            f"{MAX_SOCKET_PATH_NBYTES - len(control_path(''))}: choose a shorter directory"
        )
    return os.path.normpath(path)


def default_directories() -> list[str]:
    """Return the directories where this user's daemons may listen, best first, whether they exist or not.

    TMPDIR has no say: ssh and batch systems set it differently for daemon and client.
    """
    uid = os.geteuid()
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [runtime_dir + "/shmserve"] if os.path.isabs(runtime_dir) else []
    candidates += [f"/run/user/{uid}/shmserve", f"/tmp/shmserve-{uid}"]
    return list(dict.fromkeys(os.path.normpath(candidate) for candidate in candidates))


def default_directory() -> str:
    """Return the first of the default directories that exists or can be made, and that is short enough for a socket.

    Raises:
        EndpointError: there is none.
    """
    candidates = default_directories()
    for directory in candidates:
        parent = os.path.dirname(directory)
        fits = len(os.fsencode(directory)) + 1 + _LONGEST_NAME_NBYTES <= MAX_SOCKET_PATH_NBYTES
        can_be_made = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
        if fits and (can_be_made or not refusal(directory)):
            return directory
    raise EndpointError(f"no directory for the socket: none of {', '.join(candidates)} can be used, give --endpoint")


def default_endpoint() -> str:
    """Return the socket path at which a daemon listens unless told otherwise: `$SHMSERVE_ENDPOINT`, or the default."""
    chosen = os.environ.get("SHMSERVE_ENDPOINT")
    return parse_endpoint(chosen) if chosen else os.path.join(default_directory(), DEFAULT_NAME)


def ensure_directory(path: str, gid: int | None = None) -> None:
    """Make sure that `path` is a directory of this user that nobody else can write to or list; its parent must exist.

    It is made with mode 0700. With `gid`, members of that group can reach the sockets in it: 0710.

    Raises:
        EndpointError: it cannot be made, is no directory, belongs to someone else or is open to others.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise EndpointError(
            f"cannot make the socket's directory {path}: {error.strerror}: choose another --endpoint"
        ) from error
    reason = refusal(path)
    if reason:
        raise EndpointError(f"will not use the socket's directory: {reason}")
    if gid is not None:
        try:
            os.chown(path, -1, gid)
        except OSError as error:
            raise EndpointError(
                f"cannot give {path} to the group {gid}: {error.strerror}: be a member of it"
            ) from error
        os.chmod(path, 0o710)


def refusal(directory: str) -> str:
    """Return why sockets in `directory` are not to be trusted, or ""."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to uid {status.st_uid}, not to uid {os.geteuid()}"
    if status.st_mode & 0o067:
        return (
            f"{directory} has mode {stat.S_IMODE(status.st_mode):04o}, open to other users: put the socket into a "
            f"directory of your own with mode 0700, such as /tmp/shmserve-{os.geteuid()}/daemon.sock"
        )
    return ""


def _probe(endpoint: str, timeout_s: float = _PROBE_TIMEOUT_S) -> str:
    """Return why a client cannot connect to `endpoint`, or "" if somebody listens there.

    Only another host may take its time: `timeout_s` at most.
    """
    try:
        if is_tcp(endpoint):
            # None would wait for ever, and 0 not at all.
            with socket.create_connection(host_and_port(endpoint), max(0.001, min(timeout_s, _PROBE_TIMEOUT_S))):
                return ""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(endpoint)
    except BlockingIOError:
        return ""  # the backlog is full: somebody listens, and is slow
    except TimeoutError:
        return f"no connection within {min(timeout_s, _PROBE_TIMEOUT_S):g} s"
    except UnicodeError:  # of a name that no host can have
        return "no such host"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            return "nobody listens"
        return error.strerror or str(error)
    return ""


def listening(endpoint: str) -> bool:
    """Return whether a process listens at `endpoint` and lets this user connect; only other hosts are waited for."""
    return not _probe(endpoint)


def _search() -> tuple[list[str], dict[str, str]]:
    """Return (sockets that listen, best first; the other places, each with why it has none)."""
    chosen = os.environ.get("SHMSERVE_ENDPOINT")
    if chosen:
        path = parse_endpoint(chosen)
        reason = _probe(path)
        return ([], {path: reason}) if reason else ([path], {})
    found: list[str] = []
    reasons: dict[str, str] = {}
    for directory in [*default_directories(), _NODE_DIRECTORY]:
        path = os.path.join(directory, DEFAULT_NAME)
        reason = _probe(path)
        # A directory in /tmp may be anybody's: only what would be accepted at start is believed here, too. The node's
        # is made by root or by a service's own user, in /run, where nobody else can.
        if not reason and directory != _NODE_DIRECTORY:
            reason = refusal(directory)
        if reason:
            reasons[path] = reason
        else:
            found.append(path)
    return found, reasons


def find_endpoints() -> list[str]:
    """Return the sockets of the daemons that this user's clients would ask, best first; only those that listen."""
    return _search()[0]


def find_endpoint(endpoint: str | None = None, timeout_s: float = _PROBE_TIMEOUT_S) -> str:
    """Return the endpoint that a client is to ask: `endpoint`, `$SHMSERVE_ENDPOINT`, or the first default that listens.

    Another host may take `timeout_s` seconds to accept a connection.

    Raises:
        DaemonUnreachableError: nobody listens there; the message names every place.
        EndpointError: the endpoint cannot be one.
    """
    if endpoint is not None:
        path = parse_endpoint(endpoint)
        reason = _probe(path, timeout_s)
        if reason:
            raise _unreachable({path: reason})
        return path
    found, reasons = _search()
    if not found:
        raise _unreachable(reasons)
    return found[0]


def _unreachable(reasons: Mapping[str, str]) -> DaemonUnreachableError:
    """Return the error for a search that found no daemon: the places, with why each has none."""
    places: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        places.setdefault(reason, []).append(path)
    looked = ", ".join(f"{', '.join(paths)} ({reason})" for reason, paths in places.items())
    tcp = " --tcp HOST:PORT" if any(map(is_tcp, reasons)) else ""
    return DaemonUnreachableError(f"no daemon at {looked}: start one with `shmserve start --data PATH{tcp}`")
