"""MMIDIDX and TNTIDX pairs, of fairseq and of the Megatron family."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmserve.sources.runs import MAX_RUNS
from shmserve_client.errors import SourceFormatError, SourceNotFoundError

from .contract import SourceContract, expected, pair, truncate
from .reading import FIXTURES, arrays, plan, samples

FAIRSEQ = expected("written-fairseq-0.12.2")["datasets"]
NEOX = expected("written-gpt-neox")["datasets"]
MEGATRON = expected("written-megatron-core")["datasets"]
DATATROVE = expected("written-datatrove")["datasets"]

FAIRSEQ_DTYPES = {
    "uint32_vocab70k": "uint32",
    "uint32_unknown_vocab": "uint32",
    "int64_huge_vocab": "int64",
    "int32": "int32",
    "float64": "float64",
}


def _fairseq_cases(impl):
    for name, record in FAIRSEQ.items():
        if record["impl"] != impl:
            continue
        dtype = next((dtype for part, dtype in FAIRSEQ_DTYPES.items() if name.endswith(part)), "uint16")
        if impl == "cached":
            dtype = "int64" if name.endswith("int64") else "int32"
        written = record["written"] if "written" in record else record["samples"]
        yield pair(f"written-fairseq-0.12.2/{name}", dtype, written)


def _megatron_cases():
    for name, record in MEGATRON.items():
        extras = {"document_indices": record["document_indices"]}
        if record["multimodal"]:
            extras["modes"] = record["modes"]
        yield pair(f"written-megatron-core/{name}", record["dtype"], record["samples"], **extras)
    for name, record in NEOX.items():
        if record["impl"] == "mmap":
            yield pair(
                f"written-gpt-neox/{name}", record["dtype"], record["samples"], document_indices=record["doc_idx"]
            )
    meg = DATATROVE["meg"]
    yield pair("written-datatrove/meg", meg["dtype"], meg["samples"], document_indices=[0, 1, 2, 3])


def _megatron_legacy_cases():
    cached = NEOX["cached_int32"]
    yield pair("written-gpt-neox/cached_int32", cached["dtype"], cached["samples"], document_indices=cached["doc_idx"])


class TestFairseqMmap(SourceContract):
    format = "fairseq-mmap"

    @pytest.fixture(params=_fairseq_cases("mmap"), ids=str)
    def case(self, request):
        return request.param


class TestFairseqLegacy(SourceContract):
    format = "fairseq-legacy"

    @pytest.fixture(params=_fairseq_cases("cached"), ids=str)
    def case(self, request):
        return replace(request.param, stays=False)  # each id is stored as id + 1


class TestMegatron(SourceContract):
    format = "megatron"

    @pytest.fixture(params=_megatron_cases(), ids=str)
    def case(self, request):
        return request.param


class TestMegatronLegacy(SourceContract):
    format = "megatron-legacy"

    @pytest.fixture(params=_megatron_legacy_cases(), ids=str)
    def case(self, request):
        return request.param


def write_pair(prefix: Path, lengths, pointers, values, *, code=8, documents=None, modes=None) -> Path:
    """Write an MMIDIDX pair, in Megatron's layout where `documents` are given; return the values' file."""
    header = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, code, len(lengths))
    if documents is not None:
        header += struct.pack("<Q", len(documents))
    parts = [np.asarray(lengths, "<i4"), np.asarray(pointers, "<i8"), np.asarray(documents or [], "<i8")]
    parts.append(np.asarray(modes or [], "i1"))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    prefix.with_suffix(".bin").write_bytes(values.tobytes())
    return prefix.with_suffix(".bin")


@pytest.fixture
def tokens():
    return np.arange(10, 22, dtype=np.uint16)


class TestPointers:
    """Pointers need not be a running sum of the lengths."""

    def test_jumps_overlaps_and_gaps(self, tmp_path, tokens):
        lengths, starts = [3, 0, 2, 4, 4, 1], [8, 8, 0, 1, 2, 11]
        corpus = plan(write_pair(tmp_path / "c", lengths, [2 * start for start in starts], tokens))
        wanted = [tokens[start : start + n].tolist() for start, n in zip(starts, lengths, strict=True)]
        assert samples(corpus) == wanted
        assert samples(corpus, window_items=1) == wanted
        assert corpus.columns[0].values.shape == (14,)

    def test_values_that_are_stored_often_are_said(self, tmp_path, tokens):
        corpus = plan(write_pair(tmp_path / "c", [12] * 5, [0] * 5, tokens))
        assert corpus.notes == ("its sequences overlap: 24 bytes are stored as 120",)
        assert plan(write_pair(tmp_path / "c", [3, 12], [0, 0], tokens)).columns[0].values.shape == (15,)

    def test_a_first_sequence_that_starts_later(self, tmp_path, tokens):
        corpus = plan(write_pair(tmp_path / "c", [6, 4], [4, 16], tokens))
        assert samples(corpus) == [tokens[2:8].tolist(), tokens[8:].tolist()]

    def test_runs_that_cross_chunks(self, tmp_path, tokens, monkeypatch):
        monkeypatch.setattr("shmserve.sources.files.CHUNK_ITEMS", 2)
        lengths, starts = [1, 2, 2, 3, 1, 1, 1], [0, 1, 3, 8, 11, 5, 6]
        corpus = plan(write_pair(tmp_path / "c", lengths, [2 * start for start in starts], tokens))
        assert samples(corpus) == [tokens[s : s + n].tolist() for s, n in zip(starts, lengths, strict=True)]
        assert len(corpus.columns[0].values.pieces) == 3

    @pytest.mark.parametrize("seed", range(20))
    def test_any_pointers_inside_the_values_are_followed(self, tmp_path, monkeypatch, seed):
        monkeypatch.setattr("shmserve.sources.files.CHUNK_ITEMS", 7)
        random = np.random.default_rng(seed)
        values = random.integers(0, 1 << 31, 50, "<i4")
        starts = np.append(random.integers(0, 50, random.integers(0, 40)), 0)
        lengths = np.array([*(random.integers(0, 51 - start) for start in starts[:-1]), 50])
        path = write_pair(tmp_path / "c", lengths, starts * 4, values, code=4)
        wanted = [values[start : start + n].tolist() for start, n in zip(starts, lengths, strict=True)]
        assert samples(plan(path), window_items=int(random.integers(1, 20))) == wanted

    def test_too_many_runs_are_refused(self, tmp_path):
        count = MAX_RUNS + 1
        pointers = np.arange(count)[::-1]
        path = write_pair(tmp_path / "c", np.ones(count, int), pointers, np.zeros(count, np.uint8), code=1)
        with pytest.raises(SourceFormatError, match=f"more than {MAX_RUNS} separate places"):
            plan(path)

    @pytest.mark.parametrize(
        ("lengths", "pointers", "message"),
        [
            ([6, -1, 7], [0, 12, 10], "sequence 1 has -1 items .* a negative length"),
            ([6, 6], [0, -12], "sequence 1 has 6 items of 2 bytes at byte -12 of .*, which has 24 bytes"),
            ([6, 6], [0, 13], r"sequence 1 .* at byte 13 .* 24 bytes where the index needs 25"),
            ([6, 5], [0, 13], "sequence 1 .* not at an item's boundary"),
            ([6, 7], [0, 12], "sequence 1 .* which has 24 bytes where the index needs 26"),
            ([6, 5], [0, 12], "24 bytes, but .* needs 22"),
            ([6, 6], [0, 12 - (1 << 32)], "sequence 1 .* wrapped at 2.31, it should be 12"),
            ([6, 6], [0, 1 << 62], f"sequence 1 .* at byte {1 << 62}"),
            ([2**31 - 1, 6], [0, 12], "sequence 0 has 2147483647 items"),
        ],
    )
    def test_impossible_pointers_are_refused(self, tmp_path, tokens, lengths, pointers, message):
        path = write_pair(tmp_path / "c", lengths, pointers, tokens)
        with pytest.raises(SourceFormatError, match=message):
            plan(path)

    @pytest.mark.promise("F22")
    def test_pointers_that_wrapped_are_refused_by_name(self, tmp_path):
        lengths = np.full(5, 1 << 29, np.int64)
        pointers = (np.cumsum(lengths) - lengths).astype(np.int32)
        path = write_pair(tmp_path / "c", lengths, pointers, np.zeros(0, np.uint8), code=1)
        truncate(path, 5 << 29)
        with pytest.raises(SourceFormatError, match=f"sequence 4 .* wrapped at 2.31, it should be {1 << 31}"):
            plan(path)

    def test_pointers_that_wrapped_to_where_other_values_are(self, tmp_path):
        """A single sequence of 4 GiB takes the next pointer past 2^32 at once: it is not even negative."""
        path = write_pair(tmp_path / "c", [1 << 29, 4], [0, 0], np.zeros(0), code=5)
        truncate(path, (1 << 32) + 32)
        with pytest.raises(SourceFormatError, match=f"sequence 1 .* wrapped at 2.31, it should be {1 << 32}"):
            plan(path)


class TestFloatCodes:
    """Codes 6 and 7 mean float32 to one writer and float64 to another: only the size of the values tells."""

    @pytest.mark.promise("F23")
    @pytest.mark.parametrize("documents", [None, [0, 3]])
    @pytest.mark.parametrize("code", [6, 7])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("lengths", [[2, 0, 3], [0, 5, 0], [1, 1, 3]])
    def test_the_size_decides(self, tmp_path, code, dtype, documents, lengths):
        values = np.array([0.5, -1.25, 3.0, 1e-3, 7.0], dtype)
        starts = np.cumsum([0, *lengths[:-1]])
        path = write_pair(tmp_path / "c", lengths, starts * values.itemsize, values, code=code, documents=documents)
        corpus = plan(path)
        assert corpus.columns[0].values.dtype == values.dtype.name
        assert samples(corpus) == [values[s : s + n].tolist() for s, n in zip(starts, lengths, strict=True)]

    def test_the_spacing_decides_where_the_values_are_truncated(self, tmp_path):
        path = write_pair(tmp_path / "c", [2, 3], [0, 16], np.zeros(5), code=6, documents=[0, 2])
        truncate(path, 28)
        with pytest.raises(SourceFormatError, match="28 bytes where the index needs 40"):
            plan(path)

    @pytest.mark.parametrize(("code", "dtype"), [(6, "float64"), (7, "float32")])
    def test_an_empty_file_takes_megatrons_meaning(self, tmp_path, code, dtype):
        path = write_pair(tmp_path / "c", [], [], np.zeros(0), code=code, documents=[0])
        assert plan(path).columns[0].values.dtype == dtype

    @pytest.mark.parametrize(("code", "dtype"), [(6, "<f4"), (7, "<f8")])
    @pytest.mark.parametrize("lengths", [[], [0, 0]])
    def test_a_shard_without_values_takes_the_others_dtype(self, tmp_path, code, dtype, lengths):
        documents = [0, len(lengths)]
        empty = write_pair(
            tmp_path / "a", lengths, [0] * len(lengths), np.zeros(0), code=code, documents=documents[: 1 + len(lengths)]
        )
        full = write_pair(
            tmp_path / "b", [2, 1], [0, 2 * np.dtype(dtype).itemsize], np.ones(3, dtype), code=code, documents=[0, 2]
        )
        wanted = [[1.0, 1.0], [1.0]]
        nothing = [[] for _ in lengths]
        assert samples(plan(empty, full)) == nothing + wanted
        assert samples(plan(full, empty)) == wanted + nothing


class TestIndex:
    @pytest.mark.promise("F25")
    def test_empty_fairseq(self, tmp_path):
        corpus = plan(write_pair(tmp_path / "c", [], [], np.zeros(0)))
        assert (corpus.format, corpus.num_samples, samples(corpus)) == ("fairseq-mmap", 0, [])

    @pytest.mark.parametrize("documents", [[], [1, 3], [0, 2, 1], [0, 4], [0, -1, 3], [0, 0, 0, 2, -(1 << 63)]])
    def test_impossible_documents_are_refused(self, tmp_path, tokens, documents):
        path = write_pair(tmp_path / "c", [4, 4, 4], [0, 8, 16], tokens, documents=documents)
        with pytest.raises(SourceFormatError, match=r"c\.idx.*document indices"):
            plan(path)

    def test_documents_that_gpt_neox_did_not_merge(self, tmp_path, tokens):
        corpus = plan(write_pair(tmp_path / "c", [4, 4, 4], [0, 8, 16], tokens, documents=[0, 2]))
        assert arrays(corpus) == {"document_indices": [0, 2]}
        assert "end at sequence 2 of 3" in corpus.notes[0]

    @pytest.mark.parametrize("version", [0, 2])
    def test_other_versions_are_refused(self, tmp_path, tokens, version):
        path = write_pair(tmp_path / "c", [12], [0], tokens)
        index = bytearray(path.with_suffix(".idx").read_bytes())
        index[9] = version
        path.with_suffix(".idx").write_bytes(index)
        with pytest.raises(SourceFormatError, match=f"version {version}"):
            plan(path)

    @pytest.mark.parametrize("code", [0, 11, 255])
    def test_unknown_codes_are_refused(self, tmp_path, tokens, code):
        with pytest.raises(SourceFormatError, match=f"unknown dtype code {code}"):
            plan(write_pair(tmp_path / "c", [12], [0], tokens, code=code))

    def test_megatrons_layout_of_july_2023_is_refused(self, tmp_path, tokens):
        path = write_pair(tmp_path / "c", [4, 8], [0, 8], tokens, documents=[0, 2])
        index = path.with_suffix(".idx").read_bytes()
        path.with_suffix(".idx").write_bytes(index[:42] + bytes(8) + index[42:])
        with pytest.raises(SourceFormatError, match=r"82 bytes.*74 or, with modes, 76"):
            plan(path)

    def test_every_truncation_of_an_index_is_refused(self, tmp_path, tokens):
        path = write_pair(tmp_path / "c", [4, 8], [0, 8], tokens, documents=[0, 2])
        whole = path.with_suffix(".idx").read_bytes()
        for nbytes in range(len(whole)):
            path.with_suffix(".idx").write_bytes(whole[:nbytes])
            if nbytes < 9:  # no magic: the .bin beside it must not be taken for raw tokens
                with pytest.raises(SourceFormatError, match="not an index of a known kind"):
                    plan(path)
            else:
                with pytest.raises(SourceFormatError, match=r"c\.idx"):
                    plan(path)

    @pytest.mark.parametrize(
        "name",
        [
            "written-megatron-core/multimodal_uint16",
            "written-megatron-core/float32",
            "written-fairseq-0.12.2/builders/cached_2d_int64",
            "written-gpt-neox/cached_int32",
        ],
    )
    @pytest.mark.parametrize("flip", [0x01, 0x80])
    def test_a_damaged_byte_is_refused_or_harmless(self, tmp_path, name, flip):
        shutil.copy(FIXTURES / f"{name}.bin", tmp_path / "c.bin")
        whole = (FIXTURES / f"{name}.idx").read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            (tmp_path / "c.idx").write_bytes(damaged)
            try:
                corpus = plan(tmp_path / "c")
            except SourceFormatError:
                continue
            samples(corpus)  # whatever it says now, it says it consistently


class TestHalves:
    def copy(self, name, tmp_path, stem="c"):
        for suffix in (".bin", ".idx"):
            shutil.copy(FIXTURES / f"{name}{suffix}", tmp_path / f"{stem}{suffix}")
        return tmp_path / f"{stem}.bin", tmp_path / f"{stem}.idx"

    @pytest.mark.promise("F24")
    def test_a_swapped_pair_is_refused_with_both_sizes(self, tmp_path):
        values, _ = self.copy("written-megatron-core/ragged_uint16", tmp_path)
        shutil.copy(FIXTURES / "written-megatron-core/merged_uint16.bin", values)
        with pytest.raises(SourceFormatError, match=r"304 bytes, but .* needs 48"):
            plan(values)
        shutil.copy(FIXTURES / "written-megatron-core/empty_sequences_uint16.bin", values)
        with pytest.raises(SourceFormatError, match="10 bytes where the index needs 48"):
            plan(values)

    def test_swapped_names_are_refused(self, tmp_path):
        values, index = self.copy("written-megatron-core/ragged_uint16", tmp_path)
        values.rename(tmp_path / "t")
        index.rename(values)
        (tmp_path / "t").rename(index)
        for path in (values, index, tmp_path / "c", tmp_path):
            with pytest.raises(SourceFormatError, match=r"c\.(bin: an index|idx: not an index)"):
                plan(path)

    def test_a_missing_values_file_is_named(self, tmp_path):
        values, index = self.copy("written-megatron-core/ragged_uint16", tmp_path)
        values.unlink()
        for path in (values, index, tmp_path / "c", tmp_path):
            with pytest.raises(SourceNotFoundError, match=r"c\.bin: no such file.*c\.idx is only the index"):
                plan(path)

    @pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
    def test_values_that_are_no_file_are_not_called_missing(self, tmp_path, make):
        values, index = self.copy("written-megatron-core/ragged_uint16", tmp_path)
        values.unlink()
        make(values)
        for path in (index, tmp_path / "c"):
            with pytest.raises(SourceFormatError, match=r"c\.bin: (not a regular file|a directory)"):
                plan(path)

    def test_a_missing_index_is_named(self, tmp_path):
        _, index = self.copy("written-megatron-core/ragged_uint16", tmp_path)
        index.unlink()
        for path in (index, tmp_path / "c"):
            with pytest.raises(SourceNotFoundError, match=r"c\.idx: no such file"):
                plan(path)

    def test_renamed_halves_are_told_by_their_bytes(self, tmp_path):
        values, index = self.copy("written-megatron-core/ragged_uint16", tmp_path)
        wanted = samples(plan(values))
        values.rename(tmp_path / "c.tokens")
        assert samples(plan(tmp_path / "c.tokens")) == wanted
        (tmp_path / "c.tokens").rename(values)
        index.rename(tmp_path / "c.offsets")
        assert samples(plan(tmp_path / "c.offsets")) == wanted

    def test_a_file_beside_a_pair_is_not_its_half(self, tmp_path):
        self.copy("written-megatron-core/ragged_uint16", tmp_path)
        (tmp_path / "c.log").write_bytes(bytes(range(64)))
        assert plan(tmp_path / "c.log", dtype="uint8").format == "raw"


def write_legacy(prefix: Path, shapes, values, *, dim_offsets=None, data_offsets=None) -> Path:
    """Write a TNTIDX pair of fairseq's kind, of int32; return the values' file."""
    sizes = np.array([extent for shape in shapes for extent in shape], "<i8")
    if dim_offsets is None:
        dim_offsets = np.cumsum([0, *map(len, shapes)])
    if data_offsets is None:
        data_offsets = np.cumsum([0, *map(math.prod, shapes)])
    header = struct.pack("<8sQQQQQ", b"TNTIDX\0\0", 1, 4, 4, len(shapes), len(sizes))
    arrays = (np.asarray(numbers, "<i8").tobytes() for numbers in (dim_offsets, data_offsets, sizes))
    prefix.with_suffix(".idx").write_bytes(header + b"".join(arrays))
    prefix.with_suffix(".bin").write_bytes(np.asarray(values, "<i4").tobytes())
    return prefix.with_suffix(".bin")


class TestLegacy:
    def test_shards_may_be_empty_or_all_1_d(self, tmp_path):
        empty = write_legacy(tmp_path / "a", [], [])
        flat = write_legacy(tmp_path / "b", [[1], [2]], [1, 2, 3])
        square = write_legacy(tmp_path / "c", [[2, 2], [0, 3], []], [1, 2, 3, 4, 5])
        wanted = {empty: [], flat: [[0], [1, 2]], square: [[[0, 1], [2, 3]], [], 4]}
        for order in itertools.permutations(wanted):
            corpus = plan(*order)
            assert samples(corpus) == [sample for path in order for sample in wanted[path]]
        assert plan(empty, flat).columns[0].shapes is None

    @pytest.mark.parametrize("offsets", [{"dim_offsets": [7]}, {"data_offsets": [9]}, {"data_offsets": [-1]}])
    def test_the_first_entries_are_checked_without_items_too(self, tmp_path, offsets):
        with pytest.raises(SourceFormatError, match="the index is damaged"):
            plan(write_legacy(tmp_path / "c", [], [], **offsets))

    def test_offsets_whose_differences_wrap_are_refused(self, tmp_path):
        wrapping = [0, 1 << 62, -(1 << 63), -(1 << 62), 0, 5]
        shapes = [[1 << 62]] * 4 + [[5]]
        with pytest.raises(SourceFormatError, match="does not start where"):
            plan(write_legacy(tmp_path / "c", shapes, range(5), data_offsets=wrapping))
        with pytest.raises(SourceFormatError, match="dimensions of the items 0 to 4"):
            plan(write_legacy(tmp_path / "c", shapes, range(5), dim_offsets=wrapping))

    @pytest.mark.parametrize("shape", [[1] * 33, [1] * 70, [0, 1 << 62, 1 << 62]])
    def test_shapes_that_no_array_has_are_refused(self, tmp_path, shape):
        with pytest.raises(SourceFormatError, match=f"item 1 has {len(shape)} dimensions"):
            plan(write_legacy(tmp_path / "c", [[2], shape], range(2 + math.prod(shape))))

    def test_shapes_of_shards_are_joined(self, tmp_path):
        for name in ("a", "b"):
            for suffix in (".bin", ".idx"):
                fixture = FIXTURES / f"written-fairseq-0.12.2/builders/cached_2d_int64{suffix}"
                shutil.copy(fixture, tmp_path / f"{name}{suffix}")
        corpus = plan(tmp_path / "a", tmp_path / "b")
        assert samples(corpus) == FAIRSEQ["builders/cached_2d_int64"]["samples"] * 2

    @pytest.mark.parametrize("position", [48, 64, 72, 80, 88, 96, 104, 112])
    def test_an_index_that_contradicts_itself_is_refused(self, tmp_path, position):
        """Each number of the two items' dim_offsets, data_offsets and sizes is checked; 56 would make a scalar."""
        for suffix in (".bin", ".idx"):
            shutil.copy(FIXTURES / f"written-fairseq-0.12.2/builders/cached_2d_int64{suffix}", tmp_path / f"c{suffix}")
        index = bytearray((tmp_path / "c.idx").read_bytes())
        index[position] += 1
        (tmp_path / "c.idx").write_bytes(index)
        with pytest.raises(SourceFormatError, match=r"c\.(idx|bin)"):
            plan(tmp_path / "c")

    def test_sizes_of_no_item_are_refused(self, tmp_path):
        header = struct.pack("<8sQQQQQ", b"TNTIDX\0\0", 1, 4, 4, 1, 2)
        offsets = np.array([0, 1, 0, 3, 3, 9], "<i8")
        (tmp_path / "c.idx").write_bytes(header + offsets.tobytes())
        (tmp_path / "c.bin").write_bytes(bytes(12))
        with pytest.raises(SourceFormatError, match="2 sizes for 1 dimensions"):
            plan(tmp_path / "c")

    def test_sizes_whose_product_wraps_are_refused(self, tmp_path):
        sizes = np.array([1 << 32, 1 << 32], "<i8")
        header = struct.pack("<8sQQQQQ", b"TNTIDX\0\0", 1, 4, 4, 1, 2)
        offsets = np.array([0, 2, 0, 0], "<i8")
        (tmp_path / "c.idx").write_bytes(header + offsets.tobytes() + sizes.tobytes())
        (tmp_path / "c.bin").write_bytes(b"")
        with pytest.raises(SourceFormatError, match="item 0"):
            plan(tmp_path / "c")

    @pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
    def test_one_is_subtracted_from_each_id(self, tmp_path, dtype):
        codes = {"uint8": 1, "int8": 2, "int64": 5}
        values = np.array([1, 2, 100, 127], dtype)
        header = struct.pack("<8sQQQQQ", b"TNTIDX\0\0", 1, codes[dtype], values.itemsize, 2, 2)
        offsets = np.array([0, 1, 2, 0, 3, 4, 3, 1], "<i8")
        (tmp_path / "c.idx").write_bytes(header + offsets.tobytes())
        (tmp_path / "c.bin").write_bytes(values.tobytes())
        assert samples(plan(tmp_path / "c")) == [[0, 1, 99], [126]]
