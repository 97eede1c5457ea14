"""A million annotations as Python objects: what they take on a node, and to build and read, in several ways."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Case, Report, Result, benchmark, installed, measured
from ram_by_rank import Contender, memory_of, rank

from shmserve_client import publish
from shmserve_client.connection import Connection
from shmserve_client.endpoint import listening
from shmserve_client.protocol import Status

OBJECTS = 1_000_000
RANKS, WORKERS = 4, 2
ACCESSES = 20_000
LIST_SHARE = 10
"""A list in each process would not fit into this machine: its memory is measured with so many times fewer objects."""
SAMPLE_S = 0.01
LINGER_S = 5.0


def annotations(count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` records such as COCO's, the same each time: an image, and what is marked in it."""
    draw = random.Random(0)
    for number in range(count):
        marks = []
        for _ in range(draw.randrange(1, 5)):
            left, top, width, height = (draw.uniform(0, 600) for _ in range(4))
            outline = [left, top, left + width, top, left + width, top + height, left, top + height]
            marks.append(
                {
                    "bbox": [left, top, width, height],
                    "category_id": draw.randrange(80),
                    "iscrowd": 0,
                    "segmentation": [outline],
                }
            )
        yield {
            "file_name": f"train2017/{number:012}.jpg",
            "height": 480,
            "width": 640,
            "image_id": number,
            "annotations": marks,
        }


class Serialized:
    """After the idea of detectron2's dataset lists: each object pickled, all of them in one array."""

    def __init__(self, objects: Iterator[Any] | None = None, prefix: str = "") -> None:
        if objects is None:
            self.data, self.ends = np.load(f"{prefix}.data.npy"), np.load(f"{prefix}.ends.npy")
            return
        parts = [np.frombuffer(pickle.dumps(each, -1), np.uint8) for each in objects]
        self.ends = np.cumsum([len(part) for part in parts])
        self.data = np.concatenate(parts)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        start = self.ends[index - 1] if index else 0
        return pickle.loads(memoryview(self.data[start : self.ends[index]]))


def _count(prefix: str) -> int:
    return int(Path(prefix).name)


def _list(prefix: str) -> Any:
    return list(annotations(_count(prefix)))


def _serialized(prefix: str) -> Any:
    if not os.path.exists(f"{prefix}.data.npy"):
        return Serialized(annotations(_count(prefix)))
    return Serialized(prefix=prefix)


def _datasets(prefix: str) -> Any:
    import datasets

    return datasets.load_from_disk(f"{prefix}.arrow")


def _shmserve(prefix: str) -> Any:
    count = _count(prefix)
    return publish(f"annotations-{count}", lambda: annotations(count), linger=LINGER_S)


def _build_datasets(prefix: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    count = _count(prefix)
    built = datasets.Dataset.from_generator(annotations, gen_kwargs={"count": count}, cache_dir=f"{prefix}.cache")
    built.save_to_disk(f"{prefix}.arrow")
    return built


def _build_serialized(prefix: str) -> Any:
    return Serialized(annotations(_count(prefix)))


CONTENDERS = {
    "list": Contender("list of dicts per rank", _list, "torch.utils.data", "torch"),
    "serialized": Contender("serialized list per rank (detectron2)", _serialized, "torch.utils.data", "torch"),
    "datasets": Contender("HF datasets", _datasets, "datasets", "datasets"),
    "shmserve": Contender("shmserve publish", _shmserve, "shmserve_client.dataset", "shmserve"),
}
BUILDERS: dict[str, Callable[[str], Any]] = {
    "list": _list,
    "serialized": _build_serialized,
    "datasets": _build_datasets,
    "shmserve": _shmserve,
}


@dataclass
class Peak:
    """The most memory of this process, and shared memory of the node, while the block ran, beyond that before it."""

    nbytes: int = 0

    def __enter__(self) -> Peak:
        self._ended = threading.Event()
        self._before = _taken()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.nbytes = max(self.nbytes, _taken() - self._before)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _taken() -> int:
    """Return how much memory this process has that no file backs, and all processes share, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    anonymous_kib = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    shared: int = psutil.virtual_memory().shared
    return (anonymous_kib << 10) + shared


def measure(case: Case) -> Result:
    """Return how long building takes and how much memory, or how long an access does, or what all processes hold."""
    name, prefix = case["contender"], case["prefix"]
    if case["what"] == "build":
        with Peak() as peak:
            started = time.perf_counter()
            built = BUILDERS[name](prefix)
            built_s = time.perf_counter() - started
        positions = np.random.default_rng(0).integers(0, len(built), ACCESSES).tolist()
        if name == "datasets":
            built = CONTENDERS[name].open(prefix)
        assert all(built[position] == each for position, each in enumerate(annotations(min(100, len(built))))), (
            "not what was given"
        )
        started = time.perf_counter()
        for position in positions:
            built[position]
        return {"s": built_s, "peak": peak.nbytes, "access_us": (time.perf_counter() - started) / ACCESSES * 1e6}
    full, empty = (_held(CONTENDERS[name], each, case["ranks"]) for each in (prefix, case["empty"]))
    return {key: full[key] - empty[key] for key in full}


def _held(contender: Contender, prefix: str, ranks: int) -> dict[str, int]:
    """Return what all processes hold when each has read every object, the daemon's included."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(rank(contender, prefix, WORKERS)) for _ in range(ranks)]
        pids = [pid for pipe in pipes for pid in pipe.recv()]
        if contender.open is _shmserve:
            for endpoint in _daemons():
                with Connection(endpoint, timeout_s=10) as connection:
                    pids.append(connection.request(Status()).pid)
        processes = [memory_of(pid) for pid in pids]
    return {key: sum(process[key] for process in processes) for key in ("pss", "page_tables")}


def run(quick: bool) -> Report:
    """Measure the contenders that are installed."""
    count, ranks = (2_000, 1) if quick else (OBJECTS, RANKS)
    names = [name for name, contender in CONTENDERS.items() if installed(contender.package)]
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        runtime = Path(folder, "run")
        runtime.mkdir(0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        prefix, empty, fewer = (f"{folder}/{number}" for number in (count, 1, count // LIST_SHARE))
        serialized = Serialized(annotations(count))
        nbytes = serialized.data.nbytes
        np.save(f"{prefix}.data.npy", serialized.data)
        np.save(f"{prefix}.ends.npy", serialized.ends)
        del serialized
        found: dict[str, Result] = {}
        for name in names:
            built = measured(__file__, {"what": "build", "contender": name, "prefix": prefix})
            if name == "datasets":
                measured(__file__, {"what": "build", "contender": name, "prefix": empty})
            _wait_for_daemons()
            held = {"what": "held", "contender": name, "empty": empty, "ranks": ranks}
            found[name] = built | measured(__file__, {**held, "prefix": fewer if name == "list" else prefix})
            _wait_for_daemons()
    scales = {name: LIST_SHARE if name == "list" else 1 for name in names}
    return Report(
        question="What do Python objects cost on a node?",
        isolates=(
            f"{count:,} dicts such as COCO's annotations, {nbytes / 2**20:,.0f} MiB when pickled, made by a generator. "
            "Building is in one process; its peak is the most memory that this process and /dev/shm took meanwhile, "
            "against the pickled bytes. An access gives one whole object, at random. Memory is that of "
            f"{ranks} ranks with {WORKERS} workers each which have read every object, PSS and page tables, less the "
            "same processes with one object."
        ),
        columns=["objects", f"{ranks} x {WORKERS} processes, MiB", "access, us", "build, s", "peak of building"],
        rows=[
            [
                CONTENDERS[name].title,
                _mib((found[name]["pss"] + found[name]["page_tables"]) * scales[name], scaled=scales[name] > 1),
                f"{found[name]['access_us']:.2f}",
                f"{found[name]['s']:.1f}",
                f"{found[name]['peak'] / nbytes:.1f}x",
            ]
            for name in names
        ],
        notes=[
            f"In brackets: measured with {count // LIST_SHARE:,} objects, times {LIST_SHARE}. All of them in each "
            "process would not fit into this machine.",
            "A list's access makes nothing: its objects are there, in each process. The others make the object anew.",
            "HF datasets builds into files, and maps them: what it holds is page cache, which can be evicted.",
            *(
                f"{CONTENDERS[name].title}: not installed, see benchmarks/peers"
                for name in CONTENDERS
                if name not in names
            ),
        ],
        data={"nbytes": nbytes, "found": found},
    )


def _wait_for_daemons() -> None:
    """Wait until the daemons of what was published have ended."""
    while _daemons():
        time.sleep(0.1)


def _daemons() -> list[str]:
    """Return the sockets of those that run."""
    return [path for path in map(str, Path(os.environ["XDG_RUNTIME_DIR"]).rglob("e-*.sock")) if listening(path)]


def _mib(nbytes: int, *, scaled: bool) -> str:
    text = f"{nbytes / 2**20:,.0f}"
    return f"({text})" if scaled else text


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    benchmark(__file__, measure, run)
