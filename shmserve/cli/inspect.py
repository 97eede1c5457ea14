"""`shmserve inspect`: what a corpus is, read from its files alone, without a daemon or shared memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from shmserve.sources import resolve
from shmserve.sources.base import ArrayPlan, Corpus, SourceOptions
from shmserve.text import size
from shmserve_client.layout import DTYPES

from .options import Command, echo_json, option

__all__ = ["inspect"]

_SHOWN_SAMPLES: Final = 3
_SHOWN_ITEMS: Final = 16
_SHOWN_FILES: Final = 8


@dataclass(frozen=True, slots=True)
class _Report:
    """What is printed. `first_samples` holds the first items of the first samples, or those of the stream."""

    format: str
    dtype: str
    samples: int
    items: int
    nbytes: int
    stream: bool
    arrays: dict[str, list[int]]
    files: list[str]
    notes: list[str]
    first_samples: list[list[Any]]


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@option("--dtype", metavar="DTYPE", help="What a file without a header holds, such as uint16.")
@option("--vocab-size", type=click.IntRange(1), metavar="N", help="As for start; the ids are checked only there.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(paths: tuple[str, ...], dtype: str | None, vocab_size: int | None, as_json: bool) -> None:
    """Say what the corpus at PATH is, and show its first samples."""
    resolved = resolve([os.path.abspath(path) for path in paths], SourceOptions(dtype, vocab_size))
    corpus = resolved.plan()
    values = corpus.values
    report = _Report(
        format=corpus.format,
        dtype=values.dtype,
        samples=corpus.num_samples,
        items=math.prod(values.shape),
        nbytes=math.prod(values.shape) * DTYPES[values.dtype].itemsize,
        stream=corpus.stream,
        arrays={name: list(plan.shape) for name, plan in corpus.arrays.items()},
        files=[str(file) for file in resolved.files],
        notes=list(corpus.notes),
        first_samples=[items.tolist() for items in _first_samples(corpus)],
    )
    if as_json:
        echo_json(report)
    else:
        click.echo(_describe(report))


def _first_samples(corpus: Corpus) -> list[NDArray[Any]]:
    """Return the first items of the first samples, or of a stream, each as a 1-d array."""
    if corpus.stream:
        return [_read(corpus.values, 0, min(_SHOWN_ITEMS, math.prod(corpus.values.shape)))]
    shown = min(_SHOWN_SAMPLES, corpus.num_samples)
    if corpus.offsets is not None:
        bounds = _read(corpus.offsets, 0, shown + 1).tolist()
    else:
        row = math.prod(corpus.values.shape[1:])
        bounds = [index * row for index in range(shown + 1)]
    return [_read(corpus.values, start, min(stop, start + _SHOWN_ITEMS)) for start, stop in pairwise(bounds)]


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
    samples = "a stream, samples are windows of a block size" if report.stream else f"{report.samples:,}"
    files = report.files[:_SHOWN_FILES]
    if len(report.files) > len(files):
        files.append(f"... {len(report.files):,} in all")
    lines = [
        f"format   {report.format}",
        f"dtype    {report.dtype}",
        f"samples  {samples}",
        f"items    {report.items:,} ({size(report.nbytes)})",
    ]
    lines += [f"array    {name} {shape}" for name, shape in report.arrays.items()]
    lines += [f"file     {file}" for file in files]
    lines += [f"note     {note}" for note in report.notes]
    for index, items in enumerate(report.first_samples):
        more = " ..." if len(items) == _SHOWN_ITEMS else ""
        lines.append(f"{'stream' if report.stream else f'[{index}]':<8} {' '.join(map(str, items))}{more}")
    return "\n".join(lines)
