"""What the daemon answers: request -> reply, a function of the catalog alone. No socket is known here."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Final, assert_never

import numpy as np

from shmserve_client.admission import file_system_of
from shmserve_client.errors import (
    BlockSizeError,
    DatasetFailedError,
    DatasetNotFoundError,
    DatasetNotReadyError,
    ProtocolError,
    SegmentNotFoundError,
    ShmserveError,
)
from shmserve_client.locks import attached_processes
from shmserve_client.owned import OwnedSegment
from shmserve_client.protocol import (
    MAX_INDICES,
    Attach,
    Attached,
    Datasets,
    DatasetStatus,
    Hello,
    List,
    Lookup,
    Offsets,
    Reply,
    Request,
    RetiredSegment,
    Status,
    StatusReport,
    Welcome,
    failure_from,
)
from shmserve_client.urls import without_secrets
from shmserve_client.version import __version__

from .catalog import Catalog, Entry, Failed, Loading, Ready
from .text import percent, size

__all__ = ["Service", "private_nbytes"]

_IN_MEMORY: Final = ("tmpfs", "ramfs")


class Service:
    """The answers of one daemon, whose socket is at `endpoint` and whose segments are in `shm_dir`."""

    def __init__(self, catalog: Catalog, *, endpoint: str, shm_dir: str) -> None:
        self._catalog = catalog
        self.tcp_endpoint = ""
        """Where clients are answered as well, as `tcp://HOST:PORT`."""
        self._endpoint = endpoint
        self._shm_dir = shm_dir
        self._disk_note = _disk_note(shm_dir)
        self._started_s = time.monotonic()

    def reply(self, request: Request) -> Reply:
        """Return the reply to `request`: a Failure where it cannot be had."""
        try:
            match request:
                case Hello():
                    return Welcome(__version__, os.getpid(), os.geteuid())
                case List():
                    return Datasets([entry.config.name for entry in self._catalog])
                case Attach():
                    return self._attach(request)
                case Lookup():
                    return self._look_up(request)
                case Status(name):
                    return self.status(name)
                case _:
                    assert_never(request)
        except ShmserveError as error:
            return failure_from(error)

    def _attach(self, request: Attach) -> Attached:
        entry = self._find(request)
        config, ready = entry.config, _served(entry)
        segment = ready.segment
        return Attached(
            config.name, segment.open_path(), segment.header.nonce, config.block_size or 0, config.stride or 0
        )

    def _find(self, request: Attach) -> Entry:
        """Return the dataset that fits both the name and the source key, each where it is given."""
        named = list(self._catalog) if request.name is None else [self._catalog.get(request.name)]
        if request.source_key is not None:
            fitting = [entry for entry in named if _is_of(entry, request)]
            if not fitting:
                raise DatasetNotFoundError("no dataset of those files, as they are now, is served here")
            return fitting[0]
        if len(named) != 1:
            names = ", ".join(entry.config.name for entry in named)
            several = f"several datasets are served here, name one of them: {names}"
            raise DatasetNotFoundError(several if named else "no dataset is served here: `shmserve load` adds one")
        return named[0]

    def _look_up(self, request: Lookup) -> Offsets:
        segment = self._segment_of(request)
        if len(request.indices) % 8 or len(request.indices) > MAX_INDICES * 8:
            raise ProtocolError(
                f"lookup of {len(request.indices)} bytes of indices: they are int64, at most {MAX_INDICES} of them"
            )
        if max(request.block_size, request.stride) >= 1 << 62:
            raise BlockSizeError(f"block_size {request.block_size} or stride {request.stride} is not below 2^62")
        samples = segment.samples(request.column, request.block_size, request.stride)
        offsets, nbytes = samples.extents(np.frombuffer(request.indices, "<i8"))
        return Offsets(offsets.astype("<i8", copy=False).tobytes(), nbytes.astype("<i8", copy=False).tobytes())

    def _segment_of(self, request: Lookup) -> OwnedSegment:
        """Return the segment that the client reads: the served one or, for as long as it is read, a former one."""
        if request.nonce:
            for segment in self._catalog.retired:
                if segment.header.nonce == request.nonce:
                    return segment
        segment = _served(self._catalog.get(request.name)).segment
        if request.nonce not in (b"", segment.header.nonce):
            raise SegmentNotFoundError(
                f"the daemon has another segment of dataset {request.name!r} than the client: open the dataset again"
            )
        return segment

    def status(self, name: str | None = None) -> StatusReport:
        """Return the daemon and its datasets as they are now, or the one called `name`.

        Raises:
            DatasetNotFoundError: no dataset has that name.
        """
        chosen = list(self._catalog) if name is None else [self._catalog.get(name)]
        return StatusReport(
            daemon_version=__version__,
            pid=os.getpid(),
            endpoint=self._endpoint,
            tcp_endpoint=self.tcp_endpoint,
            shm_dir=self._shm_dir,
            uptime_seconds=time.monotonic() - self._started_s,
            private_nbytes=private_nbytes(),
            datasets=[_status(entry, self._disk_note) for entry in chosen],
            retired=[
                _retired_status(segment)
                for segment in self._catalog.retired
                if name is None or segment.description.name == name
            ],
        )


def _is_of(entry: Entry, request: Attach) -> bool:
    """Return whether the dataset is of the source that `request` asks for, checked as it wants it."""
    config, state = entry.config, entry.state
    key = state.resolved.key if isinstance(state, Ready) else state.key if isinstance(state, Loading) else ""
    return key != "" and key == request.source_key and request.vocab_size in (None, config.options.vocab_size)


def _served(entry: Entry) -> Ready:
    name = entry.config.name
    match entry.state:
        case Loading(_, done_nbytes, total_nbytes):
            done = f"{size(done_nbytes)} of {size(total_nbytes)}, {percent(done_nbytes, total_nbytes)} %"
            progress = done if total_nbytes else "its index is being read"
            raise DatasetNotReadyError(f"dataset {name!r} is still loading ({progress})")
        case Failed(error):
            raise DatasetFailedError(f"dataset {name!r} could not be loaded: {error}")
        case Ready() as ready:
            return ready
        case _:
            assert_never(entry.state)


def _status(entry: Entry, disk_note: str) -> DatasetStatus:
    config = entry.config
    status = DatasetStatus(
        name=config.name,
        data=list(map(without_secrets, config.data)),
        block_size=config.block_size or 0,
        stride=config.stride or 0,
    )
    match entry.state:
        case Loading(format_name, done_nbytes, total_nbytes):
            return replace(status, format=format_name, segment_nbytes=total_nbytes, loaded_nbytes=done_nbytes)
        case Failed(error):
            return replace(status, state="failed", error=str(error))
        case Ready() as ready:
            return _with_successor(_with_segment(status, ready, disk_note), entry.successor)
        case _:
            assert_never(entry.state)


def _with_segment(status: DatasetStatus, ready: Ready, disk_note: str) -> DatasetStatus:
    segment = ready.segment
    description = segment.description
    memory_nbytes = _memory_nbytes(segment)
    here, elsewhere = _attached(segment)
    return replace(
        status,
        state="ready",
        format=description.format,
        num_samples=description.num_samples,
        stream=description.stream,
        segment_nbytes=memory_nbytes,
        loaded_nbytes=memory_nbytes,
        huge_nbytes=0 if disk_note else segment.huge_nbytes,
        path=segment.open_path(),
        generation=segment.generation,
        adopted=ready.adopted,
        load_seconds=ready.load_seconds,
        source_changed=ready.source_changed,
        attached_pids=here,
        attached_elsewhere=elsewhere,
        notes=[*description.notes, *_segment_notes(segment, disk_note)],
    )


def _with_successor(status: DatasetStatus, successor: Loading | Failed | None) -> DatasetStatus:
    match successor:
        case None:
            return status
        case Loading(_, done_nbytes, total_nbytes):
            return replace(status, reload_state="loading", reload_loaded_nbytes=done_nbytes, reload_nbytes=total_nbytes)
        case Failed(error):
            return replace(status, reload_state="failed", reload_error=str(error))


def _retired_status(segment: OwnedSegment) -> RetiredSegment:
    here, elsewhere = _attached(segment)
    return RetiredSegment(
        name=segment.description.name,
        generation=segment.generation,
        path=segment.open_path(),
        segment_nbytes=_memory_nbytes(segment),
        attached_pids=here,
        attached_elsewhere=elsewhere,
    )


def _memory_nbytes(segment: OwnedSegment) -> int:
    """Return the memory that a segment takes: not the file's size, since the gap before its data is a hole."""
    return os.fstat(segment.fd).st_blocks * 512


def _attached(segment: OwnedSegment) -> tuple[list[int], int]:
    """Return the pids in this pid namespace that have the segment attached, and how many processes of others do."""
    attached = attached_processes(segment.fd)
    pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    here = [process.pid for process in attached if process.pid_namespace == pid_namespace]
    return here, len(attached) - len(here)


def _segment_notes(segment: OwnedSegment, disk_note: str) -> list[str]:
    """Return what to know about the segment, for people."""
    return [note for note in (_mapped_note(segment), segment.huge_refusal, disk_note, _vanished_note(segment)) if note]


def _mapped_note(segment: OwnedSegment) -> str:
    files = segment.description.files
    if not files:
        return ""
    nbytes, them = sum(file.nbytes for file in files), "file" if len(files) == 1 else "files"
    return (
        f"{size(nbytes)} are mapped from {len(files)} {them}, which must not change: pages are read from there as they "
        "are needed"
    )


def _vanished_note(segment: OwnedSegment) -> str:
    if segment.name_exists():
        return ""
    return (
        f"{segment.path} was removed from under the daemon (systemd does so at logout, see RemoveIPC= in logind.conf): "
        "it is served on, but only this user's processes can attach it anew, until `shmserve reload`"
    )


def _disk_note(shm_dir: str) -> str:
    """Return what to know about segments in `shm_dir` where it is on a disk; empty where it is in memory."""
    kind = file_system_of(shm_dir)
    if kind in _IN_MEMORY:
        return ""
    return (
        f"{shm_dir} is on {kind}, not in memory: the segment is a file on that disk, and its pages may be dropped and "
        "read again: use a tmpfs such as /dev/shm"
    )


def private_nbytes() -> int:
    """Return the memory that is this process's alone: anonymous pages, resident or swapped, and page tables.

    Not its USS, which holds the whole of a segment that nobody else has mapped.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    # Kernels without swap, and some container runtimes, leave some of them out.
    return sum(int(fields.get(key, "0").split()[0]) << 10 for key in ("RssAnon", "VmSwap", "VmPTE"))
