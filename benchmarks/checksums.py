"""What checksums cost: a load with and without them, and what it takes to compare them afterwards.

It isolates the checksums: the same loader, the same file in the page cache, and memory that was in use a moment ago.
Unlike elsewhere the contenders take turns within a process: they differ by less than one process does from the next.
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
TURNS = 5
LOADS = {"load": False, "load --checksums": True}
VERIFICATIONS = {"verify": False, "verify --against-source": True}
REFERENCE = "load"


def measure(case: Case) -> Result:
    """Return the least times of each contender, once memory is warm: `NAME: s`, and of all processors `NAME: cpu_s`."""
    turns: list[Result] = []
    for number in range(WARM_UPS + TURNS):
        turn: Result = {}
        for name in LOADS if number % 2 else reversed(LOADS):
            started = _clocks()
            with loaded([case["file"]], checksums=LOADS[name]) as ready:
                turn |= _since(started, name)
                for how, against_source in VERIFICATIONS.items() if LOADS[name] else ():
                    segment, started = ready.segment, _clocks()
                    found = verify(segment.path, segment.header.nonce, against_source=against_source)
                    turn |= _since(started, how)
                    assert not found.damaged + found.differences, found
        turns.append(turn)
    return {key: best(turns[WARM_UPS:], key) for key in turns[0]}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float], name: str) -> Result:
    s, cpu_s = (now - then for now, then in zip(_clocks(), started, strict=True))
    return {f"{name}: s": s, f"{name}: cpu_s": cpu_s}


def run(quick: bool) -> Report:
    """Measure all contenders with one file of tokens."""
    samples = 20_000 if quick else SAMPLES
    with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
        tokens = write_ragged(Path(folder, "tokens"), ragged_lengths(samples, MEAN_LENGTH), "uint16")
        tokens.with_suffix(".idx").unlink()  # without its index it is a file of tokens
        (rounds,) = alternated(__file__, [{"file": str(tokens)}], 1 if quick else ROUNDS)
        gib = tokens.stat().st_size / 2**30
    found = {key: best(rounds, key) for key in rounds[0]}

    def more(name: str, unit: str) -> str:
        return f"{(found[f'{name}: {unit}'] / found[f'{REFERENCE}: {unit}'] - 1) * 100:+.0f} %"

    return Report(
        question="What do checksums cost?",
        isolates=(
            f"{gib:.1f} GiB of flat tokens from the page cache into a stock {SHM}, through memory that was in use a "
            "moment before, by what a daemon does from the path to the segment; `verify` is without its start of "
            f"Python. The least of {TURNS} times in each of {ROUNDS} fresh processes, in turn."
        ),
        columns=["what", "s", "GiB/s", "longer by", "s of all processors", "more by"],
        rows=[
            [
                f"`{name}`",
                f"{found[f'{name}: s']:.3f}",
                f"{gib / found[f'{name}: s']:.1f}",
                more(name, "s") if name in LOADS else "",
                f"{found[f'{name}: cpu_s']:.3f}",
                more(name, "cpu_s") if name in LOADS else "",
            ]
            for name in (*LOADS, *VERIFICATIONS)
        ],
        notes=[
            "Two threads load, and with 2 cores both are in use, so that whatever is computed beside it takes time.",
        ],
        data={"gib": gib, "rounds": rounds},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
