"""`--decode`: columns of images become pixels while they are loaded, for those who have the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from shmserve_client.chunks import Chunk, rows
from shmserve_client.errors import SampleValueError, SourceFormatError
from shmserve_client.pixels import check_size, decode_image, is_image

__all__ = ["decoded_images"]

CHUNK_NBYTES: Final = 8 << 20


def decoded_images(chunks: Mapping[str, Chunk], size: int, where: str) -> Iterator[dict[str, Chunk]]:
    """Yield the rows, some after others, each image as uint8 pixels of shape (3, size, size).

    A column is of images if its first sample is one: bytes, or a dict with `bytes`, as `datasets` stores them.

    Raises:
        ConfigError: the size is none, or Pillow is missing.
        SourceFormatError: a later sample of such a column is none that can be decoded.
    """
    check_size(size)
    count = next(iter(chunks.values())).count
    images = [name for name, chunk in chunks.items() if _holds_images(chunk)]
    step = max(1, CHUNK_NBYTES // (3 * size * size)) if images else max(1, count)
    for start in range(0, max(1, count), step):
        part = {name: chunk.part(start, min(count, start + step)) for name, chunk in chunks.items()}
        for name in images:
            part[name] = _pixels(part[name], size, f"{where}: column {name!r}", start)
        yield part


def _holds_images(chunk: Chunk) -> bool:
    if chunk.kind not in ("bytes", "object") or not chunk.count:
        return False
    return is_image(_data(next(chunk.part(0, 1).samples())))


def _data(sample: Any) -> bytes:
    found = sample.get("bytes") if type(sample) is dict else sample
    return found if type(found) is bytes else b""


def _pixels(chunk: Chunk, size: int, where: str, first: int) -> Chunk:
    pixels = np.empty((chunk.count, 3, size, size), np.uint8)
    for index, sample in enumerate(chunk.samples()):
        try:
            pixels[index] = decode_image(_data(sample), size)
        except SampleValueError as error:
            raise SourceFormatError(
                f"{where}: sample {first + index} of a part: {error}: remove it, or load without --decode"
            ) from error
    return rows(pixels)
