"""Coverage-guided runs over whatever reads bytes of others: nothing but shmserve's errors, no hang, no growth."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.processes import Child
from tests.segments import CHILD_ENV

from .corpora import PLANNED, smallest

SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))
"""How long each run takes."""
MAX_GROWTH_NBYTES = 64 << 20
SOURCE_TARGETS = [f"{corpus.source}-{len(corpus.names)}" for corpus in smallest()]


def test_every_source_is_run() -> None:
    assert {target.partition("-")[0] for target in SOURCE_TARGETS} == PLANNED


@pytest.mark.stress
@pytest.mark.promise("F5", "F24", "F34")
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("target", ["messages", "segments", *SOURCE_TARGETS])
def test_no_bytes_do_harm(target: str, shm_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    folder = shm_dir / "run"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.fuzz.coverage", target, SECONDS, folder]
    with Child(command, folder=tmp_path, env=CHILD_ENV) as child:
        code = child.wait(SECONDS + 60)
    assert code == 0, child.stderr[-20_000:]
    report = json.loads(child.stdout)
    report["coverage"] = max(map(int, re.findall(r" cov: (\d+) ", child.stderr)))
    print(json.dumps({"target": target, "seconds": SECONDS, **report}))  # noqa: T201  # what a stress run is for
    assert report["executions"] > 10 * SECONDS
    assert 0 < report["accepted"] < report["executions"]
    assert report["grown_nbytes"] < MAX_GROWTH_NBYTES
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
