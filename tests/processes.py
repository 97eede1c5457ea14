"""Real processes for the tests: started, awaited on a condition, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from shmserve_client.connection import Connection
from shmserve_client.endpoint import parse_endpoint
from shmserve_client.protocol import Status, StatusReport

T = TypeVar("T")

POLL_S = 0.01


def wait_until(predicate: Callable[[], T], timeout_s: float = 10.0, what: str = "the condition") -> T:
    """Return the first true value of `predicate`, polled every 10 ms; the test fails after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout_s} s")
        time.sleep(POLL_S)
    return value


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: ours without SHMSERVE_*, all stacks printed when it crashes, and `extra`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE_")}
    return {**inherited, "PYTHONFAULTHANDLER": "1", "COLUMNS": "200", **(extra or {})}


def run_cli(
    *args: object, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return the outcome of `shmserve *args`: its exit code, stdout and stderr."""
    return _run([sys.executable, "-m", "shmserve", *map(str, args)], timeout_s, env)


def run_python(
    code: str, *args: object, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return the outcome of `code` (indented as the caller likes) as a program of its own that succeeds.

    It runs from a file, so that a spawned child of it finds what it defines.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(textwrap.dedent(code))
        done = _run([sys.executable, str(program), *map(str, args)], timeout_s, env)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def _run(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Child:
    """A running program in a session of its own, so that its own children end with it.

    What it prints goes to files in `folder`, since a pipe that nobody reads would stop it. Leaving its `with` block
    closes it.
    """

    def __init__(
        self,
        argv: Sequence[object],
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.argv = [str(arg) for arg in argv]
        self._output = Path(tempfile.mkdtemp(prefix="child-", dir=folder))
        with open(self._output / "stdout", "wb") as stdout, open(self._output / "stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                self.argv,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    @classmethod
    def python(cls, code: str, *args: object, folder: Path, env: Mapping[str, str] | None = None) -> Child:
        """Return `code`, indented as the caller likes, running from a file of its own."""
        program = Path(tempfile.mkdtemp(prefix="program-", dir=folder), "program.py")
        program.write_text(textwrap.dedent(code))
        return cls([sys.executable, program, *args], folder=folder, env=env)

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self.process.pid

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return (self._output / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """What it complained about so far."""
        return (self._output / "stderr").read_text()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send `signum` to the program alone, unless it has ended."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code: the test fails where it does not end within `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s: {self.describe()}") from None

    def kill(self) -> None:
        """SIGKILL the program alone, and reap it."""
        self.process.kill()
        self.process.wait()

    def close(self, patience_s: float = 10.0) -> None:
        """End it: SIGTERM, then SIGKILL after `patience_s`; then SIGKILL for whatever is left of its session."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.kill()
        with contextlib.suppress(ProcessLookupError):  # as it should be: nothing is left
            os.killpg(self.pid, signal.SIGKILL)

    def describe(self) -> str:
        """Return command, exit code and output, for the report of a failed test."""
        command = " ".join(self.argv)
        return f"$ {command}\n[pid {self.pid}, exit code {self.process.poll()}]\n{self.stdout}\n{self.stderr}"

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Daemon(Child):
    """`shmserve start` in the foreground."""

    def __init__(
        self, *args: object, endpoint: str, shm_dir: Path, folder: Path, env: Mapping[str, str] | None
    ) -> None:
        self.endpoint = endpoint
        self.shm_dir = shm_dir
        self.was_killed = False
        self._ready_fd, write_fd = os.pipe()
        try:
            super().__init__(
                [
                    *(sys.executable, "-m", "shmserve", "start", "--endpoint", endpoint, "--shm-dir", shm_dir),
                    *("--ready-fd", write_fd, *args),
                ],
                folder=folder,
                env=env,
                pass_fds=(write_fd,),
            )
        except BaseException:
            os.close(self._ready_fd)
            raise
        finally:
            os.close(write_fd)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Return when everything is served; the test fails where that does not happen within `timeout_s`."""
        said = b""
        deadline = time.monotonic() + timeout_s
        while not said.endswith(b"\n"):
            readable, _, _ = select.select([self._ready_fd], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._ready_fd, 4096) if readable else b""
            if not chunk:
                break
            said += chunk
        assert said == b"ready\n", f"the daemon did not get ready, it said {said!r}\n{self.describe()}"

    @property
    def socket(self) -> Path:
        """Where clients connect."""
        return Path(parse_endpoint(self.endpoint))

    def status(self, name: str | None = None) -> StatusReport:
        """Return what the daemon says of itself."""
        with Connection(self.endpoint, timeout_s=10.0) as connection:
            reply = connection.request(Status(name))
        assert isinstance(reply, StatusReport)
        return reply

    def segments(self) -> list[Path]:
        """Return the segments in its shm directory."""
        return sorted(self.shm_dir.glob("shmserve-*"))

    def stop(self, timeout_s: float = 10.0) -> int:
        """Return the exit code after SIGTERM."""
        self.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL it: its segments, socket and lock file stay behind."""
        self.was_killed = True
        super().kill()

    def wait_no_longer(self) -> None:
        """Close the pipe by which it says that it is ready."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def close(self, patience_s: float = 10.0) -> None:
        """End it as `Child.close` does."""
        super().close(patience_s)
        self.wait_no_longer()
