"""docs/reliability.md: every promise has a test, the table names those that are marked, and runs are counted truly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment
from tests.reliability import DOCUMENT, REPOSITORY, filled

POINTS = ["generations", "trust", "fuzzing", "load", "soak", "integrity", "shutdown"]

PAGE = """
- **F1** What is promised
  in two lines.
- **F2** More.

<!-- table -->
old
<!-- end -->
Behind it.
"""

TESTS = """
    import pytest

    @pytest.mark.promise("F1")
    @pytest.mark.parametrize("value", [1, 2, 3])
    def test_cases(value):
        assert value != 2

    class Contract:
        @pytest.mark.promise("F2")
        def test_inherited(self):
            pass

    class TestOne(Contract):
        pass

    class TestOther(Contract):
        pass

    @pytest.mark.stress
    def test_stress():
        pass

    @pytest.mark.promise("F1")
    def test_skipped():
        pytest.skip("not here")

    @pytest.fixture
    def broken():
        raise OSError

    @pytest.fixture
    def broken_later():
        yield
        raise OSError

    @pytest.mark.promise("F1")
    def test_before(broken):
        pass

    @pytest.mark.promise("F1")
    def test_after(broken_later):
        pass

    def test_unmarked():
        pass
"""


def python(*args: object, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    env = environment({"PYTHONPATH": str(REPOSITORY)})
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_every_promise_has_its_tests_and_the_table_names_them() -> None:
    done = python("-m", "tests.reliability", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_promise_is_forgotten() -> None:
    named = re.findall(r"^- \*\*(\w+)\*\*", DOCUMENT.read_text(), re.MULTILINE)
    assert named == [*(f"F{number}" for number in range(1, 35)), *POINTS]


def test_the_table_has_a_row_for_each_test_of_each_promise() -> None:
    tests = {"F1": {"test_b.py::test_2", "test_a.py::test_1"}, "F2": {"test_a.py::test_1"}}
    page = filled(PAGE, tests, {"test_a.py::test_1": {"runs": 1234, "failures": 5}, "gone.py::test": {"runs": 1}})
    assert page == PAGE.replace(
        "old\n",
        "| promise | test | runs | failures |\n|---|---|---:|---:|\n"
        "| F1 | `test_a.py::test_1` | 1,234 | 5 |\n"
        "| F1 | `test_b.py::test_2` | 0 | 0 |\n"
        "| F2 | `test_a.py::test_1` | 1,234 | 5 |\n",
    )
    assert filled(page, tests, {}) != page


def test_a_promise_without_a_test_and_an_unknown_one_are_errors() -> None:
    with pytest.raises(ValueError, match="no test keeps F2"):
        filled(PAGE, {"F1": {"test_a.py::test_1"}}, {})
    with pytest.raises(ValueError, match="tests keep F3, which"):
        filled(PAGE, {name: {"test_a.py::test_1"} for name in ("F1", "F2", "F3")}, {})


def test_runs_are_added_to_those_of_earlier_sessions(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    promise: kept\n    stress: long\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.reliability"]\n')
    (tmp_path / "test_made.py").write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    record = tmp_path / "counts.json"
    record.write_text('{"other.py::test": {"runs": 7, "failures": 1}}')
    for times in (1, 2):
        done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--record", record.name, folder=tmp_path)
        assert done.returncode == 1, done.stdout + done.stderr
        assert json.loads(record.read_text()) == {
            "other.py::test": {"runs": 7, "failures": 1},
            "test_made.py::test_cases": {"runs": 3 * times, "failures": times},
            "test_made.py::Contract::test_inherited": {"runs": 2 * times, "failures": 0},
            "test_made.py::test_stress": {"runs": times, "failures": 0},
            "test_made.py::test_before": {"runs": times, "failures": times},
            "test_made.py::test_after": {"runs": times, "failures": times},
        }
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        *("pytest.ini", "conftest.py", "test_made.py", "counts.json")
    }
