"""Joining: the plans of a corpus's shards become one plan, without anything being read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.layout import DTYPES
from shmserve_client.plans import ArrayPlan, ColumnPlan, JoinedColumn, PositionList, join_column
from shmserve_client.writer import Piece

from .base import Corpus, ShardPlan, SourceOptions
from .in_place import FilesInPlace, join_in_place

__all__ = ["join"]


def join(source_format: str, shards: Sequence[tuple[Path, ShardPlan]], options: SourceOptions) -> Corpus:
    """Return the corpus of all shards, in their order.

    Args:
        source_format: the format that all shards have.
        shards: each one's values' file, to name it by, and its plan; at least one.
        options: what a person said about the corpus.

    Raises:
        ConfigError: a column that was chosen is not there, or no values can stay in their files as they should.
        SourceFormatError: the shards differ in columns, dtype or shape, or contradict the options.
    """
    shards = _completed([(path, _chosen(path, plan, options.columns)) for path, plan in shards])
    first_path, first = shards[0]
    for path, plan in shards:
        if _kind(plan) != _kind(first):
            raise SourceFormatError(
                f"shards of one corpus differ: {first_path} has {_kind(first)}, {path} has {_kind(plan)}: "
                "serve them as two datasets"
            )
    column = first.columns[0]
    dtype = column.values.dtype
    if options.dtype not in (None, dtype):
        raise SourceFormatError(
            f"{first_path}: its {source_format} header says {dtype}, not {options.dtype}: leave out --dtype "
            "(a --config gives each dataset its own)"
        )
    if options.vocab_size is not None and (column.kind != "tensor" or DTYPES[dtype].kind not in "iu"):
        raise SourceFormatError(
            f"{first_path}: the values of column {column.name!r}, {dtype if column.kind == 'tensor' else column.kind}, "
            "are not token ids: leave out --vocab-size, or name the column that has them first in --columns"
        )

    plans = [plan for _, plan in shards]
    counts = [plan.count for plan in plans]
    parts = list(zip(*(plan.columns for plan in plans), strict=True))
    notes = tuple(dict.fromkeys(chain.from_iterable(plan.notes for plan in plans)))
    files = FilesInPlace()
    if options.in_place:
        columns, loaded = _join_in_place(first_path, parts, files)
        notes += loaded
    else:
        columns = tuple(map(join_column, parts))
    return Corpus(
        format=source_format,
        num_samples=sum(counts),
        columns=columns,
        arrays=_join_arrays(plans, counts),
        stream=first.stream,
        notes=notes,
        files=files.files,
    )


def _join_in_place(
    path: Path, columns: Sequence[Sequence[ColumnPlan]], files: FilesInPlace
) -> tuple[tuple[JoinedColumn, ...], tuple[str, ...]]:
    """Return the columns, with their values in the files where they can stay there, and a note of all others."""
    joined = []
    loaded = []
    for parts in columns:
        column = join_in_place(parts, files)
        if column is None:
            column = join_column(parts)
            if column.values.nbytes:
                loaded.append(column.name)
        joined.append(column)
    if loaded and not files.files:
        raise ConfigError(
            f"{path}: its values cannot be mapped where they are, since they are stored in another form or in several "
            "pieces: write them as one file by `shmserve build`, and map that"
        )
    if not loaded:
        return tuple(joined), ()
    return tuple(joined), (f"in memory, since they cannot be mapped where they are: {', '.join(loaded)}",)


def _chosen(path: Path, plan: ShardPlan, columns: tuple[str, ...] | None) -> ShardPlan:
    """Return the plan with the columns that a person chose."""
    if columns is None:
        return plan
    present = {column.name: column for column in plan.columns}
    for name in columns:
        if name not in present:
            raise ConfigError(f"{path}: no column {name!r}: it has {', '.join(map(repr, present))}")
    return replace(plan, columns=tuple(present[name] for name in columns))


def _completed(shards: Sequence[tuple[Path, ShardPlan]]) -> list[tuple[Path, ShardPlan]]:
    """Return the shards, what one is too empty to tell taken from the others."""
    told: dict[str, str] = {}
    for _, plan in shards:
        for column in plan.columns:
            if not column.any_dtype:
                told.setdefault(column.name, column.values.dtype)
    multimodal = any(plan.modes is not None for _, plan in shards)
    return [
        (
            path,
            replace(
                plan,
                columns=tuple(_with_dtype(column, told.get(column.name)) for column in plan.columns),
                modes=() if multimodal and plan.columns[0].ragged is not None and not plan.count else plan.modes,
            ),
        )
        for path, plan in shards
    ]


def _with_dtype(column: ColumnPlan, dtype: str | None) -> ColumnPlan:
    if dtype is None or not column.any_dtype:
        return column
    return replace(column, values=replace(column.values, dtype=dtype))


def _kind(plan: ShardPlan) -> str:
    """Return in words what two shards must have in common."""
    columns = [_column_kind(column, plan) for column in plan.columns]
    extras = [name for name, part in (("documents", plan.documents), ("modes", plan.modes)) if part is not None]
    return " with ".join((", ".join(columns), *extras))


def _column_kind(column: ColumnPlan, plan: ShardPlan) -> str:
    name = f"{column.name!r}: " if len(plan.columns) > 1 else ""
    if column.kind != "tensor":
        return name + column.kind
    samples = "a token stream" if plan.stream else f"rows of shape {column.values.shape[1:]}"
    if column.ragged is not None:
        samples = "ragged samples"
    return f"{name}{column.values.dtype} {samples}"


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
