"""The keys of daemon and clients as files: made once, never overwritten, and secrets kept secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shmserve_client.errors import ConfigError
from shmserve_client.keys import add_client, client_keys, daemon_keys, is_listed, make_keys
from tests.processes import run_cli


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_keys(made)
    return made


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_is_made_fits_together(keys: Path) -> None:
    ours, theirs = client_keys(str(keys)), daemon_keys(str(keys))
    assert ours.daemon_public == theirs.public
    assert is_listed(str(keys), ours.public)
    assert not is_listed(str(keys), theirs.public)
    assert ours.secret.decode() not in repr(ours)
    assert theirs.secret.decode() not in repr(theirs)
    assert sorted(contents(keys)) == ["client.key_secret", "clients/client.key", "daemon.key", "daemon.key_secret"]


def test_a_further_client_gets_what_it_needs_and_no_more(keys: Path) -> None:
    made = add_client(keys, "box-1")
    assert made == keys / "box-1"
    assert sorted(contents(made)) == ["client.key_secret", "daemon.key"]
    theirs = client_keys(str(made))
    assert theirs.daemon_public == daemon_keys(str(keys)).public
    assert theirs.public != client_keys(str(keys)).public
    assert is_listed(str(keys), theirs.public)


def test_nobody_else_can_read_them_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        make_keys(tmp_path / "keys")
        add_client(tmp_path / "keys", "box")
        assert os.umask(0) == 0  # it was given back
    finally:
        os.umask(previous)
    for path in [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_overwritten(keys: Path) -> None:
    add_client(keys, "box")
    before = contents(keys)
    with pytest.raises(ConfigError, match=r"keys exists and stays as it is"):
        make_keys(keys)
    with pytest.raises(ConfigError, match=r"box\.key exists and stays as it is"):
        add_client(keys, "box")
    (keys / "clients" / "box.key").unlink()
    with pytest.raises(ConfigError, match=r"keys/box exists and stays as it is"):
        add_client(keys, "box")
    del before["clients/box.key"]
    assert contents(keys) == before
    assert sorted(path.name for path in keys.parent.iterdir()) == ["keys"]  # nothing half-made beside it


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    make_keys(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["", "clients", "../box", "a/b", ".hidden", "a.b", "a\nb"])
def test_what_is_no_name_for_a_client_is_refused(keys: Path, name: str) -> None:
    before = contents(keys)
    with pytest.raises(ConfigError, match="give a name for a directory"):
        add_client(keys, name)
    assert contents(keys) == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_can_read_is_refused(keys: Path, mode: int) -> None:
    (keys / "client.key_secret").chmod(mode)
    (keys / "daemon.key_secret").chmod(mode)
    for load in (client_keys, daemon_keys):
        with pytest.raises(ConfigError, match=rf"key_secret has mode {mode:04o}, .*: chmod 600 it"):
            load(str(keys))


@pytest.mark.parametrize(
    "text", ["", "garbage", 'public-key = "short"\n', "public-key\n", 'public-key = "%s"\n' % ("~" * 40)]
)
def test_damaged_files_are_refused_by_name(keys: Path, text: str) -> None:
    for name in ("daemon.key", "daemon.key_secret"):
        (keys / name).write_text(text)
    with pytest.raises(ConfigError, match=r"daemon\.key is not a key"):
        client_keys(str(keys))
    with pytest.raises(ConfigError, match=r"daemon\.key_secret is not a key"):
        daemon_keys(str(keys))


def test_a_public_key_is_no_secret_one(keys: Path) -> None:
    (keys / "client.key_secret").write_bytes((keys / "daemon.key").read_bytes())
    with pytest.raises(ConfigError, match="holds no secret key"):
        client_keys(str(keys))


def test_missing_files_are_named(keys: Path) -> None:
    (keys / "daemon.key").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the key .*daemon\.key: .*make keys with `shmserve keys DIR`"):
        client_keys(str(keys))
    with pytest.raises(ConfigError, match=r"client\.key_secret: No such file"):
        client_keys(str(keys / "nowhere"))
    for path in (keys / "clients").iterdir():
        path.unlink()
    (keys / "clients").rmdir()
    with pytest.raises(ConfigError, match=r"clients is not a directory"):
        daemon_keys(str(keys))


def test_one_damaged_file_locks_nobody_else_out(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    (keys / "clients" / "0.key").write_text("garbage")
    assert is_listed(str(keys), client_keys(str(keys)).public)
    assert not is_listed(str(keys), b"x" * 40)
    assert "0.key is not a key" in caplog.text


def test_the_command_line_makes_them(tmp_path: Path) -> None:
    made = run_cli("keys", tmp_path / "keys")
    assert (made.returncode, made.stdout) == (0, ""), made
    assert "--tcp HOST:PORT --keys DIR" in made.stderr
    assert run_cli("keys", tmp_path / "keys", "--client", "box").returncode == 0
    client_keys(str(tmp_path / "keys" / "box"))
    for args in ([tmp_path / "keys"], [tmp_path / "keys", "--client", "box"], [tmp_path / "no" / "parent"]):
        refused = run_cli("keys", *args)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
