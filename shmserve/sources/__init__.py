"""Sources: the formats that a corpus may have on disk, one module each, and the way from a path to a plan."""

from .base import Corpus, Source, SourceOptions
from .resolve import Resolved, resolve
from .shards import SOURCES

__all__ = ["SOURCES", "Corpus", "Resolved", "Source", "SourceOptions", "resolve"]
