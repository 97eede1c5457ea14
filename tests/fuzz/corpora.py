"""The corpora that are mutated: the fixtures, under plain names, and which source reads each."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shmserve.sources import SOURCES, SourceOptions, resolve
from shmserve.sources.base import DecodedSource
from shmserve.sources.segment_file import SegmentFile
from shmserve_client.errors import ShmserveError

PLANNED = frozenset(
    source.__name__ for source in SOURCES if not issubclass(source, DecodedSource) and source is not SegmentFile
)
"""The sources that plan their pieces. A segment file is judged as any segment is, and has a gap of 2 MiB in it."""

FIXTURES = Path(__file__).parents[1] / "fixtures"
MAX_NBYTES = 1 << 14


@dataclass(frozen=True)
class Corpus:
    """One shard that a source accepts: the bytes of its files, the values' first, by names that begin with "corpus"."""

    source: str
    """The class of the source."""
    files: Mapping[str, bytes]

    @property
    def names(self) -> tuple[str, ...]:
        """The files' names, those of all corpora of one source and shape alike."""
        return tuple(self.files)

    def __str__(self) -> str:
        return f"{self.source} {self.names}"


@cache
def corpora() -> list[Corpus]:
    """Return every fixture that some source accepts and that is small, once."""
    found: dict[tuple[Path, ...], Corpus] = {}
    for path in sorted(FIXTURES.rglob("*")):
        try:
            (shard,) = resolve([str(path)], SourceOptions()).shards
            if isinstance(shard, DecodedSource):  # see test_decoded
                continue
            shard.plan(SourceOptions())
        except (ShmserveError, ValueError):  # not data, refused, or a directory
            continue
        stem = path.name.partition(".")[0] if shard.files[0].suffix == ".ds" else shard.files[0].stem
        files = {f"corpus{file.name.removeprefix(stem)}": file.read_bytes() for file in shard.files}
        if sum(map(len, files.values())) <= MAX_NBYTES:
            found[shard.files] = Corpus(type(shard).__name__, files)
    return list(found.values())


def smallest() -> list[Corpus]:
    """Return, of each source and each set of names, the smallest corpus that is not empty."""
    best: dict[tuple[str, tuple[str, ...]], Corpus] = {}
    for corpus in sorted(corpora(), key=lambda corpus: sum(map(len, corpus.files.values()))):
        if all(corpus.files.values()):
            best.setdefault((corpus.source, corpus.names), corpus)
    return list(best.values())


def packed(names: tuple[str, ...], files: Mapping[str, bytes]) -> bytes:
    """Return the files as the one string that a coverage-guided run mutates; what is compressed is so no longer.

    First the sizes of all files but the last, 4 bytes each; then the files.
    """
    parts = [gzip.decompress(files[name]) if name.endswith(".gz") else files[name] for name in names]
    return b"".join([len(part).to_bytes(4, "little") for part in parts[:-1]] + parts)


def unpacked(names: tuple[str, ...], data: bytes) -> dict[str, bytes]:
    """Return the files that a string stands for, as `packed` makes them; any string stands for some."""
    heads = 4 * (len(names) - 1)
    rest = data[heads:]
    files = {}
    for number, name in enumerate(names):
        last = number == len(names) - 1
        size = len(rest) if last else int.from_bytes(data[4 * number : 4 * number + 4], "little") % (len(rest) + 1)
        part, rest = rest[:size], rest[size:]
        files[name] = gzip.compress(part, 1, mtime=0) if name.endswith(".gz") else part
    return files
