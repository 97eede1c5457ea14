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
    Status,
    StatusReport,
    Welcome,
    failure_from,
)
from shmserve_client.version import __version__

from .catalog import Catalog, Failed, Loading, Ready, State
from .config import DatasetConfig
from .text import percent, size

__all__ = ["Service"]

_IN_MEMORY: Final = ("tmpfs", "ramfs")


class Service:
    """The answers of one daemon, whose socket is at `endpoint` and whose segments are in `shm_dir`."""

    def __init__(self, catalog: Catalog, *, endpoint: str, shm_dir: str) -> None:
        self._catalog = catalog
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
                    return Datasets([config.name for config, _ in self._catalog])
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
        config, state = self._find(request)
        ready = _served(config, state)
        if not ready.segment.name_exists():
            raise SegmentNotFoundError(
                f"the segment of dataset {config.name!r} was removed from under the daemon, it was at "
                f"{ready.segment.path} (systemd does so at logout, see RemoveIPC= in logind.conf): restart the daemon"
            )
        return Attached(
            config.name, ready.segment.path, ready.segment.header.nonce, config.block_size or 0, config.stride or 0
        )

    def _find(self, request: Attach) -> tuple[DatasetConfig, State]:
        """Return the dataset that fits both the name and the source key, each where it is given."""
        named = list(self._catalog) if request.name is None else [self._catalog.get(request.name)]
        if request.source_key is not None:
            fitting = [(config, state) for config, state in named if _is_of(config, state, request)]
            if not fitting:
                raise DatasetNotFoundError("no dataset of those files, as they are now, is served here")
            return fitting[0]
        if len(named) > 1:
            names = ", ".join(config.name for config, _ in named)
            raise DatasetNotFoundError(f"several datasets are served here, name one of them: {names}")
        return named[0]

    def _look_up(self, request: Lookup) -> Offsets:
        config, state = self._catalog.get(request.name)
        ready = _served(config, state)
        if request.nonce not in (b"", ready.segment.header.nonce):
            raise SegmentNotFoundError(
                f"the daemon has another segment of dataset {config.name!r} than the client: open the dataset again"
            )
        if len(request.indices) % 8 or len(request.indices) > MAX_INDICES * 8:
            raise ProtocolError(
                f"lookup of {len(request.indices)} bytes of indices: they are int64, at most {MAX_INDICES} of them"
            )
        if max(request.block_size, request.stride) >= 1 << 62:
            raise BlockSizeError(f"block_size {request.block_size} or stride {request.stride} is not below 2^62")
        samples = ready.segment.samples(request.column, request.block_size, request.stride)
        offsets, nbytes = samples.extents(np.frombuffer(request.indices, "<i8"))
        return Offsets(offsets.astype("<i8", copy=False).tobytes(), nbytes.astype("<i8", copy=False).tobytes())

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
            shm_dir=self._shm_dir,
            uptime_seconds=time.monotonic() - self._started_s,
            private_nbytes=_private_nbytes(),
            datasets=[_status(config, state, self._disk_note) for config, state in chosen],
        )


def _is_of(config: DatasetConfig, state: State, request: Attach) -> bool:
    """Return whether the dataset is of the source that `request` asks for, checked as it wants it."""
    key = state.resolved.key if isinstance(state, Ready) else state.key if isinstance(state, Loading) else ""
    return key != "" and key == request.source_key and request.vocab_size in (None, config.options.vocab_size)


def _served(config: DatasetConfig, state: State) -> Ready:
    match state:
        case Loading(_, done_nbytes, total_nbytes):
            done = f"{size(done_nbytes)} of {size(total_nbytes)}, {percent(done_nbytes, total_nbytes)} %"
            progress = done if total_nbytes else "its index is being read"
            raise DatasetNotReadyError(f"dataset {config.name!r} is still loading ({progress})")
        case Failed(error):
            raise DatasetFailedError(f"dataset {config.name!r} could not be loaded: {error}")
        case Ready():
            return state
        case _:
            assert_never(state)


def _status(config: DatasetConfig, state: State, disk_note: str) -> DatasetStatus:
    status = DatasetStatus(
        name=config.name, data=list(config.data), block_size=config.block_size or 0, stride=config.stride or 0
    )
    match state:
        case Loading(format_name, done_nbytes, total_nbytes):
            return replace(status, format=format_name, segment_nbytes=total_nbytes, loaded_nbytes=done_nbytes)
        case Failed(error):
            return replace(status, state="failed", error=str(error))
        case Ready(segment=segment):
            description, header = segment.description, segment.header
            # Not the file's size: the gap between description and data is a hole.
            memory_nbytes = os.fstat(segment.fd).st_blocks * 512
            attached = attached_processes(segment.fd)
            pid_namespace = os.stat("/proc/self/ns/pid").st_ino
            here = [process.pid for process in attached if process.pid_namespace == pid_namespace]
            notes = [*description.notes, *filter(None, (segment.huge_refusal, disk_note))]
            return replace(
                status,
                state="ready",
                format=description.format,
                num_samples=description.num_samples,
                stream=description.stream,
                segment_nbytes=memory_nbytes,
                loaded_nbytes=memory_nbytes,
                huge_nbytes=0 if disk_note else segment.huge_nbytes,
                path=segment.path,
                generation=header.generation,
                adopted=state.adopted,
                load_seconds=state.load_seconds,
                source_changed=state.source_changed,
                attached_pids=here,
                attached_elsewhere=len(attached) - len(here),
                notes=notes,
            )
        case _:
            assert_never(state)


def _disk_note(shm_dir: str) -> str:
    """Return what to know about segments in `shm_dir` where it is on a disk; empty where it is in memory."""
    kind = file_system_of(shm_dir)
    if kind in _IN_MEMORY:
        return ""
    return (
        f"{shm_dir} is on {kind}, not in memory: the segment is a file on that disk, and its pages may be dropped and "
        "read again: use a tmpfs such as /dev/shm"
    )


def _private_nbytes() -> int:
    """Return the memory that is this process's alone: anonymous pages, resident or swapped, and page tables.

    Not its USS, which holds the whole of a segment that nobody else has mapped.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    # Kernels without swap, and some container runtimes, leave some of them out.
    return sum(int(fields.get(key, "0").split()[0]) << 10 for key in ("RssAnon", "VmSwap", "VmPTE"))
