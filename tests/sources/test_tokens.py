"""Flat token files, with and without a header, and datatrove's."""

from __future__ import annotations

import bz2
import gzip
import json
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from shmserve.sources import SourceOptions, resolve
from shmserve_client.errors import SourceFormatError, SourceNotFoundError

from .contract import Case, SourceContract, expected
from .reading import FIXTURES, plan, read, samples

LLMC = expected("written-llm.c")["datasets"]
PACKED = expected("written-lit_gpt-packed")
OLMO = expected("written-olmo-memmap")
DATATROVE = expected("written-datatrove")["datasets"]


class TestLlmc(SourceContract):
    format = "llm.c"

    @pytest.fixture(params=["gpt2_v1.bin", "llama3_v7.bin"])
    def case(self, request):
        record = LLMC[request.param]
        return Case((f"written-llm.c/{request.param}",), record["dtype"], record["tokens"])

    def test_evaluation_files_are_refused_by_name(self):
        with pytest.raises(SourceFormatError, match="evaluation file"):
            plan(FIXTURES / "written-llm.c/eval_v1.bin")

    @pytest.mark.parametrize(("magic", "version"), [(20240520, 7), (20240801, 1), (20240520, 0)])
    def test_other_versions_are_refused(self, tmp_path, magic, version):
        (tmp_path / "c.bin").write_bytes(struct.pack("<iii", magic, version, 0).ljust(1024, b"\0"))
        with pytest.raises(SourceFormatError, match=f"version {version}"):
            plan(tmp_path / "c.bin")

    def test_a_negative_count_is_refused(self, tmp_path):
        (tmp_path / "c.bin").write_bytes(struct.pack("<iii", 20240520, 1, -12).ljust(1000, b"\0"))
        with pytest.raises(SourceFormatError, match="says -12 uint16 tokens"):
            plan(tmp_path / "c.bin")


class TestPacked(SourceContract):
    format = "litpkds"

    @pytest.fixture(params=PACKED["files"])
    def case(self, request):
        position, size = PACKED["files"].index(request.param), PACKED["chunk_size"]
        tokens = [token for block in PACKED["blocks_of_2049_in_order"] for token in block]
        chunk = tokens[position * size : (position + 1) * size]
        return Case((f"written-lit_gpt-packed/{request.param}",), PACKED["dtype"], chunk)

    def test_chunks_are_one_stream_of_whole_blocks(self):
        stream = samples(plan(FIXTURES / "written-lit_gpt-packed"))
        assert np.reshape(stream, (-1, 2049)).tolist() == PACKED["blocks_of_2049_in_order"]
        written = PACKED["token_stream_before_padding_with_sep"]
        assert stream[: len(written)] == written

    @pytest.mark.parametrize(("version", "code"), [(2, 8), (1, 0), (1, 9)])
    def test_other_versions_and_codes_are_refused(self, tmp_path, version, code):
        (tmp_path / "c.bin").write_bytes(struct.pack("<7sQBQ", b"LITPKDS", version, code, 0))
        with pytest.raises(SourceFormatError, match=f"version {version} with the dtype code {code}"):
            plan(tmp_path / "c.bin")


class TestDatatrove(SourceContract):
    format = "datatrove"

    @pytest.fixture(params=["00000_train.ds", "00001_train.ds"])
    def case(self, request):
        folder, record = FIXTURES / "written-datatrove", DATATROVE[request.param]
        names = [request.param + suffix for suffix in ("", ".index", ".metadata")]
        files = tuple(f"written-datatrove/{name}" for name in names if (folder / name).exists())
        return Case(files, record["dtype"], record["samples"], ambiguous=len(files) == 2)

    def test_no_documents(self, tmp_path):
        for name in ("c.ds", "c.ds.index"):
            (tmp_path / name).touch()
        assert samples(plan(tmp_path / "c.ds")) == []

    def test_empty_documents(self, tmp_path):
        np.arange(5, dtype="<u2").tofile(tmp_path / "c.ds")
        np.array([0, 2, 2, 5, 5], "<u8").tofile(tmp_path / "c.ds.index")
        assert samples(plan(tmp_path / "c.ds")) == [[], [0, 1], [], [2, 3, 4], []]

    def test_ends_that_fall_are_refused(self, tmp_path):
        np.arange(5, dtype="<u2").tofile(tmp_path / "c.ds")
        np.array([2, 1, 5], "<u8").tofile(tmp_path / "c.ds.index")
        with pytest.raises(SourceFormatError, match="document 1 ends at token 1"):
            plan(tmp_path / "c.ds")

    def test_ends_whose_differences_wrap_are_refused(self, tmp_path):
        np.arange(5, dtype="<u2").tofile(tmp_path / "c.ds")
        np.array([1 << 62, -(1 << 63), -(1 << 62), 5], "<i8").tofile(tmp_path / "c.ds.index")
        with pytest.raises(SourceFormatError, match="document 1 ends at token"):
            plan(tmp_path / "c.ds")

    def test_a_shard_without_tokens_takes_the_others_dtype(self, tmp_path):
        for name in ("a.ds", "c.ds"):
            (tmp_path / name).touch()
            (tmp_path / f"{name}.index").touch()
        np.arange(5, dtype="<u4").tofile(tmp_path / "b.ds")
        np.array([5], "<u8").tofile(tmp_path / "b.ds.index")
        corpus = plan(*(tmp_path / name for name in ("a.ds", "b.ds", "c.ds")))
        assert (corpus.columns[0].values.dtype, samples(corpus)) == ("uint32", [[0, 1, 2, 3, 4]])
        assert len(corpus.notes) == 1

    def test_metadata_that_contradict_the_sizes_are_refused(self, tmp_path):
        np.arange(5, dtype="<u2").tofile(tmp_path / "c.ds")
        np.array([5], "<u8").tofile(tmp_path / "c.ds.index")
        (tmp_path / "c.ds.metadata").write_text("gpt2|4\n5\n5 T")
        with pytest.raises(SourceFormatError, match=r"10 bytes, but .* 20 of uint32"):
            plan(tmp_path / "c.ds")

    @pytest.mark.parametrize("missing", ["c.ds", "c.ds.index"])
    def test_a_missing_half_is_named(self, tmp_path, missing):
        np.arange(5, dtype="<u2").tofile(tmp_path / "c.ds")
        np.array([5], "<u8").tofile(tmp_path / "c.ds.index")
        (tmp_path / missing).unlink()
        (left,) = tmp_path.iterdir()
        for path in (left, tmp_path):
            with pytest.raises(SourceNotFoundError, match=f"{missing}: no such file"):
                plan(path)


class TestOlmo:
    @pytest.fixture
    def tokens(self, tmp_path) -> Path:
        for suffix in (".npy", ".csv.gz"):
            shutil.copy(FIXTURES / f"written-olmo-memmap/part-0-00000{suffix}", tmp_path)
        return tmp_path / "part-0-00000.npy"

    def test_documents_are_the_samples(self, tokens):
        corpus = plan(tokens)
        assert samples(corpus) == [OLMO["tokens"][start:stop] for start, stop in OLMO["document_bounds"]]
        assert samples(corpus, window_items=1) == samples(corpus)
        assert "uint16 tokens are assumed" in corpus.notes[0]

    def test_shards_are_joined(self, tokens, tmp_path):
        for suffix in (".npy", ".csv.gz"):
            shutil.copy(tokens.with_suffix(suffix), tmp_path / f"part-0-00001{suffix}")
        assert samples(plan(tmp_path)) == samples(plan(tokens)) * 2

    def test_without_bounds_it_is_a_stream(self, tokens):
        tokens.with_suffix(".csv.gz").unlink()
        corpus = plan(tokens)
        assert corpus.stream
        assert samples(corpus) == OLMO["tokens"]

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ("0,10\n11,64\n", r"row 2 is the document \[11, 64\), but the one before ends at 10"),
            ("0,10\n10,9\n", "row 2"),
            ("0,10\n10,63\n", "end at token 63, but the file beside it has 64 tokens"),
            ("", "end at token 0"),
            ("start,end\n0,64\n", "not rows of start,end"),
            ("0\n", "not rows of start,end"),
            (f"0,{1 << 64}\n{1 << 64},{1 << 65}\n", "not rows of start,end"),
            ("0,64," + "x" * 70_000, "row 1 has 65536 characters or more"),
        ],
    )
    def test_bounds_that_do_not_fit_are_refused(self, tokens, rows, message):
        tokens.with_suffix(".csv.gz").write_bytes(gzip.compress(rows.encode()))
        with pytest.raises(SourceFormatError, match=message):
            plan(tokens)

    def test_a_blank_line_and_a_long_row_are_no_damage(self, tokens):
        wanted = samples(plan(tokens))
        rows = gzip.decompress(tokens.with_suffix(".csv.gz").read_bytes()).decode().splitlines()
        rows[0] += "," + "/a/long/path" * 1000
        tokens.with_suffix(".csv.gz").write_bytes(gzip.compress("\n".join([*rows, "", ""]).encode()))
        assert samples(plan(tokens)) == wanted

    @pytest.mark.parametrize(
        "damage", [lambda data: data[:-4], lambda data: b"no", lambda data: data[:20] + b"\xff" * 9]
    )
    def test_damaged_bounds_are_refused(self, tokens, damage):
        bounds = tokens.with_suffix(".csv.gz")
        bounds.write_bytes(damage(bounds.read_bytes()))
        with pytest.raises(SourceFormatError, match="compressed by gzip"):
            plan(tokens)


class TestRaw:
    def write(self, tmp_path, values, name="c.bin"):
        values.tofile(tmp_path / name)
        return tmp_path / name

    @pytest.mark.promise("F26")
    def test_uint16_is_assumed_and_said(self, tmp_path):
        values = np.array([0, 1, 40000, 65535], "<u2")
        corpus = plan(self.write(tmp_path, values))
        assert (corpus.format, corpus.stream, samples(corpus)) == ("raw", True, values.tolist())
        assert corpus.notes == ("no header: uint16 tokens are assumed, --dtype says otherwise",)

    @pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "float32"])
    def test_dtype_is_taken_as_said(self, tmp_path, dtype):
        values = np.array([1, 2, 100], dtype)
        corpus = plan(self.write(tmp_path, values), dtype=dtype)
        assert (corpus.columns[0].values.dtype, corpus.notes, samples(corpus)) == (dtype, (), values.tolist())

    def test_values_that_look_32_bit_are_pointed_out_but_not_changed(self, tmp_path):
        values = np.arange(50_000, 50_400, dtype="<u4")
        path = self.write(tmp_path, values)
        corpus = plan(path)
        assert corpus.columns[0].values.dtype == "uint16"
        assert "did you mean --dtype uint32 or int32?" in corpus.notes[1]
        assert len(plan(path, dtype="uint32").notes) == 0

    @pytest.mark.parametrize("values", [np.zeros(1000, "<u2"), np.arange(1000, dtype="<u2"), np.array([70_000], "<u4")])
    def test_values_that_are_16_bit_are_not_suspected(self, tmp_path, values):
        assert len(plan(self.write(tmp_path, values)).notes) == 1

    @pytest.mark.promise("F25")
    def test_an_empty_file_is_refused(self, tmp_path):
        with pytest.raises(SourceFormatError, match="empty"):
            plan(self.write(tmp_path, np.zeros(0, "<u2")))

    @pytest.mark.promise("F26")
    def test_odd_sizes_are_refused(self, tmp_path):
        path = self.write(tmp_path, np.zeros(7, "u1"))
        with pytest.raises(SourceFormatError, match="7 bytes are not a whole number of uint16"):
            plan(path)
        with pytest.raises(SourceFormatError, match="7 bytes are not a whole number of uint32"):
            plan(path, dtype="uint32")

    def test_an_unknown_name_needs_a_dtype(self, tmp_path):
        values = np.array([1, 50000], "<u2")
        path = self.write(tmp_path, values, "corpus.tokens")
        with pytest.raises(SourceFormatError, match="say which, for example --dtype uint16"):
            plan(path)
        assert samples(plan(path, dtype="uint16")) == values.tolist()

    def test_truncation_after_planning_is_an_error(self, tmp_path):
        path = self.write(tmp_path, np.zeros(8, "<u2"))
        corpus = plan(path)
        path.write_bytes(b"\0" * 15)
        with pytest.raises(SourceFormatError, match="changed while it was read"):
            read(corpus.columns[0].values)


def _masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum, after RFC 3720 B.4 and the mask of `tensorflow/core/lib/hash/crc32c.h`."""
    remainder = int.from_bytes(data, "little") ^ 0xFFFFFFFF
    for _ in range(8 * len(data)):
        remainder = remainder >> 1 ^ 0x82F63B78 * (remainder & 1)
    crc = remainder ^ 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % (1 << 32)


class TestRefusals:
    """Files that are no tokens are told by name, whatever they are called."""

    def refuse(self, path, message, content=None, **options):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SourceFormatError, match=message):
            resolve([str(path)], SourceOptions(**options))

    @pytest.mark.parametrize("dtype", [None, "uint16"])
    @pytest.mark.parametrize("name", ["c.bin", "c.npy", "c.tokens"])
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"PK\x03\x04" + bytes(60), "zip archive"),
            (b"GGUF\x03\0\0\0" + bytes(60), "GGUF"),
            (b"\x28\xb5\x2f\xfd" + bytes(60), "zstd.*decompress"),
            (gzip.compress(b"x" * 100, mtime=0), "gzip.*decompress"),
            (pickle.dumps({"tokens": [1, 2]}, protocol=2), "pickle is never loaded"),
            (pickle.dumps(np.arange(9)), "pickle is never loaded"),
            (b"PK\x05\x06" + bytes(18), "empty zip"),
            (bz2.compress(b"x" * 100), "bzip2.*decompress"),
            (b"FEA1" + bytes(60), "Feather"),
            (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(60), "JPEG"),
            (b"\x89PNG\r\n\x1a\n" + bytes(60), "PNG"),
            (b"\x7fELF\x02\x01\x01" + bytes(60), "ELF"),
        ],
    )
    def test_by_content(self, tmp_path, name, dtype, content, message):
        self.refuse(tmp_path / name, message, content, dtype=dtype)

    @pytest.mark.parametrize("content", [b"Once upon a time there was a text.\n" * 9, "Größe: 10 €\n".encode() * 7000])
    @pytest.mark.parametrize("name", ["c.bin", "c.npy", "c.tokens"])
    def test_text(self, tmp_path, name, content):
        self.refuse(tmp_path / name, "text is not tokens", content)

    def test_tokens_that_happen_to_be_printable_need_a_dtype(self, tmp_path):
        values = np.frombuffer(b"tokenids" * 20, "<u2")
        values.tofile(tmp_path / "c.bin")
        self.refuse(tmp_path / "c.bin", "text is not tokens")
        assert samples(plan(tmp_path / "c.bin", dtype="uint16")) == values.tolist()

    def test_quickdraw(self, tmp_path):
        drawing = struct.pack("<Q2sbIH", 5152802093400064, b"PT", 1, 1489436550, 2)
        drawing += struct.pack("<H3B3B", 3, 1, 2, 3, 4, 5, 6) + struct.pack("<H1B1B", 1, 255, 255)
        self.refuse(tmp_path / "full_binary_cat.bin", "QuickDraw", drawing * 5)

    @pytest.mark.parametrize(
        "name", ["c.arrow", "c.pt", "c.pkl", "c.tfrecord", "c.array_record", "c.parquet", "c.h5", "c.tar"]
    )
    def test_by_name_where_bytes_cannot_tell(self, tmp_path, name):
        self.refuse(
            tmp_path / name, "not supported|never loaded|does not start as one", b"\xff\xff\xff\xff" + bytes(60)
        )

    def test_huffman_by_either_half(self):
        for suffix in (".bin", ".idx", ""):
            path = FIXTURES / f"written-fairseq-0.12.2/builders/huffman{suffix}"
            self.refuse(path, "huffman.idx: fairseq's Huffman index is not supported")

    @pytest.mark.parametrize("magic", [b"MMIDRET\0\0", b"KNNRETM\0\0"])
    def test_retro(self, tmp_path, magic):
        (tmp_path / "c.bin").write_bytes(bytes(64))
        (tmp_path / "c.idx").write_bytes(magic + bytes(64))
        self.refuse(tmp_path / "c.bin", "RETRO")

    def test_shards_that_an_index_json_describes(self, tmp_path):
        (tmp_path / "index.json").write_text(json.dumps({"chunks": [{"filename": "chunk-0-0.bin"}]}))
        self.refuse(tmp_path / "chunk-0-0.bin", "index.json beside it describes", bytes(64))
        (tmp_path / "other.bin").write_bytes(bytes(64))
        assert plan(tmp_path / "other.bin").format == "raw"

    def test_text_can_be_served_as_its_bytes(self, tmp_path):
        (tmp_path / "c.txt").write_bytes(b"some text")
        assert samples(plan(tmp_path / "c.txt", dtype="uint8")) == list(b"some text")

    @pytest.mark.parametrize(
        "values", [[640, 1, 2], [0x0480, 0x2E95, 5], [35615, 9, 9], [0x4B50, 0x0304], [65535, 65535, 168, 0]]
    )
    def test_tokens_that_start_like_something_else_are_served(self, tmp_path, values):
        np.array(values, "<u2").tofile(tmp_path / "c.bin")
        assert samples(plan(tmp_path / "c.bin")) == values
