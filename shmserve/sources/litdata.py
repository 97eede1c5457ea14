"""litData, the chunks of Lightning's optimize(), and the index.json that describes them; without compression.

Layout after `litdata/streaming/writer.py`, `item_loader.py` and `serializers.py`. Items of tokens are samples of their
lengths; a block_size then cuts windows out of all tokens joined, where litData cuts them out of each chunk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from shmserve_client.chunks import Chunk, ragged, rows
from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.layout import DTYPES

from .base import DecodedSource, SourceOptions, check_columns
from .files import missing
from .huggingface import read_json
from .mds import text_chunk
from .tables import Fields, RecordTable

__all__ = ["LitDataChunk"]

NUMPY_DTYPES: Final = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
)
"""By the code of no_header_numpy."""
TENSOR_DTYPES: Final = {
    0: "float32", 1: "float32", 2: "float64", 3: "float64", 11: "uint8", 12: "int8", 13: "int16", 14: "int16",
    15: "int32", 16: "int32", 17: "int64", 18: "int64", 20: "uint16",
}  # fmt: skip
"""By the code of no_header_tensor."""
RAW: Final = ("bytes", "jpeg", "jpeg_array", "file", "video", "tifffile")


@dataclass(frozen=True)
class LitDataChunk(DecodedSource):
    """One chunk, as the index describes it."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    format = "litdata"

    values: Path
    index: Path
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    items: int
    is_tokens: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """The chunk and the index."""
        return (self.values, self.index)

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return None: only the index tells what a chunk holds."""
        return None

    @classmethod
    def recognise_directory(cls, directory: Path) -> Sequence[Self] | None:
        """Return the chunks of the index.json in the directory."""
        index = directory / "index.json"
        if not index.is_file():
            return None
        content = read_json(index)
        if not {"chunks", "config"} <= content.keys():
            return None
        try:
            config = content["config"]
            for key in ("compression", "encryption"):
                if config.get(key):
                    raise SourceFormatError(
                        f"{index}: {key} {config[key]!r} is not supported: write it again by optimize() without"
                    )
            encodings = tuple(map(str, config["data_format"]))
            names = _names(config.get("data_spec"), len(encodings))
            is_tokens = config.get("item_loader") == "TokensLoader"
            return [cls._of(directory, index, chunk, names, encodings, is_tokens) for chunk in content["chunks"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise SourceFormatError(f"{index}: damaged: {error!r}") from error

    @classmethod
    def _of(
        cls, directory: Path, index: Path, chunk: Any, names: tuple[str, ...], encodings: tuple[str, ...], tokens: bool
    ) -> Self:
        values = directory / chunk["filename"]
        if values.resolve().parent != directory.resolve():
            raise SourceFormatError(f"{index}: it names {values}, which is outside of its directory")
        if not values.is_file():
            raise missing(values, ", which its index.json names")
        return cls(values, index, names, encodings, int(chunk["chunk_size"]), tokens)

    def _table(self) -> RecordTable:
        table = RecordTable(self.values)
        if table.count != self.items:
            raise SourceFormatError(f"{self.values}: {table.count} items, but its index says {self.items}")
        return table

    def parts(self) -> list[Any]:
        """Return ranges of items."""
        return self._table().parts()

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the items in the range."""
        names = self.names if columns is None else columns
        check_columns(names, self.names, self.values)
        decoders = {name: self._decoder(name, self.encodings[self.names.index(name)]) for name in names}
        start, stop = part
        found = self._table().fields(start, stop, [None] * len(self.names), sized=not self.is_tokens)
        fields = dict(zip(self.names, found, strict=True))
        yield {name: decode(fields[name]) for name, decode in decoders.items()}

    def _decoder(self, name: str, encoding: str) -> Callable[[Fields], Chunk]:
        where = f"{self.values}: column {name!r}"
        kind, _, code = encoding.partition(":")
        match kind:
            case "str" | "string":
                return lambda fields: text_chunk(fields, where)
            case "int" | "integer":
                return lambda fields: _scalars(fields, "int64", where)
            case "float":
                return lambda fields: _scalars(fields, "float64", where)
            case "bool" | "boolean":
                return lambda fields: _scalars(fields, "bool", where)
            case "no_header_numpy" if code.isdecimal() and int(code) < len(NUMPY_DTYPES):
                return lambda fields: _vectors(fields, NUMPY_DTYPES[int(code)], where)
            case "no_header_tensor" if code.isdecimal() and int(code) in TENSOR_DTYPES:
                return lambda fields: _vectors(fields, TENSOR_DTYPES[int(code)], where)
            case _ if kind in RAW:
                return lambda fields: ragged(fields.joined(), fields.lengths, "bytes")
        raise ConfigError(f"{where} is encoded as {encoding}, which is not supported: leave it out by --columns")


def _scalars(fields: Fields, dtype: str, where: str) -> Chunk:
    if (fields.lengths != DTYPES[dtype].itemsize).any():
        raise SourceFormatError(f"{where} has values that are not of {DTYPES[dtype].itemsize} bytes: it is damaged")
    return rows(fields.joined().view(DTYPES[dtype]))


def _vectors(fields: Fields, dtype: str, where: str) -> Chunk:
    itemsize = DTYPES[dtype].itemsize
    if (fields.lengths % itemsize).any():
        raise SourceFormatError(f"{where} has values that are no whole number of {dtype}: it is damaged")
    return ragged(fields.joined().view(DTYPES[dtype]), fields.lengths // itemsize)


def _names(spec: Any, count: int) -> tuple[str, ...]:
    """Return the names of the leaves: the keys of a flat dict, else their numbers; that of a single leaf is `value`."""
    try:
        tree = json.loads(spec)[1]
        if tree["type"] == "builtins.dict" and all(child["type"] is None for child in tree["children_spec"]):
            names = tuple(map(str, json.loads(tree["context"])))
            if len(names) == len(set(names)) == count:
                return names
    except (ValueError, TypeError, KeyError, IndexError):
        pass  # a spec of another torch, or none: the leaves are there all the same
    return ("value",) if count == 1 else tuple(map(str, range(count)))
