"""`DistributedSampler`: each rank's share of a shuffled epoch, computed as it goes, and resumed where it was."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

import numpy as np
import torch.distributed as dist
import torch.utils.data

from .errors import ConfigError
from .permutation import Permutation

__all__ = ["DistributedSampler"]

_CHUNK: Final = 8192
"""Positions computed at once: enough to be fast, and less than a millisecond to the first index."""
_STATE: Final = {"epoch": int, "consumed": int, "seed": int, "shuffle": bool, "dataset_length": int}


class DistributedSampler(torch.utils.data.DistributedSampler[int]):
    """torch's DistributedSampler in O(1) memory, whatever the dataset's length, with a state to resume from.

    An epoch is one order of the whole dataset, which all ranks share: rank r of W takes the positions r, r + W, r + 2W
    and so on. As torch does, it wraps around to give all ranks the same number, or leaves the tail out. The order is
    another one than torch's, and depends on the seed, the epoch and the dataset's length only.

    The state counts what was yielded. In a DataLoader with workers this runs ahead of the training by the batches that
    wait; `BatchLoader` and torchdata's StatefulDataLoader keep the state of the batch last given out. After
    `load_state_dict` the attribute `epoch` is the one to go on with: let the loop over epochs begin there.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Set up a rank's share.

        Args:
            dataset: what to draw from; only its length is used.
            num_replicas: the number of ranks. None asks torch.distributed, or, where it is not initialised, takes
                $WORLD_SIZE, which torchrun sets.
            rank: this process's rank; None likewise, $RANK.
            shuffle: whether the order is shuffled; else it is the dataset's.
            seed: any integer, the same in all ranks.
            drop_last: whether the tail that does not give every rank an index is left out; else the first positions of
                the epoch are added to it.

        Raises:
            ConfigError: the world is asked for, and nothing tells it; or a number is not an integer.
            ValueError: the rank is not in [0, num_replicas).
        """
        if num_replicas is None:
            num_replicas = dist.get_world_size() if _is_initialised() else _from_environment("WORLD_SIZE")
        if rank is None:
            rank = dist.get_rank() if _is_initialised() else _from_environment("RANK")
        try:  # a float would get through torch's checks, and turn positions into floats
            num_replicas, rank, seed = map(operator.index, (num_replicas, rank, seed))
        except TypeError:
            raise ConfigError(
                f"num_replicas {num_replicas!r}, rank {rank!r}, seed {seed!r}: give integers (// divides into one)"
            ) from None
        super().__init__(dataset, num_replicas, rank, bool(shuffle), seed, drop_last)  # type: ignore[arg-type]
        self._length = len(dataset)
        self._begin = 0
        self._is_next = True  # whether the next iteration begins at _begin; else the current one did
        self._consumed = 0

    def __iter__(self) -> Iterator[int]:
        """Return the rest of the epoch after `load_state_dict`, once; else all of this rank's share.

        Warns:
            UserWarning: the epoch is over, and its order would come again.
        """
        if not self._is_next:
            if self.shuffle and self._consumed == self._length > 1:
                warnings.warn(
                    f"epoch {self.epoch} is over, and the same order follows: call set_epoch(epoch) before each epoch",
                    stacklevel=2,
                )
            self._begin = 0
        self._is_next = False
        count = len(self)
        self._consumed = self._begin if count else self._length
        order = Permutation(self._length, self.seed, self.epoch) if self.shuffle else None
        return self._indices(self._begin, count, order)

    def _indices(self, begin: int, count: int, order: Permutation | None) -> Iterator[int]:
        for start in range(0, count, _CHUNK):
            turns = np.arange(start, min(start + _CHUNK, count))
            positions = (begin + self.rank + turns * self.num_replicas) % self._length
            indices = positions if order is None else order(positions)
            for yielded, index in enumerate(indices.tolist(), start + 1):
                self._consumed = begin + yielded * self.num_replicas if yielded < count else self._length
                yield index

    def __len__(self) -> int:
        """Return how many indices the current iteration yields, or, before there is one, the next."""
        left = self._length - self._begin
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch. Another epoch starts anew; the same one keeps a loaded position.

        Warns:
            UserWarning: a loaded position is given up for an earlier epoch.
        """
        if epoch == self.epoch:
            return
        if self._is_next and self._begin and epoch < self.epoch:
            warnings.warn(
                f"the state that was loaded is in epoch {self.epoch}, and epoch {epoch} starts anew: "
                "let the loop over epochs begin at sampler.epoch",
                stacklevel=2,
            )
        self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is, the same in all ranks: ints and a bool, which JSON can hold.

        `consumed` counts the positions of the epoch that all ranks together have yielded; it is `dataset_length` once
        the epoch is over.
        """
        return {
            "epoch": self.epoch,
            "consumed": self._consumed,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset_length": self._length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` was taken, with its epoch, seed and shuffle.

        The rest is dealt out among the ranks that there are now. With as many as before it is exactly what an
        uninterrupted run would have yielded; with another number, all ranks together yield each sample that is left
        once, up to what is added or left out at the very end. An epoch that was over has nothing left: the next
        iteration is empty, unless `set_epoch` has gone on to a later epoch already.

        Raises:
            ConfigError: the state is of a dataset of another length, or not a state of this class.
        """
        if not isinstance(state, Mapping) or {name: type(value) for name, value in state.items()} != _STATE:
            raise ConfigError(f"sampler state {state!r} does not have {', '.join(_STATE)}: give a state_dict()")
        epoch, consumed, length = state["epoch"], state["consumed"], state["dataset_length"]
        if length != self._length:
            raise ConfigError(
                f"sampler state is of a dataset of {length} samples, this one has {self._length}: "
                "resume with the same data and block_size"
            )
        if not 0 <= consumed <= length:
            raise ConfigError(f"sampler state has consumed {consumed} of {length} samples: it is damaged")
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        # A StatefulDataLoader loads when it is iterated: after the set_epoch of the epoch that is to follow.
        if consumed < length or epoch >= self.epoch:
            self._go_to(epoch, consumed)

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch = operator.index(epoch)
        self._begin = self._consumed = position
        self._is_next = True


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_environment(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ConfigError(
            f"torch.distributed is not initialised, and ${variable} is {value!r}: start the ranks with torchrun, or "
            "give num_replicas and rank, 1 and 0 for a single process"
        )
    return int(value)
