from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shmserve_client import mapping as mapping_module
from shmserve_client.errors import OutOfSharedMemoryError, SegmentFormatError, SegmentNotFoundError
from shmserve_client.layout import DATA_ALIGNMENT, encode_prefix, place_arrays
from shmserve_client.locks import attached_processes
from shmserve_client.segment import Segment, read_prefix, segment_filename
from tests.processes import Child, run_python, wait_until
from tests.segments import describe_tokens, published, smaps, write_tokens

TOKENS = np.arange(1000, dtype=np.int32)
ABSENT_NONCE = bytes(16)


@pytest.fixture
def owned(shm_dir):
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        yield segment


def tokens_of(segment: Segment):
    return segment.array(segment.description.columns[0].values)


def pids(owned) -> list[int]:
    return [process.pid for process in attached_processes(owned.fd)]


def test_it_reads_what_was_written(owned):
    segment = Segment.attach(owned.path, owned.header.nonce)
    assert segment.path == owned.path
    assert (segment.header, segment.description) == (owned.header, owned.description) == read_prefix(owned.fd)
    tokens = tokens_of(segment)
    assert tokens.dtype == np.dtype("<i4")
    np.testing.assert_array_equal(tokens, TOKENS)


def test_names_are_safe_short_and_tell_the_user():
    name = segment_filename("a/b c.ü-1_" + "x" * 200, bytes(range(16)))
    assert name == f"shmserve-{os.geteuid()}-a_b_c._-1_{'x' * 54}-00010203"


def test_one_per_process(owned):
    first = Segment.attach(owned.path, owned.header.nonce)
    assert Segment.attach(owned.path, owned.header.nonce) is first
    descriptors = len(os.listdir("/proc/self/fd"))
    again = [Segment.attach(owned.path, owned.header.nonce) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert pids(owned) == [os.getpid()]
    assert all(one is first for one in again)


def test_threads_that_race_share_one(owned):
    barrier = threading.Barrier(8)

    def attach(_):
        barrier.wait()
        return Segment.attach(owned.path, owned.header.nonce)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(map(id, found := list(threads.map(attach, range(8)))))) == 1
    assert found


def test_the_last_view_ends_it(owned):
    segment = Segment.attach(owned.path, owned.header.nonce)
    address = segment._mapping.address
    view = tokens_of(segment)[10:20]
    del segment
    np.testing.assert_array_equal(view, TOKENS[10:20])
    assert pids(owned) == [os.getpid()]
    assert smaps(address)
    del view
    assert pids(owned) == []
    assert not smaps(address)


def test_a_view_outlives_the_segments_name_and_owner(shm_dir):
    with published(write_tokens(shm_dir, TOKENS)) as owned:
        view = tokens_of(Segment.attach(owned.path, owned.header.nonce))
    np.testing.assert_array_equal(view, TOKENS)


def test_a_write_is_private_to_its_process(owned):
    tokens = tokens_of(Segment.attach(owned.path, owned.header.nonce))
    tokens += 1
    np.testing.assert_array_equal(tokens, TOKENS + 1)
    code = """
        import sys
        from shmserve_client.segment import Segment
        segment = Segment.attach(sys.argv[1], bytes.fromhex(sys.argv[2]))
        print(segment.array(segment.description.columns[0].values).sum())
    """
    assert int(run_python(code, owned.path, owned.header.nonce.hex()).stdout) == TOKENS.sum()


def test_where_the_kernel_allows_reading_only_views_are_read_only(owned, monkeypatch):
    monkeypatch.setattr(mapping_module.mmap, "PROT_WRITE", 0)
    segment = Segment.attach(owned.path, owned.header.nonce)
    assert not segment.writable
    assert not tokens_of(segment).flags.writeable


def test_a_missing_segment_names_the_cause(shm_dir):
    with pytest.raises(
        SegmentNotFoundError, match=r"no segment at .*: its daemon has ended, or .* another shm directory"
    ):
        Segment.attach(str(shm_dir / "absent"), ABSENT_NONCE)


def test_another_segment_of_that_name_is_refused(owned):
    with pytest.raises(SegmentNotFoundError, match="another shm directory than the daemon"):
        Segment.attach(owned.path, ABSENT_NONCE)
    assert pids(owned) == []


def test_a_segment_that_may_not_be_read_is_refused(owned):
    code = """
        import os, sys
        from shmserve_client.errors import SegmentNotFoundError
        from shmserve_client.segment import Segment
        if os.geteuid() == 0:
            os.setuid(65534)
        else:
            os.chmod(sys.argv[1], 0)
        try:
            Segment.attach(sys.argv[1], bytes(16))
        except SegmentNotFoundError as error:
            print(error)
    """
    os.chmod(Path(owned.path).parent, 0o755)
    assert "Permission denied" in run_python(code, owned.path).stdout


def make_link(path: Path) -> None:
    path.symlink_to("/dev/shm")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_random(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def make_empty(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("make", [make_link, make_fifo, make_random, make_empty, Path.mkdir])
def test_what_is_no_segment_is_refused_at_once(tmp_path, make):
    make(tmp_path / "it")
    started = time.monotonic()
    with pytest.raises((SegmentFormatError, SegmentNotFoundError), match=r"not a|cannot open"):
        Segment.attach(str(tmp_path / "it"), ABSENT_NONCE)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("path", "message"), [("/dev/shm/a\0b", "cannot open .*null"), ("/proc/self/mem", "cannot be read: Input/output")]
)
def test_what_cannot_be_opened_or_read_is_refused(path, message):
    with pytest.raises((SegmentFormatError, SegmentNotFoundError), match=message):
        Segment.attach(path, ABSENT_NONCE)


def test_a_truncated_segment_is_refused(owned, tmp_path):
    whole = Path(owned.path).read_bytes()
    for nbytes in (0, 8, 100, 200, DATA_ALIGNMENT, len(whole) - 1):
        cut = tmp_path / "cut"
        cut.write_bytes(whole[:nbytes])
        with pytest.raises(SegmentFormatError):
            Segment.attach(str(cut), owned.header.nonce)


def test_attaching_does_not_depend_on_the_size(shm_dir):
    placed, data_offset, total_nbytes = place_arrays(describe_tokens("int64", 1 << 37))
    prefix = encode_prefix(placed, data_offset=data_offset, total_nbytes=total_nbytes, nonce=ABSENT_NONCE, generation=1)
    path = shm_dir / "tebibyte"
    with open(path, "wb") as file:
        file.write(prefix)
        file.truncate(total_nbytes)
    took_s = []
    for _ in range(5):
        started = time.perf_counter()
        segment = Segment.attach(str(path), ABSENT_NONCE)
        took_s.append(time.perf_counter() - started)
        del segment
    path.unlink()
    assert min(took_s) < 0.005


def test_without_address_space_it_is_an_error_and_nothing_stays_open(owned, monkeypatch):
    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setattr(mapping_module, "_reserve", lambda nbytes: (_ for _ in ()).throw(OSError(12, "no room")))
    with pytest.raises(OutOfSharedMemoryError, match="ulimit -v"):
        Segment.attach(owned.path, owned.header.nonce)
    assert os.listdir("/proc/self/fd") == descriptors


FORK = """
    import os, signal, sys
    from shmserve_client.segment import Segment

    segment = Segment.attach(sys.argv[1], bytes.fromhex(sys.argv[2]))
    view = segment.array(segment.description.columns[0].values)
    if sys.argv[3] == "view":
        del segment
    view[0] = 42
    if os.fork() == 0:
        assert view[0] == 42 and view[999] == 999
        print(os.getpid(), flush=True)
        signal.pause()
    signal.pause()
"""


@pytest.mark.parametrize("kept", ["view", "segment"])
def test_a_forked_child_counts_for_itself(owned, tmp_path, kept):
    with Child.python(FORK, owned.path, owned.header.nonce.hex(), kept, folder=tmp_path) as parent:
        wait_until(lambda: "\n" in parent.stdout)
        child = int(parent.stdout)
        assert pids(owned) == sorted([parent.pid, child])
        parent.kill()
        assert pids(owned) == [child]
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: pids(owned) == [], what="nobody being counted")
        assert parent.stderr == ""


def test_a_child_that_cannot_count_itself_says_so_and_reads_on(owned):
    done = run_python(
        """
        import os, sys
        from shmserve_client.segment import Segment

        segment = Segment.attach(sys.argv[1], bytes.fromhex(sys.argv[2]))
        view = segment.array(segment.description.columns[0].values)
        os.closerange(3, 256)
        taken = os.open("/dev/null", os.O_RDONLY)
        if os.fork() == 0:
            assert view[999] == 999
            assert os.readlink(f"/proc/self/fd/{taken}") == "/dev/null"
            os._exit(0)
        assert os.wait()[1] == 0
        os._exit(0)
        """,
        owned.path,
        owned.header.nonce.hex(),
    )
    assert "RuntimeWarning: process" in done.stderr
    assert "is not counted as attached" in done.stderr


def test_a_fork_while_another_thread_attaches_does_not_hang(owned):
    run_python(
        """
        import os, sys, warnings
        from shmserve_client import segment as module
        from shmserve_client.segment import Segment

        warnings.simplefilter("ignore", DeprecationWarning)
        with module._attaching:
            pid = os.fork()
            if pid == 0:
                Segment.attach(sys.argv[1], bytes.fromhex(sys.argv[2]))
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """,
        owned.path,
        owned.header.nonce.hex(),
        timeout_s=20,
    )


def add_up(path: str, nonce: bytes) -> int:
    return int(tokens_of(Segment.attach(path, nonce)).sum())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_kind_of_worker_attaches_it(owned, method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(add_up, (owned.path, owned.header.nonce)) == TOKENS.sum()
