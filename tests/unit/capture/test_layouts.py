"""How records become rows is worked out once for a list of calls, and again whenever it changes."""

from __future__ import annotations

import numpy as np
import pytest

from tbhooks.capture.recording import layouts
from tbhooks.data.sites import Site

SITES = [Site(name, "activation") for name in "abc"]
CALLS = np.array([[2, 0, 0, 1], [0, 0, 1, 3], [2, 1, 0, 1], [1, 0, 5, 6]])


def test_the_layout_of_equal_calls_is_the_same_object() -> None:
    first = layouts.layout(CALLS.copy(), list(SITES), {})
    assert layouts.layout(CALLS.copy(), list(SITES), {}) is first
    assert layouts.layout(CALLS[:3], SITES, {}) is not first
    assert layouts.layout(CALLS, [*SITES[:2], Site("other", "activation")], {}) is not first
    assert layouts.layout(CALLS, SITES, {SITES[0]: (1, 2)}) is not first
    assert layouts.layout(CALLS, SITES, {}) is first


def test_calls_that_are_changed_afterwards_are_other_calls() -> None:
    calls = np.array([[0, 0, 0, 1], [1, 0, 1, 2]])
    first = layouts.layout(calls, SITES, {})
    calls[1] = 2, 0, 1, 2
    assert layouts.layout(calls, SITES, {}).sites == (SITES[0], SITES[2])
    assert first.sites == (SITES[0], SITES[1])


def test_it_keeps_a_few_layouts_only() -> None:
    for number in range(3 * layouts.MOST_KEPT):
        layouts.layout(np.array([[0, 0, number, number + 1]]), SITES, {})
        layouts.shared_sites([Site(f"{number}", "activation")])
    assert len(layouts._kept.layouts) == len(layouts._kept.sites) == layouts.MOST_KEPT


@pytest.mark.parametrize("width", [3, 200])
def test_records_of_several_buffers_are_gathered_in_the_order_of_the_calls(width: int) -> None:
    generator = np.random.default_rng(0)
    hosts = {number: generator.integers(0, 99, (8, width)).astype(np.int32) for number in (0, 1)}
    layout = layouts.layout(CALLS, SITES, {})
    expected = [hosts[0][0], hosts[0][1], hosts[0][2], hosts[1][0], hosts[0][5]]
    assert layout.sites == (SITES[2], SITES[0], SITES[1])
    assert layout.owner.tolist() == [0, 1, 1, 0, 2]
    gathered = layout.gather(hosts, width, np.int64)
    assert gathered.dtype == np.int64
    assert np.array_equal(gathered, expected)
    alone = layouts.layout(CALLS[CALLS[:, 1] == 0], SITES, {}).gather(hosts, width, np.int64)
    assert np.array_equal(alone, [expected[i] for i in (0, 1, 2, 4)])
