"""Batches gathered straight from the segment into one tensor, without a tensor for each sample."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from .errors import ConfigError
from .indices import Int64s
from .layout import is_shape
from .samples import Samples
from .tensors import (
    DtypeOption,
    Limits,
    OpenColumn,
    check_dtype,
    gathered_dtype,
    numpy_dtype,
    tensor_maker,
    value_limits,
)

__all__ = ["Batch", "BatchedDataset", "Ranges", "gather"]

Ranges: TypeAlias = Callable[[Samples, Int64s], tuple[Int64s, Int64s]]
"""Tells where samples lie, as (starts, stops) in items: `Samples.ranges`, or the daemon's answer in its place."""


class Batch(NamedTuple):
    """Samples of one column in one tensor, as private memory."""

    values: torch.Tensor
    """Sample k of the batch is `values[k]`, padded at its end."""
    lengths: torch.Tensor
    """int64 (n,): how much of each sample is there, counted along its first axis; 1 for scalars."""

    def __getitem__(self, index: Any) -> Any:
        """Refuse, since this is how torch's default_collate takes the two tensors for samples; unpacking goes on.

        Raises:
            ConfigError: always.
        """
        raise _taken_for_samples()


class _Batches(dict[str, Batch | list[Any]]):
    """The batches of several columns."""

    def __missing__(self, key: Any) -> Any:
        raise _taken_for_samples() if key == 0 else KeyError(key)


def _taken_for_samples() -> ConfigError:
    return ConfigError("a batch is no list of samples: give the DataLoader collate_fn=view.collate_fn of its dataset")


class _Batching(Protocol):
    def __len__(self) -> int: ...

    def batch(self, indices: Any, length: int | None, pad: Any, dtype: DtypeOption) -> Any: ...


class BatchedDataset(Dataset[Any]):
    """A dataset that gives a DataLoader whole batches: `DataLoader(view, batch_size=64, collate_fn=view.collate_fn)`.

    Without this `collate_fn` the DataLoader would take the tensors of a batch for samples.
    """

    def __init__(self, dataset: _Batching, length: int | None = None, pad: Any = 0, dtype: DtypeOption = None) -> None:
        """Batch `dataset` by its `batch`, with these options. Raises ConfigError, now, where they are impossible."""
        super().__init__()
        self._dataset = dataset
        self._options = (length, pad, dtype)
        dataset.batch([], *self._options)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return the batch of one sample, or of a list of them. Raises as the dataset's `batch`."""
        return self.__getitems__(index if isinstance(index, list) else [index])

    def __getitems__(self, indices: Iterable[Any]) -> Any:
        """Return the batch of these samples: a `Batch`, or a dict of them. Raises as the dataset's `batch`."""
        return self._dataset.batch(indices, *self._options)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return `batch`, which is one already."""
        return batch


def gather(
    columns: Mapping[str, OpenColumn],
    positions: Int64s,
    ranges: Ranges,
    *,
    length: int | None,
    pad: Any,
    dtype: DtypeOption,
    out: Any,
) -> Batch | list[Any] | dict[str, Batch | list[Any]]:
    """Return the batch of the samples at `positions`. Described at `ShmDataset.batch`."""
    check_dtype(dtype)
    if length is not None:
        length = _checked_length(length)
        if all(each.samples.shape is not None for each in columns.values()):
            raise ConfigError(
                f"length {length}: these samples all have one shape, which is not cut or padded: leave it out"
            )
    tensors = [name for name, column in columns.items() if column.samples.column.kind == "tensor"]
    if len(columns) == 1 and tensors:
        (only,) = columns.values()
        return _gather(only.samples, positions, ranges, length, pad, dtype, out)
    outs = dict.fromkeys(tensors) if out is None else out
    if not isinstance(outs, dict) or outs.keys() != set(tensors):
        raise ConfigError(f"out: give a dict with a tensor for each of the columns {', '.join(tensors) or '(none)'}")
    batches = _Batches(
        {
            name: _gather(column.samples, positions, ranges, length, pad, dtype, outs[name])
            if name in outs
            else _list(column, positions, ranges)
            for name, column in columns.items()
        }
    )
    return batches if len(columns) > 1 else next(iter(batches.values()))


def _list(column: OpenColumn, positions: Int64s, ranges: Ranges) -> list[Any]:
    """Return the values of samples that are not tensors."""
    starts, stops = ranges(column.samples, positions)
    places = zip(positions.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [column.make(column.samples.values[start:stop], position) for position, start, stop in places]


def _checked_length(length: object) -> int:
    try:
        number = operator.index(length)  # type: ignore[arg-type]  # whatever a caller gives
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise ConfigError(f"length {length!r}: give a number of items, or None for the longest sample of each batch")
    return number


@dataclass(frozen=True)
class _Conversion:
    """How the values of a column become those of a batch."""

    target: torch.dtype
    numpy: np.dtype[Any]
    """The target's equal, or, where numpy has none, what is gathered before torch converts it."""
    is_direct: bool
    limits: Limits | None


@cache
def _conversion(stored: np.dtype[Any], dtype: DtypeOption) -> _Conversion:
    if dtype == "stored" or (dtype is None and stored.kind not in "iu"):
        return _Conversion(torch.from_numpy(np.empty(0, stored)).dtype, stored, True, None)
    if dtype is None:
        dtype = torch.int64
    tensor_maker(stored, dtype, private=True)  # raises where torch does not convert to it
    numpy = gathered_dtype(stored, dtype)
    return _Conversion(dtype, numpy, numpy_dtype(dtype) is not None, value_limits(stored, numpy))


def _gather(
    samples: Samples,
    positions: Int64s,
    ranges: Ranges,
    length: int | None,
    pad: Any,
    dtype: DtypeOption,
    out: torch.Tensor | None,
) -> Batch:
    conversion = _conversion(samples.values.dtype, dtype)
    padding = _padding(pad, conversion)
    starts, stops = ranges(samples, positions)
    counts = stops - starts
    lengths, others = samples.first_axes(positions, counts)
    shape = samples.shape
    if shape is None:
        if length is None:
            given = None if out is None else getattr(out, "shape", ())[1:2]
            length = given[0] if given else int(lengths.max(initial=0))
        lengths = np.minimum(lengths, length)
        counts = lengths * math.prod(others)
        shape = (length, *others)
    shape = (len(positions), *shape)
    if not is_shape(shape):
        raise ConfigError(f"a batch of the shape {list(shape)} is larger than any memory: ask for fewer or a length")
    values = torch.empty(shape, dtype=conversion.target) if out is None else _checked_out(out, shape, conversion.target)
    if conversion.limits is not None:
        _check_values(conversion.limits, samples.values, positions, starts, counts)
    if conversion.is_direct:
        _fill(values.numpy(), samples.values, starts, counts, padding)
    else:
        rows = np.empty(shape, conversion.numpy)
        _fill(rows, samples.values, starts, counts, padding)
        values.copy_(torch.from_numpy(rows))
    return Batch(values, torch.from_numpy(lengths))


def _padding(pad: Any, conversion: _Conversion) -> NDArray[Any]:
    """Return `pad` as a scalar of the conversion's dtype. Raises ConfigError where it is not the same number there."""
    try:
        given = np.asarray(pad)
    except (TypeError, ValueError, RuntimeError):  # a tensor that numpy cannot read, a list of lists
        given = np.empty(0)
    if given.shape == () and given.dtype.kind in "biuf" + conversion.numpy.kind:
        with np.errstate(all="ignore"):
            padding = given.astype(conversion.numpy)
        # A float may be rounded, and must not become infinite.
        exact = conversion.numpy.kind in "biu"
        final = (
            padding
            if conversion.is_direct
            else torch.tensor(padding.item()).to(conversion.target).to(torch.complex64).numpy()
        )
        if padding.item() == given.item() if exact else np.isfinite(final) == np.isfinite(given):
            return padding
    raise ConfigError(f"pad {pad!r} does not fit {conversion.target}: give a number that does, or another dtype")


def _checked_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the first rows of `out`, as many as `shape` says."""
    if (
        isinstance(out, torch.Tensor)
        and (out.dtype, out.device.type, out.layout) == (dtype, "cpu", torch.strided)
        and (out.shape[1:], out.ndim) == (shape[1:], len(shape))
        and out.shape[0] >= shape[0]
        and out.is_contiguous()
        and not (out.requires_grad or out.is_conj() or out.is_neg())
        and (not out.is_inference() or torch.is_inference_mode_enabled())
    ):
        return out[: shape[0]]
    given = f"{out.dtype} {list(out.shape)} on {out.device}" if isinstance(out, torch.Tensor) else type(out).__name__
    raise ConfigError(
        f"out is {given}: give a contiguous CPU tensor, {dtype} {list(shape)} or with more rows, without gradient"
    )


def _check_values(limits: Limits, values: NDArray[Any], positions: Int64s, starts: Int64s, counts: Int64s) -> None:
    """Raise SampleValueError for the first sample that the limits do not hold."""
    views = [values[start : start + count] for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
    if views and not limits.hold(np.concatenate(views)):
        raise next(
            limits.error(view, position)
            for view, position in zip(views, positions.tolist(), strict=True)
            if not limits.hold(view)
        )


def _fill(rows: NDArray[Any], values: NDArray[Any], starts: Int64s, counts: Int64s, padding: NDArray[Any]) -> None:
    """Fill row k with `values[starts[k]:starts[k] + counts[k]]`, converted, and the rest of it with `padding`.

    Most of the time goes into waiting for samples that lie anywhere in memory. An index for each item, torch's
    indexing and a mask over all items take twice as long, one assignment for each row a tenth more.
    """
    if not rows.size:
        return
    flat = rows.reshape(-1)
    width = len(flat) // len(rows)
    if (counts == width).all():
        # Picked from all the rows that there could be, a view: faster than to join them, the more so if they are short.
        strides = (values.itemsize, values.itemsize)
        every = np.ndarray((len(values) - width + 1, width), values.dtype, values, strides=strides)
        flat.reshape(-1, width)[:] = every[starts]
        return
    if values.size:
        # The first items of all samples get on their way into the cache together, before they are needed one by one.
        values.take(starts, mode="clip")
    tail = np.full(width, padding)
    parts = []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        parts.append(values[start : start + count])
        if count < width:
            parts.append(tail[count:])
    np.concatenate(parts, out=flat, casting="unsafe")  # what the dtype cannot hold was refused before
