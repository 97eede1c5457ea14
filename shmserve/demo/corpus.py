"""A real corpus that every machine has: the text of Python's own standard library, as a Megatron .bin/.idx pair."""

from __future__ import annotations

import struct
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Corpus", "write_corpus"]

_INDEX_HEADER: Final = struct.Struct("<9sQBQQ")
"""Megatron's: magic, version, dtype code, number of sequences, number of document indices."""
_UINT16_CODE: Final = 8


@dataclass(frozen=True)
class Corpus:
    """What was written, and from what."""

    prefix: Path
    """The path of the pair without `.bin` and `.idx`."""
    files: int
    repeats: float
    """How often the text was taken, one after the other, to reach the size that was asked for."""
    tokens: int

    @property
    def tokens_file(self) -> Path:
        """The file of the tokens."""
        return self.prefix.with_suffix(".bin")

    @property
    def nbytes(self) -> int:
        """The size of the tokens."""
        return self.tokens * 2


def write_corpus(prefix: Path, nbytes: int) -> Corpus:
    """Write `prefix`.bin and `prefix`.idx with `nbytes` of tokens, one sequence for each source file of the library.

    A token is a byte of the text, stored as uint16, as tokenizers of up to 65,500 words store theirs. The library comes
    to some 20 to 60 MiB of tokens, so it is repeated until there are enough; the last sequence is cut off.
    """
    texts = [text for path in _sources() if (text := path.read_bytes())]
    lengths: list[int] = []
    wanted = nbytes // 2
    with open(prefix.with_suffix(".bin"), "wb") as tokens_file:
        missing = wanted
        while missing:
            for text in texts:
                tokens = np.frombuffer(text[:missing], np.uint8).astype("<u2")
                tokens_file.write(tokens.data)
                lengths.append(len(tokens))
                missing -= len(tokens)
                if not missing:
                    break
    _write_index(prefix.with_suffix(".idx"), np.array(lengths))
    return Corpus(prefix, len(texts), wanted / sum(map(len, texts)), wanted)


def _sources() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)


def _write_index(path: Path, lengths: npt.NDArray[np.int64]) -> None:
    count = len(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    with open(path, "wb") as file:
        file.write(_INDEX_HEADER.pack(b"MMIDIDX\0\0", 1, _UINT16_CODE, count, count + 1))
        file.write(lengths.astype("<i4").data)
        file.write(starts.astype("<i8").data)
        file.write(np.arange(count + 1, dtype="<i8").data)  # every sequence is a document
