"""Waiting for what another process or thread does, but not for ever, and reading what it printed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
# Torch's C++ logger writes "[W1117 20:30:02.123 file.cpp:12] text", at exit too; which lines differs between versions.
# Triton's bindings list at exit what they have not freed.
LOGGED_BY_TORCH = re.compile(
    r"(\[rank\d+\]:)?\[[IWEF]\d{4} \d\d:\d\d:\d\d|nanobind: | - leaked |  ?- \.\.\. skipped|See https://nanobind"
)


def wait_until(ready: Callable[[], Any], patience_s: float = PATIENCE_S, pause_s: float = 0.1) -> Any:
    """What `ready` returns once that is true; None if it is not within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        answer = ready()
        if answer:
            return answer
        time.sleep(pause_s)
    return None


def wait_for(ready: Callable[[], Any], what: str) -> Any:
    """The same, and a failure that names `what` was waited for."""
    answer = wait_until(ready)
    assert answer, f"waited {PATIENCE_S} s for {what}"
    return answer


def without_torch_log(text: str) -> str:
    """The text without the lines that torch's C++ logger and Triton have written."""
    return "".join(line for line in text.splitlines(keepends=True) if not LOGGED_BY_TORCH.match(line))
