"""TFRecord files: u64 length, CRC of it, the record, CRC of that; records of tf.Example are rows.

Both checksums are CRC-32C, masked; those of the lengths are compared, so that a damaged file is noticed before a length
is believed. The others are not: in Python they would take longer than all the rest. A tf.Example is a protobuf message
(`tensorflow/core/example/example.proto`, `feature.proto`), read here by its wire format. Other records are bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, blobs, encode, rows
from shmserve_client.errors import SourceFormatError

from .base import DecodedSource, SourceOptions, chosen
from .files import size_of

__all__ = ["TfRecordFile", "masked_crc"]

CHUNK_NBYTES: Final = 8 << 20
PART_NBYTES: Final = 64 << 20
HEAD: Final = struct.Struct("<QI")
_POLYNOMIAL: Final = 0x82F63B78
RECORD: Final = "record"


def _table() -> list[int]:
    found = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        found.append(crc)
    return found


_TABLE: Final = _table()


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of a few bytes, rotated and moved on as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


@dataclass(frozen=True)
class TfRecordFile(DecodedSource):
    """One file of records."""

    suffixes = (".tfrecord", ".tfrecords")
    format = "tfrecord"
    columns_vary = True

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file if it starts with a length and the checksum of that."""
        if len(head) < HEAD.size or masked_crc(head[:8]) != int.from_bytes(head[8:12], "little"):
            return None
        return cls(path)

    def parts(self) -> list[Any]:
        """Return ranges of bytes, each of whole records."""
        found: list[Any] = []
        start = 0
        for position, nbytes in self._records(0, size_of(self.values)):
            end = position + nbytes + 4
            if end - start >= PART_NBYTES:
                found.append([start, end])
                start = end
        return found if found and start == size_of(self.values) else [*found, [start, size_of(self.values)]]

    def _records(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield where each record is, and its size."""
        with self.values.open("rb") as file:
            while start < stop:
                file.seek(start)
                head = file.read(HEAD.size)
                if len(head) < HEAD.size:
                    raise SourceFormatError(f"{self.values}: it ends within the head of the record at byte {start}")
                nbytes, crc = HEAD.unpack(head)
                if masked_crc(head[:8]) != crc:
                    raise SourceFormatError(f"{self.values}: the length of the record at byte {start} is damaged")
                if start + HEAD.size + nbytes + 4 > stop:
                    raise SourceFormatError(
                        f"{self.values}: the record at byte {start} has {nbytes} bytes, and the file ends before: "
                        "it is truncated"
                    )
                yield start + HEAD.size, nbytes
                start += HEAD.size + nbytes + 4

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the records in the range."""
        start, stop = part
        is_example = self._is_example()
        records: list[bytes] = []
        nbytes = 0
        with self.values.open("rb") as file:
            for position, size in self._records(start, stop):
                file.seek(position)
                records.append(file.read(size))
                nbytes += size
                if nbytes >= CHUNK_NBYTES:
                    yield self._chunks(records, is_example, columns)
                    records, nbytes = [], 0
        if records:
            yield self._chunks(records, is_example, columns)

    def _is_example(self) -> bool:
        """Return whether the first record is a tf.Example."""
        for position, size in self._records(0, size_of(self.values)):
            with self.values.open("rb") as file:
                file.seek(position)
                try:
                    return bool(_features(memoryview(file.read(size))))
                except (ValueError, IndexError, struct.error):
                    return False
        return False

    def _chunks(self, records: list[bytes], is_example: bool, columns: tuple[str, ...] | None) -> dict[str, Chunk]:
        if not is_example:
            return {RECORD: blobs(records)}
        try:
            found = [_features(memoryview(record)) for record in records]
        except (ValueError, IndexError, struct.error) as error:
            raise SourceFormatError(f"{self.values}: a record is a damaged tf.Example: {error}") from error
        names = chosen(sorted({name for features in found for name in features}), columns)
        return {name: _column([features.get(name) for features in found], name) for name in names}


def _column(values: list[Any], name: str) -> Chunk:
    """Return the values of a feature: one a record as scalars, else ragged; bytes and lists of bytes."""
    if all(isinstance(value, np.ndarray) for value in values):
        if all(len(value) == 1 for value in values):
            return rows(np.concatenate(values))
        return encode(values, name)
    if all(type(value) is list and len(value) == 1 for value in values):
        return blobs([value[0] for value in values])
    return encode([value.tolist() if isinstance(value, np.ndarray) else value for value in values], name)


def _features(example: memoryview) -> dict[str, Any]:
    """Return the features of a tf.Example: int64 and float32 arrays, and lists of bytes."""
    found: dict[str, Any] = {}
    for number, features in _fields(example):
        if number != 1 or type(features) is int:
            raise ValueError(f"field {number} of an Example")
        for entry_number, entry in _fields(features):
            if entry_number != 1 or type(entry) is int:
                raise ValueError(f"field {entry_number} of Features")
            key, feature = "", memoryview(b"")
            for part_number, part in _fields(entry):
                if type(part) is int:
                    raise ValueError("a number in an entry of Features")
                if part_number == 1:
                    key = str(part, "utf-8")
                elif part_number == 2:
                    feature = part
            found[key] = _feature(feature)
    return found


def _feature(feature: memoryview) -> Any:
    value: Any = []
    for number, content in _fields(feature):
        if type(content) is int or number not in (1, 2, 3):
            raise ValueError(f"field {number} of a Feature")
        items = list(_fields(content))
        if number == 1:
            value = [bytes(item) for _, item in items if type(item) is not int]
        elif number == 2:
            raw = b"".join(item if type(item) is not int else struct.pack("<I", item) for _, item in items)
            value = np.frombuffer(raw, "<f4")
        else:
            numbers: list[int] = []
            for _, item in items:
                numbers += [item] if type(item) is int else _varints(item)
            value = np.array(numbers, np.uint64).view(np.int64)
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (number, content) of each field: an integer, or the bytes of what has a length."""
    position, end = 0, len(message)
    while position < end:
        tag, position = _varint(message, position)
        wire, number = tag & 7, tag >> 3
        if wire == 0:
            value, position = _varint(message, position)
            yield number, value
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            if position + size > end:
                raise ValueError("a field goes beyond its message")
            yield number, int.from_bytes(message[position : position + size], "little")
            position += size
        elif wire == 2:
            size, position = _varint(message, position)
            if position + size > end:
                raise ValueError("a field goes beyond its message")
            yield number, message[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {wire}")


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(packed: memoryview) -> list[int]:
    found, position = [], 0
    while position < len(packed):
        value, position = _varint(packed, position)
        found.append(value)
    return found
