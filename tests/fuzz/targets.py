"""What is done with bytes from anybody: each function takes some, and raises where shmserve does what it must not.

The tests give them made-up and mutated bytes, the coverage-guided runs those that a fuzzer finds.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.loader import describe
from shmserve.sources import Resolved, SourceOptions, resolve
from shmserve.sources.base import DecodedSource
from shmserve.sources.segment_file import SegmentFile
from shmserve_client.batches import gather
from shmserve_client.errors import (
    BlockSizeError,
    ConfigError,
    ProtocolError,
    SampleIndexError,
    SegmentFormatError,
    SegmentNotFoundError,
    ShmserveError,
    SourceFormatError,
    SourceNotFoundError,
    VocabularyError,
)
from shmserve_client.layout import (
    DATA_ALIGNMENT,
    DESCRIPTION_OFFSET,
    DTYPES,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    Array,
    Description,
    place_arrays,
)
from shmserve_client.protocol import (
    Failure,
    decode_control,
    decode_reply,
    decode_request,
    encode,
    error_from,
    request_id_of,
)
from shmserve_client.samples import Samples, open_samples
from shmserve_client.segment import Segment
from shmserve_client.tensors import OpenColumn, tensor_maker
from shmserve_client.writer import Piece, write_segment

from . import reference

NONCE = bytes(range(16))
NO_OPTIONS = SourceOptions()
SOURCE_ERRORS = (ConfigError, SourceFormatError, SourceNotFoundError, VocabularyError)
SOME = 24
"""How many samples are read of each end of a column."""
WINDOWS = [(0, 0), (1, 1), (1, 3), (7, 2), (1 << 20, 1), (1, (1 << 62) - 1), ((1 << 62) - 1, 1), ((1 << 62) - 1,) * 2]

_numbers = itertools.count()


def check_messages(frame: bytes) -> bool:
    """Decode a frame by every decoder; return whether one of them took it, and check that it is what it says."""
    taken = False
    for decode in (decode_request, decode_control, decode_reply):
        try:
            request_id, message = decode(frame)
        except ProtocolError:
            continue
        taken = True
        again = decode(encode(message, request_id))
        assert repr(again) == repr((request_id, message))  # by repr: a NaN is not equal to itself
        if isinstance(message, Failure):
            assert isinstance(error_from(message), ShmserveError)
            assert str(error_from(message)).isprintable()
    assert 0 <= request_id_of(frame) < 1 << 63
    return taken


def segment_file(description: bytes, data: bytes, header_patch: bytes = b"") -> tuple[bytes, bytes]:
    """Return (prefix, data) of a segment whose header is right about them, then XORed with `header_patch`."""
    data_offset = -(-(DESCRIPTION_OFFSET + len(description)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    sizes = (1, 0, DESCRIPTION_OFFSET, len(description), data_offset, zlib.crc32(description))
    header = HEADER.pack(MAGIC, LAYOUT_VERSION, HEADER.size, NONCE, data_offset + len(data), *sizes)
    patched = bytes(a ^ b for a, b in itertools.zip_longest(header, header_patch[: HEADER.size], fillvalue=0))
    return patched.ljust(DESCRIPTION_OFFSET, b"\0") + description, data


def check_segment(folder: Path, prefix: bytes, data: bytes) -> bool:
    """Attach the segment and read all that it says it has; return whether it was accepted."""
    path = folder / f"segment-{next(_numbers)}"
    data_offset = -(-len(prefix) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, data_offset + len(data))
        os.pwrite(fd, prefix, 0)
        os.pwrite(fd, data, data_offset)
        try:
            segment = Segment.attach(str(path), NONCE)
        except (SegmentFormatError, SegmentNotFoundError):  # or of another nonce
            return False
        _use(segment)
        return True
    finally:
        os.close(fd)
        path.unlink()


def _use(segment: Segment) -> None:
    start = segment.__array_interface__["data"][0]

    def check_inside(view: NDArray[Any]) -> NDArray[Any]:
        if view.size:
            low, high = np.lib.array_utils.byte_bounds(view)
            assert start <= low <= high <= start + segment.header.total_nbytes, "a view outside the mapping"
        return view

    description = segment.description
    for array in description.all_arrays():
        check_inside(segment.array(array))
    for column in description.columns:
        for block_size, stride in WINDOWS:
            try:
                samples = open_samples(
                    description, segment.array, column=column.name, block_size=block_size, stride=stride
                )
            except BlockSizeError:
                assert description.stream
                continue
            _use_samples(samples, start, check_inside)


def _use_samples(samples: Samples, start: int, check_inside: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    count = len(samples)
    sound, flat = [], []
    for index in [*range(min(count, SOME)), *range(max(SOME, count - SOME), count)]:
        position = np.array([index])
        try:
            offsets, nbytes = samples.extents(position)
        except SegmentFormatError:
            _expect(SegmentFormatError, lambda: samples[index])  # noqa: B023  # called at once
            continue
        flat.append(index)
        samples.check_extents(position, offsets, nbytes)
        try:
            view = check_inside(samples[index])
        except SegmentFormatError:  # its shape does not fit
            _expect(SegmentFormatError, lambda: samples.view_at(index, int(offsets[0]), int(nbytes[0])))  # noqa: B023
            continue
        sound.append(index)
        assert view.nbytes == nbytes[0]
        if view.size:
            assert view.__array_interface__["data"][0] == start + offsets[0]
        again = samples.view_at(index, int(offsets[0]), int(nbytes[0]))
        assert (again.shape, again.tobytes()) == (view.shape, view.tobytes())
        assert samples[index - count].shape == view.shape
    for outside in (count, -count - 1, 1 << 62, -(1 << 63), (1 << 63) - 1):
        _expect(SampleIndexError, lambda: samples[outside])  # noqa: B023
        _expect(SampleIndexError, lambda: samples.positions(np.array([outside])))  # noqa: B023
        if not 0 <= outside < count:
            _expect(SampleIndexError, lambda: samples.extents(np.array([outside])))  # noqa: B023
    for chosen in ([], sound, flat):
        for length, dtype in ((None, None), (None, "stored"), (3, None)):
            if chosen is not sound or length is None or samples.shape is None:
                _batch(samples, chosen, length, dtype)


def _batch(samples: Samples, indices: list[int], length: int | None, dtype: Any) -> None:
    column = OpenColumn(samples, tensor_maker(samples.values.dtype, dtype, private=True))
    positions = np.array(indices, np.int64)
    try:
        batch = gather({"values": column}, positions, Samples.ranges, length=length, pad=0, dtype=dtype, out=None)
    except ShmserveError:
        return
    assert len(batch.lengths) == len(batch.values) == len(indices)
    for index, values, extent in zip(indices, batch.values, batch.lengths.tolist(), strict=True):
        if dtype == "stored" and samples[index].ndim:
            stored = samples[index]
            assert extent == len(stored)
            assert values[:extent].numpy().tobytes() == stored.tobytes()


def _expect(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def check_refusal(error: ShmserveError) -> bool:
    """Return False: nothing was accepted. What the error says must be one line."""
    assert str(error).isprintable()
    return False


def check_source(
    folder: Path, files: Mapping[str, bytes], options: SourceOptions = NO_OPTIONS, *, ask_for: str | None = None
) -> bool:
    """Load the files as a daemon would; return whether they were accepted, and check that they are served as they are.

    Args:
        folder: an empty directory on a tmpfs.
        files: by their names, the values' file first.
        options: what a person says of them.
        ask_for: the name of the file that is asked for; None for the values' file.
    """
    with _written(folder, files):
        try:
            resolved, description, pieces = _plan(folder / (ask_for or next(iter(files))), options)
            owned = write_segment(
                description,
                pieces,
                shm_dir=str(folder),
                progress=lambda done_nbytes, total_nbytes: None,
                cancelled=threading.Event(),
                vocab_size=options.vocab_size,
            )
        except SOURCE_ERRORS as error:
            return check_refusal(error)
        try:
            segment = Segment.attach(owned.path, owned.header.nonce)
            _compare(segment.description, segment.array, resolved, options)
        finally:
            owned.unlink()
            owned.close()
        return True


def check_plan(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Do what `check_source` does in this process's memory, without a segment and much faster."""
    with _written(folder, files):
        try:
            resolved, description, pieces = _plan(folder / next(iter(files)), NO_OPTIONS)
        except SOURCE_ERRORS as error:
            return check_refusal(error)
        placed, _, _ = place_arrays(description)
        arrays = {}
        for array, of_array in zip(placed.all_arrays(), pieces, strict=True):
            arrays[array] = np.zeros(array.shape, DTYPES[array.dtype])
            target, start = arrays[array].reshape(-1).view(np.uint8), 0
            for piece in of_array:
                piece.read_into(target[start : start + piece.nbytes], 0)
                start += piece.nbytes
            assert start == target.nbytes
        _compare(placed, arrays.__getitem__, resolved, NO_OPTIONS)
        return True


@contextmanager
def _written(folder: Path, files: Mapping[str, bytes]) -> Iterator[None]:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        yield
    finally:
        for name in files:
            (folder / name).unlink()


def _plan(path: Path, options: SourceOptions) -> tuple[Resolved, Description, list[Sequence[Piece]]]:
    resolved = resolve([str(path)], options)
    if isinstance(resolved.shards[0], DecodedSource | SegmentFile):
        raise SourceFormatError("by chance it is of a format that is not planned, see test_decoded")
    return resolved, *describe("corpus", resolved, resolved.plan())


def _compare(
    description: Description, array: Callable[[Array], NDArray[Any]], resolved: Resolved, options: SourceOptions
) -> None:
    contents = [file.read_bytes() for file in resolved.shards[0].files]
    (column,) = description.columns
    dtype = DTYPES[column.values.dtype]
    expected = reference.read(description.format, contents, dtype.str)
    assert description.stream == expected.stream
    if description.stream:
        values = array(column.values)
        assert description.num_samples == len(values)
        served: Any = [values]
    else:
        served = open_samples(description, array)
    assert len(served) == len(expected.samples)
    for one, other in zip(served, expected.samples, strict=True):
        assert other.dtype.newbyteorder("=") == dtype.newbyteorder("=")
        assert one.shape == other.shape
        assert one.tobytes() == other.astype(dtype).tobytes()
    arrays = {name: array(of_name).tolist() for name, of_name in description.arrays.items()}
    assert arrays == expected.arrays
    if options.vocab_size is not None:
        assert all(((one >= 0) & (one < options.vocab_size)).all() for one in expected.samples)
