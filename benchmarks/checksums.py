"""What checksums cost: a load with and without them, and what it takes to compare them afterwards.

It isolates the checksums: the same loader, the same file in the page cache, and memory that was in use a moment ago.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best
from load import ROUNDS, SHM, WARM_UPS, loaded

from shmserve.verify import verify

SAMPLES, MEAN_LENGTH = 2_000_000, 512
REPEATS = 4
REFERENCE = "load"
CASES: dict[str, Case] = {
    "load": {"checksums": False},
    "load --checksums": {"checksums": True},
    "verify": {"against_source": False},
    "verify --against-source": {"against_source": True},
}


def measure(case: Case) -> Result:
    """Return the least seconds that loading or verifying the file takes, and of all processors, once memory is warm."""
    found: list[Result] = []
    for _ in range(WARM_UPS + REPEATS):
        started = time.perf_counter(), time.process_time()
        with loaded([case["file"]], checksums=case.get("checksums", True)) as ready:
            if "against_source" in case:
                started = time.perf_counter(), time.process_time()
                segment = ready.segment
                verified = verify(segment.path, segment.header.nonce, against_source=case["against_source"])
                assert verified.chunks, verified
                assert not verified.damaged + verified.differences, verified
            found.append({"s": time.perf_counter() - started[0], "cpu_s": time.process_time() - started[1]})
    return {key: best(found[WARM_UPS:], key) for key in ("s", "cpu_s")}


def run(quick: bool) -> Report:
    """Measure all cases in turn, with one file of tokens."""
    samples = 20_000 if quick else SAMPLES
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        tokens = write_ragged(Path(folder, "tokens"), ragged_lengths(samples, MEAN_LENGTH), "uint16")
        tokens.with_suffix(".idx").unlink()  # without its index it is a file of tokens
        cases = [{"file": str(tokens), **case} for case in CASES.values()]
        found = dict(zip(CASES, alternated(__file__, cases, 1 if quick else ROUNDS), strict=True))
        gib = tokens.stat().st_size / 2**30

    def more(name: str, key: str) -> str:
        return f"{(best(found[name], key) / best(found[REFERENCE], key) - 1) * 100:+.0f} %" if "load" in name else ""

    return Report(
        question="What do checksums cost?",
        isolates=(
            f"{gib:.1f} GiB of flat tokens from the page cache into a stock {SHM}, through memory that was in use a "
            "moment before, by what a daemon does from the path to the segment; `verify` is without its start of "
            f"Python. The least of {REPEATS} times in each of {ROUNDS} fresh processes, in turn."
        ),
        columns=["what", "s", "GiB/s", "longer by", "s of all processors", "more by"],
        rows=[
            [
                f"`{name}`",
                f"{best(results, 's'):.3f}",
                f"{gib / best(results, 's'):.1f}",
                more(name, "s"),
                f"{best(results, 'cpu_s'):.3f}",
                more(name, "cpu_s"),
            ]
            for name, results in found.items()
        ],
        notes=[
            "Two threads load, and with 2 cores both are in use, so that whatever is computed beside it takes time.",
        ],
        data={"gib": gib, "found": found},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
