"""A client's connection to one daemon: a request goes out, and its reply or an error comes back in the time allowed."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
import weakref
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import zmq

from .endpoint import address_of, find_endpoint, is_tcp, listening, parse_endpoint
from .errors import ConfigError, DaemonUnreachableError, DatasetNotReadyError, ProtocolError
from .protocol import (
    MAX_REPLY_NBYTES,
    MAX_REQUEST_NBYTES,
    Attach,
    Attached,
    Failure,
    Message,
    Reply,
    decode_reply,
    encode,
    error_from,
)

if TYPE_CHECKING:
    from .keys import ClientKeys

__all__ = ["Connection", "attach_when_ready", "keep_alive", "seconds"]

_DESCRIPTORS: Final = 16
"""More than a context, a socket and its monitor take."""
_QUEUED_REPLIES: Final = 2
"""How many a daemon can have waiting that nobody asked for, each of MAX_REPLY_NBYTES."""
_RETURN_S: Final = 5.0
"""How long a daemon that went away in the middle of a request may take to come back."""
_LONGEST_POLL_S: Final = 3600.0
_EVENTS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | (zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)
_EVENT: Final = struct.Struct("=Hi")
"""The first frame of a monitor's message: the event, and its value."""
_HANDSHAKES: Final = 5
"""How often a connection by TCP may end before both sides know each other, as it may when a daemon is busy or ends."""
_ASK_AGAIN_S: Final = (0.02, 1.0)
"""The first and the longest pause between two questions whether a dataset has been loaded."""


class Connection:
    """A connection that outlives a restart of its daemon and never takes a late reply for another request's.

    Threads may share one: their requests go out one after the other. A forked child that inherits one connects anew,
    since a ZeroMQ context neither works nor can be closed beyond a fork.
    """

    def __init__(
        self, path: str | os.PathLike[str], timeout_s: float, keys: str | os.PathLike[str] | None = None
    ) -> None:
        """Prepare a connection to a daemon; a request fails that takes longer than `timeout_s` seconds.

        `path` is the daemon's endpoint. If that is one of TCP, `keys` is the directory of a client's keys, as `shmserve
        keys` makes it; None for `$SHMSERVE_KEYS`, and without that for a daemon without keys.
        """
        self.path = parse_endpoint(os.fspath(path))
        self._keys = os.fspath(keys) if keys is not None else os.environ.get("SHMSERVE_KEYS")
        self.timeout_s = seconds("timeout", timeout_s)
        self._last_id = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._forget()
        _connections.add(self)

    def _forget(self) -> None:
        """Leave whatever there is to its owner, the parent process, and start without a connection."""
        if self._context is not None:
            _of_parent.append((self._context, self._socket, self._monitor))
        self._lock = threading.Lock()
        self._context = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def request(self, message: Message) -> Reply:
        """Return the daemon's reply to `message`.

        Raises:
            DaemonUnreachableError: nobody listens at the path or one side refuses the other's key (at once), or no
                reply came in time.
            ConfigError: the keys cannot be used.
            ShmserveError: what the daemon answered when it refused, as the class that names the reason.
            ProtocolError: the request is too large, or the reply is malformed or of another protocol version.
        """
        with self._lock:
            self._last_id += 1
            frame = encode(message, self._last_id)
            if len(frame) > MAX_REQUEST_NBYTES:
                # Sent all the same, it would end the connection without a word.
                raise ProtocolError(f"request of {len(frame)} bytes: {MAX_REQUEST_NBYTES} are the limit")
            try:
                reply = self._exchange(frame, self._last_id)
            except BaseException:
                # What this request left in queues must not delay the next, which therefore gets a new socket.
                self._disconnect()
                raise
        if isinstance(reply, Failure):
            raise error_from(reply)
        return reply

    def _exchange(self, frame: bytes, request_id: int) -> Reply:
        socket, monitor = self._connect()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        deadline = time.monotonic() + self.timeout_s
        was_closed = False
        handshakes = 0
        self._send(socket, frame)
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(math.ceil(min(remaining_s, _LONGEST_POLL_S) * 1000)))
            if socket in ready:
                reply_id, reply = decode_reply(socket.recv())
                # A failure with the id 0 answers a request whose own id the daemon could not read.
                if reply_id == request_id or (reply_id == 0 and isinstance(reply, Failure)):
                    return reply
            elif monitor in ready:
                event, _ = _EVENT.unpack(monitor.recv_multipart()[0])
                if event == zmq.EVENT_DISCONNECTED:
                    # The daemon closed the connection: the request may be lost with it, and ZeroMQ reconnects by
                    # itself. Asking twice is harmless: requests change nothing, and a second reply has an id of the
                    # past.
                    was_closed = True
                    self._send(socket, frame)
                    deadline = min(deadline, time.monotonic() + _RETURN_S)
                elif is_tcp(self.path):
                    handshakes += 1
                    self._check_handshake(event, handshakes)
        if was_closed and listening(self.path):
            raise self._not_a_daemon()
        if was_closed:
            raise DaemonUnreachableError(
                f"daemon at {address_of(self.path)} ended during the request and did not come back within "
                f"{min(_RETURN_S, self.timeout_s):g} s: its log may say why, start it again"
            )
        raise DaemonUnreachableError(
            f"daemon at {address_of(self.path)} did not answer within {self.timeout_s:g} s: see whether it runs with "
            "`shmserve status`, or allow more with timeout="
        )

    def _send(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # There is room for a thousand requests: ZeroMQ has given the daemon up, for not speaking its protocol or
            # for a message over the limit.
            raise self._not_a_daemon() from None

    def _check_handshake(self, event: int, handshakes: int) -> None:
        """Raise the error for a handshake that has failed, and would again."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            reason = (
                f"does not list the key {self._keys}/client.key_secret: get one that was made there, with `shmserve "
                "keys DIR --client NAME`"
            )
        # Of two sides that differ on keys, either may find out first: the other then only sees the connection end.
        elif event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and handshakes < _HANDSHAKES:
            return
        elif self._keys:
            reason = f"does not have the key {self._keys}/daemon.key: it is another daemon, or one without keys"
        else:
            reason = "lets only clients with keys in, or is no shmserve daemon: give keys=DIR, --keys or $SHMSERVE_KEYS"
        raise DaemonUnreachableError(f"what listens at {self.path} {reason}")

    def _not_a_daemon(self) -> DaemonUnreachableError:
        return DaemonUnreachableError(
            f"what listens at {address_of(self.path)} closes the connection instead of answering: it is not a shmserve "
            f"daemon, or its answer has more than {MAX_REPLY_NBYTES} bytes"
        )

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        if self._socket is not None and self._monitor is not None:
            return self._socket, self._monitor
        _require_descriptors()
        # Connecting in ZeroMQ succeeds whether or not anybody is there: ask the kernel first.
        find_endpoint(self.path, self.timeout_s)
        keys = _client_keys(self._keys) if self._keys and is_tcp(self.path) else None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_REPLIES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_NBYTES)
        if is_tcp(self.path):
            self._socket.setsockopt(zmq.IPV6, 1)
            keep_alive(self._socket)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.daemon_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(f"{address_of(self.path)}")
        return self._socket, self._monitor

    def _disconnect(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = self._socket = self._monitor = None

    def close(self) -> None:
        """Give the sockets back, without waiting for anything unsent; idempotent. A later request connects anew."""
        with self._lock:
            self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _client_keys(directory: str) -> ClientKeys:
    from .keys import client_keys  # it imports zmq.auth, which few need

    return client_keys(directory)


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Have TCP notice within a minute that the other host is gone."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _require_descriptors() -> None:
    """Make sure that a connection will have the descriptors it needs: without them libzmq aborts the process."""
    with contextlib.ExitStack() as taken:
        try:
            for _ in range(_DESCRIPTORS):
                taken.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise DaemonUnreachableError(
                f"a connection to the daemon needs {_DESCRIPTORS} file descriptors: {error.strerror}: raise the limit "
                "(ulimit -n)"
            ) from error


def seconds(name: str, value: object) -> float:
    """Return the duration `value`, which may be infinite. Raises ConfigError, naming the option `name`, for others."""
    try:
        duration = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        duration = math.nan
    if not duration >= 0:
        raise ConfigError(f"{name} {value!r}: give a number of seconds from 0 up, inf for no limit")
    return duration


def attach_when_ready(
    path: str, question: Attach, *, timeout_s: float, patience_s: float, keys: str | None = None
) -> Attached:
    """Return where the segment is that `question` asks the daemon at `path` for, once it has been loaded.

    Each question may take `timeout_s` seconds, and the loading `patience_s`.

    Raises:
        DatasetNotReadyError: it still loads after `patience_s` seconds.
        ShmserveError: as `Connection.request`.
    """
    deadline = time.monotonic() + patience_s
    pause_s, longest_s = _ASK_AGAIN_S
    while True:
        try:
            # A connection for each question: so a daemon that fails to load and exits is noticed at once.
            with Connection(path, timeout_s, keys) as connection:
                reply = connection.request(question)
        except DatasetNotReadyError as error:
            if time.monotonic() + pause_s > deadline:
                raise DatasetNotReadyError(f"{error}, after {patience_s:g} s: allow more with timeout=") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
            continue
        if not isinstance(reply, Attached):
            raise ProtocolError(f"the daemon answered {type(reply).__name__} to a request to attach")
        if question.name not in (None, reply.name):
            raise ProtocolError(f"the daemon answered with dataset {reply.name!r} when asked for {question.name!r}")
        return reply


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_of_parent: list[Any] = []
"""ZeroMQ objects that came through a fork: kept for ever, since they can only be destroyed where their threads run."""


def _forget_connections_of_parent() -> None:
    for connection in list(_connections):
        connection._forget()


os.register_at_fork(after_in_child=_forget_connections_of_parent)
