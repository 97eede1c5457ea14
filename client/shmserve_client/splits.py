"""Parts of a dataset, chosen at random, in O(1) memory: each is a range of positions of one permutation."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import Dataset

from .batches import BatchedDataset
from .errors import ConfigError
from .indices import Indexed, Int64s
from .permutation import Permutation
from .tensors import DtypeOption

if TYPE_CHECKING:
    from .dataset import ShmDataset

__all__ = ["DatasetSplit", "split"]


class DatasetSplit(Indexed, Dataset[Any]):
    """A part of a dataset, indexed like the dataset itself; `ShmDataset.split` makes it.

    It holds the dataset and two bounds. Samples alias the shared memory, and pickles attach, as the dataset's do.
    """

    def __init__(self, dataset: ShmDataset, order: Permutation, start: int, stop: int) -> None:
        """Be the samples at the positions [start, stop) of `order`."""
        self.dataset: Final = dataset
        self.count = stop - start
        self._order = order
        self._start = start

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        """Return sample `index` of the part, or a list of samples for a slice. Raises as the dataset's."""
        if isinstance(index, slice):
            return self.__getitems__(self.span(index))
        return self.dataset[self._order(self._start + self.position(index))]

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """Return the list of these samples, as DataLoader asks for a batch."""
        return self.dataset.__getitems__(self._in_dataset(indices))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self.count))

    def batch(
        self,
        indices: Iterable[Any],
        length: int | None = None,
        pad: Any = 0,
        dtype: DtypeOption = None,
        out: Any = None,
    ) -> Any:
        """Return samples of the part as one `Batch`, or a dict of them, as the dataset's `batch` does."""
        return self.dataset.batch(self._in_dataset(indices), length, pad, dtype, out)

    def batched(self, length: int | None = None, pad: Any = 0, dtype: DtypeOption = None) -> BatchedDataset:
        """Return a view of the part that gives a DataLoader whole batches, as the dataset's `batched` does."""
        return BatchedDataset(self, length, pad, dtype)

    def _in_dataset(self, indices: Iterable[Any]) -> Int64s:
        return self._order(self._start + self.positions(indices))

    def _remark(self) -> str:
        return " in this split"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, {self.count} samples)"


def split(dataset: ShmDataset, lengths: Sequence[float], seed: int) -> list[DatasetSplit]:
    """Return the parts of `dataset`. Described at `ShmDataset.split`."""
    order = Permutation(len(dataset), seed)
    bounds = accumulate(_counts(lengths, len(dataset)), initial=0)
    return [DatasetSplit(dataset, order, start, stop) for start, stop in pairwise(bounds)]


def _counts(lengths: Sequence[float], total: int) -> list[int]:
    """Return how many samples each part has, as torch.utils.data.random_split would."""
    try:
        if math.isclose(math.fsum(lengths), 1, rel_tol=1e-6):  # as near as float32 comes
            counts = [math.floor(total * fraction) for fraction in lengths]
            left = total - sum(counts)
            counts = [count + (left - number + len(counts) - 1) // len(counts) for number, count in enumerate(counts)]
        else:
            counts = [operator.index(length) for length in lengths]  # type: ignore[arg-type]  # floats are errors
        if sum(counts) == total and min(counts, default=0) >= 0 and min(lengths, default=0) >= 0:
            return counts
    except (TypeError, ValueError, OverflowError):
        pass  # not numbers, or fractions with another sum
    raise ConfigError(f"lengths {lengths!r}: give fractions that sum to 1, or counts that sum to {total}")
