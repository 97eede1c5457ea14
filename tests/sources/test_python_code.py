"""Datasets that Python code makes, in a helper process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shmserve.sources import SourceOptions, resolve
from shmserve_client import ShmDataset
from shmserve_client.errors import ConfigError, SourceFormatError, SourceNotFoundError
from tests.processes import Daemon, run_cli

from .decoded import table as _table

table = partial(_table, by_helpers=True)

CODE = """
import os
from torch.utils.data import Dataset

PID = os.getpid()
ROWS = [{"text": f"row {number}", "ids": list(range(number % 3))} for number in range(500)]


def rows():
    print("said while it was made")
    return iter(ROWS)


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index * index


squares = Squares()


def sometimes():
    return [{"a": 1}, {"a": 2, "b": "x"}]


def late():
    return [{"a": number} for number in range(2000)] + [{"a": number, "b": 1} for number in range(2000)]


def bad():
    return [{"fine": 1}] * 700 + [{"fine": len}]


def fails():
    raise RuntimeError("no such file on this node")


def pids():
    return [os.getpid(), os.getppid()]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data_code").mkdir()
    (tmp_path / "data_code" / "__init__.py").touch()
    (tmp_path / "data_code" / "made.py").write_text(CODE)
    return tmp_path


def test_rows_become_a_table(folder: Path) -> None:
    found = table(folder / "data_code.made:rows")
    assert found == {"text": [f"row {n}" for n in range(500)], "ids": [list(range(n % 3)) for n in range(500)]}
    assert table(folder / "data_code.made:ROWS", columns=("ids",)) == {"ids": found["ids"]}


def test_a_map_style_dataset_is_iterated_by_its_indices(folder: Path) -> None:
    assert table(folder / "data_code.made:squares") == {"value": [n * n for n in range(10)]}
    assert table(folder / "data_code.made:Squares") == {"value": [n * n for n in range(10)]}


def test_keys_that_rows_lack_are_none(folder: Path) -> None:
    assert table(folder / "data_code.made:sometimes") == {"a": [1, 2], "b": [None, "x"]}
    found = table(folder / "data_code.made:late")
    assert found == {"a": [*range(2000)] * 2, "b": [None] * 2000 + [1] * 2000}


def test_a_daemon_serves_it_and_never_runs_the_code(
    folder: Path, serve: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    daemon = serve("--data", "data_code.made:pids")
    helper, parent = ShmDataset("pids").column()
    assert parent == daemon.pid
    assert helper != daemon.pid
    assert daemon.stdout.count("\n") == 1, daemon.stdout


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("bad", SourceFormatError, r"data_code.made:bad: \[700\]\['fine'\] cannot be stored"),
        (
            "fails",
            SourceFormatError,
            r"made.py: cannot be decoded, it is damaged or not supported: RuntimeError: no such file on this node",
        ),
        ("PID", SourceFormatError, "a int cannot be published"),
        ("absent", ConfigError, "data_code.made:absent: the module has no absent"),
    ],
)
def test_errors_name_the_code(folder: Path, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        table(folder / f"data_code.made:{name}")


def test_a_module_that_is_not_there_is_not_found(folder: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"no module data_code\.other in"):
        resolve([str(folder / "data_code.other:rows")], SourceOptions())
    assert "no module" in run_cli("inspect", "no_such_module:rows").stderr


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data_code.made:rows"
    path.write_bytes(bytes(8))
    assert resolve([str(path)], SourceOptions("uint16")).format == "raw"
