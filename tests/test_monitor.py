"""`MemoryMonitor` and `shmserve monitor`: what the rows say, what they may cost, and how both end."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shmserve.cli.monitor import _Served
from shmserve_client import ConfigError, MemoryMonitor, monitor
from shmserve_client.memory import measure
from shmserve_client.monitor import COLUMNS, MemorySampler, is_running, process_tree, running_process
from tests.corpora import RAGGED
from tests.processes import Child, Daemon, run_cli, run_python, wait_until

Serve = Callable[..., Daemon]
ATTACH = """
    import sys, time
    from shmserve_client.connection import Connection
    from shmserve_client.protocol import Attach
    from shmserve_client.segment import Segment

    with Connection(sys.argv[1], 10.0) as connection:
        attached = connection.request(Attach("docs"))
    segment = Segment.attach(attached.path, attached.nonce)
    print("attached", flush=True)
    time.sleep(60)
"""
FORK_TWICE = """
    import os, time

    os.fork()
    os.fork()
    print("running", flush=True)
    time.sleep(60)
"""


def rows_of(path: Path | str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def command(*args: object) -> list[object]:
    return [sys.executable, "-m", "shmserve", "monitor", *args]


class Clock:
    """Time that passes only where a test says what takes how long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, node_s: float, processes_s: float) -> None:
        self.now_s = 100.0
        self.spent_s = 0.0
        self.processes_s = processes_s
        self.node_s = node_s
        monkeypatch.setattr(monitor, "_clock", lambda: self.now_s)
        monkeypatch.setattr(monitor.psutil, "virtual_memory", self.virtual_memory)

    def spend(self, seconds: float) -> None:
        self.now_s += seconds
        self.spent_s += seconds

    def pids(self) -> list[int]:
        self.spend(self.processes_s)
        return []

    def virtual_memory(self) -> SimpleNamespace:
        self.spend(self.node_s)
        return SimpleNamespace(percent=1.0, free=2, available=3, used=4, shared=5)


# What it says


def test_the_columns_begin_with_those_of_fastai_users(tmp_path: Path) -> None:
    with MemoryMonitor(tmp_path / "m.csv", interval=None):
        pass
    header = "index,mem_percent,mem_free,mem_available,mem_used,shm,uss,page_tables,processes,seconds\n"
    assert (tmp_path / "m.csv").read_text().startswith(header)
    assert ",".join(COLUMNS) + "\n" == header


def test_a_row_is_what_the_kernel_says(tmp_path: Path) -> None:
    with Child.python(FORK_TWICE, folder=tmp_path) as tree:
        wait_until(lambda: tree.stdout.count("running") == 4, what="the tree")
        with MemoryMonitor(tmp_path / "m.csv", pid=tree.pid, interval=None) as monitor:
            monitor()
            node = psutil.virtual_memory()
        pids = [tree.pid, *(child.pid for child in psutil.Process(tree.pid).children(recursive=True))]
        expected = [measure(pid) for pid in pids]
    first, row = rows_of(tmp_path / "m.csv")
    near = {"mem_free": node.free, "mem_available": node.available, "mem_used": node.used, "shm": node.shared}
    for column, value in near.items():
        assert int(row[column]) == pytest.approx(value, abs=1 << 30)
    assert (first["index"], row["index"], row["processes"]) == ("0", "1", "4")
    assert int(row["uss"]) == pytest.approx(sum(memory.private for memory in expected), rel=0.05)
    assert int(row["page_tables"]) == sum(memory.page_tables for memory in expected)
    assert 0 < float(row["mem_percent"]) < 100
    assert 0 <= float(row["seconds"]) < 5


def test_the_tree_is_by_default_that_of_this_process(tmp_path: Path) -> None:
    with MemoryMonitor(tmp_path / "m.csv", interval=None):
        pass
    (row,) = rows_of(tmp_path / "m.csv")
    assert int(row["processes"]) == 1 + len(psutil.Process().children(recursive=True))


# What it costs


def test_a_loop_pays_less_than_one_percent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch, node_s=0.001, processes_s=0.02)
    with FileIO(tmp_path / "m.csv", "w") as file:
        sampler = MemorySampler(file, clock.pids, 0.004, first_look_s=0.02)
        for _ in range(20_000):
            clock.now_s += 0.002  # the step of the loop
            sampler.write_row()
            assert clock.spent_s < 0.008 * (clock.now_s - 100.0) + 0.001
    elapsed_s = clock.now_s - 100.0
    written = rows_of(tmp_path / "m.csv")
    with_processes = [row for row in written if row["processes"]]
    assert sampler.cost_s == pytest.approx(clock.spent_s)
    assert len(written) == pytest.approx(elapsed_s / 0.25, rel=0.02)
    assert len(with_processes) == pytest.approx(elapsed_s / 5, abs=1.5)
    assert sampler.rows == len(written)


def test_a_call_that_it_cannot_afford_counts_but_writes_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch, node_s=0.001, processes_s=0.01)
    with FileIO(tmp_path / "m.csv", "w") as file:
        sampler = MemorySampler(file, clock.pids, 0.1)
        sampler.write_row()
        sampler.write_row()
        clock.now_s += 0.01
        sampler.write_row()
        clock.now_s += 0.1
        sampler.write_row()
    assert (tmp_path / "m.csv").read_text().splitlines()[1:] == [
        "0,1.0,2,3,4,5,0,0,0,0.000",
        "2,1.0,2,3,4,5,,,,0.021",
        "3,1.0,2,3,4,5,0,0,0,0.122",
    ]


def test_writing_a_row_is_a_part_of_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, node_s=0.001, processes_s=0.0)

    class Slow(FileIO):
        def write(self, content: Any) -> int:
            clock.now_s += 0.1
            return super().write(content)

    with Slow(os.devnull, "w") as file:
        sampler = MemorySampler(file, clock.pids, 0.1)
        for _ in range(20):
            sampler.write_row()
            clock.now_s += 0.1
    assert (sampler.rows, sampler.cost_s) == (2, pytest.approx(0.202))


# How it lives


def test_within_a_with_block_a_thread_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    with MemoryMonitor(path, interval=0.1):
        wait_until(lambda: len(rows_of(path)) >= 3, what="three rows")
        assert any("memory monitor" in thread.name for thread in threading.enumerate())
    assert not any("memory monitor" in thread.name for thread in threading.enumerate())
    indices = [int(row["index"]) for row in rows_of(path)]
    assert indices == sorted(set(indices))


def test_without_an_interval_only_calls_write(tmp_path: Path) -> None:
    with MemoryMonitor(tmp_path / "m.csv", interval=None) as monitor:
        assert not any("memory monitor" in thread.name for thread in threading.enumerate())
        monitor()
        assert len(rows_of(tmp_path / "m.csv")) == 1


def test_the_last_row_is_complete(tmp_path: Path) -> None:
    with MemoryMonitor(tmp_path / "m.csv", interval=None) as monitor:
        for _ in range(100):
            monitor()
    *_, last = rows_of(tmp_path / "m.csv")
    assert last["index"] == "100"
    assert int(last["processes"]) >= 1
    assert int(last["uss"]) > 0


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = """
        import os, sys
        from shmserve_client import MemoryMonitor

        with MemoryMonitor(sys.argv[1], interval=None) as monitor:
            child = os.fork()
            if child == 0:
                monitor()
                monitor.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            monitor()
    """
    with Child.python(code, tmp_path / "m.csv", folder=tmp_path) as parent:
        assert parent.wait() == 0, parent.describe()
    assert [row["index"] for row in rows_of(tmp_path / "m.csv")] == ["0", "1"]  # the last one is of close


def test_killed_it_leaves_whole_rows(tmp_path: Path) -> None:
    code = """
        import sys, time
        from shmserve_client import MemoryMonitor

        with MemoryMonitor(sys.argv[1], interval=0.1):
            time.sleep(60)
    """
    path = tmp_path / "m.csv"
    with Child.python(code, path, folder=tmp_path) as child:
        wait_until(lambda: path.exists() and path.read_text().count("\n") > 3, what="rows")
        child.kill()
    lines = path.read_text().splitlines(keepends=True)
    assert all(line.endswith("\n") and line.count(",") == len(COLUMNS) - 1 for line in lines)


def test_closed_twice_it_is_closed(tmp_path: Path) -> None:
    monitor = MemoryMonitor(tmp_path / "m.csv")
    monitor.close()
    monitor.close()
    with pytest.raises(ValueError, match=r"m\.csv' is closed"):
        monitor()
    with pytest.raises(ValueError, match=r"m\.csv' is closed"):
        monitor.__enter__()


def test_it_has_one_with_block(tmp_path: Path) -> None:
    with MemoryMonitor(tmp_path / "m.csv") as monitor:
        with pytest.raises(RuntimeError, match=r"m\.csv' has a with block already"):
            monitor.__enter__()
        assert sum("memory monitor" in thread.name for thread in threading.enumerate()) == 1


def test_on_a_full_disk_rows_are_whole_and_the_thread_goes_on(tmp_path: Path) -> None:
    code = """
        import resource, sys, time, warnings
        from pathlib import Path
        from shmserve_client import MemoryMonitor

        def limit(nbytes):
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

        path = Path(sys.argv[1])
        with warnings.catch_warnings(record=True) as caught, MemoryMonitor(path, interval=0.1) as monitor:
            warnings.simplefilter("always")
            limit(path.stat().st_size + 150)  # the second row fits in part
            while not caught:
                time.sleep(0.01)
            assert path.read_bytes().endswith(b"\\n"), path.read_bytes()
            try:
                while True:
                    monitor()
            except OSError as error:
                print(error)
            limit(resource.RLIM_INFINITY)
            nbytes = path.stat().st_size
            while path.stat().st_size < nbytes + 200:
                time.sleep(0.01)
        print(*(warning.message for warning in caught))
    """
    path = tmp_path / "m.csv"
    said = run_python(code, path).stdout.splitlines()
    assert said == [
        f"[Errno 28] No space left on device: '{path}'",
        f"the memory monitor leaves out rows: [Errno 28] No space left on device: '{path}'",
    ]
    assert {line.count(",") for line in path.read_text().splitlines()} == {len(COLUMNS) - 1}
    assert "\0" not in path.read_text()


def test_never_closed_it_warns(tmp_path: Path) -> None:
    monitor = MemoryMonitor(tmp_path / "m.csv")
    with pytest.warns(ResourceWarning, match=r"m\.csv' was never closed"):
        del monitor


def test_what_cannot_be_monitored_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no process {2**22 + 1} "):
        MemoryMonitor(tmp_path / "m.csv", pid=2**22 + 1)
    with pytest.raises(ConfigError, match="no process -1 "):
        MemoryMonitor(tmp_path / "m.csv", pid=-1)
    for interval in (0, 0.01, 86_401, math.inf, math.nan):
        with pytest.raises(ConfigError, match=rf"interval of {interval} seconds: give a number from 0.1 to 86400"):
            MemoryMonitor(tmp_path / "m.csv", interval=interval)
    assert not (tmp_path / "m.csv").exists()


def test_a_process_that_has_ended_is_none(tmp_path: Path) -> None:
    with Child.python("", folder=tmp_path) as ended:
        wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE, what="the end")
        with pytest.raises(ConfigError, match=f"no process {ended.pid} "):
            running_process(ended.pid)


def test_a_later_process_of_the_same_number_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = running_process(os.getpid())
    assert process_tree([process]) >= {os.getpid()}
    monkeypatch.setattr(process, "_ident", (os.getpid(), -1.0))  # it began at another time
    assert not is_running(process)
    assert process_tree([process]) == set()


# The command


def test_the_command_follows_processes_until_they_end(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    with Child.python(FORK_TWICE, folder=tmp_path) as tree:
        wait_until(lambda: tree.stdout.count("running") == 4, what="the tree")
        with Child(command(tree.pid, "--interval", 0.05, "--output", path), folder=tmp_path) as watching:
            wait_until(lambda: path.exists() and len(rows_of(path)) >= 3, 30, "three rows")
            tree.close()
            assert watching.wait() == 0, watching.describe()
    rows = rows_of(path)
    assert rows[0]["processes"] == "4"
    assert watching.stdout == ""
    assert re.fullmatch(rf"{len(rows)} rows, one took [1-9]\d* (us|ms) on average\n", watching.stderr)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_without_pids_it_follows_the_daemon_and_its_clients(
    serve: Serve, tmp_path: Path, signum: signal.Signals
) -> None:
    daemon = serve("--data", f"docs={RAGGED}")
    with Child(command("--interval", 0.01), folder=tmp_path) as watching:

        def counts() -> list[str]:
            rows = csv.DictReader(watching.stdout[: watching.stdout.rfind("\n")].splitlines())
            return [row["processes"] for row in rows if row["processes"]]

        wait_until(lambda: "1" in counts(), 30, "the daemon")
        with Child.python(ATTACH, daemon.endpoint, folder=tmp_path) as client:
            wait_until(lambda: client.stdout, 30, "the client")
            wait_until(lambda: "2" in counts(), 30, "the client being found")
        watching.send_signal(signum)
        assert watching.wait() == 0, watching.describe()
    assert " rows, one took " in watching.stderr


def test_a_daemon_that_hangs_hides_nobody(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", f"docs={RAGGED}")
    path = tmp_path / "m.csv"
    with Child(command("--interval", 0.01, "--output", path), folder=tmp_path):
        wait_until(lambda: path.exists() and rows_of(path), 30, "a row")
        with Child.python(ATTACH, daemon.endpoint, folder=tmp_path) as client:
            wait_until(lambda: client.stdout, 30, "the client")
            daemon.send_signal(signal.SIGSTOP)
            try:
                seen = len(rows_of(path))
                wait_until(lambda: "2" in [row["processes"] for row in rows_of(path)[seen:]], 5, "the client")
            finally:
                daemon.send_signal(signal.SIGCONT)


def test_daemons_are_asked_now_and_then(serve: Serve, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = serve("--data", f"docs={RAGGED}")
    served = _Served(None, None)
    assert served.pids() == {default.pid}
    embedded = serve("--data", f"own={RAGGED}", endpoint=f"ipc://{runtime_dir}/shmserve/e-0123456789abcdef.0.sock")
    default.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr(served, "_ask_again_s", 0.0)
        assert served.is_running()
        assert served.pids() == {default.pid, embedded.pid}
    finally:
        default.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("end", [Daemon.kill, lambda daemon: run_cli("stop", "--endpoint", daemon.endpoint)])
def test_it_stays_with_the_clients_of_a_daemon_that_has_ended(
    serve: Serve, tmp_path: Path, end: Callable[[Daemon], object]
) -> None:
    daemon = serve("--data", f"docs={RAGGED}")
    (segment,) = daemon.segments()
    with Child.python(ATTACH, daemon.endpoint, folder=tmp_path) as client:
        wait_until(lambda: client.stdout, 30, "the client")
        with Child(command("--interval", 0.01), folder=tmp_path) as watching:
            wait_until(lambda: watching.stdout.count("\n") > 1, 30, "a row")  # it knows the client by then
            end(daemon)
            seen = watching.stdout.count("\n")
            wait_until(lambda: watching.stdout.count("\n") > seen + 5, 30, "rows without the daemon")
            client.close()
            assert watching.wait() == 0, watching.describe()
    segment.unlink(missing_ok=True)


def test_the_command_refuses_what_does_not_run(runtime_dir: Path) -> None:
    missing = run_cli("monitor", 2**22 + 1)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == f"error: there is no process {2**22 + 1} to monitor: give the pid of one that runs\n"
    for interval in ("0.001", "inf", "nan"):
        refused = run_cli("monitor", "--interval", interval)
        assert refused.returncode == 2
        assert f"an interval of {interval} seconds: give a number from 0.01 to 86400: see" in refused.stderr
    alone = run_cli("monitor", "--endpoint", f"ipc://{runtime_dir}/nobody.sock")
    assert (alone.returncode, alone.stdout) == (1, "")
    assert alone.stderr.startswith("error: no daemon at ")
    assert os.listdir(runtime_dir) == []
