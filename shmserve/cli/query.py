"""What can be asked of a running daemon: `status`, `ls` and `lookup`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Final

import click
import numpy as np

from shmserve.endpoints import embedded_endpoints, is_in_use
from shmserve.text import describe_dataset, duration, percent, size
from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint, listening, log_path
from shmserve_client.errors import DaemonUnreachableError, DatasetNotFoundError, ShmserveError, printable
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
    """Show the daemon and its datasets. Exits with 0 only when everything (or NAME) is served.

    Without --endpoint those that from_path started are shown as well; the default daemon has to be there all the same,
    unless they serve NAME.
    """
    reports, errors = _wait_for_reports(name, endpoint, wait)
    is_served = not errors and all(dataset.state == "ready" for report in reports for dataset in report.datasets)
    if as_json:
        first, *others = map(asdict, reports)
        echo_json({"served": is_served, **first, "others": others})
    else:
        for report in reports:
            click.echo(_describe_report(report))
    for error in errors:
        click.echo(f"error: {error}", err=True)
    ctx.exit(0 if is_served else 1)


def _wait_for_reports(
    name: str | None, endpoint: str | None, wait_s: float
) -> tuple[list[StatusReport], list[ShmserveError]]:
    """Return the first reports in which nothing is loading, or the last ones that came within `wait_s` seconds."""
    deadline_s = time.monotonic() + wait_s
    while True:
        timeout_s = max(1.0, min(_TIMEOUT_S, deadline_s - time.monotonic()))
        try:
            reports, errors = _ask_all(endpoint, name, timeout_s)
            loading = any(dataset.state == "loading" for report in reports for dataset in report.datasets)
            if time.monotonic() >= deadline_s or not (loading or errors):
                return reports, errors
        except DaemonUnreachableError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_POLL_S)


def _ask_all(
    endpoint: str | None, name: str | None, timeout_s: float
) -> tuple[list[StatusReport], list[ShmserveError]]:
    """Return the reports of the daemon at `endpoint`, or of all of this user's, and what went wrong with some of them.

    Raises:
        ShmserveError: what went wrong where nobody answered.
    """
    paths = [] if endpoint else embedded_endpoints()
    reports: list[StatusReport] = []
    absent: list[ShmserveError] = []
    errors: list[ShmserveError] = []
    try:
        paths = [find_endpoint(endpoint), *paths]
    except DaemonUnreachableError as error:
        (errors if name is None else absent).append(error)
    for path in paths:
        try:
            with Connection(path, timeout_s) as connection:
                reports.append(ask(connection, Status(name), StatusReport))
        except ShmserveError as error:
            has_ended = isinstance(error, DaemonUnreachableError) and not listening(path)
            (absent if has_ended or isinstance(error, DatasetNotFoundError) else errors).append(error)
    if not reports:
        raise (errors + absent)[0]
    return reports, errors


def _describe_report(report: StatusReport) -> str:
    uptime, memory = duration(report.uptime_seconds), size(report.private_nbytes)
    lines = [
        f"daemon ipc://{report.endpoint}",
        f"  pid {report.pid}, version {report.daemon_version}, up {uptime}, {memory} of its own memory",
    ]
    if is_in_use(log_path(report.endpoint)):
        lines.append(f"  log {log_path(report.endpoint)}")
    for dataset in report.datasets:
        lines += _describe_dataset(dataset)
    return "\n".join(map(printable, lines))


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
    """List the names of the datasets of one daemon, those that are still loading included."""
    with Connection(find_endpoint(endpoint), _TIMEOUT_S) as connection:
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
