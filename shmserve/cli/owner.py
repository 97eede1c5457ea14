"""What only the owner of the daemon and of its segments can do: `stop` and `gc`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Final

import click

from shmserve.config import DEFAULT_SHM_DIR
from shmserve.endpoints import embedded_endpoints, remove_unused_files
from shmserve.orphans import Leftover, collect
from shmserve.text import size
from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path, find_endpoint, lock_path
from shmserve_client.errors import DaemonUnreachableError, printable
from shmserve_client.locks import holder_of
from shmserve_client.protocol import Stop, Stopping

from .options import Command, ask, echo_json, option

__all__ = ["find_own_daemon", "gc", "stop"]

_STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.02


@click.command(cls=Command)
@option("--endpoint", metavar="ENDPOINT", help="Which daemon.  [default: the first that is found]")
def stop(endpoint: str | None) -> None:
    """Stop the daemon and remove its segments; processes that have them attached read on."""
    path = find_own_daemon(endpoint)
    with Connection(control_path(path), _STOP_TIMEOUT_S) as connection:
        ask(connection, Stop(), Stopping)
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    while (holder := holder_of(lock_path(path))) is not None:
        if time.monotonic() > deadline_s:
            raise DaemonUnreachableError(f"the daemon at {path} ({holder}) is still there after {_STOP_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    click.echo(f"stopped the daemon at ipc://{path}", err=True)


def find_own_daemon(endpoint: str | None) -> str:
    """Return the socket of the daemon that the owner means; where it is not told which, none that from_path started."""
    try:
        return find_endpoint(endpoint)
    except DaemonUnreachableError as error:
        embedded = [] if endpoint else [f"ipc://{path}" for path in embedded_endpoints()]
        if not embedded:
            raise
        raise DaemonUnreachableError(
            f"no daemon but those that from_path started, at {', '.join(embedded)}: name one of them with --endpoint"
        ) from error


@click.command(cls=Command)
@option("--shm-dir", metavar="DIR", default=DEFAULT_SHM_DIR, show_default=True, help="Where to look.")
@option("--dry-run", is_flag=True, help="Only say what would be removed.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def gc(shm_dir: str, dry_run: bool, as_json: bool) -> None:
    """Remove what your ended daemons left: segments that no process has attached, logs, locks of killed starters."""
    collected = collect(shm_dir, dry_run=dry_run)
    files = remove_unused_files(dry_run=dry_run)
    if as_json:
        echo_json({**asdict(collected), "files": files})
        return
    for what in (*map(_describe, collected.removed), *map(printable, files)):
        click.echo(f"{'would remove' if dry_run else 'removed'} {what}")
    for leftover in collected.kept:
        pids = ", ".join(str(process.pid) for process in leftover.attached)
        click.echo(f"kept {_describe(leftover)}: attached by {pids}")
    if not collected.removed and not collected.kept:
        click.echo(f"no orphaned segments in {printable(shm_dir)}", err=True)


def _describe(leftover: Leftover) -> str:
    return f"{printable(leftover.path)} ({size(leftover.nbytes)})"
