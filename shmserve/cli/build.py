"""`shmserve build`: a corpus as a segment file, decoded and checked once."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace

import click

from shmserve.config import default_name
from shmserve.decoding import plan_corpus
from shmserve.loader import describe
from shmserve.progress import open_progress
from shmserve.sources import SourceOptions, resolve
from shmserve.sources.remote import abandon
from shmserve.text import duration, size
from shmserve_client.layout import Checksums
from shmserve_client.urls import absolute
from shmserve_client.writer import write_segment_file

from .options import Command, columns_option, decode_option, option

__all__ = ["build"]


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.argument("output", metavar="OUT.seg")
@option("--dtype", metavar="DTYPE", help="What a file without a header holds, such as uint16.")
@option("--vocab-size", type=click.IntRange(1), metavar="N", help="Refuse token ids outside [0, N).")
@columns_option
@decode_option
@option("--checksums", is_flag=True, help="Take checksums, for `shmserve verify`.")
def build(
    paths: tuple[str, ...],
    output: str,
    dtype: str | None,
    vocab_size: int | None,
    columns: tuple[str, ...] | None,
    decode: int | None,
    checksums: bool,
) -> None:
    """Write the corpus at PATH as a segment file, to be loaded without decoding it again, or mapped (`--mode map`).

    OUT.seg must not exist yet. Where rows have to be decoded, $TMPDIR needs room for them meanwhile.
    """
    started_s = time.monotonic()
    resolved = resolve([absolute(path) for path in paths], SourceOptions(dtype, vocab_size, columns, decode))
    name = default_name([output])
    progress = open_progress(sys.stderr)

    def on_decoded(done_nbytes: int, total_nbytes: int) -> None:
        if done_nbytes == 0:
            progress.start(name, total_nbytes, "decod")
        progress.advance(done_nbytes, total_nbytes)

    try:
        with plan_corpus(resolved, shm_dir=None, progress=on_decoded) as planned:
            description, pieces = describe(name, resolved, planned.corpus)
            if checksums:
                description = replace(description, checksums=Checksums())
            progress.start(name, sum(array.nbytes for array in description.all_arrays()), "writ")
            write_segment_file(
                description,
                pieces,
                output,
                progress=progress.advance,
                cancelled=threading.Event(),
                vocab_size=vocab_size,
            )
    finally:
        abandon()  # what is still fetched from a store, if it was interrupted
        progress.close()
    click.echo(
        f"{output}: {description.num_samples:,} samples, {size(os.path.getsize(output))}, "
        f"in {duration(time.monotonic() - started_s)}"
    )
