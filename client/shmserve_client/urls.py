"""Where data is: a path of this machine, or the URL of something in a store, such as s3://bucket/corpus.bin."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["absolute", "is_remote", "scrubbed", "without_secrets"]

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?=[^/])")
_SECRETS: Final = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s'\"]*")


def is_remote(data: str) -> bool:
    """Return whether it is a URL."""
    return _SCHEME.match(data) is not None


def absolute(data: str) -> str:
    """Return a path made absolute; a URL is that already."""
    return data if is_remote(data) else os.path.abspath(data)


def without_secrets(data: str) -> str:
    """Return it without what a URL may hold that is nobody's business: a user and password, and a signed query."""
    return scrubbed(data) if is_remote(data) else data


def scrubbed(text: str) -> str:
    """Return a text without the same of all URLs in it."""
    return _SECRETS.sub("", text)
