"""Two frames side by side: what changed and by how much, the largest change first.

Changes are measured so that they can be ranked: factors in octaves (1 is twice or half), shifts in standard
deviations, zeros as a fraction. NaN or infinity in only one of the two ranks before everything else, and tensors that
are negligible in both come after the others.
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
from tbhooks.drawing.names import shorten, shorten_all
from tbhooks.drawing.text import cumulated, number, outputs_of, printable, shape
from tbhooks.views import notebook
from tbhooks.views.notebook import histogram, html

# The change from zero to anything else has no finite number of octaves; it counts as this many.
MOST_OCTAVES = 32.0
# A std below this fraction of the rms counts as this fraction: the weights of a norm layer are nearly constant.
NEARLY_CONSTANT = 0.05
NEGLIGIBLE = 1e-3
MATCH_WITHIN = math.log2(1.01)
NOT_FINITE = "NaN/Inf"
MOST_ROWS, MOST_FOLDED, MOST_TEXT_ROWS, MOST_NAMED = 40, 200, 20, 6
LONGEST_TEXT_NAME = 60


@dataclass(frozen=True, slots=True)
class Change:
    """How one tensor changed: by how much (infinite if only one of the two has NaN or infinity), and in what."""

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
        return self.amount <= MATCH_WITHIN


@dataclass(frozen=True, eq=False)
class FrameComparison:
    """What `frame.compare(other)` returns. `changes` has every tensor that both have, the largest change first."""

    frames: tuple[Frame, Frame]
    changes: list[Change]
    only_first: tuple[Site, ...]
    only_second: tuple[Site, ...]

    @cached_property
    def headline(self) -> str:
        """The comparison in a sentence."""
        first, second = map(_title, self.frames)
        frames = f"{first} (first) against {second} (second)"
        if not self.changes:
            return f"{frames}: the two have no tensor in common."
        same = sum(change.agrees for change in self.changes)
        largest = self.changes[0]
        most = (
            "" if largest.agrees else f"; largest change: {largest.site.kind} of {largest.site.name}, {largest.words}"
        )
        return f"{frames}: {same} of {html.plural(len(self.changes), 'tensor')} match within 1%{most}."

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        return notebook.mimebundle(as_text(self), html.wrap(as_html(self)), include, exclude)


def _title(frame: Frame) -> str:
    return "a pass" if isinstance(frame, Peeked) else f"step {frame.step}"


def compare(first: Frame, second: Frame) -> FrameComparison:
    """Compares tensors of the same name and kind; an evaluation is compared as if it were training.

    Raises ArgumentError if `second` is not a frame.
    """
    if not isinstance(second, Frame):
        raise ArgumentError(f"compare() takes another logged step (a Frame), not {type(second).__name__}")
    one, two = (frame.without_phase() if frame.is_evaluation else frame for frame in (first, second))
    columns = [{stat: frame.stat(stat).tolist() for stat in _MEASURED} for frame in (one, two)]
    rows = {(site.name, site.kind): j for j, site in enumerate(two.sites)}
    changes = []
    for i, site in enumerate(one.sites):
        key = (site.name, site.kind)
        if key in rows:
            pairs = {stat: (columns[0][stat][i], columns[1][stat][rows[key]]) for stat in _MEASURED}
            changes.append(_change(one[key], two[key], pairs))
    return FrameComparison(
        (first, second), _ranked(changes),
        tuple(site for site in one.sites if (site.name, site.kind) not in two),
        tuple(site for site in two.sites if (site.name, site.kind) not in one),
    )  # fmt: skip


def _ranked(changes: list[Change]) -> list[Change]:
    """The largest effect first: by amount, and by less where the tensor is negligible in both frames.

    A tensor is negligible if its rms is below a thousandth of what is usual in its kind, such as a gradient of 1e-13.
    """
    sizes = [max(_zero_if_nan(change.first.rms), _zero_if_nan(change.second.rms)) for change in changes]
    by_kind: dict[str, list[float]] = {}
    for change, size in zip(changes, sizes, strict=True):
        by_kind.setdefault(change.site.kind, []).extend([size] if size > 0 else [])
    floors = {kind: NEGLIGIBLE * float(np.median(of_kind)) for kind, of_kind in by_kind.items() if of_kind}
    effects = [change.amount for change in changes]
    for i, (change, size) in enumerate(zip(changes, sizes, strict=True)):
        if size > 0 and change.amount < math.inf:
            effects[i] *= min(1.0, size / floors[change.site.kind])
    order = sorted(range(len(changes)), key=lambda i: (changes[i].agrees, -effects[i]))
    return [changes[i] for i in order]


# --- Measuring changes ------------------------------------------------------------------------------------


Pairs = dict[str, tuple[float, float]]
_FACTORS = ("std", "rms", "ratio")
_MEASURED = (*_FACTORS, "mean", "zero_fraction", "count")
_NAMES = {"zero_fraction": "zeros", "ratio": "update ratio"}


def _change(first: Reading, second: Reading, pairs: Pairs) -> Change:
    nonfinite = pairs[NOT_FINITE] = _nonfinite_counts(first, second)
    if bool(nonfinite[0]) != bool(nonfinite[1]):
        return Change(first.site, math.inf, NOT_FINITE, _in_words(NOT_FINITE, nonfinite, math.inf), first, second)
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
        "zero_fraction": _zero_if_nan(_difference(pairs["zero_fraction"])),
        NOT_FINITE: abs(shares[0] - shares[1]),
        "mean": _in_stds(_difference(pairs["mean"]), spread),
        "distribution": _in_stds(_distance(first, second), spread),
    }


def _difference(pair: tuple[float, float]) -> float:
    return abs(pair[0] - pair[1])


def _nonfinite_counts(first: Reading, second: Reading) -> tuple[int, int]:
    return int(first.row[NANS] + first.row[INFS]), int(second.row[NANS] + second.row[INFS])


def _zero_if_nan(amount: float) -> float:
    return 0.0 if math.isnan(amount) else amount


def _octaves(first: float, second: float, floor: float) -> float:
    """The base-2 logarithm of the ratio, without its sign; values below the floor count as the floor."""
    first, second = (max(value, floor) if math.isfinite(floor) else value for value in (first, second))
    if first == second or not (math.isfinite(first) and math.isfinite(second)):
        return 0.0
    if min(first, second) <= 0:
        return MOST_OCTAVES
    return min(abs(math.log2(second) - math.log2(first)), MOST_OCTAVES)


def _in_stds(shift: float, spread: float) -> float:
    return _zero_if_nan(min(shift / spread, MOST_OCTAVES)) if spread > 0 else 0.0


def _distance(first: Reading, second: Reading) -> float:
    """The earth mover's distance: how far elements must move, on average, to be distributed like the other's.

    Within a bucket elements count as evenly spread, so values on both sides of a bucket's edge are close.
    """
    if not (first.counts.any() and second.counts.any()) or _is_same(first, second):
        return 0.0
    edges = [np.clip(np.append(LOWER, UPPER[-1]), reading.min, reading.max) for reading in (first, second)]
    edge_values = np.unique(np.concatenate(edges))
    middles = (edge_values[1:] + edge_values[:-1]) / 2
    shares = [cumulated(r.counts, r.min, r.max, middles) / r.counts.sum() for r in (first, second)]
    return float(np.sum(np.abs(shares[0] - shares[1]) * np.diff(edge_values)))


def _is_same(first: Reading, second: Reading) -> bool:
    return np.array_equal(first.row, second.row) and np.array_equal(first.counts, second.counts)


def _in_words(what: str, pair: tuple[float, float] | None, amount: float) -> str:
    if amount == 0:
        return "unchanged"
    if pair is None:
        return f"distribution moved by {number(amount)} std"
    first, second = (f"{value:,}" if what == NOT_FINITE else number(value, what) for value in pair)
    words = f"{_NAMES.get(what, what)} {first} → {second}"
    if what in _FACTORS and min(pair) > 0:
        return f"{words} ({'x' if pair[1] > pair[0] else '/'} {max(pair) / min(pair):.3g})"
    return f"{words} (by {number(amount)} std)" if what == "mean" else words


# --- As text and HTML -------------------------------------------------------------------------------------

_SHOWN = (("mean", "mean"), ("std", "std"), ("zeros", "zero_fraction"))


def as_text(comparison: FrameComparison) -> str:
    """The headline, the tensors that changed most, and those that only one frame has."""
    changed = [change for change in comparison.changes if not change.agrees]
    shown = changed[:MOST_TEXT_ROWS]
    names, _ = shorten_all([printable(change.site.name) for change in shown], LONGEST_TEXT_NAME)
    rows = [["tensor", "kind", "changed", *(title for title, _ in _SHOWN)]]
    for name, change in zip(names, shown, strict=True):
        rows.append([name, change.site.kind, change.words, *(_both(change, stat) for _, stat in _SHOWN)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    left = len(changed) - len(shown)
    table = ["\n".join([*lines, *([f"and {left} more"] if left else [])])] if changed else []
    return "\n\n".join([printable(comparison.headline), *table, *map(printable, _notes(comparison))])


def as_html(comparison: FrameComparison) -> str:
    """The same with small histograms of both; tensors that match are folded."""
    changed = min(sum(not change.agrees for change in comparison.changes), MOST_ROWS)
    header = ("tensor", "<kind", "<largest change", "distribution", *(title for title, _ in _SHOWN), "NaN/Inf")
    shown = comparison.changes[: changed + MOST_FOLDED]
    names = html.escape_names([change.site.name for change in shown])
    rows = [[name, *_cells(change)] for name, change in zip(names, shown, strict=True)]
    first, rest = rows[:changed], rows[changed:]
    parts = [html.paragraph(shorten(comparison.headline, 1000), css="")]
    if first:
        parts.append(html.table(header, first))
    if rest:
        less = html.plural(len(comparison.changes) - changed, "tensor")
        title = f"{less} with smaller changes" + (f", the first {MOST_FOLDED}" if len(rest) == MOST_FOLDED else "")
        parts.append(html.details(title, html.table(header, rest)))
    return "".join(parts) + html.bullets([shorten(sentence, 1000) for sentence in _notes(comparison)])


def _cells(change: Change) -> list[str]:
    nonfinite = _nonfinite_counts(change.first, change.second)
    return [
        html.escape(change.site.kind), html.escape(change.words), histogram.draw_both(change.first, change.second),
        *(html.escape(_both(change, stat)) for _, stat in _SHOWN),
        f"{nonfinite[0]:,} → {nonfinite[1]:,}" if any(nonfinite) else "0",
    ]  # fmt: skip


def _both(change: Change, stat: str) -> str:
    first, second = (number(float(getattr(reading, stat)), stat) for reading in (change.first, change.second))
    return first if first == second else f"{first} → {second}"


def _notes(comparison: FrameComparison) -> list[str]:
    """Tensors that only one of the two has, by kind; then outputs of another class, shape or dtype."""
    notes = []
    for which, sites in (("first", comparison.only_first), ("second", comparison.only_second)):
        for kind in dict.fromkeys(site.kind for site in sites):
            names = [site.name for site in sites if site.kind == kind]
            notes.append(f"only in the {which}: {kind} of {_some(names)}")
    return notes + _output_changes(*(outputs_of(frame) for frame in comparison.frames))


def _output_changes(first: Mapping[str, Output], second: Mapping[str, Output]) -> list[str]:
    """One sentence for all outputs that changed in the same way, where both frames know their outputs."""
    changes: dict[str, list[str]] = {}
    for name in first.keys() & second.keys():
        one, two = first[name], second[name]
        compared = (
            ("type", one.module, two.module),
            ("shape", shape(one.shape), shape(two.shape)),
            ("dtype", one.dtype, two.dtype),
        )
        for what, before, after in compared:
            if before != after:
                changes.setdefault(f"{what} {before} → {after}", []).append(name)
    return [
        f"{change} in {html.plural(len(names), 'module')}: {_some(sorted(names))}" for change, names in changes.items()
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
