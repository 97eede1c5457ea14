"""Checksums as docs/layout.md defines them, and as the writer takes them."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve_client.checksums import ChunkSums, checksum
from shmserve_client.errors import VocabularyError
from shmserve_client.layout import CHUNK_NBYTES, DATA_ALIGNMENT, Array, Checksums, Column
from shmserve_client.mapping import HUGE_PAGE_NBYTES
from shmserve_client.owned import OwnedSegment
from shmserve_client.writer import Values
from tests.segments import Repeated, allocated_nbytes, describe_tokens, published, write_pieces


def write_with_checksums(shm_dir: Path, values, **options) -> OwnedSegment:
    description = replace(describe_tokens(values.dtype.name, len(values)), checksums=Checksums())
    return write_pieces(shm_dir, description, [[Values(values)]], **options)


def as_documented(owned: OwnedSegment) -> list[int]:
    """The checksums of the segment's file by the words of docs/layout.md, the last one their own."""
    content = Path(owned.path).read_bytes()
    data_offset, end = owned.header.data_offset, owned.description.checksums.values.offset
    starts = range(data_offset, end, 2097152)
    sums = [xxhash.xxh3_64_intdigest(content[start : min(start + 2097152, end)], seed=0) for start in starts]
    packed = b"".join(number.to_bytes(8, "little") for number in sums)
    return [*sums, xxhash.xxh3_64_intdigest(packed, seed=0)]


def stored(owned: OwnedSegment) -> list[int]:
    return owned.array(owned.description.checksums.values).tolist()


def test_it_is_xxh3_with_the_seed_0():
    assert checksum(np.zeros(0, np.uint8)) == 0x2D06800538D394C2
    assert checksum(np.frombuffer(b"shmserve", np.uint8)) == xxhash.xxh3_64_intdigest(b"shmserve")


def test_windows_of_the_filling_are_chunks():
    assert CHUNK_NBYTES == HUGE_PAGE_NBYTES == DATA_ALIGNMENT


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 3 * CHUNK_NBYTES), st.randoms(use_true_random=False))
def test_the_order_of_the_windows_does_not_matter(nbytes: int, order: random.Random):
    data = np.resize(np.arange(251, dtype=np.uint8), nbytes + 100)  # what lies behind the chunks is not theirs
    start = 7 * CHUNK_NBYTES
    sums = ChunkSums(start, start + nbytes)
    windows = list(range(0, len(data), CHUNK_NBYTES))
    order.shuffle(windows)
    for window in windows:
        sums(data[window : window + CHUNK_NBYTES], start + window)
    chunks = [data[at : min(at + CHUNK_NBYTES, nbytes)].tobytes() for at in range(0, nbytes, CHUNK_NBYTES)]
    packed = b"".join(xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "little") for chunk in chunks)
    assert sums.sealed() == packed + xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little")


@pytest.mark.parametrize("nbytes", [0, 1, 64, CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, 5 * CHUNK_NBYTES])
def test_the_writer_takes_them_as_documented(shm_dir, nbytes):
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    with published(write_with_checksums(shm_dir, values)) as owned:
        assert stored(owned) == as_documented(owned)
        assert len(stored(owned)) == -(-nbytes // CHUNK_NBYTES) + 1
        assert owned.array(owned.description.columns[0].values).tobytes() == values.tobytes()


def test_they_cover_all_arrays(shm_dir):
    rng = np.random.default_rng(0)
    parts = {
        "values": rng.integers(0, 9, 2_000_001, np.uint16),
        "offsets": np.array([0, 5, 2_000_001]),
        "modes": rng.integers(0, 9, 3, np.int8),
    }
    column = Column("tokens", Array("uint16", (2_000_001,)), offsets=Array("int64", (3,)))
    description = replace(
        describe_tokens("uint16", 0),
        num_samples=2,
        columns=(column,),
        arrays={"modes": Array("int8", (3,))},
        checksums=Checksums(),
    )
    with published(write_pieces(shm_dir, description, [[Values(part)] for part in parts.values()])) as owned:
        assert stored(owned) == as_documented(owned)
        assert len(stored(owned)) == 3


def test_memory_for_them_is_there_beforehand(shm_dir):
    """Else writing them, or reading them through a mapping, could be a SIGBUS."""
    with published(write_with_checksums(shm_dir, np.zeros(3 * CHUNK_NBYTES, np.uint8))) as owned:
        assert owned.header.total_nbytes == 4 * CHUNK_NBYTES + 4 * 8
        assert os.lseek(owned.fd, DATA_ALIGNMENT, os.SEEK_HOLE) == owned.header.total_nbytes
        assert allocated_nbytes(owned.fd) <= 3 * CHUNK_NBYTES + 2 * 4096


def test_without_being_asked_none_are_taken(shm_dir):
    with published(write_pieces(shm_dir, describe_tokens("uint8", 9), [[Repeated(9)]])) as owned:
        assert owned.description.checksums is None
        assert owned.header.total_nbytes == DATA_ALIGNMENT + 9


def test_the_vocabulary_is_checked_as_well(shm_dir):
    with published(write_with_checksums(shm_dir, np.array([1, 2], np.uint16), vocab_size=3)) as owned:
        assert stored(owned) == as_documented(owned)
    with pytest.raises(VocabularyError, match="token id 2 at position 1"):
        write_with_checksums(shm_dir, np.array([1, 2], np.uint16), vocab_size=2)
