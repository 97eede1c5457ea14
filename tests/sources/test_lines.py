"""JSON Lines and text: ends of lines, parts, compression, keys that come and go, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shmserve.sources import compressed, lines
from shmserve_client.errors import ConfigError, SourceFormatError

from .decoded import table

ROWS: list[dict[str, Any]] = [
    {"n": number, "text": f"é{number}\n", "ids": [number] * (number % 3)} for number in range(300)
]
LINES = [f"line {number} ✓" if number % 7 else "" for number in range(500)]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(data) // 2  # two frames, as `cat a.zst b.zst` has
        data = b"".join(zstandard.compress(part) for part in (data[:half], data[half:]))
    path.write_bytes(data)
    return path


@pytest.fixture(params=[7, 100, 1 << 20])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and blocks of a few bytes, so that lines lie across their ends."""
    monkeypatch.setattr(lines, "PART_NBYTES", request.param)
    monkeypatch.setattr(compressed, "BLOCK_NBYTES", max(8, request.param // 3))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_are_the_same_however_they_end(tmp_path: Path, end: str, last: bool, suffix: str) -> None:
    content = end.join(LINES) + (end if last else "")
    assert table(write(tmp_path / f"t.txt{suffix}", content)) == {"text": LINES}
    content = end.join(map(json.dumps, ROWS)) + (end if last else "")
    assert table(write(tmp_path / f"t.jsonl{suffix}", content)) == columns(ROWS)


@pytest.mark.usefixtures("small_parts")
def test_a_return_within_a_line_stays(tmp_path: Path) -> None:
    assert table(write(tmp_path / "t.txt", "a\rb\r\n\r\r\nc")) == {"text": ["a\rb", "\r", "c"]}


@pytest.mark.usefixtures("small_parts")
def test_blank_lines_of_json_are_skipped(tmp_path: Path) -> None:
    assert table(write(tmp_path / "t.ndjson", '\n{"a": 1}\n \n\r\n{"a": 2}\n\n')) == {"a": [1, 2]}


@pytest.mark.usefixtures("small_parts")
def test_keys_that_a_row_lacks_are_none_wherever_they_first_appear(tmp_path: Path) -> None:
    rows = [{"a": number} for number in range(50)] + [{"a": number, "b": [number]} for number in range(50)]
    path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, rows)))
    assert table(path) == {"a": [*range(50)] * 2, "b": [None] * 50 + [[number] for number in range(50)]}
    assert table(path, columns=("b",)) == {"b": [None] * 50 + [[number] for number in range(50)]}
    with pytest.raises(ConfigError, match="no row has a column 'c'"):
        table(path, columns=("c",))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([[1], [0.5, 2]], [[1.0], [0.5, 2.0]]),
        ([1, None], [1, None]),
        ([2**53 + 1, 0.5], [2**53 + 1, 0.5]),
        ([2**70, 1], [2**70, 1]),
        ([True, False], [True, False]),
        ([[], [1]], [[], [1]]),
        ([[], []], [[], []]),
        ([{"b": [1, {"c": None}]}, "x"], [{"b": [1, {"c": None}]}, "x"]),
    ],
)
def test_values_of_several_types(tmp_path: Path, values: list[Any], found: list[Any]) -> None:
    path = write(tmp_path / "t.jsonl", "\n".join(json.dumps({"a": value}) for value in values))
    assert repr(table(path)["a"]) == repr(found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": ', r"the line at byte 9"),
        ('{"a": 1}\n[1]\n', r"the line at byte 9 is not a JSON object with keys"),
        ("3", r"the line at byte 0 is not a JSON object"),
        ("{}", r"the line at byte 0 is not a JSON object with keys"),
        ('{"a": "\\ud800"}', r"column 'a': .*surrogate"),
        ("", "there are no rows in it"),
        ("\n\n", "there are no rows in it"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(SourceFormatError, match=rf"t\.jsonl: .*{message}"):
        table(write(tmp_path / "t.jsonl", content))


def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    with pytest.raises(SourceFormatError, match=r"t\.txt: byte 7 is not UTF-8: .*--dtype uint8"):
        table(write(tmp_path / "t.txt", b"fine\nno\xff\n"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0.5, -1])
def test_compressed_files_that_are_cut_are_refused(tmp_path: Path, suffix: str, kept: float) -> None:
    path = write(tmp_path / f"t.txt{suffix}", "\n".join(LINES))
    whole = path.read_bytes()
    path.write_bytes(whole[: -1 if kept < 0 else int(len(whole) * kept)])
    with pytest.raises(SourceFormatError, match=rf"t\.txt\{suffix}: .*truncated"):
        table(path)


def test_text_beside_other_data_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", "about the data")
    write(tmp_path / "rows.jsonl", '{"a": 1}')
    assert table(tmp_path) == {"a": [1]}
    (tmp_path / "rows.jsonl").unlink()
    assert table(tmp_path) == {"text": ["about the data"]}
