"""Checksums of a segment's chunks: taken while it is filled, compared by `shmserve verify`. XXH3, 64 bits, seed 0."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from .layout import CHUNK_NBYTES

__all__ = ["ChunkSums", "checksum"]


def checksum(data: NDArray[np.uint8]) -> int:
    """Return the checksum of the bytes, which lie side by side. Other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(data.data)


class ChunkSums:
    """Takes the checksum of each chunk of `[start, stop)` of a file, in any order and from several threads.

    Their array starts at `stop`.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._start, self.stop = start, stop
        self._sums = np.zeros(-(-(stop - start) // CHUNK_NBYTES), "<u8")

    def __call__(self, window: NDArray[np.uint8], window_start: int) -> None:
        """Take the checksum of the chunk at `window_start`; the window ends where the chunk does, or after `stop`."""
        chunk = window[: max(0, self.stop - window_start)]
        if chunk.nbytes:
            self._sums[(window_start - self._start) // CHUNK_NBYTES] = checksum(chunk)

    def sealed(self) -> bytes:
        """Return the array of all checksums as the segment holds it: their own comes last."""
        own = checksum(self._sums.view(np.uint8))
        return self._sums.tobytes() + own.to_bytes(8, "little")
