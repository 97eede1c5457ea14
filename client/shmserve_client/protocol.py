"""The messages between a client and its daemon, as bytes. `docs/protocol.md` is the same in prose, and normative.

One message is one ZeroMQ frame: a msgpack map with `v` (protocol version), `id` (the request's number, echoed by the
reply), `op` (which record follows) and that record's fields. Decoding is strict: an unknown op, an unknown, missing or
wrongly typed field, and anything larger than the limits is a ProtocolError. Nothing is ever unpickled.
"""

from __future__ import annotations

import typing
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

import msgpack

from .errors import ERROR_CLASSES, ProtocolError, ShmserveError
from .records import MAX_ITEMS, shown, typed, unpack

__all__ = [
    "MAX_INDICES",
    "MAX_REPLY_NBYTES",
    "MAX_REQUEST_NBYTES",
    "PROTOCOL_VERSION",
    "Accepted",
    "Attach",
    "Attached",
    "Control",
    "DatasetStatus",
    "Datasets",
    "Failure",
    "Hello",
    "List",
    "Load",
    "Lookup",
    "Offsets",
    "Reload",
    "Reply",
    "Request",
    "RetiredSegment",
    "Status",
    "StatusReport",
    "Stop",
    "Stopping",
    "Unload",
    "Welcome",
    "decode_control",
    "decode_reply",
    "decode_request",
    "encode",
    "error_from",
    "failure_from",
    "request_id_of",
]

PROTOCOL_VERSION: Final = 1
MAX_INDICES: Final = 65_536
"""The most indices in one lookup; a client splits a longer batch."""
MAX_REQUEST_NBYTES: Final = MAX_INDICES * 8 + 4096
MAX_REPLY_NBYTES: Final = 16 << 20
_MAX_REQUEST_ITEMS: Final = 16
_MAX_FAILURE_LENGTH: Final = 4000


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is there? Answered by Welcome."""

    client_version: str


@dataclass(frozen=True, slots=True)
class List:
    """The names served. Answered by Datasets."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Where is the segment of `name`, or of `source_key`, or (both None) of the only dataset? Answered by Attached.

    `source_key` is the hash of a source's files as they are now (`shmserve.sources.Resolved.key`), so files that were
    changed since they were loaded have another one. With it, `vocab_size` is what the dataset must have been checked
    against; None for a dataset that was checked against any, or none.
    """

    name: str | None = None
    source_key: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where are these samples? Answered by Offsets.

    `indices` is int64, little-endian, each in [0, n). `block_size` and `stride` are in items, 0 for stored samples.
    `nonce` is the segment that the client reads (empty: whichever is served); another one served is an error.
    """

    name: str
    indices: bytes
    column: str | None = None
    block_size: int = 0
    stride: int = 0
    nonce: bytes = b""


@dataclass(frozen=True, slots=True)
class Status:
    """How is `name`, or everything? Answered by StatusReport."""

    name: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Owner only: remove the segments and exit. Answered by Stopping."""


@dataclass(frozen=True, slots=True)
class Load:
    """Owner only: load one more dataset. Answered by Accepted; Status says how it goes.

    `data` are absolute paths, as `start --data` takes them; the other fields are its options, None where not given.
    """

    name: str
    data: list[str]
    dtype: str | None = None
    vocab_size: int | None = None
    columns: list[str] | None = None
    block_size: int | None = None
    stride: int | None = None
    mode: str = "load"
    warm: bool = False
    decode: int | None = None


@dataclass(frozen=True, slots=True)
class Reload:
    """Owner only: read the dataset's files again, for a new generation. Answered by Accepted; Status says how it goes.

    Until it is served, and if it fails, nothing changes for anybody.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Owner only: serve the dataset no longer; if it is loading, give up. Answered by Accepted, when it is done."""

    name: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon behind the socket."""

    daemon_version: str
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class Datasets:
    """The names served, loading ones included, in the order they were given."""

    names: list[str]


@dataclass(frozen=True, slots=True)
class Attached:
    """One segment to map: its path, and the nonce that its header must hold. block_size 0 means no default."""

    name: str
    path: str
    nonce: bytes
    block_size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Offsets:
    """For each index of the Lookup: bytes from the segment's start, and bytes; int64, little-endian."""

    offsets: bytes
    nbytes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatus:
    """One dataset as the daemon sees it; the sizes are in bytes. The defaults are for what is not known yet."""

    name: str
    state: str = "loading"
    """"loading", "ready" or "failed"."""
    format: str = ""
    data: list[str]
    num_samples: int = 0
    stream: bool = False
    """Whether it is a flat token file: `num_samples` then counts tokens, and a client must give a block_size."""
    segment_nbytes: int = 0
    """The memory that the segment takes; while it loads, what its arrays need, or 0 until that is known."""
    loaded_nbytes: int = 0
    huge_nbytes: int = 0
    """Of the segment, how many bytes lie on huge pages."""
    path: str = ""
    generation: int = 0
    adopted: bool = False
    load_seconds: float = 0.0
    source_changed: bool = False
    """Whether the files differed from what was loaded when the daemon last looked, a while ago, a second at least."""
    attached_pids: list[int] = field(default_factory=list)
    """Processes of the daemon's pid namespace that have the segment mapped."""
    attached_elsewhere: int = 0
    """How many processes of other pid namespaces have it mapped."""
    block_size: int
    stride: int
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """Why it failed, else empty."""
    reload_state: str = ""
    """"loading" or "failed" while, or since, the next generation did so; else empty."""
    reload_loaded_nbytes: int = 0
    reload_nbytes: int = 0
    """What the next generation needs; 0 until that is known."""
    reload_error: str = ""


@dataclass(frozen=True, slots=True)
class RetiredSegment:
    """A former generation, or what was unloaded: nobody is sent there, but processes still read it."""

    name: str
    generation: int
    path: str
    segment_nbytes: int
    attached_pids: list[int]
    attached_elsewhere: int


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The daemon and its datasets.

    `tcp_endpoint` is empty where clients are answered at `endpoint` alone. `private_nbytes` is the daemon's own memory,
    the segments not counted.
    """

    daemon_version: str
    pid: int
    endpoint: str
    tcp_endpoint: str
    shm_dir: str
    uptime_seconds: float
    private_nbytes: int
    datasets: list[DatasetStatus]
    retired: list[RetiredSegment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Accepted:
    """It has begun; it is done when `name` is served in this generation, or, for Unload, already."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """The daemon is on its way out."""

    pid: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to any request that failed: a code of `errors.ERROR_CLASSES` and the message."""

    code: str
    message: str


Request: TypeAlias = Hello | List | Attach | Lookup | Status
Control: TypeAlias = Load | Reload | Unload | Stop
Reply: TypeAlias = Welcome | Datasets | Attached | Offsets | StatusReport | Accepted | Stopping | Failure
Message: TypeAlias = Request | Control | Reply

_OPS: Final[dict[type[Any], str]] = {
    Hello: "hello",
    List: "list",
    Attach: "attach",
    Lookup: "lookup",
    Status: "status",
    Load: "load",
    Reload: "reload",
    Unload: "unload",
    Stop: "stop",
    Welcome: "welcome",
    Datasets: "datasets",
    Attached: "attached",
    Offsets: "offsets",
    StatusReport: "status-report",
    Accepted: "accepted",
    Stopping: "stopping",
    Failure: "failure",
}


def encode(message: Message, request_id: int) -> bytes:
    """Return the frame of one message. What is not Unicode in its strings, as in a file's name, is escaped.

    Raises:
        ProtocolError: it does not fit into a frame: a number beyond 64 bits, or more than MAX_REPLY_NBYTES.
    """
    op = _OPS[type(message)]
    # asdict copies deeply, which takes longer than all the rest; only a report has records within it.
    fields = asdict(message) if type(message) is StatusReport else {n: getattr(message, n) for n in message.__slots__}
    envelope = {"v": PROTOCOL_VERSION, "id": request_id, "op": op, **fields}
    try:
        frame: bytes = msgpack.packb(envelope, use_bin_type=True, unicode_errors="backslashreplace")
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"the {op} message cannot be sent: {error}") from error
    if len(frame) > MAX_REPLY_NBYTES:
        raise ProtocolError(f"the {op} message has {len(frame)} bytes, over the limit of {MAX_REPLY_NBYTES}")
    return frame


def decode_request(frame: bytes) -> tuple[int, Request]:
    """Return (request id, request) of a frame that arrived on the clients' socket. Raises ProtocolError."""
    return _decode(_unpack(frame, MAX_REQUEST_NBYTES, _MAX_REQUEST_ITEMS), _REQUESTS)


def decode_control(frame: bytes) -> tuple[int, Control]:
    """Return (request id, request) of a frame that arrived on the owner's socket. Raises ProtocolError."""
    return _decode(_unpack(frame, MAX_REQUEST_NBYTES, MAX_ITEMS), _CONTROLS)


def decode_reply(frame: bytes) -> tuple[int, Reply]:
    """Return (request id, reply) of a frame that arrived at a client. Raises ProtocolError."""
    return _decode(_unpack(frame, MAX_REPLY_NBYTES, MAX_ITEMS), _REPLIES)


def request_id_of(frame: bytes) -> int:
    """Return the id of a frame that could not be decoded, so that the failure finds its asker; 0 without one."""
    try:
        envelope = _unpack(frame, MAX_REQUEST_NBYTES, _MAX_REQUEST_ITEMS)
    except ProtocolError:
        return 0
    request_id = envelope.get("id")
    return request_id if type(request_id) is int and 0 <= request_id < 1 << 63 else 0


_Kinds: TypeAlias = dict[str, type[Any]]
_REQUESTS: Final[_Kinds] = {_OPS[kind]: kind for kind in typing.get_args(Request)}
_CONTROLS: Final[_Kinds] = {_OPS[kind]: kind for kind in typing.get_args(Control)}
_REPLIES: Final[_Kinds] = {_OPS[kind]: kind for kind in typing.get_args(Reply)}


def _unpack(frame: bytes, limit: int, max_items: int) -> dict[str, Any]:
    if len(frame) > limit:
        raise ProtocolError(f"message of {len(frame)} bytes is over the limit of {limit}")
    return unpack(frame, ProtocolError, "message", max_items=max_items)


def _decode(envelope: dict[str, Any], kinds: _Kinds) -> tuple[int, Any]:
    version, request_id, op = (envelope.pop(key, None) for key in ("v", "id", "op"))
    if version != PROTOCOL_VERSION or type(version) is not int:
        raise ProtocolError(
            f"message of protocol version {shown(version)}, this side speaks version {PROTOCOL_VERSION}: "
            "use the same shmserve version in the daemon and in training"
        )
    if type(request_id) is not int or not 0 <= request_id < 1 << 63:
        raise ProtocolError(f"message with the id {shown(request_id)}: it must be an integer in [0, 2^63)")
    kind = kinds.get(op) if type(op) is str else None
    if kind is None:
        raise ProtocolError(f"message with the op {shown(op)}: this socket takes {', '.join(sorted(kinds))}")
    return request_id, typed(kind, envelope, _OPS[kind], ProtocolError)


def failure_from(error: ShmserveError) -> Failure:
    """Return the message that tells a client of `error`."""
    return Failure(error.code, str(error)[:_MAX_FAILURE_LENGTH])


def error_from(failure: Failure) -> ShmserveError:
    """Return the exception that a client raises for `failure`; a code of a newer daemon gives the root class."""
    return ERROR_CLASSES.get(failure.code, ShmserveError)(failure.message[:_MAX_FAILURE_LENGTH])
