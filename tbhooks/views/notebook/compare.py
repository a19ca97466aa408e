"""Two passes side by side: what changed, by how much, the most changed on top.

Changes are measured so that one is comparable with another: factors in octaves (1 is twice or half), shifts in
standard deviations, zeros as a share. NaN or infinity where there was none comes before everything else.
Numbers, and how they are told; nothing is drawn but the little histograms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Frame, Reading, Site
from tbhooks.data.peek_result import Output, Peeked
from tbhooks.data.stats import INFS, LOWER, NANS, UPPER
from tbhooks.drawing.text import cumulated, number, outputs_of, printable, shape
from tbhooks.views import notebook
from tbhooks.views.notebook import histogram, html

# From nothing to something is no number of octaves; it counts as many.
MOST_OCTAVES = 32.0
# Weights of a norm are all but one and the same number: what happens to their spread is next to nothing.
NEARLY_CONSTANT = 0.05
AGREES = math.log2(1.01)
NOT_FINITE = "NaN/Inf"
MOST_ROWS, MOST_FOLDED, MOST_TEXT_ROWS, MOST_NAMED = 40, 200, 20, 6


@dataclass(frozen=True, slots=True)
class Change:
    """How one place changed: by how much (infinite where NaN or infinity is in one of the two), and in what."""

    site: Site
    amount: float
    what: str
    """The measure that changed most: "NaN/Inf", "std", "rms", "update ratio", "zeros", "mean" or "distribution"."""
    words: str
    """The same in a few words: "std 1.02 → 0.31 (/ 3.3)"."""
    first: Reading
    second: Reading

    @property
    def agrees(self) -> bool:
        """Whether nothing changed by more than one percent."""
        return self.amount <= AGREES


@dataclass(frozen=True, eq=False)
class FrameComparison:
    """What `frame.compare(other)` returns. `changes` has every place both have, the most changed first."""

    frames: tuple[Frame, Frame]
    changes: list[Change]
    only_first: tuple[Site, ...]
    only_second: tuple[Site, ...]

    @cached_property
    def headline(self) -> str:
        """The comparison in a sentence."""
        steps = " against ".join(
            f"{_called(frame)} ({place})" for frame, place in zip(self.frames, _PLACES, strict=True)
        )
        if not self.changes:
            return f"{steps}: the two have no place in common."
        same = sum(change.agrees for change in self.changes)
        agree = f"{same} of {html.plural(len(self.changes), 'place')} agree to 1 %"
        worst = self.changes[0]
        most = "" if worst.agrees else f"; most changed: {worst.site.kind} of {worst.site.name}, {worst.words}"
        return f"{steps}: {agree}{most}."

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        return notebook.mimebundle(as_text(self), html.wrapped(as_html(self)), include, exclude)


_PLACES = ("first", "second")


def _called(frame: Frame) -> str:
    return "a pass" if isinstance(frame, Peeked) else f"step {frame.step}"


def compare(first: Frame, second: Frame) -> FrameComparison:
    """Pairs what has the same name and kind; an evaluation is compared as if it were training."""
    if not isinstance(second, Frame):
        raise ArgumentError(f"a frame is compared with another frame, not {type(second).__name__}")
    one, two = (frame.without_phase() if frame.is_evaluation else frame for frame in (first, second))
    columns = [{stat: frame.stat(stat).tolist() for stat in _MEASURED} for frame in (one, two)]
    changes = []
    for i, site in enumerate(one.sites):
        j = two._index.get((site.name, site.kind))
        if j is not None:
            pairs = {stat: (columns[0][stat][i], columns[1][stat][j]) for stat in _MEASURED}
            changes.append(_change(one._reading(i), two._reading(j), pairs))
    return FrameComparison(
        (first, second), sorted(changes, key=lambda change: -change.amount),
        tuple(site for site in one.sites if (site.name, site.kind) not in two),
        tuple(site for site in two.sites if (site.name, site.kind) not in one),
    )  # fmt: skip


# --- How much ---------------------------------------------------------------------------------------------


Pairs = dict[str, tuple[float, float]]
_FACTORS = ("std", "rms", "ratio")
_MEASURED = (*_FACTORS, "mean", "zero_fraction", "count")
_NAMES = {"zero_fraction": "zeros", "ratio": "update ratio"}


def _change(first: Reading, second: Reading, pairs: Pairs) -> Change:
    bad = pairs[NOT_FINITE] = _not_finite(first, second)
    if bool(bad[0]) != bool(bad[1]):
        return Change(first.site, math.inf, NOT_FINITE, _in_words(NOT_FINITE, bad, math.inf), first, second)
    amounts = _amounts(first, second, pairs)
    what = max(amounts, key=lambda stat: amounts[stat])
    words = _in_words(what, pairs.get(what), amounts[what])
    return Change(first.site, amounts[what], _NAMES.get(what, what), words, first, second)


def _amounts(first: Reading, second: Reading, pairs: Pairs) -> dict[str, float]:
    factors = _FACTORS if first.site.kind == "update" else _FACTORS[:-1]
    floor = NEARLY_CONSTANT * min(pairs["rms"])
    amounts = {stat: _octaves(*pairs[stat], floor if stat == "std" else 0.0) for stat in factors}
    spread = max(math.hypot(*pairs["std"]) / math.sqrt(2), floor)
    shares = [bad / max(count, 1.0) for bad, count in zip(pairs[NOT_FINITE], pairs["count"], strict=True)]
    return amounts | {
        "zero_fraction": _known(_apart(pairs["zero_fraction"])),
        NOT_FINITE: abs(shares[0] - shares[1]),
        "mean": _in_spreads(_apart(pairs["mean"]), spread),
        "distribution": _in_spreads(_distance(first, second), spread),
    }


def _apart(pair: tuple[float, float]) -> float:
    return abs(pair[0] - pair[1])


def _not_finite(first: Reading, second: Reading) -> tuple[int, int]:
    return int(first.row[NANS] + first.row[INFS]), int(second.row[NANS] + second.row[INFS])


def _known(amount: float) -> float:
    return 0.0 if math.isnan(amount) else amount


def _octaves(first: float, second: float, floor: float) -> float:
    """How many times one has to be doubled to be the other; what is below the floor counts as the floor."""
    first, second = (max(value, floor) if math.isfinite(floor) else value for value in (first, second))
    if first == second or not (math.isfinite(first) and math.isfinite(second)):
        return 0.0
    if min(first, second) <= 0:
        return MOST_OCTAVES
    return min(abs(math.log2(second) - math.log2(first)), MOST_OCTAVES)


def _in_spreads(shift: float, spread: float) -> float:
    return _known(min(shift / spread, MOST_OCTAVES)) if spread > 0 else 0.0


def _distance(first: Reading, second: Reading) -> float:
    """How far the elements of one must move, on average, to be distributed like the other's (earth mover's).

    Within a bucket they are taken to be even, between the exact ends; so numbers next to a bucket's edge are near.
    """
    if not (first.counts.any() and second.counts.any()) or _is_same(first, second):
        return 0.0
    edges = [np.clip(np.append(LOWER, UPPER[-1]), reading.min, reading.max) for reading in (first, second)]
    places = np.unique(np.concatenate(edges))
    middles = (places[1:] + places[:-1]) / 2
    shares = [cumulated(r.counts, r.min, r.max, middles) / r.counts.sum() for r in (first, second)]
    return float(np.sum(np.abs(shares[0] - shares[1]) * np.diff(places)))


def _is_same(first: Reading, second: Reading) -> bool:
    return np.array_equal(first.row, second.row) and np.array_equal(first.counts, second.counts)


def _in_words(what: str, pair: tuple[float, float] | None, amount: float) -> str:
    if amount == 0:
        return "nothing"
    if pair is None:
        return f"distribution moved by {number(amount)} std"
    first, second = (f"{value:,}" if what == NOT_FINITE else number(value, what) for value in pair)
    told = f"{_NAMES.get(what, what)} {first} → {second}"
    if what in _FACTORS and min(pair) > 0:
        return f"{told} ({'x' if pair[1] > pair[0] else '/'} {max(pair) / min(pair):.3g})"
    return f"{told} (by {number(amount)} std)" if what == "mean" else told


# --- How it is told ---------------------------------------------------------------------------------------

_SHOWN = (("mean", "mean"), ("std", "std"), ("zeros", "zero_fraction"))


def as_text(comparison: FrameComparison) -> str:
    """The headline, the places that changed most, and those only one has."""
    rows = [["place", "kind", "changed", *(title for title, _ in _SHOWN)]]
    changed = [change for change in comparison.changes if not change.agrees]
    rows += [
        [printable(html.shortened(c.site.name, 60)), c.site.kind, c.words, *(_both(c, stat) for _, stat in _SHOWN)]
        for c in changed[:MOST_TEXT_ROWS]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    left = len(changed) - MOST_TEXT_ROWS
    more = [f"and {left} more"] if left > 0 else []
    table = ["\n".join([*lines, *more])] if changed else []
    return "\n\n".join([printable(comparison.headline), *table, *map(printable, _asides(comparison))])


def as_html(comparison: FrameComparison) -> str:
    """The same with small histograms of both; places that agree are folded away."""
    changed = min(sum(not change.agrees for change in comparison.changes), MOST_ROWS)
    header = ("place", "<kind", "<changed most", "distribution", *(title for title, _ in _SHOWN), "NaN/Inf")
    rows = [_cells(change) for change in comparison.changes[: changed + MOST_FOLDED]]
    first, rest = rows[:changed], rows[changed:]
    parts = [f"<p>{html.text(html.shortened(comparison.headline, 1000))}</p>"]
    if first:
        parts.append(html.table(header, first))
    if rest:
        less = html.plural(len(comparison.changes) - changed, "place")
        title = f"{less} that changed less" + (f", the first {MOST_FOLDED}" if len(rest) == MOST_FOLDED else "")
        parts.append(html.folded(title, html.table(header, rest), unfolded=False))
    return "".join(parts) + html.listed([html.shortened(sentence, 1000) for sentence in _asides(comparison)])


def _cells(change: Change) -> list[str]:
    bad = _not_finite(change.first, change.second)
    named = [html.name(change.site.name), *map(html.text, (change.site.kind, change.words))]
    told = [html.text(_both(change, stat)) for _, stat in _SHOWN]
    pictures = histogram.drawn_over(change.first, change.second)
    return [*named, pictures, *told, f"{bad[0]:,} → {bad[1]:,}" if any(bad) else "0"]


def _both(change: Change, stat: str) -> str:
    first, second = (number(float(getattr(reading, stat)), stat) for reading in (change.first, change.second))
    return first if first == second else f"{first} → {second}"


def _asides(comparison: FrameComparison) -> list[str]:
    """Places only one of the two has, by kind; outputs that are something else."""
    told = []
    for place, sites in zip(_PLACES, (comparison.only_first, comparison.only_second), strict=True):
        for kind in dict.fromkeys(site.kind for site in sites):
            names = [site.name for site in sites if site.kind == kind]
            told.append(f"only in the {place}: {kind} of {_some(names)}")
    return told + _other_outputs(*(outputs_of(frame) for frame in comparison.frames))


def _other_outputs(first: Mapping[str, Output], second: Mapping[str, Output]) -> list[str]:
    """Outputs that are of another class, shape or dtype, where both frames know them; those alike in one sentence."""
    alike: dict[str, list[str]] = {}
    for name in first.keys() & second.keys():
        one, two = first[name], second[name]
        told = (
            ("type", one.module, two.module),
            ("shape", shape(one.shape), shape(two.shape)),
            ("dtype", one.dtype, two.dtype),
        )
        for what, before, after in told:
            if before != after:
                alike.setdefault(f"{what} {before} → {after}", []).append(name)
    return [f"{what} in {html.plural(len(names), 'place')}: {_some(sorted(names))}" for what, names in alike.items()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
