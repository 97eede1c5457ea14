"""Where samples lie, asked of the daemon: the other way to resolve an index, beside the offsets in the segment."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from .connection import Connection
from .errors import ProtocolError
from .protocol import MAX_INDICES, Lookup, Offsets
from .samples import Samples

__all__ = ["RemoteOffsets"]


class RemoteOffsets:
    """The daemon's answers for one dataset, over one connection per process."""

    def __init__(
        self,
        path: str,
        timeout_s: float,
        *,
        name: str,
        nonce: bytes,
        block_size: int,
        stride: int,
        keys: str | None = None,
    ) -> None:
        """Prepare to ask the daemon at `path` about the segment `nonce` of the dataset `name`."""
        self._connection = Connection(path, timeout_s, keys)
        self._name = name
        self._nonce = nonce
        self._block_size = block_size
        self._stride = stride
        # Users do not close datasets, and a ZeroMQ context that nobody closed warns.
        weakref.finalize(self, self._connection.close)

    def extents(self, samples: Samples, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (offsets, nbytes) as `Samples.extents` does, by one request for each MAX_INDICES of `positions`.

        Raises:
            DaemonUnreachableError: no answer in time.
            DatasetNotFoundError: the daemon does not serve this segment any more.
            ProtocolError: the answer has another length than the question, or points outside the column.
        """
        offsets = np.empty(len(positions), np.int64)
        nbytes = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), MAX_INDICES):
            chunk = slice(start, start + MAX_INDICES)
            offsets[chunk], nbytes[chunk] = self._ask(samples.column.name, positions[chunk])
        samples.check_extents(positions, offsets, nbytes)
        return offsets, nbytes

    def ranges(self, samples: Samples, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (starts, stops) as `Samples.ranges` does, by `extents`. Raises as it does."""
        offsets, nbytes = self.extents(samples, positions)
        starts = (offsets - samples.column.values.offset) // samples.values.itemsize
        return starts, starts + nbytes // samples.values.itemsize

    def _ask(self, column: str, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        indices = positions.astype("<i8").tobytes()
        reply = self._connection.request(
            Lookup(self._name, indices, column, self._block_size, self._stride, self._nonce)
        )
        if not isinstance(reply, Offsets) or not len(reply.offsets) == len(reply.nbytes) == len(indices):
            raise ProtocolError(f"the daemon's answer does not fit a lookup of {len(positions)} indices")
        return np.frombuffer(reply.offsets, "<i8"), np.frombuffer(reply.nbytes, "<i8")

    def close(self) -> None:
        """Close the connection; idempotent. A later lookup connects anew."""
        self._connection.close()
