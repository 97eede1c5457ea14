"""What a source is: it recognises one shard on disk, says which files it needs, and plans the arrays of its segment.

Recognising reads a few bytes of a file's head. Planning reads and checks the index, in bounded memory. Neither reads
the values: they flow from the files straight into the segment, piece by piece, when the writer asks for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from shmserve_client.writer import Piece

__all__ = ["HEAD_NBYTES", "ArrayPlan", "Corpus", "Positions", "RaggedPlan", "ShardPlan", "Source", "SourceOptions"]

HEAD_NBYTES = 64
"""How many bytes of a file `recognise` is given."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a person may say about a corpus. Both change what may be served, so both belong to the fingerprint."""

    dtype: str | None = None
    """The items of a file without a header, as a numpy name; refused where the file itself says otherwise."""
    vocab_size: int | None = None
    """Every token id must lie in [0, vocab_size); checked while loading."""


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """An array to be written: dtype, shape, and the pieces that follow each other in its bytes."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Positions(Piece, ABC):
    """A piece of int64 positions that can be moved on by the length of the shards before."""

    @abstractmethod
    def shifted(self, by: int) -> Positions:
        """Return the same positions, each `by` larger."""


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """How `values` divides into samples: int64 starts, relative to this shard's first value, without the last end.

    N-d samples also have `shapes` (int64, 1-d) and, again without the last end, `shape_starts`; `flat` says that all of
    this shard's are 1-d, so that the shapes tell nothing where no other shard's do.
    """

    count: int
    starts: tuple[Positions, ...]
    shapes: ArrayPlan | None = None
    shape_starts: tuple[Positions, ...] = ()
    flat: bool = False


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard's part of the dataset's single column.

    `values` is 1-d and divided by `ragged` into samples; or, where `ragged` is None, its first axis counts the samples.
    `stream` marks flat tokens, which have samples only through a block_size.
    """

    column: str
    values: ArrayPlan
    ragged: RaggedPlan | None = None
    stream: bool = False
    documents: tuple[Positions, ...] | None = None
    """Megatron's document_indices without their leading 0: sequence indices in [0, count]. None: it has none."""
    modes: tuple[Piece, ...] | None = None
    """Megatron's int8 mode of each sequence. None: the shard is not multimodal, or has no sequence that would tell."""
    any_dtype: bool = False
    """The shard has no values, and nothing else tells their dtype: it is that of the other shards."""
    notes: tuple[str, ...] = ()
    """What was assumed, for people; without the shard's path, so that shards which assume the same say it once."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """All shards joined: what the loader turns into a segment."""

    format: str
    column: str
    num_samples: int
    values: ArrayPlan
    offsets: ArrayPlan | None = None
    shapes: ArrayPlan | None = None
    shape_offsets: ArrayPlan | None = None
    arrays: dict[str, ArrayPlan] = field(default_factory=dict)
    stream: bool = False
    notes: tuple[str, ...] = ()


class Source(ABC):
    """One shard in one format. A subclass is registered in `shmserve.sources.SOURCES`."""

    suffixes: ClassVar[tuple[str, ...]]
    """How the names of the shard's own files end, so that a directory's other files are passed over."""
    values: Path
    """The file of the values."""

    @property
    @abstractmethod
    def format(self) -> str:
        """The format's name as people see it, such as "megatron"."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the shard's bytes depend on, the values' file first; the same for either half of a pair."""
        return (self.values,)

    @classmethod
    @abstractmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the shard that the file `path` belongs to, or None if it is of another format.

        `head` is the file's first HEAD_NBYTES bytes. Names alone do not decide where bytes can.

        Raises:
            SourceNotFoundError: half of a pair is missing.
            SourceFormatError: surely this format, but damaged, or one of its kinds that is not supported.
        """

    @abstractmethod
    def plan(self, options: SourceOptions) -> ShardPlan:
        """Return the plan, the index read and checked against the values' file.

        Raises:
            SourceFormatError: the files contradict their format, each other or the options.
        """
