"""`shmserve status`: what is served, who has it attached, and what all of that takes in memory."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final

import click

from shmserve.attached import AttachedMemory, DatasetMemory, measure_dataset
from shmserve.endpoints import embedded_endpoints, is_in_use
from shmserve.text import describe_dataset, duration, percent, size
from shmserve_client.connection import Connection
from shmserve_client.endpoint import find_endpoint, listening, log_path
from shmserve_client.errors import DaemonUnreachableError, DatasetNotFoundError, ShmserveError, printable
from shmserve_client.protocol import DatasetStatus, RetiredSegment, Status, StatusReport

from .options import Command, ask, echo_json, endpoint_option, json_option, keys_option, option

__all__ = ["status"]

_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1


@click.command(cls=Command)
@click.argument("name", required=False)
@endpoint_option
@keys_option
@json_option
@option(
    "--wait", type=click.FloatRange(min=0), default=0.0, metavar="S", help="Wait up to S seconds until it is served."
)
@click.pass_context
def status(
    ctx: click.Context, name: str | None, endpoint: str | None, keys: str | None, as_json: bool, wait: float
) -> None:
    """Show the daemon, its datasets, and what each process that has one attached holds in memory.

    Exits with 0 only when everything (or NAME) is served.

    Without --endpoint those that from_path started are shown as well; the default daemon has to be there all the same,
    unless they serve NAME.
    """
    reports, errors = _wait_for_reports(name, endpoint, keys, wait)
    is_served = not errors and all(dataset.state == "ready" for report in reports for dataset in report.datasets)
    if as_json:
        first, *others = map(_as_record, reports)
        echo_json({"served": is_served, **first, "others": others})
    else:
        for report in reports:
            click.echo(_describe_report(report))
    for error in errors:
        click.echo(f"error: {error}", err=True)
    ctx.exit(0 if is_served else 1)


def _wait_for_reports(
    name: str | None, endpoint: str | None, keys: str | None, wait_s: float
) -> tuple[list[StatusReport], list[ShmserveError]]:
    """Return the first reports in which nothing is loading, or the last ones that came within `wait_s` seconds."""
    deadline_s = time.monotonic() + wait_s
    while True:
        timeout_s = max(1.0, min(_TIMEOUT_S, deadline_s - time.monotonic()))
        try:
            reports, errors = _ask_all(endpoint, keys, name, timeout_s)
            loading = any(dataset.state == "loading" for report in reports for dataset in report.datasets)
            if time.monotonic() >= deadline_s or not (loading or errors):
                return reports, errors
        except DaemonUnreachableError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_POLL_S)


def _ask_all(
    endpoint: str | None, keys: str | None, name: str | None, timeout_s: float
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
            with Connection(path, timeout_s, keys) as connection:
                reports.append(ask(connection, Status(name), StatusReport))
        except ShmserveError as error:
            has_ended = isinstance(error, DaemonUnreachableError) and not listening(path)
            (absent if has_ended or isinstance(error, DatasetNotFoundError) else errors).append(error)
    if not reports:
        raise (errors + absent)[0]
    return reports, errors


def _as_record(report: StatusReport) -> dict[str, Any]:
    """Return the daemon's report with what was measured here added to the datasets that are served."""
    record = asdict(report)
    for dataset, entry in zip(report.datasets, record["datasets"], strict=True):
        if dataset.state == "ready":
            entry.update(asdict(measure_dataset(dataset)))
    return record


def _describe_report(report: StatusReport) -> str:
    uptime, memory = duration(report.uptime_seconds), size(report.private_nbytes)
    lines = [
        f"daemon ipc://{report.endpoint}" + (f" and {report.tcp_endpoint}" if report.tcp_endpoint else ""),
        f"  pid {report.pid}, version {report.daemon_version}, up {uptime}, {memory} of its own memory",
    ]
    if is_in_use(log_path(report.endpoint)):
        lines.append(f"  log {log_path(report.endpoint)}")
    for dataset in report.datasets:
        lines += _describe_dataset(dataset)
    lines += map(_describe_retired, report.retired)
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
            generation = f", generation {dataset.generation}" if dataset.generation > 1 else ""
            lines.append(f"  segment   {dataset.path}, {how} in {duration(dataset.load_seconds)}{generation}")
            memory = measure_dataset(dataset)
            lines += _describe_attached(memory)
            if memory.processes:
                lines.append(f"  memory    {_describe_memory(memory, dataset.segment_nbytes)}")
            if dataset.block_size:
                lines.append(
                    f"  windows   block size {dataset.block_size}, stride {dataset.stride or dataset.block_size}"
                )
            lines += _describe_reload(dataset)
            return lines + [f"  note      {note}" for note in (*dataset.notes, *_written_note(memory))]
        case state:
            return [f"{dataset.name}: {state}, {dataset.error}", f"  data      {data}"]


def _describe_reload(dataset: DatasetStatus) -> list[str]:
    match dataset.reload_state:
        case "loading":
            done, total = dataset.reload_loaded_nbytes, dataset.reload_nbytes
            progress = f"{size(done)} of {size(total)}, {percent(done, total)} %" if total else "reading the index"
            return [f"  reload    {progress}"]
        case "failed":
            return [f"  reload    failed, this is served as before: {dataset.reload_error}"]
        case _:
            return []


def _describe_retired(segment: RetiredSegment) -> str:
    processes = _processes(len(segment.attached_pids) + segment.attached_elsewhere)
    pids = f" (pid {', '.join(map(str, segment.attached_pids))})" if segment.attached_pids else ""
    return (
        f"{segment.name}: generation {segment.generation} is no longer served, {size(segment.segment_nbytes)} at "
        f"{segment.path} until {processes}{pids} let go of it"
    )


def _describe_attached(memory: DatasetMemory) -> list[str]:
    attached = len(memory.processes) + sum(others.processes for others in memory.unmeasured)
    lines = [f"  attached  {_processes(attached)}"]
    if memory.processes:
        lines.append(_row("pid", "rank", "private", "page tables", "for the segment", "written in place"))
    lines += map(_describe_process, memory.processes)
    for others in memory.unmeasured:
        pids = f" (pid {', '.join(map(str, others.pids))})" if others.pids else ""
        lines.append(f"  unknown   {_processes(others.processes)}{pids}, not measured: {others.reason}")
    return lines


def _describe_process(process: AttachedMemory) -> str:
    rank = "" if process.rank is None else str(process.rank)
    figures = (
        process.private_nbytes,
        process.page_tables_nbytes,
        process.segment_page_tables_nbytes,
        process.written_nbytes,
    )
    return _row(str(process.pid), f"{rank} worker".lstrip() if process.worker else rank or "-", *map(size, figures))


def _row(pid: str, rank: str, *figures: str) -> str:
    widths = (11, 14, 18, 19)
    return f"    {pid:<9}{rank:<12}" + "".join(
        f"{figure:>{width}}" for figure, width in zip(figures, widths, strict=True)
    )


def _describe_memory(memory: DatasetMemory, segment_nbytes: int) -> str:
    private = sum(process.private_nbytes for process in memory.processes)
    shared = sum(process.proportional_nbytes for process in memory.processes) - private
    page_tables = sum(process.page_tables_nbytes for process in memory.processes)
    copies = len(memory.processes)
    with_copies = f"with a copy in each of the {copies} processes" if copies > 1 else "with a copy in the process"
    return (
        f"{size(memory.total_nbytes)}: {size(segment_nbytes)} once, {size(private)} private, {size(shared)} "
        f"shared by forks and of libraries, {size(page_tables)} of page tables; "
        f"{size(memory.copied_nbytes)} {with_copies}"
    )


def _written_note(memory: DatasetMemory) -> list[str]:
    """Return the advice for processes that change samples in place, if there are any."""
    writers = [process for process in memory.processes if process.written_nbytes]
    if not writers:
        return []
    pids = ", ".join(str(process.pid) for process in writers)
    written = size(sum(process.written_share_nbytes for process in writers))
    return [
        f"pid {pids} wrote to samples in place, as a transform may do, or were forked from one that did: {written} of "
        "the segment are private copies now, and are seen changed in the next epoch: open the dataset with copy=True"
    ]


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
