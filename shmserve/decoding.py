"""Decoding: the rows of a corpus whose files hold them in another form, by helper processes into files that wait.

Each helper appends what it decodes to an unnamed file of its own, beside the segment that is to be; parts of the corpus
go to whichever is free, and are put in order at the end. So a corpus is decoded once, in parallel, without its size
being known, and the memory is that of the segment and of a chunk for each helper.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Self, TypeAlias

import msgpack

from shmserve_client.admission import check_room, shortage
from shmserve_client.chunks import Form, common_form
from shmserve_client.errors import (
    ERROR_CLASSES,
    ConfigError,
    DatasetFailedError,
    ProtocolError,
    ShmserveError,
    SourceFormatError,
)
from shmserve_client.plans import ColumnPlan
from shmserve_client.records import typed
from shmserve_client.staging import StagedChunk, Staging
from shmserve_client.writer import open_unnamed

from .decoder import Task
from .sources import Resolved
from .sources.base import Corpus, DecodedSource, ShardPlan, SourceOptions
from .sources.copies import Copied, copied
from .sources.files import size_of
from .sources.join import join
from .sources.pieces import FileSpan
from .sources.shards import unnatural_order

__all__ = ["Planned", "plan_corpus", "plan_head"]

_MAX_HELPERS: Final = 4
"""Each takes the memory of a library, besides that of a chunk."""
_LARGE_NBYTES: Final = 64 << 20
_POLL_S: Final = 0.2
"""How long it may take until a load that was cancelled ends."""
_READ_NBYTES: Final = 1 << 16
_HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: ": memory ran out, or somebody killed it",
    signal.SIGBUS: ": the file became shorter while it was read, or its disk failed",
}
_ABSENT: Final = Form("object", "uint8", None)
"""What the column is of a chunk that lacks it: None for each row."""


@dataclass(frozen=True)
class Planned:
    """A corpus whose pieces can be read, and how much memory they still take where the segment will be."""

    corpus: Corpus
    waiting_nbytes: Callable[[], int]


@contextmanager
def plan_corpus(
    resolved: Resolved,
    *,
    shm_dir: str | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: threading.Event | None = None,
) -> Iterator[Planned]:
    """Give the plan of the corpus, decoded where it has to be; its pieces can be read within the block.

    Args:
        resolved: the corpus.
        shm_dir: where the segment will be: pieces give their memory back as they are read, once. None for a temporary
            file on disk: pieces can be read again.
        progress: called with the bytes of the source that were decoded, and in all.
        cancelled: when set, decoding ends.

    Raises:
        CancelledError: `cancelled` was set.
        OutOfSharedMemoryError: what is decoded does not fit.
        DatasetFailedError: a helper was killed.
        ShmserveError: as `Resolved.plan`, and what the sources' `decode` raises.
    """
    if not isinstance(resolved.shards[0], DecodedSource):
        yield Planned(resolved.plan(), lambda: 0)
        return
    with _Helpers(shm_dir, cancelled or threading.Event()) as helpers:
        decoded = _decode(resolved, helpers, progress)
        if resolved.changed():
            raise SourceFormatError(
                f"{', '.join(resolved.data)}: changed while it was read; start again when it is complete"
            )
        corpus = _join(resolved, _converted(resolved, decoded, helpers))
        helpers.end()
        yield Planned(corpus, helpers.staged_nbytes)


@contextmanager
def plan_head(resolved: Resolved) -> Iterator[Corpus]:
    """Give the plan of some of the first rows, quickly, for a decoded corpus. Raises as `plan_corpus`."""
    with _Helpers(None, threading.Event()) as helpers:
        shards = [shard for shard in resolved.shards if isinstance(shard, DecodedSource)]
        with closing(copied(shards, helpers.cancelled)) as groups:
            for group in groups:
                for shard in group.here:
                    for part in _parts(shard, helpers):
                        if rows := _first_rows(shard, part, resolved.options, helpers):
                            yield _join(resolved, rows)
                            return
        raise SourceFormatError(f"{', '.join(resolved.data)}: there are no rows in it")


def _first_rows(shard: DecodedSource, part: Any, options: SourceOptions, helpers: _Helpers) -> list[_Rows]:
    """Return the first chunk of a part, if there is one."""
    found: list[_Rows] = []

    def on_answer(number: int, helper: _Helper, answer: dict[str, Any]) -> bool:
        if "rows" in answer:
            found.append(_Rows(shard, helper, answer["count"], _staged(answer["rows"])))
        return bool(found)

    helpers.run([(shard, part, options, False)], on_answer)
    return found


@dataclass(slots=True)
class _Rows:
    """Rows that were decoded, and whose file they wait in."""

    source: DecodedSource
    helper: _Helper
    count: int
    columns: dict[str, StagedChunk]

    def plans(self) -> Iterator[ColumnPlan]:
        """Yield the plan of each column."""
        path = self.source.values
        for name, staged in self.columns.items():
            span = FileSpan(path, staged.values, staged.values_nbytes) if staged.file else None
            yield self.helper.staging.plan(name, staged, str(path), span)


class _Helper:
    """A process that decodes, and the file that it appends to."""

    def __init__(self, directory: str | None) -> None:
        if directory is None:
            with tempfile.TemporaryFile(prefix="shmserve-") as file:
                self.fd = os.dup(file.fileno())
        else:
            self.fd = open_unnamed(directory)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shmserve.decoder", str(self.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self.fd,),
                process_group=0,  # Ctrl-C is the daemon's, who ends its helpers
                bufsize=0,
            )
        except BaseException:
            os.close(self.fd)
            raise
        self.staging = Staging(self.fd, keep=directory is None)
        self.task: tuple[int, Task] | None = None
        self._unpacker = msgpack.Unpacker(raw=False, strict_map_key=True)

    @property
    def answers_fd(self) -> int:
        """What becomes readable when it answers, or has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, number: int, task: Task) -> None:
        """Have it do a task."""
        assert self.process.stdin is not None
        self.task = (number, task)
        # Where it was killed, that is noticed when its answers are read.
        with suppress(BrokenPipeError):
            self.process.stdin.write(pickle.dumps(task))

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield what it has answered since. Raises DatasetFailedError when it has ended."""
        data = os.read(self.answers_fd, _READ_NBYTES)
        if not data:
            raise self._killed()
        self._unpacker.feed(data)
        yield from self._unpacker

    def _killed(self) -> DatasetFailedError:
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        what = "a helper" if self.task is None else str(getattr(self.task[1][0], "values", self.task[1][0]))
        hint = _HINTS.get(-code, "")
        return DatasetFailedError(f"{what}: the process that decodes it {how}{hint}")

    def end(self) -> None:
        """Kill the process; what it has staged stays. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class _Helpers:
    """The helpers of one corpus; they are started when there is something to do for them."""

    def __init__(self, shm_dir: str | None, cancelled: threading.Event) -> None:
        self._shm_dir = shm_dir
        self.cancelled = cancelled
        self._started: list[_Helper] = []

    def run(self, tasks: Sequence[Task], on_answer: _OnAnswer, only: _Helper | None = None) -> None:
        """Have the tasks done, each by whichever helper is free, or by `only`.

        `on_answer` is called with the number of a task, who does it, and each of its answers, the last one too; it
        returns True where that is enough of it all, after which these helpers are not to be used again.
        """
        waiting = deque(enumerate(tasks))
        helpers = self._at_most(len(waiting)) if only is None else [only]
        with selectors.DefaultSelector() as selector:
            for helper in helpers:
                selector.register(helper.answers_fd, selectors.EVENT_READ, helper)
                helper.give(*waiting.popleft())
            while any(helper.task is not None for helper in helpers):
                if self.cancelled.is_set():
                    raise CancelledError("loading was cancelled")
                for key, _ in selector.select(_POLL_S):
                    helper = key.data
                    for answer in helper.answers():
                        self._check(answer)
                        if on_answer(helper.task[0], helper, answer):
                            return
                        if "done" in answer:
                            helper.task = None
                            if waiting:
                                helper.give(*waiting.popleft())

    def _at_most(self, count: int) -> list[_Helper]:
        """Return so many helpers, or fewer where the machine has fewer processors."""
        count = min(count, _MAX_HELPERS, len(os.sched_getaffinity(0)))
        while len(self._started) < count:
            self._started.append(_Helper(self._shm_dir))
        return self._started[:count]

    def _check(self, answer: dict[str, Any]) -> None:
        """Raise what the answer says went wrong."""
        if "error" in answer:
            raise ERROR_CLASSES.get(answer["error"], ShmserveError)(answer["message"])
        if "no_room" in answer:
            if self._shm_dir is not None:
                raise shortage(answer["no_room"], self._shm_dir)
            raise SourceFormatError(
                f"{tempfile.gettempdir()} has no room to decode into: free some of it, or name another by $TMPDIR"
            )
        if "rows" in answer and self._shm_dir is not None:
            # A limit of the cgroup ends in SIGKILL: the next chunks of all helpers, like this one, have to fit.
            nbytes = sum(staged.nbytes for staged in _staged(answer["rows"]).values())
            check_room(nbytes * len(self._started), self._shm_dir, loading=True)

    @property
    def are_started(self) -> bool:
        """Whether there is a helper already."""
        return bool(self._started)

    def staged_nbytes(self) -> int:
        """Return how much memory takes what was staged and not yet read."""
        return sum(helper.staging.nbytes for helper in self._started)

    def end(self) -> None:
        """End the processes; what they have staged stays until the end of the block."""
        for helper in self._started:
            helper.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for helper in self._started:
            os.close(helper.fd)


_OnAnswer: TypeAlias = Callable[[int, _Helper, dict[str, Any]], bool | None]


def _parts(shard: DecodedSource, helpers: _Helpers) -> list[Any]:
    """Return the parts of a shard; only a source that has its own idea of them needs a helper for it."""
    if type(shard).parts is DecodedSource.parts:
        return shard.parts()
    found: list[Any] = []

    def on_answer(number: int, helper: _Helper, answer: dict[str, Any]) -> None:
        if number == 0:
            found.extend(answer.get("parts", ()))

    # Of a large shard all helpers are asked, so that they start, and import libraries, at the same time.
    is_first = not helpers.are_started and sum(map(size_of, shard.files)) >= _LARGE_NBYTES
    helpers.run([(shard,)] * (_MAX_HELPERS if is_first else 1), on_answer)
    return found


def _decode(resolved: Resolved, helpers: _Helpers, progress: Callable[[int, int], None]) -> list[_Rows]:
    """Return all rows, in the order of the corpus, each chunk in the form that it was found to have."""
    shards = [shard for shard in resolved.shards if isinstance(shard, DecodedSource)]
    total_nbytes = sum(size_of(file) for shard in shards for file in shard.files)
    rows: list[_Rows] = []
    done_nbytes = 0.0
    progress(0, total_nbytes)

    def on_done(nbytes: float) -> None:
        nonlocal done_nbytes
        done_nbytes += nbytes
        progress(int(done_nbytes), total_nbytes)

    with closing(copied(shards, helpers.cancelled)) as groups:
        for group in groups:
            with group.errors_named():
                rows += _decode_group(group, resolved.options, helpers, on_done)
    return rows


def _decode_group(
    group: Copied, options: SourceOptions, helpers: _Helpers, on_done: Callable[[float], None]
) -> list[_Rows]:
    """Return the rows of some shards; `on_done` is called with the bytes of the source of each part."""
    tasks: list[Task] = []
    told: list[tuple[DecodedSource, float]] = []  # by task
    for shard, here in zip(group.shards, group.here, strict=True):
        parts = _parts(here, helpers)
        tasks += [(here, part, options, not group.folder) for part in parts]
        told += [(shard, sum(map(size_of, shard.files)) / len(parts))] * len(parts)
    rows: list[list[_Rows]] = [[] for _ in tasks]

    def on_answer(number: int, helper: _Helper, answer: dict[str, Any]) -> None:
        source, nbytes = told[number]
        if "rows" in answer:
            rows[number].append(_Rows(source, helper, answer["count"], _staged(answer["rows"])))
        elif "done" in answer:
            on_done(nbytes)

    helpers.run(tasks, on_answer)
    return list(chain.from_iterable(rows))


def _staged(columns: dict[str, Any]) -> dict[str, StagedChunk]:
    found: dict[str, StagedChunk] = typed(dict[str, StagedChunk], columns, "rows", ProtocolError)
    return found


def _converted(resolved: Resolved, rows: Sequence[_Rows], helpers: _Helpers) -> list[_Rows]:
    """Return the rows with all columns, each in one form; chunks of another one are converted by whoever has them."""
    names = _names(resolved, rows)
    filled = [each for each in rows if each.count] or list(rows[:1])
    for name in names:
        forms = [each.columns[name].form if name in each.columns else _ABSENT for each in filled]
        form = common_form(forms, numbers_widen=True)
        for each, given in zip(filled, forms, strict=True):
            if name not in each.columns:
                each.columns[name] = _convert(each, name, each.count, form, helpers)
            elif given != form:
                each.columns[name] = _convert(each, name, each.columns[name], form, helpers)
    for each in filled:
        each.columns = {name: each.columns[name] for name in names}
    return filled


def _names(resolved: Resolved, rows: Sequence[_Rows]) -> list[str]:
    """Return the columns of the corpus: those that were chosen, or all in the order in which they first appear."""
    found = dict.fromkeys(name for each in rows for name in each.columns)
    if not found and resolved.options.columns is None:
        raise SourceFormatError(f"{', '.join(resolved.data)}: there are no rows in it")
    for each in rows:
        if not each.source.columns_vary and list(each.columns) != list(rows[0].columns):
            raise SourceFormatError(
                f"{each.source.values} has the columns {', '.join(each.columns)}, {rows[0].source.values} has "
                f"{', '.join(rows[0].columns)}: choose some that all of them have by --columns, or serve two datasets"
            )
    size = resolved.options.decode
    if size is not None and not any(_is_pixels(staged, size) for each in rows for staged in each.columns.values()):
        raise ConfigError(f"{', '.join(resolved.data)}: no column holds images: leave out --decode {size}")
    for name in resolved.options.columns or ():
        if name not in found:
            raise ConfigError(f"{', '.join(resolved.data)}: no row has a column {name!r}")
    return list(resolved.options.columns or found)


def _is_pixels(staged: StagedChunk, size: int) -> bool:
    return staged.dtype == "uint8" and staged.row_shape == [3, size, size]


def _convert(rows: _Rows, name: str, given: StagedChunk | int, form: Form, helpers: _Helpers) -> StagedChunk:
    found: list[StagedChunk] = []

    def on_answer(number: int, helper: _Helper, answer: dict[str, Any]) -> None:
        if "chunk" in answer:
            found.append(typed(StagedChunk, answer["chunk"], "chunk", ProtocolError))

    helpers.run([(name, given, form)], on_answer, rows.helper)
    return found[0]


def _join(resolved: Resolved, rows: Sequence[_Rows]) -> Corpus:
    """Return the plan of these rows, of which there is a chunk at least."""
    plans = [(each.source.values, ShardPlan(tuple(each.plans()))) for each in rows]
    corpus = join(resolved.shards[0].format, plans, resolved.options)
    return replace(corpus, notes=unnatural_order(resolved.data) + corpus.notes)
