"""Draws the CSV of a `MemoryMonitor`, or the shorter one that users of fastai log, as a picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.monitor import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_memory"]

_GIB: Final = 1 << 30
_REQUIRED: Final = COLUMNS[:5]
_NODE: Final = (
    ("mem_available", "available", "tab:green"),
    ("mem_used", "used", "tab:red"),
    ("shm", "shared", "tab:blue"),
)
_PROCESSES: Final = ("uss", "page_tables")
_FORMATS: Final = (".png", ".svg", ".pdf")


def plot_memory(path: Path, target: Path) -> None:
    """Draw the CSV file `path` into the file `target`, whose ending says which format it gets: .png, .svg or .pdf.

    Above is the node: memory in use, available and shared. Below, where the CSV tells of them, are the processes:
    their private memory, and page tables on top.

    Raises:
        ConfigError: matplotlib is not installed, or the target has another ending or is the CSV file.
        OSError: a file cannot be read or written.
        SourceFormatError: the CSV is not one of these.
    """
    if target.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"cannot draw {target}: give --output (or $SHMSERVE_OUTPUT) an ending out of {', '.join(_FORMATS)}"
        )
    if target.exists() and target.samefile(path):
        raise ConfigError(f"cannot draw {target}: it is the file to draw: give another --output")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError("plotting needs matplotlib: pip install 'shmserve[plot]'") from error
    columns = _read(path)
    x_name = "seconds" if "seconds" in columns else "index"
    panels = 2 if "uss" in columns else 1
    figure = Figure(figsize=(8, 3 * panels), layout="constrained")
    axes = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
    _draw_node(axes[0], columns[x_name], columns)
    if panels == 2:
        _draw_processes(axes[1], columns[x_name], columns)
    axes[-1].set_xlabel(x_name)
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.margins(x=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(target, dpi=150)


def _draw_node(panel: Axes, x: Sequence[float], columns: dict[str, list[float]]) -> None:
    style = "-" if len(x) > 1 else "o"  # a line of one point is nothing to see
    for name, label, color in _NODE:
        if name in columns:
            panel.plot(x, columns[name], style, label=label, color=color)
    panel.set_ylabel("node, GiB")


def _draw_processes(panel: Axes, x: Sequence[float], columns: dict[str, list[float]]) -> None:
    # A row without the processes' figures says nothing of them: their lines go on from row to row that has them.
    rows = [
        (moment, private, tables)
        for moment, private, tables in zip(x, columns["uss"], columns["page_tables"], strict=True)
        if not math.isnan(private + tables)
    ]
    moments, private, tables = zip(*rows, strict=True) if rows else ((), (), ())
    panel.stackplot(
        moments, private, tables, labels=("private memory", "page tables"), colors=("tab:orange", "tab:purple")
    )
    if len(rows) == 1:  # an area without a width, maybe at the very edge
        panel.plot(moments, [private[0] + tables[0]], "o", color="tab:purple", clip_on=False)
        panel.plot(moments, private, "o", color="tab:orange", clip_on=False)
    panel.set_ylabel("processes, GiB")


def _read(path: Path) -> dict[str, list[float]]:
    """Return the columns to draw, sizes in GiB, empty cells as NaN."""
    (_, names), *lines = _lines(path) or [(1, [])]
    if tuple(names[: len(_REQUIRED)]) != _REQUIRED:
        raise SourceFormatError(
            f"{path}, line 1: not the columns {','.join(_REQUIRED)}: give a file that `shmserve monitor` wrote"
        )
    if len(set(names)) < len(names) or ("uss" in names) != ("page_tables" in names):
        raise SourceFormatError(
            f"{path}, line 1: a column twice, or one of uss and page_tables alone: give each of both once, or none"
        )
    sizes = [name for name in (*(name for name, _, _ in _NODE), *_PROCESSES) if name in names]
    columns: dict[str, list[float]] = {name: [] for name in ("seconds" if "seconds" in names else "index", *sizes)}
    for number, cells in lines:
        try:
            row = dict(zip(names, cells, strict=True))
            for name, column in columns.items():
                column.append(float(row[name]) if row[name] else math.nan)
        except ValueError as error:
            raise SourceFormatError(
                f"{path}, line {number}: not {len(names)} cells with numbers in {', '.join(columns)}: remove the line, "
                "or write the file anew"
            ) from error
    if not lines:
        raise SourceFormatError(f"{path}, line 2: no rows: let the monitor run for longer")
    return columns | {name: [nbytes / _GIB for nbytes in columns[name]] for name in sizes}


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return the lines that are not blank, each as its number and its cells.

    A last line without an end is left out: the monitor was killed in the middle of it.
    """
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = csv.reader(line for line in file if line.endswith(("\n", "\r")))
        try:
            return [(lines.line_num, cells) for cells in lines if cells]
        except csv.Error as error:
            raise SourceFormatError(f"{path}, line {lines.line_num}: {error}: write the file anew") from error
