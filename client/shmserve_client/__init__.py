"""The client of shmserve: `ShmDataset`, what trains on it, errors. Importing this imports neither torch nor ZeroMQ."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AlreadyRunningError,
    BlockSizeError,
    ConfigError,
    DaemonStartError,
    DaemonUnreachableError,
    DatasetClosedError,
    DatasetFailedError,
    DatasetNotFoundError,
    DatasetNotReadyError,
    EndpointError,
    ObjectError,
    OutOfSharedMemoryError,
    ProtocolError,
    SampleIndexError,
    SampleTypeError,
    SampleValueError,
    SegmentFormatError,
    SegmentNotFoundError,
    ShmserveError,
    SourceFormatError,
    SourceNotFoundError,
    VocabularyError,
)
from .version import __version__

if TYPE_CHECKING:
    from .batch_loader import BatchLoader
    from .batches import Batch, BatchedDataset
    from .dataset import DatasetInfo, ShmDataset
    from .monitor import MemoryMonitor
    from .publishing import publish, shared_array
    from .sampler import DistributedSampler
    from .shared_list import SharedList
    from .splits import DatasetSplit

__all__ = [
    "AlreadyRunningError",
    "Batch",
    "BatchLoader",
    "BatchedDataset",
    "BlockSizeError",
    "ConfigError",
    "DaemonStartError",
    "DaemonUnreachableError",
    "DatasetClosedError",
    "DatasetFailedError",
    "DatasetInfo",
    "DatasetNotFoundError",
    "DatasetNotReadyError",
    "DatasetSplit",
    "DistributedSampler",
    "EndpointError",
    "MemoryMonitor",
    "ObjectError",
    "OutOfSharedMemoryError",
    "ProtocolError",
    "SampleIndexError",
    "SampleTypeError",
    "SampleValueError",
    "SegmentFormatError",
    "SegmentNotFoundError",
    "SharedList",
    "ShmDataset",
    "ShmserveError",
    "SourceFormatError",
    "SourceNotFoundError",
    "VocabularyError",
    "__version__",
    "publish",
    "shared_array",
]


_ON_FIRST_USE = {
    "Batch": ".batches",
    "BatchLoader": ".batch_loader",
    "BatchedDataset": ".batches",
    "DatasetInfo": ".dataset",
    "DatasetSplit": ".splits",
    "DistributedSampler": ".sampler",
    "MemoryMonitor": ".monitor",
    "SharedList": ".shared_list",
    "ShmDataset": ".dataset",
    "publish": ".publishing",
    "shared_array": ".publishing",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_ON_FIRST_USE[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"{name} needs torch: pip install 'shmserve[torch]'", name="torch") from error
