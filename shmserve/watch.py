"""Looks whether the files of served datasets have changed, in a thread: a file system that is gone hangs only it."""

from __future__ import annotations

import threading
import time
from typing import Final

from .catalog import Catalog

__all__ = ["Watch"]

_LEAST_PAUSE_S: Final = 1.0
_PAUSES_PER_LOOK: Final = 100
"""A look at thousands of files on a network file system is work for others: it may be one part in so many."""


class Watch:
    """Keeps `Ready.source_changed` in the catalog true to the files, a while late, a second at least."""

    def __init__(self, catalog: Catalog) -> None:
        """Prepare to watch what is in the catalog at any time."""
        self._catalog = catalog
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look again and again, until `stop` or the end of the process."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more. Does not wait for a look that hangs."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = _LEAST_PAUSE_S
        while not self._stopped.wait(pause_s):
            started_s = time.monotonic()
            self.look()
            pause_s = max(_LEAST_PAUSE_S, _PAUSES_PER_LOOK * (time.monotonic() - started_s))

    def look(self) -> None:
        """Compare the files of every served dataset with what was loaded, once."""
        for ready in self._catalog.ready().values():
            changed = ready.resolved.changed()
            if changed != ready.source_changed:
                self._catalog.mark_changed(ready, changed)
