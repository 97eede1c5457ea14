"""Arrow IPC streams and files, Feather and Parquet, by pyarrow: a sample is a row. `arrow_arrays` has the columns.

Layouts: Apache Arrow's "Columnar Format", section "Serialization and Interprocess Communication", and Parquet's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from shmserve_client.chunks import Chunk
from shmserve_client.errors import ConfigError, SourceFormatError

from .arrow_arrays import EXTRA, chunk_of, nbytes_of
from .base import DecodedSource, SourceOptions, check_columns
from .extras import require
from .files import size_of
from .in_place import located

__all__ = ["ArrowFile", "ParquetFile", "decode_batches", "mapped"]

CHUNK_NBYTES: Final = 8 << 20
"""About how many bytes of rows are decoded before they are handed on: malloc maps what passes 32 MiB anew each time."""
PART_NBYTES: Final = 64 << 20
JOINED_NBYTES: Final = 256 << 10
STREAM_MAGIC: Final = b"\xff\xff\xff\xff"
STREAM_END: Final = STREAM_MAGIC + bytes(4)
FILE_MAGIC: Final = b"ARROW1"
FEATHER_V1_MAGIC: Final = b"FEA1"
PARQUET_MAGIC: Final = b"PAR1"
ENCRYPTED_PARQUET_MAGIC: Final = b"PARE"
_PARTS_PER_FILE: Final = 64
_MAX_ROWS_PER_BYTE: Final = 8
"""A row takes a bit at least, but for columns of no bytes at all, such as those of nulls."""
_PROBED_ROWS: Final = 64
_MAX_ROWS_PER_BATCH: Final = 1 << 16


@dataclass(frozen=True)
class ArrowFile(DecodedSource):
    """One Arrow IPC stream or file; Feather is the latter, compressed."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather")
    format = "arrow"

    values: Path
    is_stream: bool

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts as one does."""
        if head.startswith(FEATHER_V1_MAGIC):
            raise SourceFormatError(f"{path}: Feather version 1 is not supported: write it again with a newer pyarrow")
        if head.startswith(FILE_MAGIC):
            return cls(path, is_stream=False)
        # The marker, the length of a flatbuffer, and where in it the root table is.
        if head.startswith(STREAM_MAGIC) and head[8:14] == b"\x10\0\0\0\0\0":
            return cls(path, is_stream=True)
        return None

    def parts(self) -> list[Any]:
        """Return where runs of record batches start, and how many each has: a position, or in files a number."""
        with mapped(self.values) as file:
            ipc = require("pyarrow.ipc", EXTRA, str(self.values))
            if self.is_stream:
                return self._runs(file, ipc)
            count = ipc.open_file(file).num_record_batches
            return [[start, stop - start] for start, stop in _ranges(count)]

    def _runs(self, file: Any, ipc: Any) -> list[Any]:
        """Return runs of about PART_NBYTES of a stream; one of all, where they need dictionaries before them.

        Raises:
            SourceFormatError: the stream ends before its end mark, or goes on after it.
        """
        runs: list[Any] = []
        position = after_schema = 0
        has_dictionaries = False
        for message in _messages(ipc.MessageReader.open_stream(file)):
            if message.type == "record batch":
                if not runs or position - runs[-1][0] >= PART_NBYTES:
                    runs.append([position, 0])
                runs[-1][1] += 1
            has_dictionaries |= message.type == "dictionary"
            position = file.tell()
            after_schema = after_schema or position
        end, nbytes = file.tell(), file.size()
        file.seek(max(0, nbytes - len(STREAM_END)))
        if end != nbytes or file.read() != STREAM_END:
            raise SourceFormatError(
                f"{self.values}: {nbytes} bytes, but its stream ends at byte {end}, without an end mark or with more "
                "behind it: it is truncated, or has several streams: write it again as one"
            )
        if has_dictionaries or not runs:
            return [[after_schema, sum(count for _, count in runs)]]
        return runs

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows of the run of record batches that is `part`."""
        return self._rows(part, columns, check=True)

    def locate(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the same; of numbers, strings and lists without nulls where they are in the mapped file."""
        return self._rows(part, columns, check=False)

    def _rows(self, part: Any, columns: tuple[str, ...] | None, *, check: bool) -> Iterator[dict[str, Chunk]]:
        pa = require("pyarrow", EXTRA, str(self.values))
        with mapped(self.values) as file:
            is_mapped = isinstance(file, pa.MemoryMappedFile)
            content = file.read_buffer() if is_mapped else pa.py_buffer(b"")
            for chunks in decode_batches(*self._batches(file, part, columns, whole=not check), check=check):
                yield {name: located(chunk, content.address, content.size) for name, chunk in chunks.items()}

    def _batches(
        self, file: Any, part: Any, columns: tuple[str, ...] | None, *, whole: bool
    ) -> tuple[Iterator[Any], Any, Path, list[str]]:
        """Return the record batches of a part, their schema, the file's path, and the columns that were chosen."""
        start, count = part
        ipc = require("pyarrow.ipc", EXTRA, str(self.values))
        file.seek(0)
        schema = ipc.open_stream(file).schema if self.is_stream else ipc.open_file(file).schema
        names = check_columns(columns, schema.names, self.values)
        # Others are not even decompressed; but what is read so of a file is a copy.
        included = [] if whole or columns is None else [schema.names.index(name) for name in names]
        options = ipc.IpcReadOptions(included_fields=included)
        file.seek(0)
        if self.is_stream:
            reader = ipc.open_stream(file, options=options)
            file.seek(start)  # it has read the schema, and no further
            batches = (reader.read_next_batch() for _ in range(count))
        else:
            reader = ipc.open_file(file, options=options)
            batches = (reader.get_batch(number) for number in range(start, start + count))
        return batches, schema, self.values, names


def _messages(reader: Any) -> Iterator[Any]:
    """Yield the messages of a stream, up to its end mark."""
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        yield message


def mapped(path: Path) -> Any:
    """Return the file, mapped where that can be.

    So a record batch of many GB takes no memory, and columns that nobody wants are not read. Only helpers do this: a
    file that is truncated meanwhile may kill the process that maps it.
    """
    pa = require("pyarrow", EXTRA, str(path))
    try:
        return pa.memory_map(os.fspath(path))
    except OSError:
        return pa.OSFile(os.fspath(path))


@dataclass(frozen=True)
class ParquetFile(DecodedSource):
    """One Parquet file."""

    suffixes = (".parquet",)
    format = "parquet"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts as one does."""
        if head.startswith(ENCRYPTED_PARQUET_MAGIC):
            raise SourceFormatError(f"{path}: encrypted Parquet is not supported: write it again without encryption")
        return cls(path) if head.startswith(PARQUET_MAGIC) else None

    def parts(self) -> list[Any]:
        """Return ranges of row groups."""
        with self._opened() as reader:
            return _ranges(reader.num_row_groups)

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows of the row groups in the range `part`."""
        with self._opened() as reader:
            schema = reader.schema_arrow
            names = check_columns(columns, schema.names, self.values)
            numbers = list(range(*part))
            batches = self._batches(reader, numbers, names)
            yield from decode_batches(batches, schema, self.values, names)

    def _opened(self) -> Any:
        parquet = require("pyarrow.parquet", EXTRA, str(self.values))
        return parquet.ParquetFile(os.fspath(self.values), pre_buffer=False, page_checksum_verification=True)

    def _batches(self, reader: Any, numbers: list[int], names: list[str]) -> Iterator[Any]:
        """Yield the rows of row groups, so many at a time that they take about CHUNK_NBYTES when decoded."""
        for number in numbers:
            group = reader.metadata.row_group(number)
            rows_per_batch = self._rows_per_batch(reader, number, names)
            count = 0
            for batch in reader.iter_batches(rows_per_batch, [number], names, use_threads=False):
                count += batch.num_rows
                yield batch
            if count != group.num_rows:
                raise SourceFormatError(
                    f"{self.values}: row group {number} has {count} rows, not the {group.num_rows} that the file's "
                    "footer says: it is damaged"
                )

    def _rows_per_batch(self, reader: Any, number: int, names: list[str]) -> int:
        """Return how many rows of a row group to decode at once.

        What its encodings take tells little of what rows do: of runs and repeated strings, nearly nothing. So the first
        rows are looked at. (Counting values in the columns' metadata ends the process where that is damaged.)
        """
        group = reader.metadata.row_group(number)
        per_row = int(group.total_byte_size // max(1, group.num_rows))
        head = next(reader.iter_batches(_PROBED_ROWS, [number], names, use_threads=False), None)
        if head is not None and head.num_rows:
            per_row = max(per_row, int(head.nbytes // head.num_rows))
        return max(1, min(_MAX_ROWS_PER_BATCH, CHUNK_NBYTES // max(1, per_row)))


def _ranges(count: int) -> list[Any]:
    """Cut `count` batches into half-open ranges that can be decoded side by side."""
    step = -(-count // _PARTS_PER_FILE)
    return [[start, min(count, start + step)] for start in range(0, count, step)] if count else [[0, 0]]


def decode_batches(
    batches: Iterable[Any], schema: Any, path: Path, names: Sequence[str], *, check: bool = True
) -> Iterator[dict[str, Chunk]]:
    """Yield the columns `names` of record batches; once, without rows, where there are none.

    Without `check` their values are not read, and no batches are joined, which would copy them; else small ones are.

    Raises:
        SourceFormatError: a batch is damaged, or a column of a type that is not supported.
    """
    waiting: list[Any] = []
    nbytes = 0
    yielded = False
    for part in _slices(batches, path, names, check=check):
        # What is large already waits for no other: joined, their strings may pass the 2 GiB that offsets reach.
        part_nbytes = sum(map(nbytes_of, part.columns))
        if waiting and (nbytes + part_nbytes > CHUNK_NBYTES or part_nbytes >= JOINED_NBYTES or not check):
            yield _chunks(waiting, schema, path, names)
            yielded, waiting, nbytes = True, [], 0
        waiting.append(part)
        nbytes += part_nbytes
    if waiting or not yielded:
        yield _chunks(waiting, schema, path, names)


def _slices(batches: Iterable[Any], path: Path, names: Sequence[str], *, check: bool) -> Iterator[Any]:
    """Yield slices, of about CHUNK_NBYTES at most, of the batches that have rows; valid, if it is checked."""
    bare_rows = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        batch = batch.select(names)
        batch.validate()
        if batch.nbytes == 0:
            bare_rows += batch.num_rows
        if bare_rows > _MAX_ROWS_PER_BYTE * size_of(path):
            raise SourceFormatError(f"{path}: more than {bare_rows} rows without a value in any column: it is damaged")
        if check:
            batch.validate(full=True)
        nbytes = sum(map(nbytes_of, batch.columns))
        step = max(1, min(batch.num_rows, batch.num_rows * CHUNK_NBYTES // nbytes))
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _chunks(batches: Sequence[Any], schema: Any, path: Path, names: Sequence[str]) -> dict[str, Chunk]:
    pa = require("pyarrow", EXTRA, str(path))
    found = {}
    for name in names:
        field = schema.field(name)
        arrays = [batch.column(name) for batch in batches] or [pa.nulls(0, field.type)]
        try:
            found[name] = chunk_of(arrays, field)
        except (ConfigError, SourceFormatError) as error:
            raise type(error)(f"{path}: {error.args[0]}") from error
    return found
