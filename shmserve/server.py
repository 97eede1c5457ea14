"""The daemon's life: take the endpoint, load in a thread while already answering, serve, and leave in good order."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, Final

import zmq

from shmserve_client.endpoint import control_path, ensure_directory, lock_path
from shmserve_client.errors import DatasetNotReadyError, ShmserveError
from shmserve_client.locks import attached_processes
from shmserve_client.owned import OwnedSegment
from shmserve_client.protocol import (
    Attach,
    Control,
    Reply,
    Request,
    StatusReport,
    Stop,
    Stopping,
    decode_control,
    decode_request,
    encode,
    failure_from,
    request_id_of,
)

from .catalog import Catalog
from .config import DaemonConfig
from .listener import BUSY_CHECK_MS, Listener, LocalListener, TcpListener
from .loader import Loader
from .lockfile import LockFile
from .management import Management
from .progress import Progress
from .service import Service, private_nbytes
from .text import count
from .watch import Watch

__all__ = ["Server"]

log = logging.getLogger(__name__)

_MESSAGES_PER_TURN: Final = 64
"""After so many of one socket, or `BUSY_CHECK_MS`, the others, the signals and the loader get their turn."""
_FAREWELL_MS: Final = 200
"""How long the last replies may take to leave."""
_LOADER_PATIENCE_S: Final = 1.5
"""How long a loader that was told to stop may take; the rest of it is in a read that does not return."""
_LOOK_S: Final = 1.0
"""How often the daemon looks whether anybody still reads what it could let go."""

_Socket = zmq.Socket[bytes]
_Decode = Callable[[bytes], tuple[int, Any]]
_ReplyTo = Callable[[Any], Reply]


class Server:
    """One daemon. `run` is its whole life, in the main thread, since it takes the signals."""

    def __init__(
        self,
        config: DaemonConfig,
        progress: Progress,
        on_ready: Callable[[StatusReport], None],
        starter_fd: int | None = None,
    ) -> None:
        """Prepare to serve what `config` says; `on_ready` is called once, when every dataset is served.

        `starter_fd` is a pipe to whoever waits for that: when they stop waiting before, the daemon ends.
        """
        self.config = config
        self.catalog = Catalog(config.datasets)
        self.service = Service(self.catalog, endpoint=config.endpoint, shm_dir=config.shm_dir)
        self.started = False
        self.should_exit = False
        self.removes_segments = False
        self.lingered_out = False
        self._progress = progress
        self._on_ready = on_ready
        self._starter_fd = starter_fd
        self._cleanup = ExitStack()
        self._loader = Loader(config, self.catalog, progress)
        self._management = Management(self.catalog, self._loader)
        self._loading = threading.Thread(target=self._load, name="loader", daemon=True)
        self._loaded = threading.Event()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._listeners: dict[Listener, tuple[_Decode, _ReplyTo]] = {}
        self._last_used_s = self._looked_s = self._measured_s = 0.0

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP, a stop request, or `linger_s` without an attached process.

        Raises:
            AlreadyRunningError: another daemon has the endpoint.
            ShmserveError: the endpoint cannot be used, or a dataset could not be loaded.
        """
        with self._wake_receiver, self._wake_sender, self._signals():
            try:
                self.startup()
                self.main_loop()
            finally:
                self.shutdown()
        failure = self.catalog.failure()
        if failure is not None and not self.started:
            raise failure

    @property
    def is_stuck(self) -> bool:
        """Whether, after `run`, the loader hangs in a read that nothing can interrupt."""
        return self._loading.is_alive()

    def startup(self) -> None:
        """Take the endpoint and start to load."""
        endpoint, gid = self.config.endpoint, self.config.gid
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of which the listeners let clients have a part
        ensure_directory(os.path.dirname(endpoint), gid)
        lock = LockFile(lock_path(endpoint))
        self._cleanup.callback(lock.release)
        context: zmq.Context[_Socket] = zmq.Context()
        self._cleanup.callback(context.term)
        # Under the lock, so no live daemon listens there.
        self._listen(LocalListener(context, endpoint, gid), decode_request, self._reply)
        self._listen(LocalListener(context, control_path(endpoint)), decode_control, self._obey)
        if self.config.tcp is not None:
            tcp = TcpListener(context, self.config.tcp, self.config.keys)
            self._listen(tcp, decode_request, self._reply)
            self.service.tcp_endpoint = tcp.endpoint
        self._cleanup.callback(self._release_segments)
        self._loading.start()
        self._cleanup.callback(self._stop_loading)
        watch = Watch(self.catalog)
        watch.start()
        self._cleanup.callback(watch.stop)
        log.info("listening at ipc://%s (pid %d)", endpoint, os.getpid())

    def _listen(self, listener: Listener, decode: _Decode, reply_to: _ReplyTo) -> None:
        self._cleanup.callback(listener.close, _FAREWELL_MS)
        self._listeners[listener] = decode, reply_to

    def main_loop(self) -> None:
        """Answer, watch the loader and the linger time, until `should_exit`."""
        poller = self._poller()
        while not self.should_exit:
            is_busy = any(listener.connections for listener in self._listeners)
            ready = dict(poller.poll(BUSY_CHECK_MS if is_busy else int(_LOOK_S * 1000)))
            has_changed = False
            for listener, (decode, reply_to) in self._listeners.items():
                if listener.socket in ready:
                    self._answer(listener.socket, decode, reply_to)
                if any(source in ready for source in self._sources[listener]):
                    has_changed |= listener.check()
            has_changed |= self._check_memory()
            if self._starter_fd in ready:
                log.info("whoever started this daemon no longer waits for it")
                self.should_exit = True
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
            if not self.started and self._loaded.is_set():
                self._starter_fd = None
                has_changed = True
                self._finish_start()
            elif self.started and time.monotonic() - self._looked_s >= _LOOK_S:
                self.catalog.release_retired()
                self._loader.collect_leftovers()
                if self.config.linger_s is not None:
                    self._check_linger(self.config.linger_s)
                self._looked_s = time.monotonic()
            if has_changed:
                poller = self._poller()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        self._sources = {listener: listener.sources() for listener in self._listeners}
        for listener, sources in self._sources.items():
            for source in (listener.socket, *sources):
                poller.register(source, zmq.POLLIN)
        if self._starter_fd is not None:
            poller.register(self._starter_fd, zmq.POLLERR)
        return poller

    def _check_memory(self) -> bool:
        """Have clients dropped where they make the daemon grow, and return whether a listener has new sources."""
        now_s = time.monotonic()
        if now_s - self._measured_s < BUSY_CHECK_MS / 1000:
            return False
        self._measured_s = now_s
        try:
            changes = [listener.check_memory(private_nbytes) for listener in self._listeners]
        except OSError as error:  # no descriptor is free at this moment
            log.warning("cannot tell how much memory this process has: %s", error)
            return False
        return any(changes)

    def _answer(self, router: _Socket, decode: _Decode, reply_to: _ReplyTo) -> None:
        deadline_s = time.monotonic() + BUSY_CHECK_MS / 1000
        for _ in range(_MESSAGES_PER_TURN):
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                log.debug("dropped a message of %d frames, one is expected", len(frames))
                continue
            reply = _reply_to_frame(frames[0], decode, reply_to)
            try:
                _send(router, identity, reply)
            except zmq.ZMQError as error:  # the client has gone, or does not read; that is its own affair
                log.debug("dropped a reply of %d bytes: %s", len(reply), error)
            if time.monotonic() > deadline_s:
                return

    def _reply(self, request: Request) -> Reply:
        if isinstance(request, Attach):
            self._last_used_s = time.monotonic()  # it is about to attach
        return self.service.reply(request)

    def _obey(self, request: Control) -> Reply:
        if isinstance(request, Stop):
            self.should_exit = self.removes_segments = True
            return Stopping(os.getpid())
        if not self.started:
            raise DatasetNotReadyError("the daemon still loads what it was started with: wait for `shmserve status`")
        return self._management.obey(request)

    def _finish_start(self) -> None:
        if self.catalog.failure() is not None:
            self.should_exit = True
            return
        self.started = True
        self._last_used_s = time.monotonic()
        self._on_ready(self.service.status())

    def _check_linger(self, linger_s: float) -> None:
        now_s = time.monotonic()
        segments = [*self.catalog.retired, *(ready.segment for ready in self.catalog.ready().values())]
        if any(attached_processes(segment.fd) for segment in segments):
            self._last_used_s = now_s
        elif now_s - self._last_used_s >= linger_s:
            log.info("no process has been attached for %g s", linger_s)
            self.should_exit = self.lingered_out = True

    def _load(self) -> None:
        try:
            self._loader.run()
        finally:
            self._loaded.set()
            with suppress(OSError):  # either the loop has more to wake up for than it can hold, or it has ended
                self._wake_sender.send(b"\0")
        self._loader.work()

    def shutdown(self) -> None:
        """Undo the startup, however far it got: loader, segments, sockets, lock."""
        self._cleanup.close()

    def _stop_loading(self) -> None:
        self._loader.cancel()
        self._loading.join(_LOADER_PATIENCE_S)
        if self._loading.is_alive():
            log.warning("the loader is still reading the source, and is left behind")

    def _release_segments(self) -> None:
        """Remove the segments, except those that the next start may want; all of them when told to stop."""
        started = self.started or self.removes_segments
        for ready in self.catalog.ready().values():
            # Before the start was over, what had been adopted was there already, and is kept.
            self._release(ready.segment, "the next start adopts it, ", unlink=started or not ready.adopted)
        for segment in self.catalog.retired:
            self._release(segment, "", unlink=True)

    def _release(self, segment: OwnedSegment, prospect: str, *, unlink: bool) -> None:
        readers = [] if self.removes_segments else attached_processes(segment.fd)
        if readers:
            self._progress.say(
                f"{segment.description.name}: {segment.path} stays for its {count(len(readers), 'reader')}: {prospect}"
                "`shmserve gc` removes it once nobody reads it"
            )
        elif unlink:
            segment.unlink()
        segment.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the signals that end a daemon. The exit status is then 0, also when they are sent twice."""
        taken = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            taken.append(signal.SIGHUP)
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        previous_fd = signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        previous = {signum: signal.signal(signum, self._on_signal) for signum in taken}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, signal.SIG_IGN if self.should_exit else handler)
            signal.set_wakeup_fd(previous_fd)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.should_exit = True


def _send(router: _Socket, identity: bytes, frame: bytes) -> None:
    """Hand a reply to libzmq without waiting; raises ZMQError where the client has gone or its queue is full."""
    try:
        router.send_multipart([identity, frame], zmq.NOBLOCK)
    except zmq.Again:
        # In a quick exchange libzmq does not get to count what the client has taken, and the queue only seems full:
        # asking for the events makes it count.
        router.getsockopt(zmq.EVENTS)
        router.send_multipart([identity, frame], zmq.NOBLOCK)


def _reply_to_frame(frame: bytes, decode: _Decode, reply_to: _ReplyTo) -> bytes:
    """Return the frame of the reply to whatever bytes a client sent."""
    request_id = None
    try:
        request_id, request = decode(frame)
        return encode(reply_to(request), request_id)
    except ShmserveError as error:
        failure = failure_from(error)
    except Exception as error:  # a fault of ours must not take down what others use
        log.exception("answering %r failed", frame[:200])
        failure = failure_from(ShmserveError(f"internal error: {type(error).__name__}: {error}"))
    return encode(failure, request_id_of(frame) if request_id is None else request_id)
