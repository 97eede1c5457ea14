"""The command line: it parses, calls, and prints results on stdout and everything else on stderr.

Exit codes: 0 ok, 1 failed, 2 usage, 3 could not start.
"""

from __future__ import annotations

import logging
import os
import sys

import click

from shmserve.progress import settle
from shmserve_client.version import __version__

from .build import build
from .demo import demo
from .inspect import inspect
from .keys import keys
from .manage import load, reload, unload
from .monitor import monitor, plot
from .options import Group, option
from .owner import gc, stop
from .query import lookup, ls
from .start import start
from .status import status
from .verify import verify

__all__ = ["cli", "main"]

_LEVELS = ("debug", "info", "warning", "error")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shmserve")
@option("--log-level", type=click.Choice(_LEVELS), default="warning", show_default=True, help="What to log on stderr.")
def cli(log_level: str) -> None:
    """One copy of a training dataset per node, in shared memory, for every rank and DataLoader worker."""
    logging.basicConfig(
        stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


for command in (
    start,
    stop,
    load,
    reload,
    unload,
    status,
    ls,
    lookup,
    inspect,
    build,
    verify,
    monitor,
    plot,
    gc,
    keys,
    demo,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit with its code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed: the next file, such as a segment, would take its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        cli(prog_name="shmserve")
    finally:
        settle(sys.stdout)
        settle(sys.stderr)
