"""From what a person typed to one corpus: names, directories, patterns, order, joining."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shmserve.config import datasets_from_arguments
from shmserve.sources import SOURCES, Source, SourceOptions, resolve
from shmserve.sources.shards import natural_order
from shmserve_client.errors import ConfigError, SourceFormatError, SourceNotFoundError
from shmserve_client.segment import Segment
from tests.test_adoption import nonce_of

from .reading import arrays, plan, samples
from .test_pairs import write_pair


def write_tokens(directory: Path, *names: str) -> list[Path]:
    """Write files of two tokens each, the first of which counts the files."""
    directory.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        np.array([number, 60_000], "<u2").tofile(directory / name)
    return [directory / name for name in names]


def names(*data: Path | str, **options) -> list[str]:
    return [path.name for path in resolve([str(path) for path in data], SourceOptions(**options)).files]


class TestNaturalOrder:
    @pytest.mark.promise("F29")
    @pytest.mark.parametrize(
        "ordered",
        [
            ["part_2.bin", "part_10.bin", "part_100.bin"],
            ["train.bin", "train1.bin", "train2.bin", "train10.bin"],
            ["train.en-de.en.bin", "train1.en-de.en.bin", "train2.en-de.en.bin"],
            ["part-0-00000.npy", "part-0-00001.npy", "part-1-00000.npy", "part-10-00000.npy"],
            ["2/part_1.bin", "2/part_3.bin", "10/part_2.bin"],
            ["01.bin", "1.bin", "02.bin"],
        ],
    )
    def test_numbers_count(self, ordered):
        shuffled = [Path(name) for name in ordered]
        random.Random(0).shuffle(shuffled)
        assert [str(path) for path in sorted(shuffled, key=natural_order)] == ordered


class TestDirectory:
    def test_shards_in_natural_order(self, tmp_path):
        write_tokens(tmp_path / "d", "part_10.bin", "part_2.bin", "part_1.bin")
        assert names(tmp_path / "d") == ["part_1.bin", "part_2.bin", "part_10.bin"]
        assert samples(plan(tmp_path / "d"))[::2] == [2, 1, 0]

    def test_companions_and_others_are_passed_over(self, tmp_path):
        write_tokens(tmp_path / "d", "train_1.bin", "train_2.bin")
        others = ("dict.txt", "meta.pkl", "a.json", "preprocess.log", "README.md", ".hidden.bin", "c.loss", "x.csv")
        for other in others:
            (tmp_path / "d" / other).write_text("{}")
        (tmp_path / "d" / "sub.bin").mkdir()
        assert names(tmp_path / "d") == ["train_1.bin", "train_2.bin"]

    def test_pairs_count_once(self, tmp_path):
        for number in (1, 10, 9):
            write_pair(tmp_path / f"c{number}", [1], [0], np.array([number], "<u2"))
        found = resolve([str(tmp_path)], SourceOptions())
        assert [shard.files[0].name for shard in found.shards] == ["c1.bin", "c9.bin", "c10.bin"]
        assert samples(found.plan()) == [[1], [9], [10]]

    def test_two_corpora_are_refused_with_the_remedy(self, tmp_path):
        write_tokens(tmp_path / "d", "fineweb_val_0.bin", "fineweb_train_1.bin", "fineweb_train_2.bin")
        with pytest.raises(SourceFormatError) as error:
            names(tmp_path / "d")
        message = str(error.value)
        assert "fineweb_train_1.bin, fineweb_train_2.bin; fineweb_val_0.bin" in message
        remedy = message.rpartition("--data NAME=")[2]
        assert names(remedy) == ["fineweb_train_1.bin", "fineweb_train_2.bin"]

    def test_train_beside_val_is_refused(self, tmp_path):
        write_tokens(tmp_path / "d", "train.bin", "val.bin")
        with pytest.raises(SourceFormatError, match=r"train\.bin; val\.bin: say which, .*--data NAME=.*/train\.bin"):
            names(tmp_path / "d")

    def test_nothing_to_serve_says_what_is_there(self, tmp_path):
        with pytest.raises(SourceNotFoundError, match=r"no data files .* among the 0 files"):
            names(tmp_path)
        for number in range(20):
            (tmp_path / f"data-{number}.array_record").touch()
        with pytest.raises(SourceNotFoundError, match=r"20 files of .*: data-0\.array_record, .* and 12 more"):
            names(tmp_path)


class TestPatterns:
    def test_matches_in_natural_order_without_companions(self, tmp_path):
        write_tokens(tmp_path / "d", "part_10.bin", "part_2.bin", "part_3.txt", "other.bin")
        assert names(f"{tmp_path}/d/part_*") == ["part_2.bin", "part_10.bin"]
        assert names(f"{tmp_path}/*/part_?.bin") == ["part_2.bin"]

    def test_a_pattern_may_join_what_a_directory_may_not(self, tmp_path):
        write_tokens(tmp_path / "d", "train.bin", "val.bin")
        assert names(f"{tmp_path}/d/*.bin") == ["train.bin", "val.bin"]

    def test_no_match(self, tmp_path):
        with pytest.raises(SourceNotFoundError, match=r"part_\*\.bin: no data file matches"):
            names(f"{tmp_path}/part_*.bin")

    def test_brackets_that_should_be_escaped(self, tmp_path):
        write_tokens(tmp_path / "d", "c[1]_1.bin")
        with pytest.raises(SourceNotFoundError, match=r"no data file matches.* write \[\[\]"):
            names(f"{tmp_path}/d/c[1]_*.bin")
        assert names(f"{tmp_path}/d/c[[]1]_*.bin") == ["c[1]_1.bin"]

    def test_a_prefix_with_brackets_is_a_prefix_first(self, tmp_path):
        write_pair(tmp_path / "p[1]", [1], [0], np.zeros(1, "<u2"))
        assert names(tmp_path / "p[1]") == ["p[1].bin", "p[1].idx"]

    def test_a_name_with_brackets_is_a_name_first(self, tmp_path):
        write_tokens(tmp_path / "d", "c[1].bin", "c1.bin")
        assert names(tmp_path / "d" / "c[1].bin") == ["c[1].bin"]


class TestPaths:
    @pytest.mark.promise("F29")
    def test_given_paths_keep_their_order(self, tmp_path):
        first, second, third = write_tokens(tmp_path / "d", "a.bin", "b.bin", "c.bin")
        assert names(third, first, second) == ["c.bin", "a.bin", "b.bin"]
        assert plan(third, first, second).notes == plan(first).notes

    def test_the_order_of_a_shells_glob_is_pointed_out(self, tmp_path):
        paths = write_tokens(tmp_path / "d", "part_1.bin", "part_10.bin", "part_2.bin")
        corpus = plan(*paths)
        assert samples(corpus)[::2] == [0, 1, 2]
        assert corpus.notes[0].startswith("the paths are not in natural order (part_10.bin before part_2.bin)")
        assert plan(*sorted(paths, key=natural_order)).notes == plan(tmp_path / "d").notes == corpus.notes[1:]

    def test_a_shard_counts_once(self, tmp_path):
        first, second = write_tokens(tmp_path / "d", "a1.bin", "a2.bin")
        assert names(second, tmp_path / "d", first) == ["a2.bin", "a1.bin"]

    def test_relative_paths_mean_the_same(self, tmp_path, monkeypatch):
        (path,) = write_tokens(tmp_path / "d", "a.bin")
        monkeypatch.chdir(tmp_path / "d")
        relative, absolute = (resolve([name], SourceOptions()) for name in ("../d/a.bin", str(path)))
        assert relative == absolute
        assert absolute.data == (str(path),)

    def test_missing(self, tmp_path):
        with pytest.raises(SourceNotFoundError, match="no such file, directory or prefix"):
            names(tmp_path / "c.bin")

    @pytest.mark.parametrize("path", ["s3://bucket/c.bin", "gs://bucket/c_*.bin", "https://user:secret@host/c.bin?x=1"])
    def test_a_url_stays_one(self, path):
        (dataset,) = datasets_from_arguments([[path]], SourceOptions())
        assert dataset.data == (path,)
        assert dataset.name == "c"

    def test_a_name_that_is_too_long_or_leads_in_a_circle(self, tmp_path):
        long = str(tmp_path / ("c" * 300))
        (dataset,) = datasets_from_arguments([[long]], SourceOptions())
        with pytest.raises(SourceFormatError, match="ccc: cannot be read: File name too long"):
            names(*dataset.data)
        (tmp_path / "c.bin").symlink_to("c.bin")
        with pytest.raises(SourceFormatError, match=r"c\.bin: cannot be read: Too many levels of symbolic links"):
            names(tmp_path / "c.bin")

    def test_names_that_are_no_text_are_served(self, serve, tmp_path):
        folder = os.fsencode(tmp_path) + b"/d\xff"
        os.mkdir(folder)
        paths = write_tokens(Path(os.fsdecode(folder)), "t\udcfe_10.bin", "t\udcfe_2.bin")
        daemon = serve("--data", f"tokens={paths[0]}", paths[1])
        assert "not in natural order (t\\udcfe_10.bin before t\\udcfe_2.bin)" in daemon.stderr
        (dataset,) = daemon.status().datasets
        segment = Segment.attach(dataset.path, nonce_of(dataset.path))
        assert segment.description.source.data == tuple(f"{tmp_path}/d\\udcff/t\\udcfe_{n}.bin" for n in (10, 2))

    def test_what_is_no_file(self, tmp_path):
        os.mkfifo(tmp_path / "c.bin")
        with pytest.raises(SourceFormatError, match="not a regular file"):
            names(tmp_path / "c.bin")

    def test_what_cannot_be_read(self):
        with pytest.raises(SourceFormatError, match="/proc/self/mem: cannot be read: Input/output error"):
            names("/proc/self/mem")

    def test_a_file_that_vanishes_before_its_index_is_read(self, tmp_path):
        path = write_pair(tmp_path / "c", [1], [0], np.zeros(1, "<u2"))
        resolved = resolve([str(path)], SourceOptions())
        path.with_suffix(".idx").unlink()
        with pytest.raises(SourceNotFoundError, match=r"c\.idx: vanished"):
            resolved.plan()

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"dtype": "uint17"}, "'uint17' is not known: use one of .*uint16"), ({"vocab_size": 0}, "at least 1")],
    )
    def test_options_out_of_range(self, tmp_path, options, message):
        with pytest.raises(ConfigError, match=message):
            names(*write_tokens(tmp_path / "d", "a.bin"), **options)

    def test_options_belong_to_the_fingerprint(self, tmp_path):
        (path,) = write_tokens(tmp_path / "d", "a.bin")
        options = [SourceOptions(), SourceOptions("uint16"), SourceOptions(vocab_size=9), SourceOptions("uint16", 9)]
        assert len({resolve([str(path)], option).fingerprint for option in options}) == len(options)

    def test_a_replaced_file_has_changed(self, tmp_path):
        first, second = write_tokens(tmp_path / "d", "a.bin", "b.bin")
        resolved = resolve([str(first)], SourceOptions())
        stat = first.stat()
        second.write_bytes(first.read_bytes())
        os.utime(second, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        second.replace(first)
        assert resolved.changed()


class TestKey:
    """The key names the files as they are now, however they are asked for."""

    def test_any_spelling_has_the_same_key(self, tmp_path):
        (tmp_path / "d").mkdir()
        pair = write_pair(tmp_path / "d" / "c", [1], [0], np.zeros(1, "<u2"))
        (tmp_path / "link").symlink_to(tmp_path / "d")
        spellings = ["d/c.bin", "d/c.idx", "d/c", "d", "d/*.bin", "d/*", "link/c.bin"]
        keys = {resolve([f"{tmp_path}/{spelling}"], SourceOptions()).key for spelling in spellings}
        assert keys == {resolve([str(pair)], SourceOptions(vocab_size=10)).key}

    def test_other_bytes_have_another_key(self, tmp_path):
        first, second = map(str, write_tokens(tmp_path / "d", "a.bin", "b.bin"))
        whole = resolve([first, second], SourceOptions()).key
        others = [
            resolve([second, first], SourceOptions()).key,
            resolve([first], SourceOptions()).key,
            resolve([first, second], SourceOptions("uint16")).key,
            resolve([first, second], SourceOptions("uint32")).key,
        ]
        os.utime(second, ns=(0, 0))
        others.append(resolve([first, second], SourceOptions()).key)
        assert len({whole, *others}) == 6


class TestJoining:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (np.zeros((2, 3), "<i4"), np.zeros((2, 4), "<i4")),
            (np.zeros((2, 3), "<i4"), np.zeros((2, 3), "<i8")),
            (np.zeros(2, "<i4"), np.zeros((2, 3), "<i4")),
        ],
    )
    def test_arrays_that_differ_are_refused_with_both(self, tmp_path, one, other):
        np.save(tmp_path / "a.npy", one)
        np.save(tmp_path / "b.npy", other)
        with pytest.raises(SourceFormatError, match=r"a\.npy has int32 rows of shape .*, b\.npy has .*|a\.npy.*b\.npy"):
            plan(tmp_path / "a.npy", tmp_path / "b.npy")

    def test_arrays_are_joined_along_the_first_axis(self, tmp_path):
        one, other = np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(10, 19).reshape(3, 3)).astype(">i8")
        np.save(tmp_path / "a.npy", one)
        np.save(tmp_path / "b.npy", other)
        corpus = plan(tmp_path / "a.npy", tmp_path / "b.npy")
        assert (corpus.num_samples, samples(corpus)) == (5, [*one.tolist(), *other.tolist()])

    def test_other_formats_and_dtypes_are_refused_with_both(self, tmp_path):
        uint16 = write_pair(tmp_path / "a", [1], [0], np.zeros(1, "<u2"))
        int32 = write_pair(tmp_path / "b", [1], [0], np.zeros(1, "<i4"), code=4)
        megatron = write_pair(tmp_path / "c", [1], [0], np.zeros(1, "<u2"), documents=[0, 1])
        with pytest.raises(SourceFormatError, match=r"a\.bin has uint16 .*b\.bin has int32"):
            plan(uint16, int32)
        with pytest.raises(SourceFormatError, match=r"a\.bin is fairseq-mmap, .*c\.bin is megatron"):
            plan(uint16, megatron)

    def test_modes_must_be_in_all_shards_or_none(self, tmp_path):
        plain = write_pair(tmp_path / "a", [1], [0], np.zeros(1, "<u2"), documents=[0, 1])
        multimodal = write_pair(tmp_path / "b", [1], [0], np.zeros(1, "<u2"), documents=[0, 1], modes=[1])
        with pytest.raises(SourceFormatError, match=r"with documents, .*with documents with modes"):
            plan(plain, multimodal)

    def test_an_empty_shard_may_be_multimodal(self, tmp_path):
        empty = write_pair(tmp_path / "a", [], [], np.zeros(0), documents=[0])
        multimodal = write_pair(tmp_path / "b", [1], [0], np.zeros(1, "<u2"), documents=[0, 1], modes=[1])
        for order in ((empty, multimodal), (multimodal, empty)):
            corpus = plan(*order)
            assert arrays(corpus) == {"document_indices": [0, 1], "modes": [1]}

    def test_empty_shards_join(self, tmp_path):
        empty = write_pair(tmp_path / "a", [], [], np.zeros(0), documents=[0])
        full = write_pair(tmp_path / "b", [2, 1], [0, 4], np.arange(3, dtype="<u2"), documents=[0, 2])
        assert samples(plan(empty, full, full)) == [[0, 1], [2]]
        assert samples(plan(full, empty)) == [[0, 1], [2]]
        assert samples(plan(empty)) == []

    def test_equal_notes_are_said_once(self, tmp_path):
        assert len(plan(*write_tokens(tmp_path / "d", "a.bin", "b.bin")).notes) == 1


class TestLimits:
    @pytest.mark.promise("F20")
    def test_many_shards_need_few_descriptors(self, tmp_path):
        count = 2500
        tokens = np.arange(2, dtype="<u2")
        for number in range(count):
            write_pair(tmp_path / f"c_{number}", [2], [0], tokens)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            corpus = plan(tmp_path)
            assert samples(corpus) == [[0, 1]] * count
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    @pytest.mark.promise("F32")
    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_a_hundred_million_sequences_in_seconds_and_little_memory(self, tmp_path):
        """The .bin is sparse and past 2^32 bytes; the index is real, with a mark in its last pointer's length."""
        count, length, chunk = 100_000_000, 22, 1 << 20
        with (tmp_path / "c.idx").open("wb") as index:
            index.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(8).tobytes() + np.uint64(count).tobytes())
            for start in range(0, count, chunk):
                np.full(min(chunk, count - start), length, "<i4").tofile(index)
            for start in range(0, count, chunk):
                (np.arange(start, min(start + chunk, count), dtype="<i8") * (2 * length)).tofile(index)
        with (tmp_path / "c.bin").open("wb") as values:
            values.truncate(count * length * 2)
        program = f"""
import sys, time
import numpy as np
from shmserve.sources import SourceOptions, resolve
started = time.perf_counter()
corpus = resolve([{str(tmp_path / "c")!r}], SourceOptions()).plan()
seconds = time.perf_counter() - started
assert corpus.num_samples == {count} and corpus.columns[0].values.shape == ({count * length},)
starts, end = corpus.columns[0].offsets.pieces
window = np.empty(8 * 4, np.uint8)
for first in (0, (1 << 31) // {2 * length} - 2, (1 << 32) // {2 * length} - 2, {count} - 4):
    starts.read_into(window, 8 * first)
    assert window.view("<i8").tolist() == [{length} * (first + i) for i in range(4)], first
end.read_into(window[:8], 0)
assert window[:8].view("<i8")[0] == {count * length}
# Not ru_maxrss, which begins with that of the process that was forked.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(seconds, peak.split()[1])
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, max_rss_kib = map(float, done.stdout.split())
        assert seconds < 30
        assert max_rss_kib < 150 << 10


class TestRegistry:
    def test_a_format_is_registered_once(self):
        assert len(set(SOURCES)) == len(SOURCES)
        assert all(issubclass(source, Source) for source in SOURCES)

    def test_the_guess_comes_last(self):
        assert SOURCES[-1].__name__ == "FlatTokens"
