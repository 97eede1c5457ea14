"""`ShmDataset`: a torch dataset whose samples lie in shared memory, one copy for all processes of the node."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from . import embedded
from .attaching import attach_served
from .batches import BatchedDataset, gather
from .connection import seconds
from .endpoint import find_endpoint
from .errors import BlockSizeError, ConfigError, DatasetClosedError
from .protocol import Attach
from .remote import RemoteOffsets
from .samples import Samples, find_column, open_samples
from .segment import Segment
from .splits import DatasetSplit, split
from .tensors import DtypeOption, OpenColumn, Transform, remote_reader, shared_reader, value_maker

__all__ = ["DatasetInfo", "ShmDataset"]


@dataclass(frozen=True)
class DatasetInfo:
    """What a dataset is, as this process has it open."""

    name: str
    format: str
    num_samples: int
    """`len` of the dataset: windows where block_size is set."""
    stored_samples: int
    """Samples as the source has them; for a stream of tokens, the tokens."""
    dtypes: dict[str, str]
    """What each column holds: the stored dtype, or "bytes", "text" or "object"."""
    arrays: tuple[str, ...]
    """What `array` gives."""
    block_size: int | None
    stride: int | None
    data: tuple[str, ...]
    """The paths of the source."""
    notes: tuple[str, ...]
    """What was assumed while reading it."""
    path: str
    """The segment's file."""
    nbytes: int
    """The size of the segment's file, of which a part is a hole that takes no memory."""
    generation: int
    endpoint: str
    """The socket of the daemon that it was attached at."""


class ShmDataset(Dataset[Any]):
    """A dataset that a daemon of this node serves, indexed like a list; nothing of it is copied into this process.

    A sample is a tensor, or, with several columns, a dict; columns of bytes, text and objects give `bytes`, `str` and
    whatever was stored, as copies. A tensor aliases the shared memory where its dtype is the stored one, and stays
    valid after `close`; what is written to it in place is seen by this process and those that it forks afterwards, by
    no other. The daemon is needed only to attach.

    Pickles, and so copies for DataLoader workers, hold the segment's path rather than its data; they attach when they
    are first used, once per process, without asking the daemon.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        endpoint: str | None = None,
        timeout: float = 30.0,
        columns: Sequence[str] | None = None,
        block_size: int | Literal["served"] | None = "served",
        stride: int | None = None,
        dtype: DtypeOption = None,
        copy: bool | None = None,
        transform: Transform | None = None,
        lookup: Literal["shared", "daemon"] = "shared",
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        """Attach the dataset, waiting while it loads.

        Args:
            name: the dataset's name; may be None where the daemon serves one only.
            endpoint: the daemon's socket, as `ipc:///path`, or `tcp://HOST:PORT`; None looks in `$SHMSERVE_ENDPOINT`,
                else where daemons of this user and of this node listen.
            timeout: seconds that loading may take, and each of the daemon's answers; infinity for no limit.
            columns: the columns that a sample has; None for all. One gives its value, several a dict.
            block_size: None for the stored samples. A number of items B for windows over all items joined: window i is
                `[i * stride, i * stride + B)`, and there are `max(0, (n - B) // stride + 1)`. "served" takes what the
                daemon was started with.
            stride: items from one window to the next; None for block_size.
            dtype: the dtype of tensors. None is the stored one, but int64 for uint16, uint32 and uint64, which torch
                cannot compute with. "stored" is the stored one in any case.
            copy: whether samples are private copies. None copies when there is a transform, which might work in place
                and then see its own work in the next epoch. Where the kernel allows no private writes to the segment
                (vm.overcommit_memory=2), samples are copies always.
            transform: called with each sample; what it returns is the sample.
            lookup: "shared" reads offsets from the segment. "daemon" asks the daemon, once per `__getitems__`.
            keys: for `tcp://`, the directory of this client's keys (`shmserve keys`); None looks in `$SHMSERVE_KEYS`.
                Pickles hold its path.

        Raises:
            DaemonUnreachableError: no daemon listens (at once), or it does not answer in time.
            DatasetNotFoundError: it serves no such dataset, or several and `name` is None.
            DatasetNotReadyError: the dataset still loads after `timeout` seconds.
            DatasetFailedError: the daemon could not load it.
            SegmentNotFoundError: this process sees another shm directory than the daemon.
            BlockSizeError: block_size or stride are impossible, or the data has samples only with a block_size.
            ConfigError: another option is impossible.
        """
        super().__init__()
        if lookup not in ("shared", "daemon"):
            raise ConfigError(f'lookup {lookup!r}: give "shared" or "daemon"')
        timeout = seconds("timeout", timeout)
        self._keys = None if keys is None else os.path.abspath(os.fspath(keys))
        path = find_endpoint(endpoint, timeout)
        attached, segment = attach_served(path, Attach(name), timeout_s=timeout, patience_s=timeout, keys=self._keys)
        if block_size == "served":
            block_size, default_stride = attached.block_size or None, attached.stride or None
            stride = default_stride if stride is None else stride
        self.name: Final = attached.name
        self._endpoint = path
        self._timeout_s = timeout
        self._path = attached.path
        self._nonce = attached.nonce
        self._columns = None if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
        self._block_size = _positive("block_size", block_size)
        self._stride = _positive("stride", stride) or self._block_size
        self._dtype = dtype
        self._copy = copy
        self._transform = transform
        self._lookup = lookup
        self._closed = False
        self._detach()
        self._use(self._open(segment))

    @classmethod
    def from_path(
        cls,
        *data: str | os.PathLike[str],
        stored_dtype: str | None = None,
        vocab_size: int | None = None,
        linger: float = 60.0,
        **options: Any,
    ) -> Self:
        """Return the dataset of these files without a daemon having been started for it.

        It attaches where a daemon of this node serves these files as they are now, whatever paths it was given for
        them: the same files in the same order, with the same `stored_dtype`. Else exactly one of all the processes that
        call this starts a daemon for them, which ends when its last client has been gone for `linger` seconds; the
        others wait. Where items without a header are assumed to be of some dtype, a UserWarning says so.

        Args:
            data: files, directories, globs or prefixes, as `shmserve start --data` takes them, `~` included; the
                shards of one dataset.
            stored_dtype: the items of files without a header, as a numpy name (`--dtype`).
            vocab_size: every token id must be below it (`--vocab-size`). None also accepts data that was checked
                against some vocabulary.
            linger: seconds, five at least.
            options: as the constructor's, other than `name` and `endpoint`. `timeout` does not limit the loading.

        Raises:
            SourceNotFoundError: a file is missing.
            SourceFormatError: a file is of no known format, or the files are not shards of one corpus.
            DaemonStartError: the daemon could not start or load; the message holds its own.
            ShmserveError: as the constructor.
        """
        timeout_s = seconds("timeout", options.get("timeout", 30.0))
        linger = seconds("linger", linger)
        if not isinstance(stored_dtype, str | None):
            raise ConfigError(f"stored_dtype {stored_dtype!r}: give a numpy name such as 'uint16'")
        if vocab_size is not None:
            try:
                vocab_size = operator.index(vocab_size)
            except TypeError:
                raise ConfigError(f"vocab_size {vocab_size!r}: give an integer") from None
        paths = [os.path.expanduser(os.fspath(path)) for path in data]
        served = embedded.serve(paths, stored_dtype, vocab_size, linger_s=linger, timeout_s=timeout_s)
        # `served` holds the segment attached, so that the daemon does not end before the dataset has it, too.
        dataset = cls(served.name, endpoint=served.endpoint, **options)
        if stored_dtype is None and dataset.info.format == "raw":
            for note in dataset.info.notes:
                warnings.warn(f"dataset {dataset.name!r}: {note} (here: stored_dtype=)", stacklevel=2)
        return dataset

    def _detach(self) -> None:
        """Forget what belongs to this process; the length -1 sends every use to where it is attached again."""
        self._length = -1
        self._read: Callable[[int], Any] = _unattached
        self._attached: _Attached | None = None

    def _attach(self) -> _Attached:
        """Return what is attached, after attaching it where it is not. Threads that race here share one segment."""
        if self._closed:
            raise self._closed_error()
        if self._attached is not None:
            return self._attached
        return self._use(self._open(Segment.attach(self._path, self._nonce)))

    def _use(self, attached: _Attached) -> _Attached:
        """Read from `attached` from now on."""
        self._length = -1  # while it changes, every use takes the slow way
        self._attached = attached
        self._read = attached.read
        self._length = attached.samples.count
        return attached

    def _open(self, segment: Segment) -> _Attached:
        """Return the segment opened as this dataset's options say. Nothing has changed where they do not fit it."""
        columns = self._open_columns(segment)
        if self._lookup == "shared":
            return _Attached(segment, columns, shared_reader(columns, self._transform), None, None)
        remote = RemoteOffsets(
            self._endpoint,
            self._timeout_s,
            name=self.name,
            nonce=segment.header.nonce,
            block_size=self._block_size,
            stride=self._stride,
            keys=self._keys,
        )
        read_many = remote_reader(columns, self._transform, remote.extents)
        return _Attached(
            segment, columns, lambda position: read_many(np.array([position], np.int64))[0], remote, read_many
        )

    def refresh(self) -> bool:
        """Move on to what the daemon serves now, and return whether that is another generation than until now.

        Samples that were taken stay valid. Copies in DataLoader workers and in other processes move on when they
        refresh, or are made anew; what was made for the former length, such as a sampler or the parts of `split`, is
        to be made again. Call it where no other thread reads the dataset, as between two epochs.

        Raises:
            DatasetNotFoundError: it was unloaded.
            BlockSizeError: the dataset's options do not fit the new data.
            ConfigError: the same.
            ShmserveError: as the constructor. After any error, the dataset reads on as before.
        """
        if self._closed:
            raise self._closed_error()
        served, segment = attach_served(
            self._endpoint,
            Attach(self.name),
            timeout_s=self._timeout_s,
            patience_s=self._timeout_s,
            keys=self._keys,
        )
        if served.nonce == self._nonce:
            return False
        former, attached = self._attached, self._open(segment)
        self._path, self._nonce = served.path, served.nonce
        self._use(attached)
        if former is not None and former.remote is not None:
            former.remote.close()
        return True

    def _open_columns(self, segment: Segment) -> dict[str, OpenColumn]:
        description = segment.description
        names = [column.name for column in description.columns] if self._columns is None else self._columns
        if not names:
            raise ConfigError("columns is empty: name one at least, or give None for all")
        if self._block_size and len(names) > 1:
            raise BlockSizeError(
                f"block_size {self._block_size} with the columns {', '.join(names)}: windows are over one column, "
                "name it in columns="
            )
        private = self._copy is True or (self._copy is None and self._transform is not None) or not segment.writable
        opened = {}
        for name in names:
            samples = open_samples(
                description, segment.array, column=name, block_size=self._block_size, stride=self._stride
            )
            opened[name] = OpenColumn(samples, value_maker(samples.column, self._dtype, private=private))
        return opened

    def __len__(self) -> int:
        return self._length if self._length >= 0 else self._attach().samples.count

    def __getitem__(self, index: Any) -> Any:
        """Return sample `index`, or a list of samples for a slice.

        Args:
            index: any integer, 0-d arrays and tensors included, negative ones counted from the end; or a slice.

        Raises:
            SampleIndexError: no sample has that index.
            SampleTypeError: it is not an integer.
            SampleValueError: a stored value does not fit the dtype.
            SegmentFormatError: the segment's offsets are damaged there.
            DatasetClosedError: after `close`.
        """
        if index.__class__ is int and 0 <= index < self._length:
            return self._read(index)
        samples = self._attach().samples
        if isinstance(index, slice):
            return self.__getitems__(samples.span(index))
        return self._read(samples.position(index))

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """Return the list of these samples, as DataLoader asks for a batch. Raises as `__getitem__`."""
        attached = self._attach()
        positions = attached.samples.positions(indices)
        if type(self).__getitem__ is not ShmDataset.__getitem__:  # a subclass's samples are what it makes of ours
            return [self[position] for position in positions.tolist()]
        if attached.read_many is not None:
            return attached.read_many(positions)
        read = self._read
        return [read(position) for position in positions.tolist()]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def batch(
        self,
        indices: Iterable[Any],
        length: int | None = None,
        pad: Any = 0,
        dtype: DtypeOption = None,
        out: Any = None,
    ) -> Any:
        """Return samples as one `Batch`, or, with several columns, a dict of them: copies, made without one per sample.

        Where samples differ in length, and for windows, `values` is n x length x the other extents, which must agree
        within the batch. Where all have one shape it is n x that shape. Bytes, text and objects are a list.

        Args:
            indices: as `__getitems__` takes them.
            length: where samples are cut, and up to which they are padded, along their first axis. None is the longest
                of the batch, or what `out` has. Columns of one shape are left as they are.
            pad: the number to pad with.
            dtype: the dtype of `values`. None is the dtype that the dataset was opened with; without one, int64 for
                integers, and the stored dtype for all others. "stored" is the stored one in any case.
            out: a contiguous CPU tensor of that dtype, with n rows or more, or a dict of them; `values` is a view of
                its first n rows. It shares no memory with samples, which it would overwrite.

        Raises:
            ConfigError: an option is impossible for this data, or the dataset has a transform or a `__getitem__` of a
                subclass.
            SampleIndexError: no sample has one of the indices.
            SampleTypeError: they are not integers.
            SampleValueError: a stored value does not fit the dtype.
            SegmentFormatError: the segment's offsets are damaged there.
            DatasetClosedError: after `close`.
        """
        attached = self._attach()
        if self._transform is not None:
            raise ConfigError(f"dataset {self.name!r} has a transform, which works on samples: batch one without it")
        if type(self).__getitem__ is not ShmDataset.__getitem__:  # whose samples are not those of the segment
            raise ConfigError(
                f"{type(self).__name__} makes samples of its own, which a batch is gathered without: override batch(), "
                "or batch a ShmDataset"
            )
        return gather(
            attached.columns,
            attached.samples.positions(indices),
            Samples.ranges if attached.remote is None else attached.remote.ranges,
            length=length,
            pad=pad,
            dtype=self._dtype if dtype is None else dtype,
            out=out,
        )

    def batched(self, length: int | None = None, pad: Any = 0, dtype: DtypeOption = None) -> BatchedDataset:
        """Return a view of this dataset that gives a DataLoader whole batches, made by `batch` with these options.

        `DataLoader(view, batch_size=64, collate_fn=view.collate_fn)`; `BatchLoader(view, 64)`.

        Raises:
            ConfigError: an option is impossible for this data, or the dataset has a transform.
        """
        return BatchedDataset(self, length, pad, dtype)

    def split(self, lengths: Sequence[float], seed: int = 0) -> list[DatasetSplit]:
        """Return disjoint random parts that together are this dataset, whatever its length in O(1) memory.

        The same seed gives the same parts in every process and run. Windows that overlap, because their stride is less
        than their block_size, share items across parts.

        Args:
            lengths: fractions that sum to 1, or counts that sum to `len`. As for torch's `random_split`, fractions are
                rounded down, and what is left goes to the parts in turn.
            seed: any integer.

        Raises:
            ConfigError: the lengths are neither.
        """
        return split(self, lengths, seed)

    def lookup(self, indices: ArrayLike, column: str | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where samples lie: (offsets, nbytes), in bytes from the segment's start, each int64 of shape (n,).

        Of values that stay in files (`--mode map`) the offsets count from where the first of these starts.

        Args:
            indices: 1-d integers, as `__getitem__` takes them.
            column: the column; may be None where samples have only one.

        Raises:
            SampleIndexError: no sample has one of the indices.
            SampleTypeError: they are not integers.
        """
        attached = self._attach()
        names = [column] if column is not None else list(attached.columns)
        if len(names) != 1 or names[0] not in attached.columns:
            raise ConfigError(f"column {column!r}: samples have {', '.join(attached.columns)}, name one of them")
        samples = attached.columns[names[0]].samples
        positions = samples.positions(indices)
        return samples.extents(positions) if attached.remote is None else attached.remote.extents(samples, positions)

    def column(self, name: str | None = None) -> NDArray[Any] | Samples:
        """Return a stored column without torch, dtype or block_size: views of the segment, valid also after `close`.

        A column of one shape is one array, its first axis the samples. A ragged one is indexed like a list of arrays;
        its parts are `values`, `starts` and `stops` (int64, in items) and, for N-d samples, `shapes` and
        `shape_offsets`; where each sample starts where the one before stops, `offsets` are all n+1 of both.

        Raises:
            ConfigError: there is no such column, or several and `name` is None.
        """
        segment = self._attach().segment
        found = find_column(segment.description, name)
        return (
            segment.array(found.values)
            if found.offsets is None
            else open_samples(segment.description, segment.array, column=found.name)
        )

    def array(self, name: str) -> NDArray[Any]:
        """Return an array of the dataset rather than of a sample, such as Megatron's `document_indices`, as a view.

        Raises:
            ConfigError: there is none of that name.
        """
        segment = self._attach().segment
        arrays = segment.description.arrays
        if name not in arrays:
            raise ConfigError(f"dataset {self.name!r} has no array {name!r}: it has {', '.join(arrays) or 'none'}")
        return segment.array(arrays[name])

    @property
    def info(self) -> DatasetInfo:
        """What the dataset is: its source, sizes and options."""
        attached = self._attach()
        description = attached.segment.description
        return DatasetInfo(
            name=self.name,
            format=description.format,
            num_samples=attached.samples.count,
            stored_samples=description.num_samples,
            dtypes={
                column.name: column.values.dtype if column.kind == "tensor" else column.kind
                for column in description.columns
            },
            arrays=tuple(description.arrays),
            block_size=self._block_size or None,
            stride=self._stride or None,
            data=description.source.data,
            notes=description.notes,
            path=self._path,
            nbytes=attached.segment.header.total_nbytes,
            generation=attached.segment.header.generation,
            endpoint=self._endpoint,
        )

    def close(self) -> None:
        """Let go of the segment and of the daemon; idempotent. Samples that were taken stay valid."""
        self._closed = True
        if self._attached is not None and self._attached.remote is not None:
            self._attached.remote.close()
        self._detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _closed_error(self) -> DatasetClosedError:
        return DatasetClosedError(f"dataset {self.name!r} is closed: make a new ShmDataset({self.name!r})")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_length": -1, "_read": _unattached, "_attached": None}

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not attached yet" if self._length < 0 else f"{self._length} samples"
        return f"{type(self).__name__}({self.name!r}, {state})"


@dataclass(frozen=True)
class _Attached:
    """What a dataset holds of this process; never pickled."""

    segment: Segment
    columns: dict[str, OpenColumn]
    read: Callable[[int], Any]
    remote: RemoteOffsets | None
    read_many: Callable[[NDArray[np.int64]], list[Any]] | None

    @property
    def samples(self) -> Samples:
        """The first column's, which has as many as any other."""
        return next(iter(self.columns.values())).samples


def _unattached(position: int) -> Any:
    raise AssertionError("read before attaching")


def _positive(name: str, value: object) -> int:
    """Return `value` as a positive integer, or 0 for None."""
    if value is None:
        return 0
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whatever a caller gives
    except TypeError:
        number = 0
    if not 1 <= number < 1 << 62:
        raise BlockSizeError(f"{name} {value!r} is not a positive number of items below 2^62")
    return number
