"""What the owner can change in a running daemon: the datasets that it serves."""

from __future__ import annotations

import os

from shmserve_client.errors import ConfigError, DatasetNotReadyError
from shmserve_client.protocol import Accepted, Load, Reload, Unload
from shmserve_client.urls import is_remote

from .catalog import Catalog, Failed, Loading, Ready
from .config import DatasetConfig
from .loader import Loader
from .sources.base import SourceOptions

__all__ = ["Management"]


class Management:
    """Load, reload and unload, for the owner's requests. Nothing here waits: the loader's thread does the work."""

    def __init__(self, catalog: Catalog, loader: Loader) -> None:
        """Change what is in `catalog` by way of `loader`."""
        self._catalog = catalog
        self._loader = loader

    def obey(self, request: Load | Reload | Unload) -> Accepted:
        """Return what was begun.

        Raises:
            ConfigError: the new dataset's options are impossible, or its name is taken.
            DatasetNotFoundError: there is none of that name.
            DatasetNotReadyError: it is still loading, or loading again.
        """
        match request:
            case Load():
                return self._load(request)
            case Reload(name):
                return self._reload(name)
            case Unload(name):
                return self._unload(name)

    def _load(self, request: Load) -> Accepted:
        if not request.data or not all(os.path.isabs(path) or is_remote(path) for path in request.data):
            raise ConfigError(f"dataset {request.name!r}: its data must be absolute paths, one at least")
        config = DatasetConfig(
            request.name,
            tuple(request.data),
            SourceOptions(
                request.dtype,
                request.vocab_size,
                None if request.columns is None else tuple(request.columns),
                request.decode,
            ),
            request.block_size,
            request.stride,
            request.mode,
            request.warm,
        )
        self._catalog.add(config)
        self._loader.load(config)
        return Accepted(config.name, 1)

    def _reload(self, name: str) -> Accepted:
        entry = self._catalog.get(name)
        if entry.config.mode == "adopt":
            raise ConfigError(f"dataset {name!r} was published by training code: publish it there again")
        if isinstance(entry.state, Loading) or isinstance(entry.successor, Loading):
            raise DatasetNotReadyError(f"dataset {name!r} is being loaded: wait until `shmserve status` says ready")
        if isinstance(entry.state, Failed):
            self._catalog.put(entry.config, Loading())
            self._loader.load(entry.config)
            return Accepted(name, 1)
        self._catalog.put_successor(entry.config, Loading())
        self._loader.reload(entry.config, entry.state.segment)
        return Accepted(name, entry.state.segment.generation + 1)

    def _unload(self, name: str) -> Accepted:
        entry = self._catalog.get(name)
        self._loader.withdraw(entry.config)
        self._catalog.remove(entry.config)
        return Accepted(name, entry.state.segment.generation if isinstance(entry.state, Ready) else 0)
