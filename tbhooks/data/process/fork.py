"""What a forked child does first. Windows has no fork, and Python there no `os.register_at_fork`."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_child(callback: Callable[[], object]) -> None:
    """Calls `callback` in every child that this process forks from now on; nothing where there is no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)
