"""What can be asked of a running daemon: `ls` and `lookup`."""

from __future__ import annotations

from typing import Final

import click
import numpy as np

from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint
from shmserve_client.errors import printable
from shmserve_client.protocol import MAX_INDICES, Attach, Attached, Datasets, List, Lookup, Offsets

from .options import Command, ask, echo_json, endpoint_option, json_option, keys_option, option

__all__ = ["lookup", "ls"]

_TIMEOUT_S: Final = 10.0


@click.command(cls=Command)
@endpoint_option
@keys_option
@json_option
def ls(endpoint: str | None, keys: str | None, as_json: bool) -> None:
    """List the names of the datasets of one daemon, those that are still loading included."""
    with Connection(find_endpoint(endpoint), _TIMEOUT_S, keys) as connection:
        names = ask(connection, List(), Datasets).names
    if as_json:
        echo_json(names)
    else:
        for name in names:
            click.echo(printable(name))


@click.command(cls=Command)
@click.argument("name")
@click.argument("indices", metavar="INDEX...", type=click.IntRange(0, 2**63 - 1), nargs=-1, required=True)
@option("--column", metavar="COLUMN", help="Which column.  [default: the only one]")
@option("--block-size", type=click.IntRange(0, 2**62 - 1), metavar="B", help="Windows of B tokens; 0: stored samples.")
@option(
    "--stride", type=click.IntRange(1, 2**62 - 1), metavar="S", help="The step from window to window.  [default: B]"
)
@endpoint_option
@keys_option
@json_option
def lookup(
    name: str,
    indices: tuple[int, ...],
    column: str | None,
    block_size: int | None,
    stride: int | None,
    endpoint: str | None,
    keys: str | None,
    as_json: bool,
) -> None:
    """Print where samples are: index, offset from the segment's start and size, in bytes."""
    with Connection(find_endpoint(endpoint), _TIMEOUT_S, keys) as connection:
        attached = ask(connection, Attach(name), Attached)
        if block_size is None:
            block_size, stride = attached.block_size, stride or attached.stride
        rows = [
            row
            for start in range(0, len(indices), MAX_INDICES)
            for row in _look_up(
                connection, attached, column, block_size, stride or 0, indices[start : start + MAX_INDICES]
            )
        ]
    if as_json:
        echo_json([{"index": index, "offset": offset, "nbytes": nbytes} for index, offset, nbytes in rows])
    else:
        for index, offset, nbytes in rows:
            click.echo(f"{index} {offset} {nbytes}")


def _look_up(
    connection: Connection,
    attached: Attached,
    column: str | None,
    block_size: int,
    stride: int,
    indices: tuple[int, ...],
) -> list[tuple[int, int, int]]:
    wanted = np.array(indices, "<i8").tobytes()
    reply = ask(connection, Lookup(attached.name, wanted, column, block_size, stride, attached.nonce), Offsets)
    offsets, nbytes = (np.frombuffer(field, "<i8").tolist() for field in (reply.offsets, reply.nbytes))
    return list(zip(indices, offsets, nbytes, strict=True))
