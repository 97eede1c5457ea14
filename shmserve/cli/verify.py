"""`shmserve verify`: whether a served dataset is still what was loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import click

from shmserve.text import count, percent, size
from shmserve.verify import DamagedChunk, Difference, Part, Verified
from shmserve.verify import verify as verify_segment
from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint
from shmserve_client.errors import printable
from shmserve_client.protocol import Attach, Attached

from .options import Command, FailedError, ask, echo_json, endpoint_option, json_option, option

__all__ = ["verify"]

_TIMEOUT_S: Final = 10.0
_SECONDS_BETWEEN_LINES: Final = 5.0


@click.command(cls=Command)
@click.argument("name")
@option("--against-source", is_flag=True, help="Read the source again, too, and compare each byte.")
@endpoint_option
@json_option
def verify(name: str, against_source: bool, endpoint: str | None, as_json: bool) -> None:
    """Compare the dataset in shared memory with the checksums taken while it was loaded (`start --checksums`).

    It does not count as attached. Exit code 1: something differs, and is named, or nothing could be compared.
    """
    with Connection(find_endpoint(endpoint), _TIMEOUT_S) as connection:
        attached = ask(connection, Attach(name), Attached)
    verified = verify_segment(
        attached.path, attached.nonce, against_source=against_source, progress=_progress(attached.name)
    )
    if as_json:
        echo_json(verified)
    else:
        for line in _describe(verified):
            click.echo(printable(line))
    failure = _failure(verified)
    if failure:
        raise FailedError(f"{verified.name}: {failure}", 1)


def _progress(name: str) -> Callable[[int, int], None]:
    """Return what says on stderr how far it is, every few seconds."""
    said_s = time.monotonic()

    def advance(done_nbytes: int, total_nbytes: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _SECONDS_BETWEEN_LINES:
            said_s = time.monotonic()
            done = f"{size(done_nbytes)} of {size(total_nbytes)} ({percent(done_nbytes, total_nbytes)} %)"
            click.echo(printable(f"{name}: compared {done}"), err=True)

    return advance


def _describe(verified: Verified) -> list[str]:
    name = verified.name
    lines = [f"{name}: {_damage(chunk)}" for chunk in verified.damaged]
    lines += [f"{name}: {_differs(difference)}" for difference in verified.differences]
    compared = size(verified.nbytes)
    if verified.checksums_damaged:
        lines.append(f"{name}: the checksums themselves are damaged, so they tell nothing of the data")
    elif verified.chunks and not verified.damaged:
        match = "matches its checksum" if verified.chunks == 1 else "match their checksums"
        lines.append(f"{name}: {compared} in {count(verified.chunks, 'chunk')} {match}")
    if verified.source_files is not None and not verified.differences:
        lines.append(f"{name}: {compared} match the source, {count(verified.source_files, 'file')}")
    return lines


def _damage(chunk: DamagedChunk) -> str:
    parts = "; ".join(map(_part, chunk.parts))
    return f"bytes [{chunk.start}, {chunk.stop}) of the segment do not match their checksum: {parts}"


def _part(part: Part) -> str:
    samples = f", samples [{part.samples[0]}, {part.samples[1]})" if part.samples else ""
    return f"{part.array} items [{part.start}, {part.stop}){samples}"


def _differs(difference: Difference) -> str:
    sample = f", sample {difference.sample}" if difference.sample is not None else ""
    origin = f", {difference.origin}" if difference.origin else ""
    return (
        f"byte {difference.byte} of the segment is not the source's: {difference.array} item {difference.item}{sample}"
        f"{origin}; {count(difference.nbytes, 'byte')} there in all"
    )


def _failure(verified: Verified) -> str:
    """Return what is wrong and what helps; empty where all is well."""
    again = f"`shmserve reload {verified.name}` loads it again"
    if verified.damaged:
        return f"{len(verified.damaged)} of {count(verified.chunks, 'chunk')} changed in memory since loading: {again}"
    if verified.differences and verified.chunks:
        return (
            "the segment is as it was loaded, its source is not, though its size and times are: restore the source, "
            f"or {again}"
        )
    if verified.differences:
        return f"the segment and its source differ, and no checksum tells which has changed: {again}"
    if verified.checksums_damaged:
        return f"its checksums changed in memory since loading: {again}"
    return ""
