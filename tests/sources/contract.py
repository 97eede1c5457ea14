"""What every source must do, as one class of tests; a format's own test class inherits it and lists its cases."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shmserve.sources import SourceOptions, resolve
from shmserve_client.errors import ConfigError, SourceFormatError

from .reading import FIXTURES, arrays, plan, read, samples


@dataclass(frozen=True)
class Case:
    """One corpus that another project's own code wrote, and what it holds."""

    files: tuple[str, ...]
    """The shard's files below the fixtures, the values' file first."""
    dtype: str
    samples: list[Any]
    arrays: dict[str, list[int]] = field(default_factory=dict)
    ambiguous: bool = False
    """Half of the values' bytes are as many items of half the size, and nothing else tells: truncation goes unseen."""
    stays: bool = True
    """Whether the values can be mapped in their files."""

    def __str__(self) -> str:
        return self.files[0]


def expected(folder: str) -> dict[str, Any]:
    return json.loads((FIXTURES / folder / "expected.json").read_text())


def pair(prefix: str, dtype: str, samples: list[Any], **arrays: list[int]) -> Case:
    ambiguous = dtype == "float64" and len(samples) == 1
    return Case((f"{prefix}.bin", f"{prefix}.idx"), dtype, samples, arrays, ambiguous)


def truncate(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(nbytes)


class SourceContract:
    """Inherited once per format. `case` is a fixture of the subclass; `files` are its files, copied, values first."""

    format: str

    @pytest.fixture
    def files(self, case: Case, tmp_path: Path) -> list[Path]:
        return [Path(shutil.copy(FIXTURES / name, tmp_path)) for name in case.files]

    def test_samples_are_those_that_were_written(self, case, files):
        corpus = plan(files[0])
        assert corpus.format == self.format
        assert corpus.columns[0].values.dtype == case.dtype
        assert samples(corpus) == case.samples
        assert corpus.num_samples == len(case.samples)
        assert arrays(corpus) == case.arrays

    @pytest.mark.parametrize("window_items", [1, 3])
    def test_any_windows_give_the_same(self, case, files, window_items):
        corpus = plan(files[0])
        assert samples(corpus, window_items) == case.samples
        assert arrays(corpus, window_items) == case.arrays

    def test_every_name_of_the_shard_means_the_shard(self, case, files):
        names = [str(file) for file in files] + ([str(files[0].with_suffix(""))] if files[0].suffix == ".bin" else [])
        if len(files) == 1:
            names = [str(files[0])]
        fingerprints = {resolve([name], SourceOptions()).fingerprint for name in names}
        assert len(fingerprints) == 1
        assert resolve(names, SourceOptions()).files == tuple(files)

    def test_the_directory_means_the_shard(self, case, files, tmp_path):
        assert resolve([str(tmp_path)], SourceOptions()).files == tuple(files)

    def test_shards_are_joined(self, case, files, tmp_path):
        more = tmp_path / "more"
        more.mkdir()
        again = [Path(shutil.copy(file, more)) for file in files]
        corpus = plan(files[0], again[0])
        assert samples(corpus) == case.samples * 2
        assert corpus.num_samples == 2 * len(case.samples)
        if corpus.columns[0].offsets is not None:
            assert read(corpus.columns[0].offsets).tolist()[-1] == corpus.columns[0].values.shape[0]
        if "document_indices" in case.arrays:
            first = case.arrays["document_indices"]
            moved = [index + len(case.samples) for index in first[1:]]
            assert arrays(corpus)["document_indices"] == first + moved
        if "modes" in case.arrays:
            assert arrays(corpus)["modes"] == case.arrays["modes"] * 2

    def test_mapped_in_place_they_are_the_same_or_refused(self, case, files, tmp_path):
        if not case.stays:
            with pytest.raises(ConfigError, match=r"cannot be mapped where they are.*shmserve build"):
                plan(files[0], in_place=True)
            return
        corpus = plan(files[0], in_place=True)
        assert samples(corpus) == case.samples
        assert arrays(corpus) == case.arrays
        values = files[0].stat().st_size > 0
        assert [file.path for file in corpus.files] == [str(files[0])] * values
        assert all(not column.values.pieces for column in corpus.columns) or not values
        if values and corpus.columns[0].offsets is not None:  # two shards have a page's rest between them
            (tmp_path / "more").mkdir()
            for file in files:
                shutil.copy(file, tmp_path / "more")
            both = plan(files[0], tmp_path / "more" / files[0].name, in_place=True)
            assert samples(both) == samples(both, 1) == case.samples * 2
            assert len(both.files) == 2

    @pytest.mark.promise("F24")
    @pytest.mark.parametrize("kept", ["all but one byte", "half"])
    def test_truncated_files_are_refused_with_both_sizes(self, case, files, kept):
        for file in files[:2]:
            whole = file.read_bytes()
            if not whole or (case.ambiguous and file == files[0] and kept == "half"):
                continue
            size = len(whole) - 1 if kept == "all but one byte" else len(whole) // 2
            truncate(file, size)
            with pytest.raises(SourceFormatError, match=file.name):
                plan(files[0])
            file.write_bytes(whole)

    def test_truncation_after_planning_is_an_error_and_not_garbage(self, case, files):
        corpus = plan(files[0])
        if files[0].stat().st_size == 0:
            pytest.skip("there is nothing to truncate")
        truncate(files[0], files[0].stat().st_size - 1)
        with pytest.raises(SourceFormatError, match="changed while it was read"):
            samples(corpus)

    def test_a_change_is_noticed(self, case, files):
        resolved = resolve([str(files[0])], SourceOptions())
        assert not resolved.changed()
        files[-1].write_bytes(files[-1].read_bytes() + b"\0")
        assert resolved.changed()
        with pytest.raises(SourceFormatError):
            resolved.plan()
        files[-1].unlink()
        assert resolved.changed()

    def test_pieces_travel_to_other_processes(self, case, files):
        corpus = pickle.loads(pickle.dumps(plan(files[0])))
        assert samples(corpus) == case.samples

    def test_files_are_only_read(self, case, files):
        before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
        for file in files:
            file.chmod(0o400)
        samples(plan(files[0]))
        assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
        assert {file for file in files[0].parent.iterdir() if file.is_file()} == set(files)

    def test_another_dtype_is_refused_with_both(self, case, files):
        other = "int32" if case.dtype != "int32" else "int64"
        with pytest.raises(SourceFormatError, match=f"{case.dtype}, not {other}"):
            plan(files[0], dtype=other)
        assert samples(plan(files[0], dtype=case.dtype)) == case.samples

    def test_vocab_size_is_for_integers(self, case, files):
        if case.dtype.startswith("float"):
            with pytest.raises(SourceFormatError, match="vocab-size"):
                plan(files[0], vocab_size=100)
        else:
            plan(files[0], vocab_size=100)
