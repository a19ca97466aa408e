"""Rows of an array by their numbers: a slice where they follow each other, which spares NumPy a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.intp] | slice


def places_of(numbers: Sequence[int]) -> Places:
    """What indexes just these rows, in this order."""
    start = numbers[0] if numbers else 0
    if list(numbers) == list(range(start, start + len(numbers))):
        return slice(start, start + len(numbers))
    return np.array(numbers, dtype=np.intp)
