"""Draws the pictures of the README from `benchmarks/results`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from harness import RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURES = RESULTS.parent / "pictures"
COLOURS = {
    "tensors": "#D55E00",
    "cached": "#E69F00",
    "mapped": "#009E73",
    "megatron": "#56B4E9",
    "datasets": "#CC79A7",
    "lists": "#D55E00",
    "shmserve": "#0072B2",
}
"""By Okabe and Ito, distinct for colour-blind readers, too."""
_MARKERS = {"tensors": "s", "cached": "D", "mapped": "^", "megatron": "v", "datasets": "P", "shmserve": "o"}
_STYLE = {
    "svg.hashsalt": "shmserve",  # the same picture has the same bytes
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
}


def ram_by_rank(data: dict[str, Any], axes: Axes) -> None:
    """Draw the RAM that the dataset takes, page tables included, by the number of ranks without workers."""
    for name, found in data["found"].items():
        taken = {int(group): sizes for group, sizes in found.items() if group.isdigit() and "pss" in sizes}
        axes.plot(
            list(taken),
            [(sizes["pss"] + sizes["page_tables"]) / 2**30 for sizes in taken.values()],
            label=data["titles"][name],
            **_line(name),
        )
    axes.set_xticks(sorted({int(group) for found in data["found"].values() for group in found if group.isdigit()}))
    axes.set(xlabel="ranks", ylabel="RAM for the dataset, GiB", ylim=(0, None))
    axes.set_title(f"A corpus of {data['nbytes'] / 2**30:.1f} GiB, read by all ranks of a node", loc="left")
    axes.legend(loc="upper left")


def ram_over_epoch(data: dict[str, Any], axes: Axes) -> None:
    """Draw the private memory of each worker over the batches that have been read."""
    for name, series in data["series"].items():
        for worker, mib in enumerate(zip(*series["private_mib"], strict=True)):
            title = data["titles"][name] if worker == 0 else None
            axes.plot(series["batches"], mib, label=title, color=COLOURS[name], linewidth=2)
    epoch = data["batches_per_epoch"]
    axes.axvline(epoch, color="#888888", linestyle=":")
    axes.annotate(
        "epoch 2", (epoch, 0.03), xycoords=("data", "axes fraction"), xytext=(5, 0), textcoords="offset points"
    )
    axes.set(xlabel="batches", ylabel="private memory of each worker, MiB", xlim=(0, None), ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Four DataLoader workers, started by fork", loc="left")
    axes.legend(loc="upper left")


def _line(name: str) -> dict[str, Any]:
    ours = name == "shmserve"
    return {
        "color": COLOURS[name],
        "marker": _MARKERS[name],
        "linewidth": 3 if ours else 1.8,
        "zorder": 3 if ours else 2,
    }


def main() -> None:
    """Draw a picture for each result that is there."""
    parser = argparse.ArgumentParser(prog="python benchmarks/plot.py", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the directory of the JSON files")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="where the pictures go")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    arguments = parser.parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    for draw in (ram_by_rank, ram_over_epoch):
        results = arguments.results / f"{draw.__name__}.json"
        if not results.exists():
            continue
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            draw(json.loads(results.read_text())["data"], figure.subplots())
            picture = arguments.pictures / f"{draw.__name__}.{arguments.format}"
            figure.savefig(picture, dpi=100, metadata={"Date": None} if arguments.format == "svg" else None)


if __name__ == "__main__":
    main()
