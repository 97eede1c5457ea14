"""What can be asked of a running daemon: `status`, `ls` and `lookup`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Final

import click
import numpy as np

from shmserve.text import describe_dataset, duration, percent, size
from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint
from shmserve_client.errors import DaemonUnreachableError
from shmserve_client.protocol import (
    MAX_INDICES,
    Attach,
    Attached,
    Datasets,
    DatasetStatus,
    List,
    Lookup,
    Offsets,
    Status,
    StatusReport,
)

from .options import Command, ask, echo_json, option

__all__ = ["lookup", "ls", "status"]

_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1

endpoint_option = option("--endpoint", metavar="ENDPOINT", help="Which daemon.  [default: the first that is found]")
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command(cls=Command)
@click.argument("name", required=False)
@endpoint_option
@json_option
@option(
    "--wait", type=click.FloatRange(min=0), default=0.0, metavar="S", help="Wait up to S seconds until it is served."
)
@click.pass_context
def status(ctx: click.Context, name: str | None, endpoint: str | None, as_json: bool, wait: float) -> None:
    """Show the daemon and its datasets. Exits with 0 only when everything (or NAME) is served."""
    report = _wait_for_report(name, endpoint, wait)
    is_served = all(dataset.state == "ready" for dataset in report.datasets)
    if as_json:
        echo_json({"served": is_served, **asdict(report)})
    else:
        click.echo(_describe_report(report))
    ctx.exit(0 if is_served else 1)


def _wait_for_report(name: str | None, endpoint: str | None, wait_s: float) -> StatusReport:
    """Return the first report in which nothing is loading, or the last one that came within `wait_s` seconds."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            with Connection(
                find_endpoint(endpoint), max(1.0, min(_TIMEOUT_S, deadline_s - time.monotonic()))
            ) as connection:
                report = ask(connection, Status(name), StatusReport)
            if time.monotonic() >= deadline_s or all(dataset.state != "loading" for dataset in report.datasets):
                return report
        except DaemonUnreachableError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_POLL_S)


def _describe_report(report: StatusReport) -> str:
    uptime, memory = duration(report.uptime_seconds), size(report.private_nbytes)
    lines = [
        f"daemon ipc://{report.endpoint}",
        f"  pid {report.pid}, version {report.daemon_version}, up {uptime}, {memory} of its own memory",
    ]
    for dataset in report.datasets:
        lines += _describe_dataset(dataset)
    return "\n".join(lines)


def _describe_dataset(dataset: DatasetStatus) -> list[str]:
    data = ", ".join(dataset.data)
    match dataset.state:
        case "loading":
            done, total = dataset.loaded_nbytes, dataset.segment_nbytes
            progress = f"{size(done)} of {size(total)}, {percent(done, total)} %" if total else "reading the index"
            return [f"{dataset.name}: loading, {progress}", f"  data      {data}"]
        case "ready":
            changed = " (source changed since it was loaded)" if dataset.source_changed else ""
            lines = [f"{dataset.name}: ready, {describe_dataset(dataset)}", f"  data      {data}{changed}"]
            how = "adopted" if dataset.adopted else "loaded"
            lines.append(f"  segment   {dataset.path}, {how} in {duration(dataset.load_seconds)}")
            lines.append(f"  attached  {_describe_attached(dataset)}")
            if dataset.block_size:
                lines.append(
                    f"  windows   block size {dataset.block_size}, stride {dataset.stride or dataset.block_size}"
                )
            return lines + [f"  note      {note}" for note in dataset.notes]
        case state:
            return [f"{dataset.name}: {state}, {dataset.error}", f"  data      {data}"]


def _describe_attached(dataset: DatasetStatus) -> str:
    count = len(dataset.attached_pids) + dataset.attached_elsewhere
    processes = "1 process" if count == 1 else f"{count} processes"
    pids = ", ".join(map(str, dataset.attached_pids))
    elsewhere = f", {dataset.attached_elsewhere} in other pid namespaces" if dataset.attached_elsewhere else ""
    return f"{processes}{f': pid {pids}' if pids else ''}{elsewhere}"


@click.command(cls=Command)
@endpoint_option
@json_option
def ls(endpoint: str | None, as_json: bool) -> None:
    """List the names of the datasets, those that are still loading included."""
    with Connection(find_endpoint(endpoint), _TIMEOUT_S) as connection:
        reply = ask(connection, List(), Datasets)
    if as_json:
        echo_json(reply.names)
    else:
        for name in reply.names:
            click.echo(name)


@click.command(cls=Command)
@click.argument("name")
@click.argument("indices", metavar="INDEX...", type=click.IntRange(0, 2**63 - 1), nargs=-1, required=True)
@option("--column", metavar="COLUMN", help="Which column.  [default: the only one]")
@option("--block-size", type=click.IntRange(0, 2**62), metavar="B", help="Windows of B tokens; 0: stored samples.")
@option("--stride", type=click.IntRange(1, 2**62), metavar="S", help="The step from window to window.  [default: B]")
@endpoint_option
@json_option
def lookup(
    name: str,
    indices: tuple[int, ...],
    column: str | None,
    block_size: int | None,
    stride: int | None,
    endpoint: str | None,
    as_json: bool,
) -> None:
    """Print where samples are: index, offset from the segment's start and size, in bytes."""
    with Connection(find_endpoint(endpoint), _TIMEOUT_S) as connection:
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
