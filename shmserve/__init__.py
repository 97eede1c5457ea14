"""shmserve: one copy of a training dataset per node, in shared memory, for every rank and DataLoader worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmserve_client.version import __version__

if TYPE_CHECKING:
    from shmserve_client import BatchLoader, DistributedSampler, ShmDataset

__all__ = ["BatchLoader", "DistributedSampler", "ShmDataset", "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import shmserve_client

        return getattr(shmserve_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
