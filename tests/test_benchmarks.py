"""Every benchmark runs, and what is made of their results is what the documents and pictures show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
DOCUMENT = (BENCHMARKS / "README.md").read_text()
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "benchmark(__file__" in path.read_text())
REPORT = {
    "command": "python benchmarks/made_up.py",
    "took_s": 12,
    "machine": {
        "cpu": "a processor",
        "cores": 2,
        "memory_gib": 24,
        "kernel": "6.18.1",
        "shmem_enabled": "never",
        "python": "3.11.7",
        "packages": {"torch": "2.13.0"},
    },
    "question": "How much?",
    "isolates": "Nothing else.",
    "columns": ["dataset", "MiB"],
    "rows": [["shmserve", "1.0"]],
    "notes": [],
    "data": {},
}


def run(script: str, *args: object, folder: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", *map(str, args)],
        env=os.environ | ({"TMPDIR": str(folder)} if folder else {}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ranks_taking(pss: int, groups: tuple[str, ...] = ("1", "2", "8 x 2")) -> dict[str, Any]:
    return {group: {"pss": pss, "page_tables": 2 << 20} for group in groups}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A directory with small results, made up."""
    found = {
        "tensors": ranks_taking(1200 << 20) | {"8 x 2": {"expected": 9000 << 20}},
        "shmserve": ranks_taking(1000 << 20),
    }
    series = {"batches": [1, 2, 4], "private_mib": [[10.0, 9.0], [12.0, 11.0], [14.0, 13.0]]}
    data: dict[str, dict[str, Any]] = {
        "load": {},
        "ram_by_rank": {"nbytes": 1 << 30, "titles": {"tensors": "list", "shmserve": "shmserve"}, "found": found},
        "ram_over_epoch": {"batches_per_epoch": 2, "titles": {"shmserve": "shmserve"}, "series": {"shmserve": series}},
    }
    folder = tmp_path / "results"
    folder.mkdir()
    for name, figures in data.items():
        (folder / f"{name}.json").write_text(json.dumps(REPORT | {"data": figures}))
    return folder


@pytest.mark.stress
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_prints_a_table_and_writes_nothing(script: str, runtime_dir: Path) -> None:
    written = BENCHMARKS / "results" / f"{script}.json"
    before = written.stat() if written.exists() else None

    printed = run(script, "--quick", folder=runtime_dir)

    assert re.search(r"\?\n\n.+\n\n\| .+ \|\n\|---\|[-:|]+\|\n\| ", printed), printed
    assert (written.stat() if written.exists() else None) == before
    assert list(runtime_dir.iterdir()) == []


def test_every_benchmark_has_a_section() -> None:
    assert sorted(re.findall(r"<!-- table: (\w+) -->", DOCUMENT)) == SCRIPTS


def test_tables_go_between_their_marks(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("a\n<!-- table: load -->\nold\n<!-- end -->\nb\n<!-- table: sample -->\nold\n<!-- end -->\n")

    run("tables", "--results", results, document)

    assert document.read_text() == (
        "a\n<!-- table: load -->\nHow much?\n\nNothing else.\n\n| dataset | MiB |\n|---|---:|\n| shmserve | 1.0 |\n\n"
        "`python benchmarks/made_up.py`, 12 s, on 2 cores (a processor), 24 GiB, Linux 6.18.1 (shmem_enabled: never), "
        "Python 3.11.7, torch 2.13.0.\n<!-- end -->\nb\n<!-- table: sample -->\nNot measured yet.\n<!-- end -->\n"
    )


def test_the_headline_counts_page_tables_and_brackets_what_was_left_out(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("<!-- table: ram_headline -->\n<!-- end -->\n")

    run("tables", "--results", results, document)

    lines = document.read_text().splitlines()
    assert lines[1] == "| MiB of RAM for the dataset | 1 rank | 2 ranks | 8 x 2 workers |"
    assert lines[3:5] == ["| list | 1,202 | 1,202 | (9,000) |", "| shmserve | 1,002 | 1,002 | 1,002 |"]


@pytest.mark.parametrize("name", ["README.md", "benchmarks/README.md"])
def test_the_documents_show_the_results_in_the_tree(name: str, tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text((REPOSITORY / name).read_text())

    run("tables", document)

    assert (REPOSITORY / name).read_text() == document.read_text(), "python benchmarks/tables.py brings it up to date"


def test_pictures_are_the_same_for_the_same_results(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    for folder in ("first", "second"):
        run("plot", "--results", results, "--pictures", tmp_path / folder)

    pictures = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert set(pictures) == {"ram_by_rank.svg", "ram_over_epoch.svg"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()} == pictures


def test_the_peers_are_pinned() -> None:
    requirements = [line for line in (BENCHMARKS / "peers.txt").read_text().splitlines() if line and line[0] != "#"]

    assert requirements
    assert [line for line in requirements if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert os.access(BENCHMARKS / "peers", os.X_OK)
    subprocess.run(["bash", "-n", BENCHMARKS / "peers"], check=True)
