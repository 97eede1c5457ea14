"""`shmserve verify`: what is damaged is found and located, in memory and at the source, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.loader import describe
from shmserve.sources import SourceOptions, resolve
from shmserve.verify import DamagedChunk, Difference, Part, verify
from shmserve_client.connection import Connection
from shmserve_client.errors import (
    ConfigError,
    SegmentFormatError,
    SegmentNotFoundError,
    SourceFormatError,
    SourceNotFoundError,
)
from shmserve_client.layout import CHUNK_NBYTES, Array, Checksums, Description
from shmserve_client.locks import attached_processes
from shmserve_client.owned import OwnedSegment
from shmserve_client.protocol import Attach, Attached, Datasets, List
from shmserve_client.writer import write_segment
from tests.corpora import RAGGED, write_tokens
from tests.processes import Daemon, run_cli
from tests.test_fixtures_served import CASES, FIXTURES

Serve = Callable[..., Daemon]

SAMPLES = 150_000
LENGTHS = np.random.default_rng(0).integers(0, 29, SAMPLES).astype(np.int32)
LENGTHS[[0, 7, 8, -1]] = 0
TOKENS = int(LENGTHS.sum())


def write_pair(folder: Path) -> Path:
    """A Megatron pair whose values and offsets are in different chunks of its segment; returns the path of the .bin."""
    tokens = np.random.default_rng(1).integers(0, 50_000, TOKENS).astype(np.uint16)
    tokens.tofile(folder / "pair.bin")
    ends = np.cumsum(LENGTHS, dtype=np.int64)
    with open(folder / "pair.idx", "wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, SAMPLES, SAMPLES + 1))
        LENGTHS.tofile(index)
        ((ends - LENGTHS) * 2).tofile(index)
        np.arange(SAMPLES + 1).tofile(index)
    return folder / "pair.bin"


@contextmanager
def loaded(
    path: Path, shm_dir: Path, options: SourceOptions | None = None, *, checksums: bool = True
) -> Iterator[OwnedSegment]:
    """The segment that a daemon would serve for the corpus at `path`."""
    resolved = resolve([str(path)], options or SourceOptions())
    description, pieces = describe("corpus", resolved, resolved.plan())
    segment = write_segment(
        replace(description, checksums=Checksums() if checksums else None),
        pieces,
        shm_dir=str(shm_dir),
        progress=lambda done_nbytes, total_nbytes: None,
        cancelled=threading.Event(),
        vocab_size=resolved.options.vocab_size,
    )
    try:
        yield segment
    finally:
        segment.unlink()
        segment.close()


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path)


@pytest.fixture
def owned(pair: Path, shm_dir: Path) -> Iterator[OwnedSegment]:
    with loaded(pair, shm_dir) as segment:
        yield segment


def flip(path: Path | str, position: int, bit: int = 0) -> None:
    """Change one bit of the file behind everybody's back: its modes and times stay."""
    status = os.stat(path)
    os.chmod(path, 0o600)
    with open(path, "r+b", buffering=0) as file:
        (before,) = os.pread(file.fileno(), 1, position)
        assert os.pwrite(file.fileno(), bytes([before ^ 1 << bit]), position) == 1
    os.chmod(path, status.st_mode & 0o777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def check(owned: OwnedSegment, *, against_source: bool = False):
    return verify(owned.path, owned.header.nonce, against_source=against_source)


def arrays_of(description: Description) -> dict[str, Array]:
    (column,) = description.columns
    assert column.offsets
    return {"tokens.values": column.values, "tokens.offsets": column.offsets, **description.arrays}


def items_of(array: Array, start: int, stop: int) -> tuple[int, int]:
    """Which of the array's items have bytes in [start, stop), by looking at each of them."""
    itemsize = array.nbytes // array.shape[0]
    starts = array.offset + itemsize * np.arange(array.shape[0])
    inside = np.flatnonzero((starts < stop) & (starts + itemsize > start))
    return int(inside[0]), int(inside[-1]) + 1


def samples_of(name: str, items: tuple[int, int], *, offsets_hold: bool) -> tuple[int, int] | None:
    """Which samples these items belong to, by looking at each sample."""
    ends = np.cumsum(LENGTHS)
    if name == "tokens.values" and offsets_hold:
        inside = np.flatnonzero((ends - LENGTHS < items[1]) & (ends > items[0]) & (LENGTHS > 0))
    elif name == "tokens.offsets":  # sample i has the offsets i and i + 1
        inside = np.arange(max(0, items[0] - 1), min(SAMPLES, items[1]))
    else:
        return None
    return int(inside[0]), int(inside[-1]) + 1


# Damage in memory


def test_what_is_whole_is_found_whole(owned):
    found = check(owned, against_source=True)
    checksums = owned.description.checksums.values
    assert found.nbytes == checksums.offset - owned.header.data_offset
    assert (found.chunks, found.checksums_damaged, found.damaged) == (checksums.shape[0] - 1, False, [])
    assert (found.source_files, found.differences) == (2, [])
    assert check(owned).source_files is None


@pytest.mark.promise("integrity")
def test_any_flipped_bit_of_any_array_is_found_and_located(owned):
    """The chunk is named, and what of each array is in it; with the source, the very item."""
    arrays = arrays_of(owned.description)
    data_offset, end = owned.header.data_offset, owned.description.checksums.values.offset
    positions = st.sampled_from(sorted(arrays)).flatmap(
        lambda name: st.tuples(st.just(name), st.integers(0, arrays[name].nbytes - 1))
    )

    @settings(deadline=None, max_examples=60)
    @given(positions, st.integers(0, 7))
    def flipped(place, bit):
        name, offset = place
        position = arrays[name].offset + offset
        flip(owned.path, position, bit)
        try:
            found, compared = check(owned), check(owned, against_source=True)
        finally:
            flip(owned.path, position, bit)
        start = data_offset + (position - data_offset) // CHUNK_NBYTES * CHUNK_NBYTES
        stop = min(start + CHUNK_NBYTES, end)
        within = [
            other for other, array in arrays.items() if array.offset < stop and array.offset + array.nbytes > start
        ]
        parts = []
        for other in within:
            items = items_of(arrays[other], start, stop)
            samples = samples_of(other, items, offsets_hold="tokens.offsets" not in within)
            parts.append(Part(other, *items, samples))
        assert found.damaged == [DamagedChunk(start, stop, parts)]
        assert [(chunk.start, chunk.stop) for chunk in compared.damaged] == [(start, stop)]
        item = items_of(arrays[name], position, position + 1)
        samples = samples_of(name, item, offsets_hold=True)
        (difference,) = compared.differences
        assert difference == Difference(
            position, name, item[0], None if samples is None else samples[0], difference.origin, 1
        )
        if name == "tokens.values":
            assert re.fullmatch(rf"byte {offset} of .*/pair\.bin", difference.origin)

    flipped()
    assert check(owned, against_source=True).damaged == []


def test_every_damaged_chunk_is_told_in_order(owned):
    end = owned.description.checksums.values.offset
    positions = [owned.header.data_offset, owned.header.data_offset + CHUNK_NBYTES, end - 64]
    for position in reversed(positions):
        flip(owned.path, position)
    found = check(owned)
    assert [chunk.start for chunk in found.damaged] == [
        owned.header.data_offset + number * CHUNK_NBYTES for number in (0, 1, found.chunks - 1)
    ]


def test_what_lies_between_arrays_is_looked_at(owned):
    values, offsets = owned.description.columns[0].values, owned.description.columns[0].offsets
    assert values.offset + values.nbytes < offsets.offset
    flip(owned.path, values.offset + values.nbytes)
    assert len(check(owned).damaged) == 1


@pytest.mark.parametrize("item", [0, -2, -1])
def test_damaged_checksums_are_not_taken_for_damaged_data(owned, item):
    checksums = owned.description.checksums.values
    flip(owned.path, checksums.offset + range(checksums.nbytes)[8 * item], 3)
    found = check(owned, against_source=True)
    assert (found.checksums_damaged, found.chunks, found.damaged, found.differences) == (True, 0, [], [])


@pytest.mark.parametrize("nbytes", [2, 64, CHUNK_NBYTES - 2, CHUNK_NBYTES, CHUNK_NBYTES + 2, 3 * CHUNK_NBYTES])
def test_the_last_byte_of_any_size_is_covered(nbytes, tmp_path, shm_dir):
    with loaded(write_tokens(tmp_path / "tokens.bin", nbytes // 2), shm_dir) as owned:
        whole = check(owned, against_source=True)
        assert (whole.chunks, whole.damaged, whole.differences) == (-(-nbytes // CHUNK_NBYTES), [], [])
        flip(owned.path, owned.header.data_offset + nbytes - 1, 7)
        found = check(owned, against_source=True)
    assert [chunk.start for chunk in found.damaged] == [owned.header.data_offset + (whole.chunks - 1) * CHUNK_NBYTES]
    assert [(found.item, found.byte) for found in found.differences] == [
        (nbytes // 2 - 1, owned.header.data_offset + nbytes - 1)
    ]


@pytest.mark.parametrize("shape", [(0, 3), (0,), (5, 0), (3, 2, 2)])
def test_fixed_shapes_and_what_is_empty(shape, tmp_path, shm_dir):
    np.save(tmp_path / "array.npy", np.ones(shape, np.float32))
    with loaded(tmp_path / "array.npy", shm_dir) as owned:
        found = check(owned, against_source=True)
        assert (found.chunks, found.damaged, found.differences) == (int(np.prod(shape) > 0), [], [])
        if found.chunks:
            flip(owned.path, owned.header.data_offset + 4 * 5)
            (difference,) = check(owned, against_source=True).differences
            assert (difference.item, difference.sample) == (5, 1)
            (chunk,) = check(owned).damaged
            (part,) = chunk.parts
            assert (part.array, part.start, part.stop, part.samples) == (
                f"{owned.description.columns[0].name}.values",
                0,
                12,
                (0, 3),
            )


def test_without_checksums_only_the_source_tells(pair, shm_dir):
    with loaded(pair, shm_dir, checksums=False) as owned:
        with pytest.raises(
            ConfigError, match=r"'corpus' was loaded without checksums: .*--checksums.*--against-source"
        ):
            check(owned)
        assert check(owned, against_source=True).differences == []
        flip(owned.path, owned.header.total_nbytes - 1)
        found = check(owned, against_source=True)
        assert (found.chunks, found.checksums_damaged, found.damaged) == (0, False, [])
        assert [difference.array for difference in found.differences] == ["document_indices"]


def test_it_reads_in_passing_and_is_not_counted(owned):
    seen = []
    verify(
        owned.path,
        owned.header.nonce,
        against_source=False,
        progress=lambda done_nbytes, total_nbytes: seen.append(
            (done_nbytes, total_nbytes, attached_processes(owned.fd))
        ),
    )
    done, totals, attached = zip(*seen, strict=True)
    assert set(totals) == {owned.description.checksums.values.offset - owned.header.data_offset}
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]
    assert [processes for processes in attached if processes] == []


def test_a_segment_that_ends_too_soon_is_no_crash(owned):
    """Nobody truncates what is published; whoever does it ends every process that has it mapped, but not this one."""

    def truncate(done_nbytes, total_nbytes):
        os.chmod(owned.path, 0o600)
        os.truncate(owned.path, owned.header.data_offset + 1000)

    nbytes = os.stat(owned.path).st_size
    with pytest.raises(SegmentFormatError, match="truncated: nothing is left at byte"):
        verify(owned.path, owned.header.nonce, against_source=False, progress=truncate)
    os.truncate(owned.path, nbytes)


def test_a_damaged_description_and_another_segment_are_refused(owned):
    with pytest.raises(SegmentNotFoundError, match="another one than the daemon's"):
        verify(owned.path, bytes(16), against_source=False)
    flip(owned.path, 200)
    with pytest.raises(SegmentFormatError, match="the description does not match its checksum"):
        check(owned)


# The source


@pytest.mark.promise("integrity")
def test_a_flipped_bit_of_the_source_is_found_by_reading_it_alone(owned, pair):
    flip(pair, 1001, 4)
    assert check(owned).damaged == []
    found = check(owned, against_source=True)
    assert found.damaged == []
    sample = samples_of("tokens.values", (500, 501), offsets_hold=True)
    assert sample
    assert found.differences == [
        Difference(owned.header.data_offset + 1001, "tokens.values", 500, sample[0], f"byte 1001 of {pair}", 1)
    ]


def test_the_first_of_all_differences_of_a_piece_is_told(owned, pair):
    for position in (CHUNK_NBYTES * 2 + 5, 700, CHUNK_NBYTES + 1, 701):
        flip(pair, position)
    (difference,) = check(owned, against_source=True).differences
    assert (difference.byte - owned.header.data_offset, difference.nbytes) == (700, 4)


def test_a_changed_index_is_found_in_the_offsets(owned, pair):
    """One sample's last token becomes the next one's first: both files keep their sizes, and agree with each other."""
    at = int(np.flatnonzero(LENGTHS > 1)[10])
    lengths, pointers = 34, 34 + 4 * SAMPLES
    status = os.stat(pair.with_suffix(".idx"))
    with open(pair.with_suffix(".idx"), "r+b") as index:
        for position, format_, change in (
            (lengths + 4 * at, "<i", -1),
            (lengths + 4 * (at + 1), "<i", 1),
            (pointers + 8 * (at + 1), "<q", -2),
        ):
            index.seek(position)
            (before,) = struct.unpack(format_, index.read(struct.calcsize(format_)))
            index.seek(position)
            index.write(struct.pack(format_, before + change))
    os.utime(pair.with_suffix(".idx"), ns=(status.st_atime_ns, status.st_mtime_ns))
    (difference,) = check(owned, against_source=True).differences
    assert (difference.array, difference.item, difference.sample) == ("tokens.offsets", at + 1, at)


def test_a_source_that_changed_openly_is_refused(owned, pair):
    status = os.stat(pair)
    os.utime(pair, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(SourceFormatError, match=r"pair.bin changed since it was loaded: `shmserve reload corpus`"):
        check(owned, against_source=True)
    pair.rename(pair.with_name("elsewhere"))
    with pytest.raises(SourceNotFoundError, match=r"pair\.bin"):
        check(owned, against_source=True)
    assert check(owned).damaged == []


def test_a_source_of_other_arrays_that_claims_to_be_unchanged_is_refused(tmp_path, shm_dir):
    path = tmp_path / "array.npy"
    np.save(path, np.ones((6, 2), np.float32))
    with loaded(path, shm_dir) as owned:
        status = os.stat(path)
        content = path.read_bytes()
        with open(path, "r+b") as file:  # the same file, as long as before
            file.write(content.replace(b"(6, 2)", b"(3, 4)"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(SourceFormatError, match="other arrays than were loaded"):
            check(owned, against_source=True)


def test_a_source_that_changes_meanwhile_is_told(owned, pair):
    with pytest.raises(SourceFormatError, match=r"pair.bin changed while it was compared: try again"):
        verify(owned.path, owned.header.nonce, against_source=True, progress=lambda *_: os.utime(pair))


def test_a_source_that_shrinks_meanwhile_ends_it(owned, pair):
    with pytest.raises(SourceFormatError, match="changed while it was read"):
        verify(owned.path, owned.header.nonce, against_source=True, progress=lambda *_: os.truncate(pair, 10))


def test_it_is_read_with_the_options_it_was_loaded_with(tmp_path, shm_dir):
    path = write_tokens(tmp_path / "tokens.bin")
    for options in (SourceOptions("uint8"), SourceOptions("int32", 1 << 40), SourceOptions(None, 1000)):
        with loaded(path, shm_dir, options) as owned:
            assert check(owned, against_source=True).differences == []


# The command


def served(daemon: Daemon) -> list[Attached]:
    with Connection(daemon.endpoint, timeout_s=10.0) as connection:
        names = connection.request(List())
        assert isinstance(names, Datasets)
        found = [connection.request(Attach(name)) for name in names.names]
    return [one for one in found if isinstance(one, Attached)]


@pytest.mark.promise("integrity")
def test_every_fixture_as_served_matches_its_checksums_and_its_source(serve: Serve, tmp_path: Path) -> None:
    lines = ["checksums = true"]
    for name, case in CASES.items():
        lines += [f"[datasets.{json.dumps(name.replace('/', '.'))}]"]
        lines += [f"data = {json.dumps([str(FIXTURES / path) for path in case.data])}"]
        lines += [f"dtype = {json.dumps(case.dtype)}"] if case.dtype else []
    config = tmp_path / "node.toml"
    config.write_text("\n".join(lines))
    daemon = serve("--config", config)

    found = [verify(one.path, one.nonce, against_source=True) for one in served(daemon)]

    assert len(found) == len(CASES)
    assert [one for one in found if one.damaged or one.differences or one.checksums_damaged] == []
    assert [one for one in found if one.nbytes and not one.chunks] == []


def test_the_command_says_what_it_compared(serve: Serve) -> None:
    daemon = serve("--data", f"corpus={RAGGED}", "--checksums")

    done = run_cli("verify", "corpus")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"corpus: \d+ bytes in 1 chunk matches its checksum\n", done.stdout)

    done = run_cli("verify", "corpus", "--against-source")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^corpus: \d+ bytes match the source, 2 files$", done.stdout, re.MULTILINE)

    done = run_cli("verify", "corpus", "--json", env={"SHMSERVE_AGAINST_SOURCE": "1"})
    report = json.loads(done.stdout)
    (path,) = daemon.segments()
    assert (report["name"], report["path"], report["chunks"]) == ("corpus", str(path), 1)
    assert (report["damaged"], report["source_files"], report["differences"]) == ([], 2, [])


@pytest.mark.promise("integrity")
def test_the_command_names_what_is_damaged_and_a_reload_mends_it(serve: Serve) -> None:
    daemon = serve("--data", f"corpus={RAGGED}", env={"SHMSERVE_CHECKSUMS": "1"})
    (path,) = daemon.segments()
    start = 2 << 20
    flip(path, start + 5)

    done = run_cli("verify", "corpus", "--against-source")
    assert done.returncode == 1
    chunk, difference = done.stdout.splitlines()
    assert re.fullmatch(
        rf"corpus: bytes \[{start}, \d+\) of the segment do not match their checksum: tokens.values items \[0, 24\), "
        r"samples \[0, \d+\); tokens.offsets items \[0, \d+\), samples \[0, \d+\); document_indices items \[0, \d+\)",
        chunk,
    )
    assert re.fullmatch(
        rf"corpus: byte {start + 5} of the segment is not the source's: tokens.values item 2, sample \d, "
        rf"byte 5 of {RAGGED}; 1 byte there in all",
        difference,
    )
    assert done.stderr == (
        "error: corpus: 1 of 1 chunk changed in memory since loading: `shmserve reload corpus` loads it again\n"
    )
    done = run_cli("verify", "corpus", "--json")
    assert done.returncode == 1
    assert [chunk["start"] for chunk in json.loads(done.stdout)["damaged"]] == [start]

    assert run_cli("reload", "corpus").returncode == 0
    assert run_cli("verify", "corpus", "--against-source").returncode == 0


def test_the_command_tells_a_changed_source_from_a_changed_segment(serve: Serve, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "corpus.bin")
    serve("--data", path, "--checksums")
    flip(path, 9)
    assert run_cli("verify", "corpus").returncode == 0

    done = run_cli("verify", "corpus", "--against-source")
    assert done.returncode == 1
    assert f"tokens.values item 4, byte 9 of {path}; 1 byte there in all" in done.stdout
    assert done.stderr.startswith("error: corpus: the segment is as it was loaded, its source is not, though ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.promise("integrity")
def test_an_adopted_segment_verifies(serve: Serve) -> None:
    first = serve("--data", f"corpus={RAGGED}", "--checksums")
    segments = first.segments()
    first.kill()
    second = serve("--data", f"corpus={RAGGED}")
    assert second.status("corpus").datasets[0].adopted
    assert second.segments() == segments
    assert run_cli("verify", "corpus", "--against-source").returncode == 0


def test_a_segment_without_a_name_verifies(serve: Serve) -> None:
    daemon = serve("--data", f"corpus={RAGGED}", "--checksums")
    (path,) = daemon.segments()
    path.unlink()
    done = run_cli("verify", "corpus")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["corpus"], "error: 'corpus' was loaded without checksums: start the daemon with --checksums and "),
        (["nope"], "error: no dataset 'nope' here"),
    ],
)
def test_what_cannot_be_verified_is_one_line(args: list[str], message: str, serve: Serve) -> None:
    serve("--data", f"corpus={RAGGED}")
    done = run_cli("verify", *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    done = run_cli("verify", "corpus", "--against-source")
    assert (done.returncode, done.stderr) == (0, "")
    assert "match the source" in done.stdout
