"""CSV and TSV tables: the types that are found, what is missing, and what is no table."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from shmserve.decoding import plan_head
from shmserve.sources import SourceOptions, csv_tables, resolve
from shmserve_client.errors import ConfigError, ShmserveError, SourceFormatError

from .decoded import table

NAN = float("nan")


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def column(tmp_path: Path, *values: str) -> list[Any]:
    """Return what a column of these values becomes; another beside it keeps its rows from being blank lines."""
    lines = "".join(f"{value},-\n" for value in values)
    return table(written(tmp_path / "t.csv", f"a,b\n{lines}"), columns=("a",))["a"]


def dtype_of(path: Path) -> str:
    with plan_head(resolve([str(path)], SourceOptions(columns=("a",)))) as corpus:
        return corpus.columns[0].values.dtype


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("1", "-2", " 3"), [1, -2, 3]),
        (("1", "2.5", "-inf"), [1.0, 2.5, float("-inf")]),
        (("1e3", "+1", ".5"), [1000.0, 1.0, 0.5]),
        (("true", "False", "TRUE"), [True, False, True]),
        (("1", "true"), ["1", "true"]),
        (("true", "1"), ["true", "1"]),
        (("0x10", "0x11"), ["0x10", "0x11"]),
        (("tRue", "false"), ["tRue", "false"]),
        (("1", "x"), ["1", "x"]),
        (("true", "", "false"), [True, None, False]),
        (("true", "NA"), [True, None]),
        (("x", "", "NA", " y "), ["x", "", "NA", " y "]),
        (("", ""), ["", ""]),
        (('""', "x"), ["", "x"]),
        (("NA", "NA"), ["NA", "NA"]),
        (("ünï", "漢字", "🎈"), ["ünï", "漢字", "🎈"]),
        (('"a,b"', '"say ""hi"""', '"two\nlines"'), ["a,b", 'say "hi"', "two\nlines"]),
    ],
    ids=str,
)
def test_a_column_is_the_tightest_that_all_its_values_are(
    tmp_path: Path, values: tuple[str, ...], expected: list[Any]
) -> None:
    found = column(tmp_path, *values)
    assert found == expected
    assert list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize("word", ["", '""', "NA", "N/A", "null", "NaN", "nan"])
def test_a_number_that_is_missing_is_nan(tmp_path: Path, word: str) -> None:
    found = column(tmp_path, "1", word, "2.5")
    assert found[::2] == [1.0, 2.5]
    assert found[1] != found[1]


@pytest.mark.parametrize(
    "values",
    [
        ("9007199254740993", ""),
        ("", "9007199254740993"),
        ("9007199254740993", "0.5"),
        ("0.5", "9007199254740993"),
        ("18446744073709551615", "1"),
        ("-9007199254740993", "NA"),
    ],
    ids=str,
)
def test_integers_that_no_float_holds_stay_as_they_are(tmp_path: Path, values: tuple[str, ...]) -> None:
    assert column(tmp_path, *values) == list(values)
    assert column(tmp_path, "9007199254740993", "-9223372036854775808") == [9007199254740993, -(1 << 63)]
    assert column(tmp_path, "9007199254740991", "")[0] == 2.0**53 - 1


@pytest.mark.parametrize(
    ("last", "dtype", "expected"),
    [("7", "int64", 7), ("7.5", "float64", 7.5), ("x", "uint8", "x"), ("", "float64", NAN)],
)
def test_types_are_those_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, dtype: str, expected: Any
) -> None:
    monkeypatch.setattr(csv_tables, "BLOCK_NBYTES", (256, 4096))
    count = 500  # far more than a block
    path = written(tmp_path / "t.csv", "a,b\n" + "1,-\n" * count + f"{last},-\n")
    found = table(path, columns=("a",))["a"]
    assert found[:-1] == ["1" if expected == "x" else 1] * count
    assert repr(found[-1]) == repr(expected)
    assert dtype_of(path) == dtype


@pytest.mark.parametrize(("last", "expected"), [("7", 7.0), ("true", True), ("x", "x")])
def test_a_column_that_starts_empty_is_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, expected: Any
) -> None:
    monkeypatch.setattr(csv_tables, "BLOCK_NBYTES", (64, 4096))
    path = written(tmp_path / "t.csv", "text,a\n" + "some,\n" * 100 + f"some,{last}\n")
    found = table(path)
    assert found["text"] == ["some"] * 101
    empty = {7.0: NAN, True: None, "x": ""}[expected]
    assert repr(found["a"]) == repr([empty] * 100 + [expected])


def test_a_row_longer_than_a_block_is_read_in_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_tables, "BLOCK_NBYTES", (64, 512, 4096))
    name, value = "h" * 100, "\n".join(["v" * 20] * 50)
    path = written(tmp_path / "t.csv", f'{name},b\n1,short\n2,"{value}"\n3,short\n')
    assert table(path) == {name: [1, 2, 3], "b": ["short", value, "short"]}
    written(path, f'a,b\n1,short\n2,"{value * 10}"\n')
    with pytest.raises(SourceFormatError, match=r"t\.csv: not a table.*is a quote not closed\?"):
        table(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".csv.zst", ".tsv.gz"])
def test_suffixes_tell_delimiter_and_compression(tmp_path: Path, suffix: str) -> None:
    delimiter = "\t" if ".tsv" in suffix else ","
    pieces = [f"a{delimiter}b\n1{delimiter}x\n".encode(), f"2{delimiter}y".encode()]
    if suffix.endswith(".gz"):
        pieces = [gzip.compress(piece) for piece in pieces]
    elif suffix.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        pieces = [zstandard.ZstdCompressor().compress(piece) for piece in pieces]
    path = written(tmp_path / f"t{suffix}", b"".join(pieces))  # several members or frames
    assert table(path) == {"a": [1, 2], "b": ["x", "y"]}
    if suffix.endswith(("gz", "zst")):
        written(path, path.read_bytes()[:-3])
        with pytest.raises(SourceFormatError, match=f"t{suffix}"):
            table(path)


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", b"\xef\xbb\xbfa,b\r\n1,x\r\n\r\n2,y\r\n")
    assert table(path) == {"a": [1, 2], "b": ["x", "y"]}


def test_a_header_without_rows_is_an_empty_table(tmp_path: Path) -> None:
    assert table(written(tmp_path / "t.csv", "a,b\n")) == {"a": [], "b": []}


def test_a_column_without_a_name_is_one(tmp_path: Path) -> None:
    assert table(written(tmp_path / "t.csv", ",a\n0,x\n1,y\n")) == {"": [0, 1], "a": ["x", "y"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not a table"),
        (b"a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        (b"a,b\n1,2,3\n", "Expected 2 columns, got 3"),
        (b"a,a\n1,2\n", "two columns are called 'a': rename one"),
        (b"a,b\n\xe4,2\n", "save it as UTF-8"),
        (b'a,b\n"x,2\ny,3\n', "Expected 2 columns"),
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = written(tmp_path / "t.csv", text)
    with pytest.raises(ShmserveError, match=message) as refusal:
        table(path)
    assert "t.csv" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_chosen_column_has_to_be_there(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n1,x\n")
    assert table(path, columns=("b", "a")) == {"b": ["x"], "a": [1]}
    with pytest.raises(ConfigError, match=r"t\.csv: no column 'c': it has 'a', 'b'"):
        table(path, columns=("c",))


def test_it_may_lie_beside_other_data(tmp_path: Path) -> None:
    written(tmp_path / "t.csv", "a\n1\n")
    assert resolve([str(tmp_path)], SourceOptions()).format == "csv"
    written(tmp_path / "t.bin", bytes(8))
    assert resolve([str(tmp_path)], SourceOptions("uint16")).format == "raw"


def test_shards_of_which_one_is_wider(tmp_path: Path) -> None:
    first, second = written(tmp_path / "1.csv", "a\n1\n"), written(tmp_path / "2.csv", "a\n2.5\n")
    assert table(first, second) == {"a": [1.0, 2.5]}
