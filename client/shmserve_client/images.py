"""Images are served as the bytes of their files; a worker decodes them, by Pillow, in a transform."""

from __future__ import annotations

from typing import Any

import torch

from .pixels import check_size, decode_image, require_pillow

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
        if size is None:
            require_pillow()  # to say now that it is missing, and not in a worker
        else:
            check_size(size)
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
        return torch.from_numpy(decode_image(value["bytes"] if isinstance(value, dict) else value, self.size))
