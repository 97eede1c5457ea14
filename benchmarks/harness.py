"""What every benchmark here shares: fresh processes, contenders in turn, results with the machine they came from.

A benchmark is one script. Its cases are plain dicts; each is measured by a process of its own, which runs the same
script with `--case JSON`, prints one line of JSON as its last, and ends. So no contender leaves memory, caches or
imported modules to the next. `python benchmarks/X.py` runs them all and writes `benchmarks/results/X.json`;
`benchmarks/tables.py` puts these into benchmarks/README.md, `benchmarks/plot.py` draws the pictures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("shmserve", "torch", "numpy", "pyzmq", "msgpack", "xxhash"),
    *("megatron-core", "datasets", "pyarrow", "lmdb", "mmap-ninja", "tensordict"),
)

Case = dict[str, Any]
Result = dict[str, Any]


@dataclass
class Report:
    """What a benchmark found: what `results/NAME.json` holds, and one section of benchmarks/README.md."""

    question: str
    """One sentence, ending in a question mark."""
    isolates: str
    """What is measured, what is left out, and how; a sentence or two."""
    columns: list[str]
    rows: list[list[str]]
    """The table, as text; numbers with their units in the columns' names."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know to read the table, such as a contender that is missing and why."""
    data: dict[str, Any] = field(default_factory=dict)
    """The figures behind the table, for plot.py and for whoever wants to look closer."""


def benchmark(script: str, measure: Callable[[Case], Result], run: Callable[[bool], Report]) -> None:
    """Be the main program of the benchmark in the file `script`.

    Args:
        script: its `__file__`.
        measure: measures one case, in a process of its own.
        run: measures all cases, by `measured`, and reports. Its argument tells whether to be quick: the same with small
            data and few repetitions, which only shows that everything works.
    """
    name = Path(script).stem
    parser = argparse.ArgumentParser(prog=f"python benchmarks/{name}.py", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="small data, to see that it works: prints, writes nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(json.loads(arguments.case))))
        return
    started_s = time.monotonic()
    report = run(arguments.quick)
    print(markdown(report))
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        document = {
            "command": f"python benchmarks/{name}.py",
            "took_s": round(time.monotonic() - started_s),
            "machine": machine(),
            **asdict(report),
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def measured(script: str, case: Case, *, env: dict[str, str] | None = None, timeout_s: float = 240.0) -> Result:
    """Return what `measure` of the script found for one case, in a fresh process."""
    done = subprocess.run(
        [sys.executable, script, "--case", json.dumps(case)],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise SystemExit(f"error: {Path(script).name} failed on {case} (exit code {done.returncode}), see above")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def alternated(script: str, cases: Sequence[Case], rounds: int) -> list[list[Result]]:
    """Return for each case its results, one a round; within a round the cases take turns, so that noise hits all."""
    found: list[list[Result]] = [[] for _ in cases]
    for number in range(rounds):
        order = range(len(cases)) if number % 2 == 0 else reversed(range(len(cases)))
        for position in order:
            found[position].append(measured(script, cases[position]))
    return found


@contextmanager
def served(*data: str | Path) -> Iterator[str]:
    """A daemon that serves these files (NAME=PATH gives a name); yields its endpoint, and stops it in the end."""
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        endpoint = f"ipc://{folder}/daemon.sock"
        command = [sys.executable, "-m", "shmserve"]
        options = [option for path in data for option in ("--data", str(path))]
        subprocess.run([*command, "start", "--detach", "--endpoint", endpoint, *options], check=True)
        try:
            yield endpoint
        finally:
            subprocess.run([*command, "stop", "--endpoint", endpoint], check=True)


def best(results: Sequence[Result], key: str) -> float:
    """Return the least value of a figure that noise can only raise, such as a time."""
    return float(min(result[key] for result in results))


def ratio(ours: Sequence[Result], theirs: Sequence[Result], key: str) -> float:
    """Return how many times as large their figure is, as the median over the rounds, each a pair measured in turn."""
    return median(their[key] / our[key] for our, their in zip(ours, theirs, strict=True))


def timed(function: Callable[[], object], *, repeat: int, number: int = 1) -> float:
    """Return the least time in seconds of one call, over `repeat` runs of `number` calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        for _ in range(number):
            function()
        times.append((time.perf_counter() - started) / number)
    return min(times)


def installed(*packages: str) -> bool:
    """Return whether all of these distributions are there, as `benchmarks/peers` installs them."""
    return all(_version(package) for package in packages)


def touch_memory(nbytes: int) -> None:
    """Use that much memory once: a virtual machine is slow to give what it has not given before."""
    block = bytearray(nbytes)
    block[::4096] = b"\1" * len(block[::4096])


def machine() -> dict[str, Any]:
    """Return the hardware, the kernel and the versions that the figures hold for."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory_kib = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    shmem = next(iter(_lines("/sys/kernel/mm/transparent_hugepage/shmem_enabled")), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20),
        "kernel": platform.release().partition("-")[0],
        "shmem_enabled": shmem.partition("[")[2].partition("]")[0],
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def markdown(report: Report) -> str:
    """Return the report as a section of Markdown, without a heading."""
    lines = [report.question, "", report.isolates, ""]
    lines.append("| " + " | ".join(report.columns) + " |")
    lines.append("|" + "|".join(["---"] + ["---:"] * (len(report.columns) - 1)) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in report.rows]
    if report.notes:
        lines += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []
