"""`shmserve keys`: the keys with which a daemon and its clients know each other over TCP."""

from __future__ import annotations

from pathlib import Path

import click

from shmserve_client.errors import printable

from .options import Command, option

__all__ = ["keys"]


@click.command(cls=Command)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@option("--client", metavar="NAME", help="Add a client to the keys in DIR: DIR/NAME is what it needs.")
def keys(directory: Path, client: str | None) -> None:
    """Make the directory DIR, with keys for a daemon and for one client; nothing is ever overwritten.

    DIR is for `start --tcp HOST:PORT --keys DIR`, and for clients of the same user. A further client, made with
    --client, gets the directory DIR/NAME and no more, over a way that nobody else can read. Whose key is in DIR/clients
    is let in; who is removed from it, is not from the next connection on.
    """
    from shmserve_client.keys import add_client, make_keys

    directory = directory.absolute()
    if client is None:
        make_keys(directory)
        click.echo(f"made {printable(str(directory))}: start the daemon with --tcp HOST:PORT --keys DIR", err=True)
    else:
        made = add_client(directory, client)
        click.echo(f"made {printable(str(made))}: hand it over, its user gives it as --keys or keys=", err=True)
