"""Issues of one rank compared with the others, where ranks are merged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tbhooks.data.frame import REPLICA_DRIFT, Frame, Site, Sites
from tbhooks.data.ranks import SPREAD_STATS
from tbhooks.data.stats import INFS, NANS
from tbhooks.rules.rule import RuleHit, describe, rule
from tbhooks.rules.rule import times as times_text
from tbhooks.rules.run_view import Indices, RunView

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


@rule
def replica_drift(view: RunView) -> Iterator[RuleHit]:
    """A parameter is not the same on all ranks that should hold equal copies: its weight, or its gradient after DDP has
    averaged it, differs in at least one bit.

    Needs `ranks="merge"` and `Watch.checksums()`. A copy that was equal before counts at once. Parameters that differ
    since the first logged step count only if they are at most half of all: tensors of the same name that are split by
    hand are no copies. Try to inspect the memory of that device, and whether DDP averages all gradients.
    """
    for kind in ("weight", "weight_gradient"):
        drifted = _drifted(view.frame, kind)
        sites = [site for site in view.sites(kind) if site.name in drifted] if drifted else []
        if len(sites) > len(view.sites(kind)) / 2:
            sites = [site for site in sites if any(_was_equal(frame, site) for frame in view.frames[:-1])]
        if sites:
            rank = drifted[sites[0].name]
            yield RuleHit(
                sites[0],
                f"Rank {rank}: the bits of {describe(sites[0])} are not those of the other ranks",
                _remedy(view.frame, kind),
                "error",
                {"rank": rank},
                others=len(sites) - 1,
            )
            return


def _drifted(frame: Frame, kind: str) -> dict[str, int]:
    """The ranks that differ, by parameter."""
    start = kind + REPLICA_DRIFT
    return {tag.removeprefix(start): int(rank) for tag, rank in frame.scalars.items() if tag.startswith(start)}


def _was_equal(frame: Frame, site: Site) -> bool:
    known = (site.name, site.kind) in frame and frame[site.name, site.kind].checksum is not None
    return known and f"{site.kind}{REPLICA_DRIFT}{site.name}" not in frame.scalars


def _remedy(frame: Frame, kind: str) -> str:
    if kind == "weight" and not _drifted(frame, "weight_gradient"):
        return (
            "The gradients are equal, so the copy itself has changed: inspect the memory of that device, and code "
            "that writes to weights on one rank. Copy the weights of a good rank, or resume from a checkpoint"
        )
    return "Check that DDP averages all gradients (no_sync(), parameters changed after DDP was made), and the device"


def _outliers(frame: Frame, times: float) -> dict[Site, tuple[int, float]]:
    """For each site where one rank has far more than the others: the rank, and the ratio."""
    rows, stat = frame.sites.derived(_compared)
    if not frame.spreads.size or stat.max(initial=-1) >= frame.spreads.shape[1]:
        return {}
    least, _, most, who, middle, count = frame.spreads[rows, stat].T
    reference = np.where(count > 2, middle, least)
    with np.errstate(invalid="ignore"):
        flagged = np.flatnonzero((count > 1) & (reference > 0) & (most > times * reference))
    return {frame.sites[rows[i]]: (int(who[i]), float(most[i] / reference[i])) for i in flagged}


def _compared(sites: Sites) -> tuple[Indices, Indices]:
    """The positions of the sites that are compared, and that of the statistic of each among those of a spread."""
    rows = [i for i, site in enumerate(sites) if site.kind in _COMPARED]
    stat = [SPREAD_STATS.index(_COMPARED[sites[i].kind]) for i in rows]
    return np.array(rows, dtype=np.intp), np.array(stat, dtype=np.intp)


def _nonfinite_on_some_ranks(frame: Frame) -> Iterator[RuleHit]:
    """The first site with NaN or infinity, if some ranks have them there and others do not."""
    rows, _ = frame.sites.derived(_compared)
    flagged = np.flatnonzero(frame.values[rows][:, [NANS, INFS]].any(axis=1))
    if not len(flagged):
        return
    site = frame.sites[rows[flagged[0]]]
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
