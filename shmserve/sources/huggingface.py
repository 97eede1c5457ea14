"""Directories of Hugging Face `datasets`: what save_to_disk writes, and the cache that load_dataset keeps.

Both hold Arrow streams. state.json of the first names its files, in their order. A cache has the files of all splits,
whose names tell which is whose, and how many rows each has is in dataset_info.json; that is not so in what was saved,
where it may still tell of the dataset that this one was selected from. Written after `datasets/arrow_dataset.py`,
`arrow_writer.py`, `builder.py` and `naming.py`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from shmserve_client.errors import SourceFormatError

from .arrow import ArrowFile, mapped
from .arrow_arrays import EXTRA
from .base import HEAD_NBYTES, SourceOptions
from .extras import require
from .files import missing, read_head

__all__ = ["HuggingFaceShard", "read_json"]

_MAX_JSON_NBYTES: Final = 64 << 20
_CACHED: Final = re.compile(r"(?P<dataset>.*?)-(?P<split>\w+(\.\w+)*?)(-(?P<shard>\d{5})-of-(?P<shards>\d{5}))?\.arrow")
_RESULTS: Final = ("cache-", "tmp")
"""How names start of what `map` and `filter` left in a cache, or are about to."""


@dataclass(frozen=True)
class HuggingFaceShard(ArrowFile):
    """One .arrow file of a dataset; known by its directory alone."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    format = "huggingface"

    companions: tuple[Path, ...] = ()
    num_rows: int | None = None
    """How many rows it is said to have, where that is known."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, and the directory's own."""
        return (self.values, *self.companions)

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return None: such a file by itself is an Arrow stream."""
        return None

    @classmethod
    def recognise_directory(cls, directory: Path) -> Sequence[Self] | None:
        """Return the shards of a saved or cached dataset."""
        splits, state, info = (directory / f"{name}.json" for name in ("dataset_dict", "state", "dataset_info"))
        if splits.is_file():
            raise _which(directory, splits)
        if state.is_file() and (info.is_file() or _has_arrow(directory)):
            return cls._saved(directory, state, info)
        return cls._cached(directory, info) if info.is_file() and _has_arrow(directory) else None

    @classmethod
    def _saved(cls, directory: Path, state: Path, info: Path) -> list[Self]:
        content = read_json(state)
        if content.get("_indices_data_files"):
            raise SourceFormatError(
                f"{directory}: saved with indices apart from its data (datasets before 1.6): load and save it again"
            )
        try:
            names = [entry["filename"] for entry in content["_data_files"]]
        except (KeyError, TypeError) as error:
            raise SourceFormatError(f"{state}: damaged: it names no _data_files") from error
        if not names or not all(type(name) is str and Path(name).name == name for name in names):
            raise SourceFormatError(f"{state}: damaged: its _data_files are {names}")
        companions = (state, info) if info.is_file() else (state,)
        return [cls._shard(directory / name, companions, None, f", which {state.name} names") for name in names]

    @classmethod
    def _cached(cls, directory: Path, info: Path) -> list[Self] | None:
        splits: dict[str, list[re.Match[str]]] = {}
        for path in sorted(directory.glob("*.arrow")):
            found = _CACHED.fullmatch(path.name)
            if found and not path.name.startswith(_RESULTS):
                splits.setdefault(found["split"], []).append(found)
        if len(splits) > 1:
            listed = " ".join(f"--data {split}={shlex.quote(_pattern(directory, splits[split]))}" for split in splits)
            raise SourceFormatError(f"{directory}: it holds the splits {', '.join(splits)}: say which, {listed}")
        if not splits:
            return None
        ((split, files),) = splits.items()
        if len({(file["dataset"], file["shards"]) for file in files}) > 1:
            names = ", ".join(file.string for file in files)
            raise SourceFormatError(f"{directory}: the files of its split {split} are not of one dataset: {names}")
        first, shards = files[0], [None] if files[0]["shards"] is None else range(int(files[0]["shards"]))
        counts = _counts(read_json(info), split, len(shards))
        paths = [directory / _shard_name(first, shard) for shard in shards]
        return [cls._shard(path, (info,), count, "") for path, count in zip(paths, counts, strict=True)]

    @classmethod
    def _shard(cls, path: Path, companions: tuple[Path, ...], num_rows: int | None, remark: str) -> Self:
        if not path.is_file():
            raise missing(path, remark)
        found = ArrowFile.recognise(path, read_head(path, HEAD_NBYTES), SourceOptions())
        if found is None:
            raise SourceFormatError(f"{path}: not an Arrow file: it is damaged")
        return cls(path, found.is_stream, companions, num_rows)

    def parts(self) -> list[Any]:
        """Return the parts of the file, whose rows are counted where it is known how many they should be."""
        parts = super().parts()
        if self.num_rows is not None and self.is_stream:
            ipc = require("pyarrow.ipc", EXTRA, str(self.values))
            with mapped(self.values) as file:
                count = sum(batch.num_rows for batch in ipc.open_stream(file))
            if count != self.num_rows:
                raise SourceFormatError(
                    f"{self.values}: {count} rows, but dataset_info.json says {self.num_rows}: it is incomplete"
                )
        return parts


def _has_arrow(directory: Path) -> bool:
    return next(directory.glob("*.arrow"), None) is not None


def _which(directory: Path, splits: Path) -> SourceFormatError:
    """Return the error that asks which of the datasets in the directory is meant."""
    names = read_json(splits).get("splits")
    if not isinstance(names, list) or not names or not all(type(name) is str for name in names):
        return SourceFormatError(f"{splits}: damaged: it lists no splits")
    listed = " ".join(f"--data {name}={shlex.quote(str(directory / name))}" for name in names)
    return SourceFormatError(f"{directory}: it holds the datasets {', '.join(names)}: say which, {listed}")


def _shard_name(file: re.Match[str], shard: int | None) -> str:
    numbered = "" if shard is None else f"-{shard:05d}-of-{file['shards']}"
    return f"{file['dataset']}-{file['split']}{numbered}.arrow"


def _pattern(directory: Path, files: Sequence[re.Match[str]]) -> str:
    """Return what names the files of one split."""
    first = files[0]
    numbered = "" if first["shards"] is None else f"-*-of-{first['shards']}"
    return str(directory / f"{first['dataset']}-{first['split']}{numbered}.arrow")


def _counts(info: dict[str, Any], split: str, shards: int) -> list[int | None]:
    """Return how many rows each file of a split has, as far as the cache says so."""
    splits = info.get("splits")
    entry = splits.get(split) if isinstance(splits, dict) else None
    if isinstance(entry, dict):
        lengths = entry.get("shard_lengths") or [entry.get("num_examples")]
        if isinstance(lengths, list) and len(lengths) == shards and all(type(length) is int for length in lengths):
            return lengths
    return [None] * shards


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that is the file. Raises SourceFormatError where it is none."""
    try:
        content = json.loads(read_head(path, _MAX_JSON_NBYTES))
    except (ValueError, RecursionError) as error:
        raise SourceFormatError(f"{path}: not JSON: {error}") from error
    if type(content) is not dict:
        raise SourceFormatError(f"{path}: not a JSON object")
    return content
