"""Where samples lie, asked of the daemon over ZeroMQ, against a bare pyzmq echo of as many bytes.

It isolates what the daemon adds to the socket: decoding the request, looking the offsets up, and encoding the reply.
Both servers have a ROUTER socket at an ipc path and a process of their own; the echo answers each request with the same
bytes, made before. Both get the same requests, made before, from the same clients, which drop the replies unread. Each
client is one DEALER socket with one request under way; several processes share the clients.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, product
from pathlib import Path

import numpy as np
import zmq
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best, ratio, served, timed
from numpy.typing import NDArray

from shmserve_client.connection import Connection
from shmserve_client.protocol import Attach, Lookup, Offsets, encode

SAMPLES = 1_000_000
CLIENTS = (1, 4, 16, 64)
PROCESSES = 4
"""The most that share the clients."""
INDICES = (1, 64, 1024, 16_384)
ROUNDS = 3
WARM_UP_S = 0.2
MEASURED_S = 0.5
PATIENCE_MS = 10_000
_FORK = multiprocessing.get_context("fork")


def measure(case: Case) -> Result:
    """Return how many requests a second the contender answers; of whole lookups, the seconds of one in each way."""
    if case["contender"] == "lookup":
        return _lookups(case)
    if case["contender"] == "daemon":
        return {"per_s": _rate(case, case["endpoint"])}
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        endpoint = f"ipc://{folder}/echo.sock"
        echo = _FORK.Process(target=_echo, args=(endpoint, _reply(case)))
        echo.start()
        try:
            return {"per_s": _rate(case, endpoint)}
        finally:
            echo.terminate()
            echo.join()


def _lookups(case: Case) -> Result:
    from shmserve_client import ShmDataset

    indices = _indices(case)
    found: Result = {}
    for way in ("daemon", "shared"):
        with ShmDataset(endpoint=case["endpoint"], lookup=way) as dataset:
            found[way] = timed(lambda: dataset.lookup(indices), repeat=10, number=100)
    return found


def _rate(case: Case, endpoint: str) -> float:
    """Return how many requests a second the server at `endpoint` answers to all clients together."""
    processes = min(case["clients"], PROCESSES)
    clients = case["clients"] // processes
    with ProcessPoolExecutor(processes, mp_context=_FORK) as pool:
        answered = [pool.submit(_ask, endpoint, _request(case), clients) for _ in range(processes)]
        return sum(future.result() for future in answered) / MEASURED_S


def _ask(endpoint: str, request: bytes, clients: int) -> int:
    """Return how many replies come in `MEASURED_S` seconds, while each client always has one request under way."""
    answered = 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets = [context.socket(zmq.DEALER) for _ in range(clients)]
        for socket in sockets:
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
            socket.connect(endpoint)
            socket.send(request)
        for socket in sockets:
            socket.recv()
            socket.send(request)
        begin_s = time.monotonic() + WARM_UP_S
        for socket in cycle(sockets):  # the server takes them in turn, too, so that none waits long for its own
            socket.recv()
            elapsed_s = time.monotonic() - begin_s
            if elapsed_s >= MEASURED_S:
                break
            answered += elapsed_s >= 0
            socket.send(request)
    finally:
        context.destroy(linger=0)
    return answered


def _echo(endpoint: str, reply: bytes) -> None:
    """Serve `reply` to whatever comes, until terminated."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    while True:
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, reply])


def _indices(case: Case) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, case["samples"], case["indices"])


def _request(case: Case) -> bytes:
    """Return the frame that a `ShmDataset` with `lookup="daemon"` sends."""
    indices = _indices(case).tobytes()
    return encode(Lookup(case["name"], indices, nonce=bytes.fromhex(case["nonce"])), 1)


def _reply(case: Case) -> bytes:
    extents = bytes(8 * case["indices"])
    return encode(Offsets(extents, extents), 1)


def run(quick: bool) -> Report:
    """Measure both servers for each number of clients and of indices, and whole lookups of one client."""
    samples = 10_000 if quick else SAMPLES
    rounds = 1 if quick else ROUNDS
    numbers = INDICES[:2] if quick else INDICES
    grid = list(product(CLIENTS[:2] if quick else CLIENTS, numbers))
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        data = write_ragged(Path(folder, "corpus"), ragged_lengths(samples, mean=4), "uint16")
        with served(data) as endpoint:
            with Connection(endpoint, timeout_s=10) as connection:
                attached = connection.request(Attach())
            corpus = {"samples": samples, "endpoint": endpoint, "name": attached.name, "nonce": attached.nonce.hex()}
            pairs = [
                {"contender": contender, "clients": clients, "indices": indices, **corpus}
                for clients, indices in grid
                for contender in ("echo", "daemon")
            ]
            found = alternated(__file__, pairs, rounds)
            lookups = alternated(__file__, [{"contender": "lookup", "indices": n, **corpus} for n in numbers], rounds)
    rows = []
    for (clients, indices), echo, daemon in zip(grid, found[::2], found[1::2], strict=True):
        echo_per_s, daemon_per_s = (max(result["per_s"] for result in results) for results in (echo, daemon))
        times = ratio(echo, daemon, "per_s")
        rows.append(
            [
                *(str(clients), f"{indices:,}", f"{echo_per_s:,.0f}", f"{daemon_per_s:,.0f}", f"{times:.2f}x"),
                *(f"{daemon_per_s * indices / 1e6:,.2f}", f"{clients / daemon_per_s * 1e6:,.0f}"),
            ]
        )
    ways = {way: ", ".join(f"{best(results, way) * 1e6:,.1f}" for results in lookups) for way in ("daemon", "shared")}
    return Report(
        question="How much slower than a bare echo does the daemon tell where samples lie?",
        isolates=(
            "What decoding, looking up and encoding add to ZeroMQ: the same clients send the same requests, made "
            "before, to the daemon and to a ROUTER socket in a process of its own that answers with as many bytes. "
            f"Each has one request under way; up to {PROCESSES} processes share the clients. {samples:,} samples."
        ),
        columns=[
            *("clients", "indices a request", "echo, requests/s", "shmserve, requests/s", "against the echo"),
            *("million indices/s", "us a request"),
        ],
        rows=rows,
        notes=[
            f"A whole `ds.lookup` of {', '.join(f'{n:,}' for n in numbers)} indices by one client, which also encodes, "
            f'decodes and checks, takes {ways["daemon"]} us with `lookup="daemon"`, and {ways["shared"]} us from the '
            "offsets in the segment, which `ds[i]` reads and which need no daemon."
        ],
        data={"grid": grid, "pairs": found, "indices": numbers, "lookups": lookups},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
