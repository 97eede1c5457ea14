from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve_client import mapping as mapping_module
from shmserve_client.errors import OutOfSharedMemoryError
from shmserve_client.mapping import HUGE_PAGE_NBYTES, map_locked, map_private, map_shared
from tests.processes import run_python
from tests.segments import smaps

NBYTES = HUGE_PAGE_NBYTES + 12345


@pytest.fixture
def fd(shm_dir: Path) -> Iterator[int]:
    number = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o400)
    os.ftruncate(number, NBYTES)
    os.pwrite(number, b"head", 0)
    os.pwrite(number, b"tail", NBYTES - 4)
    yield number
    os.close(number)


def map_all_locked(fd, nbytes):
    return map_locked(fd, nbytes, ranges=[(0, nbytes)])


@pytest.mark.parametrize("map_it", [map_private, map_shared, map_all_locked])
def test_it_shows_the_file_at_an_aligned_address(fd, map_it):
    mapping = map_it(fd, NBYTES)
    assert mapping.address % HUGE_PAGE_NBYTES == 0
    assert mapping.bytes.shape == (NBYTES,)
    assert mapping.bytes[:4].tobytes() == b"head"
    assert mapping.bytes[-4:].tobytes() == b"tail"


def test_a_private_write_stays_out_of_the_file(fd):
    mapping = map_private(fd, NBYTES)
    assert mapping.writable
    mapping.bytes[:4] = 0
    assert mapping.bytes[:4].tobytes() == bytes(4)
    assert os.pread(fd, 4, 0) == b"head"


def test_a_shared_write_reaches_the_file(fd):
    map_shared(fd, NBYTES).bytes[:4] = 1
    assert os.pread(fd, 4, 0) == b"\1\1\1\1"


def test_a_view_keeps_the_range_and_the_last_one_ends_it(fd):
    mapping = map_private(fd, NBYTES)
    address = mapping.address
    view = mapping.bytes[NBYTES - 4 :].view(np.uint16)[1:]
    del mapping
    assert view.tobytes() == b"il"
    assert smaps(address)
    del view
    assert not smaps(address)


def test_a_reader_that_may_not_have_private_pages_maps_read_only(fd, monkeypatch):
    """As with vm.overcommit_memory=2: simulated, because the setting is the whole machine's."""
    real = mapping_module._mmap

    def refuse_writable(address, nbytes, protection, flags, fd):
        if protection & mmap.PROT_WRITE:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(address, nbytes, protection, flags, fd)

    monkeypatch.setattr(mapping_module, "_mmap", refuse_writable)
    mapping = map_private(fd, NBYTES)
    assert not mapping.writable
    assert not mapping.bytes.flags.writeable
    assert mapping.bytes[:4].tobytes() == b"head"
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(10):
        map_private(fd, NBYTES)
    assert len(Path("/proc/self/maps").read_text().splitlines()) == before, "a refused range was not given back"


def test_no_address_space_is_an_error_that_names_the_limit():
    run_python("""
        import os, resource
        from shmserve_client.errors import OutOfSharedMemoryError
        from shmserve_client.mapping import map_private

        fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o400)
        os.ftruncate(fd, 8 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            map_private(fd, 8 << 30)
        except OutOfSharedMemoryError as error:
            assert "8589934592 bytes" in str(error) and "ulimit -v" in str(error), error
        else:
            raise AssertionError("mapped")
    """)


def test_a_collapsed_range_is_on_huge_pages_for_every_reader(fd):
    writer = map_shared(fd, NBYTES)
    if refusal := writer.collapse(0):
        pytest.skip(f"the kernel refuses MADV_COLLAPSE: {os.strerror(refusal)}")
    assert writer.huge_nbytes() == HUGE_PAGE_NBYTES
    assert writer.bytes[:4].tobytes() == b"head"
    reader = map_private(fd, NBYTES)
    assert reader.huge_nbytes() == 0, "nothing is touched yet"
    assert reader.bytes[5] == 0
    assert reader.huge_nbytes() == HUGE_PAGE_NBYTES == smaps(reader.address)["ShmemPmdMapped"]


def test_an_empty_range_cannot_be_collapsed(shm_dir):
    fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o400)
    try:
        os.ftruncate(fd, HUGE_PAGE_NBYTES)
        assert map_shared(fd, HUGE_PAGE_NBYTES).collapse(0) == errno.EINVAL
    finally:
        os.close(fd)


def test_locked_pages_are_locked_and_not_copied(fd):
    mapping = map_all_locked(fd, NBYTES)
    assert not mapping.writable
    figures = smaps(mapping.address)
    assert figures["Locked"] >= 2 * 4096
    assert figures["Anonymous"] == 0


def test_a_failed_mapping_of_a_bad_descriptor_is_an_error():
    with pytest.raises(OutOfSharedMemoryError, match="Bad file descriptor"):
        map_private(-1, 4096)
