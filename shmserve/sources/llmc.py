"""llm.c's token files, which modded-nanogpt uses as well: a header of 256 int32, then the tokens.

    0     i32       magic: 20240520 (GPT-2 tokens, uint16) or 20240801 (Llama 3 tokens, uint32)
    4     i32       version: 1, or 7 with the second magic
    8     i32       number of tokens
    1024  u16[] or u32[]

Written after `dev/data/data_common.py`. As 16-bit tokens the magics would be ids above GPT-2's vocabulary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from shmserve_client.errors import SourceFormatError

from .base import ShardPlan, Source, SourceOptions
from .streams import plan_stream

__all__ = ["LlmcTokens"]

HEADER: Final = struct.Struct("<iii")
DATA_OFFSET: Final = 1024
KINDS: Final = {20240520: (1, "uint16"), 20240801: (7, "uint32")}


@dataclass(frozen=True)
class LlmcTokens(Source):
    """One llm.c file."""

    suffixes = (".bin",)
    format = "llm.c"

    values: Path
    dtype: str
    tokens: int

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts with one of the magics."""
        if len(head) < HEADER.size:
            return None
        magic, version, tokens = HEADER.unpack_from(head)
        if magic not in KINDS:
            return None
        supported, dtype = KINDS[magic]
        if version != supported:
            raise SourceFormatError(f"{path}: llm.c file {magic} of version {version}, only {supported} is supported")
        return cls(path, dtype, tokens)

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return the tokens as a stream."""
        return plan_stream(self.values, DATA_OFFSET, self.dtype, self.tokens)
