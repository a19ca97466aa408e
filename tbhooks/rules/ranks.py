"""Illnesses of one rank among others, seen where ranks are merged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.frame import Frame, Site
from tbhooks.data.rank_spread import Spread
from tbhooks.data.stats import INFS, NANS
from tbhooks.rules.rule import RuleHit, rule
from tbhooks.rules.run_view import RunView

# What each kind is compared by.
_COMPARED = {"activation": "rms", "gradient": "norm"}


@rule
def sick_rank(view: RunView, *, times: float = 10.0, frames: int = 2) -> Iterator[RuleHit]:
    """One rank's activations or gradients are far larger than those of the others, or it alone has NaN or infinity.

    Needs `ranks="merge"`. Speaks of NaN at once; of size when the same rank has more than `times` the median of all
    ranks (of the other one, if there are two) in each of the last `frames` frames.
    Try a look at the data of that rank, at its seed, and at the device it runs on.
    """
    if not view.frame.spreads.size:
        return
    yield from _alone_with(view.frame)
    if len(view.frames) < frames:
        return
    large = [_large(frame, times) for frame in view.frames[-frames:]]
    places = [site for site in large[-1] if all(_same(site, each, large[-1]) for each in large)]
    if places:
        site = max(places, key=lambda place: large[-1][place][1])
        who, ratio = large[-1][site]
        stat = f"{site.kind}.{_COMPARED[site.kind]}"
        yield RuleHit(
            site,
            f"rank {who}: {stat} of {site.name} is {ratio:.3g}x the median of ranks",
            "a look at the data of that rank, at its seed, and at the device it runs on",
            evidence={"rank": who, "times": ratio, "excess": ratio / times},
            since=view.step(frames - 1),
            others=len(places) - 1,
        )


def _large(frame: Frame, times: float) -> dict[Site, tuple[int, float]]:
    """Where one rank has much more than the others: who, and how many times."""
    found = {}
    for site in frame.sites if frame.spreads.size else ():
        if site.kind in _COMPARED:
            seen = frame[site.name, site.kind].spread(_COMPARED[site.kind])
            usual = _usual(seen)
            if seen.ranks > 1 and usual > 0 and seen.max > times * usual:
                found[site] = seen.max_rank, seen.max / usual
    return found


def _usual(seen: Spread) -> float:
    return seen.median if seen.ranks > 2 else seen.min


def _same(site: Site, one: dict[Site, tuple[int, float]], other: dict[Site, tuple[int, float]]) -> bool:
    return site in one and one[site][0] == other[site][0]


def _alone_with(frame: Frame) -> Iterator[RuleHit]:
    """The first place where some ranks have what is not finite, and others do not."""
    for i, site in enumerate(frame.sites):
        if site.kind in _COMPARED and frame.values[i, [NANS, INFS]].any():
            reading = frame[site.name, site.kind]
            seen = [reading.spread(stat) for stat in ("nan_count", "inf_count")]
            worst = seen[int(np.argmax([each.max for each in seen]))]
            if worst.ranks > 1 and worst.max > 0 and all(each.min == 0 for each in seen):
                yield RuleHit(
                    site,
                    f"rank {worst.max_rank}: {int(worst.max)} values in the {site.kind} of {site.name} are not finite, "
                    "and all are on another rank",
                    "a look at the data of that rank, at its seed, and at the device it runs on",
                    "error",
                    {"rank": worst.max_rank, "count": int(worst.max)},
                )
            return
