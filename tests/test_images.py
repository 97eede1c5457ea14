"""Images: served as bytes, decoded in workers; and examples/train_images.py, whose loss falls."""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shmserve.sources import images
from shmserve_client import ShmDataset
from shmserve_client.chunks import blobs, texts
from shmserve_client.errors import ConfigError, SampleValueError
from tests.processes import Child, Daemon, run_cli

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


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve images of several sizes, of two classes."""
    for number in range(12):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), np.uint8)
        (folder / f"{number}.{'jpg' if number % 3 else 'png'}").write_bytes(
            encoded(pixels, "JPEG" if number % 3 else "PNG")
        )
    return tmp_path / "photos"


def test_a_decoded_dataset_has_what_the_transform_would_make(photos: Path, serve: Callable[..., Daemon]) -> None:
    serve("--data", f"bytes={photos}")
    assert run_cli("load", f"pixels={photos}", "--decode", "16").returncode == 0
    transformed = ShmDataset("bytes", transform=DecodeImage(16))
    decoded = ShmDataset("pixels")
    assert decoded.info.dtypes["image"] == "uint8"
    column = decoded.column("image")
    assert isinstance(column, np.ndarray)
    assert column.shape == (12, 3, 16, 16)
    for mine, theirs in zip(decoded, transformed, strict=True):
        assert torch.equal(mine.pop("image"), theirs.pop("image"))
        assert mine == theirs
    assert run_cli("verify", "pixels", "--against-source").returncode == 0


def test_images_are_decoded_in_parts_of_bounded_memory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CHUNK_NBYTES", 3 * 3 * 8 * 8)
    data = [path.read_bytes() for path in sorted(photos.rglob("*.*"))]
    parts = list(images.decoded_images({"image": blobs(data), "path": texts("abcdefghijkl")}, 8, "here"))
    assert [part["image"].values.shape for part in parts] == [(3, 3, 8, 8)] * 4
    assert [text for part in parts for text in part["path"].samples()] == list("abcdefghijkl")
    wanted = [DecodeImage(8)(each).numpy() for each in data]
    np.testing.assert_array_equal(np.concatenate([part["image"].values for part in parts]), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda photos: (photos / "cat" / "1.jpg").write_bytes(b"\xff\xd8\xffno"),
            "sample 0 of a part: an image of 5 b",
        ),
        (lambda photos: (photos / "dog" / "8.jpg").write_bytes(b"text"), "an image of 4 bytes cannot be decoded"),
    ],
)
def test_an_image_that_is_damaged_is_named(
    photos: Path, change: Callable[[Path], object], message: str, shm_dir: Path, runtime_dir: Path
) -> None:
    change(photos)
    refusal = run_cli("start", "--shm-dir", shm_dir, "--data", photos, "--decode", "16")
    assert refusal.returncode == 3
    assert message in refusal.stderr
    assert "column 'image'" in refusal.stderr


def test_what_is_not_of_images_is_not_decoded(tmp_path: Path, shm_dir: Path, runtime_dir: Path) -> None:
    (tmp_path / "lines.txt").write_text("a\nb\n")
    np.arange(9).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    for name, message in (("lines.txt", "no column holds images"), ("tokens.bin", "--decode 16 is for images")):
        refusal = run_cli("start", "--shm-dir", shm_dir, "--data", tmp_path / name, "--decode", "16")
        assert refusal.returncode == 3, refusal.stderr
        assert message in refusal.stderr
