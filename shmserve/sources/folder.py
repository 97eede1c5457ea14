"""Folders of files: images by class, as torchvision's ImageFolder has them, and any other files below a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np

from shmserve_client.chunks import Chunk, blobs, rows, texts
from shmserve_client.errors import ObjectError, SourceFormatError

from .base import DecodedSource, SourceOptions
from .files import size_of
from .refused import is_refused_by_name
from .remote import RemotePath

__all__ = ["Folder"]

CHUNK_NBYTES: Final = 8 << 20
PART_NBYTES: Final = 64 << 20
IMAGES: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's IMG_EXTENSIONS."""


@dataclass(frozen=True)
class Folder(DecodedSource):
    """The files below a directory, in the order of their paths; hidden ones are none of them."""

    suffixes: ClassVar[tuple[str, ...]] = ()

    values: Path
    """The first file."""
    directory: Path
    paths: tuple[str, ...]
    """Below the directory."""
    classes: tuple[str, ...] | None
    """The names of the subdirectories, each a class of images; None where they are not."""

    @property
    def format(self) -> str:
        """Whether it holds classes of images."""
        return "files" if self.classes is None else "imagefolder"

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return tuple(self.directory / path for path in self.paths)

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return None: a file by itself is no folder."""
        return None

    @classmethod
    def below(cls, directory: Path) -> Self | None:
        """Return the folder if there are files in it: images, each in a subdirectory that is its class, or others.

        None also where one is of a format of its own, whose bytes are not meant to be samples.
        """
        found = directory.files_below() if isinstance(directory, RemotePath) else sorted(_walk(directory, ""))
        if not found:
            return None
        images = [path for path in found if path.lower().endswith(IMAGES)]
        classes = tuple(sorted({path.partition("/")[0] for path in images}))
        if images and all("/" in path for path in images):
            return cls(directory / images[0], directory, tuple(images), classes)
        if any(is_refused_by_name(Path(path)) for path in found):
            return None
        return cls(directory / found[0], directory, tuple(found), None)

    def parts(self) -> list[Any]:
        """Return half-open ranges of files."""
        found: list[Any] = []
        start = nbytes = 0
        for index, path in enumerate(self.paths):
            nbytes += size_of(self.directory / path)
            if nbytes >= PART_NBYTES:
                found.append([start, index + 1])
                start, nbytes = index + 1, 0
        return found if start == len(self.paths) else [*found, [start, len(self.paths)]]

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield the files in the range."""
        paths: list[str] = []
        contents: list[bytes] = []
        nbytes = 0
        folder = os.fspath(self.directory)
        for path in self.paths[slice(*part)]:
            paths.append(path)
            with open(f"{folder}/{path}", "rb", buffering=0) as file:
                contents.append(file.read())
            nbytes += len(contents[-1])
            if nbytes >= CHUNK_NBYTES:
                yield self._chunks(paths, contents)
                paths, contents, nbytes = [], [], 0
        if paths:
            yield self._chunks(paths, contents)

    def _chunks(self, paths: list[str], contents: list[bytes]) -> dict[str, Chunk]:
        try:
            names = texts(paths)
        except ObjectError as error:
            raise SourceFormatError(f"{self.directory}: a file's name is not UTF-8: rename it ({error})") from error
        if self.classes is None:
            return {"data": blobs(contents), "path": names}
        labels = {name: number for number, name in enumerate(self.classes)}
        of = [path.partition("/")[0] for path in paths]
        return {
            "image": blobs(contents),
            "label": rows(np.array([labels[name] for name in of], np.int64)),
            "class": texts(of),
            "path": names,
        }


def _walk(directory: Path, prefix: str) -> Iterator[str]:
    """Yield the paths of the files below; links to directories, which may lead around in circles, are not followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(directory / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield f"{prefix}{entry.name}"
