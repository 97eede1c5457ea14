from __future__ import annotations

import errno
import os
import re
import stat
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmserve.sources.pieces import FileSpan
from shmserve_client import filling, writer
from shmserve_client.errors import (
    ConfigError,
    OutOfSharedMemoryError,
    SegmentFormatError,
    SourceFormatError,
    VocabularyError,
)
from shmserve_client.layout import DATA_ALIGNMENT, Array, Column
from shmserve_client.locks import take_owner_lock
from shmserve_client.mapping import HUGE_PAGE_NBYTES, Mapping
from shmserve_client.segment import Segment
from shmserve_client.writer import Piece, Values
from tests.processes import Child, run_python, wait_until
from tests.segments import (
    CHILD_ENV,
    Repeated,
    allocated_nbytes,
    describe_tokens,
    published,
    write_pieces,
    write_tokens,
)

MIB = 1 << 20


def read_back(owned, array):
    return Segment.attach(owned.path, owned.header.nonce).array(array)


class Fails(Repeated):
    """Fails with `error` at the byte `at`."""

    def __init__(self, nbytes: int, error: Exception, at: int = 0) -> None:
        super().__init__(nbytes)
        self.error = error
        self.at = at

    def read_into(self, target, start):
        super().read_into(target, start)
        if start <= self.at < start + target.nbytes:
            raise self.error


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float16", "complex128", "bool"])
@pytest.mark.parametrize("count", [0, 1, 1000, 300_001])
def test_every_byte_arrives(shm_dir, dtype, count):
    values = (
        np.random.default_rng(0).integers(0, 2, count * 16, np.uint8).view(np.uint8)[: count * np.dtype(dtype).itemsize]
    )
    values = values.view(dtype)
    with published(write_tokens(shm_dir, values)) as owned:
        stored = read_back(owned, owned.description.columns[0].values)
        assert stored.tobytes() == values.tobytes()
        assert stored.dtype == values.dtype


def test_pieces_of_all_sizes_join_across_windows(shm_dir):
    rng = np.random.default_rng(1)
    sizes = [0, 1, 3, 700_000, 0, 5, 2_000_000, 64, 1_048_573]
    parts = [rng.integers(0, 60000, size, np.uint16) for size in sizes]
    tokens = np.concatenate(parts)
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    extra = rng.integers(0, 5, 11, np.int8)
    column = Column("tokens", Array("uint16", tokens.shape), offsets=Array("int64", offsets.shape))
    description = replace(
        describe_tokens("uint16", 0), num_samples=len(sizes), columns=(column,), arrays={"modes": Array("int8", (11,))}
    )
    pieces = [list(map(Values, parts)), [Values(offsets)], [Values(extra[:4]), Values(extra[4:])]]
    with published(write_pieces(shm_dir, description, pieces)) as owned:
        stored = owned.description
        np.testing.assert_array_equal(read_back(owned, stored.columns[0].values), tokens)
        np.testing.assert_array_equal(read_back(owned, stored.columns[0].offsets), offsets)
        np.testing.assert_array_equal(read_back(owned, stored.arrays["modes"]), extra)


def test_big_endian_values_are_stored_little_endian(shm_dir):
    with published(write_pieces(shm_dir, describe_tokens("int32", 3), [[Values(np.array([1, 2, 3], ">i4"))]])) as owned:
        assert read_back(owned, owned.description.columns[0].values).tolist() == [1, 2, 3]


def test_pieces_that_do_not_fill_their_array_are_refused(shm_dir):
    with pytest.raises(ValueError, match="pieces of 8 bytes for an array of 12"):
        write_pieces(shm_dir, describe_tokens("int32", 3), [[Repeated(8)]])


@pytest.mark.parametrize("shape", [(3, *[1] * 35), (0, 1 << 60), (0, 1 << 70), (-2, -3)])
def test_what_no_reader_would_accept_is_not_written(shm_dir, shape):
    description = describe_tokens("float32", shape[0])
    description = replace(description, columns=(Column("tokens", Array("float32", shape)),))
    nbytes = description.columns[0].values.nbytes
    with pytest.raises(SegmentFormatError):
        write_pieces(shm_dir, description, [[Repeated(nbytes)]])
    assert os.listdir(shm_dir) == []


def test_what_fails_after_it_is_named_is_removed(shm_dir, monkeypatch):
    def fail(*args, **options):
        assert len(os.listdir(shm_dir)) == 1
        raise RuntimeError("late")

    monkeypatch.setattr(writer, "OwnedSegment", fail)
    with pytest.raises(RuntimeError, match="late"):
        write_tokens(shm_dir, np.arange(5))
    assert os.listdir(shm_dir) == []


def test_it_is_read_only_named_and_owned(shm_dir):
    with published(write_tokens(shm_dir, np.arange(5))) as owned:
        assert os.listdir(shm_dir) == [Path(owned.path).name]
        assert stat.S_IMODE(os.stat(owned.path).st_mode) == 0o400
        other = os.open(owned.path, os.O_RDONLY)
        assert not take_owner_lock(other)
        os.close(other)
        assert owned.header.generation == 1
    assert os.listdir(shm_dir) == []


def test_a_group_may_read(shm_dir):
    gid = os.getgroups()[0] if os.getgroups() else os.getegid()
    with published(write_tokens(shm_dir, np.arange(5), gid=gid)) as owned:
        assert stat.S_IMODE(os.stat(owned.path).st_mode) == 0o440
        assert os.stat(owned.path).st_gid == gid


def test_no_name_is_visible_before_it_is_whole(shm_dir):
    seen = []
    with published(write_tokens(shm_dir, np.arange(MIB), progress=lambda *_: seen.append(os.listdir(shm_dir)))):
        assert seen == [[]] * 4


def test_progress_goes_up_to_all_bytes(shm_dir):
    calls: list[tuple[int, int]] = []
    with published(write_tokens(shm_dir, np.zeros(5 * MIB, np.uint8), progress=lambda *call: calls.append(call))):
        done, totals = zip(*calls, strict=True)
        assert set(totals) == {5 * MIB}
        assert len(done) == 3
        assert sorted(done) == list(done)
        assert done[-1] == 5 * MIB


def test_a_tiny_dataset_takes_a_tiny_bit_of_memory(shm_dir):
    with published(write_tokens(shm_dir, np.arange(100, dtype=np.uint16))) as owned:
        assert allocated_nbytes(owned.fd) <= 3 * 4096
        assert owned.huge_nbytes == 0
        assert owned.huge_refusal == ""


@pytest.mark.promise("F9")
def test_memory_taken_is_memory_needed_and_all_of_it_is_there(shm_dir):
    nbytes = 3 * HUGE_PAGE_NBYTES + 100_000
    with published(write_tokens(shm_dir, np.zeros(nbytes, np.uint8))) as owned:
        assert nbytes <= allocated_nbytes(owned.fd) <= nbytes + 3 * 4096
        hole = os.lseek(owned.fd, DATA_ALIGNMENT, os.SEEK_HOLE)
        assert hole == owned.header.total_nbytes, "a reader would pay for what it faults in"


# The vocabulary


def test_ids_within_the_vocabulary_pass(shm_dir):
    for dtype in ("uint16", "int64"):
        with published(write_tokens(shm_dir, np.array([0, 49_999], dtype), vocab_size=50_000)):
            pass
    with published(write_tokens(shm_dir, np.array([], np.uint16), vocab_size=1)):
        pass
    with published(write_tokens(shm_dir, np.array([65535], np.uint16), vocab_size=1 << 40)):
        pass


@pytest.mark.promise("F26")
@pytest.mark.parametrize(
    ("dtype", "bad"), [("uint16", 50_000), ("int32", -1), ("int64", -(1 << 62)), ("int64", 1 << 40)]
)
def test_the_first_bad_id_of_all_is_named(shm_dir, dtype, bad):
    tokens = np.zeros(4 * MIB, dtype)
    tokens[[3 * MIB - 1, 3 * MIB + 7, 4 * MIB - 1]] = bad
    message = f"token id {bad} at position {3 * MIB - 1} is outside the vocabulary \\[0, 50000\\)"
    with pytest.raises(VocabularyError, match=message):
        write_tokens(shm_dir, tokens, vocab_size=50_000)
    assert os.listdir(shm_dir) == []


def test_a_bad_id_is_found_in_its_file(shm_dir, tmp_path):
    pieces = []
    for name in ("one", "two"):
        np.array([7, 8, 9], np.uint16).tofile(tmp_path / name)
        pieces.append(FileSpan(tmp_path / name, 2, 4))
    description = describe_tokens("uint16", 4)
    message = f"id 9 at position 1 .* \\(dataset 'corpus', byte 4 of {tmp_path}/one\\)"
    with pytest.raises(VocabularyError, match=message):
        write_pieces(shm_dir, description, [pieces], vocab_size=9)
    np.array([7, 8, 8], np.uint16).tofile(tmp_path / "one")
    message = f"id 9 at position 3 .* \\(dataset 'corpus', byte 4 of {tmp_path}/two\\)"
    with pytest.raises(VocabularyError, match=message):
        write_pieces(shm_dir, description, [pieces], vocab_size=9)


def test_only_the_first_columns_values_are_token_ids(shm_dir):
    column = Column("tokens", Array("uint8", (3,)), offsets=Array("int64", (2,)))
    description = replace(describe_tokens("uint8", 0), num_samples=1, columns=(column,))
    pieces = [[Values(np.array([0, 1, 1], np.uint8))], [Values(np.array([0, 3]))]]
    with published(write_pieces(shm_dir, description, pieces, vocab_size=2)):
        pass


def test_values_that_are_no_ids_have_no_vocabulary(shm_dir):
    with pytest.raises(VocabularyError, match="float32, not token ids"):
        write_tokens(shm_dir, np.zeros(3, np.float32), vocab_size=5)


# What goes wrong


def test_a_source_that_changes_is_told(shm_dir):
    with pytest.raises(SourceFormatError, match="shrunk"):
        write_pieces(
            shm_dir, describe_tokens("uint8", 9 * MIB), [[Fails(9 * MIB, SourceFormatError("shrunk"), 5 * MIB)]]
        )


def test_a_source_that_fails_is_told(shm_dir):
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/corpus.bin")
    with pytest.raises(SourceFormatError, match=r"changed or failed while it was read: .*'/data/corpus.bin'") as caught:
        write_pieces(shm_dir, describe_tokens("uint8", 9), [[Fails(9, gone)]])
    assert caught.value.__cause__ is gone


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), KeyboardInterrupt()])
def test_any_exception_leaves_nothing_and_stops_the_other_thread(shm_dir, error):
    reads = []

    class Counted(Fails):
        def read_into(self, target, start):
            reads.append(start)
            super().read_into(target, start)

    nbytes = 64 * MIB
    with pytest.raises(type(error)):
        write_pieces(shm_dir, describe_tokens("uint8", nbytes), [[Counted(nbytes, error, 4 * MIB)]])
    assert os.listdir(shm_dir) == []
    assert len(reads) < 20


def test_a_failing_progress_fails_the_load(shm_dir):
    def broken(done_nbytes, total_nbytes):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_tokens(shm_dir, np.zeros(9), progress=broken)


def test_memory_is_given_back_though_the_exception_is_kept(shm_dir, monkeypatch):
    open_unnamed = writer.open_unnamed
    opened = []

    def open_and_watch(shm_dir):
        fd = open_unnamed(shm_dir)
        opened.append(os.dup(fd))
        return fd

    monkeypatch.setattr(writer, "open_unnamed", open_and_watch)
    nbytes = 8 * MIB
    with pytest.raises(SourceFormatError) as kept:
        write_pieces(
            shm_dir, describe_tokens("uint8", nbytes), [[Fails(nbytes, SourceFormatError("late"), nbytes - 1)]]
        )
    (fd,) = opened
    assert allocated_nbytes(fd) == 0
    os.close(fd)
    assert kept.tb


def test_cancelling_stops_within_a_step(shm_dir):
    cancelled = threading.Event()
    calls = []

    def progress(done_nbytes, total_nbytes):
        calls.append(done_nbytes)
        cancelled.set()

    nbytes = 64 * MIB
    with pytest.raises(CancelledError):
        write_pieces(
            shm_dir, describe_tokens("uint8", nbytes), [[Repeated(nbytes)]], progress=progress, cancelled=cancelled
        )
    assert len(calls) <= 2
    assert os.listdir(shm_dir) == []


def test_a_killed_writer_leaves_nothing(shm_dir, tmp_path):
    code = """
        import sys, threading, time
        from tests.segments import Repeated, describe_tokens, write_pieces

        class Slow(Repeated):
            def read_into(self, target, start):
                super().read_into(target, start)
                if start >= 8 << 20:
                    print("reading", flush=True)
                    time.sleep(60)

        nbytes = 32 << 20
        write_pieces(sys.argv[1], describe_tokens("uint8", nbytes), [[Slow(nbytes)]])
    """
    with Child.python(code, shm_dir, folder=tmp_path, env=CHILD_ENV) as child:
        wait_until(lambda: "reading" in child.stdout)
        child.kill()
    assert os.listdir(shm_dir) == []


def test_a_directory_that_cannot_hold_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent: No such file or directory: choose a writable tmpfs"):
        write_tokens(tmp_path / "absent", np.arange(3))
    with pytest.raises(ConfigError, match=r"cannot create a segment in /proc: .* choose a writable tmpfs"):
        write_tokens("/proc", np.arange(0))


def on_small_tmpfs(code: str, tmp_path: Path, size: str = "32m") -> str:
    """Run `code` with argv[1] the mount point of a tmpfs of its own; returns what it printed."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = run_python(
        """
        import os, subprocess, sys
        folder, size, code = sys.argv[1:]
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
        mount = f'mount -t tmpfs -o size={size} tmpfs "$0" || exit 77; exec "$@"'
        program = [*unshare, "sh", "-c", mount, folder, sys.executable, "-c", code, folder]
        done = subprocess.run(program, capture_output=True, text=True)
        print(done.returncode, done.stdout, done.stderr, sep="\\n")
        """,
        folder,
        size,
        code,
        env=CHILD_ENV,
    )
    code_, _, output = done.stdout.partition("\n")
    if code_ == "77" or "unshare failed" in output:
        pytest.skip(f"no tmpfs can be mounted here: {output.strip()}")
    assert code_ == "0", output
    return output


def test_too_small_a_tmpfs_is_refused_before_anything_is_read(tmp_path):
    output = on_small_tmpfs(
        """
import os, sys
from shmserve_client.errors import OutOfSharedMemoryError
from tests.segments import Repeated, describe_tokens, write_pieces

class Untouched(Repeated):
    def read_into(self, target, start):
        raise AssertionError("read")

try:
    write_pieces(sys.argv[1], describe_tokens("uint8", 40 << 20), [[Untouched(40 << 20)]])
except OutOfSharedMemoryError as error:
    print(error)
assert os.listdir(sys.argv[1]) == []
""",
        tmp_path,
    )
    assert "the segment needs 40.0 MiB, but " in output
    assert "/small (tmpfs, 32.0 MiB) has 32.0 MiB free, of which 4.0 MiB are kept" in output
    assert "--shm-size=46m" in output
    assert "mount -o remount,size=46m" in output


@pytest.mark.promise("F1")
@pytest.mark.parametrize("huge", [True, False])
def test_a_shortage_while_loading_is_an_error_and_no_signal(tmp_path, huge):
    output = on_small_tmpfs(
        f"""
import os, sys
from shmserve_client import filling
from shmserve_client.errors import OutOfSharedMemoryError
from tests.segments import Repeated, describe_tokens, write_pieces

if not {huge}:
    filling._MAX_REFUSALS_IN_A_ROW = 0

def somebody_else_takes_the_rest(done_nbytes, total_nbytes):
    if done_nbytes == 8 << 20:
        with open(sys.argv[1] + "/other", "wb") as other:
            other.write(bytes(12 << 20))

try:
    write_pieces(
        sys.argv[1],
        describe_tokens("uint8", 24 << 20),
        [[Repeated(24 << 20)]],
        progress=somebody_else_takes_the_rest,
    )
except OutOfSharedMemoryError as error:
    print(error)
assert os.listdir(sys.argv[1]) == ["other"]
free = os.statvfs(sys.argv[1])
assert free.f_bavail * free.f_frsize == 20 << 20
""",
        tmp_path,
    )
    told = re.search(r"the segment needs (\d+\.\d) MiB more, but .* has (\d+\.\d) (KiB|MiB) free", output)
    assert told, output
    free_mib = float(told[2]) / (1024 if told[3] == "KiB" else 1)
    assert float(told[1]) - free_mib == pytest.approx(4, abs=0.2)
    assert "--shm-size=42m" in output


# Huge pages


def test_whole_windows_are_on_huge_pages_for_every_process(shm_dir):
    nbytes = 64 * MIB + 100
    with published(write_pieces(shm_dir, describe_tokens("uint8", nbytes), [[Repeated(nbytes)]])) as owned:
        if owned.huge_refusal:
            pytest.skip(owned.huge_refusal)
        assert owned.huge_nbytes == 64 * MIB
        code = """
            import sys
            from shmserve_client.segment import Segment

            def page_tables():
                with open("/proc/self/status") as lines:
                    return next(int(line.split()[1]) for line in lines if line.startswith("VmPTE"))

            segment = Segment.attach(sys.argv[1], bytes.fromhex(sys.argv[2]))
            view = segment.array(segment.description.columns[0].values)
            before = page_tables()
            view[::4096].sum()
            print(segment._mapping.huge_nbytes() >> 20, page_tables() - before)
        """
        huge_mib, page_table_kib = map(int, run_python(code, owned.path, owned.header.nonce.hex()).stdout.split())
        assert huge_mib == 64
        assert page_table_kib <= 16, "64 MiB on small pages would take 128 KiB"


def test_a_kernel_that_refuses_huge_pages_is_asked_a_few_times_and_told_of(shm_dir, monkeypatch):
    asked = []

    def refuse(self, start):
        asked.append(start)
        return errno.ENOMEM

    monkeypatch.setattr(Mapping, "collapse", refuse)
    tokens = np.arange(8 * MIB, dtype=np.int64)
    with published(write_tokens(shm_dir, tokens)) as owned:
        if owned.huge_nbytes:
            pytest.skip("this mount gives huge pages without being asked")
        np.testing.assert_array_equal(read_back(owned, owned.description.columns[0].values), tokens)
        assert len(asked) in (filling._MAX_REFUSALS_IN_A_ROW, filling._MAX_REFUSALS_IN_A_ROW + 1)
        assert owned.huge_refusal.startswith(
            "64 MiB of the segment are on 4 KiB pages (the kernel says: Cannot allocate"
        )
        assert "2 MiB of page tables per GiB" in owned.huge_refusal
        assert "free memory" in owned.huge_refusal


def test_a_kernel_without_collapse_is_named_as_the_cause(shm_dir, monkeypatch):
    monkeypatch.setattr(Mapping, "collapse", lambda self, start: errno.EINVAL)
    with published(write_tokens(shm_dir, np.zeros(2 * MIB, np.uint8))) as owned:
        if owned.huge_nbytes:
            pytest.skip("this mount gives huge pages without being asked")
        assert owned.huge_refusal.endswith("use Linux 6.1 or later, or mount the shm directory with huge=within_size")


def test_single_refusals_do_not_end_huge_pages(shm_dir, monkeypatch):
    real = Mapping.collapse
    monkeypatch.setattr(Mapping, "collapse", lambda self, start: 11 if start % (4 * MIB) else real(self, start))
    with published(write_tokens(shm_dir, np.zeros(80 * MIB, np.uint8))) as owned:
        if owned.huge_nbytes in (0, 80 * MIB):
            pytest.skip("this kernel or mount gives none or all")
        assert owned.huge_nbytes == 40 * MIB
        assert "40 MiB of the segment are on 4 KiB pages" in owned.huge_refusal


def test_pieces_are_abstract():
    with pytest.raises(TypeError):
        Piece()  # type: ignore[abstract]


def test_out_of_memory_of_the_cgroup_is_the_same_error(shm_dir, monkeypatch):
    def refuse(fd, start, nbytes):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(filling.os, "posix_fallocate", refuse)
    with pytest.raises(OutOfSharedMemoryError, match="the segment needs"):
        write_tokens(shm_dir, np.zeros(5))


def test_room_that_goes_while_loading_is_an_error_in_time(shm_dir, monkeypatch):
    """Others may take what was free at the start, and a cgroup's limit that is reached would be a SIGKILL."""
    asked = []

    def vanish(nbytes, shm_dir, *, loading=False):
        asked.append((nbytes, loading))
        if nbytes <= 4 * MIB:
            raise OutOfSharedMemoryError("taken by others")

    monkeypatch.setattr(writer, "check_room", vanish)
    monkeypatch.setattr(filling, "_ROOM_CHECK_NBYTES", 2 * MIB)
    monkeypatch.setattr(filling, "_THREADS", 1)  # the order of the checks is asserted below
    with pytest.raises(OutOfSharedMemoryError, match="taken by others"):
        write_tokens(shm_dir, np.zeros(8 * MIB, np.uint8))
    assert [loading for _, loading in asked] == [False, True, True, True]
    assert asked[1:] == [(8 * MIB, True), (6 * MIB, True), (4 * MIB, True)]
    assert list(shm_dir.iterdir()) == []
