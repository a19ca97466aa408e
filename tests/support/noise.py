"""What torch itself prints, which is not what a test of standard error is about."""

from __future__ import annotations

import re

# Its C++ logger writes "[W1117 20:30:02.123 file.cpp:12] text", at exit too; which lines differs between versions.
LOGGED_BY_TORCH = re.compile(r"(\[rank\d+\]:)?\[[IWEF]\d{4} \d\d:\d\d:\d\d")


def without_torch_log(text: str) -> str:
    """The text without the lines that torch's C++ logger has written."""
    return "".join(line for line in text.splitlines(keepends=True) if not LOGGED_BY_TORCH.match(line))
