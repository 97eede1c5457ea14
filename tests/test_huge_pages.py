"""Huge pages as clients see them: on each kind of tmpfs, after fork and adoption, and where the kernel gives none."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmserve_client import owned
from shmserve_client.mapping import HUGE_PAGE_NBYTES, Mapping, map_shared
from shmserve_client.protocol import DatasetStatus
from tests import segments
from tests.corpora import write_sparse, write_tokens
from tests.processes import Daemon, run_python

Serve = Callable[..., Daemon]

WHOLE_NBYTES = 8 * HUGE_PAGE_NBYTES
"""What of the corpus fills huge pages."""
NBYTES = WHOLE_NBYTES + 10_000
PR_SET_THP_DISABLE = 41

CLIENT = """
    import json, os, sys, zlib

    from shmserve_client.connection import Connection
    from shmserve_client.endpoint import find_endpoint
    from shmserve_client.protocol import Attach
    from shmserve_client.segment import Segment
    from tests.segments import smaps

    def page_tables():
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPTE:"))

    with Connection(find_endpoint(None), 10.0) as connection:
        attached = connection.request(Attach())
    segment = Segment.attach(attached.path, attached.nonce)
    values = segment.description.columns[0].values
    tokens = segment.array(values)

    def read_all():
        before = page_tables()
        seen = {"crc": zlib.crc32(tokens), "page_table_nbytes": page_tables() - before}
        mapped_at = tokens.ctypes.data - values.offset
        print(json.dumps({**seen, "huge_nbytes": smaps(mapped_at)["ShmemPmdMapped"]}), flush=True)

    read_all()
    if os.fork() == 0:
        read_all()
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@dataclass(frozen=True)
class Seen:
    """What a process found when it had read the whole corpus."""

    crc: int
    huge_nbytes: int
    page_table_nbytes: int


def read_by_client_and_fork() -> list[Seen]:
    """The same from a client and from a process that it forked when it had read all."""
    lines = run_python(CLIENT, env=segments.CHILD_ENV).stdout.splitlines()
    seen = [Seen(**json.loads(line)) for line in lines]
    assert len(seen) == 2
    return seen


@contextmanager
def huge_pages_switched_off() -> Iterator[None]:
    """Processes that start meanwhile, and this one, get no huge page: collapse is refused, and none is mapped."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _kernel_gives_huge_pages() -> None:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o400)
    try:
        os.ftruncate(fd, HUGE_PAGE_NBYTES)
        os.pwrite(fd, b"\0", 0)
        if refusal := map_shared(fd, HUGE_PAGE_NBYTES).collapse(0):
            pytest.skip(f"the kernel refuses MADV_COLLAPSE: {os.strerror(refusal)}")
    finally:
        os.close(fd)


@pytest.fixture
def shm_dir(request: pytest.FixtureRequest, shm_dir: Path) -> Iterator[Path]:
    """The usual directory; with a parameter, a tmpfs that is mounted on it with these options."""
    options = getattr(request, "param", "")
    if not options:
        yield shm_dir
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", shm_dir], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield shm_dir
    finally:
        subprocess.run(["umount", "--lazy", shm_dir], check=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "corpus.bin", NBYTES // 2)


def only(daemon: Daemon) -> DatasetStatus:
    (status,) = daemon.status().datasets
    return status


def huge_page_notes(daemon: Daemon) -> list[str]:
    return [note for note in only(daemon).notes if "4 KiB pages" in note]


ON_EVERY_TMPFS = pytest.mark.parametrize(
    "shm_dir",
    ["", *(f"size=64m,huge={huge}" for huge in ("never", "advise", "within_size", "always"))],
    ids=["stock", "never", "advise", "within_size", "always"],
    indirect=True,
)


@ON_EVERY_TMPFS
def test_clients_and_their_forks_see_all_whole_windows_on_huge_pages(serve: Serve, corpus: Path) -> None:
    daemon = serve("--data", corpus)
    assert only(daemon).huge_nbytes >= WHOLE_NBYTES
    assert huge_page_notes(daemon) == []
    assert "huge pages) on" in daemon.stdout
    for seen in read_by_client_and_fork():
        assert seen.crc == zlib.crc32(corpus.read_bytes())
        assert seen.huge_nbytes >= WHOLE_NBYTES


def test_they_are_adopted_with_the_segment(serve: Serve, corpus: Path) -> None:
    killed = serve("--data", corpus)
    killed.kill()
    daemon = serve("--data", corpus)
    assert only(daemon).adopted
    assert only(daemon).huge_nbytes == WHOLE_NBYTES
    for seen in read_by_client_and_fork():
        assert seen.crc == zlib.crc32(corpus.read_bytes())
        assert seen.huge_nbytes == WHOLE_NBYTES


def test_a_daemon_that_gets_none_serves_on_small_pages_and_says_why(serve: Serve, corpus: Path) -> None:
    with huge_pages_switched_off():
        daemon = serve("--data", corpus)
    assert only(daemon).huge_nbytes == 0
    (note,) = huge_page_notes(daemon)
    assert note.startswith(
        "16 MiB of the segment are on 4 KiB pages (the kernel says: Invalid argument), which cost each process 2 MiB "
        "of page tables per GiB: start the daemon where huge pages are not switched off"
    )
    assert note in daemon.stderr
    assert "4 KiB pages) on" in daemon.stdout
    for seen in read_by_client_and_fork():
        assert seen.crc == zlib.crc32(corpus.read_bytes())
        assert seen.huge_nbytes == 0


def test_what_is_adopted_on_small_pages_can_be_loaded_again(serve: Serve, corpus: Path) -> None:
    with huge_pages_switched_off():
        serve("--data", corpus).kill()
    daemon = serve("--data", corpus)
    assert only(daemon).adopted
    (note,) = huge_page_notes(daemon)
    assert note.endswith("run shmserve stop and start, which loads it again and tells the reason if there still is one")


def test_a_client_for_which_they_are_switched_off_reads_the_same_through_small_ones(serve: Serve, corpus: Path) -> None:
    serve("--data", corpus)
    with huge_pages_switched_off():
        through_small = read_by_client_and_fork()
    for seen in through_small:
        assert seen.crc == zlib.crc32(corpus.read_bytes())
        assert seen.huge_nbytes == 0


def test_page_tables_stay_below_64_kib_per_gib(serve: Serve, tmp_path: Path) -> None:
    if psutil.virtual_memory().available < 4 << 30:
        pytest.skip("needs 4 GiB of free memory")
    serve("--data", write_sparse(tmp_path / "corpus.bin", 1 << 30))
    for seen in read_by_client_and_fork():
        assert seen.page_table_nbytes <= 64 << 10
    with huge_pages_switched_off():
        through_small = read_by_client_and_fork()
    for seen in through_small:
        assert seen.page_table_nbytes >= 2 << 20


def test_a_window_that_somebody_else_holds_is_asked_for_again(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()
    real = Mapping.collapse

    def held_at_first(self: Mapping, start: int) -> int:
        if start in asked:
            return real(self, start)
        asked.add(start)
        return errno.EAGAIN

    monkeypatch.setattr(Mapping, "collapse", held_at_first)
    with segments.published(segments.write_tokens(shm_dir, np.zeros(WHOLE_NBYTES, np.uint8))) as segment:
        assert segment.huge_nbytes == WHOLE_NBYTES
        assert segment.huge_refusal == ""


def test_a_machine_that_denies_them_is_named_as_the_cause(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because the setting is the whole machine's."""
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise never [deny] force\n")
    monkeypatch.setattr(owned, "_SHMEM_ENABLED", setting)
    monkeypatch.setattr(Mapping, "collapse", lambda self, start: errno.EINVAL)
    with segments.published(segments.write_tokens(shm_dir, np.zeros(WHOLE_NBYTES, np.uint8))) as segment:
        if segment.huge_nbytes:
            pytest.skip("this mount gives huge pages without being asked")
        assert f": allow them (echo never > {setting} " in segment.huge_refusal
