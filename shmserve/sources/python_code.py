"""Datasets that Python code makes: `package.module:name`, a function that returns one, or a dataset itself.

The code runs in a helper process, with the directory in which `shmserve` was called first in its path. It is iterated
once. Dicts are rows of a table, all else the values of one column.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from shmserve_client.chunks import Chunk, encode
from shmserve_client.errors import ConfigError, ObjectError, SourceFormatError, SourceNotFoundError
from shmserve_client.rows import VALUE, batched

from .base import DecodedSource, SourceOptions, chosen

__all__ = ["PythonCode"]

_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class PythonCode(DecodedSource):
    """What one name of a module stands for."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    format = "python"
    columns_vary = True

    values: Path
    """The module's file: what the code reads is its own affair, and no change of that is noticed."""
    directory: Path
    module: str
    name: str

    @classmethod
    def recognise(cls, path: Path, head: bytes, options: SourceOptions) -> Self | None:
        """Return None: no file is meant."""
        return None

    @classmethod
    def named(cls, path: Path) -> Self | None:
        """Return what `directory/package.module:name` means, or None if it is no such name.

        Raises:
            SourceNotFoundError: there is no such module. Nothing is imported to find that out.
        """
        if not _NAME.fullmatch(path.name):
            return None
        module, _, name = path.name.partition(":")
        below = Path(*module.split("."))
        for root in (path.parent, *map(Path, sys.path)):
            for file in (root / below.with_suffix(".py"), root / below / "__init__.py"):
                if file.is_file():
                    return cls(file.absolute(), path.parent, module, name)
        raise SourceNotFoundError(f"{path.name}: no module {module} in {path.parent}, nor where Python finds modules")

    def decode(self, part: Any, columns: tuple[str, ...] | None) -> Iterator[dict[str, Chunk]]:
        """Yield what the code makes."""
        where = f"{self.module}:{self.name}"
        sys.path.insert(0, os.fspath(self.directory))
        try:
            made = getattr(importlib.import_module(self.module), self.name)
        except AttributeError:
            raise ConfigError(f"{where}: the module has no {self.name}") from None
        except ImportError as error:
            raise ConfigError(f"{where}: it cannot be imported: {error}") from error
        made = made() if callable(made) else made
        first = 0
        taken_nbytes: list[int] = []
        try:
            for values in batched(made, taken_nbytes):
                found = self._chunks(values, first, columns)
                first += len(values)
                taken_nbytes += [chunk.nbytes for chunk in found.values()]
                yield found
        except ObjectError as error:
            raise SourceFormatError(f"{where}: {error}") from error

    def _chunks(self, values: list[Any], first: int, columns: tuple[str, ...] | None) -> dict[str, Chunk]:
        if all(type(value) is dict and all(type(key) is str for key in value) and value for value in values):
            names = chosen(dict.fromkeys(key for value in values for key in value), columns)
            return {name: encode([value.get(name) for value in values], name, first) for name in names}
        return {VALUE: encode(values, "", first)}
