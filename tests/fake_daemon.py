"""A daemon's socket that answers as a test tells it to: replies that a real daemon gives seldom, or never."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import zmq

from shmserve_client.protocol import Attach, Attached, Lookup, Offsets, Reply, Request, decode_request, encode
from shmserve_client.samples import open_samples
from shmserve_client.segment import Segment

Answer = Callable[[int, Request], Iterable[bytes]]
"""From (request id, request) to the frames that go back, as many as it likes."""


def answering(reply: Callable[[Request], Reply]) -> Answer:
    """The frames of a daemon that answers each request once."""
    return lambda request_id, request: [encode(reply(request), request_id)]


def serving(path: str, nonce: bytes, *, name: str = "corpus", block_size: int = 0, stride: int = 0) -> Answer:
    """The frames of a daemon that serves the segment at `path`."""

    def reply(request: Request) -> Reply:
        if isinstance(request, Attach):
            return Attached(name, path, nonce, block_size, stride)
        assert isinstance(request, Lookup)
        segment = Segment.attach(path, nonce)
        samples = open_samples(
            segment.description,
            segment.array,
            column=request.column,
            block_size=request.block_size,
            stride=request.stride,
        )
        offsets, nbytes = samples.extents(np.frombuffer(request.indices, "<i8"))
        return Offsets(offsets.tobytes(), nbytes.tobytes())

    return answering(reply)


class FakeDaemon:
    """A thread that answers on the socket at `path` while its with-block lasts. `requests` is what came."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = str(path)
        self.answer = answer
        self.requests: list[Request] = []
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(f"ipc://{self.path}")
            self._ready.set()
            while not self._stop.is_set():
                if router.poll(20):
                    client, frame = router.recv_multipart()
                    request_id, request = decode_request(frame)
                    self.requests.append(request)
                    for reply in self.answer(request_id, request):
                        router.send_multipart([client, reply])

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        Path(self.path).unlink(missing_ok=True)
