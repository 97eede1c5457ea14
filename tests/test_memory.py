"""What a process holds: measured against the kernel's own figures, on real segments."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from shmserve_client import memory
from shmserve_client.mapping import HUGE_PAGE_NBYTES, map_private
from shmserve_client.memory import SegmentMapping, measure, segment_page_tables
from shmserve_client.owned import OwnedSegment
from shmserve_client.segment import open_segment
from tests.processes import Child, run_python, wait_until
from tests.segments import published, write_tokens

PAGE = mmap.PAGESIZE
SIZE = 64 << 20
Touch = Callable[[NDArray[np.uint8]], object]


@pytest.fixture
def owned(shm_dir: Path) -> Iterator[OwnedSegment]:
    with published(write_tokens(shm_dir, np.ones(SIZE, np.uint8))) as segment:
        yield segment


@pytest.fixture
def named(owned: OwnedSegment) -> Iterator[int]:
    """The segment opened by its name, as a client opens it, which is how its mappings are known."""
    fd = open_segment(owned.path)
    yield fd
    os.close(fd)


@pytest.fixture
def mapped(owned: OwnedSegment, named: int) -> NDArray[np.uint8]:
    """The segment's data as a client has it, on huge pages where the kernel gives them; nothing is touched yet."""
    return map_private(named, owned.header.total_nbytes).bytes[owned.header.data_offset :]


def mapping_of(view: NDArray[np.uint8]) -> SegmentMapping:
    address = view.__array_interface__["data"][0]
    (found,) = [one for one in measure(os.getpid()).segments if one.start <= address < one.stop]
    return found


def write_one_page_of_each_range(data: NDArray[np.uint8]) -> None:
    data[::HUGE_PAGE_NBYTES] = 1


TOUCHES: dict[str, Touch] = {
    "all": lambda data: data[::PAGE].sum(),
    "nothing": lambda data: None,
    "one byte": lambda data: data[SIZE // 2],
    "some at random": lambda data: [data[at] for at in np.random.default_rng(0).integers(0, SIZE, 12)],
    "the second half": lambda data: data[SIZE // 2 :: PAGE].sum(),
    "all, some written": lambda data: (data[::PAGE].sum(), write_one_page_of_each_range(data[: SIZE // 4])),
    "all written": lambda data: data.fill(1),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("aligned", [True, False])
def test_the_page_tables_of_a_segment_are_those_that_its_use_adds(
    owned: OwnedSegment, named: int, touch: str, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PIECE_NBYTES", SIZE // 4)  # so that there are several
    nbytes = owned.header.total_nbytes
    # mmap chooses an address at which no huge page fits.
    view = map_private(named, nbytes).bytes if aligned else np.frombuffer(_mmap(named, nbytes), np.uint8)
    segment_page_tables(os.getpid(), mapping_of(view))  # what measuring itself needs is there from now on
    before = measure(os.getpid()).page_tables

    TOUCHES[touch](view[owned.header.data_offset :])

    added = measure(os.getpid()).page_tables - before
    # At both ends, the tables of 2 MiB and of a GiB may have been there for a neighbour's sake.
    assert 0 <= segment_page_tables(os.getpid(), mapping_of(view)) - added <= 4 * PAGE


def _mmap(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_segment_is_not_its_only_users_memory_but_what_it_wrote_there_is(mapped: NDArray[np.uint8]) -> None:
    mapped[::PAGE].sum()
    measure(os.getpid())  # what measuring itself needs is there from now on
    before, written_before = measure(os.getpid()), mapping_of(mapped).written

    mapped[: 1024 * PAGE : PAGE] = 1

    after, mapping = measure(os.getpid()), mapping_of(mapped)
    own = psutil.Process().memory_full_info().uss  # which counts the segment, since nobody else maps it
    assert (written_before, mapping.written) == (0, 1024 * PAGE)
    assert after.private - before.private == pytest.approx(1024 * PAGE, rel=0.25)
    assert after.private + after.touched == pytest.approx(own, rel=0.05)
    assert after.touched >= mapping.touched > SIZE // 2
    assert after.proportional >= after.private


def test_a_segment_is_known_after_its_name_is_gone(owned: OwnedSegment, mapped: NDArray[np.uint8]) -> None:
    owned.unlink()
    mapped[::PAGE].sum()
    mapping = mapping_of(mapped)
    status = os.fstat(owned.fd)
    assert (mapping.device, mapping.inode) == (status.st_dev, status.st_ino)
    assert mapping.touched == SIZE


def test_the_owners_own_view_is_not_its_memory_either(owned: OwnedSegment) -> None:
    (array,) = [column.values for column in owned.description.columns]
    before = measure(os.getpid())
    owned.array(array)[::PAGE].sum()
    after = measure(os.getpid())
    assert after.touched - before.touched == SIZE
    assert abs(after.private - before.private) < SIZE // 4


def test_pages_written_before_a_fork_are_private_to_neither(mapped: NDArray[np.uint8]) -> None:
    mapped[: SIZE // 2] = 1
    measure(os.getpid())
    before = measure(os.getpid()).private
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        (found,) = [one for one in measure(child).segments if one.written]
        assert found.written == SIZE // 2
        assert measure(child).private < SIZE // 4
        assert before - measure(os.getpid()).private > SIZE // 4
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_an_ended_process_is_no_zeros(tmp_path: Path) -> None:
    with Child.python("", folder=tmp_path) as child:
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(ProcessLookupError, match=f"process {child.pid} has ended"):
            measure(child.pid)
        child.wait()
        nothing = SegmentMapping(0, 0, 0, SIZE, touched=PAGE, written=0, written_share=0, huge=0)
        for look in (lambda: measure(child.pid), lambda: segment_page_tables(child.pid, nothing)):
            with pytest.raises(ProcessLookupError, match=f"process {child.pid} has ended"):
                look()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_users_process_is_refused() -> None:
    run_python(
        """
        import os, sys
        from shmserve_client.memory import measure

        os.setgid(65534)
        os.setuid(65534)
        try:
            measure(int(sys.argv[1]))
        except PermissionError:
            sys.exit()
        sys.exit("no error")
        """,
        os.getpid(),
    )


def test_other_files_are_not_taken_for_segments(shm_dir: Path, tmp_path: Path) -> None:
    nbytes = 8 << 20
    before = measure(os.getpid()).private
    views = []
    for path in (shm_dir / "shmserve-notes.bin", shm_dir / "shmserve-0-x-0123"):
        path.write_bytes(bytes(nbytes))
        views.append(np.memmap(path, np.uint8, mode="r+"))
        views[-1][:] = 1
        path.unlink()
    assert measure(os.getpid()).private - before >= 2 * nbytes
