"""`BatchLoader`: batches assembled ahead of the training, in a thread of the rank and without worker processes."""

from __future__ import annotations

import inspect
import operator
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from .batches import Batch, BatchedDataset
from .errors import ConfigError
from .sampler import DistributedSampler

if TYPE_CHECKING:
    from .dataset import ShmDataset
    from .splits import DatasetSplit

__all__ = ["BatchLoader"]


class BatchLoader:
    """Iterates over the batches of an epoch, in order, while a thread assembles the next ones.

    An iteration ends with its epoch, with the loop that it belongs to, with `close`, or when another one begins; its
    thread ends after the batch that it is at. What the thread raises is raised by the loop, in place of the batch.
    """

    def __init__(
        self,
        dataset: ShmDataset | DatasetSplit | BatchedDataset,
        batch_size: int,
        *,
        sampler: Iterable[int] | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Set up; no thread starts before the first batch is asked for.

        Args:
            dataset: what to draw from. `dataset.batched(length=..., pad=..., dtype=...)` chooses what batches are.
            batch_size: samples in a batch.
            sampler: the indices of an epoch, anew in each iteration; None for all of them in order.
            drop_last: whether the last batch is left out where it is smaller.
            prefetch: how many batches may wait to be taken.
            pin_memory: whether batches are in page-locked memory, from which `.to("cuda", non_blocking=True)` copies
                while the training goes on.

        Raises:
            ConfigError: the dataset is none of these, an option is impossible, or there is no accelerator to pin memory
                for.
        """
        if not isinstance(dataset, BatchedDataset) and not hasattr(dataset, "batched"):
            raise ConfigError(
                f"dataset {type(dataset).__name__} has no batched(): give a ShmDataset, a split or a batched view"
            )
        self._batched = dataset if isinstance(dataset, BatchedDataset) else dataset.batched()
        self._batch_size = _positive("batch_size", batch_size)
        self._sampler: Any = _in_order(self._batched) if sampler is None else sampler
        self._drop_last = drop_last
        self._prefetch = _positive("prefetch", prefetch)
        self._pin_memory = pin_memory
        if pin_memory:
            _check_pinning()
        self._executor: ThreadPoolExecutor | None = None
        self._iteration: weakref.ref[Generator[Any]] | None = None
        self._state: Any = None  # the sampler's, at the batch that was handed on last; None where it is still the same

    def __len__(self) -> int:
        """Return the number of batches in an epoch, for a sampler that has a length."""
        batches, rest = divmod(len(self._sampler), self._batch_size)
        return batches + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of an epoch, or of what is left of it after `load_state_dict`; any iteration before ends.

        Raises:
            ShmserveError: as the dataset's `batch`, in place of the batch that cannot be made. Whatever the sampler
                raises, likewise.
        """
        self.close()
        iteration = self._batches()
        self._iteration = weakref.ref(iteration)  # not held, so that it ends with the loop that does
        return iteration

    def _batches(self) -> Generator[Any]:
        indices = iter(self._sampler)
        self._state = self._sampler_state()
        owner = os.getpid()
        executor = self._executor = ThreadPoolExecutor(1, "shmserve-batches")
        try:
            waiting = deque(executor.submit(self._assemble, indices) for _ in range(self._prefetch))
            while True:
                if os.getpid() != owner:
                    raise ConfigError(
                        "this loop began before the process was forked, its thread did not: begin a new one"
                    )
                assembled = waiting.popleft().result()
                if self._executor is not executor:  # closed meanwhile
                    return
                if assembled is None:
                    break
                waiting.append(executor.submit(self._assemble, indices))
                batch, self._state = assembled
                yield batch
            self._state = None
        except CancelledError:  # by close
            return
        finally:
            # Not waited for here: this may be the garbage collector, in that very thread.
            executor.shutdown(wait=False, cancel_futures=True)

    def _assemble(self, indices: Iterator[int]) -> tuple[Any, Any] | None:
        """Return the next batch, and the sampler's state after it; None after the last. Runs in the thread."""
        chosen = list(islice(indices, self._batch_size))
        if not chosen or (self._drop_last and len(chosen) < self._batch_size):
            return None
        state = self._sampler_state()
        batch = self._batched.__getitems__(chosen)
        return (_pinned(batch) if self._pin_memory else batch), state

    def _sampler_state(self) -> Any:
        return self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else None

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state after the batch that the loop was given last, whatever was assembled since.

        After a loop that was left early it stays the same until the next iteration begins.

        Raises:
            ConfigError: the sampler has no state.
        """
        state: dict[str, Any] | None = self._sampler_state() if self._state is None else self._state
        if state is None:
            raise self._has_no_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state` was taken; a running one ends.

        Raises:
            ConfigError: the sampler has no state, or the state is none of its own.
        """
        if not hasattr(self._sampler, "load_state_dict"):
            raise self._has_no_state()
        self.close()
        self._sampler.load_state_dict(state)
        self._state = None

    def _has_no_state(self) -> ConfigError:
        return ConfigError(f"sampler {type(self._sampler).__name__} has no state: give a DistributedSampler")

    def close(self) -> None:
        """End the iteration that runs, if any, and its thread; idempotent. A later iteration begins anew.

        A loop that waits for a batch, because this is called by a signal handler or in another thread, ends when the
        thread has finished the batch that it is at.
        """
        iteration = None if self._iteration is None else self._iteration()
        executor, self._executor = self._executor, None
        is_waiting = iteration is not None and inspect.getgeneratorstate(iteration) == inspect.GEN_RUNNING
        if executor is not None:
            executor.shutdown(wait=not is_waiting, cancel_futures=True)
        if iteration is not None and not is_waiting:
            iteration.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executor": None, "_iteration": None, "_state": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _positive(name: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whatever a caller gives
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"{name} {value!r}: give a positive integer")
    return number


def _in_order(dataset: BatchedDataset) -> DistributedSampler:
    return DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=False)


def _check_pinning() -> None:
    try:
        torch.empty(1).pin_memory()
    except RuntimeError as error:
        raise ConfigError(f"pin_memory: {str(error).splitlines()[0]} Leave it out") from error


def _pinned(batch: Any) -> Any:
    if isinstance(batch, Batch):
        return Batch(batch.values.pin_memory(), batch.lengths)
    return {name: _pinned(each) for name, each in batch.items()}
