"""Which tests keep which promise of docs/reliability.md, how often they ran, and how often they failed.

    python -m pytest --record docs/reliability.json    adds the runs of this session
    python -m tests.reliability                        fills the table of docs/reliability.md
    python -m tests.reliability --check                says what would change

A test counts where it has the marker `promise`, with the names of its promises, or `stress`. Each case is a run.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import io
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENT = REPOSITORY / "docs" / "reliability.md"
COUNTS = REPOSITORY / "docs" / "reliability.json"

Counts = dict[str, dict[str, int]]
"""From the name of a test to its `runs` and `failures`."""

_RECORDER = pytest.StashKey["Recorder"]()


def name_of(item: pytest.Item) -> str:
    """Return where the test is written, below tests/: its cases, and the classes that inherit it, are one test."""
    assert isinstance(item, pytest.Function)
    function = item.function
    module = function.__module__.removeprefix("tests.").replace(".", "/")
    qualified = function.__qualname__.rpartition("<locals>.")[2]  # a decorator may have left its own name before it
    return f"{module}.py::{qualified.replace('.', '::')}"


def promises_of(item: pytest.Item) -> set[str]:
    """Return the names of the promises that the test keeps."""
    return {name for marker in item.iter_markers("promise") for name in marker.args}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", type=Path, help="add what the tests of promises did to a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--record"):
        config.stash[_RECORDER] = recorder = Recorder(path.absolute())
        config.pluginmanager.register(recorder)


class Recorder:
    """Counts the runs of one session and adds them, in its end, to those in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ran: set[str] = set()
        self._failed: set[str] = set()
        self._names: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if promises_of(item) or item.get_closest_marker("stress"):
            self._names[item.nodeid] = name_of(item)
            if report.when == "call" and not report.skipped:
                self._ran.add(item.nodeid)
            if report.failed:  # also where its fixtures did
                self._ran.add(item.nodeid)
                self._failed.add(item.nodeid)
        return report

    def pytest_sessionfinish(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # each process of a session adds its own
            self._add()
        finally:
            os.close(folder)

    def _add(self) -> None:
        counts: Counts = json.loads(self.path.read_text()) if self.path.exists() else {}
        for case in self._ran:
            count = counts.setdefault(self._names[case], {"runs": 0, "failures": 0})
            count["runs"] += 1
            count["failures"] += case in self._failed
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=self.path.name, delete=False) as file:
            json.dump(counts, file, indent=1, sort_keys=True)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)


class _Collected:
    """Gathers the marked tests of a collection."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for promise in promises_of(item):
                self.tests[promise].add(name_of(item))


def marked_tests() -> Mapping[str, set[str]]:
    """Return the tests of the tree that keep each promise."""
    collected = _Collected()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(REPOSITORY / "tests")], [collected])
    if status:
        sys.exit(f"error: the tests cannot be collected:\n{output.getvalue()[-4000:]}")
    return collected.tests


def filled(document: str, tests: Mapping[str, set[str]], counts: Counts) -> str:
    """Return the page with its table: a row for each promise that it names, in its order, and each test that keeps it.

    Raises:
        ValueError: a promise has no test, or a test keeps one that the page does not name.
    """
    promises = re.findall(r"^- \*\*(\w+)\*\*", document, re.MULTILINE)
    if unkept := [name for name in promises if not tests.get(name)]:
        raise ValueError(f"no test keeps {', '.join(unkept)}: mark one with @pytest.mark.promise")
    if unknown := sorted(set(tests) - set(promises)):
        raise ValueError(f"tests keep {', '.join(unknown)}, which {DOCUMENT.name} does not name")
    lines = ["| promise | test | runs | failures |", "|---|---|---:|---:|"]
    for promise in promises:
        for test in sorted(tests[promise]):
            count = counts.get(test, {"runs": 0, "failures": 0})
            lines.append(f"| {promise} | `{test}` | {count['runs']:,} | {count['failures']:,} |")
    table = "\n".join(["<!-- table -->", *lines, "<!-- end -->"])
    return re.sub("<!-- table -->.*?<!-- end -->", lambda _: table, document, flags=re.DOTALL)


def main() -> None:
    """Fill the table, or, with --check, fail where it names other tests than it should; the counts may be older."""
    before = DOCUMENT.read_text()
    try:
        after = filled(before, marked_tests(), json.loads(COUNTS.read_text()) if COUNTS.exists() else {})
    except ValueError as error:
        sys.exit(f"error: {error}")
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(after)
    elif changes := list(difflib.unified_diff(_without_counts(before), _without_counts(after), n=0, lineterm="")):
        print(*changes[2:], sep="\n")
        sys.exit(f"error: {DOCUMENT.name} names other tests than are marked: run `python -m tests.reliability`")


def _without_counts(document: str) -> list[str]:
    return re.sub(r"( \| [\d,]+){2} \|$", "", document, flags=re.MULTILINE).splitlines()


if __name__ == "__main__":
    main()
