"""`python -m shmserve.sources`: tell a client, which never imports the daemon's code, the key of a source.

Reads `{"data": [...], "dtype": ..., "vocab_size": ...}` from stdin, and prints `{"key": ...}`, or the `code` and
`message` of the error that the source has. A program, so that a client finds out with its own permissions, in its own
mounts, and without holding up a daemon's other clients.
"""

from __future__ import annotations

import json
import sys

from shmserve_client.errors import ShmserveError

from .base import SourceOptions
from .resolve import resolve


def main() -> None:
    """Answer the one question."""
    question = json.load(sys.stdin)
    options = SourceOptions(question["dtype"], question["vocab_size"])
    try:
        answer = {"key": resolve(question["data"], options).key}
    except ShmserveError as error:
        answer = {"code": error.code, "message": str(error)}
    json.dump(answer, sys.stdout)


main()
