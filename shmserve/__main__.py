"""`python -m shmserve` is the command `shmserve`."""

from __future__ import annotations

from .cli import main

main()
