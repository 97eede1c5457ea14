"""From the files of a corpus to a segment that is served: adopted from a daemon that ended, or written anew."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Final

from shmserve_client.errors import DatasetFailedError, ShmserveError, SourceFormatError
from shmserve_client.layout import Array, Column, Description, SourceRecord
from shmserve_client.mapping import map_private
from shmserve_client.writer import OwnedSegment, Piece, write_segment

from .catalog import Catalog, Failed, Loading, Ready
from .config import DaemonConfig, DatasetConfig
from .orphans import adopt, collect
from .progress import Progress
from .sources import Resolved, resolve
from .sources.base import ArrayPlan, Corpus

__all__ = ["describe", "load_all"]

log = logging.getLogger(__name__)

_SHOWN_SHARDS: Final = 8


@dataclass(frozen=True, slots=True)
class _Found:
    """A dataset whose files are known, and since when it is being loaded."""

    config: DatasetConfig
    resolved: Resolved
    started_s: float


def load_all(config: DaemonConfig, catalog: Catalog, progress: Progress, cancelled: threading.Event) -> None:
    """Bring every dataset of `config` into `catalog` as Ready; the first that fails is Failed there, and ends it.

    What ended daemons left and what fits is adopted first, and the rest of it removed, so that its memory is free for
    what is then written. `cancelled` stops it within one step of the writer.
    """
    current = config.datasets[0]
    try:
        found: list[_Found] = []
        for current in config.datasets:
            started_s = time.monotonic()
            resolved = resolve(current.data, current.options)
            catalog.put(current.name, Loading(resolved.format))
            _say_order(current.name, resolved, progress)
            found.append(_Found(current, resolved, started_s))
        to_write = [one for one in found if not _adopt(one, config, catalog)]
        for leftover in collect(config.shm_dir).kept:
            log.warning("%s is kept: its daemon has ended, but processes still read it", leftover.path)
        for one in to_write:
            current = one.config
            _write(one, config, catalog, progress, cancelled)
    except CancelledError:
        log.debug("loading %r was cancelled", current.name)
    except ShmserveError as error:
        catalog.put(current.name, Failed(error))
    except OSError as error:
        catalog.put(current.name, Failed(DatasetFailedError(f"cannot load {current.name!r}: {error}")))
    except Exception as error:  # a fault of ours: the daemon has to say so and end, rather than load for ever
        log.exception("loading %r failed", current.name)
        message = f"internal error while loading {current.name!r}: {type(error).__name__}: {error}"
        catalog.put(current.name, Failed(DatasetFailedError(message)))


def _say_order(name: str, resolved: Resolved, progress: Progress) -> None:
    """Show in which order the shards are joined: samples are counted through all of them."""
    first_files = [shard.files[0].name for shard in resolved.shards]
    if len(first_files) > 1:
        shown = first_files[:_SHOWN_SHARDS]
        more = f", ... {first_files[-1]}" if len(first_files) > _SHOWN_SHARDS else ""
        progress.say(f"{name}: {len(first_files)} shards in this order: {', '.join(shown)}{more}")


def _adopt(found: _Found, config: DaemonConfig, catalog: Catalog) -> bool:
    segment = adopt(found.config.name, found.resolved.fingerprint, config.shm_dir, gid=config.gid)
    if segment is None:
        return False
    _serve(found, segment, config, catalog, adopted=True)
    return True


def _write(
    found: _Found, config: DaemonConfig, catalog: Catalog, progress: Progress, cancelled: threading.Event
) -> None:
    name, format_name = found.config.name, found.resolved.format
    description, pieces = describe(name, found.resolved, found.resolved.plan())
    total_nbytes = sum(array.nbytes for array in description.all_arrays())
    progress.start(name, total_nbytes)

    def on_progress(done_nbytes: int, total_nbytes: int) -> None:
        catalog.put(name, Loading(format_name, done_nbytes, total_nbytes))
        progress.advance(done_nbytes, total_nbytes)

    segment = write_segment(
        description,
        pieces,
        shm_dir=config.shm_dir,
        progress=on_progress,
        cancelled=cancelled,
        vocab_size=found.config.options.vocab_size,
        gid=config.gid,
    )
    if found.resolved.changed():
        segment.unlink()
        segment.close()
        raise SourceFormatError(f"{', '.join(found.config.data)} changed while loading: start again when complete")
    _serve(found, segment, config, catalog, adopted=False)


def _serve(found: _Found, segment: OwnedSegment, config: DaemonConfig, catalog: Catalog, *, adopted: bool) -> None:
    if config.lock:
        segment.lock_pages()
    mapping = map_private(segment.fd, segment.header.total_nbytes)
    load_seconds = time.monotonic() - found.started_s
    catalog.put(found.config.name, Ready(segment, mapping, found.resolved, adopted, load_seconds))


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
        source=SourceRecord(resolved.key, resolved.fingerprint, resolved.data, len(resolved.files)),
        arrays={key: _array(plan) for key, plan in corpus.arrays.items()},
        stream=corpus.stream,
        notes=corpus.notes,
    )
    plans = (corpus.values, corpus.offsets, corpus.shapes, corpus.shape_offsets, *corpus.arrays.values())
    return description, [plan.pieces for plan in plans if plan is not None]


def _array(plan: ArrayPlan) -> Array:
    return Array(plan.dtype, plan.shape)
