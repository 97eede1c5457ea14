"""How valid bytes are damaged: a bit, a number, a piece too few or too many, or two pieces in each other's place."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

NUMBERS = (0, 1, -1, 2, 255, *(1 << bits for bits in (15, 31, 32, 40, 59, 60, 62)), (1 << 31) - 1, (1 << 63) - 1)
"""What sizes, counts and pointers must not be believed to be; -1 is the largest of them without a sign."""
LAST = (1 << 63) - 1


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Damage `data`, in one place or in a few."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, min(64, len(data) - at)))
        match draw(st.sampled_from(["flip", "number", "add", "cut", "drop", "insert", "move", "replace"])):
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
            case "number":
                data = overwritten(data, at, draw(st.sampled_from(NUMBERS)), draw(st.sampled_from([1, 2, 4, 8])))
            case "add" if end - at >= 8:  # a number that is off by a little
                (number,) = struct.unpack_from("<q", data, at)
                off = (number + draw(st.integers(-9, 9)) + LAST + 1) % (2 * LAST + 2) - LAST - 1
                data = data[:at] + struct.pack("<q", off) + data[at + 8 :]
            case "cut":
                data = data[:at]
            case "drop":
                data = data[:at] + data[end:]
            case "insert":
                data = data[:at] + draw(st.binary(max_size=16)) + data[at:]
            case "move":
                to = draw(st.integers(0, len(data)))
                data = data[:to] + data[at:end] + data[to:]
            case "replace":
                data = data[:at] + draw(st.binary(min_size=end - at, max_size=end - at)) + data[end:]
    return data


def overwritten(data: bytes, at: int, number: int, nbytes: int) -> bytes:
    """Return `data` with `number`, as far as it fits, in the place of the `nbytes` bytes at `at`."""
    return data[:at] + (number % (1 << 8 * nbytes)).to_bytes(nbytes, "little") + data[at + nbytes :]
