"""What passes between the demo and a rank of it, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Job", "Outcome"]


@dataclass(frozen=True)
class Job:
    """What one rank has to do."""

    dataset: str
    """ "shmserve"; "copied": read into the rank's memory; or "empty": the same program without its data."""
    data: str
    """The daemon's endpoint, or the file of the tokens."""
    rank: int
    world_size: int
    workers: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    workers: list[int]
    """The process ids of the DataLoader's workers."""
    samples: int
    seconds: float
    """For these samples, from the first batch on: starting the processes is left out."""
    first_loss: float
    last_loss: float
