"""What the owner can change in a running daemon: `load`, `reload` and `unload`."""

from __future__ import annotations

import sys
import time
from typing import Final

import click

from shmserve.config import datasets_from_arguments
from shmserve.progress import open_progress
from shmserve.sources.base import SourceOptions
from shmserve.text import count, describe_dataset, duration
from shmserve_client.connection import Connection
from shmserve_client.endpoint import control_path
from shmserve_client.errors import DatasetFailedError, printable
from shmserve_client.protocol import Accepted, Control, Load, Reload, Status, StatusReport, Unload

from .options import Command, ask, dataset_options, endpoint_option
from .owner import find_own_daemon

__all__ = ["load", "reload", "unload"]

_TIMEOUT_S: Final = 10.0
_POLL_S: Final = (0.02, 0.5)
"""The first and the longest pause between two questions how far the daemon is."""


@click.command(cls=Command)
@click.argument("data", metavar="[NAME=]PATH...", nargs=-1, required=True)
@dataset_options
@endpoint_option
def load(
    data: tuple[str, ...],
    dtype: str | None,
    vocab_size: int | None,
    columns: tuple[str, ...] | None,
    decode: int | None,
    block_size: int | None,
    stride: int | None,
    mode: str,
    warm: bool,
    endpoint: str | None,
) -> None:
    """Load one more dataset into the running daemon, and wait until it is served.

    Several paths are the shards of one dataset. Ctrl-C ends the waiting, not the loading: `unload` does that.
    """
    options = SourceOptions(dtype, vocab_size, columns, decode)
    (config,) = datasets_from_arguments([data], options, block_size=block_size, stride=stride, mode=mode, warm=warm)
    path = find_own_daemon(endpoint)
    chosen = None if columns is None else list(columns)
    accepted = _order(
        path, Load(config.name, list(config.data), dtype, vocab_size, chosen, block_size, stride, mode, warm, decode)
    )
    _wait(path, accepted)


@click.command(cls=Command)
@click.argument("name")
@endpoint_option
def reload(name: str, endpoint: str | None) -> None:
    """Read the files of a dataset again, and wait until that is served: the next generation.

    Until then, and if it fails, the present one is. Processes that have it attached read on in it, and its memory is
    given back when the last of them is gone; new ones get the next, and `ShmDataset.refresh` moves to it. Both
    generations have to fit into memory.
    """
    path = find_own_daemon(endpoint)
    _wait(path, _order(path, Reload(name)))


@click.command(cls=Command)
@click.argument("name")
@endpoint_option
def unload(name: str, endpoint: str | None) -> None:
    """Serve a dataset no longer, or give up loading it.

    Processes that have it attached read on; its memory is given back when the last of them is gone.
    """
    path = find_own_daemon(endpoint)
    _order(path, Unload(name))
    report = _status(path, None)
    readers = sum(len(one.attached_pids) + one.attached_elsewhere for one in report.retired if one.name == name)
    read_on = f"; {count(readers, 'reader')} of it left" if readers else ""
    click.echo(printable(f"unloaded {name}{read_on}"), err=True)


def _order(path: str, request: Control) -> Accepted:
    with Connection(control_path(path), _TIMEOUT_S) as connection:
        return ask(connection, request, Accepted)


def _status(path: str, name: str | None) -> StatusReport:
    with Connection(path, _TIMEOUT_S) as connection:
        return ask(connection, Status(name), StatusReport)


def _wait(path: str, accepted: Accepted) -> None:
    """Return when the dataset is served in the generation that was begun; shows how far it is meanwhile."""
    progress = open_progress(sys.stderr)
    pause_s, longest_s = _POLL_S
    total_nbytes = 0
    try:
        while True:
            (dataset,) = _status(path, accepted.name).datasets
            if dataset.state == "ready" and dataset.generation >= accepted.generation:
                break
            error = dataset.error or dataset.reload_error
            if error:
                raise DatasetFailedError(error)
            done_nbytes = max(dataset.reload_loaded_nbytes, 0 if dataset.state == "ready" else dataset.loaded_nbytes)
            if not total_nbytes:
                total_nbytes = dataset.reload_nbytes or (0 if dataset.state == "ready" else dataset.segment_nbytes)
                if total_nbytes:
                    progress.start(dataset.name, total_nbytes)
            elif done_nbytes:
                progress.advance(done_nbytes, total_nbytes)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
    finally:
        progress.close()
    how = "adopted" if dataset.adopted else "loaded"
    what = f"generation {dataset.generation}, {describe_dataset(dataset)}"
    progress.say(f"{dataset.name}: {how} in {duration(dataset.load_seconds)}, {what}")
    for note in dataset.notes:
        progress.say(f"{dataset.name}: note: {note}")
