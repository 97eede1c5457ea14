"""From the files of a corpus to a segment that is served: adopted from a daemon that ended, or written anew."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Final

from shmserve_client.errors import DatasetFailedError, ShmserveError, SourceFormatError, printable
from shmserve_client.layout import Array, Column, Description, SourceRecord
from shmserve_client.owned import OwnedSegment
from shmserve_client.writer import Piece, write_segment

from .catalog import Catalog, Failed, Loading, Ready
from .config import DaemonConfig, DatasetConfig
from .orphans import adopt, collect
from .progress import Progress
from .sources import Resolved, resolve
from .sources.base import ArrayPlan, Corpus

__all__ = ["Loader", "describe"]

log = logging.getLogger(__name__)

_SHOWN_SHARDS: Final = 8
_PAGE_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class _Found:
    """A dataset whose files are known, and since when it is being loaded."""

    config: DatasetConfig
    resolved: Resolved
    started_s: float


class Loader:
    """Brings the datasets of one daemon into its catalog. `run` is called once, in a thread of its own."""

    def __init__(self, config: DaemonConfig, catalog: Catalog, progress: Progress) -> None:
        self._config = config
        self._catalog = catalog
        self._progress = progress
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Have `run` give up: within one step of the writer, or once the index that it plans is read."""
        self._cancelled.set()

    def run(self) -> None:
        """Make every dataset Ready in the catalog; the first that fails is Failed there, and ends it.

        What ended daemons left and what fits is adopted first, and the rest of it removed, so that its memory is free
        for what is then written.
        """
        current = self._config.datasets[0]
        try:
            to_write: list[_Found] = []
            for current in self._config.datasets:
                found = self._find(current)
                if not self._adopt(found):
                    to_write.append(found)
            for leftover in collect(self._config.shm_dir).kept:
                log.warning("%s is kept: its daemon has ended, but processes still read it", leftover.path)
            for found in to_write:
                current = found.config
                self._write(found)
        except CancelledError:
            log.debug("loading %r was cancelled", current.name)
        except ShmserveError as error:
            self._catalog.put(current.name, Failed(error))
        except OSError as error:
            self._catalog.put(current.name, Failed(DatasetFailedError(f"cannot load {current.name!r}: {error}")))
        except Exception as error:  # a fault of ours: the daemon has to say so and end, rather than load for ever
            log.exception("loading %r failed", current.name)
            message = f"internal error while loading {current.name!r}: {type(error).__name__}: {error}"
            self._catalog.put(current.name, Failed(DatasetFailedError(message)))

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError

    def _find(self, config: DatasetConfig) -> _Found:
        self._check_cancelled()
        started_s = time.monotonic()
        resolved = resolve(config.data, config.options)
        self._catalog.put(config.name, Loading(resolved.format, key=resolved.key))
        first_files = [shard.files[0].name for shard in resolved.shards]
        if len(first_files) > 1:  # samples are counted through all of them, so their order matters to people
            shown = first_files[:_SHOWN_SHARDS]
            more = f", ... {first_files[-1]}" if len(first_files) > _SHOWN_SHARDS else ""
            self._progress.say(f"{config.name}: {len(first_files)} shards in this order: {', '.join(shown)}{more}")
        return _Found(config, resolved, started_s)

    def _adopt(self, found: _Found) -> bool:
        config = self._config
        segment = adopt(found.config.name, found.resolved.fingerprint, config.shm_dir, gid=config.gid)
        if segment is None:
            return False
        try:
            self._serve(found, segment, adopted=True)
        except BaseException:
            segment.close()  # it was there before, and stays for a start that can serve it
            raise
        return True

    def _write(self, found: _Found) -> None:
        name, resolved = found.config.name, found.resolved
        description, pieces = describe(name, resolved, resolved.plan())
        nbytes = sum(array.nbytes for array in description.all_arrays())
        self._progress.start(name, (-(-nbytes // _PAGE_NBYTES) + 1) * _PAGE_NBYTES)  # one is the header's

        def on_progress(done_nbytes: int, total_nbytes: int) -> None:
            self._catalog.put(name, Loading(resolved.format, done_nbytes, total_nbytes, resolved.key))
            self._progress.advance(done_nbytes, total_nbytes)

        segment = write_segment(
            description,
            pieces,
            shm_dir=self._config.shm_dir,
            progress=on_progress,
            cancelled=self._cancelled,
            vocab_size=found.config.options.vocab_size,
            gid=self._config.gid,
        )
        try:
            if resolved.changed():
                raise SourceFormatError(
                    f"{', '.join(resolved.data)} changed while it was loaded: start again when it is complete"
                )
            self._serve(found, segment, adopted=False)
        except BaseException:
            segment.unlink()
            segment.close()
            raise

    def _serve(self, found: _Found, segment: OwnedSegment, *, adopted: bool) -> None:
        self._check_cancelled()
        if self._config.lock:
            segment.lock_pages()
        load_seconds = time.monotonic() - found.started_s
        self._catalog.put(found.config.name, Ready(segment, found.resolved, adopted, load_seconds))


def describe(name: str, resolved: Resolved, corpus: Corpus) -> tuple[Description, list[Sequence[Piece]]]:
    """Return what the segment of `corpus` says of itself, and the pieces of each of its arrays in their order."""

    def optional(plan: ArrayPlan | None) -> Array | None:
        return None if plan is None else _array(plan)

    column = Column(
        corpus.column,
        values=_array(corpus.values),
        offsets=optional(corpus.offsets),
        shapes=optional(corpus.shapes),
        shape_offsets=optional(corpus.shape_offsets),
    )
    description = Description(
        name=name,
        format=corpus.format,
        num_samples=corpus.num_samples,
        columns=(column,),
        source=SourceRecord(
            resolved.key, resolved.fingerprint, tuple(map(printable, resolved.data)), len(resolved.files)
        ),
        arrays={key: _array(plan) for key, plan in corpus.arrays.items()},
        stream=corpus.stream,
        notes=corpus.notes,
    )
    plans = (corpus.values, corpus.offsets, corpus.shapes, corpus.shape_offsets, *corpus.arrays.values())
    return description, [plan.pieces for plan in plans if plan is not None]


def _array(plan: ArrayPlan) -> Array:
    return Array(plan.dtype, plan.shape)
