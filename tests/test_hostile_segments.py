"""Files that only look like segments: each is refused, or read as it says, and no process ends by a signal for it.

The bytes are put together here from docs/layout.md, since what writes segments would refuse to write these.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from shmserve_client import layout
from shmserve_client.protocol import Attach, Attached, Reply, Request
from tests.fake_daemon import FakeDaemon, answering
from tests.processes import run_python

pytestmark = pytest.mark.promise("trust")

MIB = 1 << 20
DATA = 2 * MIB
NONCE = bytes(range(16))
HEADER_FIELDS = (
    *("magic", "version", "header_nbytes", "nonce", "total", "generation", "flags"),
    *("description_offset", "description_nbytes", "data_offset", "crc"),
)
LARGEST = (1 << 63) - 1
MOST_EXTENTS = 1_000_000


@dataclass
class Forged:
    """A segment to be. `data` are the bytes from `data_offset`; what is not given is made to fit."""

    description: Any
    data: bytes = b""
    header: dict[str, Any] = field(default_factory=dict)
    packed: bytes | None = None
    file_nbytes: int | None = None

    def write(self, path: Path) -> None:
        packed = self.packed if self.packed is not None else msgpack.packb(self.description)
        end = DATA + len(self.data) if self.file_nbytes is None else self.file_nbytes
        fields = {
            "magic": b"SHMSERVE",
            "version": 3,
            "header_nbytes": 84,
            "nonce": NONCE,
            "total": end,
            "generation": 1,
            "flags": 0,
            "description_offset": 128,
            "description_nbytes": len(packed),
            "data_offset": DATA,
            "crc": zlib.crc32(packed),
            **self.header,
        }
        with open(path, "wb") as file:
            file.write(struct.pack("<8sII16sQQQQQQI", *(fields[name] for name in HEADER_FIELDS)))
            file.seek(128)
            file.write(packed)
            if self.data:
                file.seek(DATA)
                file.write(self.data)
            file.truncate(end)


def array(dtype: str, shape: Iterable[int], offset: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "offset": offset, "in_files": False}


def column(values: Any, offsets: Any = None, shapes: Any = None, shape_offsets: Any = None) -> dict[str, Any]:
    arrays = {"values": values, "offsets": offsets, "stops": None, "shapes": shapes, "shape_offsets": shape_offsets}
    return {"name": "tokens", "kind": "tensor", "python": "", **arrays}


def description(*columns: dict[str, Any], samples: int) -> dict[str, Any]:
    return {
        "name": "corpus",
        "format": "megatron",
        "num_samples": samples,
        "columns": list(columns),
        "source": {
            **{"key": "k", "fingerprint": "f", "data": [], "files": 1},
            **{"dtype": None, "vocab_size": None, "columns": None, "decode": None},
        },
        "arrays": {},
        "stream": False,
        "table": False,
        "notes": [],
        "checksums": None,
        "files": [],
    }


def placed(*arrays: np.ndarray) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the data and where each array lies in it."""
    data, places = b"", []
    for values in arrays:
        data = data.ljust(-(-len(data) // 64) * 64, b"\0")
        places.append(array(values.dtype.name, values.shape, DATA + len(data)))
        data += values.tobytes()
    return data, places


def fixed() -> Forged:
    """Four samples of two items."""
    data, places = placed(np.arange(8, dtype=np.int32).reshape(4, 2))
    return Forged(description(column(*places), samples=4), data)


def ragged(offsets: Iterable[int] = (0, 3, 3, 5)) -> Forged:
    """Samples among five items."""
    indices = np.array(list(offsets), np.int64)
    data, places = placed(np.arange(5, dtype=np.int32), indices)
    return Forged(description(column(*places), samples=len(indices) - 1), data)


def ragged_nd(
    *, offsets: Iterable[int] = (0, 6), shapes: Iterable[int] = (2, 3), shape_offsets: Iterable[int] = (0, 2)
) -> Forged:
    """One sample of the shape 2 x 3."""
    indices = [np.array(list(values), np.int64) for values in (offsets, shapes, shape_offsets)]
    data, places = placed(np.arange(6, dtype=np.int32), *indices)
    return Forged(description(column(*places), samples=len(indices[0]) - 1), data)


def with_header(**fields: Any) -> Forged:
    forged = fixed()
    forged.header.update(fields)
    return forged


def changed(change: Callable[[dict[str, Any]], object], made: Callable[[], Forged] = fixed) -> Forged:
    forged = made()
    change(forged.description)
    return forged


def values_changed(made: Callable[[], Forged] = fixed, **fields: Any) -> Forged:
    return changed(lambda what: what["columns"][0]["values"].update(fields), made)


def packed_as(packed: bytes) -> Forged:
    forged = fixed()
    forged.packed = packed
    forged.header["data_offset"] = -(-(128 + len(packed)) // DATA) * DATA
    forged.file_nbytes = forged.header["data_offset"]
    return forged


def map_of(field: bytes, value: bytes) -> bytes:
    """A description in which one field is replaced by bytes that the packer would not make."""
    fields = fixed().description
    rest = b"".join(msgpack.packb(name) + msgpack.packb(fields[name]) for name in fields if name != field.decode())
    return bytes([0x80 | len(fields)]) + msgpack.packb(field.decode()) + value + rest


def sparse(items: int, dtype: str = "int64", *, samples: int | None = None) -> Forged:
    nbytes = items * np.dtype(dtype).itemsize
    forged = Forged(description(column(array(dtype, [items], DATA)), samples=samples or items))
    forged.file_nbytes = DATA + nbytes
    return forged


def many_columns(count: int) -> Forged:
    one = column(array("int8", [0], DATA))
    return Forged(description(*({**one, "name": str(number)} for number in range(count)), samples=0))


def two_columns(first: dict[str, Any], second: dict[str, Any]) -> Forged:
    columns = ({**column(values), "name": name} for name, values in (("a", first), ("b", second)))
    return Forged(description(*columns, samples=2), bytes(4096))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def mapped_file(path: str = "/etc/passwd", nbytes: int = 32) -> dict[str, Any]:
    return {"path": path, "nbytes": nbytes, "mtime_ns": 0, "inode": 1}


def in_files(*, samples: int = 4, count: int = 1, path: str = "/etc/passwd", nbytes: int = 32, **fields: Any) -> Forged:
    """The same as `fixed`, but its values are said to be in a file, which has some other state."""
    forged = values_changed(**{"offset": 0, "in_files": True, **fields})
    forged.description.update(num_samples=samples, files=[mapped_file(path, nbytes)] * count)
    return forged


REFUSED: dict[str, Callable[[], Forged]] = {
    "another magic": lambda: with_header(magic=b"SHMSERV\0"),
    "another version": lambda: with_header(version=1),
    "version 0": lambda: with_header(version=0),
    "a longer header": lambda: with_header(header_nbytes=128),
    "flags": lambda: with_header(flags=1),
    "another nonce": lambda: with_header(nonce=bytes(16)),
    "more bytes than the file": lambda: with_header(total=1 << 40),
    "fewer bytes than the file": lambda: with_header(total=DATA),
    "2^64-1 bytes": lambda: with_header(total=(1 << 64) - 1),
    "a description at the header": lambda: with_header(description_offset=0),
    "a description at the end": lambda: with_header(description_offset=(1 << 64) - 1),
    "a description of 2^64-1 bytes": lambda: with_header(description_nbytes=(1 << 64) - 1),
    "a description over the limit": lambda: with_header(description_nbytes=(64 << 20) + 1, data_offset=66 << 20),
    "a description up to the data's end": lambda: with_header(description_nbytes=DATA),
    "no description": lambda: with_header(description_nbytes=0, crc=0),
    "a cut description": lambda: with_header(description_nbytes=20),
    "data that is not aligned": lambda: with_header(data_offset=DATA - 64),
    "data at the header": lambda: with_header(data_offset=0),
    "data beyond the file": lambda: with_header(data_offset=4 * DATA),
    "data at 2^64 - 2 MiB": lambda: with_header(data_offset=(1 << 64) - DATA),
    "another checksum": lambda: with_header(crc=7),
    "an array in the header": lambda: values_changed(offset=0),
    "an array in the description": lambda: values_changed(offset=128),
    "an array before the data": lambda: values_changed(offset=DATA - 64),
    "an array that is not aligned": lambda: values_changed(offset=DATA + 4),
    "an array at a negative offset": lambda: values_changed(offset=-DATA),
    "an array beyond the end": lambda: values_changed(offset=DATA + 64),
    "an array at 2^63": lambda: values_changed(offset=1 << 63),
    "an array at 2^64-64": lambda: values_changed(offset=(1 << 64) - 64),
    "one row too many": lambda: changed(
        lambda what: (what["columns"][0]["values"].update(shape=[5, 2]), what.update(num_samples=5))
    ),
    "a negative extent": lambda: values_changed(shape=[-4, 2]),
    "two negative extents": lambda: values_changed(shape=[4, -2, -1]),
    "a product of 2^64": lambda: values_changed(shape=[4, 1 << 62]),
    "a product that wraps to 8": lambda: values_changed(shape=[4, (1 << 62) + 2]),
    "a product of 2^64 and an empty axis": lambda: values_changed(shape=[4, 0, 1 << 62]),
    "too many extents": lambda: values_changed(shape=[4, 2, *[1] * 31]),
    "very many extents": lambda: values_changed(shape=[1] * 200_000),
    "no extents": lambda: values_changed(shape=[]),
    "an unknown dtype": lambda: values_changed(dtype="object"),
    "a dtype of numpy's own": lambda: values_changed(dtype="datetime64[s]"),
    "another byte order": lambda: values_changed(dtype=">i4"),
    "a dtype of a megabyte": lambda: values_changed(dtype="x" * MIB),
    "a boolean for an integer": lambda: values_changed(offset=True),
    "a float for an integer": lambda: values_changed(offset=float(DATA)),
    "samples that are not there": lambda: changed(lambda what: what.update(num_samples=5)),
    "a negative number of samples": lambda: changed(lambda what: what.update(num_samples=-1)),
    "2^64-1 samples": lambda: changed(lambda what: what.update(num_samples=(1 << 64) - 1)),
    "no columns": lambda: changed(lambda what: what.update(columns=[])),
    "two columns of one name": lambda: changed(lambda what: what.update(columns=what["columns"] * 2)),
    "an unknown kind": lambda: changed(lambda what: what["columns"][0].update(kind="pickle")),
    "a kind of a megabyte": lambda: changed(lambda what: what["columns"][0].update(kind="\n" * MIB)),
    "a field too many": lambda: changed(lambda what: what.update(more=1)),
    "a field too few": lambda: changed(lambda what: what.pop("notes")),
    "a column that is a list": lambda: changed(lambda what: what.update(columns=[[1]])),
    "offsets of another length": lambda: changed(lambda what: what.update(num_samples=2), ragged),
    "offsets of another dtype": lambda: changed(
        lambda what: what["columns"][0]["offsets"].update(dtype="uint64"), ragged
    ),
    "offsets within the values": lambda: changed(
        lambda what: what["columns"][0]["offsets"].update(offset=DATA), ragged
    ),
    "shapes without their offsets": lambda: changed(
        lambda what: what["columns"][0].update(shape_offsets=None), ragged_nd
    ),
    "values with two axes and offsets": lambda: values_changed(ragged, shape=[5, 1]),
    "columns that overlap": lambda: two_columns(array("int64", [2], DATA), array("int64", [2], DATA)),
    "columns in another order": lambda: two_columns(array("int64", [2], DATA + 64), array("int64", [2], DATA)),
    "an array in another": lambda: changed(lambda what: what.update(arrays={"x": array("int8", [4], DATA)})),
    "a map for an array": lambda: changed(lambda what: what.update(arrays={"x": {}})),
    "an empty array beyond the end": lambda: changed(
        lambda what: what.update(arrays={"x": array("int8", [0], 1 << 40)})
    ),
    "values in files that are not named": lambda: values_changed(offset=0, in_files=True),
    "values beyond the files": lambda: in_files(offset=4),
    "values before the files": lambda: in_files(offset=-4),
    "values that are not aligned in the files": lambda: in_files(offset=2, shape=[1, 2], samples=1),
    "a file of no bytes": lambda: in_files(nbytes=0),
    "a file of 2^63 bytes": lambda: in_files(nbytes=1 << 63),
    "a file of a relative path": lambda: in_files(path="etc/passwd"),
    "a file with a NUL in its name": lambda: in_files(path="/etc/passwd\0"),
    "a file that is not there": lambda: in_files(path="/nonexistent/rows.npy"),
    "a file that is a device": lambda: in_files(path="/dev/zero"),
    "a file that is a directory": lambda: in_files(path="/etc"),
    "a file that is another one": lambda: in_files(path=__file__),
    "more files than can be mapped": lambda: in_files(count=1 << 16),
    "offsets in a file": lambda: changed(
        lambda what: (
            what["columns"][0]["offsets"].update(offset=0, in_files=True),
            what.update(files=[mapped_file()]),
        ),
        ragged,
    ),
    "stops of another length": lambda: changed(
        lambda what: what["columns"][0].update(stops=what["columns"][0]["offsets"]), ragged
    ),
    "stops without offsets": lambda: changed(
        lambda what: what["columns"][0].update(stops=array("int64", [4], DATA + 64))
    ),
    "checksums by another algorithm": lambda: changed(
        lambda what: what.update(
            checksums={"values": array("uint64", [2], DATA + 64), "algorithm": "x" * MIB, "chunk_nbytes": DATA}
        )
    ),
    "checksums of one byte each": lambda: changed(
        lambda what: what.update(
            checksums={"values": array("uint64", [2], DATA + 64), "algorithm": "xxh3_64", "chunk_nbytes": 1}
        )
    ),
    "not msgpack": lambda: packed_as(b"\xc1" * 100),
    "an empty map": lambda: packed_as(b"\x80"),
    "a list": lambda: packed_as(b"\x90"),
    "bytes after the map": lambda: packed_as(msgpack.packb(fixed().description) + b"\x00"),
    "lists 10,000 deep": lambda: packed_as(map_of(b"notes", nested(10_000))),
    "lists 10 million deep": lambda: packed_as(nested(10_000_000)),
    "a list that promises 2^32-1 items": lambda: packed_as(map_of(b"notes", b"\xdd\xff\xff\xff\xff")),
    "a map that promises 2^32-1 items": lambda: packed_as(b"\xdf\xff\xff\xff\xff"),
    "a string that promises 4 GiB": lambda: packed_as(map_of(b"name", b"\xdb\xff\xff\xff\xff")),
    "a million empty maps": lambda: packed_as(
        map_of(b"notes", b"\xdd" + struct.pack(">I", 1_000_000) + b"\x80" * 1_000_000)
    ),
    "maps in maps, a million": lambda: packed_as(
        map_of(b"notes", b"\xdc\x10\x00" + (b"\xdc\x01\x00" + b"\x80" * 256) * 4096)
    ),
    "an extension type": lambda: packed_as(map_of(b"name", b"\xd4\x01\x00")),
    "a key that is a number": lambda: packed_as(b"\x81\x01\x01"),
    "a key that is a list": lambda: packed_as(b"\x81\x90\x01"),
    "the same key twice": lambda: packed_as(
        bytes([0x80 | 9]) + b"".join(msgpack.packb(one) for item in [*fixed().description.items()][:8] for one in item)
        + msgpack.packb("name") + msgpack.packb("twice")
    ),
    "a name that is no UTF-8": lambda: packed_as(map_of(b"name", b"\xa2\xff\xfe")),
    "a million columns": lambda: packed_as(
        map_of(b"columns", b"\xdd" + struct.pack(">I", 1_000_000) + b"\xc0" * 1_000_000)
    ),
    "2^62 bytes": lambda: sparse(1 << 58, "complex128"),
}  # fmt: skip

# What each operation may end in is the same for all of them; what a sample is, is checked where there is one.
READ: dict[str, tuple[Callable[[], Forged], Any]] = {
    "fixed": (fixed, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "ragged": (ragged, [[0, 1, 2], [], [3, 4]]),
    "ragged, N-d": (ragged_nd, [[[0, 1, 2], [3, 4, 5]]]),
    "negative offsets": (lambda: ragged([-1, 2, 5]), ["SegmentFormatError", [2, 3, 4]]),
    "offsets that go back": (lambda: ragged([0, 4, 2, 5]), [[0, 1, 2, 3], "SegmentFormatError", [2, 3, 4]]),
    "offsets beyond the end": (lambda: ragged([0, 5, 6]), [[0, 1, 2, 3, 4], "SegmentFormatError"]),
    "offsets of 2^63-1": (lambda: ragged([0, LARGEST, 5]), ["SegmentFormatError"] * 2),
    "offsets of -2^63": (lambda: ragged([-LARGEST - 1, LARGEST, -LARGEST - 1]), ["SegmentFormatError"] * 2),
    "items past 2^61": (lambda: ragged([1 << 61, (1 << 61) + 5, 5]), ["SegmentFormatError"] * 2),
    "a shape of another product": (lambda: ragged_nd(shapes=[2, 4]), ["SegmentFormatError"]),
    "a negative shape": (lambda: ragged_nd(shapes=[-2, -3]), ["SegmentFormatError"]),
    "a shape whose product wraps to 6": (
        lambda: ragged_nd(shapes=[2, 3, 1 << 32, 1 << 32], shape_offsets=[0, 4]),
        ["SegmentFormatError"],
    ),
    "an empty sample of 2^62 rows": (
        lambda: ragged_nd(offsets=[0, 0], shapes=[1 << 62, 0], shape_offsets=[0, 2]),
        ["SegmentFormatError"],
    ),
    "extents that are not there": (lambda: ragged_nd(shape_offsets=[0, 3]), ["SegmentFormatError"]),
    "extents from before the start": (lambda: ragged_nd(shape_offsets=[-2, 2]), ["SegmentFormatError"]),
    "extents that go back": (lambda: ragged_nd(shape_offsets=[2, 0]), ["SegmentFormatError"]),
    "a million extents of 2^62": (
        lambda: ragged_nd(shapes=np.full(MOST_EXTENTS, 1 << 62), shape_offsets=[0, MOST_EXTENTS]),
        ["SegmentFormatError"],
    ),
    "no samples": (lambda: ragged([0]), []),
    "a thousand columns": (lambda: many_columns(1000), []),
    "a name of a megabyte": (lambda: changed(lambda what: what.update(name="\n" * MIB)), None),
    "a column's name of two lines": (
        lambda: changed(lambda what: what["columns"][0].update(name="\n\x1b[2J"), lambda: ragged([0, 9])),
        ["SegmentFormatError"],
    ),
    "a tebibyte of holes": (lambda: sparse(1 << 37), None),
}  # fmt: skip


PROBE = """
    import json, sys, time
    import numpy as np
    from shmserve_client import ShmDataset
    from shmserve_client.errors import ShmserveError
    from shmserve_client.segment import Segment

    def peak_kib():  # not getrusage's, which starts with the parent's
        with open("/proc/self/status") as status:
            return int(status.read().split("VmHWM:")[1].split()[0])

    def outcome(action):
        try:
            result = action()
        except ShmserveError as error:
            assert "\\n" not in str(error) and len(str(error)) < 2000, str(error)[:3000]
            return type(error).__name__
        return result.tolist() if hasattr(result, "tolist") else result

    def all_ways(ds):
        some = range(min(len(ds), 8))
        found = {"samples": [outcome(lambda: ds[i]) for i in some]}
        for i in some:
            outcome(lambda: ds[-1 - i])
            outcome(lambda: len(ds.batch([i]).values))
            outcome(lambda: len(ds.lookup([i])))
            outcome(lambda: np.sum(ds.column()[i]))
        outcome(lambda: len(ds.__getitems__(list(some))))
        outcome(lambda: len(ds.batch(list(some)).values))
        outcome(lambda: len(ds.lookup(list(some))))
        return found

    endpoint, *names = sys.argv[1:]
    for name in names:
        started_s, before_kib = time.monotonic(), peak_kib()
        try:
            ds = ShmDataset(name, endpoint=endpoint, timeout=20)
        except ShmserveError as error:
            assert "\\n" not in str(error) and len(str(error)) < 2000, str(error)[:3000]
            found = {"refused": type(error).__name__}
        else:
            found = all_ways(ds) if len(ds.info.dtypes) == 1 else {"samples": []}
            try:
                windows = ShmDataset(name, endpoint=endpoint, timeout=20, block_size=2)
                all_ways(windows)
            except ShmserveError:
                pass
            ds = windows = None
        found["seconds"] = time.monotonic() - started_s
        found["grown_kib"] = peak_kib() - before_kib
        print(json.dumps([name, found]), flush=True)
"""


def probe(folder: Path, endpoint: Path, forged: dict[str, Callable[[], Forged]]) -> dict[str, Any]:
    """Return what a process of its own makes of each file; the test fails where a signal ends it."""
    paths = {}
    for number, (name, make) in enumerate(forged.items()):
        paths[name] = folder / f"forged-{number}"
        make().write(paths[name])

    def reply(request: Request) -> Reply:
        assert isinstance(request, Attach)
        assert request.name is not None
        return Attached(request.name, str(paths[request.name]), NONCE, 0, 0)

    try:
        with FakeDaemon(endpoint, answering(reply)):
            done = run_python(PROBE, endpoint, *forged, timeout_s=110)
    finally:
        for path in paths.values():
            path.unlink()
    assert done.stderr == ""
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture
def endpoint(runtime_dir: Path) -> Iterator[Path]:
    return runtime_dir / "fake.sock"


def test_what_is_made_here_is_the_layout() -> None:
    assert struct.Struct("<8sII16sQQQQQQI").size == layout.HEADER.size
    assert (layout.DESCRIPTION_OFFSET, layout.DATA_ALIGNMENT) == (128, DATA)


@pytest.mark.promise("F5")
def test_a_hostile_segment_is_refused_in_bounded_time_and_memory(shm_dir: Path, endpoint: Path) -> None:
    found = probe(shm_dir, endpoint, REFUSED)
    others = {
        "another nonce": "SegmentNotFoundError",
        "2^62 bytes": "OutOfSharedMemoryError",
        "a file that is not there": "SourceNotFoundError",
        "a file that is a device": "SourceNotFoundError",
        "a file that is a directory": "SourceNotFoundError",
        "a file that is another one": "SourceFormatError",
    }
    assert {name: outcome.get("refused") for name, outcome in found.items()} == {
        name: others.get(name, "SegmentFormatError") for name in REFUSED
    }
    assert max(outcome["seconds"] for outcome in found.values()) < 10
    assert max(outcome["grown_kib"] for outcome in found.values()) < 256 << 10


@pytest.mark.promise("F5", "F22")
def test_hostile_offsets_are_an_error_of_their_sample_alone(shm_dir: Path, endpoint: Path) -> None:
    found = probe(shm_dir, endpoint, {name: make for name, (make, _) in READ.items()})
    assert not {name: outcome["refused"] for name, outcome in found.items() if "refused" in outcome}
    expected = {name: samples for name, (_, samples) in READ.items() if samples is not None}
    assert {name: found[name]["samples"] for name in expected} == expected
    assert found["a tebibyte of holes"]["samples"] == [0] * 8
    assert max(outcome["seconds"] for outcome in found.values()) < 10
    assert max(outcome["grown_kib"] for outcome in found.values()) < 256 << 10
