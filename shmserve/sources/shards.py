"""From what a person typed to the shards of one corpus: files, pairs, prefixes, directories and patterns."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

from shmserve_client.errors import SourceFormatError, SourceNotFoundError, printable
from shmserve_client.urls import is_remote, without_secrets

from .arrow import ArrowFile, ParquetFile
from .base import HEAD_NBYTES, DecodedSource, Source, SourceOptions
from .csv_tables import CsvTable
from .datatrove import DatatroveTokens
from .files import missing, read_head
from .flat import FlatTokens
from .folder import Folder
from .hdf5 import Hdf5File
from .huggingface import HuggingFaceShard
from .lines import JsonLines, TextLines
from .litdata import LitDataChunk
from .llmc import LlmcTokens
from .lmdb import LmdbDatabase
from .mds import MdsShard
from .mmididx import MmapPair
from .npy import NpyArray
from .npz import NpzArchive
from .packed import PackedChunk
from .pairs import PAIR_SUFFIXES
from .python_code import PythonCode
from .remote import RemotePath
from .remote import matches as matches_of
from .safetensors import SafetensorsFile
from .segment_file import SegmentFile
from .tfrecord import TfRecordFile
from .tntidx import LegacyPair
from .webdataset import TarArchive

__all__ = ["SOURCES", "find_shards", "natural_order", "unnatural_order"]

SOURCES: Final[tuple[type[Source], ...]] = (
    MmapPair,
    LegacyPair,
    LlmcTokens,
    PackedChunk,
    NpyArray,
    DatatroveTokens,
    SegmentFile,
    HuggingFaceShard,
    ArrowFile,
    ParquetFile,
    NpzArchive,
    SafetensorsFile,
    Hdf5File,
    LmdbDatabase,
    MdsShard,
    LitDataChunk,
    TarArchive,
    TfRecordFile,
    JsonLines,
    TextLines,
    CsvTable,
    Folder,
    PythonCode,
    FlatTokens,
)
"""Every format, in the order in which they are tried; the last takes what only a person can tell."""

_COMPANIONS: Final = frozenset((".gz", ".json", ".log", ".loss", ".pkl", ".txt"))
"""What writers leave beside their data and a pattern such as `corpus/*` matches as well."""
_INDEX_NAMES: Final = frozenset(("dataset_dict.json", "dataset_info.json", "index.json", "state.json"))
"""Files that stand for their directory."""
_LISTED: Final = 8
"""How many names a message lists."""


def find_shards(data: Sequence[str], options: SourceOptions) -> tuple[Source, ...]:
    """Return the shards of a corpus, each once: in natural order within one argument, the arguments in their order.

    Raises:
        SourceNotFoundError: a file, a half of a pair, or any file that matches is missing.
        SourceFormatError: a file is of no known format, or a directory holds more than one corpus.
    """
    shards: dict[tuple[Path, ...], Source] = {}
    for argument in data:
        for shard in _find(argument, options):
            shards.setdefault(shard.files, shard)
    return tuple(shards.values())


def natural_order(path: Path) -> tuple[object, ...]:
    """Return a sort key that puts part_2 before part_10, and train.bin before train1.bin."""
    components = (component.split(".") for component in path.parts)
    return tuple(tuple(_numbers_apart(part) for part in parts) for parts in components), path.parts


def _numbers_apart(text: str) -> tuple[str | int, ...]:
    return tuple(int(run) if position % 2 else run for position, run in enumerate(re.split("([0-9]+)", text)))


def unnatural_order(data: Sequence[str]) -> tuple[str, ...]:
    """Return a note where paths that were given one by one are in another than natural order, numbers apart alike."""
    for before, after in pairwise(map(Path, data)):
        if _without_numbers(before) == _without_numbers(after) and natural_order(before) > natural_order(after):
            return (
                f"the paths are not in natural order ({printable(before.name)} before {printable(after.name)}): "
                "quote the pattern or give the directory for natural order",
            )
    return ()


def _without_numbers(path: Path) -> str:
    return re.sub("[0-9]+", "", path.name)


def _find(argument: str, options: SourceOptions) -> Iterable[Source]:
    path = cast("Path", RemotePath(argument)) if is_remote(argument) else Path(os.path.abspath(argument))
    if path.is_dir():
        return _find_in_directory(path, options)
    if path.name in _INDEX_NAMES and path.is_file() and (shards := _recognise_directory(path.parent)) is not None:
        return shards
    if path.exists():
        return [_recognise(path, options)]
    index, values = (path.with_name(path.name + suffix) for suffix in PAIR_SUFFIXES[::-1])
    if index.is_file():
        return [_recognise(index, options)]
    if not is_remote(argument) and (code := PythonCode.named(path)) is not None:
        return [code]
    if glob.has_magic(without_secrets(argument)):
        return _find_matches(argument, options)
    if values.is_file():
        raise missing(index, f"; if {values} holds bare tokens, name it in full")
    index = path.with_suffix(".idx")
    if index.is_file():
        raise missing(path, f", and {index} is only the index of what belongs there")
    raise missing(path, ", directory or prefix of a .bin/.idx pair")


def _recognise_directory(directory: Path) -> Sequence[Source] | None:
    """Return the shards that the directory is as a whole, or None where its files are to be looked at one by one."""
    decoded = (source for source in SOURCES if issubclass(source, DecodedSource))
    return next((shards for source in decoded if (shards := source.recognise_directory(directory)) is not None), None)


def _candidates(names: Sequence[Path], *, may_accompany: bool) -> list[Path]:
    """Return the files of a directory that are data, or may be if there is nothing else, by their names."""
    suffixes = tuple(s for source in SOURCES if source.may_accompany is may_accompany for s in source.suffixes)
    return sorted((path for path in names if path.name.endswith(suffixes)), key=natural_order)


def _find_in_directory(directory: Path, options: SourceOptions) -> Iterable[Source]:
    if (whole := _recognise_directory(directory)) is not None:
        return whole
    names = [path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")]
    candidates = _candidates(names, may_accompany=False)
    if not candidates:
        folder = Folder.below(directory)
        candidates = _candidates(names, may_accompany=True)
        if folder is not None and (folder.classes is not None or not candidates):
            return [folder]
    if not candidates:
        suffixes = {suffix for source in SOURCES for suffix in source.suffixes}
        raise SourceNotFoundError(
            f"{directory}: no data files ({', '.join(sorted(suffixes))}) among the {len(names)} files of this directory"
            f"{_listed(sorted(names, key=natural_order))}; its subdirectories are not searched"
        )
    shards = {shard.files: shard for shard in (_recognise(path, options) for path in candidates)}
    alike: dict[str, list[Path]] = {}
    for shard in shards.values():
        values = shard.files[0]
        alike.setdefault(_without_numbers(values), []).append(values)
    if len(alike) > 1:
        groups = "; ".join(_listed(paths).removeprefix(": ") for paths in alike.values())
        pattern = re.sub("[0-9]+", "*", max(next(iter(alike.values())), key=lambda path: len(path.name)).name)
        raise SourceFormatError(
            f"{directory}: more than one corpus in this directory: {groups}: say which, for example "
            f"--data NAME={directory / pattern}"
        )
    return shards.values()


def _find_matches(pattern: str, options: SourceOptions) -> Iterable[Source]:
    if is_remote(pattern):
        names: Iterable[Path] = cast("list[Path]", matches_of(RemotePath(pattern)))
    else:
        names = (Path(os.path.abspath(name)) for name in glob.glob(pattern))
    matches = sorted((path for path in names if path.is_file()), key=natural_order)
    files = [path for path in matches if path.suffix not in _COMPANIONS] or _candidates(matches, may_accompany=True)
    if not files:
        hint = "; where '[' belongs to the name, write [[]" if "[" in pattern else ""
        raise SourceNotFoundError(f"{pattern}: no data file matches{_listed(matches)}{hint}")
    return [_recognise(path, options) for path in files]


def _recognise(path: Path, options: SourceOptions) -> Source:
    if not path.is_file():
        raise missing(path)
    head = read_head(path, HEAD_NBYTES)
    return next(shard for source in SOURCES if (shard := source.recognise(path, head, options)) is not None)


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:_LISTED])
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return f": {names}{more}" if paths else ""
