"""Damaged files of the decoded formats: an error of the decoder's, or rows; in bounded time and memory."""

from __future__ import annotations

import shutil
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.decoder import answers, failure
from shmserve.sources import SourceOptions, resolve
from shmserve.sources.base import DecodedSource
from shmserve_client.errors import ERROR_CLASSES, ShmserveError
from shmserve_client.staging import Staging
from tests.sources.reading import FIXTURES

from .mutations import mutated
from .targets import check_refusal

MAX_PEAK_NBYTES = 128 << 20

CASES = {
    # What is parsed here, rather than by a library: in this process, where a fault of it can be seen.
    "npz": ("written-misc/deflated.npz", ""),
    "safetensors": ("written-misc/fixed.safetensors", ""),
    "safetensors, ragged": ("written-misc/values_offsets.safetensors", ""),
    "jsonl": ("written-misc/t.jsonl", ""),
    "text": ("written-misc/t.txt", ""),
    "webdataset": ("written-misc/samples-000000.tar", ""),
    "tfrecord": ("written-misc/r.tfrecord", ""),
    "mds": ("written-mosaicml-streaming/tokens_ragged", "shard.00000.mds"),
    "mds, its index": ("written-mosaicml-streaming/tokens_ragged", "index.json"),
    "mds of several dtypes": ("written-mosaicml-streaming/ndarray_dynamic", "shard.00000.mds"),
    "mds, compressed": ("written-mosaicml-streaming/tokens_bytes_int64_llmfoundry_style_zstd", "shard.00000.mds.zstd"),
    "litdata": ("written-litdata/dict", "chunk-0-0.bin"),
    "litdata, its index": ("written-litdata/dict", "index.json"),
    "huggingface, its state": ("written-hf-datasets/ragged", "state.json"),
}


@cache
def content(path: Path) -> bytes:
    return path.read_bytes()


def decode(path: Path, staging: Staging) -> int:
    """Return how many rows there are, decoded as a helper does it. Raises what the daemon would be told."""
    rows = 0
    for shard in resolve([str(path)], SourceOptions()).shards:
        if not isinstance(shard, DecodedSource):
            return 0
        try:
            for part in shard.parts():
                for answer in answers((shard, part, None), staging):
                    rows += answer["count"]
        except Exception as error:
            told = failure(error, (shard,))
            raise ERROR_CLASSES[told["error"]](told["message"]) from error
    return rows


@pytest.mark.promise("fuzzing")
@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read(tmp_path: Path, case: str, data: st.DataObject) -> None:
    name, member = CASES[case]
    source = FIXTURES / name
    copy = tmp_path / source.name
    shutil.rmtree(copy, ignore_errors=True)
    if member:
        shutil.copytree(source, copy)
    (copy / member if member else copy).write_bytes(data.draw(mutated(content(source / member if member else source))))
    tracemalloc.start()
    try:
        with (tmp_path / "staging").open("w+b") as file:
            assert decode(copy, Staging(file.fileno())) >= 0
    except ShmserveError as error:
        check_refusal(error)
    finally:
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_nbytes < MAX_PEAK_NBYTES
    if not member:
        copy.unlink()
