"""Images are served as the bytes of their files; a worker decodes them, by Pillow, in a transform."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from .errors import ConfigError, SampleValueError

__all__ = ["DecodeImage"]


class DecodeImage:
    """A transform that decodes the image of a row: uint8, 3 x height x width, in RGB, as torchvision has them.

    `ShmDataset("photos", transform=DecodeImage(224))`; for further steps, call it from a transform of your own.
    """

    def __init__(self, size: int | None = None, *, column: str = "image") -> None:
        """Set up.

        Args:
            size: the shorter side is scaled to it, and the middle of the longer one kept, so that all images have the
                shape 3 x size x size. None leaves each in its own.
            column: of a row that is a dict, which value is the image: bytes, or a dict with `bytes`, as `datasets`
                stores images.

        Raises:
            ConfigError: the size is none, or Pillow is missing.
        """
        if size is not None and not 1 <= size <= 1 << 14:
            raise ConfigError(f"size {size}: give a number of pixels up to {1 << 14}, or None")
        try:
            import PIL.Image  # noqa: F401  # to say now that it is missing, and not in a worker
        except ImportError as error:
            raise ConfigError(f"decoding images needs Pillow ({error}): pip install 'shmserve[images]'") from error
        self.size = size
        self.column = column

    def __call__(self, row: Any) -> Any:
        """Return the row with its image as a tensor; all else is as it was.

        Raises:
            SampleValueError: the bytes are no image that Pillow knows.
        """
        if isinstance(row, dict) and self.column in row:
            return {**row, self.column: self._decode(row[self.column])}
        return self._decode(row)

    def _decode(self, value: Any) -> torch.Tensor:
        import PIL.Image

        data = value["bytes"] if isinstance(value, dict) else value
        try:
            with PIL.Image.open(io.BytesIO(data)) as image:
                if self.size is not None:
                    image.draft("RGB", (self.size, self.size))  # a JPEG is decoded at a fraction of its size
                return torch.from_numpy(np.array(self._fitted(image.convert("RGB")))).permute(2, 0, 1).contiguous()
        except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise SampleValueError(f"an image of {len(data)} bytes cannot be decoded: {error}") from error

    def _fitted(self, image: Any) -> Any:
        """Return the image scaled and cut to a square, where a size is wanted."""
        if self.size is None:
            return image
        import PIL.ImageOps

        return PIL.ImageOps.fit(image, (self.size, self.size), PIL.Image.Resampling.BILINEAR)
