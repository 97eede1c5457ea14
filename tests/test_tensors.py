"""Which dtype a sample has and whose memory: what torch can compute with, exact, aliased only where that is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmserve_client import ConfigError, SampleValueError, ShmDataset
from shmserve_client.layout import DTYPES
from shmserve_client.segment import Segment
from shmserve_client.tensors import tensor_maker
from tests.datasets import served_columns

Open = Callable[..., ShmDataset]
WIDENED = {"uint16": torch.int64, "uint32": torch.int64, "uint64": torch.int64}


def make(values: NDArray[Any], dtype: Any = None, *, private: bool = False) -> torch.Tensor:
    return tensor_maker(values.dtype, dtype, private=private)(values, 7)


@pytest.fixture
def served(shm_dir: Path, runtime_dir: Path) -> Iterator[Callable[[NDArray[Any]], Open]]:
    """Serves rows, and returns what opens datasets of them."""
    with ExitStack() as stack:

        def serve(rows: NDArray[Any]) -> Open:
            daemon = stack.enter_context(
                served_columns({"rows": rows}, shm_dir=shm_dir, socket=runtime_dir / "fake.sock")
            )
            return lambda **options: ShmDataset(endpoint=daemon.path, **options)

        yield serve


@pytest.mark.promise("F27")
@pytest.mark.parametrize("name", DTYPES)
def test_by_default_torch_can_compute_with_it(name: str) -> None:
    values = np.array([[0, 1], [1, 1]]).astype(DTYPES[name])
    tensor = make(values)
    assert tensor.dtype == WIDENED.get(name, getattr(torch, name))
    assert tensor.tolist() == values.tolist()
    tensor + tensor
    torch.stack([tensor, tensor]).to(torch.complex64).sum()
    aliased = tensor.numpy().__array_interface__["data"] == values.__array_interface__["data"]
    assert aliased == (name not in WIDENED)


@pytest.mark.parametrize("name", DTYPES)
def test_stored_is_the_stored_dtype_zero_copy(name: str) -> None:
    values = np.array([0, 1, 1]).astype(DTYPES[name])
    tensor = make(values, "stored")
    assert tensor.dtype == getattr(torch, name)
    assert tensor.data_ptr() == values.__array_interface__["data"][0]
    assert make(values, "stored", private=True).data_ptr() != tensor.data_ptr()


@pytest.mark.promise("F27")
@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64"])
def test_large_values_survive(name: str) -> None:
    largest = min(np.iinfo(name).max, (1 << 63) - 1)
    values = [0, 40_000, 65_535, int(largest)]
    assert make(np.array(values, name)).tolist() == values
    assert make(np.array(40_000, name)).tolist() == 40_000
    assert make(np.empty((0, 3), name)).shape == (0, 3)
    embedding = torch.nn.Embedding(65_536, 2)
    assert embedding(make(np.array(values[:3], name))).shape == (3, 2)


def test_what_int64_cannot_hold_is_refused_with_value_and_place() -> None:
    values = np.array([[1, 2], [1 << 63, (1 << 64) - 1]], np.uint64)
    with pytest.raises(
        SampleValueError, match=r'sample 7 holds 9223372036854775808 at position 2, .* int64: dtype="stored"'
    ):
        make(values)
    assert make(values, "stored").dtype == torch.uint64


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array([1, 65_535], np.uint16), torch.int32, [1, 65_535]),
        (np.array([1, 2], np.int32), torch.int64, [1, 2]),
        (np.array([1, 2], np.int64), torch.uint8, [1, 2]),
        (np.array([1, 2], np.int64), torch.float32, [1.0, 2.0]),
        (np.array([1, 2], np.uint16), torch.bfloat16, [1.0, 2.0]),
        (np.array([0, 2], np.uint32), torch.bool, [False, True]),
        (np.array([1.0, -2.0]), torch.int16, [1, -2]),
        (np.array([0.5]), torch.bfloat16, [0.5]),
        (np.array([1 + 2j]), torch.complex64, [1 + 2j]),
        (np.array([3]), torch.int64, [3]),
    ],
)
def test_another_dtype_is_converted_exactly(values: NDArray[Any], dtype: torch.dtype, expected: list[Any]) -> None:
    tensor = make(values, dtype)
    assert tensor.dtype == dtype
    assert tensor.tolist() == expected


@pytest.mark.parametrize(
    ("values", "dtype", "told"),
    [
        (np.array([1, 300]), torch.uint8, "300 at position 1"),
        (np.array([1, -1], np.int8), torch.uint8, "-1 at position 1"),
        (np.array([1, 1 << 31], np.uint32), torch.int32, "2147483648 at position 1"),
        (np.array([np.nan]), torch.int64, "nan at position 0"),
        (np.array([0, 2.0**63]), torch.int64, "position 1"),
        (np.array([-1e30]), torch.int32, "position 0"),
    ],
)
def test_a_conversion_never_wraps_around(values: NDArray[Any], dtype: torch.dtype, told: str) -> None:
    with pytest.raises(SampleValueError, match=told):
        make(values, dtype)


def test_complex_is_not_made_real() -> None:
    with pytest.raises(ConfigError, match="complex128"):
        tensor_maker(np.dtype(np.complex128), torch.float32, private=False)


@pytest.mark.parametrize("dtype", [torch.bits8, torch.uint1, torch.int4])
def test_what_torch_cannot_convert_to_is_refused_at_once(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"dtype {dtype}: torch does not convert uint16 to it"):
        tensor_maker(np.dtype(np.uint16), dtype, private=False)


@pytest.mark.promise("F17")
def test_a_transform_works_on_a_copy(served: Callable[[NDArray[Any]], Open]) -> None:
    open_dataset = served(np.arange(6, dtype=np.int32).reshape(3, 2))
    assert [sample.tolist() for sample in open_dataset(transform=torch.Tensor.neg_)] == [[0, -1], [-2, -3], [-4, -5]]
    negating = open_dataset(transform=torch.Tensor.neg_)
    assert [negating[1].tolist() for _ in range(3)] == [[-2, -3]] * 3, "an epoch saw the work of the one before"
    assert open_dataset()[1].tolist() == [2, 3]


def test_copy_forces_either(served: Callable[[NDArray[Any]], Open]) -> None:
    open_dataset = served(np.arange(6, dtype=np.int32).reshape(3, 2))
    copied = open_dataset(copy=True)
    first, second = copied[1], copied[1]
    first.zero_()
    assert second.tolist() == copied[1].tolist() == [2, 3]
    viewed = open_dataset(copy=False, transform=torch.Tensor.neg_)
    assert [viewed[2].tolist() for _ in range(2)] == [[-4, -5], [4, 5]]
    for lookup in ("shared", "daemon"):
        view = open_dataset(lookup=lookup)
        assert view[0].data_ptr() == view[0].data_ptr() == open_dataset()[0].data_ptr()


def test_a_read_only_segment_gives_copies(
    served: Callable[[NDArray[Any]], Open], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where vm.overcommit_memory is 2: torch would warn of arrays that it cannot write to, a write would crash."""
    open_dataset = served(np.arange(6, dtype=np.int32).reshape(3, 2))
    monkeypatch.setattr(Segment, "writable", property(lambda self: False))
    monkeypatch.setattr(Segment, "array", _read_only(Segment.array))
    for options in ({}, {"copy": False}, {"copy": False, "transform": torch.Tensor.neg_}):
        ds = open_dataset(**options)
        ds[1].add_(1)
        assert ds[1].abs().tolist() == [2, 3]


def _read_only(array: Callable[..., NDArray[Any]]) -> Callable[..., NDArray[Any]]:
    def view(segment: Segment, described: Any) -> NDArray[Any]:
        found = array(segment, described)
        found.flags.writeable = False
        return found

    return view


def test_a_sample_takes_only_its_own_bytes_along(served: Callable[[NDArray[Any]], Open], tmp_path: Path) -> None:
    ds = served(np.zeros((1000, 1000), np.int32))()
    torch.save(ds[5], tmp_path / "sample.pt")
    assert (tmp_path / "sample.pt").stat().st_size < 20_000
    assert ds[5].untyped_storage().nbytes() == 4000
