"""`Sites` is a tuple that computes what follows from it once."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from torch import nn

import tbhooks
from tbhooks.data import stats
from tbhooks.data.frame import Frame
from tbhooks.data.sites import Site, Sites

GIVEN = (
    Site("a", "activation"),
    Site("a.weight", "weight"),
    Site("b", "activation", "[0]"),
    Site("a", "gradient"),
)


def test_it_is_the_tuple_with_the_positions_of_kinds_and_names() -> None:
    sites = Sites(GIVEN)
    assert sites == GIVEN
    assert hash(sites) == hash(GIVEN)
    assert sites.index(GIVEN[2]) == 2
    assert {kind: found.tolist() for kind, found in sites.positions.items()} == {
        "activation": [0, 2], "weight": [1], "gradient": [3],
    }  # fmt: skip
    assert sites.of_kind("activation") == (GIVEN[0], GIVEN[2])
    assert sites.of_kind("update") == ()
    assert sites.of_kind("activation").names == ("a", "b[0]")
    assert sites.position_of["b[0]", "activation"] == 2


def test_what_is_derived_is_computed_once_for_each_argument() -> None:
    calls = []

    def count(sites: Sites, kind: str) -> int:
        calls.append(kind)
        return len(sites.of_kind(kind))

    sites = Sites(GIVEN)
    assert [sites.derived(count, kind) for kind in ("activation", "weight", "activation")] == [2, 1, 2]
    assert calls == ["activation", "weight"]


def test_a_pickle_holds_the_sites_alone() -> None:
    sites = Sites(GIVEN)
    before = pickle.dumps(sites)
    sites.derived(lambda found: found.names)  # a function that cannot be pickled
    assert pickle.dumps(sites) == before
    assert pickle.loads(before) == sites


def test_frames_of_steps_with_the_same_tensors_share_their_sites() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1, rules=()) as watching:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    first, second, third = (frame.sites for frame in watching.history)
    assert first is second is third
    assert isinstance(first, Sites)


def test_a_frame_takes_any_tuple() -> None:
    frame = Frame(0, 0.0, 0, GIVEN, stats.empty_rows(4), np.zeros((4, 0), np.int64))  # type: ignore[arg-type]
    assert isinstance(frame.sites, Sites)
    assert frame.position("a", "gradient") == 3
