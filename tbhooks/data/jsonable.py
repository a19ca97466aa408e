"""Any value as JSON can hold it, and back: NaN and infinities, for which JSON has no word, are strings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any) -> Any:
    """Only dicts, lists, strings and numbers; whatever else there is becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def number(value: Any) -> Any:
    """What stands where a number should: the number that a word was written for."""
    return WORDS.get(value, value) if isinstance(value, str) else value
