"""`shmserve start`: from arguments, environment and file to a configuration, and the server's run with it."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from shmserve.config import (
    DEFAULT_SHM_DIR,
    DaemonConfig,
    FileConfig,
    datasets_from_arguments,
    group_id,
    merge_datasets,
    read_config_file,
)
from shmserve.detach import start_detached
from shmserve.progress import Progress, harmless, open_progress
from shmserve.server import Server
from shmserve.sources.base import SourceOptions
from shmserve.text import duration, readiness_line, size
from shmserve_client.connection import Connection
from shmserve_client.endpoint import default_endpoint, log_path, parse_endpoint
from shmserve_client.errors import ShmserveError, printable
from shmserve_client.locks import is_at, take_owner_lock
from shmserve_client.protocol import Status, StatusReport

from .options import Command, FailedError, ask, dataset_options, option

__all__ = ["start"]

_REPLY_TIMEOUT_S = 10.0
_PATH_SEPARATOR = "\0"
"""Joins the paths of one --data into one value: no argument can contain it."""


class _StartCommand(Command):
    """A command whose `--data` takes all the paths behind it, so that a shell's glob needs no quotes."""

    failure_exit_code = 3

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["shmserve.args"] = list(args)
        return super().parse_args(ctx, _join_data(args))


def _join_data(args: Sequence[str]) -> list[str]:
    r"""Return the arguments with `--data A B C` as `--data=A\0B\0C`."""
    joined: list[str] = []
    in_data = False
    for position, arg in enumerate(args):
        if in_data and not arg.startswith("-"):
            joined[-1] += _PATH_SEPARATOR + arg
        elif position and args[position - 1] == "--data" and joined[-1] == "--data":
            joined[-1] = f"--data={arg}"
            in_data = True
        else:
            joined.append(arg)
            in_data = arg.startswith("--data=")
    return joined


class _Data(click.types.StringParamType):
    """The paths of one `--data`. The environment's value is one, whatever blanks are in it."""

    name = "data"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


@click.command(cls=_StartCommand, context_settings={"allow_extra_args": True})
@option(
    "--data",
    type=_Data(),
    multiple=True,
    metavar="[NAME=]PATH...",
    help="A dataset: file, directory, glob, prefix, or module:name. Repeat for more; the variable holds one.",
)
@option("--config", type=click.Path(path_type=Path), help="A TOML file with [datasets.NAME] tables.")
@dataset_options
@option("--endpoint", metavar="ENDPOINT", help="Where to listen: ipc:///path/of/the.sock.")
@option("--shm-dir", metavar="DIR", help=f"Where the segments go.  [default: {DEFAULT_SHM_DIR}]")
@option("--group", metavar="GROUP", help="Let this group read, too.")
@option("--lock", is_flag=True, default=None, help="Keep the segments from being swapped.")
@option("--checksums", is_flag=True, default=None, help="Take checksums while loading, for `shmserve verify`.")
@option("--linger", type=float, metavar="S", help="End when nothing has been attached for S seconds.")
@option("--tcp", metavar="HOST:PORT", help="Answer clients there, too; port 0 is any free one.")
@option("--keys", metavar="DIR", help="For --tcp: let in only whose key is in DIR/clients, see `shmserve keys`.")
@option("--detach/--no-detach", default=False, help="Return when everything is served.")
@click.option("--adopt", is_flag=True, hidden=True)  # take over the segment that a process has published
@click.option("--ready-fd", type=int, hidden=True)
@click.pass_context
def start(ctx: click.Context, /, *, detach: bool, ready_fd: int | None, **given: Any) -> None:
    """Serve datasets until SIGTERM. Paths that follow one --data are shards of the same dataset."""
    if ctx.args:
        raise FailedError(f"unexpected argument {ctx.args[0]!r}: did you mean --data {shlex.quote(ctx.args[0])}?", 2)
    announcement = _Announcement(ready_fd)
    try:
        config = _daemon_config(**given)
        if detach:
            log_level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
            args = ["--log-level", log_level, "start", *ctx.meta["shmserve.args"], "--no-detach"]
            start_detached(args, config.endpoint)
            with Connection(config.endpoint, _REPLY_TIMEOUT_S) as connection:
                report = ask(connection, Status(), StatusReport)
            _say_loaded(report, Progress(sys.stderr))
            click.echo(readiness_line(report))
            return
        _serve(config, announcement)
    except (ShmserveError, OSError) as error:
        announcement.make(f"error: {error}")
        raise
    finally:
        announcement.make("error: the daemon ended before it was ready")


def _daemon_config(
    *,
    data: tuple[str, ...],
    config: Path | None,
    dtype: str | None,
    vocab_size: int | None,
    columns: tuple[str, ...] | None,
    decode: int | None,
    block_size: int | None,
    stride: int | None,
    mode: str,
    warm: bool,
    adopt: bool,
    endpoint: str | None,
    shm_dir: str | None,
    group: str | None,
    lock: bool | None,
    checksums: bool | None,
    linger: float | None,
    tcp: str | None,
    keys: str | None,
) -> DaemonConfig:
    """Return what the daemon is to do: the arguments go before the file, and their datasets are added to its."""
    file = read_config_file(config) if config is not None else FileConfig()
    arguments = [paths.split(_PATH_SEPARATOR) for paths in data]
    options = SourceOptions(dtype, vocab_size, columns, decode)
    named = datasets_from_arguments(
        arguments,
        options,
        block_size=block_size,
        stride=stride,
        mode="adopt" if adopt else mode,
        warm=warm,
    )
    endpoint = endpoint or file.endpoint
    group = group or file.group
    keys = keys or file.keys
    return DaemonConfig(
        datasets=merge_datasets(file.datasets, named),
        endpoint=parse_endpoint(endpoint) if endpoint else default_endpoint(),
        shm_dir=os.path.abspath(shm_dir or file.shm_dir or DEFAULT_SHM_DIR),
        gid=group_id(group) if group else None,
        lock=bool(file.lock if lock is None else lock),
        checksums=bool(file.checksums if checksums is None else checksums),
        linger_s=file.linger if linger is None else linger,
        tcp=tcp or file.tcp,
        keys=os.path.abspath(keys) if keys else None,
    )


def _serve(config: DaemonConfig, announcement: _Announcement) -> None:
    progress = open_progress(sys.stderr)

    def on_ready(report: StatusReport) -> None:
        progress.close()
        _say_loaded(report, progress)
        with harmless(sys.stdout):
            click.echo(readiness_line(report))
        announcement.make("ready")

    server = Server(config, progress, on_ready, announcement.fd)
    try:
        server.run()
    finally:
        progress.close()
    if server.lingered_out:
        _remove_own_log(log_path(config.endpoint))
    if server.is_stuck:
        # The interpreter would wait for the loader's threads, which hang in a read of a file system that is gone.
        logging.shutdown()
        os._exit(0)


def _remove_own_log(path: str) -> None:
    """Remove the log of a daemon that nobody ended and nobody will ask about, if it is where this process logs.

    A daemon that starts now at the same endpoint logs there, too, and holds the lock that says so.
    """
    if is_at(2, path) and take_owner_lock(2):
        os.unlink(path)


def _say_loaded(report: StatusReport, progress: Progress) -> None:
    for dataset in report.datasets:
        took = duration(dataset.load_seconds)
        if dataset.adopted:
            progress.say(f"{dataset.name}: adopted {size(dataset.segment_nbytes)} from an ended daemon in {took}")
        else:
            rate = size(dataset.segment_nbytes / max(dataset.load_seconds, 1e-9))
            progress.say(f"{dataset.name}: loaded {size(dataset.segment_nbytes)} in {took}, {rate}/s")
        for note in dataset.notes:
            progress.say(f"{dataset.name}: note: {note}")


class _Announcement:
    """The one line that tells whoever started this daemon how the start went, on the descriptor it gave."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd

    def make(self, line: str) -> None:
        """Write the line, the first time; whoever started the daemon may have stopped listening."""
        if self.fd is not None:
            fd, self.fd = self.fd, None
            try:
                os.write(fd, f"{printable(line)}\n".encode())
            except BrokenPipeError:
                logging.getLogger(__name__).debug("nobody waits for the start any more")
            finally:
                os.close(fd)
