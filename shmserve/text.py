"""Sizes, counts and times as people read them."""

from __future__ import annotations

from shmserve_client.errors import printable
from shmserve_client.layout import DATA_ALIGNMENT
from shmserve_client.protocol import DatasetStatus, StatusReport

__all__ = ["count", "describe_dataset", "duration", "percent", "readiness_line", "size"]


def count(number: int, noun: str) -> str:
    """Return a number of things, such as "1 sample" or "3,839 samples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(nbytes: float) -> str:
    """Return a number of bytes with a binary unit, such as "1.2 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a time with the unit that suits it, such as "42 ms", "3.1 s" or "2 h 5 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent(part: float, whole: float) -> int:
    """Return `part` in percent of `whole`, rounded down so that 100 means all; 0 where the whole is not known yet."""
    return int(100 * part // whole) if whole else 0


def describe_dataset(status: DatasetStatus) -> str:
    """Return one served dataset in a few words: format, samples, size, pages."""
    samples = count(status.num_samples, "token" if status.stream else "sample")
    described = f"{status.format}, {samples}, {size(status.segment_nbytes)}"
    # There is no huge page in less, and no fault in that.
    return described if status.segment_nbytes < DATA_ALIGNMENT else f"{described}, {_pages(status)}"


def _pages(status: DatasetStatus) -> str:
    # The header and the last step of a segment are on small pages by design.
    if 0 <= status.segment_nbytes - status.huge_nbytes <= 2 * DATA_ALIGNMENT and status.huge_nbytes:
        return "huge pages"
    huge = percent(status.huge_nbytes, status.segment_nbytes)
    return f"{huge} % huge pages" if huge else "4 KiB pages"


def readiness_line(report: StatusReport) -> str:
    """Return the one line on stdout that says that everything is served."""
    datasets = ", ".join(f"{status.name} ({describe_dataset(status)})" for status in report.datasets)
    tcp = f" and {report.tcp_endpoint}" if report.tcp_endpoint else ""
    return printable(f"ready: {datasets} on ipc://{report.endpoint}{tcp} (pid {report.pid})")
