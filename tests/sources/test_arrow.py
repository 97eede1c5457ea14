"""Arrow streams and files, Feather and Parquet: every type, batches and row groups of all sizes, and damage."""

from __future__ import annotations

import datetime
import decimal
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq

from shmserve.decoder import answers, failure
from shmserve.sources import SourceOptions, arrow, resolve
from shmserve.sources.base import DecodedSource
from shmserve_client.chunks import Chunk
from shmserve_client.errors import ConfigError, ShmserveError, SourceFormatError
from shmserve_client.staging import Staging

from .decoded import DecodedCase, DecodedContract, plain, table
from .reading import FIXTURES

IDS = [[271, 18949, 8913], [31331], [27781, 39305, 30437, 3952, 2998], [46801, 37063]]


class TestArrow(DecodedContract):
    format = "arrow"

    @pytest.fixture(params=["t.arrow", "t_stream.arrow", "t.feather"])
    def case(self, request: pytest.FixtureRequest) -> DecodedCase:
        columns = {"ids": IDS, "s": ["a", "b", None, "d"]}
        stays = () if request.param == "t.feather" else ("ids",)  # compressed, and a column with None
        return DecodedCase(f"written-misc/{request.param}", columns, {"ids": "int32"}, stays=stays)


def stream(path: Path, *batches: Any, **options: Any) -> Path:
    with pa.ipc.new_stream(path, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def file(path: Path, *batches: Any, **options: Any) -> Path:
    with pa.ipc.new_file(path, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def parquet(path: Path, *batches: Any, **options: Any) -> Path:
    with pq.ParquetWriter(path, batches[0].schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch, row_group_size=max(1, batch.num_rows))
    return path


def batch(array: Any) -> Any:
    return pa.record_batch({"x": array})


def source(path: Path) -> DecodedSource:
    (shard,) = resolve([str(path)], SourceOptions()).shards
    assert isinstance(shard, DecodedSource)
    return shard


def chunks(path: Path, *columns: str) -> Iterator[dict[str, Chunk]]:
    shard = source(path)
    for part in shard.parts():
        yield from shard.decode(part, columns or None)


NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
DAY = datetime.date(1970, 1, 2)
TENSOR = np.arange(24).reshape(2, 3, 4)


def listed(values: Any, kind: Any) -> Any:
    return pa.array(values, pa.list_(kind))


def views(values: Any) -> Any:
    """Return views of lists that lie in another order than they are listed."""
    return pa.ListViewArray.from_arrays([2, 0, 2], [1, 2, 0], pa.array(values))


def dictionary_of(values: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), values)


TENSORS: dict[str, tuple[Any, list[Any]]] = {
    **{str(kind): (pa.array([0, 1, 100], kind), [0, 1, 100]) for kind in NUMBERS},
    **{str(kind): (pa.array([0.5, -1.0, 2.0], kind), [0.5, -1.0, 2.0]) for kind in FLOATS},
    "bool": (pa.array([True, False, True]), [True, False, True]),
    "date32": (pa.array([DAY], pa.date32()), [1]),
    "date64": (pa.array([DAY], pa.date64()), [86_400_000]),
    "time32": (pa.array([datetime.time(0, 1)], pa.time32("s")), [60]),
    "time64": (pa.array([1], pa.time64("ns")), [1]),
    "timestamp": (pa.array([1], pa.timestamp("ns", "Europe/Paris")), [1]),
    "duration": (pa.array([-1], pa.duration("us")), [-1]),
    "lists": (listed([[1, 2], [], [3]], pa.int16()), [[1, 2], [], [3]]),
    "lists that are empty first and last": (listed([[], [1], []], pa.float32()), [[], [1.0], []]),
    "lists of booleans": (listed([[True], [False, True]], pa.bool_()), [[True], [False, True]]),
    "lists of times": (listed([[1], [2, 3]], pa.timestamp("s")), [[1], [2, 3]]),
    "large lists": (pa.array([[1], [2, 3]], pa.large_list(pa.int64())), [[1], [2, 3]]),
    "lists of one size": (pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2)), [[1, 2], [3, 4]]),
    "lists of one size, nested": (
        pa.array([[[1, 2], [3, 4]]], pa.list_(pa.list_(pa.uint8(), 2), 2)),
        [[[1, 2], [3, 4]]],
    ),
    "lists of size 0": (pa.array([[], []], pa.list_(pa.uint8(), 0)), [[], []]),
    "lists of points": (
        listed([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.int8(), 2)),
        [[[1, 2]], [], [[3, 4], [5, 6]]],
    ),
    "views of lists": (views([1, 2, 3]), [[3], [1, 2], []]),
    "a dictionary of numbers": (dictionary_of(pa.array([7, 8])), [8, 7, 8]),
    "a dictionary of times": (dictionary_of(pa.array([7, 8], pa.timestamp("s"))), [8, 7, 8]),
    "run ends": (pc.run_end_encode(pa.array([5, 5, 6])), [5, 5, 6]),
    "tensors": (pa.FixedShapeTensorArray.from_numpy_ndarray(TENSOR), TENSOR.tolist()),
    "transposed tensors": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(TENSOR.transpose(0, 2, 1)),
        TENSOR.transpose(0, 2, 1).tolist(),
    ),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 2], pa.int8())), [False, True, True]),
}
STRINGS: dict[str, tuple[Any, list[Any]]] = {
    "string": (pa.array(["", "ünï", "", "漢字"]), ["", "ünï", "", "漢字"]),
    "large string": (pa.array(["a", ""], pa.large_string()), ["a", ""]),
    "string view": (pa.array(["a", "longer than twelve bytes"], pa.string_view()), ["a", "longer than twelve bytes"]),
    "a dictionary of strings": (dictionary_of(pa.array(["a", "b"])), ["b", "a", "b"]),
    "run ends of strings": (pc.run_end_encode(pa.array(["a", "a", "b"])), ["a", "a", "b"]),
    "only empty strings": (pa.array(["", ""]), ["", ""]),
    "binary": (pa.array([b"", b"\xff\0"]), [b"", b"\xff\0"]),
    "large binary": (pa.array([b"a"], pa.large_binary()), [b"a"]),
    "binary view": (pa.array([b"a", bytes(20)], pa.binary_view()), [b"a", bytes(20)]),
    "binary of one size": (pa.array([b"ab", b"cd"], pa.binary(2)), [b"ab", b"cd"]),
    "uuid": (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16))), [bytes(16)]),
}
OBJECTS: dict[str, tuple[Any, list[Any]]] = {
    "numbers and nulls": (pa.array([1, None, 3]), [1, None, 3]),
    "halves and nulls": (pa.array([0.5, None], pa.float16()), [0.5, None]),
    "times and nulls": (pa.array([1, None], pa.timestamp("ns")), [1, None]),
    "strings and nulls": (pa.array(["a", None]), ["a", None]),
    "nulls": (pa.nulls(3), [None, None, None]),
    "nulls of a type": (pa.nulls(2, pa.int64()), [None, None]),
    "lists and nulls": (listed([[1], None, []], pa.int8()), [[1], None, []]),
    "lists with nulls": (listed([[1, None], []], pa.int8()), [[1, None], []]),
    "lists of one size with nulls": (pa.array([[1, None]], pa.list_(pa.int8(), 2)), [[1, None]]),
    "lists of one size and nulls": (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), [[1, 2], None]),
    "lists of lists": (listed([[[1], []], []], pa.list_(pa.int8())), [[[1], []], []]),
    "lists of strings": (listed([["a", None], []], pa.string()), [["a", None], []]),
    "lists of views of strings": (listed([["a"], []], pa.string_view()), [["a"], []]),
    "structs": (pa.array([{"a": 1, "b": "x"}, None]), [{"a": 1, "b": "x"}, None]),
    "structs of times": (
        pa.array([{"t": 1, "d": DAY}], pa.struct({"t": pa.time64("ns"), "d": pa.date32()})),
        [{"t": 1, "d": 1}],
    ),
    "structs of a dictionary": (
        pa.StructArray.from_arrays([dictionary_of(pa.array(["a", "b"]))], ["d"]),
        [{"d": "b"}, {"d": "a"}, {"d": "b"}],
    ),
    "structs of views of lists": (
        pa.StructArray.from_arrays([views([1, 2, 3])], ["v"]),
        [{"v": [3]}, {"v": [1, 2]}, {"v": []}],
    ),
    "structs of run ends": (
        pa.StructArray.from_arrays([pc.run_end_encode(pa.array([5, 5]))], ["r"]),
        [{"r": 5}, {"r": 5}],
    ),
    "structs of nothing": (pa.array([{}, {}], pa.struct([])), [{}, {}]),
    "a dictionary of structs": (dictionary_of(pa.array([{"a": 1}, {"a": 2}])), [{"a": 2}, {"a": 1}, {"a": 2}]),
    "maps": (pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int8())), [{"k": 1}, {}, None]),
    "maps of times": (pa.array([[(1, 2)]], pa.map_(pa.int8(), pa.timestamp("ns"))), [{1: 2}]),
    "structs of maps": (
        pa.array([{"m": [("k", None)]}], pa.struct({"m": pa.map_(pa.string(), pa.int8())})),
        [{"m": {"k": None}}],
    ),
    "unions": (
        pa.UnionArray.from_dense(
            pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([1, None]), pa.array(["x"])]
        ),
        [1, "x", None],
    ),
    "run ends of nulls": (pc.run_end_encode(pa.array([None, None, 1])), [None, None, 1]),
    "tensors and nulls": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), [1, 2]), pa.array([[1, 2], None], pa.list_(pa.int8(), 2))
        ),
        [[[1, 2]], None],
    ),
}
KINDS = {"tensor": TENSORS, "text|bytes": STRINGS, "object": OBJECTS}
TYPES = [pytest.param(kind, *case, id=name) for kind, cases in KINDS.items() for name, case in cases.items()]


@pytest.mark.parametrize(("kind", "array", "expected"), TYPES)
def test_each_type_becomes_what_a_person_expects(tmp_path: Path, kind: str, array: Any, expected: list[Any]) -> None:
    path = stream(tmp_path / "x.arrow", batch(array))
    assert [plain(value) for value in table(path)["x"]] == expected
    assert {chunk["x"].kind for chunk in chunks(path)} <= set(kind.split("|"))


@pytest.mark.parametrize(("kind", "array", "expected"), TYPES)
def test_slices_and_batches_are_joined(tmp_path: Path, kind: str, array: Any, expected: list[Any]) -> None:
    pieces = [array, array.slice(1), array.slice(0, len(array) - 1)]
    path = file(tmp_path / "x.arrow", *map(batch, pieces))
    wanted = expected + expected[1:] + expected[:-1]
    assert [plain(value) for value in table(path)["x"]] == wanted


@pytest.mark.parametrize(("kind", "array", "expected"), TYPES)
def test_no_rows_are_no_rows(tmp_path: Path, kind: str, array: Any, expected: list[Any]) -> None:
    path = stream(tmp_path / "x.arrow", batch(array.slice(0, 0)))
    assert table(path) == {"x": []}


IN_PARQUET = [
    name for name in TENSORS | STRINGS if not any(word in name for word in ("view", "run ends", "time", "size 0"))
]


@pytest.mark.parametrize("name", IN_PARQUET)
def test_parquet_gives_the_same(tmp_path: Path, name: str) -> None:
    array, expected = (TENSORS | STRINGS)[name]
    if name == "date64":
        expected = [1]  # Parquet's dates are days
    path = parquet(tmp_path / "x.parquet", batch(array))
    assert table(path) == {"x": expected}
    assert all(chunk["x"].kind != "object" for chunk in chunks(path))


@pytest.mark.parametrize(
    "array",
    [
        pa.array([decimal.Decimal("1.50")]),
        pa.array([{"price": decimal.Decimal("1.50")}]),
        pa.array([[decimal.Decimal("1.50")]]),
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.nulls(1, pa.decimal256(40, 2)),
    ],
    ids=lambda array: str(array.type),
)
def test_what_has_no_counterpart_is_refused_by_the_name_of_its_column(tmp_path: Path, array: Any) -> None:
    path = stream(tmp_path / "x.arrow", pa.record_batch({"fine": pa.array([1]), "odd": array}))
    with pytest.raises(SourceFormatError, match=r"x\.arrow: column 'odd' of .* is not supported: .* --columns"):
        table(path)
    assert table(path, columns=("fine",)) == {"fine": [1]}


def test_a_map_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    maps = pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8()))
    with pytest.raises(SourceFormatError, match=r"x\.arrow: column 'x' of map.*duplicate"):
        table(stream(tmp_path / "x.arrow", batch(maps)))


def test_columns_have_different_names_and_there_are_some(tmp_path: Path) -> None:
    twice = pa.record_batch([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    path = stream(tmp_path / "x.arrow", twice)
    with pytest.raises(SourceFormatError, match="two columns are called 'a'"):
        table(path)
    assert table(path, columns=("b",)) == {"b": [3]}
    with pytest.raises(SourceFormatError, match="no columns"):
        table(stream(tmp_path / "none.arrow", pa.record_batch([], names=[])))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("write", [stream, file])
def test_compression_changes_nothing(tmp_path: Path, write: Callable[..., Path], compression: str | None) -> None:
    rows = pa.record_batch({"ids": pa.array([list(range(n)) for n in range(50)]), "s": pa.array(["ab"] * 50)})
    path = write(tmp_path / "x.arrow", rows, rows, compression=compression)
    assert table(path) == {"ids": [list(range(n)) for n in range(50)] * 2, "s": ["ab"] * 100}
    assert table(path, columns=("s",)) == {"s": ["ab"] * 100}


@pytest.mark.parametrize("write", [stream, file, parquet])
def test_parts_are_joined_in_order(tmp_path: Path, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "PART_NBYTES", 4096)
    pieces = [pa.record_batch({"a": pa.array(range(start, start + 97))}) for start in range(0, 9700, 97)]
    path = write(tmp_path / "x", pieces[0].slice(0, 0), *pieces)
    assert len(source(path).parts()) > 10
    assert table(path, by_helpers=True) == {"a": list(range(9700))}


@pytest.mark.parametrize("write", [stream, file])
def test_dictionaries_may_grow_and_change(
    tmp_path: Path, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "PART_NBYTES", 1)
    words = [["a", "b"], ["a", "b", "c"], ["x"] if write is stream else ["a", "b", "c", "d"]]
    pieces = [batch(pa.DictionaryArray.from_arrays([0, len(each) - 1], each)) for each in words]
    path = write(tmp_path / "x.arrow", *pieces, emit_dictionary_deltas=True)
    assert table(path) == {"x": [word for each in words for word in (each[0], each[-1])]}


def test_rows_much_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "CHUNK_NBYTES", 1000)
    values = ["s", "x" * 5000, "t", "u", "y" * 5000, ""]
    for path in (
        stream(tmp_path / "x.arrow", batch(pa.array(values))),
        parquet(tmp_path / "x.parquet", batch(pa.array(values))),
    ):
        assert table(path) == {"x": values}


@pytest.mark.parametrize("write", [stream, file, parquet])
@pytest.mark.parametrize(
    "array",
    [
        pa.array(np.zeros(1 << 17, np.int64)),
        pa.array(["the same prompt for all, which is quite long " * 20] * 2000),
        pa.array(["the same prompt for all, which is quite long " * 20] * 2000).dictionary_encode(),
        pa.array([np.ones(512, np.int64)] * 500),
    ],
    ids=["numbers", "repeated strings", "a dictionary", "runs"],
)
def test_chunks_stay_small_however_well_rows_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: Any, write: Callable[..., Path]
) -> None:
    monkeypatch.setattr(arrow, "CHUNK_NBYTES", 1 << 16)
    path = write(tmp_path / "x", batch(array))
    found = [chunk["x"] for chunk in chunks(path)]
    assert sum(chunk.count for chunk in found) == len(array)
    assert max(chunk.nbytes for chunk in found) < 1 << 18
    assert len(found) > 5


def test_a_large_batch_is_not_read_whole(tmp_path: Path) -> None:
    size = 96 << 20
    path = stream(tmp_path / "x.arrow", batch(pa.array(np.zeros(size, np.uint8))))
    before = pa.total_allocated_bytes()
    for chunk in chunks(path):
        assert chunk["x"].nbytes <= arrow.CHUNK_NBYTES
        assert pa.total_allocated_bytes() - before < size // 2


def test_parquet_reads_what_it_needs_of_nested_and_dotted_columns(tmp_path: Path) -> None:
    rows = pa.record_batch({"a": pa.array([{"b": 1, "c": [1, 2]}]), "a.b": pa.array([2]), "d": pa.array([[["x"]]])})
    path = parquet(tmp_path / "x.parquet", rows)
    assert table(path) == {"a": [{"b": 1, "c": [1, 2]}], "a.b": [2], "d": [[["x"]]]}
    assert table(path, columns=("a.b",)) == {"a.b": [2]}
    assert table(path, columns=("d", "a")) == {"d": [[["x"]]], "a": [{"b": 1, "c": [1, 2]}]}


def test_a_directory_of_parquet_is_one_corpus(tmp_path: Path) -> None:
    for number in range(3):
        parquet(tmp_path / f"train-{number:05d}-of-00003.parquet", batch(pa.array([number])))
    assert table(tmp_path) == {"x": [0, 1, 2]}
    parquet(tmp_path / "test-00000-of-00001.parquet", batch(pa.array([9])))
    with pytest.raises(SourceFormatError, match="more than one corpus"):
        table(tmp_path)
    assert table(f"{tmp_path}/train-*.parquet") == {"x": [0, 1, 2]}


def test_shards_of_which_one_has_nulls(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", batch(pa.array([1, 2])))
    second = parquet(tmp_path / "2.parquet", batch(pa.array([None, 3])))
    assert table(first, second) == {"x": [1, 2, None, 3]}


def test_encrypted_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PARE" + bytes(100) + b"PARE")
    with pytest.raises(SourceFormatError, match=r"x\.parquet: encrypted Parquet is not supported: write it again"):
        resolve([str(path)], SourceOptions())


def test_feather_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.feather"
    path.write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(SourceFormatError, match=r"x\.feather: Feather version 1 is not supported"):
        resolve([str(path)], SourceOptions())


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    bad = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    for path in (stream(tmp_path / "x.arrow", batch(bad)), parquet(tmp_path / "x.parquet", batch(bad))):
        with pytest.raises(SourceFormatError, match=rf"{path.name}: .*UTF8"):
            table(path)


def test_rows_that_take_no_bytes_are_bounded_by_the_file(tmp_path: Path) -> None:
    path = stream(tmp_path / "x.arrow", batch(pa.nulls(100)))
    assert table(path) == {"x": [None] * 100}
    stream(path, *[batch(pa.nulls(1 << 20))] * 3)
    with pytest.raises(SourceFormatError, match=r"rows without a value in any column: it is damaged"):
        table(path)


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:-8], lambda whole: whole[:-4], lambda whole: whole * 2, lambda whole: whole + bytes(8)],
    ids=["none", "half", "twice", "more"],
)
def test_a_stream_ends_with_its_mark(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = stream(tmp_path / "x.arrow", *[batch(pa.array([1, 2]))] * 3)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        SourceFormatError, match=r"x\.arrow: .*(it is truncated, or has several|only 0 bytes available)"
    ):
        table(path)


@pytest.mark.parametrize("name", ["t.arrow", "t_stream.arrow", "t.feather", "t_plain.parquet", "t_snappy_2rg.parquet"])
def test_damage_is_refused_or_read(tmp_path: Path, name: str) -> None:
    """In this process, where a read outside of a buffer ends the test run."""
    whole = (FIXTURES / "written-misc" / name).read_bytes()
    generator = random.Random(name)
    path = tmp_path / name
    outcomes = set()
    with (tmp_path / "staged").open("w+b") as staged:
        staging = Staging(staged.fileno())
        for _ in range(300):
            damaged = bytearray(whole)
            for _ in range(generator.choice([1, 1, 2, 8])):
                damaged[generator.randrange(8, len(whole))] = generator.choice(
                    [0, 1, 127, 128, 255, generator.randrange(256)]
                )
            path.write_bytes(damaged)
            try:
                shard = source(path)
                for part in shard.parts():
                    for answer in answers((shard, part, None), staging):
                        assert answer["count"] < 1000
                outcomes.add("read")
            except AssertionError:
                raise
            except Exception as error:
                message = failure(error, (shard,))["message"]
                assert name in message, message
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_chosen_column_has_to_be_there(tmp_path: Path) -> None:
    path = stream(tmp_path / "x.arrow", pa.record_batch({"a": pa.array([1]), "b": pa.array(["x"])}))
    with pytest.raises(ConfigError, match=r"x\.arrow: no column 'c': it has 'a', 'b'"):
        table(path, columns=("c",))


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: str) -> Any:
        raise OSError(19, os.strerror(19), path)

    monkeypatch.setattr(pa, "memory_map", refuses)
    monkeypatch.setattr(arrow, "PART_NBYTES", 1)
    for write in (stream, file):
        path = write(tmp_path / "x.arrow", *[batch(pa.array([n])) for n in range(5)])
        assert table(path) == {"x": list(range(5))}
    path.unlink()
    with pytest.raises(ShmserveError, match="no such file"):
        table(path)
