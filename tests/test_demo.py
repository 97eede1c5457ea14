"""`shmserve demo`: the corpus it writes, what it measures, that it works, and that nothing of it stays."""

from __future__ import annotations

import re
import signal
import sys
import sysconfig
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmserve.demo import run_demo, runs
from shmserve.demo.corpus import write_corpus
from shmserve.sources import resolve
from shmserve.sources.base import SourceOptions
from shmserve_client.errors import ConfigError, ShmserveError
from tests.conftest import SHM, unused
from tests.processes import Child, run_cli, wait_until


def test_the_corpus_is_the_text_of_the_standard_library(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "stdlib", 1 << 20)

    library = Path(sysconfig.get_path("stdlib"))
    first = next(path for path in sorted(library.rglob("*.py")) if path.stat().st_size)
    tokens = np.fromfile(corpus.tokens_file, "<u2")
    text = first.read_bytes()
    assert bytes(tokens[: len(text)].tolist()) == text
    assert corpus.tokens == len(tokens) == 1 << 19


def test_the_corpus_is_repeated_until_it_is_large_enough(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "stdlib", 128 << 20)

    plan = resolve([str(corpus.tokens_file)], SourceOptions()).plan()
    assert corpus.repeats > 1
    assert plan.format == "megatron"
    assert plan.num_samples > corpus.files
    assert plan.columns[0].values.shape == (64 << 20,)
    assert corpus.tokens_file.stat().st_size == corpus.nbytes == 128 << 20


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ConfigError, match=r"pip install 'shmserve\[torch\]'"):
        run_demo()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sharing_takes_a_fraction_of_the_memory_for_the_same_training(runtime_dir: Path) -> None:
    temporary = runtime_dir / "tmp"  # the path of a socket has to be short
    temporary.mkdir()
    demo = run_cli(*("demo", "--ranks", 2, "--workers", 2, "--steps", 5), timeout_s=150, env={"TMPDIR": str(temporary)})

    assert demo.returncode == 0, demo
    data, shared, copied, ratio = re.search(
        r"([\d,]+) MiB of data took ([\d,]+) MiB of RAM in shmserve and ([\d,]+) MiB copied, ([\d.]+) times",
        demo.stdout,
    ).groups()
    assert int(shared) < 1.5 * int(data), demo.stdout
    assert int(copied) > 5.5 * int(data), demo.stdout  # six processes
    assert float(ratio) > 3
    losses = re.findall(r"(?:in shmserve|copied) .* ([\d.]+ to [\d.]+) ", demo.stdout)
    assert len(losses) == 2
    assert len(set(losses)) == 1, f"other data: {losses}"
    assert list(temporary.iterdir()) == []


def test_without_workers_it_speaks_of_none(runtime_dir: Path) -> None:
    demo = run_cli("demo", "--ranks", 1, "--workers", 0, "--steps", 1)

    assert demo.returncode == 0, demo
    assert "training on it: 1 rank, 1 step ..." in demo.stdout
    assert not re.search(r"\bworker|\bforkserver", demo.stdout), demo.stdout


def test_a_rank_may_complain_at_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONVERBOSE", "1")  # far more on stderr than a pipe holds
    tokens_file = write_corpus(tmp_path / "stdlib", 1 << 20).tokens_file

    assert runs.train("copied", str(tokens_file), ranks=1, workers=0, steps=1).first_loss > 5


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ShmserveError, match="a rank of the demo failed: FileNotFoundError"):
        runs.train("copied", str(tmp_path / "missing.bin"), ranks=2, workers=0, steps=1)


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_PATIENCE_S", 0.0)  # not even the interpreter's end is that fast
    tokens_file = write_corpus(tmp_path / "stdlib", 1 << 20).tokens_file

    assert runs.train("copied", str(tokens_file), ranks=1, workers=0, steps=1).first_loss > 5


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(signum: signal.Signals, tmp_path: Path, runtime_dir: Path) -> None:
    temporary = runtime_dir / "tmp"  # the path of a socket has to be short
    temporary.mkdir()
    semaphores = _semaphores()
    argv = [sys.executable, "-m", "shmserve", "demo", "--ranks", 2, "--workers", 1]
    with Child(argv, folder=tmp_path, env={"TMPDIR": str(temporary)}) as demo:
        program = psutil.Process(demo.pid)
        # The daemon, and for each rank itself, multiprocessing's two helpers, and a worker, which has its semaphores.
        wait_until(lambda: len(program.children(recursive=True)) >= 1 + 2 * 4, 60, "the training")
        assert _semaphores() - semaphores
        demo.send_signal(signum)
        assert demo.wait(30) != 0

    assert list(temporary.iterdir()) == []
    assert "Traceback" not in demo.stderr, demo.describe()
    assert unused(_semaphores() - semaphores) == set()


def _semaphores() -> set[object]:
    """The names in /dev/shm that multiprocessing gives its semaphores, of whichever program."""
    return {path.name for path in SHM.glob("sem.mp-*")}
