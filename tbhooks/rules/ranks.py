"""Issues of one rank compared with the others, where ranks are merged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.frame import Frame, Site
from tbhooks.data.stats import INFS, NANS
from tbhooks.rules.rule import RuleHit, describe, rule
from tbhooks.rules.rule import times as times_text
from tbhooks.rules.run_view import RunView

# The statistic by which each kind is compared.
_COMPARED = {"activation": "rms", "gradient": "norm"}
_REMEDY = "Inspect the data of that rank, its seed and its device"


@rule
def sick_rank(view: RunView, *, times: float = 10.0, frames: int = 2) -> Iterator[RuleHit]:
    """One rank's activations or gradients are far larger than those of the others, or it alone has NaN or infinity.

    Needs `ranks="merge"`. NaN and infinity are reported at once; the size when the same rank has more than `times` the
    median of all ranks (of the other one, if there are two) in each of the last `frames` frames.
    Try to inspect the data of that rank, its seed and its device.
    """
    if not view.frame.spreads.size:
        return
    yield from _nonfinite_on_some_ranks(view.frame)
    if len(view.frames) < frames:
        return
    outliers = [_outliers(frame, times) for frame in view.frames[-frames:]]
    newest = outliers[-1]
    sites = [site for site in newest if all(site in each and each[site][0] == newest[site][0] for each in outliers)]
    if sites:
        site = max(sites, key=lambda site: newest[site][1])
        rank, ratio = newest[site]
        yield RuleHit(
            site,
            f"Rank {rank}: {site.kind}.{_COMPARED[site.kind]} of {site.name} is {times_text(ratio)} the median of all "
            "ranks",
            _REMEDY,
            evidence={"rank": rank, "ratio": ratio, "excess": ratio / times},
            since=view.step(frames - 1),
            others=len(sites) - 1,
        )


def _outliers(frame: Frame, times: float) -> dict[Site, tuple[int, float]]:
    """For each site where one rank has far more than the others: the rank, and the ratio."""
    outliers = {}
    for site in frame.sites if frame.spreads.size else ():
        if site.kind in _COMPARED:
            spread = frame[site.name, site.kind].spread(_COMPARED[site.kind])
            reference = spread.median if spread.ranks > 2 else spread.min
            if spread.ranks > 1 and reference > 0 and spread.max > times * reference:
                outliers[site] = spread.max_rank, spread.max / reference
    return outliers


def _nonfinite_on_some_ranks(frame: Frame) -> Iterator[RuleHit]:
    """The first site with NaN or infinity, if some ranks have them there and others do not."""
    for i, site in enumerate(frame.sites):
        if site.kind in _COMPARED and frame.values[i, [NANS, INFS]].any():
            reading = frame[site.name, site.kind]
            spreads = [reading.spread(stat) for stat in ("nan_count", "inf_count")]
            worst = spreads[int(np.argmax([spread.max for spread in spreads]))]
            if worst.ranks > 1 and worst.max > 0 and all(spread.min == 0 for spread in spreads):
                yield RuleHit(
                    site,
                    f"Rank {worst.max_rank}: {int(worst.max):,} values of {describe(site)} are not finite, while all "
                    "are on another rank,",
                    _REMEDY,
                    "error",
                    {"rank": worst.max_rank, "count": int(worst.max)},
                )
            return
