"""What every decoded source must do, as one class of tests; a format's own class inherits it and lists its cases."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgpack
import pytest

from shmserve import decoding
from shmserve.decoder import answers, failure
from shmserve.decoding import plan_corpus, plan_head
from shmserve.sources import Corpus, SourceOptions, resolve
from shmserve_client.dataset import ShmDataset
from shmserve_client.errors import ERROR_CLASSES, ConfigError, ShmserveError
from shmserve_client.objects import unpack_object
from shmserve_client.plans import JoinedColumn
from shmserve_client.staging import Staging
from tests.processes import Daemon

from .reading import FIXTURES, read, read_bounds, read_values

Serve = Callable[..., Daemon]


@dataclass(frozen=True)
class DecodedCase:
    """One shard that another project's own code wrote, and what it holds."""

    path: str
    """Below the fixtures: a file, or a directory that is the shard."""
    columns: dict[str, list[Any]]
    """Each column's samples, as Python values; tensors as nested lists."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Those to check, as `ShmDataset.info.dtypes` has them."""
    cut_nbytes: int = 1
    """How much has to be missing for it to be noticed: some formats end with padding."""
    truncation_is_seen: bool = True
    """Whether the format can tell that its values' file was cut; text cannot."""
    stays: tuple[str, ...] = ()
    """The columns whose values can be mapped in their files."""
    is_named: bool = False
    """Whether the file's name is all that tells its format."""

    def __str__(self) -> str:
        return self.path


class _Here:
    """Who does the tasks of helpers in this process, whose start takes longer than most of what is tested."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "staged").open("w+b")
        self.staging = Staging(self._file.fileno(), keep=True)
        self.cancelled = threading.Event()
        self.are_started = True

    def run(self, tasks: Sequence[Any], on_answer: Callable[..., bool | None], only: object = None) -> None:
        for number, task in enumerate(tasks):
            try:
                for answer in answers(task, self.staging):
                    if on_answer(number, self, msgpack.unpackb(msgpack.packb(answer))):
                        return
            except Exception as error:
                told = failure(error, task)
                raise ERROR_CLASSES[told["error"]](told["message"]) from error
            on_answer(number, self, {"done": True})

    def staged_nbytes(self) -> int:
        return self.staging.nbytes

    def end(self) -> None:
        pass

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def table(
    *data: Path | str,
    columns: tuple[str, ...] | None = None,
    vocab_size: int | None = None,
    in_place: set[str] | None = None,
    by_helpers: bool = False,
) -> dict[str, list]:
    """Return every column of a decoded corpus as Python values, decoded in this process or by real helpers.

    With `in_place` it is located rather than decoded, and the names of the columns that stay in their files are added.
    """
    options = SourceOptions(None, vocab_size, columns, in_place=in_place is not None)
    resolved = resolve([str(path) for path in data], options)
    with ExitStack() as stack:
        if not by_helpers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(patch.object(decoding, "_Helpers", lambda shm_dir, cancelled: _Here(folder)))
        planned = stack.enter_context(plan_corpus(resolved, shm_dir=None))
        assert planned.waiting_nbytes() >= 0
        if in_place is not None:
            in_place |= {column.name for column in planned.corpus.columns if column.values.in_files is not None}
        return {column.name: column_samples(column, planned.corpus) for column in planned.corpus.columns}


def column_samples(column: JoinedColumn, corpus: Corpus) -> list[Any]:
    """Return a column's samples, tensors as nested lists."""
    values = read_values(column, corpus)
    if column.offsets is None:
        return values.tolist()
    bounds = read_bounds(column)
    assert len(bounds) == corpus.num_samples
    found = [values[start:stop] for start, stop in bounds]
    if column.shapes is not None and column.shape_offsets is not None:
        shapes, ends = read(column.shapes), read(column.shape_offsets)
        found = [sample.reshape(shapes[ends[i] : ends[i + 1]]) for i, sample in enumerate(found)]
    match column.kind:
        case "text":
            return [sample.tobytes().decode() for sample in found]
        case "bytes":
            return [sample.tobytes() for sample in found]
        case "object":
            return [unpack_object(sample.tobytes()) for sample in found]
    return [sample.tolist() for sample in found]


def plain(value: Any) -> Any:
    """Return what a dataset gives as `DecodedCase.columns` has it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


class DecodedContract:
    """Inherited once per format. `case` is a fixture of the subclass; `shard` is a copy of its file or directory."""

    format: str

    @pytest.fixture
    def shard(self, case: DecodedCase, tmp_path: Path) -> Path:
        source, target = FIXTURES / case.path, tmp_path / "data" / Path(case.path).name
        target.parent.mkdir()
        if source.is_dir():
            return Path(shutil.copytree(source, target))
        return Path(shutil.copy(source, target))

    def test_samples_are_those_that_were_written(self, case: DecodedCase, shard: Path) -> None:
        resolved = resolve([str(shard)], SourceOptions())
        assert resolved.format == self.format
        found = table(shard, by_helpers=True)
        assert list(found) == list(case.columns)
        assert found == case.columns

    def test_a_daemon_serves_them(self, case: DecodedCase, shard: Path, serve: Serve) -> None:
        daemon = serve("--data", f"data={shard}")
        with ShmDataset("data", dtype="stored") as dataset:
            names = list(case.columns)
            rows = [dict(zip(names, row, strict=True)) for row in zip(*case.columns.values(), strict=True)]
            expected = rows if len(names) > 1 else list(case.columns[names[0]])
            assert [plain(sample) for sample in dataset] == expected
            assert plain(dataset[-1]) == expected[-1]
            assert plain(dataset.__getitems__([0, len(expected) - 1])) == [expected[0], expected[-1]]
            assert {name: dataset.info.dtypes[name] for name in case.dtypes} == case.dtypes
        assert len(daemon.segments()) == 1

    def test_its_head_is_shown_without_the_rest(self, case: DecodedCase, shard: Path) -> None:
        with plan_head(resolve([str(shard)], SourceOptions())) as corpus:
            for column in corpus.columns:
                found = column_samples(column, corpus)
                assert found
                assert found == case.columns[column.name][: len(found)]

    def test_shards_are_joined_in_their_order(self, case: DecodedCase, shard: Path, tmp_path: Path) -> None:
        copy = shutil.copytree if shard.is_dir() else shutil.copy
        again = copy(shard, tmp_path / f"again{''.join(shard.suffixes)}")
        assert table(shard, again) == {name: values * 2 for name, values in case.columns.items()}

    def test_mapped_in_place_they_are_the_same_or_refused(self, case: DecodedCase, shard: Path, tmp_path: Path) -> None:
        if not case.stays:
            with pytest.raises(ConfigError, match=r"cannot be mapped where.*shmserve build"):
                table(shard, in_place=set())
            return
        stays: set[str] = set()
        assert table(shard, in_place=stays) == case.columns
        assert stays == set(case.stays)
        copy = shutil.copytree if shard.is_dir() else shutil.copy
        again = copy(shard, tmp_path / f"again{''.join(shard.suffixes)}")
        assert table(shard, again, in_place=set()) == {name: values * 2 for name, values in case.columns.items()}

    def test_columns_are_chosen(self, case: DecodedCase, shard: Path) -> None:
        names = tuple(reversed(case.columns))
        chosen = table(shard, columns=names)
        assert list(chosen) == list(names)
        assert chosen == case.columns
        assert table(shard, columns=names[:1]) == {names[0]: case.columns[names[0]]}
        with pytest.raises(ConfigError, match="column 'absent'"):
            table(shard, columns=("absent",))

    def test_a_dtype_is_refused_or_means_raw_tokens(self, case: DecodedCase, shard: Path) -> None:
        if case.is_named:
            assert resolve([str(shard)], SourceOptions("uint8")).format == "raw"
        else:
            with pytest.raises(ConfigError, match="leave out --dtype"):
                resolve([str(shard)], SourceOptions("int32"))

    def test_a_truncated_file_is_refused(self, case: DecodedCase, shard: Path) -> None:
        if not case.truncation_is_seen:
            pytest.skip("nothing in this format tells where it ends")
        (values,) = {source.values for source in resolve([str(shard)], SourceOptions()).shards[:1]}
        whole = values.read_bytes()
        for size in (len(whole) - case.cut_nbytes, len(whole) // 2):
            values.write_bytes(whole[:size])
            with pytest.raises(ShmserveError) as refusal:
                table(shard)
            assert values.name in str(refusal.value) or values.parent.name in str(refusal.value)
            assert "\n" not in str(refusal.value)

    def test_a_change_is_noticed(self, case: DecodedCase, shard: Path) -> None:
        resolved = resolve([str(shard)], SourceOptions())
        assert not resolved.changed()
        values = resolved.shards[0].values
        os.utime(values, ns=(0, 0))
        assert resolved.changed()

    def test_files_are_only_read(self, case: DecodedCase, shard: Path) -> None:
        files = [file for file in [shard, *shard.rglob("*")] if file.is_file()]
        before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
        for file in files:
            file.chmod(0o400)
        table(shard)
        assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
        assert [file for file in [shard, *shard.rglob("*")] if file.is_file()] == files

    def test_the_file_may_have_another_name(self, case: DecodedCase, shard: Path) -> None:
        if shard.is_dir() or case.is_named:
            pytest.skip("a directory is known by what is in it, and text by its name")
        other = shard.rename(shard.with_name("odd.name"))
        assert table(other) == case.columns
