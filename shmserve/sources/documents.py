"""Megatron's document_indices: which sequences make up each document, the same array in both of its layouts."""

from __future__ import annotations

from pathlib import Path

from shmserve_client.errors import SourceFormatError
from shmserve_client.plans import Positions

from .files import chunks, first_fall, read_array
from .pieces import PositionSpan

__all__ = ["plan_documents"]


def plan_documents(
    index: Path, offset: int, length: int | None, sequences: int
) -> tuple[tuple[Positions, ...] | None, tuple[str, ...]]:
    """Return (the document indices without their leading 0, notes), checked to rise from 0 to at most `sequences`.

    `length` counts them, the leading 0 included, from byte `offset` of the index; None where the layout has none.
    """
    if length is None:
        return None, ()
    if length == 0:
        raise SourceFormatError(f"{index}: it has no document indices, where the first must be 0: the index is damaged")
    previous = 0
    for start, stop in chunks(length):
        indices = read_array(index, offset + 8 * start, "int64", stop - start)
        falls = first_fall(indices, previous) is not None
        if falls or (start == 0 and indices[0] != 0) or indices[-1] > sequences:
            raise SourceFormatError(
                f"{index}: document indices {start} to {stop - 1} do not rise from 0 to its {sequences} sequences: "
                "the index is damaged"
            )
        previous = int(indices[-1])
    documents = (PositionSpan(index, offset + 8, 8 * (length - 1)),)
    if previous == sequences:
        return documents, ()
    # GPT-NeoX merges the sequences of several files, but not their documents.
    return documents, (f"document_indices end at sequence {previous} of {sequences}, as GPT-NeoX merges files",)
