"""From Python values to columns: the tightest that gives the same values back, and one form for all its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmserve_client.chunks import Chunk, Form, common_form, convert, encode, objects, ragged, rows
from shmserve_client.errors import ObjectError
from shmserve_client.staging import Staging

ENCODED = {
    "int": ([1, -(2**63), 2**63 - 1], Form("tensor", "int64", (), python="number")),
    "float": ([0.5, float("inf")], Form("tensor", "float64", (), python="number")),
    "bool": ([True, False], Form("tensor", "bool", (), python="number")),
    "str": (["", "é", "\0"], Form("text", "uint8", None)),
    "bytes": ([b"", b"\xff"], Form("bytes", "uint8", None)),
    "lists of int": ([[1], [], [2, 3]], Form("tensor", "int64", None, python="list")),
    "lists of float": ([[], [0.5]], Form("tensor", "float64", None, python="list")),
    "lists of bool": ([[True], []], Form("tensor", "bool", None, python="list")),
    "arrays of one shape": ([np.ones((2, 3), np.float32)] * 2, Form("tensor", "float32", (2, 3), python="array")),
    "arrays of several lengths": ([np.arange(2, dtype=np.uint16), np.arange(0, dtype=np.uint16)],
                                  Form("tensor", "uint16", None, python="array")),
    "arrays of several shapes": ([np.ones((1, 2)), np.ones((0, 2))],
                                 Form("tensor", "float64", None, True, python="array")),
    "tensors": ([torch.arange(3), torch.arange(3)], Form("tensor", "int64", (3,), python="tensor")),
    "numpy scalars": ([np.float32(1), np.float32(2)], Form("tensor", "float32", (), python="scalar")),
    "beyond 64 bits": ([1, 2**63], Form("object", "uint8", None)),
    "lists beyond 64 bits": ([[2**63]], Form("object", "uint8", None)),
    "numbers of two types": ([1, 1.0], Form("object", "uint8", None)),
    "bools and ints": ([1, True], Form("object", "uint8", None)),
    "with None": (["a", None], Form("object", "uint8", None)),
    "empty lists": ([[], []], Form("tensor", "int64", None, python="list")),
    "nested lists": ([[[1]], [[2]]], Form("object", "uint8", None)),
    "dicts": ([{"a": 1}], Form("object", "uint8", None)),
    "tuples": ([(1, 2)], Form("object", "uint8", None)),
    "arrays of two dtypes": ([np.ones(1, np.int8), np.ones(1, np.int16)], Form("object", "uint8", None)),
}  # fmt: skip


def plain(values: Any) -> list[Any]:
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


@pytest.mark.parametrize(("values", "form"), ENCODED.values(), ids=ENCODED)
def test_values_take_the_tightest_form_that_gives_them_back(values: list[Any], form: Form) -> None:
    chunk = encode(values)
    assert chunk.form == form
    assert chunk.count == len(values)
    assert repr(list(chunk.samples())) == repr(values)


def test_what_cannot_be_stored_is_named_by_row_and_column() -> None:
    with pytest.raises(ObjectError, match=r"^\[1\]\['fn'\]\['f'\] cannot be stored: it is a builtins"):
        encode([{"f": 1}, {"f": len}], "fn")
    with pytest.raises(ObjectError, match=r"^\[1\]\['s'\] cannot be stored: .*surrogate"):
        encode(["a", "\udc00"], "s")


def _int64() -> Form:
    return Form("tensor", "int64", ())


def _empty() -> Form:
    return Form("tensor", "int64", None, is_empty=True)


@pytest.mark.parametrize(
    ("forms", "numbers_widen", "common"),
    [
        ([Form("text", "uint8", None)] * 2, False, Form("text", "uint8", None)),
        ([_int64(), Form("tensor", "float64", ())], True, Form("tensor", "float64", ())),
        ([_int64(), Form("tensor", "float64", ())], False, Form("object", "uint8", None)),
        ([Form("tensor", "int64", None), Form("tensor", "float64", None)], True, Form("tensor", "float64", None)),
        ([Form("tensor", "int8", (2,)), Form("tensor", "int8", (3,))], True, Form("tensor", "int8", None)),
        ([Form("tensor", "int8", (2,)), Form("tensor", "int8", None)], True, Form("tensor", "int8", None)),
        ([Form("tensor", "int8", (2, 2)), Form("tensor", "int8", (3,))], True, Form("tensor", "int8", None, True)),
        ([Form("tensor", "int8", None, True), Form("tensor", "int8", None)], True, Form("tensor", "int8", None, True)),
        ([_int64(), Form("tensor", "int64", None)], True, Form("object", "uint8", None)),
        ([_empty(), Form("tensor", "float32", None)], True, Form("tensor", "float32", None)),
        ([_empty(), Form("tensor", "float32", (2, 2))], True, Form("tensor", "float32", None, True)),
        ([_empty(), Form("object", "uint8", None)], True, Form("object", "uint8", None)),
        ([_empty(), _int64()], True, Form("object", "uint8", None)),
        ([_empty(), _empty()], True, _empty()),
        ([_int64(), Form("tensor", "int64", (), python="number")], True, _int64()),
        ([_int64(), Form("tensor", "int64", (), python="number")], False, Form("object", "uint8", None)),
        ([_int64(), Form("text", "uint8", None)], True, Form("object", "uint8", None)),
        ([Form("bytes", "uint8", None), Form("text", "uint8", None)], True, Form("object", "uint8", None)),
    ],
)
def test_chunks_of_several_forms_have_one_in_common(forms: list[Form], numbers_widen: bool, common: Form) -> None:
    assert common_form(forms, numbers_widen=numbers_widen) == common
    assert common_form(forms[::-1], numbers_widen=numbers_widen) == common


VALUES = st.one_of(
    st.lists(st.integers(-(2**70), 2**70), min_size=1),
    st.lists(st.integers(-3, 3) | st.floats(allow_nan=False), min_size=1),
    st.lists(st.text(st.characters(codec="utf-8")) | st.none() | st.binary(), min_size=1),
    st.lists(st.lists(st.integers(-9, 9)), min_size=1),
    st.lists(st.lists(st.booleans() | st.lists(st.floats(allow_nan=False))), min_size=1),
)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_whatever_the_chunks_all_values_come_back_as_they_were(chunks: list[list[Any]]) -> None:
    encoded = [encode(values) for values in chunks]
    form = common_form([chunk.form for chunk in encoded], numbers_widen=False)
    for values, chunk in zip(chunks, encoded, strict=True):
        converted = convert(chunk, form)
        assert converted.form == form
        assert repr(list(converted.samples())) == repr(values)


def test_integers_that_no_float_holds_are_not_rounded() -> None:
    chunks = [encode([2**53 + 1, 1]), encode([0.5])]
    form = common_form([chunk.form for chunk in chunks], numbers_widen=True)
    assert form.kind == "object"
    assert [sample for chunk in chunks for sample in convert(chunk, form).samples()] == [2**53 + 1, 1, 0.5]
    assert common_form([encode([2**53]).form, chunks[1].form], numbers_widen=True).dtype == "float64"


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    with (tmp_path / "staged").open("w+b") as file:
        yield Staging(file.fileno(), keep=True)


CHUNKS = [
    rows(np.arange(12, dtype=np.int16).reshape(3, 2, 2)),
    ragged(np.arange(5, dtype=np.uint8), np.array([2, 0, 3])),
    encode([np.ones((2, 1)), np.ones((0, 1)), np.ones(3)]),
    encode(["a", "", "é"]),
    objects([1, None, {"a": []}]),
    Chunk(np.empty((0, 4), np.float32)),
    ragged(np.empty(0, np.int64), np.zeros(2, np.int64)),
]


def test_staged_chunks_come_back(staging: Staging) -> None:
    staged = [staging.append(chunk) for chunk in CHUNKS]
    for chunk, where in zip(CHUNKS, staged, strict=True):
        found = staging.load(where)
        assert where.form == found.form == chunk.form
        assert where.count == found.count == chunk.count
        assert plain(found.samples()) == plain(chunk.samples())


def test_what_was_taken_takes_no_memory_any_more(tmp_path: Path) -> None:
    with (tmp_path / "staged").open("w+b") as file:
        staging = Staging(file.fileno())
        values = np.arange(1 << 20, dtype=np.int64)
        staged = staging.append(rows(values))
        held = staging.nbytes
        (piece,) = staging.plan("n", staged, "here").values.pieces
        found = np.empty_like(values)
        for start in range(0, values.nbytes, 1 << 16):
            piece.read_into(found.view(np.uint8)[start : start + (1 << 16)], start)
        np.testing.assert_array_equal(found, values)
        assert held >= values.nbytes
        assert staging.nbytes == 0
        assert piece.origin(8) == "here"
