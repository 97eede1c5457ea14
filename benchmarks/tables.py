"""Puts the tables of `benchmarks/results` into Markdown, between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness import RESULTS, Report, markdown

DOCUMENTS = [RESULTS.parent / "README.md", RESULTS.parent.parent / "README.md"]
HEADLINE = "ram_headline"
"""The name of a short table for the project's README, made from `ram_by_rank.json`."""
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(document: str, results: Path) -> str:
    """Return the Markdown with the tables of these results; of a benchmark without results it says so."""
    return _MARKED.sub(lambda marked: f"{marked[1]}{_table(marked[2], results)}\n{marked[3]}", document)


def _table(name: str, results: Path) -> str:
    file = results / f"{'ram_by_rank' if name == HEADLINE else name}.json"
    if not file.exists():
        return "Not measured yet."
    found = json.loads(file.read_text())
    if name == HEADLINE:
        return _headline(found["data"])
    report = Report(**{field.name: found[field.name] for field in fields(Report)})
    return f"{markdown(report)}\n\n{_made(found)}"


def _headline(data: dict[str, Any]) -> str:
    """Return the RAM, page tables included, as contenders by groups of processes."""
    groups = list(next(iter(data["found"].values())))
    titles = [f"{group} workers" if "x" in group else f"{group} rank{'s' * (group != '1')}" for group in groups]
    lines = ["| MiB of RAM for the dataset | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(groups)]
    for name, found in data["found"].items():
        cells = [_ram(found[group]) for group in groups]
        lines.append(f"| {data['titles'][name]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "In brackets: left out, since it would not fit into this machine."])


def _ram(taken: dict[str, int]) -> str:
    if "expected" in taken:
        return f"({taken['expected'] / 2**20:,.0f})"
    return f"{(taken['pss'] + taken['page_tables']) / 2**20:,.0f}"


def _made(found: dict[str, Any]) -> str:
    machine = found["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"`{found['command']}`, {found['took_s']} s, on {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']} (shmem_enabled: {machine['shmem_enabled']}), "
        f"Python {machine['python']}, {packages}."
    )


def main() -> None:
    """Fill the documents that are named, or those of this project."""
    parser = argparse.ArgumentParser(prog="python benchmarks/tables.py", description=__doc__)
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS, help="Markdown files to change")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the directory of the JSON files")
    arguments = parser.parse_args()
    for document in arguments.documents:
        document.write_text(filled(document.read_text(), arguments.results))


if __name__ == "__main__":
    main()
