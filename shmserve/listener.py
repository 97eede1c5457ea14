"""Sockets on which a daemon listens, within limits that libzmq does not have of its own.

libzmq ends the whole process when it accepts a connection on a UNIX socket and no descriptor is left, and it stores a
message of many frames, however long, until the last one has come. A `Listener` therefore counts connections, and is
told how much memory the process holds. Beyond a limit it drops all of its connections, since libzmq cannot tell who
sent what. Clients that are alive connect again by themselves and ask again; those that only sit there stay away.

The limit on connections leaves four fifths of the descriptors free, since libzmq's thread accepts on until the daemon's
own turn comes. Who connects faster still, on purpose, can end the daemon; he may do that anyway, see docs/security.md.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import resource
import socket
import stat
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import zmq

from shmserve_client.connection import keep_alive
from shmserve_client.endpoint import host_and_port
from shmserve_client.errors import EndpointError
from shmserve_client.protocol import MAX_REQUEST_NBYTES

from .text import count, size

__all__ = ["BUSY_CHECK_MS", "Listener", "LocalListener", "TcpListener"]

log = logging.getLogger(__name__)

BUSY_CHECK_MS: Final = 50
"""How often `check_memory` wants to be called while anybody is connected: what is sent meanwhile is over the limit."""
_QUEUED_MESSAGES: Final = 16
"""Per client and direction; what a client that does not read can cost is this many replies."""
_HANDSHAKE_MS: Final = 5000
"""After that, a connection that has not said who it is is closed."""
_MAX_CONNECTIONS: Final = 4096
_MAX_GROWTH_NBYTES: Final = 256 << 20
_WARN_EVERY_S: Final = 10.0
_PATIENCE_S: Final = 1.0
"""For libzmq's own thread, which answers at once unless the machine is overloaded."""
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_EVENT: Final = struct.Struct("=Hi")
"""The first frame of a monitor's message: the event, and its value."""
_ZAP_DOMAIN: Final = "shmserve"

_Socket = zmq.Socket[bytes]
_numbers = itertools.count()


class Listener(ABC):
    """One bound ROUTER socket, `socket`, with limits."""

    def __init__(self, context: zmq.Context[_Socket], name: str) -> None:
        """Prepare to listen; `name` is for the log."""
        self._connections = 0
        self._context = context
        self._name = name
        self._base_nbytes: int | None = None
        self._warned_s = -_WARN_EVERY_S
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Of three listeners, each may have a fifth; what else the daemon opens has the rest.
        self._most = min(limit // 5, _MAX_CONNECTIONS)

    def _open(self) -> None:
        self.socket = router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_NBYTES)
        router.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        router.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply that nobody waits for is an error, not silence
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        address = f"inproc://listener-{next(_numbers)}"
        router.monitor(address, _EVENTS)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # with a limit, libzmq's threads wait for us, and we for them in bind()
        self._monitor.connect(address)
        try:
            self._bind(router)
        except BaseException:
            self._close_socket(0)  # else the context would wait for it when it ends
            raise

    @abstractmethod
    def _bind(self, router: _Socket) -> None:
        """Have the new socket listen."""

    @property
    def connections(self) -> int:
        """How many there are, as far as libzmq has told."""
        return self._connections

    def sources(self) -> list[Any]:
        """Return what a poller is to watch for input beside `socket`, for `check`: valid until that returns True."""
        return [self._monitor]

    def check(self) -> bool:
        """Drop all connections where they are too many; call it whenever a source has input.

        Returns:
            Whether `socket` or `sources` has changed.
        """
        self._count()
        if self._connections <= self._most:
            return False
        self._drop(f"{self._most} are the limit, a fifth of `ulimit -n`: raise that if they were all needed")
        return True

    def check_memory(self, private_nbytes: Callable[[], int]) -> bool:
        """Drop all connections if the process has grown by more than what clients may make it store.

        Args:
            private_nbytes: returns what the process holds for itself at the moment.

        Returns:
            Whether `socket` or `sources` has changed.
        """
        now_nbytes = private_nbytes()
        if self._base_nbytes is None or now_nbytes < self._base_nbytes:
            self._base_nbytes = now_nbytes
        grown_nbytes = now_nbytes - self._base_nbytes
        if grown_nbytes <= _MAX_GROWTH_NBYTES:
            return False
        has_clients = self.connections > 0
        if has_clients:
            self._warn_of_drop(
                f"requests without end or replies that nobody reads may be what took {size(grown_nbytes)}"
            )
            self._close_socket(0)
        _give_back_memory()
        # While nobody is connected: if it was not the clients' after all, they are not blamed for it again.
        self._base_nbytes = private_nbytes()
        if has_clients:
            self._open()
        return has_clients

    def _count(self) -> bool:
        """Take note of what libzmq reported, and return whether the socket has come to its end."""
        while True:
            try:
                frame, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            event, _ = _EVENT.unpack(frame)
            if event == zmq.EVENT_MONITOR_STOPPED:
                return True
            self._connections += 1 if event == zmq.EVENT_ACCEPTED else -1

    def _drop(self, reason: str) -> None:
        self._warn_of_drop(reason)
        self._close_socket(0)
        self._open()

    def _warn_of_drop(self, reason: str) -> None:
        self._warn(f"dropped all {count(self.connections, 'connection')}: {reason}")

    def _warn(self, message: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning("%s: %s", self._name, message)

    def _close_socket(self, linger_ms: int) -> None:
        """Close the socket with all connections, and return when that has been done."""
        self.socket.close(linger=linger_ms)
        deadline_s = time.monotonic() + linger_ms / 1000 + _PATIENCE_S
        while not self._count() and (remaining_s := deadline_s - time.monotonic()) > 0:
            self._monitor.poll(int(remaining_s * 1000) + 1)
        self._monitor.close(linger=0)
        self._connections = 0

    def close(self, linger_ms: int) -> None:
        """Stop listening, and close the connections; the last replies have `linger_ms` to leave."""
        self._close_socket(linger_ms)


class LocalListener(Listener):
    """A listener at the path of a UNIX socket, which the daemon's user and the group `gid` may connect to."""

    def __init__(self, context: zmq.Context[_Socket], path: str, gid: int | None = None) -> None:
        """Listen at `path`; what may lie there already is a socket on which nobody listens any more.

        Raises:
            EndpointError: it is something else, or the socket cannot be made.
        """
        super().__init__(context, path)
        self._path = path
        self._gid = gid
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise EndpointError(f"{path} exists and is not a socket: choose another --endpoint")
        self._open()

    def _bind(self, router: _Socket) -> None:
        previous = os.umask(0o177)  # of the whole process, whose other threads say which mode a file is to have
        try:
            router.bind(f"ipc://{self._path}")  # in the place of whatever socket lies there
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)  # to its own text, pyzmq adds the address
            raise EndpointError(f"cannot listen at {self._path}: {reason}: choose another --endpoint") from error
        finally:
            os.umask(previous)
        if self._gid is not None:
            os.chown(self._path, -1, self._gid)
            os.chmod(self._path, 0o660)

    def close(self, linger_ms: int) -> None:
        """Stop listening, remove the socket, and close the connections; the last replies have `linger_ms` to leave."""
        super().close(linger_ms)
        Path(self._path).unlink(missing_ok=True)  # libzmq leaves it there


class TcpListener(Listener):
    """A listener at a host's address, for clients whose keys are listed, where there are keys; for anybody else.

    `endpoint` is where it listens, with the real port.
    """

    def __init__(self, context: zmq.Context[_Socket], address: str, keys: str | None = None) -> None:
        """Listen at `address`, HOST:PORT; 0 is any free port. `keys` is a directory as `shmserve keys` makes it.

        Raises:
            EndpointError: it is no address of this host, or in use.
            ConfigError: the keys cannot be used.
        """
        self._authenticator: Any = None
        self.endpoint = _resolve(*host_and_port(address))
        super().__init__(context, self.endpoint)
        try:
            if keys is not None:
                self._start_authenticator(context, keys)
            self._open()
        except BaseException:
            self._stop()
            raise

    def _start_authenticator(self, context: zmq.Context[_Socket], keys: str) -> None:
        import zmq.auth

        from shmserve_client.keys import daemon_keys

        self._secret = daemon_keys(keys).secret
        self._authenticator = zmq.auth.Authenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _Listed(keys))

    def _bind(self, router: _Socket) -> None:
        if self._authenticator is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
            router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # were nobody there to ask for leave, there would be none
        keep_alive(router)
        router.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        try:
            router.bind(self.endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)  # to its own text, pyzmq adds the address
            raise EndpointError(f"cannot listen at {self.endpoint}: {reason}: choose another --tcp") from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)  # a port of its own choice stays the same

    def sources(self) -> list[Any]:
        """Return what a poller is to watch for input beside `socket`, for `check`: valid until that returns True."""
        return [*super().sources(), *([self._authenticator.zap_socket] if self._authenticator is not None else [])]

    def check(self) -> bool:
        """Say who may come in, besides; as before."""
        if self._authenticator is not None:
            with suppress(zmq.Again):
                while True:
                    frames = self._authenticator.zap_socket.recv_multipart(zmq.NOBLOCK)
                    _run(self._authenticator.handle_zap_message(frames))
        return super().check()

    def _stop(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()

    def close(self, linger_ms: int) -> None:
        """Stop listening, and close the connections; the last replies have `linger_ms` to leave."""
        super().close(linger_ms)
        self._stop()


class _Listed:
    """Whom `zmq.auth` lets in."""

    def __init__(self, keys: str) -> None:
        self._keys = keys

    def callback(self, _domain: str, public: bytes) -> bool:
        """Return whether the client with this public key is listed now: who was removed stays outside."""
        from shmserve_client.keys import is_listed

        return is_listed(self._keys, public)


def _resolve(host: str, port: int) -> str:
    """Return where ZeroMQ is to listen: it takes no names, but addresses."""
    try:
        (_, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise EndpointError(f"cannot listen at tcp://{host}:{port}: no such host: choose another --tcp") from error
    return f"tcp://[{address[0]}]:{port}" if ":" in str(address[0]) else f"tcp://{address[0]}:{port}"


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what is written for an event loop but waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("zmq.auth waits for something")


def _give_back_memory() -> None:
    """Have the C library give freed memory back to the system, where it can."""
    with suppress(AttributeError):  # others than glibc
        ctypes.CDLL(None).malloc_trim(0)
