"""The answers of a daemon, without its sockets: the service over a catalog that was really loaded."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shmserve.catalog import Catalog, Failed, Loading, State
from shmserve.config import DaemonConfig, DatasetConfig
from shmserve.loader import Loader
from shmserve.progress import Progress
from shmserve.service import Service
from shmserve.sources import resolve
from shmserve.sources.base import SourceOptions
from shmserve.watch import Watch
from shmserve_client.errors import SourceFormatError
from shmserve_client.protocol import (
    MAX_INDICES,
    Attach,
    Attached,
    Datasets,
    DatasetStatus,
    Failure,
    Hello,
    List,
    Lookup,
    Offsets,
    Request,
    Status,
    StatusReport,
    Welcome,
)
from shmserve_client.segment import Segment
from shmserve_client.version import __version__

FIXTURES = Path(__file__).parent / "fixtures" / "written-megatron-core"
RAGGED = FIXTURES / "ragged_uint16.bin"
SAMPLES = json.loads((FIXTURES / "expected.json").read_text())["datasets"]["ragged_uint16"]["samples"]


class Loaded:
    """A catalog of two datasets, `docs` (ragged) and `tokens` (a stream), and the service over it."""

    def __init__(self, shm_dir: Path, folder: Path) -> None:
        self.tokens_file = folder / "tokens.bin"
        np.arange(1000, dtype=np.uint16).tofile(self.tokens_file)
        self.configs = (
            DatasetConfig("docs", (str(RAGGED),)),
            DatasetConfig(
                "tokens", (str(self.tokens_file),), SourceOptions("uint16", 1000), block_size=101, stride=100
            ),
        )
        self.config = DaemonConfig(self.configs, "/tmp/none.sock", str(shm_dir))
        self.catalog = Catalog(self.configs)
        self.output = io.StringIO()
        Loader(self.config, self.catalog, Progress(self.output)).run()
        assert self.catalog.failure() is None
        self.service = Service(self.catalog, endpoint=self.config.endpoint, shm_dir=self.config.shm_dir)

    def close(self) -> None:
        for ready in self.catalog.ready().values():
            ready.segment.unlink()
            ready.segment.close()

    def key_now(self, number: int) -> str:
        """The key that whoever resolves the dataset's paths now would ask for."""
        config = self.configs[number]
        return resolve(config.data, SourceOptions(config.options.dtype)).key

    def attached(self, request: Attach) -> Attached:
        reply = self.service.reply(request)
        assert isinstance(reply, Attached), reply
        return reply

    def look_up(self, request: Lookup) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        reply = self.service.reply(request)
        assert isinstance(reply, Offsets), reply
        return np.frombuffer(reply.offsets, "<i8"), np.frombuffer(reply.nbytes, "<i8")

    def failure(self, request: Request) -> Failure:
        reply = self.service.reply(request)
        assert isinstance(reply, Failure), reply
        return reply

    def status(self, name: str) -> DatasetStatus:
        reply = self.service.reply(Status(name))
        assert isinstance(reply, StatusReport), reply
        (status,) = reply.datasets
        return status


@pytest.fixture
def loaded(shm_dir: Path, tmp_path: Path) -> Iterator[Loaded]:
    loaded = Loaded(shm_dir, tmp_path)
    try:
        yield loaded
    finally:
        loaded.close()


def indices(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def test_hello_and_list(loaded: Loaded) -> None:
    assert loaded.service.reply(Hello("0.0.1")) == Welcome(__version__, os.getpid(), os.geteuid())
    assert loaded.service.reply(List()) == Datasets(["docs", "tokens"])


def test_attach_leads_to_the_bytes(loaded: Loaded) -> None:
    reply = loaded.attached(Attach("docs"))
    segment = Segment.attach(reply.path, reply.nonce)
    column = segment.description.columns[0]
    assert column.offsets is not None
    values, offsets = segment.array(column.values), segment.array(column.offsets)
    assert [values[start:stop].tolist() for start, stop in pairwise(offsets)] == SAMPLES
    assert (reply.block_size, reply.stride) == (0, 0)
    tokens = loaded.attached(Attach("tokens"))
    assert (tokens.block_size, tokens.stride) == (101, 100)


def test_attach_by_source_key(loaded: Loaded) -> None:
    docs, tokens = (loaded.key_now(number) for number in (0, 1))
    assert loaded.attached(Attach(source_key=tokens)).name == "tokens"
    assert loaded.attached(Attach("docs", docs)).name == "docs"
    assert loaded.failure(Attach("docs", tokens)).code == "dataset-not-found"
    assert loaded.failure(Attach(source_key="0" * 64)).code == "dataset-not-found"


def test_what_was_checked_against_a_vocabulary_serves_who_asks_for_none(loaded: Loaded) -> None:
    docs, tokens = (loaded.key_now(number) for number in (0, 1))
    assert loaded.attached(Attach(source_key=tokens, vocab_size=1000)).name == "tokens"
    assert loaded.failure(Attach(source_key=tokens, vocab_size=2000)).code == "dataset-not-found"
    assert loaded.failure(Attach(source_key=docs, vocab_size=1000)).code == "dataset-not-found"


def test_a_changed_source_is_not_what_its_key_asks_for(loaded: Loaded) -> None:
    assert loaded.attached(Attach(source_key=loaded.key_now(1))).name == "tokens"
    assert not loaded.status("tokens").source_changed
    np.arange(1001, dtype=np.uint16).tofile(loaded.tokens_file)
    assert loaded.failure(Attach(source_key=loaded.key_now(1))) == Failure(
        "dataset-not-found", "no dataset of those files, as they are now, is served here"
    )
    assert loaded.attached(Attach("tokens")).name == "tokens"  # who asks by name gets what was loaded


def test_a_look_at_the_files_tells_whether_they_changed(loaded: Loaded) -> None:
    content, status = loaded.tokens_file.read_bytes(), loaded.tokens_file.stat()
    watch = Watch(loaded.catalog)

    def has_changed() -> bool:
        watch.look()
        return loaded.status("tokens").source_changed

    assert not has_changed()
    np.arange(1001, dtype=np.uint16).tofile(loaded.tokens_file)
    assert has_changed()
    loaded.tokens_file.write_bytes(content)
    os.utime(loaded.tokens_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not has_changed()
    loaded.tokens_file.unlink()
    assert has_changed()
    assert not loaded.status("docs").source_changed


def test_a_request_touches_no_source_file(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    # One on a file server that is gone would hang, and every other client with it.
    monkeypatch.setattr(Path, "stat", lambda *_, **__: pytest.fail("looked at a file"))
    for request in (Status(), Attach("docs"), Attach(source_key="0" * 64), Lookup("docs", indices(0)), List()):
        loaded.service.reply(request)


def test_a_segment_on_a_disk_is_not_called_memory(loaded: Loaded, tmp_path: Path) -> None:
    assert not any("not in memory" in note for note in loaded.status("docs").notes)
    on_disk = Service(loaded.catalog, endpoint="/tmp/none.sock", shm_dir=str(tmp_path)).status("docs").datasets[0]
    assert any(f"{tmp_path} is on " in note for note in on_disk.notes)
    assert on_disk.huge_nbytes == 0


def test_without_a_name_there_has_to_be_only_one(loaded: Loaded) -> None:
    message = "several datasets are served here, name one of them: docs, tokens"
    assert loaded.failure(Attach()) == Failure("dataset-not-found", message)


@pytest.mark.parametrize("request_", [Attach("nope"), Lookup("nope", b""), Status("nope")])
def test_an_unknown_name_is_answered_with_the_known_ones(loaded: Loaded, request_: Request) -> None:
    message = "no dataset 'nope' here, the daemon serves docs, tokens"
    assert loaded.failure(request_) == Failure("dataset-not-found", message)


def test_lookup_says_where_samples_are(loaded: Loaded) -> None:
    attached = loaded.attached(Attach("docs"))
    wanted = [5, 0, 0, 2]
    offsets, nbytes = loaded.look_up(Lookup("docs", indices(*wanted), nonce=attached.nonce))
    content = Path(attached.path).read_bytes()
    for index, offset, length in zip(wanted, offsets, nbytes, strict=True):
        assert np.frombuffer(content[offset : offset + length], np.uint16).tolist() == SAMPLES[index]


def test_lookup_of_windows(loaded: Loaded) -> None:
    values_at = loaded.catalog.ready()["tokens"].segment.description.columns[0].values.offset
    offsets, nbytes = loaded.look_up(Lookup("tokens", indices(0, 8), block_size=101, stride=100))
    assert offsets.tolist() == [values_at, values_at + 2 * 800]
    assert nbytes.tolist() == [202, 202]


def test_lookup_of_nothing_and_of_the_most(loaded: Loaded) -> None:
    assert [len(part) for part in loaded.look_up(Lookup("docs", b""))] == [0, 0]
    offsets, _ = loaded.look_up(Lookup("docs", indices(*[3] * MAX_INDICES)))
    assert len(offsets) == MAX_INDICES
    assert len(set(offsets.tolist())) == 1


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Lookup("docs", indices(0, 6)), "sample-index", ["6"]),
        (Lookup("docs", indices(-1)), "sample-index", ["-1", "6"]),
        (Lookup("docs", indices(2**63 - 1)), "sample-index", ["9223372036854775807"]),
        (Lookup("docs", b"1234567"), "protocol", ["7 bytes"]),
        (Lookup("docs", indices(*[0] * (MAX_INDICES + 1))), "protocol", ["524296 bytes", "65536"]),
        (Lookup("docs", indices(0), column="image"), "config", ["'image'"]),
        (Lookup("docs", indices(0), nonce=b"another segment."), "segment-not-found", ["'docs'"]),
        (Lookup("tokens", indices(0)), "block-size", ["1000", "block_size"]),
        (Lookup("tokens", indices(0), block_size=-1), "block-size", ["-1"]),
        (Lookup("tokens", indices(0), stride=3), "block-size", ["stride 3"]),
        (Lookup("tokens", b"", block_size=2**64 - 1, stride=1), "block-size", ["2^62"]),
        (Lookup("tokens", b"", block_size=1, stride=2**63), "block-size", ["2^62"]),
        (Lookup("tokens", indices(0), block_size=1001), "sample-index", ["1000", "1001"]),
    ],
)
def test_lookups_that_are_refused(loaded: Loaded, request_: Lookup, code: str, words: list[str]) -> None:
    failure = loaded.failure(request_)
    assert failure.code == code
    for word in words:
        assert word in failure.message


def test_a_lookup_does_not_count_as_an_attached_process(loaded: Loaded) -> None:
    loaded.look_up(Lookup("docs", indices(0)))
    assert loaded.status("docs").attached_pids == []


def test_status(loaded: Loaded, shm_dir: Path) -> None:
    attached = loaded.attached(Attach("docs"))
    segment = Segment.attach(attached.path, attached.nonce)
    report = loaded.service.reply(Status())
    assert isinstance(report, StatusReport)
    assert (report.pid, report.endpoint, report.shm_dir) == (os.getpid(), "/tmp/none.sock", str(shm_dir))
    assert report.uptime_seconds > 0
    assert report.private_nbytes > 1 << 20
    docs, tokens = report.datasets
    assert (docs.name, docs.state, docs.format, docs.error) == ("docs", "ready", "megatron", "")
    assert (docs.num_samples, docs.stream, docs.generation, docs.adopted) == (len(SAMPLES), False, 1, False)
    assert docs.data == [str(RAGGED)]
    assert docs.path == attached.path
    assert docs.segment_nbytes == docs.loaded_nbytes == os.stat(attached.path).st_blocks * 512 < 1 << 20
    assert docs.attached_pids == [os.getpid()]
    assert docs.attached_elsewhere == 0
    assert (tokens.num_samples, tokens.stream, tokens.block_size, tokens.stride) == (1000, True, 101, 100)
    assert tokens.attached_pids == []
    del segment


def service_in(state: State) -> Service:
    """A service whose only dataset, `docs`, is in this state."""
    config = DatasetConfig("docs", (str(RAGGED),))
    catalog = Catalog([config])
    assert catalog.put(config, state)
    return Service(catalog, endpoint="/tmp/none.sock", shm_dir="/dev/shm")


def test_while_loading_the_answer_is_how_far(loaded: Loaded) -> None:
    service = service_in(Loading("megatron", 512 << 20, 2 << 30, loaded.key_now(0)))
    not_ready = Failure("dataset-not-ready", "dataset 'docs' is still loading (512.0 MiB of 2.0 GiB, 25 %)")
    assert service.reply(Attach("docs")) == not_ready
    assert service.reply(Attach(source_key=loaded.key_now(0))) == not_ready
    assert service.reply(Lookup("docs", indices(0))) == not_ready
    (status,) = service.status("docs").datasets
    assert (status.state, status.loaded_nbytes, status.segment_nbytes) == ("loading", 512 << 20, 2 << 30)
    service = service_in(Loading())
    assert service.reply(Attach("docs")) == Failure(
        "dataset-not-ready", "dataset 'docs' is still loading (its index is being read)"
    )
    assert service.reply(Attach(source_key="")) == Failure(
        "dataset-not-found", "no dataset of those files, as they are now, is served here"
    )


def test_a_failed_dataset_says_why() -> None:
    service = service_in(Failed(SourceFormatError("x.bin has 7 bytes, which is odd")))
    message = "dataset 'docs' could not be loaded: x.bin has 7 bytes, which is odd"
    assert service.reply(Attach("docs")) == Failure("dataset-failed", message)
    (status,) = service.status("docs").datasets
    assert (status.state, status.error) == ("failed", "x.bin has 7 bytes, which is odd")


@pytest.mark.promise("F4")
def test_a_segment_whose_name_vanished_is_served_on(loaded: Loaded) -> None:
    segment = loaded.catalog.ready()["docs"].segment
    assert "removed" not in " ".join(loaded.status("docs").notes)
    os.unlink(segment.path)
    attached = loaded.attached(Attach("docs"))
    assert attached.path == f"/proc/{os.getpid()}/fd/{segment.fd}"
    again = Segment.attach(attached.path, attached.nonce)
    assert os.path.samestat(os.stat(attached.path), os.fstat(segment.fd)), "the same memory, not a second copy"
    assert again.description == segment.description
    status = loaded.status("docs")
    assert (status.path, status.attached_pids) == (attached.path, [os.getpid()])
    assert f"{segment.path} was removed from under the daemon" in " ".join(status.notes)
