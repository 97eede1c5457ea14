"""Publishing: Python objects of training code, built into shared memory by exactly one of all processes that have them.

Whoever comes first builds, and hands the segment to a daemon of its own (see `embedded`), which keeps it for as long
as somebody has it attached; the others wait for their turn and find it there. A builder that is killed leaves its turn,
and nothing else, to the next.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import psutil
import xxhash
from numpy.typing import ArrayLike, NDArray

from . import embedded
from .chunks import Chunk, common_form, convert, encode, objects, rows
from .connection import seconds
from .errors import ConfigError, ObjectError
from .layout import DTYPES, Description, SourceRecord
from .objects import pack
from .plans import join_column
from .rows import VALUE, all_have, batched, common_keys
from .segment import Segment
from .shared_list import SharedList
from .staging import StagedChunk, Staging
from .writer import open_unnamed, write_segment

__all__ = ["publish", "shared_array"]


def publish(
    name: str,
    objects: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    scope: str | None = None,
    linger: float = 60.0,
    timeout: float = 30.0,
) -> SharedList:
    """Return the objects as a list in shared memory, one copy for all processes of this job on this node.

    Of all ranks and workers that call it with the same name exactly one builds, and the others wait. Dicts of the same
    keys become typed columns; what fits no type is stored as msgpack. Nothing is pickled, and each object comes back
    equal to what it was, of the same type.

    Args:
        name: what it is called, for people and for other processes of the job.
        objects: a list, any iterable, a map-style dataset; or a function that returns one, and that is called in the
            process that builds alone. Iterated once.
        scope: which processes share. None means this job: the Slurm step, or what the outermost Python process that
            this one descends from has started, such as torchrun; or `$SHMSERVE_SCOPE` where that is set. Lists that
            differ are never taken for each other, nor functions of other code or with other values bound. What a
            function reads is not looked at, and of a dataset only its class and length: give those names of their own.
        linger: how many seconds it stays without any process that has it, five at least.
        timeout: seconds that an answer may take; building may take as long as it needs.

    Raises:
        ObjectError: an object holds something that cannot be stored; the message has the path to it.
        ConfigError: the name is none.
        OutOfSharedMemoryError: the objects do not fit.
        ShmserveError: as `ShmDataset.from_path`.
    """
    key = _key("objects", name, scope, _digest(objects))
    served = _shared(key, name, lambda fd: _stage_objects(fd, objects), linger, timeout)
    return SharedList(name, served.path, served.header.nonce)


def shared_array(
    name: str,
    build: Callable[[], ArrayLike],
    *,
    scope: str | None = None,
    linger: float = 60.0,
    timeout: float = 30.0,
) -> NDArray[Any]:
    """Return an array in shared memory, read-only, that `build` returned in one of all processes of this job and node.

    Args:
        name: what it is called.
        build: makes the array, of one axis at least; it is called in one process.
        scope: as for `publish`.
        linger: likewise.
        timeout: likewise.

    Raises:
        ObjectError: it is no array of numbers.
        ShmserveError: as `publish`.
    """
    key = _key("array", name, scope, _digest(build))
    segment = _shared(key, name, lambda fd: _stage_array(fd, build), linger, timeout)
    array = segment.array(segment.description.columns[0].values)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class _Staged:
    """What was built: for each chunk of rows, the parts of each column; and whether a row is a dict of columns."""

    staging: Staging
    rows: list[dict[str, StagedChunk]]
    is_table: bool


def _shared(key: str, name: str, build: Callable[[int], _Staged], linger_s: float, timeout_s: float) -> Segment:
    """Return the segment of that key, built here where nobody has."""
    linger_s, timeout_s = seconds("linger", linger_s), seconds("timeout", timeout_s)
    shm_dir = os.environ.get("SHMSERVE_SHM_DIR", "/dev/shm")
    name = name.replace("/", ".")  # which a daemon's datasets cannot have in their names

    @contextmanager
    def segment() -> Iterator[str]:
        fd = open_unnamed(shm_dir)
        try:
            owned = _write(key, name, build(fd), shm_dir)
        finally:
            os.close(fd)
        try:
            attached = Segment.attach(owned.path, owned.header.nonce)  # or another daemon would remove it
            owned.close()
            yield owned.path
            del attached
        except BaseException:
            embedded.remove_orphan(owned.path)
            raise

    return embedded.serve_built(key, name, segment, linger_s=linger_s, timeout_s=timeout_s).segment


def _write(key: str, name: str, staged: _Staged, shm_dir: str) -> Any:
    first = staged.rows[0]
    columns = [
        join_column([staged.staging.plan(column, row[column], f"object {column!r}") for row in staged.rows])
        for column in first
    ]
    description = Description(
        name=name,
        format="objects",
        num_samples=sum(next(iter(row.values())).count for row in staged.rows),
        columns=tuple(column.column() for column in columns),
        source=SourceRecord(key, secrets.token_hex(16), (f"published by process {os.getpid()}",), 0),
        table=staged.is_table,
    )
    return write_segment(
        description,
        [plan.pieces for column in columns for plan in column.arrays()],
        shm_dir=shm_dir,
        progress=lambda done, total: None,
        cancelled=threading.Event(),
        vocab_size=None,
        waiting_nbytes=lambda: staged.staging.nbytes,
    )


def _stage_objects(fd: int, given: Iterable[Any] | Callable[[], Iterable[Any]]) -> _Staged:
    """Return the objects in an unnamed file, each column in one form."""
    staging = Staging(fd)
    staged: list[dict[str, StagedChunk]] = []
    keys: tuple[str, ...] | None = None
    first = 0
    taken_nbytes: list[int] = []
    for values in batched(given() if callable(given) else given, taken_nbytes):
        before_nbytes = staging.written_nbytes
        if not staged:
            keys = common_keys(values)
        elif keys is not None and not all_have(values, keys):
            staged = [{VALUE: _joined_rows(staging, row, keys)} for row in staged]
            keys = None
        if keys is None:
            staged.append({VALUE: staging.append(encode(values, "", first))})
        else:
            columns = {key: [value[key] for value in values] for key in keys}
            staged.append({key: staging.append(encode(column, key, first)) for key, column in columns.items()})
        first += len(values)
        taken_nbytes.append(staging.written_nbytes - before_nbytes)
    if not staged:
        staged = [{VALUE: staging.append(objects([]))}]
    for name in staged[0]:
        form = common_form([row[name].form for row in staged], numbers_widen=False)
        for row in staged:
            if row[name].form != form:
                row[name] = staging.append(convert(staging.load(row[name]), form, name))
    return _Staged(staging, staged, keys is not None)


def _joined_rows(staging: Staging, row: Mapping[str, StagedChunk], keys: tuple[str, ...]) -> StagedChunk:
    """Return dicts, which were staged by column, as objects: others are not like them."""
    columns = [list(staging.load(row[key]).samples()) for key in keys]
    return staging.append(objects([dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]))


def _stage_array(fd: int, build: Callable[[], ArrayLike]) -> _Staged:
    array = np.asarray(build())
    if array.dtype.name not in DTYPES or not array.ndim:
        raise ObjectError(
            f"an array of {array.dtype} and shape {array.shape} cannot be shared: give numbers, with an axis"
        )
    staging = Staging(fd)
    chunk: Chunk = rows(array.astype(DTYPES[array.dtype.name], copy=False))
    return _Staged(staging, [{VALUE: staging.append(chunk)}], False)


def _key(what: str, name: str, scope: str | None, digest: str) -> str:
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise ConfigError(f"name {name!r}: it must have 1 to 128 printable characters")
    scope = scope or os.environ.get("SHMSERVE_SCOPE") or _job()
    return hashlib.sha256(repr((what, name, scope, digest)).encode("utf-8", "surrogatepass")).hexdigest()


def _job() -> str:
    """Return what all processes of this job on this node have in common, and no other job has."""
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    if job and step:
        return f"slurm {job}.{step}"
    outermost = psutil.Process()
    for ancestor in outermost.parents():
        if not _is_python(ancestor):
            break
        outermost = ancestor
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"process {outermost.pid} of {namespace} since {outermost.create_time()}"


def _is_python(process: psutil.Process) -> bool:
    try:
        return str(os.path.basename(process.exe())).startswith("python")
    except psutil.Error:  # another user's, or it has ended
        return False


def _digest(given: Any) -> str:
    """Return what tells objects from others of the same name: all of a list, the code of a function, else little."""
    digest = xxhash.xxh3_128()
    if isinstance(given, list | tuple):
        for index, value in enumerate(given):
            digest.update(pack(value, f"[{index}]"))
    elif isinstance(given, FunctionType):
        bound = [*(given.__defaults__ or ()), *(cell.cell_contents for cell in given.__closure__ or ())]
        told = (given.__module__, given.__qualname__, _code(given.__code__), list(map(_packed, bound)))
        digest.update(repr(told).encode("utf-8", "surrogatepass"))
    else:
        digest.update(f"{type(given).__qualname__} {len(given) if hasattr(given, '__len__') else ''}".encode())
    return str(digest.hexdigest())


def _packed(value: Any) -> bytes | str:
    """Return what tells a value that a function has bound from others, as far as it can be told."""
    try:
        return pack(value)
    except ObjectError:
        return type(value).__qualname__


def _code(code: CodeType) -> list[object]:
    """Return what a function does, the same in every process that has it."""
    constants: list[object] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_code(constant))
        else:
            constants.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    return [code.co_code, code.co_names, constants]
