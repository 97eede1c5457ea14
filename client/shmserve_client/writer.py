"""Writes a segment: reserves memory step by step, has the pieces read their bytes straight into it, publishes it whole.

The file has no name until it is complete, so no reader sees half a segment, and a writer that is killed leaves nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .admission import check_room, shortage
from .checksums import ChunkSums
from .errors import ConfigError, VocabularyError
from .filling import Filling, Span, ValueCheck, WindowCheck
from .layout import (
    DESCRIPTION_OFFSET,
    DTYPES,
    NONCE_NBYTES,
    Array,
    Description,
    decode_description,
    decode_header,
    encode_prefix,
    place_arrays,
    whole_pages,
)
from .locks import take_owner_lock
from .owned import OwnedSegment, set_readers
from .segment import segment_filename

__all__ = ["Piece", "Values", "open_unnamed", "place_pieces", "write_segment", "write_segment_file"]


class Piece(ABC):
    """Some consecutive bytes of one array, which are read into the segment when the writer asks for them."""

    nbytes: int
    """How many bytes the piece has: a multiple of the array's item size, known before anything is read."""

    @abstractmethod
    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Fill `target`, a 1-d view of the segment, with the piece's bytes `[start, start + len(target))`.

        Both ends are item boundaries. Several threads call this at once, each for another range. An OSError of the
        source file is the writer's to explain.

        Raises:
            SourceFormatError: the source has changed since it was planned.
        """

    def origin(self, start: int) -> str:
        """Return where the byte `start` of the piece comes from, for people; "" where that says nothing."""
        return ""


class Values(Piece):
    """A piece that is in memory already, such as a small index. The array is referenced, not copied."""

    def __init__(self, values: NDArray[Any]) -> None:
        stored = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        self._bytes = stored.reshape(-1).view(np.uint8)
        self.nbytes = stored.nbytes

    def read_into(self, target: NDArray[np.uint8], start: int) -> None:
        """Copy the bytes `[start, start + len(target))` of the array to `target`."""
        target[:] = self._bytes[start : start + target.nbytes]


def write_segment(
    description: Description,
    pieces: Sequence[Sequence[Piece]],
    *,
    shm_dir: str,
    progress: Callable[[int, int], None],
    cancelled: threading.Event,
    vocab_size: int | None,
    gid: int | None = None,
    generation: int = 1,
    waiting_nbytes: Callable[[], int] = lambda: 0,
) -> OwnedSegment:
    """Return the complete, populated segment, linked to its name in `shm_dir` and owned by this process.

    After an exception of any kind nothing is left of it.

    Args:
        description: what it holds; the offsets of its arrays are set here, and its checksums taken if it has some.
        pieces: for each of `description.all_arrays()`, in that order, the pieces whose bytes follow each other in it.
        shm_dir: a directory on a tmpfs.
        progress: called with the bytes done and in all, from the writer's threads, one call at a time.
        cancelled: when set, the writer gives up after the step that it is in, of 2 MiB.
        vocab_size: every value of the first column must lie in `[0, vocab_size)`; None: no check.
        gid: a group that may read the segment, besides its user.
        generation: which version of the dataset it is, from 1 up.
        waiting_nbytes: tells how much memory of `shm_dir` the pieces hold that they give back as they are read.

    Raises:
        CancelledError: `cancelled` was set (`concurrent.futures.CancelledError`).
        ConfigError: no segment can be created in `shm_dir`.
        OutOfSharedMemoryError: it does not fit, found before loading wherever possible.
        SegmentFormatError: the description is one that no reader would accept.
        SourceFormatError: a source file has changed or cannot be read.
        VocabularyError: a value outside the vocabulary; the first of all is named.
    """
    prepared = _Prepared(description, pieces, vocab_size, generation)
    needed_nbytes = prepared.needed_nbytes
    fd = open_unnamed(shm_dir)
    try:
        check_room(max(0, needed_nbytes - waiting_nbytes()), shm_dir)
        take_owner_lock(fd)  # nobody else can hold it yet; whoever finds the name finds it locked
        refusal_errno = prepared.fill(
            fd,
            check_room=lambda nbytes: check_room(max(0, nbytes - waiting_nbytes()), shm_dir, loading=True),
            progress=progress,
            cancelled=cancelled,
        )
        set_readers(fd, gid)
        path = os.path.join(shm_dir, segment_filename(description.name, prepared.nonce))
        _link(fd, path)
        try:
            return OwnedSegment(fd, path, refusal_errno=refusal_errno)
        except BaseException:
            os.unlink(path)
            raise
    except BaseException as error:
        try:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                # Measured while what was loaded is still there: given back, it would count as free.
                left_nbytes = max(mmap.PAGESIZE, needed_nbytes - os.fstat(fd).st_blocks * 512)
                raise shortage(left_nbytes, shm_dir) from error
            raise
        finally:
            os.ftruncate(fd, 0)  # now, and not when the last traceback that refers to the mapping is gone
            os.close(fd)


def write_segment_file(
    description: Description,
    pieces: Sequence[Sequence[Piece]],
    path: str,
    *,
    progress: Callable[[int, int], None],
    cancelled: threading.Event,
    vocab_size: int | None,
) -> None:
    """Write the segment as a file on disk, under a new name. After an exception of any kind nothing is left of it.

    Args:
        description: as for `write_segment`, and so are `pieces`, `progress`, `cancelled` and `vocab_size`.
        pieces: likewise.
        path: the file, which must not exist yet.
        progress: likewise.
        cancelled: likewise.
        vocab_size: likewise.

    Raises:
        ConfigError: the file exists, cannot be created, or does not fit on its disk.
        ShmserveError: as `write_segment`.
    """
    prepared = _Prepared(description, pieces, vocab_size, generation=1)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{os.path.basename(path)}.") as file:
            prepared.fill(file.fileno(), check_room=lambda nbytes: None, progress=progress, cancelled=cancelled)
            umask = os.umask(0o077)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)
            os.fsync(file.fileno())
            os.link(file.name, path)
    except FileExistsError:
        raise ConfigError(f"{path} exists already: remove it first, or name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({prepared.needed_nbytes} bytes): {error.strerror}") from error


class _Prepared:
    """A segment that is to be written: its arrays placed, and its header and description known to be valid."""

    def __init__(
        self, description: Description, pieces: Sequence[Sequence[Piece]], vocab_size: int | None, generation: int
    ) -> None:
        placed, data_offset, total_nbytes = place_arrays(description)
        self._spans = place_pieces(placed.all_arrays(), pieces)
        self._checks: list[WindowCheck] = []
        if vocab_size is not None:
            self._checks.append(_value_check(placed, self._spans, vocab_size))
        self._sums = None
        if placed.checksums is not None:
            self._sums = ChunkSums(data_offset, placed.checksums.values.offset)
            self._checks.append(self._sums)
        self.nonce = secrets.token_bytes(NONCE_NBYTES)
        self._prefix = encode_prefix(
            placed, data_offset=data_offset, total_nbytes=total_nbytes, nonce=self.nonce, generation=generation
        )
        self._data_offset, self._total_nbytes = data_offset, total_nbytes
        # Judged as a reader will judge it, before there is anything to take back.
        decode_description(self._prefix[DESCRIPTION_OFFSET:], decode_header(self._prefix, total_nbytes))
        # The rest up to the data is a hole, which takes no memory, so that a tiny dataset stays tiny.
        self.needed_nbytes = whole_pages(len(self._prefix)) + whole_pages(total_nbytes - data_offset)

    def fill(
        self,
        fd: int,
        *,
        check_room: Callable[[int], None],
        progress: Callable[[int, int], None],
        cancelled: threading.Event,
    ) -> int:
        """Write all of it to the empty file; return why the kernel refused a huge page, 0 if it never did."""
        os.ftruncate(fd, self._total_nbytes)
        filling = Filling(
            fd,
            start=self._data_offset,
            total_nbytes=self._total_nbytes,
            spans=self._spans,
            checks=self._checks,
            check_room=check_room,
            progress=progress,
            cancelled=cancelled,
        )
        filling.run()
        if self._sums is not None:
            os.pwrite(fd, self._sums.sealed(), self._sums.stop)
        os.pwrite(fd, self._prefix, 0)
        return filling.refusal_errno


def place_pieces(arrays: Sequence[Array], pieces: Sequence[Sequence[Piece]]) -> list[Span]:
    """Return where in the file the pieces of each array go, in ascending order."""
    spans = []
    for array, of_array in zip(arrays, pieces, strict=True):
        start = array.offset
        for piece in of_array:
            spans.append(Span(start, start + piece.nbytes, piece.read_into, piece.origin))
            start += piece.nbytes
        if start != array.offset + array.nbytes:
            raise ValueError(f"pieces of {start - array.offset} bytes for an array of {array.nbytes}")
    return spans


def _value_check(description: Description, spans: Sequence[Span], vocab_size: int) -> ValueCheck:
    values = description.columns[0].values
    if DTYPES[values.dtype].kind not in "iu":
        raise VocabularyError(f"the values are {values.dtype}, not token ids: --vocab-size {vocab_size} does not apply")

    def origin(position: int) -> str:
        span = next(span for span in spans if span.start <= position < span.stop)
        place = span.origin(position - span.start)
        return f"dataset {description.name!r}" + (f", {place}" if place else "")

    return ValueCheck(values.offset, values.offset + values.nbytes, DTYPES[values.dtype], vocab_size, origin)


def open_unnamed(shm_dir: str) -> int:
    """Return the descriptor of a new file without a name, which goes with its last user."""
    try:
        return os.open(shm_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o400)
    except OSError as error:
        raise ConfigError(
            f"cannot create a segment in {shm_dir}: {error.strerror}: choose a writable tmpfs with --shm-dir"
        ) from error


def _link(fd: int, path: str) -> None:
    """Give the unnamed file its name, which must be new."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a src_dir_fd does Python call linkat, which follows the link in /proc; link(2) would be EXDEV.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=directory)
    finally:
        os.close(directory)
