"""How fast a corpus gets from the page cache into shared memory, against programs that copy files.

It isolates the loading: the corpus is in the page cache, so no disk is measured, and the memory that it goes to was in
use a moment ago, by the same contender. Without that a virtual machine would be measured that takes back what is free:
it can need ten times as long to give the memory as any contender to fill it.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best, ratio, served

from shmserve.catalog import Catalog, Ready
from shmserve.config import DaemonConfig, DatasetConfig
from shmserve.loader import Loader
from shmserve.progress import Progress

SAMPLES, MEAN_LENGTH = 1_000_000, 512
ROUNDS = 7
WARM_UPS = 2
SHM = "/dev/shm"
REFERENCE = "cp"
"""The contender that the others are compared with."""


@contextmanager
def loaded(files: list[str], *, checksums: bool = False) -> Iterator[Ready]:
    """Do what a daemon does from the paths to the segment, in this process; the segment goes in the end."""
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-", dir=SHM) as folder:
        dataset = DatasetConfig("corpus", (files[0],))
        config = DaemonConfig((dataset,), endpoint="", shm_dir=folder, checksums=checksums)
        catalog = Catalog(config.datasets)
        Loader(config, catalog, Progress(io.StringIO())).run()
        state = catalog.get("corpus").state
        assert isinstance(state, Ready), state
        try:
            yield state
        finally:
            state.segment.unlink()
            state.segment.close()


def _load(files: list[str]) -> Result:
    with loaded(files) as ready:
        huge_refusal = ready.segment.huge_refusal
        return {"s": ready.load_seconds, "pages": f"4 KiB, {huge_refusal}" if huge_refusal else "2 MiB"}


def _start(files: list[str]) -> Result:
    """Measure the whole command until everything is served."""
    started = time.perf_counter()
    with served(files[0]):
        return {"s": time.perf_counter() - started, "pages": "2 MiB"}


def _copy(command: str) -> Callable[[list[str]], Result]:
    """Return what measures a shell command that copies the file "$1" to "$2", for all files of a corpus."""

    def copy(files: list[str]) -> Result:
        with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-", dir=SHM) as folder:
            started = time.perf_counter()
            for file in files:
                subprocess.run(["sh", "-c", command, "sh", file, f"{folder}/{Path(file).name}"], check=True)
            return {"s": time.perf_counter() - started, "pages": "4 KiB"}

    return copy


CONTENDERS: dict[str, Callable[[list[str]], Result]] = {
    "shmserve, the loader": _load,
    "shmserve start --detach": _start,
    "cp": _copy('cp "$1" "$2"'),
    "dd bs=2M": _copy('dd bs=2M if="$1" of="$2" status=none'),
    "cat": _copy('cat "$1" > "$2"'),
}


def measure(case: Case) -> Result:
    """Return the seconds that loading the corpus takes, once the same has been done before."""
    load = CONTENDERS[case["contender"]]
    for _ in range(WARM_UPS):
        load(case["files"])
    return load(case["files"])


def run(quick: bool) -> Report:
    """Measure the contenders in turn, with one file of tokens and with a pair."""
    samples = 20_000 if quick else SAMPLES
    rows, data = [], {}
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        pair = write_ragged(Path(folder, "pair"), ragged_lengths(samples, MEAN_LENGTH), "uint16")
        tokens = Path(folder, "tokens.bin")
        tokens.hardlink_to(pair)  # without its index it is a file of tokens
        for title, files in (
            ("flat tokens", [tokens]),
            (f"Megatron pair, {samples:,} sequences", [pair, pair.with_suffix(".idx")]),
        ):
            cases = [{"contender": name, "files": [str(file) for file in files]} for name in CONTENDERS]
            found = dict(zip(CONTENDERS, alternated(__file__, cases, 1 if quick else ROUNDS), strict=True))
            gib = sum(file.stat().st_size for file in files) / 2**30
            rows += [_row(f"{title}: {name}", results, found[REFERENCE], gib) for name, results in found.items()]
            data[title] = {"gib": gib, "found": found}
    return Report(
        question="How long does it take to load a corpus into shared memory, against copying it there?",
        isolates=(
            f"From the page cache into a stock {SHM}, through memory that was in use a moment before. The loader is "
            "what a daemon does from the paths to the segment, checks of the files included; `start --detach` is the "
            "whole command until it is ready, with two starts of Python. "
            f"Measured {ROUNDS} times, in turn, in fresh processes."
        ),
        columns=["corpus: program", "s, least", "s, median", "GiB/s", "times cp, least", "times cp, median", "pages"],
        rows=rows,
        notes=[
            "GiB/s and the first ratio are of the least times; the second is the median over the pairs of one turn.",
            "The loader has two threads: while other programs use the cores, it has less of a lead.",
        ],
        data=data,
    )


def _row(title: str, results: list[Result], reference: list[Result], gib: float) -> list[str]:
    least = best(results, "s")
    return [
        title,
        f"{least:.2f}",
        f"{median(result['s'] for result in results):.2f}",
        f"{gib / least:.1f}",
        f"{best(reference, 's') / least:.1f}x",
        f"{ratio(results, reference, 's'):.1f}x",
        results[0]["pages"],
    ]


if __name__ == "__main__":
    benchmark(__file__, measure, run)
