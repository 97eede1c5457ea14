"""The main job with real processes: ranks with DataLoader workers train on a served corpus, and the daemon may die."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve.demo.corpus import Corpus, write_corpus
from shmserve_client.memory import measure
from tests.processes import Child, Daemon, wait_until

RANKS = 2
BLOCK_SIZE = 512

TRAIN = """
    import sys, time
    from pathlib import Path

    import numpy as np
    from torch.utils.data import DataLoader, DistributedSampler

    from shmserve_client import ShmDataset

    def main(endpoint, rank, ranks, block_size, folder):
        folder = Path(folder)
        dataset = ShmDataset(endpoint=endpoint, block_size=int(block_size))
        sampler = DistributedSampler(dataset, int(ranks), int(rank), shuffle=False)
        loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2)
        for epoch in range(2):
            batches = []
            for batch in loader:
                batches.append(batch.numpy())
                if epoch == 0 and len(batches) == 1:
                    (folder / f"training-{rank}").touch()
                    while not (folder / "go-on").exists():
                        time.sleep(0.01)
            np.save(folder / f"epoch-{epoch}-rank-{rank}.npy", np.concatenate(batches))

    if __name__ == "__main__":
        main(*sys.argv[1:])
    """


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """4 MiB of uint16 tokens in a Megatron pair, the text of real programs."""
    return write_corpus(tmp_path / "corpus", 4 << 20)


def tokens_of(corpus: Corpus) -> np.ndarray:
    return np.fromfile(corpus.tokens_file, "<u2")


def sequences_of(corpus: Corpus) -> list[np.ndarray]:
    """The sequences as Megatron's .idx divides the tokens: at byte 18 their number, from byte 34 their lengths."""
    index = corpus.prefix.with_suffix(".idx").read_bytes()
    count = int.from_bytes(index[18:26], "little")
    return np.split(tokens_of(corpus), np.cumsum(np.frombuffer(index, "<i4", count, 34))[:-1])


def windows_of(corpus: Corpus, rank: int) -> np.ndarray:
    """The windows that a rank sees in one epoch, in order, padded as DistributedSampler does."""
    tokens = tokens_of(corpus)
    windows = tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
    assert len(windows) % RANKS == 0
    return windows[rank::RANKS]


def test_ranks_finish_their_epoch_without_the_daemon_and_the_next_one_adopts(
    serve: Callable[..., Daemon], corpus: Corpus, tmp_path: Path
) -> None:
    daemon = serve("--data", corpus.tokens_file)
    (segment,) = daemon.segments()
    ranks = [
        Child.python(TRAIN, daemon.endpoint, rank, RANKS, BLOCK_SIZE, tmp_path, folder=tmp_path)
        for rank in range(RANKS)
    ]
    try:
        wait_until(lambda: all((tmp_path / f"training-{rank}").exists() for rank in range(RANKS)), 60, "the training")
        daemon.kill()
        (tmp_path / "go-on").touch()
        for rank in ranks:
            assert rank.wait(60) == 0, rank.describe()
    finally:
        for rank in ranks:
            rank.close()

    for epoch in range(2):  # the workers of epoch 1 started when there was no daemon
        for rank in range(RANKS):
            seen = np.load(tmp_path / f"epoch-{epoch}-rank-{rank}.npy")
            np.testing.assert_array_equal(seen, windows_of(corpus, rank))

    started = time.monotonic()
    successor = serve("--data", corpus.tokens_file)
    assert time.monotonic() - started < 10
    (dataset,) = successor.status().datasets
    assert dataset.adopted
    assert dataset.load_seconds < 1
    assert successor.segments() == [segment]


def test_every_stored_sample_arrives_in_every_worker(
    serve: Callable[..., Daemon], corpus: Corpus, tmp_path: Path
) -> None:
    daemon = serve("--data", corpus.tokens_file)
    program = """
        import sys, zlib
        from torch.utils.data import DataLoader, DistributedSampler
        from shmserve_client import ShmDataset

        endpoint, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        dataset = ShmDataset("corpus", endpoint=endpoint, dtype="stored")
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=False, drop_last=True)
        for sample in DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=2):
            print(len(sample), zlib.crc32(sample.numpy()))
        """
    ranks = [Child.python(program, daemon.endpoint, rank, RANKS, folder=tmp_path) for rank in range(RANKS)]
    try:
        for rank in ranks:
            assert rank.wait(60) == 0, rank.describe()
    finally:
        for rank in ranks:
            rank.close()

    expected = [f"{len(sequence)} {zlib.crc32(sequence)}" for sequence in sequences_of(corpus)]
    for number, rank in enumerate(ranks):
        assert rank.stdout.splitlines() == expected[number::RANKS][: len(expected) // RANKS]


def test_the_daemon_stays_small_and_knows_no_torch(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 64 << 20)
    daemon = serve("--data", corpus.tokens_file)

    held = measure(daemon.pid)

    assert held.private <= 60 << 20
    assert daemon.status().private_nbytes <= 60 << 20
    assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()
