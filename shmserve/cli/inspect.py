"""`shmserve inspect`: what a corpus is, read from its files alone, without a daemon or shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from shmserve.decoding import plan_head
from shmserve.sources import Resolved, resolve
from shmserve.sources.base import Corpus, DecodedSource, SourceOptions
from shmserve.text import size
from shmserve_client.errors import printable
from shmserve_client.layout import DTYPES
from shmserve_client.objects import unpack_object
from shmserve_client.plans import ArrayPlan, JoinedColumn
from shmserve_client.urls import absolute

from .options import Command, columns_option, echo_json, option

__all__ = ["inspect"]

_SHOWN_SAMPLES: Final = 3
_SHOWN_ITEMS: Final = 16
_SHOWN_FILES: Final = 8
_SHOWN_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: its dtype, or its kind where it does not hold numbers; and the shape that its samples have, if one."""

    name: str
    dtype: str
    shape: list[int] | None


@dataclass(frozen=True, slots=True)
class _Report:
    """What is printed. `first_samples` holds the first items of the first samples, or those of the stream.

    Where rows have to be decoded to count them, `samples`, `items` and `nbytes` are null.
    """

    format: str
    columns: list[_Column]
    samples: int | None
    items: int | None
    nbytes: int | None
    stream: bool
    arrays: dict[str, list[int]]
    files: list[str]
    notes: list[str]
    first_samples: list[Any]


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@option("--dtype", metavar="DTYPE", help="What a file without a header holds, such as uint16.")
@option("--vocab-size", type=click.IntRange(1), metavar="N", help="As for start; the ids are checked only there.")
@columns_option
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(
    paths: tuple[str, ...],
    dtype: str | None,
    vocab_size: int | None,
    columns: tuple[str, ...] | None,
    as_json: bool,
) -> None:
    """Say what the corpus at PATH is, and show its first samples."""
    resolved = resolve([absolute(path) for path in paths], SourceOptions(dtype, vocab_size, columns))
    if isinstance(resolved.shards[0], DecodedSource):
        with plan_head(resolved) as corpus:
            report = _report(resolved, corpus, is_whole=False)
    else:
        report = _report(resolved, resolved.plan(), is_whole=True)
    if as_json:
        echo_json(report)
    else:
        click.echo(_describe(report))


def _report(resolved: Resolved, corpus: Corpus, *, is_whole: bool) -> _Report:
    items = sum(math.prod(column.values.shape) for column in corpus.columns)
    nbytes = sum(math.prod(column.values.shape) * DTYPES[column.values.dtype].itemsize for column in corpus.columns)
    return _Report(
        format=corpus.format,
        columns=[_column(column) for column in corpus.columns],
        samples=corpus.num_samples if is_whole else None,
        items=items if is_whole else None,
        nbytes=nbytes if is_whole else None,
        stream=corpus.stream,
        arrays={name: list(plan.shape) for name, plan in corpus.arrays.items()},
        files=[str(file) for file in resolved.files],
        notes=list(corpus.notes),
        first_samples=_first_samples(corpus),
    )


def _column(column: JoinedColumn) -> _Column:
    dtype = column.values.dtype if column.kind == "tensor" else column.kind
    return _Column(column.name, dtype, list(column.values.shape[1:]) if column.offsets is None else None)


def _first_samples(corpus: Corpus) -> list[Any]:
    """Return the first items of the first samples, or of a stream; several columns are a dict."""
    shown = {column.name: _first_values(column, corpus) for column in corpus.columns}
    if len(shown) == 1:
        return next(iter(shown.values()))
    return [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]


def _first_values(column: JoinedColumn, corpus: Corpus) -> list[Any]:
    if corpus.stream:
        return [_read(column.values, 0, min(_SHOWN_ITEMS, math.prod(column.values.shape))).tolist()]
    shown = min(_SHOWN_SAMPLES, corpus.num_samples)
    if column.offsets is not None:
        bounds = _read(column.offsets, 0, shown + 1).tolist()
    else:
        row = math.prod(column.values.shape[1:])
        bounds = [index * row for index in range(shown + 1)]
    if column.kind == "tensor":
        return [
            _read(column.values, start, min(stop, start + _SHOWN_ITEMS)).tolist() for start, stop in pairwise(bounds)
        ]
    return [_value(column.kind, _read(column.values, start, stop).tobytes()) for start, stop in pairwise(bounds)]


def _value(kind: str, raw: bytes) -> str:
    """Return the beginning of a value that is no tensor."""
    match kind:
        case "text":
            text = raw.decode(errors="replace")
        case "object":
            text = repr(unpack_object(raw))
        case _:
            text = f"{len(raw)} bytes, {raw[:_SHOWN_ITEMS]!r}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."


def _read(plan: ArrayPlan, start: int, stop: int) -> NDArray[Any]:
    """Return the items `[start, stop)` of an array that is not written yet, counted in C order."""
    items = np.empty(stop - start, DTYPES[plan.dtype])
    target = items.view(np.uint8)
    wanted = range(start * items.itemsize, stop * items.itemsize)
    piece_start = 0
    for piece in plan.pieces:
        first, last = max(wanted.start, piece_start), min(wanted.stop, piece_start + piece.nbytes)
        if first < last:
            piece.read_into(target[first - wanted.start : last - wanted.start], first - piece_start)
        piece_start += piece.nbytes
    return items


def _describe(report: _Report) -> str:
    if report.samples is None:
        samples = "counted when they are loaded"
    else:
        samples = "a stream, samples are windows of a block size" if report.stream else f"{report.samples:,}"
    files = report.files[:_SHOWN_FILES]
    if len(report.files) > len(files):
        files.append(f"... {len(report.files):,} in all")
    lines = [f"format   {report.format}"]
    for column in report.columns:
        shape = f" {column.shape}" if column.shape else ""
        lines.append(f"column   {column.name} {column.dtype}{shape}")
    lines.append(f"samples  {samples}")
    if report.items is not None and report.nbytes is not None:
        lines.append(f"items    {report.items:,} ({size(report.nbytes)})")
    lines += [f"array    {name} {shape}" for name, shape in report.arrays.items()]
    lines += [f"file     {file}" for file in files]
    lines += [f"note     {note}" for note in report.notes]
    for index, sample in enumerate(report.first_samples):
        lines.append(f"{'stream' if report.stream else f'[{index}]':<8} {_shown(sample)}")
    return "\n".join(lines)


def _shown(sample: Any) -> str:
    if isinstance(sample, dict):
        return "  ".join(f"{name}: {_shown(value)}" for name, value in sample.items())
    if not isinstance(sample, list):
        return printable(str(sample))
    return " ".join(map(str, sample)) + (" ..." if len(sample) == _SHOWN_ITEMS else "")
