"""The messages as bytes: each comes back as it went, and nothing else is let in."""

from __future__ import annotations

import os
import pickle
import random
import re
import tracemalloc
import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from shmserve_client import errors, protocol
from shmserve_client.errors import ERROR_CLASSES, ProtocolError, ShmserveError
from shmserve_client.protocol import (
    MAX_INDICES,
    MAX_REPLY_NBYTES,
    MAX_REQUEST_NBYTES,
    Accepted,
    Attach,
    Attached,
    Datasets,
    DatasetStatus,
    Failure,
    Hello,
    List,
    Load,
    Lookup,
    Offsets,
    Reload,
    RetiredSegment,
    Status,
    StatusReport,
    Stop,
    Stopping,
    Unload,
    Welcome,
    decode_control,
    decode_reply,
    decode_request,
    encode,
    error_from,
    failure_from,
    request_id_of,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"

DATASET = DatasetStatus(
    name="корпус",
    state="ready",
    format="megatron",
    data=["/a.bin", "/b.bin"],
    num_samples=3,
    stream=False,
    segment_nbytes=1 << 40,
    loaded_nbytes=1 << 40,
    huge_nbytes=0,
    path="/dev/shm/x",
    generation=1,
    adopted=True,
    load_seconds=0.5,
    source_changed=False,
    attached_pids=[1, 2],
    attached_elsewhere=1,
    block_size=0,
    stride=0,
    notes=["a note"],
    error="",
    reload_state="loading",
    reload_loaded_nbytes=1 << 20,
    reload_nbytes=1 << 41,
    reload_error="",
)
RETIRED = RetiredSegment("корпус", 1, "/dev/shm/w", 1 << 40, [3], 0)
REQUESTS: list[Any] = [
    Hello("0.1.0"),
    List(),
    Attach(),
    Attach(name="a"),
    Attach(source_key="0" * 64),
    Lookup("a", b"\0" * 8),
    Lookup("a", b"\0" * (8 * MAX_INDICES), "tokens", 1025, 1024, b"n" * 16),
    Status(),
    Status("a"),
]
CONTROLS: list[Any] = [
    Load("a", ["/a.bin"] * 100),
    Load("a", ["/a.bin"], "uint16", 50257, ["tokens", "label"], 1025, 1024),
    Reload("a"),
    Unload("a"),
    Stop(),
]
REPLIES: list[Any] = [
    Welcome("0.1.0", 1, 0),
    Datasets([]),
    Datasets(["a", "b"]),
    Attached("a", "/dev/shm/x", b"n" * 16, 1025, 1024),
    Offsets(b"\0" * 8, b"\1" * 8),
    StatusReport("0.1.0", 1, "/run/x.sock", "tcp://[::1]:5", "/dev/shm", 1.5, 1 << 20, [DATASET, DATASET], [RETIRED]),
    StatusReport("0.1.0", 1, "/run/x.sock", "tcp://[::1]:5", "/dev/shm", 1.5, 1 << 20, []),
    Accepted("a", 2),
    Stopping(1),
    Failure("failed", "why"),
]


@pytest.mark.parametrize("request_id", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_come_back(message: Any, request_id: int) -> None:
    frame = encode(message, request_id)
    assert decode_request(frame) == (request_id, message)
    assert request_id_of(frame) == request_id


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_come_back(message: Any) -> None:
    assert decode_reply(encode(message, 7)) == (7, message)


@pytest.mark.promise("F34")
@pytest.mark.parametrize("message", CONTROLS, ids=lambda message: type(message).__name__)
def test_the_owners_requests_are_of_the_owners_socket_alone(message: Any) -> None:
    assert decode_control(encode(message, 1)) == (1, message)
    op = type(message).__name__.lower()
    short = replace(message, data=["/a.bin"]) if isinstance(message, Load) else message
    with pytest.raises(ProtocolError, match=f"the op '{op}': this socket takes attach, hello, list, lookup, status"):
        decode_request(encode(short, 1))


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_the_clients_requests_are_of_the_clients_socket_alone(message: Any) -> None:
    with pytest.raises(ProtocolError, match="this socket takes load, reload, stop, unload"):
        decode_control(encode(message, 1))


def test_every_message_is_tested_above() -> None:
    kinds = {type(message) for message in (*REQUESTS, *CONTROLS, *REPLIES)}
    assert kinds == set(typing.get_args(protocol.Message))


def envelope(**changes: Any) -> bytes:
    whole = {"v": 1, "id": 1, "op": "lookup", "name": "a", "indices": b"", "column": None}
    whole |= {"block_size": 0, "stride": 0, "nonce": b""} | changes
    frame: bytes = msgpack.packb({key: value for key, value in whole.items() if value is not ...})
    return frame


def test_the_frame_that_the_refusals_below_are_made_from_is_accepted() -> None:
    assert decode_request(envelope()) == (1, Lookup("a", b""))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": 2}, "protocol version 2, this side speaks version 1"),
        ({"v": ...}, "protocol version None"),
        ({"v": True}, "protocol version True"),
        ({"v": 1.0}, "protocol version 1.0"),
        ({"id": -1}, "id -1"),
        ({"id": 2**63}, "id 9223372036854775808"),
        ({"id": "1"}, "id '1'"),
        ({"id": ...}, "id None"),
        ({"op": "load"}, "the op 'load'"),
        ({"op": ...}, "the op None"),
        ({"op": ["lookup"]}, "the op"),
        ({"op": "offsets"}, "the op 'offsets'"),  # a reply is no request
        ({"op": "x\n\x1b[2J" + "y" * 1000}, r"the op 'x\\n\\x1b\[2Jy+': this socket takes"),
        ({"v": {}}, "protocol version a dict"),
        ({"extra": 1}, "unknown fields: 'extra'"),
        ({"e" * 5000: 1}, "unknown fields: 'e{128}'$"),
        ({"name": ...}, "unknown fields: 'name'"),
        ({"name": b"a"}, "name is a bytes"),
        ({"name": None}, "name is a NoneType"),
        ({"indices": "text"}, "indices is a str"),
        ({"indices": [1, 2]}, "indices is a list"),
        ({"indices": [1] * 17}, "exceeds max_array_len"),
        ({"column": [[]] * 16}, "more than 16 arrays and maps"),
        ({"block_size": True}, "block_size is a bool"),
        ({"block_size": 1.0}, "block_size is a float"),
        ({"column": 3}, "column is a int"),
        ({"nonce": None}, "nonce is a NoneType"),
    ],
)
def test_fields_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_request(envelope(**changes))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        msgpack.packb({"v": 1, "id": 1, "op": "hello", "client_version": "", b"x": 1, "y": 1}),
        msgpack.packb({"v": 1, "id": 1, "op": "hello", "client_version": {b"x": 1}}),
        msgpack.packb({"v": msgpack.ExtType(1, b"x")}),
        msgpack.packb({"v": msgpack.Timestamp(1)}),
        encode(Hello("x"), 1) + b"\0",
        encode(Hello("x"), 1)[:-1],
        b"\x91" * 5000,  # nested far beyond what Python's stack holds
        b"\xdf\xff\xff\xff\xff",  # a map of four billion entries
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1v\xd9\x02\xff\xfe",  # not UTF-8
    ],
)
def test_frames_that_are_not_messages(frame: bytes) -> None:
    for decode in (decode_request, decode_control, decode_reply):
        with pytest.raises(ProtocolError):
            decode(frame)
    assert request_id_of(frame) == 0


def test_nothing_larger_than_the_limits_is_read() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_REQUEST_NBYTES + 1} bytes is over the limit"):
        decode_request(b"\0" * (MAX_REQUEST_NBYTES + 1))
    with pytest.raises(ProtocolError, match="over the limit"):
        decode_reply(b"\0" * (MAX_REPLY_NBYTES + 1))


def test_a_reply_costs_no_more_memory_than_its_bytes_deserve() -> None:
    # An empty map is a byte here, and 64 in Python.
    frame = b"\x81\xa1v\x9f" + b"\xdc\xff\xff" + b"\x80" * (MAX_REPLY_NBYTES - 7)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="message is not msgpack"):
            decode_reply(frame)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "message",
    [Attached("a", "/dev/shm/x", b"n" * 16, 1 << 70, 0), Datasets(["x" * MAX_REPLY_NBYTES])],
    ids=["a number of 71 bits", "too much"],
)
def test_what_does_not_fit_into_a_frame_is_refused(message: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(message, 1)


def test_a_name_that_is_not_unicode_arrives_escaped() -> None:
    name = os.fsdecode(b"/data/\xff.bin")
    _, reply = decode_reply(encode(replace(REPLIES[5], datasets=[replace(DATASET, data=[name])]), 1))
    assert reply.datasets[0].data == ["/data/\\udcff.bin"]


def test_random_and_damaged_frames_raise_nothing_else() -> None:
    rng = random.Random(0)
    frames = [encode(message, 1) for message in REQUESTS if not isinstance(message, Lookup)]
    for _ in range(3000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        for candidate in (bytes(frame), rng.randbytes(rng.randrange(64))):
            try:
                decode_request(candidate)
            except ProtocolError:
                continue


def test_the_map_of_codes_is_complete() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ShmserveError)]
    assert sorted(ERROR_CLASSES.values(), key=repr) == sorted(classes, key=repr)
    assert len({kind.code for kind in classes}) == len(classes)
    assert set(errors.__all__) == {kind.__name__ for kind in classes} | {"ERROR_CLASSES", "printable"}


@pytest.mark.parametrize("kind", ERROR_CLASSES.values(), ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_what_it_was(kind: type[ShmserveError]) -> None:
    _, reply = decode_reply(encode(failure_from(kind("what, the values, the remedy")), 1))
    assert isinstance(reply, Failure)
    error = error_from(reply)
    assert type(error) is kind
    assert str(error) == "what, the values, the remedy"


@pytest.mark.parametrize("kind", ERROR_CLASSES.values(), ids=lambda kind: kind.__name__)
def test_an_error_is_one_line_of_printable_text(kind: type[ShmserveError]) -> None:
    error = kind("no file 'd/a\nb\x1b[2J\udcff\u2028é'")
    assert str(error) == r"no file 'd/a\nb\x1b[2J\udcff\u2028é'"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_message_from_the_wire_is_as_short_as_it_is_printable() -> None:
    assert len(failure_from(ShmserveError("x" * 100_000)).message) == 4000
    assert str(error_from(Failure("failed", "a\nb" + "x" * 100_000))).startswith(r"a\nbxxx")
    assert len(str(error_from(Failure("failed", "\n" * 100_000)))) <= 8000


def test_a_code_of_a_newer_daemon_is_still_one_of_our_errors() -> None:
    error = error_from(Failure("from-the-future", "why"))
    assert type(error) is ShmserveError
    assert str(error) == "why"


def documented_frames() -> list[tuple[str, bytes]]:
    """Each example of the document: the expression, and the bytes that it says are its frame."""
    blocks = re.findall(r"```python\n(.*?)\n```\n+```hex\n(.*?)\n```", DOCUMENT.read_text(), flags=re.DOTALL)
    return [(source, bytes.fromhex(dump)) for source, dump in blocks]


@pytest.mark.parametrize(("source", "frame"), documented_frames())
def test_the_documents_bytes_are_those_that_are_sent(source: str, frame: bytes) -> None:
    assert eval(source, vars(protocol)) == frame


def test_the_document_shows_a_request_and_a_reply() -> None:
    assert len(documented_frames()) >= 2


def test_the_document_names_every_message_field_code_and_limit() -> None:
    text = DOCUMENT.read_text()
    for kind in (*typing.get_args(protocol.Message), DatasetStatus, RetiredSegment):
        for field in fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name} is not documented"
    for op in protocol._OPS.values():
        assert f"`{op}`" in text, f"the op {op} is not documented"
    for code in ERROR_CLASSES:
        assert f"`{code}`" in text, f"the error code {code} is not documented"
    for number in (MAX_INDICES, MAX_REQUEST_NBYTES, MAX_REPLY_NBYTES):
        assert f"{number:,}" in text, f"the limit {number:,} is not documented"
