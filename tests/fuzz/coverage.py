"""`python -m tests.fuzz.coverage TARGET SECONDS FOLDER`: a coverage-guided run, in which atheris makes up the bytes.

Prints a line of JSON in the end, see `_Session`, and exits with 0. What libFuzzer says is on stderr, the coverage among
it. Another exit code: an exception that is not allowed, an input that takes more than TIMEOUT_S, or more memory than
ROOM_NBYTES at once; stderr tells which, and the input. FOLDER is an empty directory on a tmpfs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import types
import typing
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import atheris
import numpy as np

# Not where numpy's scalars are compared: atheris never lets go of them, and no growth of ours could be told.
with atheris.instrument_imports(
    include=["shmserve", "shmserve_client"],
    exclude=[f"shmserve_client.{name}" for name in ("batches", "indices", "samples", "tensors")],
):
    from .targets import NONCE, check_messages, check_plan, check_segment, segment_file

from shmserve_client import protocol
from shmserve_client.layout import (
    DATA_ALIGNMENT,
    DESCRIPTION_OFFSET,
    HEADER,
    Array,
    Column,
    Description,
    SourceRecord,
    encode_prefix,
    place_arrays,
)

from .corpora import corpora, packed, smallest, unpacked

TIMEOUT_S = 10
ROOM_NBYTES = 512 << 20
MAX_INPUT_NBYTES = 4096
WARM_UP = 0.3
"""The part of a run after which it needs no more memory: libFuzzer keeps the inputs that it learns from."""

Check = Callable[[Path, bytes], bool]
"""Takes an input, in a folder for its files; returns whether it was accepted, and raises what must not be."""


def main(target: str, seconds: float, folder: Path) -> None:
    """Run one target; ends the process."""
    warnings.simplefilter("error")
    check, seeds = TARGETS[target]()
    (folder / "seeds").mkdir()
    (folder / "files").mkdir()
    for number, seed in enumerate(seeds):
        (folder / "seeds" / str(number)).write_bytes(seed)
    nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    options = [f"-max_len={MAX_INPUT_NBYTES}", f"-timeout={TIMEOUT_S}", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options, str(folder / "seeds")], _Session(check, folder / "files", seconds))
    atheris.Fuzz()


class _Session:
    """What is called with each input, and ends the process when the time is up."""

    def __init__(self, check: Check, folder: Path, seconds: float) -> None:
        self._check, self._folder = check, folder
        self._executions = self._accepted = self._warm_rss_nbytes = 0
        self._warm_at_s = time.monotonic() + WARM_UP * seconds
        self._end_at_s = time.monotonic() + seconds

    def __call__(self, data: bytes) -> None:
        self._accepted += self._check(self._folder, data)
        self._executions += 1
        now_s = time.monotonic()
        if not self._warm_rss_nbytes and now_s > self._warm_at_s:
            self._warm_rss_nbytes = _rss_nbytes()
        if now_s > self._end_at_s:
            report = {
                "executions": self._executions,
                "accepted": self._accepted,
                "grown_nbytes": _rss_nbytes() - self._warm_rss_nbytes,
                "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            }
            print(json.dumps(report), flush=True)  # noqa: T201  # for the test
            os._exit(0)  # libFuzzer takes SystemExit for a crash


def _rss_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _messages() -> tuple[Check, list[bytes]]:
    seeds = [protocol.encode(_example(kind), 1) for kind in typing.get_args(protocol.Message)]
    return lambda folder, frame: check_messages(frame), seeds


def _example(hint: Any) -> Any:
    """Return some value of a message's or a field's type."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return _example(of[0])
    if origin is list:
        return [_example(of[0])]
    if is_dataclass(hint):
        return hint(**{name: _example(of_field) for name, of_field in typing.get_type_hints(hint).items()})
    return {str: "a", int: 1, float: 1.5, bool: True, bytes: bytes(16)}[hint]


def _segments() -> tuple[Check, list[bytes]]:
    """Inputs are what the header is XORed with, 2 bytes of the description's size, the description, and the arrays."""

    def check(folder: Path, data: bytes) -> bool:
        patch, rest = data[: HEADER.size], data[HEADER.size + 2 :]
        end = int.from_bytes(data[HEADER.size : HEADER.size + 2], "little")
        return check_segment(folder, *segment_file(rest[:end], rest[end:], patch))

    values, offsets = np.arange(12, dtype=np.uint16), np.array([0, 0, 5, 12])
    shapes, shape_offsets = np.array([0, 5, 3, 4, 1]), np.array([0, 1, 2, 5])
    seeds = []
    for parts in ([values.reshape(3, 4)], [values, offsets], [values, offsets, shapes, shape_offsets]):
        column = Column("c", *(Array(part.dtype.name, part.shape) for part in parts))
        description, data_offset, total_nbytes = place_arrays(
            Description("d", "f", 3, (column,), SourceRecord("k", "f", (), 1))
        )
        prefix = encode_prefix(
            description, data_offset=data_offset, total_nbytes=total_nbytes, nonce=NONCE, generation=1
        )
        area = bytearray(total_nbytes - DATA_ALIGNMENT)
        for array, part in zip(description.all_arrays(), parts, strict=True):
            start = array.offset - DATA_ALIGNMENT
            area[start : start + array.nbytes] = part.tobytes()
        packed_description = prefix[DESCRIPTION_OFFSET:]
        seeds.append(bytes(HEADER.size) + len(packed_description).to_bytes(2, "little") + packed_description + area)
    return check, seeds


def _source(source: str, names: tuple[str, ...]) -> tuple[Check, list[bytes]]:
    seeds = [packed(names, each.files) for each in corpora() if (each.source, each.names) == (source, names)]
    return lambda folder, data: check_plan(folder, unpacked(names, data)), seeds


TARGETS: dict[str, Callable[[], tuple[Check, list[bytes]]]] = {
    "messages": _messages,
    "segments": _segments,
    **{f"{each.source}-{len(each.names)}": partial(_source, each.source, each.names) for each in smallest()},
}
"""What is run, by name: the sources by the number of their files."""


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
