"""Waiting for what another process or thread is about to do, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(ready: Callable[[], Any], patience_s: float, pause_s: float = 0.1) -> Any:
    """What `ready` answers once that is true; None if it never was."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        answer = ready()
        if answer:
            return answer
        time.sleep(pause_s)
    return None
