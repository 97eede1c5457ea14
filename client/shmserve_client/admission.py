"""Judges whether a segment fits before any of it is loaded: into its file system, the machine, and the cgroup's limit.

Pages of a tmpfs are memory: they count against the size of the mount, against MemAvailable, and against the limit of
the cgroup that writes them. Exceeding one while loading may end in a signal; here it is an error with a remedy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import OutOfSharedMemoryError

__all__ = ["check_room", "file_system_of", "shortage"]

_MAX_RESERVE_NBYTES: Final = 256 << 20
_PROC: Final = Path("/proc")


@dataclass(frozen=True)
class _Room:
    """One limit that a segment has to stay under."""

    what: str
    capacity_nbytes: int
    free_nbytes: int
    remedy: str
    """What to do; "{size}" stands for the capacity that would do, as docker and mount write it."""

    @property
    def reserve_nbytes(self) -> int:
        """What a segment must leave free: DataLoader workers hand over their batches through the same memory."""
        return min(_MAX_RESERVE_NBYTES, self.capacity_nbytes // 8)

    @property
    def usable_nbytes(self) -> int:
        return self.free_nbytes - self.reserve_nbytes


def check_room(nbytes: int, shm_dir: str, *, loading: bool = False, proc: Path = _PROC) -> None:
    """Return when a segment that takes `nbytes` bytes of memory fits into `shm_dir` now.

    While it is `loading`, `nbytes` is what it still takes, and the reserve is no longer asked for: what others have
    taken of it since is no reason to stop.

    Raises:
        OutOfSharedMemoryError: it does not fit; the message names needed, free, the limit and the remedy.
    """
    room = _tightest(shm_dir, proc)
    if nbytes > (room.free_nbytes if loading else room.usable_nbytes):
        raise _shortage(nbytes, room, " more" if loading else "")


def shortage(nbytes: int, shm_dir: str, *, proc: Path = _PROC) -> OutOfSharedMemoryError:
    """Return the error for a segment that ran out of memory while loading, when it still needed `nbytes` bytes."""
    return _shortage(nbytes, _tightest(shm_dir, proc), " more")


def _shortage(nbytes: int, room: _Room, more: str = "") -> OutOfSharedMemoryError:
    wanted = room.capacity_nbytes - room.free_nbytes + nbytes
    # The reserve grows with the capacity, at most to an eighth of it.
    wanted += min(_MAX_RESERVE_NBYTES, -(-wanted // 7))
    return OutOfSharedMemoryError(
        f"the segment needs {_human(nbytes)}{more}, but {room.what} has {_human(room.free_nbytes)} free, "
        f"of which {_human(room.reserve_nbytes)} are kept for DataLoader batches: "
        + room.remedy.replace("{size}", _option_size(wanted))
    )


def _tightest(shm_dir: str, proc: Path) -> _Room:
    return min(_rooms(shm_dir, proc), key=lambda room: room.usable_nbytes)


def file_system_of(directory: str, *, proc: Path = _PROC) -> str:
    """Return the kind of the file system that holds the directory, such as "tmpfs"."""
    return _mount_of(directory, _mounts(proc)).kind


def _rooms(shm_dir: str, proc: Path) -> Iterator[_Room]:
    mounts = _mounts(proc)
    mount = _mount_of(shm_dir, mounts)
    status = os.statvfs(shm_dir)
    capacity, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    where = f"{mount.point} ({mount.kind}, {_human(capacity)})"
    if mount.kind != "tmpfs":
        yield _Room(where, capacity, free, "free some of it, or choose another directory with --shm-dir")
        return
    if capacity:  # a tmpfs mounted with size=0 has no limit, and says 0
        remedy = (
            "enlarge it (docker: --shm-size={size} or --ipc=host; host: mount -o remount,size={size} "
            f"{mount.point}) or choose another with --shm-dir"
        )
        yield _Room(where, capacity, free, remedy)
    memory = _meminfo(proc)
    total = memory["MemTotal"]
    remedy = "free memory, or use a machine with {size} or more"
    yield _Room(f"this machine ({_human(total)} of memory)", total, memory["MemAvailable"], remedy)
    yield from _cgroup_rooms(proc, mounts)


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (proc / "meminfo").read_text("ascii").splitlines()
    return {key: int(rest.split()[0]) << 10 for key, _, rest in (line.partition(":") for line in lines)}


@dataclass(frozen=True)
class _Mount:
    root: str
    point: str
    kind: str
    options: frozenset[str]


def _mounts(proc: Path) -> list[_Mount]:
    """Return what is mounted, in the order of mounting; format: proc_pid_mountinfo(5)."""
    found = []
    for line in (proc / "self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        root, point = (
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text) for text in left.split(" ")[3:5]
        )
        kind, _, options = right.split(" ", 2)
        found.append(_Mount(root, point, kind, frozenset(options.split(","))))
    return found


def _mount_of(directory: str, mounts: list[_Mount]) -> _Mount:
    """Return the mount that holds the directory: the deepest, and of several on one point the last."""
    path = os.path.realpath(directory)
    holding = [mount for mount in mounts if path == mount.point or path.startswith(mount.point.rstrip("/") + "/")]
    return max(reversed(holding), key=lambda mount: len(mount.point))


@dataclass(frozen=True)
class _Controller:
    """The files of a memory cgroup in one version of the interface."""

    limit: str
    usage: str
    inactive_file: str


_V1: Final = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _Controller("memory.max", "memory.current", "inactive_file")
_UNLIMITED_NBYTES: Final = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size below 2^63."""


def _cgroup_rooms(proc: Path, mounts: list[_Mount]) -> Iterator[_Room]:
    """Yield each memory limit above this process: its own cgroup's and those of all parents that can be seen."""
    for line in (proc / "self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found = [mount for mount in mounts if mount.kind == "cgroup2"]
            files = _V2
        elif "memory" in controllers.split(","):
            found = [mount for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options]
            files = _V1
        else:
            continue
        if found:
            mount = found[-1]
            # A container sees its own cgroup mounted as the root, under whatever path the host has for it.
            below = os.path.relpath(path, mount.root)
            top = Path(mount.point)
            own = top if below == ".." or below.startswith("../") else Path(os.path.normpath(top / below))
            for directory in (own, *own.parents):
                if directory == top or top in directory.parents:
                    yield from _cgroup_room(directory, files)


def _cgroup_room(directory: Path, files: _Controller) -> Iterator[_Room]:
    try:
        limit_text = (directory / files.limit).read_text("ascii").strip()
        usage = int((directory / files.usage).read_text("ascii"))
        stat_lines = (directory / "memory.stat").read_text("ascii").splitlines()
    except FileNotFoundError:  # the root has no limit, and a controller need not be enabled below it
        return
    if limit_text == "max" or int(limit_text) >= _UNLIMITED_NBYTES:
        return
    limit = int(limit_text)
    # Cached file pages are given back when memory runs short; they count as used until then.
    reclaimable = sum(int(line.split()[1]) for line in stat_lines if line.split()[0] == files.inactive_file)
    remedy = "raise the limit to {size} (docker: --memory; Kubernetes: resources.limits.memory; Slurm: --mem)"
    what = f"the cgroup's memory limit of {_human(limit)} ({directory / files.limit})"
    yield _Room(what, limit, max(0, limit - usage + reclaimable), remedy)


def _human(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / (1 << 10):.1f} KiB"
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / (1 << 30):.1f} GiB"


def _option_size(nbytes: int) -> str:
    if nbytes <= 1 << 30:
        return f"{-(-nbytes // (1 << 20))}m"
    return f"{-(-nbytes // (1 << 30))}g"
