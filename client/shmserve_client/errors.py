"""Every error that shmserve raises, as one tree.

Each class also derives from the builtin that a caller would expect, and each message is one line: what went wrong, the
values, the remedy.

    ShmserveError
    ├── DaemonUnreachableError      (ConnectionError)    no daemon answered at the endpoint in time
    ├── DaemonStartError            (RuntimeError)       a daemon could not start
    │   └── AlreadyRunningError                          another daemon holds this endpoint
    ├── EndpointError               (ValueError)         the endpoint's address or directory cannot be used
    ├── ProtocolError               (ValueError)         a message is malformed, too large or of another version
    ├── DatasetNotFoundError        (LookupError)        no dataset of that name, or several and none was named
    ├── DatasetNotReadyError        (TimeoutError)       the dataset is still loading
    ├── DatasetFailedError          (RuntimeError)       the daemon could not load the dataset
    ├── DatasetClosedError          (ValueError)         used after close()
    ├── SampleIndexError            (IndexError)         no sample has that index
    ├── SampleTypeError             (TypeError)          an index is not an integer or a slice
    ├── SampleValueError            (ValueError)         a stored value does not fit the dtype asked for
    ├── BlockSizeError              (ValueError)         block_size or stride is missing or does not fit the data
    ├── ConfigError                 (ValueError)         options or the configuration file contradict each other
    ├── SegmentFormatError          (ValueError)         the bytes are not a segment that this version reads
    ├── SegmentNotFoundError        (FileNotFoundError)  the segment is gone, or this is another shm directory
    ├── SourceNotFoundError         (FileNotFoundError)  a file of the corpus does not exist
    ├── SourceFormatError           (ValueError)         a file is not what its format says, or is not supported
    │   └── VocabularyError                              a token id lies outside the vocabulary
    ├── ObjectError                 (TypeError)          a Python value that cannot be stored
    └── OutOfSharedMemoryError      (OSError)            the segment does not fit into memory

Codes travel on the wire, classes live at the two ends, and `ERROR_CLASSES` is built from the classes.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ERROR_CLASSES",
    "AlreadyRunningError",
    "BlockSizeError",
    "ConfigError",
    "DaemonStartError",
    "DaemonUnreachableError",
    "DatasetClosedError",
    "DatasetFailedError",
    "DatasetNotFoundError",
    "DatasetNotReadyError",
    "EndpointError",
    "ObjectError",
    "OutOfSharedMemoryError",
    "ProtocolError",
    "SampleIndexError",
    "SampleTypeError",
    "SampleValueError",
    "SegmentFormatError",
    "SegmentNotFoundError",
    "ShmserveError",
    "SourceFormatError",
    "SourceNotFoundError",
    "VocabularyError",
    "printable",
]


def printable(text: str) -> str:
    r"""Return the text as part of one line of valid UTF-8: a newline in a file's name is `\n`, an odd byte `\udcff`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class ShmserveError(Exception):
    """The root of the tree; its one argument is the message, which `str` makes printable."""

    code: ClassVar[str] = "failed"

    def __str__(self) -> str:
        return printable(super().__str__())


class DaemonUnreachableError(ShmserveError, ConnectionError):
    """No daemon answered at the endpoint in time."""

    code = "daemon-unreachable"


class DaemonStartError(ShmserveError, RuntimeError):
    """A daemon could not start."""

    code = "daemon-start"


class AlreadyRunningError(DaemonStartError):
    """Another daemon holds this endpoint."""

    code = "already-running"


class EndpointError(ShmserveError, ValueError):
    """The endpoint's address or directory cannot be used."""

    code = "endpoint"


class ProtocolError(ShmserveError, ValueError):
    """A message is malformed, too large or of another version."""

    code = "protocol"


class DatasetNotFoundError(ShmserveError, LookupError):
    """No dataset of that name is served, or several are and none was named."""

    code = "dataset-not-found"


class DatasetNotReadyError(ShmserveError, TimeoutError):
    """The dataset is still loading."""

    code = "dataset-not-ready"


class DatasetFailedError(ShmserveError, RuntimeError):
    """The daemon could not load the dataset; the message holds the loader's own."""

    code = "dataset-failed"


class DatasetClosedError(ShmserveError, ValueError):
    """A dataset was used after its close()."""

    code = "dataset-closed"


class SampleIndexError(ShmserveError, IndexError):
    """No sample has that index."""

    code = "sample-index"


class SampleTypeError(ShmserveError, TypeError):
    """An index is not an integer or a slice of integers."""

    code = "sample-type"


class SampleValueError(ShmserveError, ValueError):
    """A stored value does not fit the dtype asked for."""

    code = "sample-value"


class BlockSizeError(ShmserveError, ValueError):
    """block_size or stride is missing, not positive, or does not fit the data."""

    code = "block-size"


class ConfigError(ShmserveError, ValueError):
    """Options or the configuration file are wrong or contradict each other."""

    code = "config"


class SegmentFormatError(ShmserveError, ValueError):
    """The bytes are not a segment that this version reads."""

    code = "segment-format"


class SegmentNotFoundError(ShmserveError, FileNotFoundError):
    """The segment is gone, or this process sees another shm directory than the daemon."""

    code = "segment-not-found"


class SourceNotFoundError(ShmserveError, FileNotFoundError):
    """A file of the corpus does not exist."""

    code = "source-not-found"


class SourceFormatError(ShmserveError, ValueError):
    """A file is not what its format says it is, or its format is not supported."""

    code = "source-format"


class VocabularyError(SourceFormatError):
    """A token id lies outside the vocabulary that was declared."""

    code = "vocabulary"


class ObjectError(ShmserveError, TypeError):
    """A Python value that cannot be stored; the message holds the path to it."""

    code = "object"


class OutOfSharedMemoryError(ShmserveError, OSError):
    """The segment does not fit into the shm directory, the memory or the cgroup's limit."""

    code = "out-of-shared-memory"


def _by_code(root: type[ShmserveError]) -> dict[str, type[ShmserveError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_by_code(child))
    return found


ERROR_CLASSES: dict[str, type[ShmserveError]] = _by_code(ShmserveError)
"""From the code on the wire to the class that a client raises for it."""
