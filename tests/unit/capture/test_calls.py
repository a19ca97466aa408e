"""The table of calls: the same whether single calls, many at once or a hook in C add to it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.capture.hooks.eager_hooks import _make_lane
from tbhooks.capture.recording.calls import FEWEST, ROOM, Calls


def test_calls_come_back_as_they_were_added() -> None:
    calls = Calls()
    expected = [(i % 7, (i % 3, i, i + 1 + i % 2)) for i in range(3 * FEWEST)]  # more than fit at first
    for site, span in expected:
        calls.append(site, span)
    assert list(calls) == expected
    assert len(calls) == len(calls.owners) == len(expected)


def test_many_calls_are_added_as_if_one_by_one() -> None:
    at_once, one_by_one = Calls(), Calls()
    sites = list(range(5, 5 + 2 * FEWEST))
    for calls in (at_once, one_by_one):
        calls.append(1, (0, 0, 3))
    at_once.extend(sites, 2, 10)
    for i, site in enumerate(sites):
        one_by_one.append(site, (2, 10 + i, 11 + i))
    assert np.array_equal(at_once.table(), one_by_one.table())
    assert at_once.owners == one_by_one.owners


def test_dropping_an_owner_removes_its_calls_only() -> None:
    calls, mine, other = Calls(), object(), object()
    for i, owner in enumerate((mine, other, None, mine, other)):
        calls.append(i, (0, i, i + 1), owner)
    assert calls.drop({mine})
    assert list(calls) == [(1, (0, 1, 2)), (2, (0, 2, 3)), (4, (0, 4, 5))]
    assert calls.owners == [other, None, other]
    assert not calls.drop({mine})
    calls.append(9, (1, 0, 1), mine)
    assert list(calls)[-1] == (9, (1, 0, 1))


def test_the_table_of_a_step_does_not_change_with_the_next_one() -> None:
    calls = Calls()
    calls.append(1, (0, 0, 1))
    table = calls.table()
    calls.clear()
    calls.append(2, (0, 5, 6))
    assert table.tolist() == [[1, 0, 0, 1]]


def test_its_memory_is_kept_from_step_to_step() -> None:
    calls = Calls()
    for _ in range(3):
        for i in range(2 * FEWEST):
            calls.append(i, (0, i, i + 1))
        room = calls.header[ROOM]
        calls.clear()
    assert calls.header[ROOM] == room


@pytest.mark.skipif(_make_lane() is None, reason="hooks in Python make more")
def test_a_logged_step_leaves_few_objects_to_the_garbage_collector() -> None:
    """Those that a step leaves behind have Python's garbage collector look at all objects of the process more often."""
    layers = 64
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4)
    found = []
    with tbhooks.watch(model, every=1, histograms=False, rules=()) as watching:

        def made_by_hooks() -> int:
            """How many more containers there are after the forward than before it, tensors and graph aside."""
            before = gc.get_count()[0]
            model(batch)
            return gc.get_count()[0] - before

        gc.disable()
        try:
            for _ in range(4):
                found.append(made_by_hooks())
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                watching.flush()
        finally:
            gc.enable()
    # Of each output: the hook on it and its dictionary, and in the cache of recent outputs a weak reference, an entry
    # and a span.
    assert found[-1] <= 5 * layers, found
