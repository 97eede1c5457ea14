"""Start, attach, reload, and SIGKILL for anybody at any moment, over and over: the same command always works again.

Whoever is to die is stopped first, so that the counts in the end say where it really was. `SOAK_CYCLES` says how many
cycles the soak has, and `SOAK_SEED` repeats the draws of an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shlex
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from shmserve import endpoints
from shmserve.orphans import collect
from shmserve_client.attaching import attach_served
from shmserve_client.connection import Connection
from shmserve_client.endpoint import lock_path, log_path
from shmserve_client.locks import holder_of
from shmserve_client.protocol import Attach, DatasetStatus, Status, StatusReport
from shmserve_client.remote import RemoteOffsets
from shmserve_client.samples import open_samples
from tests.processes import Child, run_cli, wait_until

TOKENS = 12 << 20
"""24 MiB: enough to be met while it is loaded."""
BLOCK_SIZE = 1024
PATIENCE_S = 60.0
LOOK_S = 0.0005
LAST_PHASE_S = 0.05
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

READER = """
    import hashlib, signal, sys, time

    # Before numpy starts threads of its own: one that does not block the signal would take it and end the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    from shmserve_client.attaching import attach_served
    from shmserve_client.embedded import serve
    from shmserve_client.errors import DaemonUnreachableError
    from shmserve_client.protocol import Attach

    def attach(socket):
        while True:  # while there is no daemon yet, or not any more
            try:
                return attach_served(socket, Attach("corpus"), timeout_s=30, patience_s=30)[1]
            except DaemonUnreachableError:
                time.sleep(0.002)

    where = sys.argv[1]
    print("attaching", flush=True)
    segment = attach(where) if where.endswith(".sock") else serve([where], None, None, linger_s=5, timeout_s=30).segment
    print("attached", segment.path, flush=True)
    values = segment.array(segment.description.columns[0].values)
    signal.sigwait({signal.SIGTERM})
    print("read", hashlib.sha256(values).hexdigest(), flush=True)
"""

VICTIMS = {
    "start": ("daemon", "client", "group"),
    "reload": ("daemon", "client", "group", "command"),
    "from_path": ("daemon", "starter", "group"),
}
"""What is under way, and who is killed meanwhile. A group is a process group; of from_path, the starter's."""
PHASES = {
    "start": ("starting", "finding", "loading", "publishing", "attaching", "serving"),
    "reload": ("asking", "loading", "publishing", "published", "reloaded"),
    "from_path": ("starting", "asking", "finding", "loading", "publishing", "attaching", "serving"),
}
"""In their order; one that is shorter than the time between two looks may be skipped."""
DAEMON_PHASES = ("finding", "loading", "publishing", "attaching", "serving")
"""Of from_path, those in which it has a daemon."""


class Scene:
    """The corpus, the directories and the processes of a soak."""

    def __init__(self, folder: Path, shm_dir: Path, runtime_dir: Path) -> None:
        self.folder, self.shm_dir, self.runtime_dir = folder, shm_dir, runtime_dir
        self.corpus = folder / "corpus.bin"
        self.socket = f"{runtime_dir}/shmserve/daemon.sock"
        self.reader = folder / "reader.py"
        self.children: list[Child] = []
        self._version = 0
        self.write()

    def tokens(self) -> NDArray[np.uint16]:
        """What the corpus holds at present."""
        return (np.arange(TOKENS, dtype=np.uint32) * 40_503 >> 7).astype(np.uint16) ^ np.uint16(self._version)

    def digest(self) -> str:
        """What a reader of the present corpus says that it read."""
        return hashlib.sha256(self.tokens()).hexdigest()

    def write(self) -> None:
        """Put a corpus of other tokens into the place of the present one."""
        self._version += 1
        new = self.folder / "new"
        self.tokens().tofile(new)
        new.rename(self.corpus)

    def run(self, *argv: object) -> Child:
        child = Child(argv, folder=self.folder, env={"SHMSERVE_SHM_DIR": str(self.shm_dir)})
        self.children.append(child)
        return child

    def read(self, where: object) -> Child:
        return self.run(sys.executable, self.reader, where)

    def reload(self) -> Child:
        return self.run(sys.executable, "-m", "shmserve", "reload", "corpus", "--endpoint", f"ipc://{self.socket}")

    def status(self) -> DatasetStatus:
        with Connection(self.socket, PATIENCE_S) as connection:
            report = connection.request(Status())
        assert isinstance(report, StatusReport)
        return report.datasets[0]

    def files(self) -> set[str]:
        return set(map(str, self.shm_dir.iterdir()))

    def embedded(self) -> str:
        """The socket of the daemon that from_path started, which holds its lock; "" while there is none."""
        locks = map(str, self.runtime_dir.glob("shmserve/e-*.sock.lock"))
        sockets = [path.removesuffix(lock_path("")) for path in locks if holder_of(path)]
        assert len(sockets) < 2, sockets
        return "".join(sockets)

    def processes(self) -> list[psutil.Process]:
        """Whatever of this soak runs, whoever started it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # gone, a zombie, or another user's
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime_dir):
                    found.append(process)
        return found

    def check_served(self, socket: str, others: set[str]) -> None:
        """Every sample is right, and there is one segment beside those `others` that readers keep."""
        served, segment = attach_served(socket, Attach("corpus"), timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
        samples = open_samples(segment.description, segment.array, block_size=BLOCK_SIZE)
        np.testing.assert_array_equal(samples.values, self.tokens())
        positions = np.arange(TOKENS // BLOCK_SIZE)
        assert len(samples) == len(positions)
        remote = RemoteOffsets(
            socket, PATIENCE_S, name="corpus", nonce=served.nonce, block_size=BLOCK_SIZE, stride=BLOCK_SIZE
        )
        with closing(remote):
            offsets, nbytes = remote.extents(samples, positions)
        np.testing.assert_array_equal(offsets, samples.column.values.offset + positions * 2 * BLOCK_SIZE)
        assert set(nbytes.tolist()) == {2 * BLOCK_SIZE}
        expected = {served.path} | others
        # A daemon looks once a second whether anybody still reads a former generation.
        wait_until(lambda: self.files() == expected, what=f"only {expected} in {self.shm_dir}")


class Job:
    """A daemon and a client of it in one process group, as a job's script starts them."""

    def __init__(self, scene: Scene) -> None:
        daemon = [
            *(sys.executable, "-m", "shmserve", "start", "--data", scene.corpus, "--block-size", BLOCK_SIZE),
            *("--endpoint", f"ipc://{scene.socket}"),
        ]
        client = [sys.executable, scene.reader, scene.socket]
        self.script = scene.run(
            *("sh", "-c"),
            f"{_command(daemon)} & daemon=$!; {_command(client)} & client=$!; echo pids $daemon $client; "
            "wait $daemon; echo daemon ended $?; wait $client; echo client ended $?",
        )
        self.daemon, self.client = map(int, heard(self.script, "pids ").split())
        self.pids = [self.daemon, self.client, self.script.pid]


def _command(argv: Sequence[object]) -> str:
    return shlex.join(map(str, argv))


def said(child: Child, prefix: str) -> str:
    """Return the rest of the whole line of its output that has this prefix, "" without one."""
    lines = child.stdout.split("\n")[:-1]
    return next((line.removeprefix(prefix) for line in lines if line.startswith(prefix)), "")


def heard(child: Child, prefix: str) -> str:
    """Return the same once it is there."""
    try:
        return wait_until(lambda: said(child, prefix), PATIENCE_S, f"{prefix!r} in its output")
    except AssertionError as error:
        error.add_note(child.describe())
        raise


def daemon_phase(pid: int, scene: Scene, socket: str) -> str:
    """Return how far the start of a daemon is by the files that it has open; "publishing" is the last."""
    links, segments = open_files(pid, scene.shm_dir)
    if lock_path(socket) not in links:
        return "starting"
    if not segments:
        return "finding"
    return "publishing" if any(map(is_complete, segments)) else "loading"


def open_files(pid: int, shm_dir: Path) -> tuple[set[str], list[os.stat_result]]:
    """Return where the descriptors of a process lead to, and which files of the shm directory are among them."""
    links: set[str] = set()
    segments = []
    with suppress(FileNotFoundError):  # it has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                links.add(link)
                if link.startswith(f"{shm_dir}/"):
                    segments.append(os.stat(f"/proc/{pid}/fd/{fd}"))
    return links, segments


def is_complete(segment: os.stat_result) -> bool:
    return segment.st_blocks * 512 > 2 * TOKENS


def start_phase(scene: Scene, job: Job) -> str:
    phase = daemon_phase(job.daemon, scene, scene.socket)
    if phase == "publishing" and said(job.script, "ready: "):
        return "serving" if said(job.script, "attached ") else "attaching"
    return phase


def reload_phase(scene: Scene, job: Job, command: Child) -> str:
    if command.process.poll() is not None:
        return "reloaded"
    _, segments = open_files(job.daemon, scene.shm_dir)
    unnamed = [segment for segment in segments if segment.st_nlink == 0]
    if unnamed:
        return "publishing" if all(map(is_complete, unnamed)) else "loading"
    return "asking" if len(segments) < 2 else "published"


def from_path_phase(scene: Scene, starter: Child) -> str:
    if said(starter, "attached "):
        return "serving"
    socket = scene.embedded()
    if not socket:
        return "asking" if starter.stdout else "starting"
    holder = holder_of(lock_path(socket))
    phase = daemon_phase(holder.pid, scene, socket) if holder else "asking"
    if phase == "publishing" and "ready: " in Path(log_path(socket)).read_text():
        return "attaching"
    return {"starting": "asking"}.get(phase, phase)


class Soak:
    """Cycles, one after the other, and the counts of what they hit."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self._scene = scene
        self._draw = random.Random(seed)
        self._lasts_s = {action: self._measure(action) for action in PHASES}

    def _measure(self, action: str) -> dict[str, float]:
        """Return how long each phase of an action lasts, in seconds, when nobody is killed."""
        scene = self._scene
        job = command = starter = None
        if action == "from_path":
            starter = scene.read(scene.corpus)
        else:
            job = Job(scene)
        before = scene.digest()
        if job and action == "reload":
            heard(job.script, "attached ")
            scene.write()
            command = scene.reload()
        look = _look(scene, job, command, starter)
        lasts_s: Counter[str] = Counter()
        looked_s = time.monotonic()
        while (phase := look()) != PHASES[action][-1]:
            time.sleep(LOOK_S)
            looked_s, before_s = time.monotonic(), looked_s
            lasts_s[phase] += looked_s - before_s
        if job:
            end_reader(job.script, job.client, before)
            end_daemon(job)
        if starter:
            end_reader(starter, starter.pid, before)
            self._end_embedded(lingers=False)
        self._clear()
        return {**lasts_s, PHASES[action][-1]: LAST_PHASE_S}

    def cycle(self, action: str, victim: str, *, leave: bool) -> None:
        """Kill somebody in the course of an action and start again; then end everything, or with `leave` kill it."""
        if action == "from_path":
            self._from_path(victim)
        else:
            (self._start if action == "start" else self._reload)(victim, leave)
        self._clear(leave=leave)

    def _kill(self, action: str, victim: str, pids: Callable[[], list[int]], look: Callable[[], str]) -> None:
        """Kill those processes at some moment of some phase, each of which is as likely; count where it was."""
        order = PHASES[action]
        can_be_met = DAEMON_PHASES if action == "from_path" and victim == "daemon" else order
        target = self._draw.choice([phase for phase in self._lasts_s[action] if phase in can_be_met])
        deadline_s = time.monotonic() + PATIENCE_S
        while order.index(phase := look()) < order.index(target):
            assert time.monotonic() < deadline_s, f"{action} is still {phase}"
            time.sleep(LOOK_S)
        time.sleep(self._draw.uniform(0, self._lasts_s[action][target]))
        doomed = pids()
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            if signum == signal.SIGKILL:
                still = (psutil.STATUS_STOPPED, *ENDED)
                wait_until(lambda: all(status_of(pid) in still for pid in doomed), what="them to stand still")  # noqa: B023
                self.killed[f"{action}: {victim} while {look()}"] += 1
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _start(self, victim: str, leave: bool) -> None:
        scene = self._scene
        if self._draw.random() < 0.5:
            scene.write()
        job = Job(scene)
        doomed = {"daemon": [job.daemon], "client": [job.client], "group": job.pids}[victim]
        self._kill("start", victim, lambda: doomed, _look(scene, job))
        if victim == "client":
            again = scene.read(scene.socket)
            heard(job.script, "ready: ")
            scene.check_served(scene.socket, set())
            end_reader(again, again.pid, scene.digest())
            self._end(job, leave)
            return
        reads = victim == "daemon"
        if reads and said(job.script, "attached ") and self._draw.random() < 0.5:
            end_reader(job.script, job.client, scene.digest())
            reads = False
        restarted = self._restart(set())
        if reads:
            end_reader(job.script, job.client, scene.digest())
        end_reader(restarted.script, restarted.client, scene.digest())
        self._end(restarted, leave)

    def _reload(self, victim: str, leave: bool) -> None:
        scene = self._scene
        job = Job(scene)
        heard(job.script, "ready: ")
        former, former_digest = heard(job.script, "attached "), scene.digest()
        scene.write()
        command = scene.reload()
        doomed = {"daemon": [job.daemon], "client": [job.client], "group": job.pids, "command": [command.pid]}[victim]
        self._kill("reload", victim, lambda: doomed, _look(scene, job, command))
        exit_code = command.wait(PATIENCE_S)
        if victim in ("daemon", "group"):
            assert exit_code == 0 or command.stderr.splitlines()[-1].startswith("error: "), command.describe()
            reads = victim == "daemon"
            if reads and self._draw.random() < 0.5:
                end_reader(job.script, job.client, former_digest)
                reads = False
            restarted = self._restart({former} if reads else set())
            if reads:
                end_reader(job.script, job.client, former_digest)
                assert [one.path for one in collect(str(scene.shm_dir)).removed] == [former]
            end_reader(restarted.script, restarted.client, scene.digest())
            self._end(restarted, leave)
            return
        if victim == "client":
            assert exit_code == 0, command.describe()
        else:
            wait_until(self._reloads, PATIENCE_S, "a reload after one whose command was killed")
        again = scene.read(scene.socket)
        heard(again, "attached ")
        if victim == "command":
            scene.check_served(scene.socket, {former})
            end_reader(job.script, job.client, former_digest)
        wait_until(lambda: former not in scene.files(), what="the former generation to go with its last reader")
        scene.check_served(scene.socket, set())
        end_reader(again, again.pid, scene.digest())
        self._end(job, leave)

    def _reloads(self) -> bool:
        command = self._scene.reload()
        if command.wait(PATIENCE_S) == 0:
            return True
        assert "is being loaded" in command.stderr, command.describe()
        return False

    def _from_path(self, victim: str) -> None:
        scene = self._scene
        if self._draw.random() < 0.5:
            scene.write()
        starter = scene.read(scene.corpus)
        doomed: dict[str, Callable[[], list[int]]] = {
            "daemon": lambda: [holder.pid for holder in [holder_of(lock_path(scene.embedded()))] if holder],
            "starter": lambda: [starter.pid],
            "group": lambda: group_of(starter.pid),
        }
        self._kill("from_path", victim, doomed[victim], _look(scene, starter=starter))
        if victim == "daemon":
            wait_until(lambda: said(starter, "attached ") or starter.process.poll() is not None, PATIENCE_S)
            if starter.process.poll() is not None:
                assert starter.stderr.splitlines()[-1].startswith("shmserve_client.errors."), starter.describe()
        again = scene.read(scene.corpus)
        heard(again, "attached ")
        scene.check_served(scene.embedded(), set())
        for reader in (starter, again):
            if reader.process.poll() is None:
                end_reader(reader, reader.pid, scene.digest())
        self._end_embedded(lingers=self._draw.random() < 0.2)

    def _restart(self, others: set[str]) -> Job:
        """Return what the same command starts, after a look at what it serves."""
        job = Job(self._scene)
        heard(job.script, "ready: ")
        heard(job.script, "attached ")
        self.restarts["adopted" if self._scene.status().adopted else "loaded"] += 1
        self._scene.check_served(self._scene.socket, others)
        return job

    def _end(self, job: Job, leave: bool) -> None:
        if leave:
            os.killpg(job.script.pid, signal.SIGKILL)
        else:
            end_daemon(job)

    def _end_embedded(self, *, lingers: bool) -> None:
        socket = self._scene.embedded()
        if lingers:
            wait_until(lambda: not self._scene.embedded(), what="the end of a daemon that nobody needs")
        else:
            stopped = run_cli("stop", "--endpoint", f"ipc://{socket}")
            assert stopped.returncode == 0, stopped.stderr

    def _clear(self, *, leave: bool = False) -> None:
        """Nothing is left but logs and the locks of killed starters, which `gc` removes; or what `leave` wants."""
        scene = self._scene
        wait_until(lambda: not scene.processes(), PATIENCE_S, "the end of all processes")
        for child in scene.children:
            child.close()
        scene.children.clear()
        if leave:
            return
        assert scene.files() == set()
        directory = scene.runtime_dir / "shmserve"
        assert [path.name for path in directory.iterdir() if path.suffix not in (".log", ".start")] == []

        def is_empty() -> bool:
            endpoints.remove_unused_files()
            return not list(directory.iterdir())

        # A process that ends has no environment any more when it still holds its locks.
        wait_until(is_empty, what="the removal of unused files")


def _look(
    scene: Scene, job: Job | None = None, command: Child | None = None, starter: Child | None = None
) -> Callable[[], str]:
    """Return what tells the phase that these are in."""
    if starter:
        return lambda: from_path_phase(scene, starter)
    assert job
    return lambda: reload_phase(scene, job, command) if command else start_phase(scene, job)


def status_of(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def group_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def end_reader(output: Child, pid: int, digest: str) -> None:
    """Tell a reader to end; until then it reads what it attached, right."""
    heard(output, "attached ")
    os.kill(pid, signal.SIGTERM)
    assert heard(output, "read ") == digest, output.describe()
    if output.pid == pid:
        assert (output.wait(), output.stderr) == (0, ""), output.describe()
    else:
        wait_until(lambda: status_of(pid) in ENDED, what="the reader's end")


def end_daemon(job: Job) -> None:
    os.kill(job.daemon, signal.SIGTERM)
    assert job.script.wait() == 0, job.script.describe()
    assert said(job.script, "daemon ended ") == "0", job.script.describe()
    assert "Traceback" not in job.script.stderr, job.script.describe()


@pytest.mark.promise("soak", "F3", "F7", "F13")
@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(6, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param(
            int(os.environ.get("SOAK_CYCLES", "1000")), marks=[pytest.mark.stress, pytest.mark.timeout(0)], id="soak"
        ),
    ],
)
def test_whoever_is_killed_the_next_start_works(
    cycles: int,
    shm_dir: Path,
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = int(os.environ.get("SOAK_SEED", secrets.randbelow(1 << 32)))
    draw = random.Random(seed)
    monkeypatch.setattr(endpoints, "default_directories", lambda: [str(runtime_dir / "shmserve")])
    started_s = time.monotonic()
    every = [(action, victim) for action, victims in VICTIMS.items() for victim in victims]
    plan: list[tuple[str, str]] = []
    while len(plan) < cycles:
        plan += draw.sample(every, len(every))
    scene = Scene(tmp_path, shm_dir, runtime_dir)
    (tmp_path / "reader.py").write_text(textwrap.dedent(READER))
    number, leave = 0, False
    try:
        soak = Soak(scene, seed)
        for number in range(cycles):
            # What is left is for a daemon at the same endpoint.
            leave = number + 1 < cycles and plan[number + 1][0] != "from_path" and draw.random() < 0.3
            leave = leave and plan[number][0] != "from_path"
            soak.cycle(*plan[number], leave=leave)
    except BaseException as error:
        error.add_note(f"SOAK_SEED={seed}, cycle {number}: {plan[number]}, leave={leave}")
        for child in scene.children:
            error.add_note(child.describe())
        raise
    finally:
        for child in scene.children:
            child.close()
    report = {
        "seed": seed,
        "cycles": cycles,
        "seconds": round(time.monotonic() - started_s),
        "killed": dict(sorted(soak.killed.items())),
        "restarts": soak.restarts,
    }
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(report)}\n")
    assert soak.killed.total() == cycles
