"""Data from stores, by real servers on loopback: HTTP with and without manners, and S3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve_client import ShmDataset
from tests.processes import Child, Daemon, run_cli, run_python, wait_until
from tests.sources.decoded import plain, table
from tests.stores import Store, http_store, s3_store
from tests.test_fixtures_served import CASES, FIXTURES, _difference, _served_name

pytest.importorskip("aiohttp")

Serve = Callable[..., Daemon]

TOKENS = np.random.default_rng(0).integers(0, 50_000, 10_000_000).astype(np.uint16)
"""20 MB: three blocks."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with http_store(root) as found:
        yield found


@pytest.fixture
def tokens(root: Path) -> str:
    TOKENS.tofile(root / "tokens.bin")
    return "tokens.bin"


def served_tokens() -> np.ndarray:
    with ShmDataset("tokens", block_size=1) as dataset:
        values = dataset.column()
        assert isinstance(values, np.ndarray)
        return values.copy()


def test_every_fixture_is_the_same_from_a_server(serve: Serve, tmp_path: Path) -> None:
    with http_store(FIXTURES) as store:
        lines = []
        for name, case in CASES.items():
            lines += [f"[datasets.{json.dumps(_served_name(name))}]"]
            lines += [f"data = {json.dumps([f'{store.url}/{path}' for path in case.data])}"]
            lines += [f"dtype = {json.dumps(case.dtype)}"] if case.dtype else []
        config = tmp_path / "node.toml"
        config.write_text("\n".join(lines))
        serve("--config", config)
        assert {name: wrong for name, case in CASES.items() if (wrong := _difference(name, case))} == {}


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("written-hf-datasets/ragged_3shards", "pyarrow"),
        ("written-hf-datasets/ragged.parquet", "pyarrow"),
        ("written-hf-datasets/ragged.csv", "pyarrow"),
        ("written-hf-datasets/ragged.jsonl", "json"),
        ("written-mosaicml-streaming/text_id", "json"),
        ("written-mosaicml-streaming/tokens_bytes_int64_llmfoundry_style_zstd", "zstandard"),
        ("written-litdata/dict", "json"),
        ("written-misc/fixed.safetensors", "json"),
        ("written-misc/stored.npz", "json"),
        ("written-misc/r.tfrecord", "json"),
        ("written-misc/t.feather", "pyarrow"),
        ("written-misc/imagefolder", "json"),
        ("written-misc/lmdb", "lmdb"),
    ],
)
def test_what_is_decoded_is_the_same_from_a_server(path: str, library: str, serve: Serve) -> None:
    pytest.importorskip(library)
    columns = table(FIXTURES / path)
    with http_store(FIXTURES) as store:
        serve("--data", f"it={store.url}/{path}")
        with ShmDataset("it", dtype="stored") as dataset:
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            wanted = rows if len(columns) > 1 else next(iter(columns.values()))
            assert [plain(sample) for sample in dataset] == wanted


def test_its_bytes_are_read_once_for_all_processes(store: Store, tokens: str, stop_embedded: None) -> None:
    url = f"{store.url}/{tokens}"
    program = """
        import sys
        from shmserve_client import ShmDataset
        dataset = ShmDataset.from_path(sys.argv[1], stored_dtype="uint16", block_size=1000)
        print(len(dataset), int(dataset[9999][-1]), dataset.info.data[0])
    """
    folder = store.root.parent
    children = [Child.python(program, url, folder=folder) for _ in range(4)]
    for child in children:
        assert child.wait(60) == 0, child.describe()
        assert child.stdout == f"10000 {TOKENS[-1]} {url}\n"
    large = [(start, stop) for _, start, stop in store.asked if stop - start > 1 << 16]
    assert sorted(large) == [(0, 8 << 20), (8 << 20, 16 << 20), (16 << 20, TOKENS.nbytes)]
    assert store.most_under_way > 1


def test_only_what_is_missing_is_asked_for_again(store: Store, tokens: str, serve: Serve) -> None:
    cut: list[int] = []

    def misbehave(path: str, number: int) -> str:
        large = [each for each in store.asked if each[2] - each[1] > 1 << 20]
        if large and len(cut) < 2:
            cut.append(number)
            return "cut"
        return ""

    store.misbehave = misbehave
    daemon = serve("--data", f"{store.url}/{tokens}")
    assert len(cut) == 2
    np.testing.assert_array_equal(served_tokens(), TOKENS)
    whole = {(start, stop) for _, start, stop in store.asked if stop - start > 1 << 20}
    assert len(whole) == 3
    assert store.sent_nbytes < TOKENS.nbytes + (2 * 8 << 20), "two blocks twice, at most"
    assert "Traceback" not in daemon.stderr


@pytest.mark.parametrize("status", ["503", "429"])
def test_a_server_that_is_busy_is_asked_again(status: str, store: Store, tokens: str, serve: Serve) -> None:
    store.misbehave = lambda path, number: status if number in (1, 3, 4, 6) else ""
    serve("--data", f"{store.url}/{tokens}")
    np.testing.assert_array_equal(served_tokens(), TOKENS)


def refused(*args: object, shm_dir: Path, env: dict[str, str] | None = None) -> str:
    done = run_cli("start", "--shm-dir", shm_dir, *args, env=env)
    assert done.returncode == 3, done
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    return line


@pytest.mark.slow
def test_a_server_that_stays_busy_is_an_error_with_the_last_reason(
    store: Store, tokens: str, shm_dir: Path, runtime_dir: Path
) -> None:
    store.misbehave = lambda path, number: "503" if number > 3 else ""
    line = refused("--data", f"{store.url}/{tokens}", shm_dir=shm_dir)
    assert f"{store.url}/{tokens} cannot be read, tried 6 times" in line
    assert "503" in line


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("403", "its store refuses to give it"),
        ("401", "set the credentials for it in the environment"),
        ("no ranges", "its server does not serve ranges of a file: download it"),
        ("404", "no such file, directory or prefix"),
    ],
)
def test_what_no_repetition_would_help_is_refused_at_once(
    how: str, message: str, store: Store, tokens: str, shm_dir: Path, runtime_dir: Path
) -> None:
    store.misbehave = lambda path, number: how
    assert message in refused("--data", f"{store.url}/{tokens}", shm_dir=shm_dir)
    assert store.requests[f"/{tokens}"] == 1


def test_a_server_that_loses_its_ranges_is_never_believed(
    store: Store, tokens: str, shm_dir: Path, runtime_dir: Path
) -> None:
    store.misbehave = lambda path, number: "no ranges" if number > 2 else ""
    assert "does not serve ranges" in refused("--data", f"{store.url}/{tokens}", shm_dir=shm_dir)


def test_a_file_that_changes_meanwhile_is_an_error(
    store: Store, tokens: str, root: Path, shm_dir: Path, runtime_dir: Path
) -> None:
    def misbehave(path: str, number: int) -> str:
        if number == 5:
            os.utime(root / tokens, ns=(7, 7))
        return ""

    store.misbehave = misbehave
    assert "changed while it was" in refused("--data", f"{store.url}/{tokens}", shm_dir=shm_dir)


def test_a_restart_adopts_without_reading_again(store: Store, tokens: str, serve: Serve) -> None:
    daemon = serve("--data", f"{store.url}/{tokens}")
    (segment,) = daemon.segments()
    daemon.kill()
    sent_nbytes = store.sent_nbytes
    again = serve("--data", f"{store.url}/{tokens}")
    assert again.segments() == [segment]
    assert store.sent_nbytes - sent_nbytes < 1 << 20
    np.testing.assert_array_equal(served_tokens(), TOKENS)


def test_a_stop_while_it_is_read_leaves_nothing(store: Store, tokens: str, serve: Serve, shm_dir: Path) -> None:
    store.misbehave = lambda path, number: "503" if number > 3 else ""
    daemon = serve("--data", f"{store.url}/{tokens}", wait=False)
    wait_until(lambda: store.requests.get(f"/{tokens}", 0) > 5, what="the loading")
    started_s = time.monotonic()
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0, daemon.describe()
    assert time.monotonic() - started_s < 4
    assert list(shm_dir.iterdir()) == []


def test_secrets_of_a_url_are_shown_nowhere(store: Store, tokens: str, serve: Serve) -> None:
    url = f"{store.url}/{tokens}".replace("http://", "http://user:s3cr3t@") + "?X-Signature=s3cr3t"
    daemon = serve("--data", f"tokens={url}")
    np.testing.assert_array_equal(served_tokens(), TOKENS)
    with ShmDataset("tokens", block_size=1) as dataset:
        assert dataset.info.data == (f"{store.url}/{tokens}",)
        content = Path(dataset.info.path).read_bytes()
    done = run_cli("status", "--json")
    store.misbehave = lambda path, number: "403"
    reload = run_cli("reload", "tokens")
    assert reload.returncode == 1
    assert "refuses to give it" in reload.stderr
    for text in (done.stdout, daemon.stdout, daemon.stderr, reload.stderr, content.decode("latin-1")):
        assert "s3cr3t" not in text


def test_what_cannot_be_is_refused_by_name(store: Store, tokens: str, shm_dir: Path, runtime_dir: Path) -> None:
    url = f"{store.url}/{tokens}"
    assert "only files of this machine can be mapped" in refused("--data", url, "--mode", "map", shm_dir=shm_dir)
    assert "what:// is no store that fsspec knows" in refused("--data", "what://a/b.bin", shm_dir=shm_dir)


def test_it_is_inspected_and_built_from(store: Store, tokens: str, tmp_path: Path) -> None:
    shown = json.loads(run_cli("inspect", f"{store.url}/{tokens}", "--json").stdout)
    assert shown["format"] == "raw"
    done = run_cli("build", f"{store.url}/{tokens}", tmp_path / "built.seg")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "built.seg").read_bytes()[2 << 20 :] == TOKENS.tobytes()


@pytest.mark.parametrize("shards", ["s3://corpus/shards", "s3://corpus/shards/part_*.npy"])
def test_shards_of_s3_are_in_natural_order(shards: str, root: Path, serve: Serve) -> None:
    pytest.importorskip("s3fs")
    (root / "shards").mkdir()
    for number in range(12):
        np.save(root / "shards" / f"part_{number}.npy", np.full((2, 3), number))
    with s3_store(root, "corpus") as env:
        serve("--data", f"rows={shards}", env=env)
        with ShmDataset("rows", dtype="stored") as dataset:
            assert [int(row[0]) for row in dataset] == [number for number in range(12) for _ in range(2)]


def test_a_pair_and_a_table_of_s3(root: Path, serve: Serve) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("pyarrow")
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"written-megatron-core/ragged_uint16{suffix}", root)
    shutil.copytree(FIXTURES / "written-hf-datasets/ragged_3shards", root / "saved")
    local = table(root / "saved")
    with s3_store(root, "corpus") as env:
        serve("--data", "s3://corpus/ragged_uint16", "--data", "s3://corpus/saved", env=env)
        with ShmDataset("ragged_uint16", dtype="stored") as pair, ShmDataset("saved", dtype="stored") as saved:
            assert [row.tolist() for row in pair] == CASES["written-megatron-core/ragged_uint16"].samples
            assert [row["text"] for row in saved] == local["text"]
        missing = run_cli("load", "s3://corpus/absent.bin")
        assert missing.returncode == 1
        assert "s3://corpus/absent.bin: no such file" in missing.stderr


def test_without_its_library_the_pip_install_is_named(tmp_path: Path) -> None:
    done = run_python(
        """
        import sys
        sys.modules["fsspec"] = None
        from shmserve.sources import SourceOptions, resolve
        from shmserve_client.errors import ConfigError
        try:
            resolve(["s3://bucket/a.bin"], SourceOptions())
        except ConfigError as error:
            print(error)
        """
    )
    assert "pip install 'shmserve[remote]'" in done.stdout
