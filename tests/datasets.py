"""Datasets of any columns, served by a thread of the test: also those that no source makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve_client.layout import Array, Column, Description, SourceRecord
from shmserve_client.writer import Values
from tests.fake_daemon import FakeDaemon, serving
from tests.segments import published, write_pieces

Samples = NDArray[Any] | Sequence[NDArray[Any]]
"""An array whose first axis counts the samples, or a list of samples of their own lengths or shapes."""


def _parts(samples: Samples) -> dict[str, NDArray[Any]]:
    if isinstance(samples, np.ndarray):
        return {"values": samples}
    values = np.concatenate([sample.reshape(-1) for sample in samples])
    parts = {"values": values, "offsets": _offsets([sample.size for sample in samples])}
    if any(sample.ndim != 1 for sample in samples):
        shapes = [extent for sample in samples for extent in sample.shape]
        parts["shapes"] = np.array(shapes, np.int64)
        parts["shape_offsets"] = _offsets([sample.ndim for sample in samples])
    return parts


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _array(values: NDArray[Any]) -> Array:
    return Array(values.dtype.name, values.shape)


@contextmanager
def served_columns(
    columns: Mapping[str, Samples],
    *,
    shm_dir: Path,
    socket: Path,
    arrays: Mapping[str, NDArray[Any]] | None = None,
    stream: bool = False,
    block_size: int = 0,
    stride: int = 0,
) -> Iterator[FakeDaemon]:
    """The daemon that serves these columns as the dataset "corpus", and whose segment goes with it."""
    parts = {name: _parts(samples) for name, samples in columns.items()}
    extra = dict(arrays or {})
    description = Description(
        "corpus",
        "test",
        len(next(iter(columns.values()))),
        tuple(Column(name, **{key: _array(part) for key, part in of.items()}) for name, of in parts.items()),
        SourceRecord("key", "fingerprint", ("/data/corpus",), 1),
        arrays={name: _array(values) for name, values in extra.items()},
        stream=stream,
        notes=("made for a test",),
    )
    written = [values for of in parts.values() for values in of.values()] + list(extra.values())
    with published(write_pieces(shm_dir, description, [[Values(values)] for values in written])) as segment:
        answer = serving(segment.path, segment.header.nonce, block_size=block_size, stride=stride)
        with FakeDaemon(socket, answer) as daemon:
            yield daemon
