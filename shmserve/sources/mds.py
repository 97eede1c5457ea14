"""MDS, the shards of MosaicML's streaming, and the index.json that describes them.

Layout after `streaming/base/format/mds/encodings.py` and `reader.py`: fields lie in the order of their names. Images
are bytes, as they are in the shard. A pickle is never loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from shmserve_client.chunks import Chunk, encode, objects, ragged, rows
from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.layout import DTYPES, is_shape

from .base import DecodedSource, SourceOptions, check_columns
from .compressed import open_stream
from .files import missing
from .huggingface import read_json
from .in_place import located
from .tables import Fields, RecordTable, joined

__all__ = ["MdsShard", "text_chunk"]

SCALARS: Final = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
)
DTYPE_BY_CODE: Final = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
RAW: Final = ("bytes", "jpeg", "jpegarray", "png", "jpeg_array")
MAX_SHARD_NBYTES: Final = 1 << 32


@dataclass(frozen=True)
class MdsShard(DecodedSource):
    """One shard, as the index describes it."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    format = "mds"

    values: Path
    index: Path
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    samples: int
    raw_nbytes: int

    @property
    def files(self) -> tuple[Path, ...]:
        """The shard and the index."""
        return (self.values, self.index)

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Refuse a shard by itself: its index tells what it holds."""
        if path.name.endswith((".mds", ".mds.zstd")):
            raise SourceFormatError(
                f"{path}: a shard of a MosaicML dataset: name its directory, which has the index.json"
            )
        return None

    @classmethod
    def recognise_directory(cls, directory: Path) -> Sequence[Self] | None:
        """Return the shards of the index.json in the directory."""
        index = directory / "index.json"
        if not index.is_file():
            return None
        content = read_json(index)
        if "shards" not in content:
            return None
        try:
            if content["version"] != 2:
                raise SourceFormatError(f"{index}: version {content['version']} is not supported")
            return [cls._of(directory, index, shard) for shard in content["shards"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise SourceFormatError(f"{index}: damaged: {error!r}") from error

    @classmethod
    def _of(cls, directory: Path, index: Path, shard: dict[str, Any]) -> Self:
        if shard["format"] != "mds":
            raise SourceFormatError(f"{index}: shards of the format {shard['format']} are not supported: only mds")
        compression = shard["compression"]
        if compression is not None and compression.partition(":")[0] != "zstd":
            raise SourceFormatError(f"{index}: compressed by {compression}: only zstd is supported")
        raw, zipped = directory / shard["raw_data"]["basename"], None
        if compression is not None:
            zipped = directory / shard["zip_data"]["basename"]
        values = raw if zipped is None or raw.is_file() else zipped
        if values.resolve().parent != directory.resolve():
            raise SourceFormatError(f"{index}: it names {values}, which is outside of its directory")
        if not values.is_file():
            raise missing(values, ", which its index.json names")
        return cls(
            values,
            index,
            tuple(map(str, shard["column_names"])),
            tuple(map(str, shard["column_encodings"])),
            tuple(size if size is None else int(size) for size in shard["column_sizes"]),
            int(shard["samples"]),
            int(shard["raw_data"]["bytes"]),
        )

    def _table(self, content: bytes | NDArray[np.uint8] | None = None) -> RecordTable:
        if self.values.name.endswith(".zstd"):
            if self.raw_nbytes > MAX_SHARD_NBYTES:
                raise SourceFormatError(f"{self.index}: a shard of {self.raw_nbytes} bytes cannot be")
            found = bytearray()
            for block in open_stream(self.values):
                found += block
                if len(found) > self.raw_nbytes:
                    break
            if len(found) != self.raw_nbytes:
                raise SourceFormatError(f"{self.values}: not the {self.raw_nbytes} bytes of its index: it is damaged")
            content = bytes(found)
        table = RecordTable(self.values, content)
        if table.count != self.samples:
            raise SourceFormatError(f"{self.values}: {table.count} samples, but its index says {self.samples}")
        return table

    def parts(self) -> list[Any]:
        """Return ranges of samples; a compressed shard is one."""
        return [None] if self.values.name.endswith(".zstd") else self._table().parts()

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the samples in the range."""
        names = self.names if columns is None else columns
        check_columns(names, self.names, self.values)
        decoders = {name: self._decoder(name, self.encodings[self.names.index(name)]) for name in names}
        table = self._table()
        for start, stop in table.parts() if part is None else [part]:
            fields = dict(zip(self.names, table.fields(start, stop, self.sizes), strict=True))
            yield {name: decode(fields[name]) for name, decode in decoders.items()}

    def locate(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the same; of a shard that is not compressed, strings and bytes where they are in the mapped file."""
        if part is None:
            yield from super().locate(part, columns)
        names = self.names if columns is None else columns
        check_columns(names, self.names, self.values)
        encodings = dict(zip(self.names, self.encodings, strict=True))
        content = np.memmap(self.values, mode="r")
        start, stop = part
        found = self._table(content).fields(start, stop, self.sizes)
        chunks = {}
        for name, fields in zip(self.names, found, strict=True):
            kind = "text" if encodings[name] == "str" else "bytes" if encodings[name] in RAW else ""
            if name in names:
                in_file = Chunk(fields.data, fields.lengths, kind=kind, starts=fields.starts)
                chunks[name] = (
                    located(in_file, content.ctypes.data, content.nbytes)
                    if kind
                    else self._decoder(name, encodings[name])(fields)
                )
        yield {name: chunks[name] for name in names}

    def _decoder(self, name: str, encoding: str) -> Callable[[Fields], Chunk]:
        where = f"{self.values}: column {name!r}"
        kind, _, detail = encoding.partition(":")
        dtype = "int64" if kind == "int" else kind
        match kind:
            case "str":
                return lambda fields: text_chunk(fields, where)
            case "json":
                return lambda fields: objects(json.loads(each) for each in fields.each())
            case "str_int" | "str_float":
                number = int if kind == "str_int" else float
                return lambda fields: encode([number(each) for each in fields.each()], name)
            case "ndarray":
                return lambda fields: _arrays(fields, detail, where)
            case _ if kind in RAW:
                return lambda fields: ragged(fields.joined(), fields.lengths, "bytes")
            case _ if dtype in SCALARS:
                return lambda fields: rows(fields.joined().view(DTYPES[dtype]))
        raise ConfigError(f"{where} is encoded as {encoding}, which is not supported: leave it out by --columns")


def text_chunk(fields: Fields, where: str) -> Chunk:
    """Return the fields as strings. Raises SourceFormatError where they are not UTF-8."""
    values = fields.joined()
    try:
        str(values.data, "utf-8")
    except UnicodeDecodeError as error:
        raise SourceFormatError(f"{where} is not UTF-8: {error}") from error
    return ragged(values, fields.lengths, "text")


def _arrays(fields: Fields, detail: str, where: str) -> Chunk:
    """Return arrays, of which the encoding may say dtype and shape; each tells what that does not."""
    name, _, shape_text = detail.partition(":")
    if name and shape_text:
        shape = tuple(map(int, shape_text.split(",")))
        return rows(fields.joined().view(DTYPES[name]).reshape(len(fields.starts), *shape))
    data, starts, lengths = fields.data, fields.starts, fields.lengths
    if not name:
        codes = set(_bytes_at(data, starts, lengths, 0, where).tolist())
        if not codes <= DTYPE_BY_CODE.keys():
            raise SourceFormatError(f"{where} has arrays of unknown dtypes (codes {sorted(codes)}): it is damaged")
        if len(codes) != 1:
            return _arrays_one_by_one(fields, None, where)
        name = DTYPE_BY_CODE[codes.pop()]
        starts, lengths = starts + 1, lengths - 1
    dtype = DTYPES[name]
    heads = set(_bytes_at(data, starts, lengths, 0, where).tolist())
    if len(heads) != 1:
        return _arrays_one_by_one(fields, dtype if detail else None, where)
    head = heads.pop()
    dimensions, width = head >> 2, 1 << (head & 3)
    extents = np.stack(
        [_numbers_at(data, starts, lengths, 1 + axis * width, width, where) for axis in range(dimensions)], axis=1
    ) if dimensions else np.empty((len(starts), 0), np.int64)  # fmt: skip
    starts, lengths = starts + 1 + dimensions * width, lengths - 1 - dimensions * width
    if (extents < 0).any() or (extents.prod(axis=1) * dtype.itemsize != lengths).any():
        raise SourceFormatError(f"{where} has arrays whose shapes do not fit their bytes: it is damaged")
    values = joined(data, starts, lengths).view(dtype)
    if len(extents) and (extents == extents[0]).all():
        return rows(values.reshape(len(extents), *extents[0].tolist()))
    items = lengths // dtype.itemsize
    if dimensions == 1:
        return ragged(values, items)
    return Chunk(values, items, extents.reshape(-1), np.full(len(extents), dimensions, np.int64))


def _arrays_one_by_one(fields: Fields, dtype: np.dtype[Any] | None, where: str) -> Chunk:
    """Return arrays that differ in how many axes they have or how these are written; in dtype, too, if that is None."""
    found = []
    for raw in fields.each():
        start = 0 if dtype is not None else 1
        own = DTYPES[DTYPE_BY_CODE[raw[0]]] if dtype is None else dtype
        if len(raw) <= start:
            raise SourceFormatError(f"{where} has an array without a shape: it is damaged")
        dimensions, width = raw[start] >> 2, 1 << (raw[start] & 3)
        end = start + 1 + dimensions * width
        shape = [int.from_bytes(raw[at : at + width], "little") for at in range(start + 1, end, width)]
        if not is_shape(shape) or len(raw) - end != math.prod(shape) * own.itemsize:
            raise SourceFormatError(f"{where} has an array of shape {shape} in {len(raw)} bytes: it is damaged")
        found.append(np.frombuffer(raw, own, offset=end).reshape(shape))
    return encode(found)


def _bytes_at(data: Any, starts: Any, lengths: Any, offset: int, where: str) -> Any:
    if (lengths <= offset).any():
        raise SourceFormatError(f"{where} has an array without a head: it is damaged")
    return data[starts + offset]


def _numbers_at(data: Any, starts: Any, lengths: Any, offset: int, width: int, where: str) -> Any:
    if (lengths < offset + width).any():
        raise SourceFormatError(f"{where} has an array without a shape: it is damaged")
    return data[(starts + offset)[:, None] + np.arange(width)].reshape(-1).view(f"<u{width}").astype(np.int64)
