"""The keys with which daemon and clients know each other over TCP (ZeroMQ's CURVE), as files in one directory.

    daemon.key           the daemon's public key           clients need it
    daemon.key_secret    the daemon's own                  stays with the daemon
    client.key_secret    a client's own                    stays with that client
    clients/NAME.key     public keys of clients            who is let in

A client needs `daemon.key` and `client.key_secret`, a daemon the others but the last but one. The files are those of
`zmq.auth`. This module is imported only where there are keys.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq.auth
from zmq.utils import z85

from .errors import ConfigError

__all__ = ["ClientKeys", "DaemonKeys", "add_client", "client_keys", "daemon_keys", "is_listed", "make_keys"]

log = logging.getLogger(__name__)

_DAEMON_PUBLIC: Final = "daemon.key"
_DAEMON_SECRET: Final = "daemon.key_secret"
_CLIENT_SECRET: Final = "client.key_secret"
_LISTED: Final = "clients"
_REMEDY: Final = "make keys with `shmserve keys DIR`"


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client connects with, each in Z85."""

    daemon_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class DaemonKeys:
    """What a daemon listens with, each in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def client_keys(directory: str) -> ClientKeys:
    """Return the keys of a client, from `directory`.

    Raises:
        ConfigError: a file is missing or damaged, or other users can read the secret.
    """
    public, secret = _load_secret(os.path.join(directory, _CLIENT_SECRET))
    daemon_public, _ = _load(os.path.join(directory, _DAEMON_PUBLIC))
    return ClientKeys(daemon_public, public, secret)


def daemon_keys(directory: str) -> DaemonKeys:
    """Return the keys of a daemon, from `directory`, in which there is a list of clients as well.

    Raises:
        ConfigError: a file is missing or damaged, or other users can read the secret.
    """
    keys = DaemonKeys(*_load_secret(os.path.join(directory, _DAEMON_SECRET)))
    listed = os.path.join(directory, _LISTED)
    if not os.path.isdir(listed):
        raise ConfigError(f"{listed} is not a directory, so no client would be let in: {_REMEDY}")
    return keys


def is_listed(directory: str, public: bytes) -> bool:
    """Return whether `directory` lists the client with this public key, in Z85, at this moment."""
    for path in Path(directory, _LISTED).glob("*.key"):
        try:
            if _load(str(path))[0] == public:
                return True
        except ConfigError as error:  # one file must not lock out the others
            log.warning("%s", error)
    return False


def _load_secret(path: str) -> tuple[bytes, bytes]:
    """Return (public key, secret key)."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}: {_REMEDY}") from error
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:04o}, so other users can read the secret key: chmod 600 it")
    public, secret = _load(path)
    if secret is None or not _is_key(secret):
        raise ConfigError(f"{path} holds no secret key: {_REMEDY}")
    return public, secret


def _load(path: str) -> tuple[bytes, bytes | None]:
    """Return (public key, secret key or None)."""
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror or 'there is none'}: {_REMEDY}") from error
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path} is not a key: {_REMEDY}") from error
    if not _is_key(public):
        raise ConfigError(f"{path} is not a key: {_REMEDY}")
    return public, secret


def _is_key(text: bytes) -> bool:
    return len(text) == 40 and all(byte in z85.Z85CHARS for byte in text)


def make_keys(directory: Path) -> None:
    """Make `directory`, mode 0700, with keys for a daemon and for one client, which is on the list.

    Raises:
        ConfigError: there is something at `directory` already, which stays as it is; or it cannot be made.
    """
    with _workshop(directory.parent) as made:
        zmq.auth.create_certificates(made, "daemon")
        zmq.auth.create_certificates(made, "client")
        (made / _LISTED).mkdir()
        (made / "client.key").rename(made / _LISTED / "client.key")
        _put(made, directory)


def add_client(directory: Path, name: str) -> Path:
    """Return a new directory `directory/name` with all that one more client needs; the client is on the list.

    Raises:
        ConfigError: the name is taken or none for a file, or `directory` is not that of a daemon's keys.
    """
    if not name.isprintable() or "/" in name or "." in name or name in ("", _LISTED):
        raise ConfigError(f"client {name!r}: give a name for a directory, without '/' and '.', and not {_LISTED!r}")
    daemon_keys(str(directory))
    listed = directory / _LISTED / f"{name}.key"
    with _workshop(directory) as made:
        zmq.auth.create_certificates(made, "client")
        shutil.copyfile(directory / _DAEMON_PUBLIC, made / _DAEMON_PUBLIC)
        try:
            os.link(made / "client.key", listed)
        except FileExistsError:
            raise ConfigError(f"{listed} exists and stays as it is: choose another name, or remove it") from None
        (made / "client.key").unlink()
        try:
            _put(made, directory / name)
        except BaseException:
            listed.unlink()
            raise
    return directory / name


@contextmanager
def _workshop(parent: Path) -> Iterator[Path]:
    """Give a directory in `parent`, in which whatever the block makes is for this user alone; gone afterwards."""
    previous = os.umask(0o077)
    try:
        with tempfile.TemporaryDirectory(prefix=".keys-", dir=parent, ignore_cleanup_errors=True) as made:
            yield Path(made)
    except OSError as error:
        raise ConfigError(f"cannot make keys in {parent}: {error.strerror}") from error
    finally:
        os.umask(previous)


def _put(made: Path, directory: Path) -> None:
    """Move what was made to its place, where nothing or an empty directory is."""
    try:
        made.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ConfigError(f"{directory} exists and stays as it is: choose another directory, or remove it") from error
