"""Files in stores: S3, GCS, HTTP and whatever else fsspec knows, read by ranges, several at once, again on failure.

A `RemotePath` has as much of `pathlib.Path` as sources use, but it is no path to the calls of the operating system:
what is not written for remote files fails, rather than reading something else.
"""

from __future__ import annotations

import errno
import io
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.urls import scrubbed, without_secrets

from .extras import require

__all__ = ["RemotePath", "abandon", "begin", "copy_ranges", "forget", "matches"]

EXTRA: Final = "remote"
BLOCK_NBYTES: Final = 8 << 20
MAX_BLOCKS: Final = 16
"""That are under way or wait to be used, in one process."""
LARGE_NBYTES: Final = 1 << 20
"""After so much was read in order, more will be."""
BUFFER_NBYTES: Final = 1 << 16
TRIES: Final = 6
FIRST_PAUSE_S: Final = 0.25
POLL_S: Final = 0.1
TRANSIENT: Final = (408, 425, 429)
"""Of the client errors of HTTP, those that go by."""

_known: dict[str, dict[str, Any] | None] = {}
_abandoned = threading.Event()
_threads = ThreadPoolExecutor(MAX_BLOCKS, thread_name_prefix="shmserve-remote")


def forget() -> None:
    """Ask the stores anew about their files from now on."""
    _known.clear()


def abandon() -> None:
    """Have all reads of this process end by CancelledError, soon, until the next `begin`."""
    _abandoned.set()


def begin() -> None:
    """Take up reading; ask the stores anew."""
    _abandoned.clear()
    forget()


class RemotePath(PurePosixPath):
    """A file or directory in a store, or where one may be. Its text is the URL without secrets."""

    @property
    def url(self) -> str:
        """The URL as it was given."""
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __str__(self) -> str:
        return without_secrets(self.url)

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is no path of this machine")

    @property
    def name(self) -> str:
        """The last component, without a query."""
        return super().name.partition("?")[0]

    def info(self) -> dict[str, Any]:
        """Return what the store says of it: `type`, `size`, and what tells one version from the next.

        Raises:
            FileNotFoundError: there is nothing.
            SourceFormatError: the store cannot be asked, or does not serve ranges.
        """
        url = self.url
        if url not in _known:
            try:
                _known[url] = _again(lambda: _info(url), self)
            except FileNotFoundError:
                _known[url] = None
        found = _known[url]
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return found

    def stat(self) -> Any:
        """Return what `os.stat` would say; the inode is made of what tells one version from the next."""
        info = self.info()
        if info["type"] == "directory":
            return SimpleNamespace(st_mode=stat.S_IFDIR, st_size=0, st_mtime_ns=0, st_ino=0, st_dev=0)
        if info.get("size") is None:
            raise SourceFormatError(f"{self}: the server does not tell its size: download it")
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        inode = int.from_bytes(sha256(version.encode()).digest()[:7])
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=int(info["size"]), st_mtime_ns=0, st_ino=inode, st_dev=0)

    def exists(self) -> bool:
        """Return whether there is something."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return self.exists() and self.info()["type"] == "file"

    def is_dir(self) -> bool:
        """Return whether there is something with files in it."""
        return self.exists() and self.info()["type"] == "directory"

    def resolve(self) -> RemotePath:
        """Return itself: there are no links."""
        return self

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is in the directory."""
        for path in self._listed(lambda system, path: system.ls(path, detail=True)):
            if path.parent == self:
                yield path

    def files_below(self) -> list[str]:
        """Return all files in the directory and those below, relative to it."""
        found = self._listed(lambda system, path: list(system.find(path, detail=True).values()))
        return sorted("/".join(path.parts[len(self.parts) :]) for path in found)

    def _listed(self, ask: Callable[[Any, str], list[dict[str, Any]]]) -> list[RemotePath]:
        system, path = _system(self.url)
        entries = _again(lambda: ask(system, path), self)
        found = []
        for entry in entries:
            child = RemotePath(system.unstrip_protocol(entry["name"]))
            if entry.get("size") is not None:  # listings of HTTP have names alone
                _known[child.url] = entry
            found.append(child)
        return found

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield what is in the directory under such names."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def open(self, mode: str = "rb", **_: Any) -> io.BufferedReader:
        """Return the file for reading of bytes, buffered."""
        assert mode == "rb", mode
        return io.BufferedReader(_RemoteFile(self), BUFFER_NBYTES)

    def read_bytes(self) -> bytes:
        """Return the whole content."""
        return self.read_head(self.stat().st_size)

    def read_head(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes, fewer where it is shorter."""
        content = np.empty(min(nbytes, self.stat().st_size), np.uint8)
        self.read_exactly(0, content)
        return content.tobytes()

    def read_exactly(self, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `offset`. Raises SourceFormatError where the file ends before."""
        nbytes = self.stat().st_size
        if offset + target.nbytes > nbytes:
            raise SourceFormatError(
                f"{self} changed while it was read: {target.nbytes} bytes wanted at byte {offset}, it ends at byte "
                f"{nbytes}; start again when it is complete"
            )
        _blocks.read(self, offset, target, nbytes)


_VERSIONS: Final = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "mtime",
    "updated",
    "created",
)
"""Under which names stores say what changes with a file's content, the best first: listings may have fewer."""


def matches(pattern: RemotePath) -> list[RemotePath]:
    """Return the files whose URLs match the pattern, which has `*`, `?` or `[` in it."""
    system, path = _system(pattern.url)
    return [RemotePath(system.unstrip_protocol(name)) for name in _again(lambda: system.glob(path), pattern)]


def copy_ranges(path: RemotePath, write: Callable[[bytes, int], object], cancelled: threading.Event) -> None:
    """Call `write` with each block of the file and its position, several at once, from several threads.

    Raises:
        CancelledError: `cancelled` was set.
        SourceFormatError: the file cannot be read.
    """
    nbytes = path.stat().st_size
    running: list[Future[None]] = []

    def copy(start: int) -> None:
        write(_fetch(path, start, min(start + BLOCK_NBYTES, nbytes)), start)

    try:
        for start in range(0, nbytes, BLOCK_NBYTES):
            if cancelled.is_set():
                raise CancelledError("loading was cancelled")
            if len(running) == MAX_BLOCKS:
                _result(running.pop(0))
            running.append(_threads.submit(copy, start))
        while running:
            _result(running.pop(0))
    finally:
        for future in running:
            future.cancel()


class _RemoteFile(io.RawIOBase):
    """A remote file as Python reads files."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._nbytes = path.stat().st_size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = np.frombuffer(buffer, np.uint8)[: max(0, self._nbytes - self._position)]
        if target.nbytes:
            self._path.read_exactly(self._position, target)
        self._position += target.nbytes
        return target.nbytes


class _Blocks:
    """Reads of this process: what is read in order is fetched ahead, in blocks; all else just as it is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[tuple[RemotePath, int], Future[bytes]] = {}
        self._used: dict[tuple[RemotePath, int], int] = {}
        self._runs: dict[RemotePath, tuple[int, int]] = {}
        """Where the last read of a file ended, and how much was read in order up to there."""
        self._fronts: dict[RemotePath, int] = {}
        """The first block that nobody has asked for in this pass over the file."""

    def read(self, path: RemotePath, offset: int, target: NDArray[np.uint8], nbytes: int) -> None:
        """Fill `target` with the bytes from `offset` of the file, which has `nbytes`."""
        with self._lock:
            end, run_nbytes = self._runs.get(path, (0, 0))
            run_nbytes = target.nbytes + (run_nbytes if end == offset else 0)
            self._runs[path] = (offset + target.nbytes, run_nbytes)
        if run_nbytes < LARGE_NBYTES:
            target[:] = np.frombuffer(_result(_threads.submit(_fetch, path, offset, offset + target.nbytes)), np.uint8)
            return
        done = 0
        while done < target.nbytes:
            number, within = divmod(offset + done, BLOCK_NBYTES)
            block = _result(self._block(path, number, nbytes))
            part = np.frombuffer(block, np.uint8)[within : within + target.nbytes - done]
            target[done : done + part.nbytes] = part
            done += part.nbytes
            self._count(path, number, part.nbytes, len(block))

    def _block(self, path: RemotePath, number: int, nbytes: int) -> Future[bytes]:
        """Return the block, and have those behind it fetched as far as there is room for them."""
        last = (nbytes - 1) // BLOCK_NBYTES
        with self._lock:
            if (path, number) not in self._running:
                self._fronts[path] = number
            for ahead in range(self._fronts[path], min(number + MAX_BLOCKS // 2, last) + 1):
                if len(self._running) >= MAX_BLOCKS:
                    self._drop(path, number)
                if len(self._running) >= MAX_BLOCKS and ahead > number:
                    break
                start = ahead * BLOCK_NBYTES
                self._running[path, ahead] = _threads.submit(_fetch, path, start, min(start + BLOCK_NBYTES, nbytes))
                self._fronts[path] = ahead + 1
            return self._running[path, number]

    def _drop(self, path: RemotePath, number: int) -> None:
        """Forget the oldest block that was fetched and is not among those that `number` of this file lets expect."""
        expected = range(number - 1, number + MAX_BLOCKS)
        for key, future in self._running.items():
            if future.done() and not (key[0] == path and key[1] in expected):
                del self._running[key]
                self._used.pop(key, None)
                return

    def _count(self, path: RemotePath, number: int, nbytes: int, of_nbytes: int) -> None:
        """Note that so much of a block was used; drop it when that is all."""
        key = (path, number)
        with self._lock:
            if key in self._running:
                self._used[key] = self._used.get(key, 0) + nbytes
                if self._used[key] >= of_nbytes:  # if it is read again, it is fetched again
                    del self._running[key], self._used[key]


_blocks = _Blocks()


def _result(future: Future[Any]) -> Any:
    """Return the result; raise CancelledError once the reads of this process are abandoned."""
    while True:
        try:
            return future.result(POLL_S)
        except NotYetError:
            if future.done():
                raise
            if _abandoned.is_set():
                future.cancel()
                raise CancelledError from None


def _fetch(path: RemotePath, start: int, stop: int) -> bytes:
    """Return the bytes `[start, stop)`, in as many tries as it takes up to TRIES without getting further."""
    system, name = _system(path.url)
    found = b""

    def fetch() -> bytes:
        nonlocal found
        wanted = stop - start - len(found)
        part: bytes = system.cat_file(name, start=start + len(found), end=stop)
        if len(part) > wanted:
            raise SourceFormatError(f"{path}: its server does not serve ranges of a file: download it")
        found += part
        if len(found) < stop - start:
            raise OSError(f"{len(part)} bytes came instead of {wanted}")
        return found

    data: bytes = _again(fetch, path, f"bytes {start} to {stop} of ")
    return data


def _again(ask: Callable[[], Any], path: RemotePath, what: str = "") -> Any:
    """Return what `ask` returns, asked again with growing pauses where that may help.

    Raises:
        FileNotFoundError: there is no such file.
        SourceFormatError: it is refused, or fails each time; the message has the last reason.
    """
    for number in range(TRIES):
        if _abandoned.is_set():
            raise CancelledError
        try:
            return ask()
        except (FileNotFoundError, SourceFormatError, ConfigError):
            raise
        except Exception as error:  # stores have errors of many libraries
            status = getattr(error, "status", None)
            refused = isinstance(status, int) and 400 <= status < 500 and status not in TRANSIENT
            reason = scrubbed(f"{type(error).__name__}: {error}")
            if isinstance(error, PermissionError) or refused or type(error).__name__ == "NoCredentialsError":
                raise SourceFormatError(
                    f"{path}: its store refuses to give it ({reason}): set the credentials for it in the environment"
                ) from error
            if number == TRIES - 1:
                raise SourceFormatError(
                    f"{what}{path} cannot be read, tried {TRIES} times ({reason}): start again when its store answers"
                ) from error
        _abandoned.wait(FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.5))
    raise AssertionError


@cache
def _system_of(scheme: str) -> Any:
    """Return fsspec's file system for the URLs of a scheme."""
    core = require("fsspec.core", EXTRA, f"{scheme}://")
    try:
        return core.url_to_fs(f"{scheme}://", use_listings_cache=False)[0]
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a library ({error}): pip install 'shmserve[{EXTRA}]'") from error
    except ValueError as error:
        raise ConfigError(f"{scheme}:// is no store that fsspec knows: {error}") from error


def _system(url: str) -> tuple[Any, str]:
    """Return the file system of the URL, and its name there."""
    system = _system_of(url.partition(":")[0])
    return system, system._strip_protocol(url)


def _info(url: str) -> dict[str, Any]:
    system, name = _system(url)
    if "http" in system.protocol:
        return _http_info(system, url)
    found: dict[str, Any] = system.info(name)
    return found


def _http_info(system: Any, url: str) -> dict[str, Any]:
    """Return what a server says of a file when it is asked for its first byte; a page of HTML is a directory."""
    asyn = require("fsspec.asyn", EXTRA, url)

    async def ask() -> dict[str, Any]:
        session = await system.set_session()
        headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
        async with session.get(system.encode_url(url), headers=headers) as response:
            if response.status in (404, 410):
                raise FileNotFoundError(url)
            found = {key: response.headers[key] for key in ("ETag", "Last-Modified") if key in response.headers}
            if response.headers.get("Content-Type", "").startswith("text/html"):
                return {"type": "directory", "size": None}
            if response.status == 416:  # it has no first byte
                return {"type": "file", "size": 0, **found}
            response.raise_for_status()
            if response.status != 206:
                raise SourceFormatError(
                    f"{without_secrets(url)}: its server does not serve ranges of a file: download it"
                )
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            return {"type": "file", "size": int(size) if size.isdigit() else None, **found}

    found: dict[str, Any] = asyn.sync(system.loop, ask)
    return found
