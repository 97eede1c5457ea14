from __future__ import annotations

import os
import resource
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from shmserve_client.errors import SegmentFormatError, SegmentNotFoundError
from shmserve_client.locks import attached_processes
from shmserve_client.owned import adopt_segment
from shmserve_client.segment import Segment
from tests.processes import Child, run_python, wait_until
from tests.segments import CHILD_ENV, allocated_nbytes, published, write_tokens

TOKENS = np.arange(1000, dtype=np.int32)


@pytest.fixture
def owned(shm_dir):
    with published(write_tokens(shm_dir, TOKENS)) as segment:
        yield segment


def test_close_leaves_the_segment_and_unlink_does_not_touch_who_reads_it(shm_dir):
    owned = write_tokens(shm_dir, TOKENS)
    path, nonce = owned.path, owned.header.nonce
    owned.close()
    owned.close()
    adopted = adopt_segment(path)
    assert adopted is not None
    view = (segment := Segment.attach(path, nonce)).array(segment.description.columns[0].values)
    adopted.unlink()
    adopted.unlink()
    assert not os.path.exists(path)
    adopted.close()
    adopted.unlink()
    np.testing.assert_array_equal(view, TOKENS)


def test_unlink_after_close_is_refused_for_the_segment_may_be_anothers_by_then(shm_dir):
    owned = write_tokens(shm_dir, TOKENS)
    owned.close()
    with pytest.raises(ValueError, match="was closed: another process may own it"):
        owned.unlink()
    os.unlink(owned.path)


def test_unlink_removes_no_other_file_of_that_name(owned):
    os.unlink(owned.path)
    assert not owned.name_exists()
    Path(owned.path).write_text("another's")
    assert not owned.name_exists()
    owned.unlink()
    assert Path(owned.path).read_text() == "another's"
    os.unlink(owned.path)


def test_the_name_exists_until_it_is_removed(owned):
    assert owned.name_exists()
    owned.unlink()
    assert not owned.name_exists()


def test_an_unclosed_one_warns_and_gives_up_the_lock(shm_dir):
    owned = write_tokens(shm_dir, TOKENS)
    path = owned.path
    with pytest.warns(ResourceWarning, match="was not closed"):
        del owned
    with published(adopt_segment(path)):
        pass


def test_a_mapping_of_the_owners_own_does_not_hold_the_lock_after_close(owned):
    view = owned.array(owned.description.columns[0].values)
    assert attached_processes(owned.fd) == []
    owned.close()
    adopted = adopt_segment(owned.path)
    assert adopted is not None
    np.testing.assert_array_equal(view, TOKENS)
    adopted.unlink()
    adopted.close()
    owned._unlinked = True


def test_a_live_owner_keeps_its_segment(owned):
    assert adopt_segment(owned.path) is None


def test_what_a_killed_owner_left_is_adopted_as_it_is(shm_dir, tmp_path):
    code = """
        import sys, time
        import numpy as np
        from tests.segments import write_tokens

        owned = write_tokens(sys.argv[1], np.arange(3 << 20, dtype=np.int32))
        print(owned.path, owned.header.nonce.hex(), owned.huge_nbytes, flush=True)
        time.sleep(60)
    """
    with Child.python(code, shm_dir, folder=tmp_path, env=CHILD_ENV) as child:
        wait_until(lambda: "\n" in child.stdout)
        path, nonce, huge_nbytes = child.stdout.split()
        assert adopt_segment(path) is None
        child.kill()
    with published(adopt_segment(path)) as adopted:
        assert adopted.header.nonce.hex() == nonce
        assert adopted.huge_nbytes == int(huge_nbytes)
        assert adopted.huge_refusal == "" or not adopted.huge_nbytes
        assert adopt_segment(path) is None


def test_only_one_of_two_adopters_wins(shm_dir):
    owned = write_tokens(shm_dir, TOKENS)
    owned.close()
    with published(adopt_segment(owned.path)):
        assert adopt_segment(owned.path) is None


def test_an_adopted_segment_can_be_shared_with_a_group(shm_dir):
    owned = write_tokens(shm_dir, TOKENS)
    owned.close()
    with published(adopt_segment(owned.path, gid=os.getegid())) as adopted:
        assert stat.S_IMODE(os.stat(adopted.path).st_mode) == 0o440


def test_an_earlier_groups_access_ends_with_an_adoption_without_it(shm_dir):
    owned = write_tokens(shm_dir, TOKENS, gid=os.getegid())
    owned.close()
    with published(adopt_segment(owned.path)) as adopted:
        assert stat.S_IMODE(os.stat(adopted.path).st_mode) == 0o400


def test_what_is_no_segment_is_not_adopted(shm_dir, owned):
    path = shm_dir / "shmserve-0-random-00000000"
    path.write_bytes(os.urandom(5000))
    with pytest.raises(SegmentFormatError, match="not a shmserve segment"):
        adopt_segment(str(path))
    path.write_bytes(Path(owned.path).read_bytes()[:-1])
    with pytest.raises(SegmentFormatError, match="damaged"):
        adopt_segment(str(path))
    path.unlink()
    with pytest.raises(SegmentNotFoundError):
        adopt_segment(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_another_users_segment_is_not_adopted(shm_dir, owned):
    foreign = shm_dir / "foreign"
    shutil.copy(owned.path, foreign)
    os.chown(foreign, 65534, -1)
    with pytest.raises(SegmentFormatError, match="belongs to the user 65534"):
        adopt_segment(str(foreign))
    foreign.unlink()


def test_locked_pages_stay_in_memory_until_close(owned):
    def locked_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

    if 0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < owned.header.total_nbytes and os.geteuid() != 0:
        pytest.skip("this user may not lock so much")
    before, allocated = locked_kib(), allocated_nbytes(owned.fd)
    owned.lock_pages()
    assert locked_kib() - before == allocated >> 10, "all that takes memory, and only that"
    assert allocated_nbytes(owned.fd) == allocated < 1 << 20, "the hole before the data was filled"
    owned.unlink()
    owned.close()
    assert locked_kib() == before


def test_a_limit_on_locked_pages_is_an_error_that_names_it(shm_dir):
    done = run_python(
        """
        import ctypes, os, resource, sys
        import numpy as np
        from shmserve_client.errors import OutOfSharedMemoryError
        from tests.segments import published, write_tokens

        PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
        if os.geteuid() == 0 and len(sys.argv) == 2:  # root may lock what it likes, until it gives that up
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0
            os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        with published(write_tokens(sys.argv[1], np.arange(1 << 20))) as owned:
            try:
                owned.lock_pages()
            except OutOfSharedMemoryError as error:
                print(error)
        """,
        shm_dir,
        env=CHILD_ENV,
    )
    assert "bytes in memory, the limit is 65536 bytes" in done.stdout
    assert "ulimit -l" in done.stdout


def test_samples_that_were_asked_for_are_opened_once_and_never_many(shm_dir):
    with published(write_tokens(shm_dir, np.arange(100, dtype=np.uint16))) as segment:
        opened = segment.samples(None, 10, 0)
        assert segment.samples(None, 10, 0) is opened
        for size in range(1, 100):
            assert len(segment.samples(None, size, 0)) == 100 // size
        assert len(segment._samples) <= 64
    assert not segment._samples
