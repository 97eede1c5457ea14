"""Promises on processes: forked workers that ask the daemon, exits that do not hang, workers that die or live long."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmserve_client import ShmDataset
from tests.processes import Child, Daemon, run_python, wait_until

Serve = Callable[..., Daemon]

COUNT, WIDTH = 200, 16
LATE_S = 10.0
"""What took so long was waiting for something, however busy the machine."""
EXPECTED = np.arange(COUNT * WIDTH).reshape(COUNT, WIDTH).tolist()


@pytest.fixture
def daemon(serve: Serve, tmp_path: Path) -> Daemon:
    np.save(tmp_path / "corpus.npy", np.arange(COUNT * WIDTH, dtype=np.int64).reshape(COUNT, WIDTH))
    return serve("--data", tmp_path / "corpus.npy")


@pytest.mark.promise("F12")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_forked_after_a_request_read_a_hundred_times(daemon: Daemon) -> None:
    done = run_python(
        f"""
        import torch
        from torch.utils.data import DataLoader
        from shmserve_client import ShmDataset

        torch.set_num_threads(1)
        dataset = ShmDataset(endpoint="{daemon.endpoint}", lookup="daemon")
        for _ in range(100):
            assert dataset[0][0] == 0
            loader = DataLoader(dataset, batch_size=16, num_workers=4, multiprocessing_context="fork", timeout=60)
            read = torch.cat(list(loader)).view(-1)
            assert torch.equal(read, torch.arange({COUNT * WIDTH})), read
        print("read")
        """,
        timeout_s=500,
        env={"PYTHONWARNINGS": "ignore:This DataLoader will create:UserWarning"},
    )
    assert (done.stdout, done.stderr) == ("read\n", "")


@pytest.mark.promise("F13")
def test_after_a_stop_no_reply_is_anothers(daemon: Daemon) -> None:
    """Also where several requests timed out: their replies arrive, late, before that of the next one."""
    dataset = ShmDataset("corpus", endpoint=daemon.endpoint, lookup="daemon", timeout=0.2)
    for _ in range(3):
        daemon.send_signal(signal.SIGSTOP)
        try:
            for index in (5, 6, 7):
                with pytest.raises(ConnectionError):
                    dataset[index]
        finally:
            daemon.send_signal(signal.SIGCONT)
        continued_s = time.monotonic()
        answered = 0
        while answered < 50:
            index = answered % COUNT
            try:
                assert dataset[index].tolist() == EXPECTED[index]
                answered += 1
            except ConnectionError:
                assert time.monotonic() - continued_s < 5
    dataset.close()


@pytest.mark.promise("F16")
@pytest.mark.parametrize("daemon_is", ["stopped", "killed"])
@pytest.mark.parametrize("end", ["dataset.close()", "with dataset: pass", "pass"])
def test_nothing_waits_for_what_the_daemon_did_not_take(
    daemon: Daemon, tmp_path: Path, daemon_is: str, end: str
) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        from shmserve_client import DaemonUnreachableError, ShmDataset

        dataset = ShmDataset(endpoint="{daemon.endpoint}", lookup="daemon", timeout=0.2)
        dataset[0]
        print("attached", flush=True)
        while not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        for _ in range(3):
            try:
                dataset[1]
            except DaemonUnreachableError:
                continue
            raise AssertionError("the daemon answered")
        ending_s = time.monotonic()
        {end}
        assert time.monotonic() - ending_s < {LATE_S}
        print(ending_s, flush=True)
    """
    go = tmp_path / "go"
    with Child.python(program, go, folder=tmp_path) as client:
        wait_until(lambda: "attached" in client.stdout, 60, "the client")
        if daemon_is == "stopped":
            daemon.send_signal(signal.SIGSTOP)
        else:
            daemon.kill()
        try:
            go.touch()
            assert client.wait() == 0, client.describe()
            took_s = time.monotonic() - float(client.stdout.split()[-1])  # one clock for all processes
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert client.stderr == ""
    assert took_s < LATE_S, "1 s is promised for a machine that has nothing else to do"
    for segment in daemon.segments() if daemon.was_killed else []:
        segment.unlink()


def in_session(pid: int) -> list[int]:
    """Return the processes whose session is that of `pid`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == pid:
                found.append(process.pid)
    return found


@pytest.mark.promise("F18")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_worker_is_the_dataloaders_error(daemon: Daemon, tmp_path: Path, method: str) -> None:
    program = f"""
        import os, signal
        from torch.utils.data import DataLoader
        from shmserve_client import ShmDataset

        def hold_the_first(sample):
            if sample[0] == 0:
                print("held by", os.getpid(), flush=True)
                signal.pause()
            elif sample[0] == {WIDTH}:
                print("the other reads", flush=True)
            return sample

        def main():
            dataset = ShmDataset(endpoint="{daemon.endpoint}", lookup="daemon", transform=hold_the_first)
            try:
                for _ in DataLoader(dataset, num_workers=2, multiprocessing_context="{method}"):
                    pass
            except RuntimeError as error:
                print(error, flush=True)
                os._exit(0)  # else torch's signal handler may raise it again in the middle of the exit

        if __name__ == "__main__":
            main()
    """
    with Child.python(program, folder=tmp_path) as rank:
        # Both, or the other one would start without a parent, and not know whose end to wait for.
        wait_until(lambda: rank.stdout.count("\n") == 2, 60, "the workers")
        pid = int(re.search("held by ([0-9]+)", rank.stdout)[1])
        os.kill(pid, signal.SIGKILL)
        assert rank.wait(20) == 0, rank.describe()
        error = rank.stdout.splitlines()[2]
        assert re.match(rf"DataLoader worker \(pid(\(s\))? {pid}\) (exited unexpectedly|is killed by signal)", error)
        # The other worker sees that its parent is gone, and then Python's own helper removes their semaphores.
        wait_until(lambda: not in_session(rank.pid), 20, "what the rank has started to end")
    wait_until(lambda: not daemon.status().datasets[0].attached_pids, what="nobody to be attached")


@pytest.mark.promise("F18")
def test_sixteen_persistent_workers_end_in_three_seconds(daemon: Daemon, tmp_path: Path) -> None:
    program = f"""
        import time
        from torch.utils.data import DataLoader
        from shmserve_client import ShmDataset

        dataset = ShmDataset(endpoint="{daemon.endpoint}", lookup="daemon")
        loader = DataLoader(
            dataset, batch_size=4, num_workers=16, persistent_workers=True, multiprocessing_context="fork"
        )
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == {COUNT}
        print(time.monotonic(), flush=True)
    """
    env = {"PYTHONWARNINGS": "ignore:This DataLoader will create:UserWarning"}
    with Child.python(program, folder=tmp_path, env=env) as rank:
        assert rank.wait(100) == 0, rank.describe()
        took_s = time.monotonic() - float(rank.stdout)
        assert rank.stderr == ""
    assert took_s < LATE_S, "torch waits 5 s for each of them that does not end when told to"
    wait_until(lambda: not daemon.status().datasets[0].attached_pids, what="nobody to be attached")


@pytest.mark.promise("F33")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lookup", ["shared", "daemon"])
def test_workers_hold_no_more_after_the_second_epoch(serve: Serve, tmp_path: Path, lookup: str) -> None:
    np.save(tmp_path / "corpus.npy", np.zeros((20_000, 512), np.int32))  # 40 MB, all of which each worker reads
    daemon = serve("--data", tmp_path / "corpus.npy")
    done = run_python(
        f"""
        import os, sys
        import torch
        from torch.utils.data import DataLoader
        from shmserve_client import DistributedSampler, ShmDataset
        from shmserve_client.memory import measure

        def held():
            found = []
            for worker in batches._workers:
                with open(f"/proc/{{worker.pid}}/maps") as maps:
                    mapped = sum("shmserve-" in line for line in maps)
                found.append((measure(worker.pid).private, len(os.listdir(f"/proc/{{worker.pid}}/fd")), mapped))
            return found

        torch.set_num_threads(1)
        dataset = ShmDataset(endpoint="{daemon.endpoint}", lookup="{lookup}")
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
        loader = DataLoader(
            dataset, 2, sampler=sampler, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches = iter(loader)
            assert sum(1 for _ in batches) == 10_000
            epochs.append(held())
        for (private, *others), (private_later, *others_later) in zip(*epochs, strict=True):
            assert others == others_later, epochs
            print(private_later - private)
        """,
        timeout_s=500,
    )
    growths = list(map(int, done.stdout.split()))
    assert len(growths) == 2
    assert max(growths) < 5 << 20
