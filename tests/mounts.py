"""Programs that have a mount of their own, which nobody else sees and which goes with them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def with_tmpfs(folder: Path, size: str, argv: Sequence[object]) -> list[str]:
    """Return the command that runs `argv`, under the same pid, with a tmpfs of `size` bytes mounted on `folder`.

    The test is skipped where this user may not mount.
    """
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    mount = [*unshare, "sh", "-c", f'mount -t tmpfs -o size={size},mode=700 tmpfs "$0" && exec "$@"', str(folder)]
    try:
        tried = subprocess.run([*mount, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")
    return [*mount, *map(str, argv)]
