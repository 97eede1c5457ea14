"""`shmserve demo`: the whole thing in one command, on data that every machine has."""

from __future__ import annotations

import click

from .options import Command, option

__all__ = ["demo"]


@click.command(cls=Command)
@option("--ranks", type=click.IntRange(1), default=4, show_default=True, help="Training processes.")
@option("--workers", type=click.IntRange(0), default=2, show_default=True, help="DataLoader workers of each.")
@option("--steps", type=click.IntRange(1), default=100, show_default=True, help="Training steps of each.")
def demo(ranks: int, workers: int, steps: int) -> None:
    """Train on Python's own source text, with and without sharing, and show what each process holds."""
    from shmserve.demo import run_demo

    run_demo(ranks, workers, steps)
