"""Admission against files as the kernel writes them, and against a real limit where a test may set one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve_client.admission import check_room, shortage
from shmserve_client.errors import OutOfSharedMemoryError
from tests.processes import run_python
from tests.segments import CHILD_ENV

MIB, GIB = 1 << 20, 1 << 30


class Machine:
    """A made-up /proc: where the shm directory is on, how much memory there is, which cgroups limit it."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.cgroups = folder / "cgroups"
        self.shm_dir = folder / "shm"
        for made in (self.proc / "self", self.cgroups, self.shm_dir):
            made.mkdir(parents=True)
        self.mounts = ["25 1 0:20 / / rw - ext4 /dev/vda rw", self.mount_line(self.shm_dir, "tmpfs", "rw")]
        self.set_memory(available=100 * GIB, total=128 * GIB)
        self.set_cgroup("0::/\n")

    def mount_line(self, point: Path, kind: str, options: str, root: str = "/") -> str:
        return f"30 25 0:27 {root} {point} rw,relatime shared:1 master:2 - {kind} {kind} {options}"

    def set_memory(self, *, available: int, total: int) -> None:
        text = f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\nHugePages_Total: 0\n"
        (self.proc / "meminfo").write_text(text)

    def set_cgroup(self, text: str) -> None:
        (self.proc / "self/cgroup").write_text(text)
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")

    def limit_v2(self, path: str, limit: int | str, usage: int, inactive_file: int = 0) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 5\nfile 6\ninactive_file {inactive_file}\n")

    def limit_v1(self, path: str, limit: int, usage: int, inactive_file: int = 0) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive_file}\n")

    def check(self, nbytes: int) -> None:
        check_room(nbytes, str(self.shm_dir), proc=self.proc)

    def refusal(self, nbytes: int) -> str:
        with pytest.raises(OutOfSharedMemoryError) as caught:
            self.check(nbytes)
        return str(caught.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)

    class Statvfs:
        f_frsize = 4096
        f_blocks = 200 * GIB // 4096
        f_bavail = 200 * GIB // 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Statvfs)
    made.statvfs = Statvfs  # type: ignore[attr-defined]
    return made


def set_tmpfs(machine: Machine, *, capacity: int, free: int) -> None:
    machine.statvfs.f_blocks, machine.statvfs.f_bavail = capacity // 4096, free // 4096  # type: ignore[attr-defined]


def test_what_fits_passes(machine):
    machine.check(GIB)


def test_a_small_tmpfs_names_needed_free_mount_and_remedy(machine):
    set_tmpfs(machine, capacity=64 * MIB, free=60 * MIB)
    assert machine.refusal(4 * GIB) == (
        f"the segment needs 4.0 GiB, but {machine.shm_dir} (tmpfs, 64.0 MiB) has 60.0 MiB free, of which 8.0 MiB are "
        "kept for DataLoader batches: enlarge it (docker: --shm-size=5g or --ipc=host; host: mount -o remount,size=5g "
        f"{machine.shm_dir}) or choose another with --shm-dir"
    )
    machine.check(52 * MIB)
    machine.refusal(52 * MIB + 1)


@pytest.mark.parametrize("needed", [30 * MIB, 900 * MIB, 3 * GIB, 500 * GIB])
def test_the_size_it_proposes_is_enough(machine, needed):
    machine.set_memory(available=10_000 * GIB, total=10_000 * GIB)
    used = 10 * MIB
    set_tmpfs(machine, capacity=11 * MIB, free=MIB)
    proposed = machine.refusal(needed).partition("--shm-size=")[2].partition(" ")[0]
    capacity = int(proposed[:-1]) * {"m": MIB, "g": GIB}[proposed[-1]]
    set_tmpfs(machine, capacity=capacity, free=capacity - used)
    machine.check(needed)


def test_a_tmpfs_without_a_limit_is_limited_by_memory(machine):
    set_tmpfs(machine, capacity=0, free=0)
    machine.check(GIB)
    machine.refusal(101 * GIB)


def test_the_machines_memory_counts(machine):
    machine.set_memory(available=2 * GIB, total=16 * GIB)
    message = machine.refusal(3 * GIB)
    assert message.startswith(
        "the segment needs 3.0 GiB, but this machine (16.0 GiB of memory) has 2.0 GiB free, of which 256.0 MiB are kept"
    )
    machine.check(GIB)


def test_a_directory_on_disk_takes_no_memory(machine):
    machine.mounts[1] = machine.mount_line(machine.shm_dir, "ext4", "rw")
    machine.set_cgroup("0::/\n")
    machine.set_memory(available=MIB, total=GIB)
    machine.check(GIB)


def test_the_last_of_the_deepest_mounts_holds_the_directory(machine):
    machine.mounts.append(machine.mount_line(machine.shm_dir, "xfs", "rw"))
    machine.mounts.append(machine.mount_line(machine.shm_dir.parent, "tmpfs", "rw"))
    machine.set_cgroup("0::/\n")
    set_tmpfs(machine, capacity=MIB, free=MIB)
    assert "(xfs, 1.0 MiB)" in machine.refusal(GIB)


def test_mount_points_with_blanks_are_read(machine):
    machine.shm_dir = machine.shm_dir / "a b"
    machine.shm_dir.mkdir()
    machine.mounts.append(machine.mount_line(machine.shm_dir, "tmpfs", "rw").replace("a b", "a\\040b"))
    machine.set_cgroup("0::/\n")
    set_tmpfs(machine, capacity=MIB, free=MIB)
    assert f"{machine.shm_dir} (tmpfs, 1.0 MiB)" in machine.refusal(GIB)


class TestCgroupV2:
    @pytest.fixture(autouse=True)
    def mount(self, machine: Machine) -> None:
        machine.mounts.append(machine.mount_line(machine.cgroups, "cgroup2", "rw,nsdelegate"))
        machine.set_cgroup("0::/job.slice/step\n")

    def test_its_own_limit_counts(self, machine):
        machine.limit_v2("job.slice/step", 4 * GIB, 3 * GIB)
        file = machine.cgroups / "job.slice/step/memory.max"
        assert machine.refusal(GIB) == (
            f"the segment needs 1.0 GiB, but the cgroup's memory limit of 4.0 GiB ({file}) has 1.0 GiB free, of which "
            "256.0 MiB are kept for DataLoader batches: raise the limit to 5g (docker: --memory; Kubernetes: "
            "resources.limits.memory; Slurm: --mem)"
        )
        machine.check(GIB // 2)

    def test_a_parents_limit_counts(self, machine):
        machine.limit_v2("job.slice/step", "max", 3 * GIB)
        machine.limit_v2("job.slice", 4 * GIB, 3 * GIB)
        assert "job.slice/memory.max" in machine.refusal(GIB)

    def test_file_pages_that_can_be_given_back_do_not(self, machine):
        machine.limit_v2("job.slice/step", 4 * GIB, 4 * GIB, inactive_file=2 * GIB)
        machine.check(GIB)
        machine.refusal(2 * GIB)

    def test_no_limit_is_no_limit(self, machine):
        machine.limit_v2("job.slice/step", "max", 3 * GIB)
        machine.check(10 * GIB)


class TestCgroupV1:
    @pytest.fixture(autouse=True)
    def mount(self, machine: Machine) -> None:
        machine.mounts.append(machine.mount_line(machine.cgroups, "cgroup", "rw,memory"))
        machine.mounts.append(machine.mount_line(machine.cgroups.parent, "cgroup", "rw,cpu"))
        machine.set_cgroup("9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:/job/step\n0::/\n")

    def test_its_own_limit_counts(self, machine):
        machine.limit_v1("job/step", 4 * GIB, 3 * GIB, inactive_file=MIB)
        assert "job/step/memory.limit_in_bytes" in machine.refusal(GIB)
        machine.check(GIB // 2)

    def test_a_parents_limit_counts(self, machine):
        machine.limit_v1("job/step", 9223372036854771712, 3 * GIB)
        machine.limit_v1("job", 4 * GIB, 3 * GIB)
        assert "job/memory.limit_in_bytes" in machine.refusal(GIB)

    def test_no_limit_is_no_limit(self, machine):
        machine.limit_v1("job/step", 9223372036854771712, 3 * GIB)
        machine.check(10 * GIB)


@pytest.mark.parametrize(("path", "root"), [("/docker/abc", "/docker/abc"), ("/../../docker/abc", "/"), ("/", "/")])
def test_a_container_sees_its_own_cgroup_as_the_root(machine, path, root):
    machine.mounts.append(machine.mount_line(machine.cgroups, "cgroup2", "rw", root))
    machine.set_cgroup(f"0::{path}\n")
    machine.limit_v2(".", 2 * GIB, GIB)
    assert f"{machine.cgroups}/memory.max" in machine.refusal(GIB)


def test_a_shortage_while_loading_is_told_as_one_before(machine):
    set_tmpfs(machine, capacity=64 * MIB, free=60 * MIB)
    error = shortage(4 * GIB, str(machine.shm_dir), proc=machine.proc)
    assert str(error) == machine.refusal(4 * GIB).replace("4.0 GiB", "4.0 GiB more")


@pytest.fixture
def real_limit() -> Iterator[Path]:
    """A real memory cgroup below this process's own with a limit of 64 MiB, to which a test may add processes."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    v1 = "memory" in own
    parent = Path("/sys/fs/cgroup/memory" + own["memory"]) if v1 else Path("/sys/fs/cgroup" + own[""])
    group = parent / f"shmserve-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(64 * MIB))
    except OSError as error:
        pytest.skip(f"no memory limit can be set here: {error}")
    else:
        yield group
    finally:
        group.rmdir()


@pytest.mark.promise("F1")
def test_a_real_limit_of_the_cgroup_is_seen(real_limit, shm_dir):
    done = run_python(
        """
        import os, sys
        from pathlib import Path
        Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
        from shmserve_client.errors import OutOfSharedMemoryError
        from tests.segments import Repeated, describe_tokens, write_pieces
        try:
            write_pieces(sys.argv[2], describe_tokens("uint8", 100 << 20), [[Repeated(100 << 20)]])
        except OutOfSharedMemoryError as error:
            print(error)
        """,
        real_limit,
        shm_dir,
        env=CHILD_ENV,
    )
    assert f"the segment needs 100.0 MiB, but the cgroup's memory limit of 64.0 MiB ({real_limit}" in done.stdout
