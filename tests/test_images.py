"""Images: served as bytes, decoded in workers; and examples/train_images.py, whose loss falls."""

from __future__ import annotations

import io
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shmserve_client.errors import ConfigError, SampleValueError
from tests.processes import Child

image = pytest.importorskip("PIL.Image")

from shmserve_client.images import DecodeImage  # noqa: E402

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_images.py"


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.fromarray(pixels).save(file, kind)
    return file.getvalue()


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


@pytest.mark.parametrize(
    "row",
    [encoded(PIXELS), {"image": encoded(PIXELS), "label": 3}, {"image": {"bytes": encoded(PIXELS), "path": None}}],
)
def test_an_image_becomes_a_tensor(row: object) -> None:
    found = DecodeImage()(row)
    tensor = found["image"] if isinstance(found, dict) else found
    assert torch.equal(tensor, torch.from_numpy(PIXELS).permute(2, 0, 1))
    assert tensor.is_contiguous()
    if isinstance(row, dict):
        assert {**found, "image": None} == {**row, "image": None}


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (40, 20, 3), (9, 9), (8, 8, 3)])
def test_with_a_size_all_have_one_shape(shape: tuple[int, ...], kind: str) -> None:
    decode = pickle.loads(pickle.dumps(DecodeImage(8)))
    found = decode(encoded(np.full(shape, 77, np.uint8), kind))
    assert found.shape == (3, 8, 8)
    assert found.dtype is torch.uint8
    assert (found.int() - 77).abs().max() <= 2  # of JPEG


@pytest.mark.parametrize("data", [b"", b"no image", encoded(PIXELS)[:60]])
def test_what_is_no_image_is_an_error(data: bytes) -> None:
    with pytest.raises(SampleValueError, match=f"an image of {len(data)} bytes cannot be decoded"):
        DecodeImage()(data)


@pytest.mark.parametrize("size", [0, -1, 1 << 20])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"size {size}"):
        DecodeImage(size)


def test_the_example_learns(tmp_path: Path, stop_embedded: None) -> None:
    choose = np.random.default_rng(1)
    for label, colour in enumerate(("red", "green")):
        folder = tmp_path / "photos" / colour
        folder.mkdir(parents=True)
        for number in range(48):
            pixels = choose.integers(0, 128, (24, 32, 3), np.uint8)
            pixels[..., label] += 96
            (folder / f"{number}.jpg").write_bytes(encoded(pixels, "JPEG"))
    argv = [sys.executable, EXAMPLE, tmp_path / "photos", "--size", 16, "--epochs", 4, "--workers", 4]
    with Child(argv, folder=tmp_path, env={"OMP_NUM_THREADS": "1"}) as training:
        assert training.wait(90) == 0, training.describe()
        losses = [float(loss) for loss in re.findall(r"^epoch \d+  loss ([\d.]+)$", training.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
