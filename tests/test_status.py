"""`shmserve status` with real processes attached: what it says of their memory, and what it cannot say."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.processes import Child, Daemon, run_cli, run_python, wait_until

Serve = Callable[..., Daemon]

PAGE = mmap.PAGESIZE
SIZE = 16 << 20
USE = """
    import mmap, os, sys, time
    from shmserve_client.connection import Connection
    from shmserve_client.protocol import Attach
    from shmserve_client.segment import Segment

    endpoint, written_pages, children = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Connection(endpoint, 10.0) as connection:
        attached = connection.request(Attach("data"))
    segment = Segment.attach(attached.path, attached.nonce)
    data = segment.array(segment.description.columns[0].values).reshape(-1)
    for _ in range(children):
        if os.fork() == 0:
            break
    else:
        data[: written_pages * mmap.PAGESIZE : mmap.PAGESIZE] = 1
    data[:: mmap.PAGESIZE].sum()
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece
    time.sleep(60)
"""
"""A process without torch that touches all, writes to some pages, and has forked children that only read."""


@pytest.fixture
def daemon(serve: Serve, tmp_path: Path) -> Daemon:
    np.save(tmp_path / "data.npy", np.ones((SIZE // 1024, 1024), np.uint8))
    return serve("--data", tmp_path / "data.npy")


@contextmanager
def using(daemon: Daemon, folder: Path, *, written: int = 0, children: int = 0, **env: str) -> Iterator[Child]:
    with Child.python(USE, daemon.endpoint, written, children, folder=folder, env=env) as child:
        wait_until(lambda: child.stdout.count("\n") == 1 + children, 30, "the processes being attached")
        yield child


def measured(*args: object) -> dict[str, Any]:
    done = run_cli("status", "data", "--json", *args)
    assert done.returncode == 0, done.stderr
    (dataset,) = json.loads(done.stdout)["datasets"]
    return dataset


@pytest.mark.promise("F8")
def test_pages_written_in_place_are_counted_and_their_process_is_advised(daemon: Daemon, tmp_path: Path) -> None:
    with using(daemon, tmp_path) as reader, using(daemon, tmp_path, written=5) as writer:
        written = {process["pid"]: process["written_nbytes"] for process in measured()["processes"]}
        text = run_cli("status").stdout
    assert written == {reader.pid: 0, writer.pid: 5 * PAGE}
    (note,) = re.findall(r"^  note      (.*)$", text, re.MULTILINE)
    assert note.startswith(f"pid {writer.pid} wrote to samples in place")
    assert "20.0 KiB" in note
    assert "copy=True" in note


@pytest.mark.promise("F8")
def test_the_only_process_does_not_own_the_segment(daemon: Daemon, tmp_path: Path) -> None:
    with using(daemon, tmp_path) as child:
        uss = psutil.Process(child.pid).memory_full_info().uss
        (process,) = measured()["processes"]
    assert process["private_nbytes"] + process["touched_nbytes"] == pytest.approx(uss, rel=0.05)
    assert process["touched_nbytes"] == SIZE
    assert 0 < process["segment_page_tables_nbytes"] < process["page_tables_nbytes"]


@pytest.mark.promise("F8")
def test_the_totals_add_up(daemon: Daemon, tmp_path: Path) -> None:
    with using(daemon, tmp_path), using(daemon, tmp_path):
        dataset = measured()
    own = sum(process["proportional_nbytes"] + process["page_tables_nbytes"] for process in dataset["processes"])
    assert all(process["proportional_nbytes"] > process["private_nbytes"] for process in dataset["processes"])
    assert len(dataset["processes"]) == 2
    assert dataset["total_nbytes"] == dataset["segment_nbytes"] + own
    assert dataset["copied_nbytes"] == 2 * dataset["segment_nbytes"] + own
    assert dataset["unmeasured"] == []


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"])
def test_ranks_and_their_workers_are_told_apart(daemon: Daemon, tmp_path: Path, variable: str) -> None:
    with using(daemon, tmp_path, children=2, **{variable: "3"}) as rank, using(daemon, tmp_path) as other:
        found = {process["pid"]: (process["rank"], process["worker"]) for process in measured()["processes"]}
        workers = {int(pid) for pid in rank.stdout.split()} - {rank.pid}
    assert found == {rank.pid: (3, False), other.pid: (None, False), **dict.fromkeys(workers, (3, True))}


def test_the_text_is_a_table(daemon: Daemon, tmp_path: Path) -> None:
    with using(daemon, tmp_path, children=1, RANK="0") as rank, using(daemon, tmp_path) as other:
        worker = ({int(pid) for pid in rank.stdout.split()} - {rank.pid}).pop()
        text = run_cli("status").stdout
    lines = text[text.index("  attached") :].splitlines()
    assert lines[0] == "  attached  3 processes"
    assert re.split(r"  +", lines[1].strip()) == [
        *("pid", "rank", "private", "page tables", "for the segment", "written in place")
    ]
    assert len({len(line) for line in lines[1:5]}) == 1, "the columns are aligned"
    figures = r" +[\d.]+ [KM]iB +[\d.]+ KiB +[\d.]+ KiB +0 bytes"
    for line, (pid, who) in zip(
        lines[2:5], sorted([(rank.pid, "0"), (worker, "0 worker"), (other.pid, "-")]), strict=True
    ):
        assert re.fullmatch(rf"    {pid} +{who}{figures}", line)
    size = r"[\d.]+ [KMG]iB"
    assert re.fullmatch(
        rf"  memory    {size}: {size} once, {size} private, {size} shared by forks and of libraries, "
        rf"{size} of page tables; "
        rf"{size} with a copy in each of the 3 processes",
        lines[5],
    )


def test_without_processes_there_is_nothing_to_measure(daemon: Daemon) -> None:
    dataset = measured()
    assert (dataset["processes"], dataset["unmeasured"]) == ([], [])
    assert (dataset["total_nbytes"], dataset["copied_nbytes"]) == (dataset["segment_nbytes"], 0)
    assert "memory  " not in run_cli("status").stdout


def test_processes_of_another_pid_namespace_are_said(daemon: Daemon, tmp_path: Path) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("pid namespaces are not permitted here")
    with using(daemon, tmp_path) as here, Child([*unshare, *here.argv], folder=tmp_path) as inside:
        wait_until(lambda: inside.stdout, 30, "the process being attached")
        dataset = measured()
        text = run_cli("status").stdout
        inside.kill()  # unshare waits for its child whatever else it is sent
    assert [process["pid"] for process in dataset["processes"]] == [here.pid]
    pid = int(inside.stdout)
    assert dataset["unmeasured"] == [{"reason": "in other pid namespaces", "pids": [pid], "processes": 1}]
    assert f"  unknown   1 process (pid {pid}), not measured: in other pid namespaces\n" in text
    assert "attached  2 processes\n" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_processes_of_another_user_are_said(serve: Serve, runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.ones((16, 1024), np.uint8))
    daemon = serve("--data", tmp_path / "data.npy", "--group", "65534")
    for folder in (runtime_dir, shm_dir):
        folder.chmod(0o711)
    with using(daemon, tmp_path) as child:
        done = run_python(
            """
            import os, sys
            from shmserve.cli import cli

            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            cli(["status", "--json", "--endpoint", sys.argv[1]])
            """,
            daemon.endpoint,
        )
    (dataset,) = json.loads(done.stdout)["datasets"]
    assert dataset["processes"] == []
    assert dataset["unmeasured"] == [{"reason": "not readable by this user", "pids": [child.pid], "processes": 1}]


def test_a_segment_that_cannot_be_opened_leaves_what_the_daemon_counted(daemon: Daemon, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may have another mount on the segments' directory")
    (segment,) = daemon.segments()
    program = "mount -t tmpfs none $0 && exec $1 -m shmserve status data --json"
    with using(daemon, tmp_path) as child:
        argv = ["unshare", "--mount", "sh", "-c", program, str(daemon.shm_dir), sys.executable]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    (dataset,) = json.loads(done.stdout)["datasets"]
    (unmeasured,) = dataset["unmeasured"]
    assert (unmeasured["pids"], unmeasured["processes"]) == ([child.pid], 1)
    assert f"no segment at {segment}" in unmeasured["reason"]


def test_what_the_daemon_counts_is_there_as_well(daemon: Daemon, tmp_path: Path) -> None:
    with using(daemon, tmp_path) as child:
        dataset = measured()
    assert (dataset["attached_pids"], dataset["attached_elsewhere"]) == ([child.pid], 0)
    assert (dataset["state"], dataset["num_samples"]) == ("ready", SIZE // 1024)


def test_what_was_written_is_not_counted_on_top_of_a_copy(daemon: Daemon, tmp_path: Path) -> None:
    with using(daemon, tmp_path, written=SIZE // PAGE):
        dataset = measured()
    (process,) = dataset["processes"]
    assert process["written_nbytes"] == process["written_share_nbytes"] == SIZE
    assert dataset["copied_nbytes"] == dataset["total_nbytes"] - SIZE


def test_memory_that_forked_processes_share_is_in_the_total(daemon: Daemon, tmp_path: Path) -> None:
    heap = 64 << 20
    code = USE.replace(
        "    for _ in range(children)", f"    heap = bytearray(b'1') * {heap}\n    for _ in range(children)"
    )
    with Child.python(code, daemon.endpoint, 0, 2, folder=tmp_path) as child:
        wait_until(lambda: child.stdout.count("\n") == 3, 30, "the processes being attached")
        dataset = measured()
    assert sum(process["private_nbytes"] for process in dataset["processes"]) < heap
    assert dataset["segment_nbytes"] + heap < dataset["total_nbytes"] < dataset["segment_nbytes"] + 2 * heap


@pytest.mark.parametrize("rank", ["9" * 5000, "-1", "x", ""])
def test_a_rank_that_is_none_is_not_shown(daemon: Daemon, tmp_path: Path, rank: str) -> None:
    with using(daemon, tmp_path, RANK=rank):
        assert [process["rank"] for process in measured()["processes"]] == [None]


def test_a_reader_that_has_enough_ends_the_output(daemon: Daemon) -> None:
    done = subprocess.run("python -m shmserve status | true", shell=True, capture_output=True, text=True, check=False)
    assert "Broken pipe" not in done.stderr
