"""From the files of a corpus to a segment that is served: adopted from a daemon that ended, or written anew."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from itertools import chain
from queue import SimpleQueue
from typing import Final

from shmserve_client.errors import ConfigError, DatasetFailedError, ShmserveError, SourceFormatError, printable
from shmserve_client.layout import Checksums, Description, SourceRecord
from shmserve_client.owned import OwnedSegment, adopt_segment
from shmserve_client.segment import open_mapped_file
from shmserve_client.writer import Piece, write_segment

from .catalog import Catalog, Failed, Loading, Ready
from .config import DaemonConfig, DatasetConfig
from .decoding import plan_corpus
from .orphans import Leftover, adopt, collect
from .progress import Progress
from .sources import Resolved, resolve
from .sources.base import Corpus
from .sources.remote import abandon
from .text import duration

__all__ = ["Loader", "describe"]

log = logging.getLogger(__name__)

_SHOWN_SHARDS: Final = 8
_PAGE_NBYTES: Final = 4096
_WARM_NBYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A dataset to load: for the first time, or, where it `succeeds` a segment, as the generation after that one's."""

    config: DatasetConfig
    succeeds: OwnedSegment | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def generation(self) -> int:
        """Which one it makes."""
        return 1 if self.succeeds is None else self.succeeds.generation + 1

    def check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise CancelledError


@dataclass(frozen=True, slots=True)
class _Found:
    """A job whose files are known, and since when it is being done."""

    job: _Job
    resolved: Resolved
    started_s: float


class Loader:
    """Brings the datasets of one daemon into its catalog, in a thread of its own: `run` first, once, then `work`."""

    def __init__(self, config: DaemonConfig, catalog: Catalog, progress: Progress) -> None:
        self._config = config
        self._catalog = catalog
        self._progress = progress
        self._ending = False
        self._leftovers_are_read = False
        self._pending = [_Job(dataset) for dataset in config.datasets]
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()

    def load(self, config: DatasetConfig) -> None:
        """Have `work` load a dataset that is in the catalog."""
        self._submit(_Job(config))

    def reload(self, config: DatasetConfig, segment: OwnedSegment) -> None:
        """Have `work` load again what is now served from `segment`."""
        self._submit(_Job(config, segment))

    def _submit(self, job: _Job) -> None:
        self._pending.append(job)
        self._queue.put(job)

    def withdraw(self, config: DatasetConfig) -> None:
        """Have nothing more done for this dataset."""
        for job in list(self._pending):
            if job.config is config:
                job.cancelled.set()

    def cancel(self) -> None:
        """Have `run` and `work` end: within one step of the writer, or once the index that is planned is read."""
        self._ending = True
        abandon()
        for job in list(self._pending):
            job.cancelled.set()
        self._queue.put(None)

    def run(self) -> None:
        """Make every dataset Ready that the daemon starts with; the first that fails is Failed, and ends it.

        What ended daemons left and what fits is adopted first, and the rest of it removed, so that its memory is free
        for what is then written.
        """
        jobs = list(self._pending)
        current = jobs[0]
        try:
            to_write: list[_Found] = []
            for current in jobs:
                found = self._find(current)
                if not self._adopt(found):
                    to_write.append(found)
            for leftover in self._collect():
                log.warning("%s is kept while processes read it: its daemon has ended", leftover.path)
            for found in to_write:
                current = found.job
                self._write(found)
        except Exception as error:
            self._fail(current, error)
        finally:
            for job in jobs:
                self._pending.remove(job)

    def _collect(self) -> tuple[Leftover, ...]:
        kept = collect(self._config.shm_dir).kept
        self._leftovers_are_read = bool(kept)
        return kept

    def collect_leftovers(self) -> None:
        """Remove those segments of ended daemons that were still read when `run` came by, and no longer are."""
        if self._leftovers_are_read:
            try:
                self._collect()
            except ConfigError as error:
                log.warning("%s", error)

    def work(self) -> None:
        """Do what `load` and `reload` ask for, one after the other, until `cancel`."""
        while (job := self._queue.get()) is not None:
            if self._ending:
                break
            try:
                found = self._find(job)
                if job.succeeds is not None or not self._adopt(found):
                    self._write(found)
                self._progress.say(f"{job.config.name}: served in {duration(time.monotonic() - found.started_s)}")
            except Exception as error:
                self._fail(job, error)
            finally:
                self._progress.close()
                self._pending.remove(job)

    def _fail(self, job: _Job, error: Exception) -> None:
        name = job.config.name
        match error:
            case CancelledError():
                log.debug("loading %r was cancelled", name)
                return
            case ShmserveError():
                reason = error
            case OSError():
                reason = DatasetFailedError(f"cannot load {name!r}: {error}")
            case _:  # a fault of ours: the daemon has to say so, rather than load for ever
                log.error("loading %r failed", name, exc_info=error)
                reason = DatasetFailedError(f"internal error while loading {name!r}: {type(error).__name__}: {error}")
        if job.succeeds is not None:
            log.warning("reloading %r failed, it is served as before: %s", name, reason)
        self._report(job, Failed(reason))

    def _report(self, job: _Job, state: Loading | Failed) -> None:
        """Say in the catalog how far the job is; what it is to succeed stays served."""
        (self._catalog.put if job.succeeds is None else self._catalog.put_successor)(job.config, state)

    def _find(self, job: _Job) -> _Found:
        job.check_cancelled()
        started_s = time.monotonic()
        name = job.config.name
        resolved = resolve(job.config.data, replace(job.config.options, in_place=job.config.mode == "map"))
        self._report(job, Loading(resolved.format, key=resolved.key))
        first_files = [shard.files[0].name for shard in resolved.shards]
        if len(first_files) > 1:  # samples are counted through all of them, so their order matters to people
            shown = first_files[:_SHOWN_SHARDS]
            more = f", ... {first_files[-1]}" if len(first_files) > _SHOWN_SHARDS else ""
            self._progress.say(f"{name}: {len(first_files)} shards in this order: {', '.join(shown)}{more}")
        return _Found(job, resolved, started_s)

    def _adopt(self, found: _Found) -> bool:
        config = self._config
        if found.job.config.mode == "adopt":
            segment = adopt_segment(str(found.resolved.shards[0].values), gid=config.gid)
            if segment is None:
                raise ConfigError(f"{found.resolved.data[0]} has an owner already, so it cannot be taken over")
        else:
            segment = adopt(found.job.config.name, found.resolved.fingerprint, config.shm_dir, gid=config.gid)
        if segment is None:
            return False
        try:
            self._serve(found, segment, adopted=True)
        except BaseException:
            segment.close()  # it was there before, and stays for a start that can serve it
            raise
        return True

    def _write(self, found: _Found) -> None:
        job, resolved = found.job, found.resolved
        name = job.config.name

        def on_progress(done_nbytes: int, total_nbytes: int) -> None:
            self._report(job, Loading(resolved.format, done_nbytes, total_nbytes, resolved.key))
            self._progress.advance(done_nbytes, total_nbytes)

        def on_decoded(done_nbytes: int, total_nbytes: int) -> None:
            if done_nbytes == 0:
                self._progress.start(name, total_nbytes, "decod")
            on_progress(done_nbytes, total_nbytes)

        shm_dir = self._config.shm_dir
        with plan_corpus(resolved, shm_dir=shm_dir, progress=on_decoded, cancelled=job.cancelled) as planned:
            description, pieces = describe(name, resolved, planned.corpus)
            if self._config.checksums:
                description = replace(description, checksums=Checksums())
            nbytes = sum(array.nbytes for array in description.all_arrays())
            self._progress.start(name, (-(-nbytes // _PAGE_NBYTES) + 1) * _PAGE_NBYTES)  # one is the header's
            segment = write_segment(
                description,
                pieces,
                shm_dir=shm_dir,
                progress=on_progress,
                cancelled=job.cancelled,
                vocab_size=job.config.options.vocab_size,
                gid=self._config.gid,
                generation=job.generation,
                waiting_nbytes=planned.waiting_nbytes,
            )
        try:
            if resolved.changed():
                raise SourceFormatError(
                    f"{', '.join(resolved.data)} changed while it was loaded: start again when it is complete"
                )
            if job.config.warm:
                self._warm(found, segment, on_progress)
            self._serve(found, segment, adopted=False)
        except BaseException:
            segment.unlink()
            segment.close()
            raise

    def _warm(self, found: _Found, segment: OwnedSegment, progress: Callable[[int, int], None]) -> None:
        """Read the files once that clients map, so that their pages are in memory."""
        job, files = found.job, segment.description.files
        total_nbytes, done_nbytes = sum(file.nbytes for file in files), 0
        self._progress.start(job.config.name, total_nbytes, "read")
        buffer = bytearray(_WARM_NBYTES)
        for file in files:
            fd = open_mapped_file(file)
            try:
                while nbytes := os.readv(fd, [buffer]):
                    job.check_cancelled()
                    done_nbytes += nbytes
                    progress(done_nbytes, total_nbytes)
            finally:
                os.close(fd)

    def _serve(self, found: _Found, segment: OwnedSegment, *, adopted: bool) -> None:
        found.job.check_cancelled()
        if self._config.lock:
            segment.lock_pages()
        load_seconds = time.monotonic() - found.started_s
        if not self._catalog.put(found.job.config, Ready(segment, found.resolved, adopted, load_seconds)):
            raise CancelledError  # it was unloaded in this moment


def describe(name: str, resolved: Resolved, corpus: Corpus) -> tuple[Description, list[Sequence[Piece]]]:
    """Return what the segment of `corpus` says of itself, and the pieces of each of its arrays in their order."""
    description = Description(
        name=name,
        format=corpus.format,
        num_samples=corpus.num_samples,
        columns=tuple(column.column() for column in corpus.columns),
        source=SourceRecord(
            resolved.key,
            resolved.fingerprint,
            tuple(map(printable, resolved.data)),
            len(resolved.files),
            resolved.options.dtype,
            resolved.options.vocab_size,
            resolved.options.columns,
            resolved.options.decode,
        ),
        arrays={key: plan.array() for key, plan in corpus.arrays.items()},
        stream=corpus.stream,
        notes=corpus.notes,
        files=corpus.files,
    )
    plans = [*chain.from_iterable(column.arrays() for column in corpus.columns), *corpus.arrays.values()]
    return description, [plan.pieces for plan in plans]
