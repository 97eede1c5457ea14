"""Python values as msgpack: each comes back as it was, or is refused with the path to it."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch

from shmserve_client.errors import ObjectError, SegmentFormatError
from shmserve_client.objects import pack, unpack_object

VALUES = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    2**100,
    -(2**100),
    1.5,
    float("inf"),
    "",
    "é\0\U0001f600",
    b"\0\xff",
    [],
    [1, [2.0, [None]]],
    (1, (2, [3])),
    {},
    {"a": {"b": [1, (2,)]}, 1: b"x", None: 0, False: "f", 2.5: 1},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = unpack_object(pack(value))
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.array(3.5),
        np.empty((0, 2), np.float32),
        np.arange(6).reshape(2, 3).T,
        np.arange(3, dtype=">i4"),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_with_dtype_and_shape(array: np.ndarray) -> None:
    found = unpack_object(pack({"x": array}))["x"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.flags.writeable


@pytest.mark.parametrize("scalar", [np.float64(0.1), np.uint16(7), np.bool_(True)])
def test_numpy_scalars_come_back_as_such(scalar: np.generic) -> None:
    assert repr(unpack_object(pack([scalar]))) == repr([scalar])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8, torch.bool])
def test_tensors_come_back_as_tensors(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    found = unpack_object(pack([tensor]))[0]
    assert found.dtype is dtype
    assert torch.equal(found, tensor)


def test_without_torch_a_tensor_is_an_array() -> None:
    program = (
        "import sys; from shmserve_client.objects import unpack_object\n"
        "value = unpack_object(sys.stdin.buffer.read())\n"
        "assert 'torch' not in sys.modules; print(type(value).__name__, value.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pack(torch.tensor([1, 2])), capture_output=True)
    assert done.stdout.decode().split(" ", 1) == ["ndarray", "[1, 2]\n"], done.stderr


class _Number(int):
    pass


_HOLDS_ITSELF: list[Any] = []
_HOLDS_ITSELF.append(_HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("value", "place", "reason"),
    [
        ([{"meta": {"fn": len}}], "[17][0]['meta']['fn']", "builtin_function_or_method"),
        ({"when": datetime(2026, 1, 1)}, "[17]['when']", "datetime"),
        ([0, {1, 2}], "[17][1]", "set"),
        ({"n": _Number(1)}, "[17]['n']", "_Number"),
        (["a", "\ud800"], "[17][1]", "surrogate"),
        ((1, [object()]), "[17][1][0]", "object"),
        (np.array([object()]), "[17]", "ndarray"),
        (torch.zeros(1, dtype=torch.bfloat16), "[17]", "Tensor"),
        (_HOLDS_ITSELF, "[17][0][0]", "deeper"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_with_the_path_to_it(value: Any, place: str, reason: str) -> None:
    with pytest.raises(ObjectError) as refusal:
        pack(value, "[17]")
    message = str(refusal.value)
    assert message.startswith(place)
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x01\x02",
        b"\xa2\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc7\x01\x09x",
        b"\xc7\x01\x02\x01",
        b"\xc7\x01\x03x",
        b"\xd4\x01\x00",
        b"\x91" * 5000 + b"\xc0",
    ],
    ids=lambda packed: packed[:8].hex(),
)
def test_damaged_bytes_are_an_error(packed: bytes) -> None:
    with pytest.raises(SegmentFormatError, match="object of the segment is damaged"):
        unpack_object(packed)


@pytest.mark.parametrize("shape", [[3], [-1], [1 << 40, 1 << 40], ["a"], 3])
def test_an_array_that_lies_about_its_shape_is_an_error(shape: Any) -> None:
    import msgpack

    inner = msgpack.packb(["int64", shape, bytes(16)])
    with pytest.raises(SegmentFormatError, match="damaged"):
        unpack_object(msgpack.packb(msgpack.ExtType(1, inner)))
