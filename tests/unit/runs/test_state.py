"""A run that is still written to is distinguished from one that has ended."""

from __future__ import annotations

import pytest

from tbhooks.runs.run import state_of


@pytest.mark.parametrize(
    ("times", "now", "expected"),
    [
        ([], 0.0, "empty"),
        ([100.0], 150.0, "running"),
        ([100.0], 161.0, "ended"),
        ([100.0, 160.0, 220.0], 819.0, "running"),
        ([100.0, 160.0, 220.0], 821.0, "ended"),
        ([100.0, 101.0, 102.0], 161.0, "running"),
        ([100.0, 101.0, 102.0], 163.0, "ended"),
    ],
)
def test_a_run_is_running_while_its_newest_step_is_no_older_than_usual(
    times: list[float], now: float, expected: str
) -> None:
    assert state_of(times, now) == expected
