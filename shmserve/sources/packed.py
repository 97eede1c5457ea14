"""LITPKDS: the packed chunks of lit-gpt (until March 2024) and TinyLlama.

    0   7 bytes  LITPKDS
    7   u64      version, 1
    15  u8       dtype code
    16  u64      tokens in this chunk; the last one is padded with the separator token
    24           the tokens

Written after `lit_gpt/packed_dataset.py`. Its reader cuts blocks out of each chunk and drops what remains of it; here
the chunks are one stream, which is the same where a chunk holds whole blocks, as its writer makes them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from shmserve_client.errors import SourceFormatError

from .base import ShardPlan, Source, SourceOptions
from .pairs import DTYPE_BY_CODE
from .streams import plan_stream

__all__ = ["PackedChunk"]

MAGIC: Final = b"LITPKDS"
HEADER: Final = struct.Struct("<7sQBQ")
CODES: Final = {code: name for code, name in DTYPE_BY_CODE.items() if code <= 8} | {6: "float32", 7: "float64"}


@dataclass(frozen=True)
class PackedChunk(Source):
    """One LITPKDS file."""

    suffixes = (".bin",)
    format = "litpkds"

    values: Path
    dtype: str
    tokens: int

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts with the magic."""
        if not head.startswith(MAGIC):
            return None
        if len(head) < HEADER.size:
            raise SourceFormatError(f"{path}: truncated: {len(head)} bytes, its header alone has {HEADER.size}")
        _, version, code, tokens = HEADER.unpack_from(head)
        if version != 1 or code not in CODES:
            raise SourceFormatError(
                f"{path}: LITPKDS version {version} with the dtype code {code} is not supported, "
                "only version 1 with the codes 1 to 8"
            )
        return cls(path, CODES[code], tokens)

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return the tokens as a stream."""
        return plan_stream(self.values, HEADER.size, self.dtype, self.tokens)
