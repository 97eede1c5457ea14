"""Small corpora for the tests of the daemon."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

MEGATRON = Path(__file__).parent / "fixtures" / "written-megatron-core"
RAGGED = MEGATRON / "ragged_uint16.bin"
RAGGED_SAMPLES: list[list[int]] = json.loads((MEGATRON / "expected.json").read_text())["datasets"]["ragged_uint16"][
    "samples"
]


def write_tokens(path: Path, count: int = 1000, *, first: int = 0) -> Path:
    """A headerless file of uint16 token ids."""
    (np.arange(first, first + count) % 65_536).astype(np.uint16).tofile(path)
    return path


def write_sparse(path: Path, nbytes: int) -> Path:
    """A headerless file of zeros that takes a while to load and no room on the disk."""
    with open(path, "wb") as file:
        file.truncate(nbytes)
    return path
