"""What a daemon is to serve and where, decided before anything is opened: from arguments, and from a TOML file.

All keys of the file are optional but `data`:

    endpoint = "ipc:///run/shmserve/daemon.sock"
    shm_dir = "/dev/shm"
    group = "ml"
    lock = true
    checksums = true
    linger = 600
    tcp = "10.0.0.5:5555"            # further clients, which need keys unless it is a loopback address
    keys = "keys"                    # a directory from `shmserve keys`, counted from this file's folder

    [datasets.corpus]
    data = "corpus.bin"              # or a list; counted from this file's folder
    dtype = "uint16"
    vocab_size = 50257
    columns = ["tokens", "label"]    # of a table; all where it is left out
    decode = 224                     # images, to uint8 of that width and height
    block_size = 1025
    stride = 1024

    [datasets.large]
    data = "large.seg"
    mode = "map"                     # clients map the files where they are
    warm = true                      # and it is read once at the start
"""

from __future__ import annotations

import grp
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shmserve_client.endpoint import host_and_port, is_loopback, is_tcp
from shmserve_client.errors import ConfigError, printable
from shmserve_client.urls import absolute, is_remote, without_secrets

from .sources.base import SourceOptions

__all__ = [
    "DEFAULT_SHM_DIR",
    "MODES",
    "DaemonConfig",
    "DatasetConfig",
    "FileConfig",
    "datasets_from_arguments",
    "default_name",
    "group_id",
    "merge_datasets",
    "read_config_file",
]

DEFAULT_SHM_DIR: Final = "/dev/shm"
MODES: Final = ("load", "map")
"""What a person may choose."""
MAX_NAME_LENGTH: Final = 128
MAX_COUNT: Final = 1 << 62
"""Counts of items stay below it, as those of a lookup must."""

_WILDCARD: Final = re.compile(r"[*?]|\[[^]]*\]")
_SEPARATORS: Final = "-_. "


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One dataset to serve. `data` is absolute; `block_size` and `stride` are the clients' defaults, in items."""

    name: str
    data: tuple[str, ...]
    options: SourceOptions = field(default_factory=SourceOptions)
    block_size: int | None = None
    stride: int | None = None
    mode: str = "load"
    """"load" copies into shared memory; "map" has clients map the values in their files; "adopt" takes over a segment
    that another process has published."""
    warm: bool = False
    """Whether files that are mapped are read once at the start."""

    def __post_init__(self) -> None:
        if self.mode not in (*MODES, "adopt"):
            raise ConfigError(f"dataset {self.name!r}: mode {self.mode!r}: it must be {' or '.join(MODES)}")
        if self.mode == "map" and self.options.vocab_size is not None:
            raise ConfigError(
                f"dataset {self.name!r}: mode map does not read the values, so they cannot be checked: leave out "
                f"vocab-size {self.options.vocab_size}, or give it to `shmserve build`"
            )
        if self.warm and self.mode != "map":
            raise ConfigError(f"dataset {self.name!r}: warm is for mode map: what is loaded is in memory anyway")
        if not 1 <= len(self.name) <= MAX_NAME_LENGTH or "/" in self.name or not self.name.isprintable():
            raise ConfigError(
                f"dataset name {self.name!r}: it must have 1 to {MAX_NAME_LENGTH} printable characters and no '/'"
            )
        for option, value in (
            ("block-size", self.block_size),
            ("stride", self.stride),
            ("vocab-size", self.options.vocab_size),
        ):
            if value is not None and not 1 <= value < MAX_COUNT:
                raise ConfigError(f"dataset {self.name!r}: {option} {value} must be at least 1 and less than 2^62")
        if self.stride is not None and self.block_size is None:
            raise ConfigError(f"dataset {self.name!r}: stride {self.stride} without a block-size: give both")


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """One daemon: its datasets (names are unique), its socket, and the directory of its segments."""

    datasets: tuple[DatasetConfig, ...]
    endpoint: str
    shm_dir: str = DEFAULT_SHM_DIR
    gid: int | None = None
    """The group that may read, None for the owner alone."""
    lock: bool = False
    """Whether the segments are locked against swapping."""
    checksums: bool = False
    """Whether checksums are taken while loading."""
    linger_s: float | None = None
    """After how many seconds without an attached process the daemon ends; None for never."""
    tcp: str | None = None
    """HOST:PORT where clients are answered as well, or None; port 0 is any free one."""
    keys: str | None = None
    """The directory of the daemon's keys and of those clients that are let in by TCP; None lets in whoever comes."""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ConfigError("nothing to serve: give --data PATH or a --config with [datasets.NAME]")
        if self.linger_s is not None and not 0 <= self.linger_s < float("inf"):
            raise ConfigError(f"linger {self.linger_s}: it must be a number of seconds from 0 up")
        if is_tcp(self.endpoint):
            raise ConfigError(
                f"endpoint {self.endpoint}: give the path of a socket, and TCP beside it as --tcp HOST:PORT"
            )
        if self.tcp is not None and self.keys is None and not is_loopback(host_and_port(self.tcp)[0]):
            raise ConfigError(
                f"tcp {self.tcp} can be reached from other machines, so it needs keys: make them with "
                "`shmserve keys DIR`, and give --keys DIR"
            )


def datasets_from_arguments(
    arguments: Iterable[Sequence[str]],
    options: SourceOptions,
    *,
    block_size: int | None = None,
    stride: int | None = None,
    mode: str = "load",
    warm: bool = False,
) -> tuple[DatasetConfig, ...]:
    """Return the datasets that `--data` names, in order.

    Args:
        arguments: For each `--data`, its `[NAME=]PATH` and the further paths that follow it.
        options: What was said of all of them.
        block_size: The clients' default, in items.
        stride: The clients' default, in items.
        mode: "load" or "map".
        warm: Whether files that are mapped are read once.

    Raises:
        ConfigError: a name is not one, or two datasets would get the same name without a person saying so.
    """
    data_by_name: dict[str, list[str]] = {}
    explicit: set[str] = set()
    for first, *further in arguments:
        name, path = _split_name(first)
        data = [absolute(part) for part in (path, *further)]
        if name is None:
            name = default_name(data)
            if name in data_by_name:
                raise ConfigError(_named_twice(name, data_by_name[name], data))
        elif name in data_by_name and name not in explicit:
            raise ConfigError(_named_twice(name, data_by_name[name], data))
        else:
            explicit.add(name)
        data_by_name.setdefault(name, []).extend(data)
    return tuple(
        DatasetConfig(name, tuple(data), options, block_size, stride, mode, warm) for name, data in data_by_name.items()
    )


def _named_twice(name: str, first: Sequence[str], second: Sequence[str]) -> str:
    return (
        f"two datasets named {name!r}, {first[0]} and {second[0]}: "
        f"give each a name, --data NAME=PATH, or both the same for the shards of one dataset"
    )


def _split_name(argument: str) -> tuple[str | None, str]:
    """Return (name, path) of `[NAME=]PATH`; a path that holds a "=" itself is a path where it exists."""
    name, separator, path = argument.partition("=")
    if not separator or "/" in name or os.path.exists(argument):
        name, path = "", argument
    elif not name:
        raise ConfigError(f"--data {argument!r}: the name before '=' is empty")
    if not path:
        raise ConfigError(f"--data {argument!r}: the path is empty")
    return name or None, path


def default_name(data: Sequence[str]) -> str:
    """Return what a dataset of these absolute paths is called unless it is given a name.

    A file's stem, a directory's name, what a pattern or several files have in common; where that is nothing, the name
    of the folder, or in the end "data".
    """
    names = [_name_of(path) for path in data]
    common = os.path.commonprefix(names)  # noqa: RUF071  # characters are what is wanted, not path components
    if len(set(names)) > 1:
        common = common.rstrip("0123456789" + _SEPARATORS)
    if not common:
        folder = Path(data[0]).parent
        common = _WILDCARD.sub("", folder.name).strip(_SEPARATORS)
    return printable(common or "data")[:MAX_NAME_LENGTH]


def _name_of(data: str) -> str:
    path = Path(without_secrets(data))
    # Not Path's own, which raise where the path cannot be one: resolving it will say why.
    if _WILDCARD.search(path.name) and not os.path.exists(path):
        return _WILDCARD.sub("", path.stem).strip(_SEPARATORS)
    if is_remote(data) or os.path.isfile(path):
        return path.stem
    return path.name.rpartition(":")[2] or path.name  # of package.module:name


@dataclass(frozen=True, slots=True)
class FileConfig:
    """What a configuration file says; None where it says nothing. Paths are absolute."""

    datasets: tuple[DatasetConfig, ...] = ()
    endpoint: str | None = None
    shm_dir: str | None = None
    group: str | None = None
    lock: bool | None = None
    checksums: bool | None = None
    linger: float | None = None
    tcp: str | None = None
    keys: str | None = None


def read_config_file(path: Path) -> FileConfig:
    """Return the file's contents, checked.

    Raises:
        ConfigError: it cannot be read, is not TOML, or has an unknown key or a value of the wrong type.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    folder = path.absolute().parent
    text = dict.fromkeys(("endpoint", "shm_dir", "group", "tcp", "keys"), (str,))
    switches = dict.fromkeys(("lock", "checksums"), (bool,))
    _check(table, {**text, **switches, "linger": (int, float), "datasets": (dict,)}, str(path))
    datasets = table.pop("datasets", {})
    for key in {"shm_dir", "keys"} & table.keys():
        table[key] = os.path.normpath(folder / table[key])
    return FileConfig(tuple(_dataset(name, fields, folder, path) for name, fields in datasets.items()), **table)


def _dataset(name: str, fields: Any, folder: Path, path: Path) -> DatasetConfig:
    where = f"{path}: [datasets.{name}]"
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is a {type(fields).__name__}, expected a table with data = ...")
    kinds: dict[str, tuple[type, ...]] = {"data": (str, list), "dtype": (str,), "columns": (list,), "mode": (str,)}
    kinds |= {"vocab_size": (int,), "decode": (int,), "block_size": (int,), "stride": (int,), "warm": (bool,)}
    _check(fields, kinds, where)
    data = fields.get("data", [])
    data = [data] if isinstance(data, str) else data
    if not data or not all(type(part) is str and part for part in data):
        raise ConfigError(f"{where} needs data = PATH, or a list of paths")
    columns = fields.get("columns")
    if columns is not None and not (columns and all(type(column) is str for column in columns)):
        raise ConfigError(f"{where}: columns must be a list of names, one at least")
    return DatasetConfig(
        name,
        tuple(part if is_remote(part) else os.path.normpath(folder / part) for part in data),
        SourceOptions(
            fields.get("dtype"),
            fields.get("vocab_size"),
            None if columns is None else tuple(columns),
            fields.get("decode"),
        ),
        fields.get("block_size"),
        fields.get("stride"),
        fields.get("mode", "load"),
        fields.get("warm", False),
    )


def _check(table: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], where: str) -> None:
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{where} has the unknown key {key!r}: the keys are {', '.join(sorted(kinds))}")
        if type(value) not in kinds[key]:
            expected = " or ".join(kind.__name__ for kind in kinds[key])
            raise ConfigError(f"{where}: {key} is a {type(value).__name__}, expected {expected}")


def merge_datasets(*parts: Sequence[DatasetConfig]) -> tuple[DatasetConfig, ...]:
    """Return the datasets of all `parts`, in order.

    Raises:
        ConfigError: two have the same name.
    """
    merged: dict[str, DatasetConfig] = {}
    for dataset in (dataset for part in parts for dataset in part):
        if dataset.name in merged:
            raise ConfigError(_named_twice(dataset.name, merged[dataset.name].data, dataset.data))
        merged[dataset.name] = dataset
    return tuple(merged.values())


def group_id(group: str) -> int:
    """Return the id of a group that is given by name or number.

    Raises:
        ConfigError: there is no such group.
    """
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"no group {group!r} on this node: see `getent group`") from None
