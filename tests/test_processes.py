"""The harness itself: a leak is noticed, and a child never outlives its test."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.processes import Child, run_python, wait_until

pytest_plugins = ["pytester"]

LEAKS = {
    "open descriptors": "import os\ndef test(): os.open('/dev/null', os.O_RDONLY)",
    "child processes": "import subprocess\ndef test(): globals()['kept'] = subprocess.Popen(['sleep', '2'])",
    "entries in /dev/shm": "def test(): open('/dev/shm/shmserve-left-by-a-test', 'w').close()",
    "files in /dev/shm": "def test(shm_dir): (shm_dir / 'left').touch()",
    "processes": """
        import subprocess
        def test(runtime_dir):
            # An orphan in a session of its own, as a detached daemon is. Its line says that it has come that far.
            orphan = "setsid sh -c 'echo; sleep 2; true' 2>/dev/null </dev/null &"
            with subprocess.Popen(["sh", "-c", orphan], stdout=subprocess.PIPE) as shell:
                assert shell.stdout.readline()
        """,
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_the_test(kind: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    pytester.makeconftest(
        """
        import tests.conftest
        from tests.conftest import *
        from tests.conftest import _no_daemon_of_the_user, _nothing_left
        tests.conftest.LEAK_PATIENCE_S = 0.2
        """
    )
    pytester.makepyfile(LEAKS[kind])

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)

    Path("/dev/shm/shmserve-left-by-a-test").unlink(missing_ok=True)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*the test left {kind}*"])


def test_children_of_a_child_end_with_it(tmp_path: Path) -> None:
    child = Child.python(
        """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen(["sleep", "30"]).pid, flush=True)
        signal.pause()
        """,
        folder=tmp_path,
    )
    with child:
        grandchild = int(wait_until(lambda: child.stdout.endswith("\n") and child.stdout, what="the child's greeting"))
        assert psutil.pid_exists(grandchild)
        child.close(patience_s=0.1)

    assert child.process.returncode == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == "zombie")


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_python("1 / 0")


def test_children_see_no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSERVE_ENDPOINT", "ipc:///nowhere")

    assert run_python("import os; print(os.environ.get('SHMSERVE_ENDPOINT'))").stdout == "None\n"


def test_waiting_ends() -> None:
    with pytest.raises(AssertionError, match=r"the sun did not come true within 0\.05 s"):
        wait_until(lambda: False, 0.05, "the sun")
