"""docs/layout.md is enough to read a segment: a reader in C, written from it alone, reads what the writer wrote."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shmserve_client.layout import (
    DTYPES,
    HEADER,
    MAX_DIMENSIONS,
    Array,
    Checksums,
    Column,
    Description,
    SourceRecord,
    encode_prefix,
    place_arrays,
)
from shmserve_client.writer import Values
from tests.segments import REPOSITORY, describe_tokens, published, write_pieces

DOCUMENT = (REPOSITORY / "docs/layout.md").read_text()
READER = Path(__file__).with_name("segment_reader.c")


def test_the_example_is_what_the_code_writes():
    description = Description(
        name="tiny",
        format="megatron",
        num_samples=2,
        columns=(Column("tokens", Array("uint16", (5,)), offsets=Array("int64", (3,))),),
        source=SourceRecord("k1", "f1", ("/data/tiny.bin",), 2),
        checksums=Checksums(),
    )
    placed, data_offset, total_nbytes = place_arrays(description)
    prefix = encode_prefix(
        placed, data_offset=data_offset, total_nbytes=total_nbytes, nonce=bytes(range(16)), generation=1
    )
    dumped = {}
    for line in re.findall(r"^[0-9a-f]{8}  .*$", DOCUMENT, re.MULTILINE):
        position, hexadecimal, text = re.fullmatch(r"([0-9a-f]{8})  ([0-9a-f ]{47})  \|(.*)\|", line).groups()
        found = bytes.fromhex(hexadecimal)
        assert text == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in found)
        dumped[int(position, 16)] = found
    data = np.zeros(total_nbytes - data_offset, np.uint8)
    data[:10].view(np.uint16)[:] = [1, 2, 3, 4, 5]
    data[64:88].view(np.int64)[:] = [0, 3, 5]
    chunk = xxhash.xxh3_64_intdigest(bytes(data[:128]))
    data[128:136].view(np.uint64)[:] = chunk
    data[136:].view(np.uint64)[:] = xxhash.xxh3_64_intdigest(chunk.to_bytes(8, "little"))
    assert b"".join(part for position, part in dumped.items() if position < data_offset) == prefix
    assert b"".join(part for position, part in dumped.items() if position >= data_offset) == data.tobytes()
    assert sorted(dumped) == [*range(0, len(prefix), 16), *range(data_offset, total_nbytes, 16)]


def test_the_header_table_adds_up():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ", DOCUMENT, re.MULTILINE)
    ends = [0]
    for offset, size in rows:
        assert int(offset) == ends[-1]
        ends.append(int(offset) + int(size))
    assert ends[-1] == HEADER.size
    assert f"header, {HEADER.size} bytes" in DOCUMENT


def test_all_dtypes_and_limits_are_listed():
    assert [name for name in DTYPES if f"`{name}`" not in DOCUMENT] == []
    assert f"at most {MAX_DIMENSIONS} extents" in DOCUMENT


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("reader") / "segment_reader"
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-o", program, READER], check=True)
    return program


def test_a_reader_in_c_reads_ragged_samples(shm_dir, reader):
    tokens = np.array([1, 2, 3, 40000, 65535], np.uint16)
    offsets = np.array([0, 3, 3, 5])
    column = Column("tokens", Array("uint16", (5,)), offsets=Array("int64", (4,)))
    description = replace(describe_tokens("uint16", 0), num_samples=3, columns=(column,), notes=("n" * 70_000,))
    with published(write_pieces(shm_dir, description, [[Values(tokens)], [Values(offsets)]])) as owned:
        done = subprocess.run([reader, owned.path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["uint16 3 samples", "1 2 3", "", "40000 65535"]


def test_a_reader_in_c_refuses_what_is_no_segment(tmp_path, reader):
    (tmp_path / "it").write_bytes(bytes(4096))
    done = subprocess.run([reader, tmp_path / "it"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not a segment" in done.stderr
