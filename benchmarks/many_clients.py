"""How long 256 processes wait for the daemon: to attach, all at once, and for lookups, alone and beside a flood.

It isolates what clients cost each other. Each is a process of its own with one connection, forked from one that has
imported the client without torch. All of them attach at once; then each asks for the offsets of 64 indices four times
a second, at times of its own. A flood is one more process that keeps its queue full of such requests, and either reads
the replies or never does. The daemon's memory and descriptors are taken before the clients come and after they went.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import numpy as np
import zmq
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, served
from numpy.typing import NDArray

from shmserve_client.attaching import attach_served
from shmserve_client.connection import Connection
from shmserve_client.protocol import Attach, Lookup, Status, StatusReport, encode
from shmserve_client.remote import RemoteOffsets
from shmserve_client.samples import open_samples

SAMPLES = 1_000_000
CLIENTS = (1, 256)
FLOODS = ("none", "reads", "never reads")
INDICES = 64
ROUNDS = 3
LOOKUPS = 20
"""By each of many clients; one that is alone asks as often as all of them together."""
PERIOD_S = 0.25
PATIENCE_S = 60.0
_QUEUED = 16
_FORK = multiprocessing.get_context("fork")


def measure(case: Case) -> Result:
    """Return the percentiles of both times over all clients in seconds, and the daemon before and after."""
    endpoint = case["endpoint"]
    before = _daemon(endpoint)
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder, _flood(endpoint, case["flood"]):
        barrier = _FORK.Barrier(case["clients"])
        clients = [
            _FORK.Process(target=_client, args=(case, number, barrier, Path(folder)))
            for number in range(case["clients"])
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        failed = sum(client.exitcode != 0 for client in clients)
        if failed:
            raise SystemExit(f"error: {failed} of {len(clients)} clients failed")
        found = [np.load(file) for file in Path(folder).glob("*.npz")]
    attaching = np.concatenate([times["attach"] for times in found])
    lookups = np.concatenate([times["lookup"] for times in found])
    return {
        **{f"attach_p{p}": float(np.percentile(attaching, p)) for p in (50, 99)},
        **{f"lookup_p{p}": float(np.percentile(lookups, p)) for p in (50, 99)},
        "before": before,
        "after": _settled(endpoint, before),
    }


def _client(case: Case, number: int, barrier: Barrier, folder: Path) -> None:
    """Attach with all the others and ask in one's own time; write how long each took."""
    random = np.random.default_rng(number)
    barrier.wait()
    started_s = time.perf_counter()
    attached, segment = attach_served(case["endpoint"], Attach(), timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
    attach_s = time.perf_counter() - started_s
    samples = open_samples(segment.description, segment.array)
    remote = RemoteOffsets(
        case["endpoint"], PATIENCE_S, name=attached.name, nonce=attached.nonce, block_size=0, stride=0
    )
    remote.extents(samples, np.zeros(1, np.int64))  # connects
    barrier.wait()
    lookups = []
    due_s = time.perf_counter() + random.uniform(0, PERIOD_S)
    for _ in range(case["lookups"]):
        time.sleep(max(0.0, due_s - time.perf_counter()))
        positions = random.integers(0, len(samples), INDICES)
        started_s = time.perf_counter()
        remote.extents(samples, positions)
        lookups.append(time.perf_counter() - started_s)
        due_s += case["period_s"]
    remote.close()
    np.savez(folder / f"{number}.npz", attach=[attach_s], lookup=lookups)


@contextmanager
def _flood(endpoint: str, kind: str) -> Iterator[None]:
    """One more process that keeps its queue full of requests while the block runs, or none."""
    if kind == "none":
        yield
        return
    is_full = _FORK.Event()
    process = _FORK.Process(target=_keep_full, args=(endpoint, kind == "reads", is_full))
    process.start()
    try:
        if not is_full.wait(PATIENCE_S):
            raise SystemExit("error: the flood did not fill its queue")
        yield
    finally:
        process.kill()
        process.join()


def _keep_full(endpoint: str, reads: bool, is_full: object) -> None:
    with Connection(endpoint, PATIENCE_S) as connection:
        name = connection.request(Attach()).name
    indices: NDArray[np.int64] = np.arange(INDICES, dtype=np.int64)
    frame = encode(Lookup(name, indices.tobytes()), 1)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, _QUEUED)
    socket.setsockopt(zmq.RCVHWM, _QUEUED)
    socket.connect(endpoint)
    while True:
        try:
            while True:
                socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            is_full.set()
        if reads:
            socket.recv()
            while socket.poll(0):
                socket.recv()
        else:
            socket.poll(None, zmq.POLLOUT)


def _daemon(endpoint: str) -> Result:
    """Return the daemon's own memory in bytes and how many descriptors it has open."""
    with Connection(endpoint, PATIENCE_S) as connection:
        report = connection.request(Status())
    assert isinstance(report, StatusReport)
    return {"private": report.private_nbytes, "descriptors": len(os.listdir(f"/proc/{report.pid}/fd"))}


def _settled(endpoint: str, before: Result) -> Result:
    """Return the same once libzmq has closed the connections of those who went, or after a while."""
    deadline_s = time.monotonic() + 5
    while (after := _daemon(endpoint))["descriptors"] > before["descriptors"] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return after


def run(quick: bool) -> Report:
    """Measure one client and many, each without a flood and with either kind, all with one daemon."""
    samples, rounds = (10_000, 1) if quick else (SAMPLES, ROUNDS)
    most = 8 if quick else CLIENTS[-1]
    lookups = 4 if quick else LOOKUPS
    cases = []
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        data = write_ragged(Path(folder, "corpus"), ragged_lengths(samples, mean=4), "uint16")
        with served(data) as endpoint:
            for clients in (CLIENTS[0], most):
                share = most // clients
                pace = {"lookups": lookups * share, "period_s": PERIOD_S / share}
                cases += [{"clients": clients, "flood": flood, "endpoint": endpoint, **pace} for flood in FLOODS]
            found = alternated(__file__, cases, rounds)
    rows = []
    for case, results in zip(cases, found, strict=True):
        typical = {key: median(result[key] for result in results) for key in results[0] if "_p" in key}
        quiet = found[cases.index(case | {"flood": "none"})]
        times = median(one["lookup_p99"] / other["lookup_p99"] for one, other in zip(results, quiet, strict=True))
        last = results[-1]
        rows.append(
            [
                *(str(case["clients"]), case["flood"]),
                *(f"{typical[key] * 1e3:,.1f}" for key in ("attach_p50", "attach_p99", "lookup_p50", "lookup_p99")),
                f"{times:.1f}x",
                *(f"{last[when]['private'] / 2**20:.1f}" for when in ("before", "after")),
                *(str(last[when]["descriptors"]) for when in ("before", "after")),
            ]
        )
    return Report(
        question="How long do 256 processes wait for the daemon, and what does a flood by one of them cost the others?",
        isolates=(
            f"Clients that all attach at once, and then each ask for the offsets of {INDICES} indices every "
            f"{PERIOD_S * 1e3:.0f} ms, at times of their own; one that is alone asks as often as all of them together. "
            f"A flood is one more process whose queue is always full of the same requests. {samples:,} samples."
        ),
        columns=[
            *("clients", "flood", "attach p50, ms", "p99, ms", "lookup p50, ms", "p99, ms", "p99 against no flood"),
            *("daemon before, MiB", "after", "its descriptors before", "after"),
        ],
        rows=rows,
        notes=[
            "The times are medians over the rounds. All rows are measured in turn with one daemon; its figures are "
            "of the last round. Most of a client's time to attach is its own: on few cores, those who attach at once "
            "wait for each other's processes rather than for the daemon.",
            "A flood takes the cores, too: its process one, and the daemon another. ZeroMQ takes requests from one "
            "client after the other, so that nobody waits for more than one request of a flood at each turn.",
        ],
        data={"cases": [{**case, "endpoint": ""} for case in cases], "found": found},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
