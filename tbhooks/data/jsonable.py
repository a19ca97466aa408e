"""Values as JSON can hold them. JSON has no NaN and no infinities: they become the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_jsonable(value: Any) -> Any:
    """Returns dicts, lists, strings, numbers and None. Objects of other types become their `str`."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        types = set(map(type, value)) - {type(None)}  # long series: twenty times as fast
        if types <= {int, str} or (types == {float} and math.isfinite(sum(filter(None, value)))):
            return list(value)
        return [to_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def parse_number(value: Any) -> Any:
    """Returns the float that `to_jsonable` wrote as a string; other values unchanged."""
    return WORDS.get(value, value) if isinstance(value, str) else value
