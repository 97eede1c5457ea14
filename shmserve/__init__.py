"""shmserve: one copy of a training dataset per node, in shared memory, for every rank and DataLoader worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmserve_client.version import __version__

if TYPE_CHECKING:
    from shmserve_client import ShmDataset

__all__ = ["ShmDataset", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "ShmDataset":
        import shmserve_client

        return shmserve_client.ShmDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
