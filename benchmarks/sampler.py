"""What a shuffled epoch costs each rank: the order of all samples, as it is held or computed by a sampler.

It isolates the sampler: the dataset is a range, and no sample is read. Each sampler draws one epoch for rank 0 of 1, so
that all of them yield every index. Private memory is measured after the first index, when the order is there, as the
growth over the same process before it made the sampler. Of the epoch, up to a million indices are drawn and timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import psutil
import torch.utils.data
from harness import Case, Report, Result, alternated, benchmark, best, installed, timed

from shmserve_client import DistributedSampler
from shmserve_client.permutation import Permutation

SAMPLES = (10**6, 10**7, 10**8)
ROUNDS = {10**6: 3, 10**7: 3, 10**8: 1}
"""The largest is measured once: torch's takes gigabytes and many seconds."""
DRAWN = 1_000_000
CONTENDERS = {
    "torch RandomSampler": "torch",
    "torch DistributedSampler": "torch",
    "torchdata StatefulDistributedSampler": "torchdata",
    "shmserve DistributedSampler": "shmserve",
}
"""The package that each is in."""


def measure(case: Case) -> Result:
    """Return what the contender holds and takes, in MiB and seconds."""
    next(iter(_sampler(case["contender"], 1000)))  # what is imported or set up on first use is no part of it
    process = psutil.Process()
    before_nbytes = process.memory_full_info().uss
    started_s = time.perf_counter()
    indices = iter(_sampler(case["contender"], case["samples"]))
    next(indices)
    first_s = time.perf_counter() - started_s
    held_nbytes = process.memory_full_info().uss - before_nbytes
    started_s = time.perf_counter()
    drawn = sum(1 for _ in itertools.islice(indices, DRAWN))
    million_s = (time.perf_counter() - started_s) / drawn * 1e6
    return {
        "held_mib": held_nbytes / 2**20,
        "first_s": first_s,
        "million_s": million_s,
        "epoch_s": first_s + million_s * case["samples"] / 1e6,
    }


def _sampler(contender: str, samples: int) -> Iterable[int]:
    dataset = range(samples)
    if contender == "torch RandomSampler":
        return torch.utils.data.RandomSampler(dataset)
    if contender == "torch DistributedSampler":
        return torch.utils.data.DistributedSampler(dataset, 1, 0)
    if contender == "shmserve DistributedSampler":
        return DistributedSampler(dataset, 1, 0)
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDistributedSampler(dataset, 1, 0)


def run(quick: bool) -> Report:
    """Compare the samplers at each length, and state what one index of ours takes."""
    contenders = [name for name, package in CONTENDERS.items() if installed(package)]
    cases: list[Case] = []
    rows = []
    for samples in SAMPLES[:1] if quick else SAMPLES:
        at_length: list[Case] = [{"contender": name, "samples": samples} for name in contenders]
        for case, results in zip(at_length, alternated(__file__, at_length, ROUNDS[samples]), strict=True):
            least = {key: best(results, key) for key in ("held_mib", "first_s", "million_s", "epoch_s")}
            cases.append({**case, **least})
            rows.append(
                [
                    f"{case['contender']}, 10^{len(str(samples)) - 1}",
                    f"{least['held_mib']:,.1f}",
                    f"{least['first_s'] * 1e3:,.1f}",
                    f"{least['million_s']:.2f}",
                    f"{least['epoch_s']:,.2f}",
                ]
            )
    order = Permutation(SAMPLES[-1], 0)
    one_s = timed(lambda: order(12_345), repeat=5, number=10_000)
    return Report(
        question="What does a shuffled epoch cost each rank?",
        isolates=(
            "The sampler alone, over a range of samples, for rank 0 of 1. Memory is private memory (USS) once the "
            "first index is there; up to a million indices are drawn and timed, a whole epoch is reckoned from them."
        ),
        columns=["sampler, samples", "private memory, MiB", "first index, ms", "then, s per million", "whole epoch, s"],
        rows=rows,
        notes=[
            "Minima of three rounds; 10^8 samples are measured once.",
            f"One index of the permutation by itself takes {one_s * 1e6:.1f} us: what `ds.split` adds to `ds[i]`.",
            *(f"{name} is missing: benchmarks/peers installs it." for name in CONTENDERS if name not in contenders),
        ],
        data={"cases": cases, "one_index_s": one_s},
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
