"""`python -m shmserve.decoder FD`: decodes parts of sources for a daemon, in a process that may be killed.

Libraries that decode are large, some hold Python's lock for long, and damaged files can make them crash: a daemon has
none of this in itself. Tasks come pickled from the daemon on stdin. Rows go into the unnamed file FD; where they are
goes to stdout as msgpack, one map each, which the daemon reads as it reads anything: checked, never unpickled. When
stdin ends, because the daemon does, so does this process, whatever it is doing.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeAlias

import msgpack

from shmserve_client.chunks import Chunk, Form, convert, objects
from shmserve_client.errors import ConfigError, ShmserveError, SourceFormatError, SourceNotFoundError
from shmserve_client.staging import StagedChunk, Staging

from .sources.base import DecodedSource, SourceOptions
from .sources.images import decoded_images
from .sources.python_code import PythonCode

__all__ = ["Convert", "Decode", "Split", "Task", "answers", "failure"]

Split: TypeAlias = tuple[DecodedSource]
"""Answer {"parts": [...]}."""
Decode: TypeAlias = tuple[DecodedSource, Any, SourceOptions, bool]
"""A source, a part of it, how, and whether values that are the same in its file need not be copied: answer
{"rows": {name: staged chunk}, "count": n} for each chunk of rows."""
Convert: TypeAlias = tuple[str, StagedChunk | int, Form]
"""A column's name, a chunk, and what it is to become: answer {"chunk": staged chunk}. A number is that of rows which
lack the column: None for each."""
Task: TypeAlias = Split | Decode | Convert


def answers(task: Task, staging: Staging) -> Iterator[dict[str, Any]]:
    """Yield what the daemon is told."""
    match task:
        case (DecodedSource() as source,):
            yield {"parts": source.parts()}
        case (DecodedSource() as source, part, SourceOptions() as options, bool() as file_stays):
            for chunks in (source.locate if options.in_place else source.decode)(part, options.columns):
                for some in (chunks,) if options.decode is None else _decoded(chunks, source, options):
                    yield _staged(some, source, options, staging, os.fspath(source.values) if file_stays else "")
        case (str() as name, StagedChunk() | int() as given, Form() as form):
            chunk = objects([None] * given) if isinstance(given, int) else staging.load(given)
            yield {"chunk": asdict(_append(convert(chunk, form, name), staging))}


def _decoded(chunks: dict[str, Chunk], source: DecodedSource, options: SourceOptions) -> Iterator[dict[str, Chunk]]:
    assert options.decode is not None
    wanted = {name: chunk for name, chunk in chunks.items() if options.columns is None or name in options.columns}
    return decoded_images(wanted or chunks, options.decode, str(source.values))


def _staged(
    chunks: dict[str, Chunk], source: DecodedSource, options: SourceOptions, staging: Staging, file: str
) -> dict[str, Any]:
    """Return the answer for a chunk of rows, of which the chosen columns are appended to the file."""
    columns = options.columns
    counts = {name: chunk.count for name, chunk in chunks.items()}
    if len(set(counts.values())) != 1:
        raise SourceFormatError(f"{source.values}: its columns differ in length: {counts}")
    count = next(iter(counts.values()))
    for name in columns or ():
        if name not in chunks and not source.columns_vary:
            raise ConfigError(f"{source.values}: no column {name!r}: it has {', '.join(map(repr, chunks))}")
    chosen = chunks if columns is None else {name: chunks[name] for name in columns if name in chunks}
    staged = {name: asdict(_append(chunk, staging, file, options.in_place)) for name, chunk in chosen.items()}
    return {"rows": staged, "count": count}


class _NoRoomError(Exception):
    """The staging file cannot grow by so many bytes."""


def _append(chunk: Chunk, staging: Staging, file: str = "", in_place: bool = False) -> StagedChunk:
    try:
        return staging.append(chunk, file, in_place=in_place)
    except OSError as error:
        raise _NoRoomError(chunk.nbytes) from error


def failure(error: Exception, task: Task) -> dict[str, Any]:
    """Return what the daemon is told of an error."""
    where = task[0].values if isinstance(task[0], DecodedSource) else task[0]
    match error:
        case _NoRoomError():
            return {"no_room": error.args[0]}
        case ShmserveError():
            said = error
        case FileNotFoundError():
            said = SourceNotFoundError(f"{error.filename or where}: vanished while it was read; start again")
        case OSError():
            said = SourceFormatError(f"{error.filename or where}: cannot be read: {error.strerror or error}")
        case MemoryError():
            said = SourceFormatError(f"{where}: a part of it does not fit into memory: it is damaged, or cut it up")
        case _:  # of a library, or ours: each has its own for damaged files
            said = SourceFormatError(
                f"{where}: cannot be decoded, it is damaged or not supported: {type(error).__name__}: {error}"
            )
    return {"error": said.code, "message": str(said)}


class _WithoutPandas:
    """Refuses to import pandas: pyarrow does where it can, for 0.2 s, and for conversions that nobody asks for here."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used here", name=name)


def _receive(stdin: BinaryIO, tasks: SimpleQueue[Task]) -> None:
    """Queue each task, and end the process when there are no more; in a thread, which no library can hold up."""
    while True:
        try:
            tasks.put(pickle.load(stdin))
        except EOFError:
            os._exit(0)


def main() -> None:
    """Do one task after the other."""
    staging = Staging(int(sys.argv[1]))
    stdout = os.dup(1)
    os.dup2(2, 1)  # what a library or a user's code prints is no answer
    tasks: SimpleQueue[Task] = SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, tasks), daemon=True).start()
    with open(stdout, "wb", buffering=0) as answered:
        while True:
            task = tasks.get()
            if not isinstance(task[0], PythonCode) and sys.meta_path[0] is not _WithoutPandas:
                sys.meta_path.insert(0, _WithoutPandas)
            try:
                for answer in answers(task, staging):
                    answered.write(msgpack.packb(answer))
                last: dict[str, Any] = {"done": True}
            except Exception as error:
                last = failure(error, task)
            answered.write(msgpack.packb(last))


if __name__ == "__main__":
    main()
