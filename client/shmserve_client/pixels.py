"""Decodes images, by Pillow, into numpy arrays: in a worker's transform, or as they are loaded."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, SampleValueError

__all__ = ["check_size", "decode_image", "is_image", "require_pillow"]

MAX_SIZE: Final = 1 << 14
_MAGICS: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")


def check_size(size: int) -> None:
    """Raise ConfigError where images cannot be of so many pixels a side, or where Pillow is missing."""
    if not 1 <= size <= MAX_SIZE:
        raise ConfigError(f"size {size}: give a number of pixels from 1 to {MAX_SIZE}")
    require_pillow()


def require_pillow() -> None:
    """Raise ConfigError where Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"decoding images needs Pillow ({error}): pip install 'shmserve[images]'") from error


def is_image(data: bytes) -> bool:
    """Return whether a file with these bytes says that it is an image: JPEG, PNG, GIF, BMP, TIFF or WebP."""
    return data.startswith(_MAGICS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def decode_image(data: bytes, size: int | None) -> NDArray[np.uint8]:
    """Return the image as uint8 of shape (3, height, width), in RGB.

    Args:
        data: the bytes of its file.
        size: the shorter side is scaled to it, and the middle of the longer one kept: (3, size, size). None: as it is.

    Raises:
        SampleValueError: the bytes are no image that Pillow knows.
    """
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            if size is not None:
                image.draft("RGB", (size, size))  # a JPEG is decoded at a fraction of its size
            pixels = np.array(_fitted(image.convert("RGB"), size))
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise SampleValueError(f"an image of {len(data)} bytes cannot be decoded: {error}") from error
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _fitted(image: Any, size: int | None) -> Any:
    """Return the image scaled and cut to a square, where a size is wanted."""
    if size is None:
        return image
    import PIL.ImageOps

    return PIL.ImageOps.fit(image, (size, size), PIL.Image.Resampling.BILINEAR)
