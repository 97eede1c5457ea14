"""CSV and TSV tables with a header row, by pyarrow: a sample is a row.

The type of a column is the tightest that all of its values have: int64, float64, bool, else text, which is left as it
is. Where a value is missing, empty or a word for that such as NA, numbers are floats with NaN, and booleans objects
with None; but integers that no float64 holds are text then.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from shmserve_client.chunks import Chunk, objects, rows, texts
from shmserve_client.errors import SourceFormatError

from .arrow_arrays import EXTRA, chunk_of
from .base import DecodedSource, SourceOptions, check_columns
from .compressed import COMPRESSIONS
from .extras import require

__all__ = ["CsvTable"]

BLOCK_NBYTES: Final = (8 << 20, 64 << 20, 512 << 20)
"""How much is parsed at once: a row has to fit, so the next where it does not."""
MISSING: Final = ("", "#N/A", "<NA>", "N/A", "NA", "NULL", "None", "n/a", "null")
TRUE: Final = ("true", "True", "TRUE")
FALSE: Final = ("false", "False", "FALSE")
_WIDER: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("int64", "float64", "bool"),
    "int64": ("int64", "float64"),
    "float64": ("float64",),
    "bool": ("bool",),
    "text": (),
}
"""What values can be, by what those before them are; all can be text. "" is what nothing is known of."""
_INEXACT_FLOAT: Final = 1 << 53
"""The first float64 that an integer it does not equal may have become."""


@dataclass(frozen=True)
class CsvTable(DecodedSource):
    """One .csv or .tsv file."""

    suffixes = tuple(f"{suffix}{more}" for suffix in (".csv", ".tsv") for more in COMPRESSIONS)
    may_accompany = True
    format = "csv"

    values: Path

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return the file by its name."""
        return cls(path) if path.name.endswith(cls.suffixes) and options.dtype is None else None

    def parts(self) -> list[Any]:
        """Return the whole file: the type of each column, which a pass over all of it finds, and the size of blocks."""
        for block_nbytes in BLOCK_NBYTES[:-1]:
            try:
                return [[self._types(block_nbytes), block_nbytes]]
            except _RowTooLongError:
                continue
        return [[self._types(BLOCK_NBYTES[-1]), BLOCK_NBYTES[-1]]]

    def _types(self, block_nbytes: int) -> dict[str, str]:
        with _opened(self.values, block_nbytes, None) as reader:
            names = check_columns(None, reader.schema.names, self.values)
        columns = {name: _ColumnType() for name in names}
        strings = dict.fromkeys(names, "string")
        with closing(self._batches(strings, names, block_nbytes)) as batches:
            for name, array in _by_name(next(batches, None)):
                columns[name].see(array)
        # What starts as text stays it. All of the file is parsed in any case: each row has to fit into a block.
        open_names = [name for name in names if columns[name].kind != "text" or columns[name].is_empty] or names[:1]
        for batch in self._batches(strings, open_names, block_nbytes):
            for name, array in _by_name(batch):
                columns[name].see(array)
        return {name: column.kind for name, column in columns.items()}

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the rows."""
        types, block_nbytes = part
        names = check_columns(columns, list(types), self.values)
        parsed = {name: kind if kind in ("int64", "float64") else "string" for name, kind in types.items()}
        is_empty = True
        for batch in self._batches(parsed, names, block_nbytes):
            yield {name: _chunk(array, name, types[name]) for name, array in _by_name(batch)}
            is_empty = False
        if is_empty:
            yield {name: texts([]) for name in names}

    def _batches(self, types: Mapping[str, str], names: Sequence[str], block_nbytes: int) -> Generator[Any]:
        """Yield record batches of the columns `names`, out of those of all `types`."""
        pa, csv = require("pyarrow", EXTRA, str(self.values)), require("pyarrow.csv", EXTRA, str(self.values))
        options = csv.ConvertOptions(
            column_types={name: pa.type_for_alias(kind) for name, kind in types.items()},
            null_values=[],
            strings_can_be_null=False,
            include_columns=names,
        )
        with _opened(self.values, block_nbytes, options) as reader:
            yield from reader


def _by_name(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a batch, where there is one."""
    if batch is not None:
        yield from zip(batch.schema.names, batch.columns, strict=True)


class _RowTooLongError(SourceFormatError):
    """A row is longer than a block."""


@contextmanager
def _opened(path: Path, block_nbytes: int, convert_options: Any) -> Iterator[Any]:
    """Give pyarrow's reader of the file, whose errors within the block become ours."""
    pa, csv = require("pyarrow", EXTRA, str(path)), require("pyarrow.csv", EXTRA, str(path))
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    is_tsv = path.name.endswith(tuple(f".tsv{more}" for more in COMPRESSIONS))
    try:
        with pa.input_stream(str(path), compression=compression) as stream:
            yield csv.open_csv(
                stream,
                csv.ReadOptions(block_size=block_nbytes, use_threads=False),
                csv.ParseOptions(delimiter="\t" if is_tsv else ",", newlines_in_values=True),
                convert_options,
            )
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        said = str(error)
        what = f"{path}: not a table of values with a header row: {said}"
        if "straddl" in said or "cannot infer number of columns" in said:
            raise _RowTooLongError(f"{what}: is a quote not closed?") from error
        raise SourceFormatError(f"{what}: save it as UTF-8" if "UTF8" in said else what) from error


class _ColumnType:
    """What the values of a column are, as far as they were seen."""

    def __init__(self) -> None:
        self._kind = ""
        self._has_missing = False
        self._has_large = False
        """Whether there are integers that a float64 may not hold."""

    def see(self, strings: Any) -> None:
        """Take in further values."""
        compute = require("pyarrow.compute", EXTRA, "a table")
        if self._kind == "text":
            return
        trimmed = compute.ascii_trim_whitespace(strings)
        is_missing = _is_one_of(trimmed, MISSING)
        has_missing = bool(compute.any(is_missing).as_py())
        present = trimmed.filter(compute.invert(is_missing)) if has_missing else trimmed
        self._has_missing |= has_missing
        if len(present):
            self._kind = next((kind for kind in _WIDER[self._kind] if self._are(kind, present)), "text")

    def _are(self, kind: str, present: Any) -> bool:
        """Return whether all of these strings are of the kind."""
        pa, compute = require("pyarrow", EXTRA, "a table"), require("pyarrow.compute", EXTRA, "a table")
        if kind == "bool":
            return bool(compute.all(_is_one_of(present, TRUE + FALSE)).as_py())
        try:
            numbers = present.cast(pa.float64())  # which fails for hexadecimal integers: they are text
            if kind == "int64":
                numbers = present.cast(pa.int64())
        except pa.ArrowInvalid:
            return False
        large = _large(numbers.to_numpy(zero_copy_only=False))
        if large.any():
            written = present.filter(pa.array(large))
            self._has_large |= bool(compute.any(compute.match_substring_regex(written, r"^[+-]?\d+$")).as_py())
        return True

    @property
    def is_empty(self) -> bool:
        """Whether all values were missing."""
        return not self._kind

    @property
    def kind(self) -> str:
        """What the column becomes: int64, float64, bool, or text; "?" behind it where values are missing."""
        if self._kind == "bool":
            return "bool?" if self._has_missing else "bool"
        if self._kind == "int64" and not self._has_missing:
            return "int64"
        if self._kind not in ("int64", "float64") or self._has_large:
            return "text"
        return "float64?" if self._has_missing else "float64"


def _large(numbers: Any) -> Any:
    """Return which of these numbers may not be what a float64 of them is."""
    return (numbers >= _INEXACT_FLOAT) | (numbers <= -_INEXACT_FLOAT)


def _is_one_of(strings: Any, words: Sequence[str]) -> Any:
    pa, compute = require("pyarrow", EXTRA, "a table"), require("pyarrow.compute", EXTRA, "a table")
    return compute.is_in(strings, pa.array(words))


def _chunk(array: Any, name: str, kind: str) -> Chunk:
    """Return values as what `_ColumnType` found all of them to be."""
    pa, compute = require("pyarrow", EXTRA, "a table"), require("pyarrow.compute", EXTRA, "a table")
    if kind in ("int64", "float64", "text"):
        return chunk_of([array], pa.field(name, array.type))
    trimmed = compute.ascii_trim_whitespace(array)
    if kind == "bool":
        return rows(_is_one_of(trimmed, TRUE).to_numpy(zero_copy_only=False))
    is_missing = _is_one_of(trimmed, MISSING)
    if kind == "bool?":
        return objects(compute.if_else(is_missing, pa.scalar(None, pa.bool_()), _is_one_of(trimmed, TRUE)).to_pylist())
    return rows(compute.if_else(is_missing, "nan", trimmed).cast(pa.float64()).to_numpy())
