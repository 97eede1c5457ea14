"""What surrounds the code: the version, the licence and the scripts agree with it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import shmserve
import shmserve_client
from shmserve_client import __version__

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = ["scripts/demo", "scripts/test", "scripts/stress", "scripts/check", ".ci/run"]


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert versions[0] == __version__


def test_the_licence_is_whole() -> None:
    text = (REPOSITORY / "LICENSE").read_text()

    assert "Apache License\n" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("package", [shmserve, shmserve_client])
def test_type_checkers_take_its_annotations(package: ModuleType) -> None:
    assert package.__file__
    assert Path(package.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(REPOSITORY / script, os.X_OK)
    subprocess.run(["bash", "-n", REPOSITORY / script], check=True)


def test_the_environment_reports_what_is_missing(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; *) echo 3.8;; esac\n')
    old.chmod(0o755)

    done = subprocess.run(
        ["bash", "-c", "source scripts/environment"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr == f"error: {old} is Python 3.8, shmserve needs 3.11 or later: set PYTHON\n"
