"""The client of shmserve: `ShmDataset`, and the errors it raises. Importing this imports neither torch nor ZeroMQ."""

from __future__ import annotations

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
    from .dataset import DatasetInfo, ShmDataset

__all__ = [
    "AlreadyRunningError",
    "BlockSizeError",
    "ConfigError",
    "DaemonStartError",
    "DaemonUnreachableError",
    "DatasetClosedError",
    "DatasetFailedError",
    "DatasetInfo",
    "DatasetNotFoundError",
    "DatasetNotReadyError",
    "EndpointError",
    "OutOfSharedMemoryError",
    "ProtocolError",
    "SampleIndexError",
    "SampleTypeError",
    "SampleValueError",
    "SegmentFormatError",
    "SegmentNotFoundError",
    "ShmDataset",
    "ShmserveError",
    "SourceFormatError",
    "SourceNotFoundError",
    "VocabularyError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ("DatasetInfo", "ShmDataset"):
        from . import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
