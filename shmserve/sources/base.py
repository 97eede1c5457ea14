"""What a source is: it recognises one shard on disk, says which files it needs, and plans the columns of its segment.

Recognising reads a few bytes of a file's head. Planning reads and checks the index, in bounded memory. Neither reads
the values: they flow from the files straight into the segment, piece by piece, when the writer asks for them. Where
values lie otherwise in their file than in a segment, a `DecodedSource` turns them into chunks of rows, in a process of
its own (`shmserve.decoding`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from shmserve_client.chunks import Chunk
from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.layout import MappedFile
from shmserve_client.plans import ArrayPlan, ColumnPlan, JoinedColumn, Positions
from shmserve_client.writer import Piece

__all__ = [
    "HEAD_NBYTES",
    "Corpus",
    "DecodedSource",
    "ShardPlan",
    "Source",
    "SourceOptions",
    "check_columns",
    "chosen",
]

HEAD_NBYTES = 64
"""How many bytes of a file `recognise` is given."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a person may say about a corpus. All change what may be served, so all belong to the fingerprint."""

    dtype: str | None = None
    """The items of a file without a header, as a numpy name; refused where the file itself says otherwise."""
    vocab_size: int | None = None
    """Every token id must lie in [0, vocab_size); checked while loading."""
    columns: tuple[str, ...] | None = None
    """The columns to load, in this order; None for all."""
    decode: int | None = None
    """The pixels of a side to which images are scaled and decoded; None: they stay the bytes of their files."""
    in_place: bool = False
    """Whether values stay in their files where they can be used there, to be mapped by clients."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard's part of the dataset: its columns, which have as many samples each."""

    columns: tuple[ColumnPlan, ...]
    stream: bool = False
    """Flat tokens, which have samples only through a block_size."""
    documents: tuple[Positions, ...] | None = None
    """Megatron's document_indices without their leading 0: sequence indices in [0, count]. None: it has none."""
    modes: tuple[Piece, ...] | None = None
    """Megatron's int8 mode of each sequence. None: the shard is not multimodal, or has no sequence that would tell."""
    notes: tuple[str, ...] = ()
    """What was assumed, for people; without the shard's path, so that shards which assume the same say it once."""

    @property
    def count(self) -> int:
        """How many samples it has."""
        return self.columns[0].count


@dataclass(frozen=True, slots=True)
class Corpus:
    """All shards joined: what the loader turns into a segment."""

    format: str
    num_samples: int
    columns: tuple[JoinedColumn, ...]
    arrays: dict[str, ArrayPlan] = field(default_factory=dict)
    stream: bool = False
    notes: tuple[str, ...] = ()
    files: tuple[MappedFile, ...] = ()
    """Those in which values stay."""


class Source(ABC):
    """One shard in one format. A subclass is registered in `shmserve.sources.SOURCES`."""

    suffixes: ClassVar[tuple[str, ...]]
    """How the names of the shard's own files end, so that a directory's other files are passed over."""
    may_accompany: ClassVar[bool] = False
    """Whether such files also lie beside other data, as vocabularies, logs and notes do: then they are passed over."""
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


class DecodedSource(Source):
    """A shard whose values must be decoded. `parts` and `decode` run in processes of their own, which may be killed."""

    columns_vary: ClassVar[bool] = False
    """Whether chunks may lack columns that others have: their rows then have None there."""

    @classmethod
    def recognise_directory(cls, directory: Path) -> Sequence[Self] | None:
        """Return the shards that the directory as a whole is, in their order, or None if it is of another format.

        Raises:
            SourceNotFoundError: a file that its index names is missing.
            SourceFormatError: surely this format, but damaged, or one of its kinds that is not supported.
        """
        return None

    def plan(self, options: SourceOptions) -> ShardPlan:
        """Never called: what a shard holds is known when it is decoded."""
        raise NotImplementedError

    def parts(self) -> list[Any]:
        """Return the parts that can be decoded side by side, in their order, as values that JSON has.

        The default is one part, `None`. Parts are best 16 to 256 MiB of the file. Raises as `decode`.
        """
        return [None]

    @abstractmethod
    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the part's rows, some after others: for each column, in the same order each time, its values.

        A chunk is best of 8 to 64 MiB; a source without rows yields one without rows, where it knows its columns.
        Values that are in the file as they are have a `file_offset`, and are read from there into the segment.

        Args:
            part: one of `parts`.
            columns: which ones to decode, in this order; None for all. Reading no others saves time where it can.

        Raises:
            SourceFormatError: the file is damaged or not supported; the message names the file, and row and column.
            ConfigError: there is no such column (`select`), or a library is missing (`require`).
        """

    def locate(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the same, but neither read nor check values that have a `file_offset`, since they stay there.

        The default is what no format that is decoded throughout needs to say: that there are no such values.
        """
        raise ConfigError(
            f"{self.values}: {self.format} is decoded, so it cannot be mapped where it is: write it as one file by "
            "`shmserve build`, and map that"
        )


def chosen(present: Iterable[str], columns: Sequence[str] | None) -> list[str]:
    """Return those of the present columns that a person chose; all where none of these is present.

    For sources whose columns vary: the rows are to be counted also where they lack what was chosen.
    """
    found = list(present)
    return [name for name in found if columns is None or name in columns] or found


def check_columns(columns: Sequence[str] | None, present: Sequence[str], path: Path) -> list[str]:
    """Return the names of the columns to decode: those that were chosen, or all that are present.

    Raises:
        ConfigError: one is not present.
        SourceFormatError: two have one name, or there are none.
    """
    names = list(present) if columns is None else list(columns)
    if not present:
        raise SourceFormatError(f"{path}: it has no columns")
    for name in names:
        if name not in present:
            raise ConfigError(f"{path}: no column {name!r}: it has {', '.join(map(repr, present))}")
        if list(present).count(name) > 1:
            raise SourceFormatError(f"{path}: two columns are called {name!r}: rename one")
    return names
