"""Copies of remote shards for decoders, whose libraries read files of this machine: a few at a time, without a trace.

A copy has no name on the disk: a link with the name that the decoder expects leads to the open file. So nothing is left
of it when the daemon is killed, but links to nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from shmserve_client.errors import ShmserveError, SourceFormatError

from .base import DecodedSource
from .files import size_of
from .remote import RemotePath, copy_ranges

__all__ = ["Copied", "copied"]

GROUP_NBYTES: Final = 256 << 20
"""About so much is copied and decoded at once, while the next is copied."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Some shards of a corpus, and the same as files of this machine."""

    shards: Sequence[DecodedSource]
    here: Sequence[DecodedSource]
    folder: str = ""
    """Where the copies are; "" where the shards are of this machine."""

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Raise errors that name a copy as errors that name what it is a copy of."""
        try:
            yield
        except ShmserveError as error:
            scheme = self.shards[0].values.parts[0]
            message = str(error).replace(f"{self.folder}/{scheme}/", f"{scheme}//") if self.folder else str(error)
            if message == str(error):
                raise
            raise type(error)(message) from error


def copied(shards: Sequence[DecodedSource], cancelled: threading.Event) -> Generator[Copied, None, None]:
    """Yield all shards in their order, as groups; a copy is there until the next group is asked for.

    Raises:
        CancelledError: `cancelled` was set.
        SourceFormatError: a file cannot be read, or there is no room for its copy.
    """
    if not any(isinstance(shard.values, RemotePath) for shard in shards):
        yield Copied(shards, shards)
        return
    groups = list(_groups(shards))
    with ThreadPoolExecutor(1, thread_name_prefix="shmserve-copies") as thread, ExitStack() as stack:
        coming = thread.submit(_copy, groups[0], cancelled)
        stack.callback(lambda: _discard(coming))
        for number in range(len(groups)):
            present, files = coming.result()
            with files:
                if number + 1 < len(groups):
                    coming = thread.submit(_copy, groups[number + 1], cancelled)
                yield present


def _discard(coming: Future[tuple[Copied, ExitStack]]) -> None:
    if not coming.cancel() and coming.exception() is None:
        coming.result()[1].close()


def _groups(shards: Sequence[DecodedSource]) -> Iterator[list[DecodedSource]]:
    group: list[DecodedSource] = []
    nbytes = 0
    for shard in shards:
        group.append(shard)
        nbytes += sum(map(size_of, shard.files))
        if nbytes >= GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _copy(shards: Sequence[DecodedSource], cancelled: threading.Event) -> tuple[Copied, ExitStack]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmserve-remote-"))
        for path in dict.fromkeys(file for shard in shards for file in shard.files):
            assert isinstance(path, RemotePath)
            file = stack.enter_context(tempfile.TemporaryFile(prefix="shmserve-remote-"))
            fd = file.fileno()
            try:
                os.ftruncate(fd, size_of(path))
                copy_ranges(path, lambda data, start: _write(fd, data, start), cancelled)  # noqa: B023
            except OSError as error:
                raise SourceFormatError(
                    f"{path}: no room for a copy to decode it from: {error.strerror}: free some of "
                    f"{tempfile.gettempdir()}, or name another directory by $TMPDIR"
                ) from error
            link = _local(path, folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return Copied(shards, [_moved(shard, folder) for shard in shards], folder), stack.pop_all()
    raise AssertionError


def _write(fd: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, start)
        view, start = view[written:], start + written


def _moved(shard: Any, folder: str) -> DecodedSource:
    """Return the shard, which is a dataclass, with the copies of its files."""
    moved: DecodedSource = replace(
        shard, **{field.name: _local(getattr(shard, field.name), folder) for field in fields(shard)}
    )
    return moved


def _local(value: Any, folder: str) -> Any:
    """Return where the copy is of a remote path, or of each in a tuple; any other value as it is."""
    if isinstance(value, RemotePath):
        return Path(folder, *value.parts[:-1], value.name)
    return tuple(_local(item, folder) for item in value) if type(value) is tuple else value
