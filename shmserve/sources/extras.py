"""Libraries that a format needs and not everybody has: imported where they are used, or refused with the remedy."""

from __future__ import annotations

import importlib
from typing import Any

from shmserve_client.errors import ConfigError

__all__ = ["require"]


def require(module: str, extra: str, what: str) -> Any:
    """Return the module, which `pip install shmserve[extra]` brings; `what` is what cannot be read without it.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {module} ({error}): pip install 'shmserve[{extra}]'") from error
