"""What people read: sizes, times, and lines while a dataset loads."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from shmserve import progress
from shmserve.progress import open_progress
from shmserve.text import describe_dataset, duration, percent, size
from tests.test_protocol import DATASET


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0421, "42 ms"), (3.14, "3.1 s"), (59.9, "59.9 s"), (90, "2 min"), (3600 + 300, "1 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent_is_100_only_for_all() -> None:
    assert [percent(999, 1000), percent(1000, 1000), percent(0, 0)] == [99, 100, 0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_samples": 1, "segment_nbytes": 1 << 30}, "megatron, 1 sample, 1.0 GiB, 4 KiB pages"),
        ({"stream": True, "num_samples": 1234567}, "megatron, 1,234,567 tokens, 1.0 TiB, 4 KiB pages"),
        ({"segment_nbytes": 8192}, "megatron, 3 samples, 8.0 KiB"),
        ({"huge_nbytes": 1 << 39}, "megatron, 3 samples, 1.0 TiB, 50 % huge pages"),
        ({"huge_nbytes": (1 << 40) - (4 << 20)}, "megatron, 3 samples, 1.0 TiB, huge pages"),
    ],
)
def test_a_dataset_in_a_few_words(changes: dict[str, Any], text: str) -> None:
    assert describe_dataset(replace(DATASET, **changes)) == text


def test_without_a_terminal_a_line_comes_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    stream = io.StringIO()
    shown = open_progress(stream)
    shown.start("corpus", 4 << 30)
    for now_s in (100.1, 104.9, 105.0, 107.0, 109.9, 110.0):
        shown.advance(int((now_s - 100) * (100 << 20)), 4 << 30)
    shown.close()
    assert stream.getvalue().splitlines() == [
        "corpus: loading 4.0 GiB",
        "corpus: loaded 500.0 MiB of 4.0 GiB (12 %), 100.0 MiB/s, 36.0 s left",
        "corpus: loaded 1000.0 MiB of 4.0 GiB (24 %), 100.0 MiB/s, 31.0 s left",
    ]


def test_a_load_that_does_not_get_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    stream = io.StringIO()
    shown = open_progress(stream)
    shown.start("corpus", 4 << 30)
    now_s = 6.0
    shown.advance(0, 4 << 30)
    assert stream.getvalue().splitlines()[1] == "corpus: loaded 0 bytes of 4.0 GiB (0 %)"


def test_a_name_cannot_write_more_than_its_line() -> None:
    stream = io.StringIO()
    open_progress(stream).say("corpus: shards a\nb, \x1b[2J")
    assert stream.getvalue() == "corpus: shards a\\nb, \\x1b[2J\n"
