"""Folders: images by class, other files, and what is none of either."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.sources import SourceOptions, folder, resolve
from shmserve_client.errors import SourceFormatError, SourceNotFoundError

from .decoded import table


def write(directory: Path, *paths: str) -> None:
    """Write files whose content is their path."""
    for path in paths:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(path.encode())


def test_classes_are_the_sorted_names_of_the_directories(tmp_path: Path) -> None:
    write(tmp_path, "dog/10.png", "dog/2.JPG", "cat/a/deep.webp", "cat/x.jpeg", "notes.txt", "cat/list.csv")
    found = table(tmp_path)
    assert found["path"] == ["cat/a/deep.webp", "cat/x.jpeg", "dog/10.png", "dog/2.JPG"]
    assert found["image"] == [path.encode() for path in found["path"]]
    assert (found["label"], found["class"]) == ([0, 0, 1, 1], ["cat", "cat", "dog", "dog"])
    assert resolve([str(tmp_path)], SourceOptions()).format == "imagefolder"


def test_other_files_are_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "PART_NBYTES", 10)
    write(tmp_path, "b/two.wav", "a.flac", "c.wav", "b/.hidden", ".git/config")
    assert table(tmp_path) == {"data": [b"a.flac", b"b/two.wav", b"c.wav"], "path": ["a.flac", "b/two.wav", "c.wav"]}
    assert table(tmp_path, columns=("path",)) == {"path": ["a.flac", "b/two.wav", "c.wav"]}
    resolved = resolve([str(tmp_path)], SourceOptions())
    assert (resolved.format, len(resolved.files)) == ("files", 3)
    (tmp_path / "c.wav").write_bytes(b"changed")
    assert resolved.changed()


def test_links_to_files_are_followed_and_those_to_directories_are_not(tmp_path: Path) -> None:
    write(tmp_path / "data", "a.wav")
    write(tmp_path, "elsewhere.wav")
    os.symlink(tmp_path / "elsewhere.wav", tmp_path / "data/b.wav")
    os.symlink(tmp_path / "data", tmp_path / "data/loop")
    assert table(tmp_path / "data")["path"] == ["a.wav", "b.wav"]


def test_images_that_are_not_in_classes_are_files(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "cat/b.png")
    assert list(table(tmp_path)) == ["data", "path"]


def test_directories_of_data_are_no_folders_of_files(tmp_path: Path) -> None:
    write(tmp_path / "data", "a/x.array_record")
    with pytest.raises(SourceNotFoundError, match="no data files"):
        resolve([str(tmp_path / "data")], SourceOptions())
    write(tmp_path / "tokens", "train.bin", "cat/b.png")
    assert resolve([str(tmp_path / "tokens")], SourceOptions(dtype="uint8")).format == "raw"


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a\udcff.wav").write_bytes(b"x")
    with pytest.raises(SourceFormatError, match="a file's name is not UTF-8: rename it"):
        table(tmp_path)
