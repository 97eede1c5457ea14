"""Resolving: which corpus a person means, whether it is still the same one, and what its segment will hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shmserve_client.errors import ConfigError, ShmserveError, SourceFormatError, SourceNotFoundError
from shmserve_client.layout import DTYPES
from shmserve_client.urls import absolute, without_secrets

from .base import Corpus, DecodedSource, Source, SourceOptions
from .join import join
from .remote import RemotePath, begin, forget
from .shards import find_shards, unnatural_order

__all__ = ["Resolved", "resolve"]

_ASKED_AT_ONCE: Final = 16


@dataclass(frozen=True)
class Resolved:
    """A corpus on disk: its shards, and the state of their files when it was resolved; only heads are read yet."""

    format: str
    shards: tuple[Source, ...]
    files: tuple[Path, ...]
    """Every file that the corpus's bytes depend on, once, in the order of the shards."""
    data: tuple[str, ...]
    """The paths as they were given, made absolute, and URLs without secrets; patterns stay patterns."""
    options: SourceOptions
    key: str
    """Hash of the format, the options of dtype, columns and decode, and each shard's files, wherever they are mounted
    and however they were asked for: device, inode, size and mtime_ns. What embedded clients ask for."""
    fingerprint: str
    """Hash of the options and of each file's path, size, mtime_ns and inode: what a segment may be adopted for."""

    def changed(self) -> bool:
        """Tell whether any of the files was changed, replaced or removed since; one stat per file."""
        forget()
        try:
            return _fingerprint(self.options, _stat_all(self.files)) != self.fingerprint
        except (OSError, SourceFormatError):
            return True

    def plan(self) -> Corpus:
        """Return the plan of the whole corpus: every index read and checked, in bounded memory, but no values.

        Raises:
            SourceNotFoundError: a file is gone.
            SourceFormatError: the files contradict their format, each other or the options, or changed meanwhile.
        """
        with _explained(self.data):
            plans = [(shard.files[0], shard.plan(self.options)) for shard in self.shards]
        if self.changed():
            raise SourceFormatError(
                f"{', '.join(self.data)}: changed while it was read; start again when it is complete"
            )
        corpus = join(self.format, plans, self.options)
        return replace(corpus, notes=unnatural_order(self.data) + corpus.notes)


def resolve(data: Sequence[str], options: SourceOptions) -> Resolved:
    """Return the corpus that the paths mean: files, either half or the prefix of a pair, directories, patterns.

    Args:
        data: one or more paths. A directory's and a pattern's files are taken in natural order, the paths as given.
        options: what else a person said about the corpus.

    Raises:
        ConfigError: an option is out of its range.
        SourceNotFoundError: a file, a half of a pair, or any file that matches is missing.
        SourceFormatError: a file is not of a supported format, or the files are not shards of one corpus.
    """
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not known: use one of {', '.join(DTYPES)}")
    if options.vocab_size is not None and not 1 <= options.vocab_size < 1 << 62:
        raise ConfigError(f"vocab_size {options.vocab_size} must be at least 1 and less than 2^62")
    if options.columns is not None and len(set(options.columns)) != len(options.columns):
        raise ConfigError(f"columns {', '.join(options.columns)}: one is named twice")
    shown = tuple(without_secrets(absolute(path)) for path in data)
    begin()
    with _explained(shown):
        shards = find_shards(data, options)
    if not shards:
        raise ConfigError("no data given: name at least one file, directory or pattern")
    for shard in shards:
        if shard.format != shards[0].format:
            raise SourceFormatError(
                f"shards of one corpus differ: {shards[0].files[0]} is {shards[0].format}, {shard.files[0]} is "
                f"{shard.format}: serve them as two datasets"
            )
        if options.decode is not None and (options.in_place or not isinstance(shard, DecodedSource)):
            raise ConfigError(
                f"{shard.values}: --decode {options.decode} is for images that are loaded: leave it out"
                f"{', or --mode map' if options.in_place else ''}"
            )
        if options.in_place and isinstance(shard.values, RemotePath):
            raise ConfigError(f"{shard.values}: only files of this machine can be mapped: load it, or download it")
        if isinstance(shard, DecodedSource) and options.dtype is not None:
            raise ConfigError(
                f"{shard.values}: {shard.format} says what it holds: leave out --dtype {options.dtype} (a --config "
                "gives each dataset its own)"
            )
    files = tuple(dict.fromkeys(file for shard in shards for file in shard.files))
    with _explained(shown):
        stats = _stat_all(files)
    key = _key(options, shards, stats)
    return Resolved(shards[0].format, shards, files, shown, options, key, _fingerprint(options, stats))


@contextmanager
def _explained(data: Sequence[str]) -> Iterator[None]:
    """Raise what the system says about a file as an error of ours."""
    try:
        yield
    except ShmserveError:
        raise
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"{error.filename}: vanished while it was read; start again") from error
    except OSError as error:
        raise SourceFormatError(f"{error.filename or ', '.join(data)}: cannot be read: {error.strerror}") from error


def _stat_all(files: Sequence[Path]) -> dict[Path, os.stat_result]:
    if not any(isinstance(file, RemotePath) for file in files):
        return {file: file.stat() for file in files}
    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="shmserve-stat") as threads:
        return dict(zip(files, threads.map(_stat, files), strict=True))


def _stat(file: Path) -> os.stat_result:
    return file.stat()


def _key(options: SourceOptions, shards: Sequence[Source], stats: Mapping[Path, os.stat_result]) -> str:
    digest = hashlib.sha256(repr((shards[0].format, options.dtype, options.columns, options.decode)).encode())
    for shard in shards:
        of_shard = [stats[file] for file in shard.files]
        digest.update(repr([(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in of_shard]).encode())
    return digest.hexdigest()


def _fingerprint(options: SourceOptions, stats: Mapping[Path, os.stat_result]) -> str:
    digest = hashlib.sha256(repr(options).encode())
    for file, stat in stats.items():
        digest.update(repr((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino)).encode())
    return digest.hexdigest()
