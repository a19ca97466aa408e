"""Which cases `make test` leaves out for their time, and why. `make test-slow` runs them, `make test-all` everything.

What is left out is chosen where the case is written, and every test keeps at least one case in `make test` unless its
marker names the test that covers the same promise there. tests/unit/test_support.py checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

# Every test that pytest collected, those that `-m` leaves out as well.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def slow(reason: str, *, covered_by: str = "") -> pytest.MarkDecorator:
    """Leaves a test, or one of its cases, out of `make test`.

    `covered_by` names the test that keeps the promise in `make test`, for a test of which no case is left there.
    """
    return pytest.mark.slow(reason=reason, covered_by=covered_by)


def cases(
    values: Mapping[str, Any] | Iterable[Any], *, always: Collection[str], reason: str, name: Callable[[Any], str] = str
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, of which `make test` runs only those named in `always`.

    The values of a mapping are the parameters and its keys their names. Other values are named by `name`.
    """
    named = list(values.items()) if isinstance(values, Mapping) else [(name(value), value) for value in values]
    unknown = set(always) - {case for case, _ in named}
    if unknown or not always:
        raise ValueError(f"no such case: {sorted(unknown)}" if unknown else "make test needs at least one case")
    return [pytest.param(value, id=case, marks=[] if case in always else slow(reason)) for case, value in named]
