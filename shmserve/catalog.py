"""The state of every dataset that a daemon serves. The server's, the loader's and the watch's threads write it.

A state is immutable and replaced as a whole, so the service reads one moment of a dataset without a lock. Who writes
names the dataset by its very configuration object: what was unloaded, and perhaps loaded anew under the same name, is
another one, and late news of the first is not taken for the second's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shmserve_client.errors import ConfigError, DatasetNotFoundError, ShmserveError
from shmserve_client.locks import attached_processes
from shmserve_client.owned import OwnedSegment
from shmserve_client.records import shown

from .config import DatasetConfig
from .sources import Resolved

__all__ = ["Catalog", "Entry", "Failed", "Loading", "Ready", "State"]


@dataclass(frozen=True, slots=True)
class Loading:
    """On its way: `done_nbytes` of `total_nbytes` are in shared memory. The total is 0 until the index is read.

    `key` is the source's (`Resolved.key`), empty until its files are found.
    """

    format: str = ""
    done_nbytes: int = 0
    total_nbytes: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Served from `segment`, which holds what `resolved` named when it was loaded."""

    segment: OwnedSegment
    resolved: Resolved
    adopted: bool
    load_seconds: float
    source_changed: bool = False
    """Whether the files were no longer those when somebody last looked."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Could not be loaded."""

    error: ShmserveError


State: TypeAlias = Loading | Ready | Failed


@dataclass(frozen=True, slots=True)
class Entry:
    """One dataset: what was asked for and what became of it."""

    config: DatasetConfig
    state: State = Loading()
    successor: Loading | Failed | None = None
    """The next generation, while it loads or after it failed; `state` is served all the same."""


class Catalog:
    """The datasets of one daemon, in the order they were given, and the segments that were replaced and are still read.

    Attributes:
        retired: segments of former generations and of unloaded datasets. Only the server's thread closes them.
    """

    def __init__(self, configs: Sequence[DatasetConfig]) -> None:
        self._lock = threading.Lock()  # for those who write
        self._entries = {config.name: Entry(config) for config in configs}  # replaced as a whole, never changed
        self.retired: tuple[OwnedSegment, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, name: str) -> Entry:
        """Return one dataset.

        Raises:
            DatasetNotFoundError: no dataset has that name.
        """
        entries = self._entries
        if name not in entries:
            served = f"the daemon serves {', '.join(entries)}" if entries else "the daemon serves none"
            raise DatasetNotFoundError(f"no dataset {shown(name)} here, {served}")
        return entries[name]

    def add(self, config: DatasetConfig) -> None:
        """Add a dataset that is about to be loaded, also in the place of one that could not be.

        Raises:
            ConfigError: its name is taken.
        """
        with self._lock:
            present = self._entries.get(config.name)
            if present is not None and not isinstance(present.state, Failed):
                raise ConfigError(
                    f"a dataset {config.name!r} is here already: `shmserve reload` reads its files again, and after "
                    "`shmserve unload` another can have its name"
                )
            self._entries = {**self._entries, config.name: Entry(config)}

    def remove(self, config: DatasetConfig) -> None:
        """Serve the dataset no longer; its segment, if it has one, is retired."""
        with self._lock:
            entry = self._find(config)
            if entry is not None:
                self._retire(entry.state)
                self._entries = {name: other for name, other in self._entries.items() if other is not entry}

    def put(self, config: DatasetConfig, state: State) -> bool:
        """Replace the dataset's state and end its reload. Of two segments the first is retired.

        Returns whether the dataset is still here; if not, nothing has happened.
        """
        with self._lock:
            entry = self._find(config)
            if entry is None:
                return False
            self._retire(entry.state)
            self._store(Entry(entry.config, state))
            return True

    def put_successor(self, config: DatasetConfig, successor: Loading | Failed) -> bool:
        """Say how far a reload has come. Returns whether the dataset is still here, as `put`."""
        with self._lock:
            entry = self._find(config)
            if entry is None:
                return False
            self._store(replace(entry, successor=successor))
            return True

    def mark_changed(self, ready: Ready, changed: bool) -> None:
        """Say of the files of `ready` whether they have changed, if it is still what is served."""
        with self._lock:
            for entry in self._entries.values():
                if entry.state is ready:
                    self._store(replace(entry, state=replace(ready, source_changed=changed)))
                    break

    def _find(self, config: DatasetConfig) -> Entry | None:
        entry = self._entries.get(config.name)
        return entry if entry is not None and entry.config is config else None

    def _store(self, entry: Entry) -> None:
        self._entries = {**self._entries, entry.config.name: entry}

    def _retire(self, state: State) -> None:
        if isinstance(state, Ready):
            self.retired = (*self.retired, state.segment)

    def release_retired(self) -> None:
        """Remove the retired segments that no process has attached any more, and so give their memory back."""
        unread = [segment for segment in self.retired if not attached_processes(segment.fd)]
        if unread:
            with self._lock:
                self.retired = tuple(segment for segment in self.retired if segment not in unread)
            for segment in unread:
                segment.unlink()
                segment.close()

    def ready(self) -> dict[str, Ready]:
        """Return the datasets that are served, by name."""
        return {name: entry.state for name, entry in self._entries.items() if isinstance(entry.state, Ready)}

    def failure(self) -> ShmserveError | None:
        """Return why a dataset could not be loaded, None where none failed."""
        return next((entry.state.error for entry in self if isinstance(entry.state, Failed)), None)
