"""Files that are a header and then tokens, all of them one stream."""

from __future__ import annotations

from pathlib import Path

from shmserve_client.errors import SourceFormatError
from shmserve_client.layout import DTYPES
from shmserve_client.plans import ArrayPlan, ColumnPlan

from .base import ShardPlan
from .files import size_of
from .pieces import FileSpan

__all__ = ["plan_stream"]


def plan_stream(values: Path, offset: int, dtype: str, tokens: int) -> ShardPlan:
    """Return the plan of the `tokens` that follow a header of `offset` bytes and are the rest of the file.

    Raises:
        SourceFormatError: the file is larger or smaller than that.
    """
    nbytes, needed = size_of(values), offset + tokens * DTYPES[dtype].itemsize
    if nbytes != needed or tokens < 0:
        raise SourceFormatError(
            f"{values}: {nbytes} bytes, but its header says {tokens} {dtype} tokens, which is {needed} bytes: "
            "it is truncated or damaged"
        )
    piece = FileSpan(values, offset, nbytes - offset)
    return ShardPlan((ColumnPlan("tokens", ArrayPlan(dtype, (tokens,), (piece,))),), stream=True)
