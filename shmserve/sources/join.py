"""Joining: the plans of a corpus's shards become one plan, without anything being read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES
from shmserve_client.writer import Piece

from .base import ArrayPlan, Corpus, Positions, RaggedPlan, ShardPlan, SourceOptions
from .pieces import PositionList

__all__ = ["join"]


def join(source_format: str, shards: Sequence[tuple[Path, ShardPlan]], options: SourceOptions) -> Corpus:
    """Return the corpus of all shards, in their order.

    Args:
        source_format: the format that all shards have.
        shards: each one's values' file, to name it by, and its plan; at least one.
        options: what a person said about the corpus.

    Raises:
        SourceFormatError: the shards differ in dtype or shape, or contradict the options.
    """
    shards = _completed(shards)
    first_path, first = shards[0]
    for path, plan in shards:
        if _kind(plan) != _kind(first):
            raise SourceFormatError(
                f"shards of one corpus differ: {first_path} has {_kind(first)}, {path} has {_kind(plan)}: "
                "serve them as two datasets"
            )
    dtype = first.values.dtype
    if options.dtype not in (None, dtype):
        raise SourceFormatError(
            f"{first_path}: its {source_format} header says {dtype}, not {options.dtype}: leave out --dtype "
            "(a --config gives each dataset its own)"
        )
    if options.vocab_size is not None and DTYPES[dtype].kind not in "iu":
        raise SourceFormatError(f"{first_path}: {dtype} values are not token ids: leave out --vocab-size")

    plans = [plan for _, plan in shards]
    values = _concatenate([plan.values for plan in plans])
    counts = [plan.values.shape[0] if plan.ragged is None else plan.ragged.count for plan in plans]
    ragged = [plan.ragged for plan in plans if plan.ragged is not None]
    offsets = shapes = shape_offsets = None
    if ragged:
        offsets = _offsets([plan.starts for plan in ragged], [plan.values.shape[0] for plan in plans], sum(counts))
        shapes, shape_offsets = _join_shapes(ragged, sum(counts))
    return Corpus(
        format=source_format,
        column=first.column,
        num_samples=sum(counts),
        values=values,
        offsets=offsets,
        shapes=shapes,
        shape_offsets=shape_offsets,
        arrays=_join_arrays(plans, counts),
        stream=first.stream,
        notes=tuple(dict.fromkeys(chain.from_iterable(plan.notes for plan in plans))),
    )


def _completed(shards: Sequence[tuple[Path, ShardPlan]]) -> list[tuple[Path, ShardPlan]]:
    """Return the shards, what one is too empty to tell taken from the others."""
    plans = [plan for _, plan in shards]
    dtype = next((plan.values.dtype for plan in plans if not plan.any_dtype), plans[0].values.dtype)
    multimodal = any(plan.modes is not None for plan in plans)
    return [
        (
            path,
            replace(
                plan,
                values=replace(plan.values, dtype=dtype) if plan.any_dtype else plan.values,
                modes=() if multimodal and plan.ragged is not None and plan.ragged.count == 0 else plan.modes,
            ),
        )
        for path, plan in shards
    ]


def _kind(plan: ShardPlan) -> str:
    """Return in words what two shards must have in common."""
    samples = "a token stream" if plan.stream else f"rows of shape {plan.values.shape[1:]}"
    if plan.ragged is not None:
        samples = "ragged samples"
    extras = [name for name, part in (("documents", plan.documents), ("modes", plan.modes)) if part is not None]
    return " with ".join((f"{plan.values.dtype} {samples}", *extras))


def _concatenate(arrays: Sequence[ArrayPlan]) -> ArrayPlan:
    """Return the arrays as one, along the first axis."""
    shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
    return ArrayPlan(arrays[0].dtype, shape, tuple(chain.from_iterable(array.pieces for array in arrays)))


def _offsets(starts: Sequence[Sequence[Positions]], lengths: Sequence[int], count: int) -> ArrayPlan:
    """Return the `count` starts of all shards, each moved on by the lengths of those before, and the last end."""
    *bases, end = accumulate(lengths, initial=0)
    moved = (piece.shifted(base) for pieces, base in zip(starts, bases, strict=True) for piece in pieces)
    return ArrayPlan("int64", (count + 1,), (*moved, PositionList(np.array([end]))))


def _join_shapes(ragged: Sequence[RaggedPlan], count: int) -> tuple[ArrayPlan | None, ArrayPlan | None]:
    shapes = [plan.shapes for plan in ragged if plan.shapes is not None]
    if all(plan.flat for plan in ragged) or not shapes:
        return None, None
    starts = [plan.shape_starts for plan in ragged]
    return _concatenate(shapes), _offsets(starts, [shape.shape[0] for shape in shapes], count)


def _join_arrays(plans: Sequence[ShardPlan], counts: Sequence[int]) -> dict[str, ArrayPlan]:
    """Return document_indices, joined as Megatron joins them when it merges files, and modes."""
    arrays: dict[str, ArrayPlan] = {}
    documents = [plan.documents for plan in plans if plan.documents is not None]
    if documents:
        bases = accumulate(counts[:-1], initial=0)
        moved = (piece.shifted(base) for pieces, base in zip(documents, bases, strict=True) for piece in pieces)
        arrays["document_indices"] = _flat("int64", [PositionList(np.zeros(1, np.int64)), *moved])
    modes = [plan.modes for plan in plans if plan.modes is not None]
    if modes:
        arrays["modes"] = _flat("int8", list(chain.from_iterable(modes)))
    return arrays


def _flat(dtype: str, pieces: Sequence[Piece]) -> ArrayPlan:
    """Return a 1-d array of the pieces' items."""
    return ArrayPlan(dtype, (sum(piece.nbytes for piece in pieces) // DTYPES[dtype].itemsize,), tuple(pieces))
