"""True .npy files."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shmserve.sources import pieces
from shmserve_client.errors import SourceFormatError

from .contract import Case, SourceContract, expected
from .reading import FIXTURES, plan, samples

MISC = expected("written-misc")["expected"]
DTYPES = {"fixed_u16.npy": "uint16", "fortran_f32.npy": "float32", "bigendian_i4.npy": "int32", "oned_i64.npy": "int64"}


class TestNpy(SourceContract):
    format = "npy"

    @pytest.fixture(params=DTYPES)
    def case(self, request):
        stays = request.param not in ("fortran_f32.npy", "bigendian_i4.npy")
        return Case((f"written-misc/{request.param}",), DTYPES[request.param], MISC[request.param], stays=stays)

    def test_a_scalar_is_refused(self):
        with pytest.raises(SourceFormatError, match="0-d"):
            plan(FIXTURES / "written-misc/zerod_f64.npy")

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (np.array([{}, None], object), "object array is a pickle"),
            (np.zeros(2, [("x", "i4"), ("y", "f4")]), r"structured array \(x, y\)"),
            (np.array(["a", "b"]), "array of <U1"),
            (np.array([b"a"]), r"array of \|S1"),
            (np.zeros(2, "M8[s]"), "array of datetime64"),
            (np.zeros(2, np.longdouble), "array of float128"),
        ],
    )
    def test_what_is_not_numbers_is_refused_by_name(self, tmp_path, array, message):
        np.save(tmp_path / "c.npy", array, allow_pickle=True)
        with pytest.raises(SourceFormatError, match=message):
            plan(tmp_path / "c.npy")

    def test_the_name_does_not_matter(self, tmp_path):
        with (tmp_path / "c.bin").open("wb") as file:
            np.save(file, np.arange(4))
        assert (plan(tmp_path / "c.bin").format, samples(plan(tmp_path / "c.bin"))) == ("npy", [0, 1, 2, 3])

    @pytest.mark.parametrize("head", [b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff{", b"\x93NUMPY\x04\x00" + bytes(99)])
    def test_damaged_headers_are_refused(self, tmp_path, head):
        (tmp_path / "c.npy").write_bytes(head)
        with pytest.raises(SourceFormatError, match=r"not a readable \.npy header"):
            plan(tmp_path / "c.npy")

    @pytest.mark.parametrize(
        "text",
        [
            b"-" * 9000,
            b"{[]: 1}",
            b"{'descr': [], 'fortran_order': False, 'shape': (1,)}",
            b"{'descr': [1], 'fortran_order': False, 'shape': (1,)}",
            b"{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2",
            b"{'descr': (), 'fortran_order': False, 'shape': (1,)}",
            b"  a\n b",
            b'"""',
        ],
    )
    def test_headers_that_numpys_parser_fails_on_are_refused(self, tmp_path, text):
        (tmp_path / "c.npy").write_bytes(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + bytes(64))
        with pytest.raises(SourceFormatError, match=r"c\.npy: "):
            plan(tmp_path / "c.npy")

    @pytest.mark.parametrize("shape", [(0, 1 << 60), (-2, -3), (0, 1 << 70), (1,) * 40, (3, *[1] * 35)])
    def test_shapes_that_no_array_has_are_refused(self, tmp_path, shape):
        with (tmp_path / "c.npy").open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.write(bytes(4 * max(0, math.prod(shape))))
        with pytest.raises(SourceFormatError, match=r"c\.npy: its header says an array of the shape"):
            plan(tmp_path / "c.npy")

    def test_a_second_array_in_the_file_is_refused(self, tmp_path):
        with (tmp_path / "c.npy").open("wb") as file:
            np.save(file, np.arange(4))
            np.save(file, np.arange(4))
        with pytest.raises(SourceFormatError, match="more than one array"):
            plan(tmp_path / "c.npy")

    @pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2)])
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_empty_arrays(self, tmp_path, shape, order):
        array = np.zeros(shape, np.int32, order=order)
        np.save(tmp_path / "c.npy", array)
        corpus = plan(tmp_path / "c.npy")
        assert (corpus.num_samples, samples(corpus)) == (shape[0], array.tolist())

    @pytest.mark.parametrize("dtype", ["bool", "float16", ">f8", ">u2", ">c16", "complex64", "int8"])
    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2), (2, 1, 3, 2)])
    def test_dtypes_and_orders(self, tmp_path, dtype, order, shape):
        array = np.asarray(np.arange(1, 13).reshape(shape) % 7 * (1 + 2j if "c" in dtype else 1), order=order)
        array = array.astype(dtype, order="K")
        np.save(tmp_path / "c.npy", array)
        corpus = plan(tmp_path / "c.npy")
        assert corpus.columns[0].values.shape == shape
        for window_items in (1, 5, 100):
            assert samples(corpus, window_items) == array.tolist()


class TestFortranInWindows:
    """Arrays that are too large to be read whole for each window, at a size that a test can bear."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(pieces, "FORTRAN_WHOLE_NBYTES", 64)

    @pytest.mark.parametrize("dtype", ["<i4", ">i4"])
    @pytest.mark.parametrize("window_items", [1, 7, 24, 50, 10_000])
    def test_rows_are_gathered(self, tmp_path, dtype, window_items):
        array = np.asfortranarray(np.arange(20 * 24).reshape(20, 2, 3, 4).astype(dtype))
        np.save(tmp_path / "c.npy", array)
        assert samples(plan(tmp_path / "c.npy"), window_items) == array.tolist()

    def test_too_many_columns_are_refused_with_the_remedy(self, tmp_path, monkeypatch):
        monkeypatch.setattr("shmserve.sources.npy.FORTRAN_WHOLE_NBYTES", 64)
        monkeypatch.setattr("shmserve.sources.npy.FORTRAN_MAX_COLUMNS", 23)
        np.save(tmp_path / "c.npy", np.asfortranarray(np.zeros((20, 24))))
        with pytest.raises(SourceFormatError, match=r"24 numbers in a row .*ascontiguousarray"):
            plan(tmp_path / "c.npy")
