"""Private attributes of torch, each looked up once. A torch without one costs statistics, and never an exception."""

from __future__ import annotations

import importlib
from typing import Any

missing: dict[str, str] = {}
"""The attributes this torch does not have, and what is lost without them."""


def look_up(name: str, instead: Any, lost: str) -> Any:
    """The object with a dotted name such as "torch._C._has_storage"; `instead` if there is none, which is noted."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(_owner(module), attribute)
    except (ImportError, AttributeError):
        missing[name] = f"this torch does not have it: {lost}"
        return instead


def _owner(name: str) -> Any:
    """A module, or a class in one."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        if not module:
            raise
        return getattr(_owner(module), attribute)
