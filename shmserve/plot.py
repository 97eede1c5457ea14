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


def plot_memory(path: Path, target: Path) -> None:
    """Draw the CSV file `path` into the file `target`, whose ending says which format it gets.

    Above is the node: memory in use, available and shared. Below, where the CSV tells of them, are the processes:
    their private memory, and page tables on top.

    Raises:
        ConfigError: matplotlib is not installed, or knows no such format.
        OSError: a file cannot be read or written.
        SourceFormatError: the CSV is not one of these.
    """
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
    try:
        figure.savefig(target, dpi=150)
    except ValueError as error:
        raise ConfigError(f"cannot draw {target}: {error}") from error


def _draw_node(panel: Axes, x: Sequence[float], columns: dict[str, list[float]]) -> None:
    for name, label, color in (
        ("mem_available", "available", "tab:green"),
        ("mem_used", "used", "tab:red"),
        ("shm", "shared", "tab:blue"),
    ):
        if name in columns:
            panel.plot(x, columns[name], label=label, color=color)
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
    panel.set_ylabel("processes, GiB")


def _read(path: Path) -> dict[str, list[float]]:
    """Return the columns, sizes in GiB, empty cells as NaN."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        lines = csv.reader(file)
        names = next(lines, [])
        if tuple(names[: len(_REQUIRED)]) != _REQUIRED:
            raise SourceFormatError(
                f"{path}, line 1: not the columns {','.join(_REQUIRED)}: give a file that `shmserve monitor` wrote"
            )
        columns: dict[str, list[float]] = {name: [] for name in names}
        for cells in lines:
            try:
                for name, cell in zip(names, cells, strict=True):
                    columns[name].append(float(cell) if cell else math.nan)
            except ValueError as error:
                raise SourceFormatError(
                    f"{path}, line {lines.line_num}: not {len(names)} numbers: remove the line, or write the file anew"
                ) from error
    if not columns["index"]:
        raise SourceFormatError(f"{path}, line 2: no rows: let the monitor run for longer")
    for name in ("mem_available", "mem_used", "shm", "uss", "page_tables"):
        if name in columns:
            columns[name] = [nbytes / _GIB for nbytes in columns[name]]
    return columns
