"""`examples/train_tokens.py` as a person would run it: torchrun, two ranks with two workers each; the loss falls."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.demo.corpus import write_corpus
from tests.processes import Child, Daemon, run_cli

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_tokens.py"


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", 2 << 20).tokens_file


def losses(*args: object, folder: Path) -> list[float]:
    """Return the losses that the example prints; it fails the test where it does not finish."""
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2),
        *(EXAMPLE, "--vocab-size", 256, "--steps", 40, "--workers", 2, *args),
    ]
    with Child(argv, folder=folder, env={"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}) as training:
        assert training.wait(90) == 0, training.describe()
        return [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", training.stdout, re.MULTILINE)]


def assert_falling(found: list[float]) -> None:
    assert len(found) == 3
    assert found[0] > 5, "an untrained model knows nothing of 256 tokens: -log(1/256) is 5.5"
    assert found[-1] < 0.7 * found[0]


def test_with_a_daemon(serve: Callable[..., Daemon], tokens_file: Path, tmp_path: Path) -> None:
    serve("--data", tokens_file)

    assert_falling(losses("--dataset", "corpus", folder=tmp_path))


@pytest.fixture
def _embedded_daemon_ends(runtime_dir: Path) -> Iterator[None]:
    yield
    for socket in (runtime_dir / "shmserve").glob("*.sock"):
        assert run_cli("stop", "--endpoint", socket).returncode == 0


@pytest.mark.usefixtures("_embedded_daemon_ends")
def test_without_a_daemon(tokens_file: Path, tmp_path: Path) -> None:
    assert_falling(losses("--data", tokens_file, folder=tmp_path))
