"""One rank of the demo: a program of its own, which trains a small model and stays until it has been measured.

It is given its Job as JSON, prints "ready" when it has a first batch, and goes on when it reads a line, so that all
ranks train at the same time. It prints its Outcome as JSON after the last step, and keeps its DataLoader's workers,
with whatever they hold, until its standard input ends. It sees no more of shmserve than training code does.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import asdict

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shmserve_client.dataset import ShmDataset
from shmserve_client.sampler import DistributedSampler

from .jobs import Job, Outcome

__all__ = ["main"]

BLOCK_SIZE = 256
BATCH_SIZE = 16
VOCABULARY_SIZE = 256
LEARNING_RATE = 4.0


class CopiedTokens(Dataset[torch.Tensor]):
    """The usual way: the rank reads the file into its memory, and its workers are given the dataset."""

    def __init__(self, path: str, *, empty: bool) -> None:
        self.count = (os.stat(path).st_size // 2 - 1) // BLOCK_SIZE
        # Empty, it is the same program without its data: what that takes is taken off the other measurements.
        self.tokens = np.fromfile(path, np.uint16, BLOCK_SIZE + 1 if empty else -1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        start = 0 if len(self.tokens) == BLOCK_SIZE + 1 else index * BLOCK_SIZE
        return torch.from_numpy(self.tokens[start : start + BLOCK_SIZE + 1].astype(np.int64))


def main() -> None:
    """Train, report, and wait for the end of standard input."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # multiprocessing then tidies up
    job = Job(**json.loads(sys.argv[1]))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # The default way to start workers from Python 3.14 on. Imported once per rank, torch is shared by its workers.
    multiprocessing.set_forkserver_preload(["torch", "shmserve_client.dataset"])
    dataset = _dataset(job)
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=DistributedSampler(dataset, job.world_size, job.rank),
        num_workers=job.workers,
        multiprocessing_context="forkserver" if job.workers else None,
    )
    model = nn.Sequential(nn.Embedding(VOCABULARY_SIZE, 64), nn.Linear(64, VOCABULARY_SIZE))

    parameters = list(model.parameters())

    batches = iter(loader)
    batch = next(batches)
    _say("ready")
    sys.stdin.readline()

    losses: list[float] = []
    started = time.monotonic()
    for step in range(job.steps):
        batch = next(batches) if step else batch
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():  # by hand, since torch.optim would load torch's compiler: seconds for each rank
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=LEARNING_RATE)
        losses.append(loss.item())

    outcome = Outcome(
        workers=[process.pid for process in multiprocessing.active_children() if process.pid],
        samples=job.steps * BATCH_SIZE,
        seconds=time.monotonic() - started,
        first_loss=losses[0],
        last_loss=losses[-1],
    )
    gc.collect()  # pickling leaves cycles that hold the data; they are not to be measured
    _say(json.dumps(asdict(outcome)))
    sys.stdin.read()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _dataset(job: Job) -> ShmDataset | CopiedTokens:
    if job.dataset == "shmserve":
        return ShmDataset("stdlib", endpoint=job.data, block_size=BLOCK_SIZE + 1, stride=BLOCK_SIZE)
    return CopiedTokens(job.data, empty=job.dataset == "empty")


if __name__ == "__main__":
    main()
