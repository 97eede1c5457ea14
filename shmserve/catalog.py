"""The state of every dataset that a daemon serves. The loader's and the watch's threads write it.

A state is immutable and replaced as a whole, so the service reads one moment of a dataset without a lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shmserve_client.errors import DatasetNotFoundError, ShmserveError
from shmserve_client.owned import OwnedSegment
from shmserve_client.records import shown

from .config import DatasetConfig
from .sources import Resolved

__all__ = ["Catalog", "Failed", "Loading", "Ready", "State"]


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


class Catalog:
    """The datasets of one daemon, in the order they were given."""

    def __init__(self, configs: Sequence[DatasetConfig]) -> None:
        self._configs = {config.name: config for config in configs}
        self._states: dict[str, State] = {name: Loading() for name in self._configs}

    def __iter__(self) -> Iterator[tuple[DatasetConfig, State]]:
        return ((config, self._states[name]) for name, config in self._configs.items())

    def put(self, name: str, state: State) -> None:
        """Replace the state of `name`."""
        self._states[name] = state

    def get(self, name: str) -> tuple[DatasetConfig, State]:
        """Return one dataset.

        Raises:
            DatasetNotFoundError: no dataset has that name.
        """
        if name not in self._configs:
            raise DatasetNotFoundError(f"no dataset {shown(name)} here, the daemon serves {', '.join(self._configs)}")
        return self._configs[name], self._states[name]

    def ready(self) -> dict[str, Ready]:
        """Return the datasets that are served, by name."""
        return {name: state for name, state in self._states.items() if isinstance(state, Ready)}

    def failure(self) -> ShmserveError | None:
        """Return why a dataset could not be loaded, None where none failed."""
        return next((state.error for state in self._states.values() if isinstance(state, Failed)), None)
