"""What a daemon is told: arguments, a file, and the names that datasets get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.config import (
    DaemonConfig,
    DatasetConfig,
    datasets_from_arguments,
    default_name,
    group_id,
    merge_datasets,
    read_config_file,
)
from shmserve.sources.base import SourceOptions
from shmserve_client.errors import ConfigError

NO_OPTIONS = SourceOptions()


def named(*arguments: str | list[str]) -> dict[str, tuple[str, ...]]:
    groups = [[one] if isinstance(one, str) else one for one in arguments]
    return {dataset.name: dataset.data for dataset in datasets_from_arguments(groups, NO_OPTIONS)}


def test_a_path_alone_is_named_after_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "corpus_text_document.bin"
    path.touch()
    assert named(str(path)) == {"corpus_text_document": (str(path),)}


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("a=x/../y.bin") == {"a": (f"{tmp_path}/y.bin",)}


def test_further_paths_are_shards_of_the_same_dataset(tmp_path: Path) -> None:
    first, second, other = (str(tmp_path / name) for name in ("part_2.bin", "part_10.bin", "val.bin"))
    for path in (first, second, other):
        Path(path).touch()
    assert named([first, second], other) == {"part": (first, second), "val": (other,)}


def test_the_same_explicit_name_again_is_a_further_shard() -> None:
    assert named("all=/a.bin", ["val=/v.bin", "/w.bin"], "all=/b.bin") == {
        "all": ("/a.bin", "/b.bin"),
        "val": ("/v.bin", "/w.bin"),
    }


@pytest.mark.parametrize(
    "arguments", [["/a/corpus", "/b/corpus"], ["corpus=/a.bin", "/b/corpus"], ["/b/corpus", "corpus=/a"]]
)
def test_a_default_name_given_twice_is_refused_with_both_paths(arguments: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"two datasets named 'corpus', /.* and /.*: give each a name, --data NAME=PATH"
    ):
        named(*arguments)


def test_a_path_that_holds_an_equals_sign_and_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lang=en.bin").touch()
    assert named("lang=en.bin") == {"lang=en": (str(tmp_path / "lang=en.bin"),)}
    assert named("/data/lang=en/part") == {"part": ("/data/lang=en/part",)}
    assert named("lang=de.bin") == {"lang": (str(tmp_path / "de.bin"),)}


@pytest.mark.parametrize("argument", ["=a.bin", "name="])
def test_an_empty_name_or_path_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        named(argument)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (["/data/train_*.bin"], "train"),
        (["/data/web/*.bin"], "web"),
        (["/data/web/part-[0-9]?.npy"], "part"),
        (["/data/train.en-de.en"], "train.en-de.en"),  # the prefix of a pair has no suffix to take off
        (["/data/shard_000", "/data/shard_001"], "shard"),
        (["/data/books/a", "/data/books/b"], "books"),
        (["/data/train", "/data/train1"], "train"),
        (["/data/a\nb\udcff"], r"a\nb\udcff"),
        (["/*.bin"], "data"),
    ],
)
def test_default_names(data: list[str], name: str) -> None:
    assert default_name(data) == name


def test_a_directory_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "corpus.v2"
    folder.mkdir()
    assert default_name([str(folder)]) == "corpus.v2"


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "x" * 129, "a\x00b"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 128 printable characters and no '/'"):
        DatasetConfig(name, ("/a",))


def test_names_in_any_script_are_fine() -> None:
    assert DatasetConfig("корпус v2 (final)", ("/a",)).name == "корпус v2 (final)"
    assert len(DatasetConfig("x" * 128, ("/a",)).name) == 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block-size 0 must be at least 1 and less than 2\\^62"),
        ({"block_size": 2**62}, "block-size 4611686018427387904 must be"),
        ({"block_size": 1, "stride": 2**70}, "stride 1180591620717411303424 must be"),
        ({"options": SourceOptions(vocab_size=2**64)}, "vocab-size 18446744073709551616 must be"),
        ({"block_size": 8, "stride": -1}, "stride -1 must be at least 1"),
        ({"options": SourceOptions(vocab_size=0)}, "vocab-size 0 must be at least 1"),
        ({"stride": 8}, "stride 8 without a block-size"),
    ],
)
def test_numbers_that_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetConfig("a", ("/a",), **settings)  # type: ignore[arg-type]


def test_a_daemon_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to serve: give --data PATH"):
        DaemonConfig((), "/tmp/x.sock")


@pytest.mark.parametrize("linger_s", [-1.0, float("nan"), float("inf")])
def test_a_linger_time_that_is_none_is_refused(linger_s: float) -> None:
    with pytest.raises(ConfigError, match="linger"):
        DaemonConfig((DatasetConfig("a", ("/a",)),), "/tmp/x.sock", linger_s=linger_s)


def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        """
        endpoint = "ipc:///run/x/daemon.sock"
        shm_dir = "shm"
        group = "users"
        lock = true
        checksums = true
        linger = 2.5

        [datasets.train]
        data = ["a.bin", "/abs/b*.bin"]
        dtype = "uint16"
        vocab_size = 50257
        block_size = 1025
        stride = 1024

        [datasets."val set"]
        data = "../val"
        """
    )
    file = read_config_file(path)
    assert (file.endpoint, file.shm_dir, file.group) == ("ipc:///run/x/daemon.sock", str(tmp_path / "shm"), "users")
    assert (file.lock, file.checksums, file.linger) == (True, True, 2.5)
    assert file.datasets == (
        DatasetConfig("train", (f"{tmp_path}/a.bin", "/abs/b*.bin"), SourceOptions("uint16", 50257), 1025, 1024),
        DatasetConfig("val set", (f"{tmp_path.parent}/val",)),
    )


def test_the_example_in_the_module_is_a_valid_file(tmp_path: Path) -> None:
    import shmserve.config

    documentation = shmserve.config.__doc__ or ""
    path = tmp_path / "node.toml"
    path.write_text("\n".join(line[4:] for line in documentation.splitlines() if line.startswith("    ")))
    assert [dataset.name for dataset in read_config_file(path).datasets] == ["corpus", "large"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "port = 1",
            "unknown key 'port': the keys are checksums, datasets, endpoint, group, keys, linger, lock, shm_dir, tcp",
        ),
        ("lock = 1", "lock is a int, expected bool"),
        ("checksums = 1", "checksums is a int, expected bool"),
        ("linger = true", "linger is a bool, expected int or float"),
        ("datasets = 3", "datasets is a int, expected dict"),
        ("[datasets]\na = 'x.bin'", r"\[datasets.a\] is a str, expected a table with data"),
        ("[datasets.a]\ndtype = 'uint8'", r"\[datasets.a\] needs data = PATH"),
        ("[datasets.a]\ndata = []", "needs data"),
        ("[datasets.a]\ndata = [1]", "needs data"),
        ("[datasets.a]\ndata = 'x'\nblocksize = 3", r"\[datasets.a\] has the unknown key 'blocksize'"),
        ("[datasets.a]\ndata = 'x'\nblock_size = '3'", "block_size is a str, expected int"),
        ("[datasets.a]\ndata = 'x'\nmode = 'copy'", "mode 'copy': it must be load or map"),
        ("[datasets.a]\ndata = 'x'\nmode = 'map'\nvocab_size = 9", "cannot be checked: leave out vocab-size 9"),
        ("[datasets.a]\ndata = 'x'\nwarm = true", "warm is for mode map"),
        ("[datasets.a]\ndata = 'x'\ncolumns = []", "columns must be a list of names, one at least"),
        ("[datasets.a]\ndata = 'x'\ncolumns = [1]", "columns must be a list of names, one at least"),
        ("[datasets.'a/b']\ndata = 'x'", "dataset name 'a/b'"),
        ("[datasets.a]\ndata = 'x'\n[datasets.a]\ndata = 'y'", "is not TOML"),
        ("data =", "is not TOML"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_config_file(path)


def test_a_name_in_file_and_arguments_is_refused() -> None:
    first, second = DatasetConfig("a", ("/1",)), DatasetConfig("a", ("/2",))
    assert merge_datasets([first], []) == (first,)
    with pytest.raises(ConfigError, match="two datasets named 'a', /1 and /2"):
        merge_datasets([first], [second])


def test_a_group_is_a_name_or_a_number() -> None:
    assert group_id("root") == 0
    assert group_id(str(os.getgid())) == os.getgid()
    with pytest.raises(ConfigError, match="no group 'no-such-group'"):
        group_id("no-such-group")
