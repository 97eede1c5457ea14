"""Whatever arrives at a socket is one of the messages, whole and well typed, or a ProtocolError."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve_client import protocol
from shmserve_client.protocol import decode_control, decode_reply, decode_request, encode

from .mutations import mutated
from .targets import check_messages

pytestmark = pytest.mark.promise("fuzzing")

KINDS = typing.get_args(protocol.Message)
DECODERS = {protocol.Request: decode_request, protocol.Control: decode_control, protocol.Reply: decode_reply}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as far as a message can carry them."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return st.none() | values_of(of[0])
    if origin is list:
        return st.lists(values_of(of[0]), max_size=3)
    if is_dataclass(hint):
        return st.builds(hint, **{name: values_of(of_field) for name, of_field in typing.get_type_hints(hint).items()})
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=20),
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
    }
    return simple[hint]


messages = st.sampled_from(KINDS).flatmap(values_of)
request_ids = st.integers(0, (1 << 63) - 1)
frames = st.builds(encode, messages, request_ids)

names = st.sampled_from(sorted({"v", "id", "op"} | {field.name for kind in KINDS for field in fields(kind)}))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=16)
    | st.sampled_from(sorted(protocol._OPS.values()))
)
objects = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
envelopes = st.fixed_dictionaries(
    {"v": st.just(1) | objects, "id": request_ids | objects, "op": st.sampled_from(sorted(protocol._OPS.values()))}
)


@pytest.mark.promise("F34")
@settings(deadline=None, max_examples=200)
@given(messages, request_ids)
def test_every_message_comes_back_from_its_socket_and_from_no_other(message: Any, request_id: int) -> None:
    frame = encode(message, request_id)
    assert check_messages(frame)
    for kinds, decode in DECODERS.items():
        if isinstance(message, typing.get_args(kinds)):
            assert decode(frame) == (request_id, message)
        else:
            with pytest.raises(protocol.ProtocolError):
                decode(frame)


@pytest.mark.promise("F34")
@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300) | frames.flatmap(mutated))
def test_other_bytes_are_refused_or_say_what_they_are(frame: bytes) -> None:
    check_messages(frame)


@pytest.mark.promise("F34")
@settings(deadline=None, max_examples=300)
@given(envelopes, st.dictionaries(names, objects, max_size=8), messages)
def test_any_map_is_refused_or_of_the_declared_types(
    envelope: dict[str, Any], others: dict[str, Any], message: Any
) -> None:
    whole = msgpack.unpackb(encode(message, 1))
    for fields_of_a_map in ({**envelope, **others}, {**whole, **others}, {**whole, **envelope}):
        check_messages(msgpack.packb(fields_of_a_map))
