"""One frame as tables: modules in execution order, then parameters, with what was found in words above them.

What a row says is decided by the lists of columns; a column whose kind the frame does not have is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tbhooks.data.frame import ALL_KINDS, Frame
from tbhooks.data.grids import is_of_site
from tbhooks.data.peek_result import Peeked
from tbhooks.data.stats import INFS, NANS
from tbhooks.drawing.text import names_of, number, outputs_of, shape
from tbhooks.drawing.text import table as text_table
from tbhooks.views.notebook import findings, histogram, html

# Longer tables show their ends and what has a finding; many parameters have no pictures, to keep a notebook small.
MOST_ROWS, ENDS = 700, 300
MOST_PARAMETER_PICTURES, MOST_UNFOLDED_PARAMETERS = 150, 24
NOT_FINITE, DISTRIBUTION = "not finite", "distribution"

# Heading, kind, statistic (or one of the two names above).
Columns = tuple[tuple[str, str, str], ...]


def _numbers_of(kind: str) -> Columns:
    return (
        ("mean", kind, "mean"), ("std", kind, "std"), ("min", kind, "min"), ("max", kind, "max"),
        ("zeros", kind, "zero_fraction"), ("NaN/Inf", kind, NOT_FINITE), ("distribution", kind, DISTRIBUTION),
    )  # fmt: skip


_TABLES: tuple[tuple[str, str, Columns], ...] = (
    ("Modules, in execution order", "module", (*_numbers_of("activation"), ("grad norm", "gradient", "norm"))),
    ("Inputs of modules", "module", _numbers_of("input")),
    ("Operations", "operation", _numbers_of("functional")),
    (
        "Parameters",
        "parameter",
        (
            ("weight norm", "weight", "norm"), ("grad norm", "weight_gradient", "norm"),
            ("update / weight", "update", "ratio"), ("zeros", "weight", "zero_fraction"),
            ("NaN/Inf", "weight", NOT_FINITE), ("distribution", "weight", DISTRIBUTION),
        ),
    ),
)  # fmt: skip


def as_text(frame: Frame) -> str:
    """What was found, then the tables."""
    found = findings.as_text(frame.findings) + "\n\n" if frame.findings else ""
    notes = "\n".join(_notes(frame))
    return found + text_table(_plain(frame)) + (f"\n\n{notes}" if notes else "")


def as_html(frame: Frame) -> str:
    """The whole view, without the page around it."""
    view = _View(_plain(frame))
    sections = [view.section(*table) for table in (*_TABLES, *_others(view.frame))]
    notes = html.listed(_notes(frame))
    return _headline(frame) + findings.as_html(frame.findings) + "".join(sections) + notes


def _plain(frame: Frame) -> Frame:
    return frame.without_phase() if frame.is_evaluation else frame


def _others(frame: Frame) -> list[tuple[str, str, Columns]]:
    """Kinds this file does not know by name still get a table."""
    unknown = dict.fromkeys(site.kind for site in frame.sites if site.kind not in ALL_KINDS)
    return [(kind, "place", _numbers_of(kind)) for kind in unknown]


def _headline(frame: Frame) -> str:
    what = "One pass" if isinstance(frame, Peeked) else f"Step {frame.step}"
    places = [
        html.plural(n, word)
        for word, kinds in (("module", ("activation", "gradient")), ("parameter", ("weight", "weight_gradient")))
        if (n := len(names_of(_plain(frame), kinds)))
    ]
    evaluated = " in evaluation" if frame.is_evaluation else ""
    scalars = ", ".join(f"{tag} {number(value)}" for tag, value in frame.scalars.items() if not is_of_site(tag))
    told_too = f'<p class="soft">{html.text(html.shortened(scalars, 1000))}</p>' if scalars else ""
    return f"<p><b>{what}</b>{evaluated}: {', '.join([*places, findings.counted(frame.findings)])}.</p>{told_too}"


def _notes(frame: Frame) -> list[str]:
    """What a look at a single pass says besides its numbers."""
    if not isinstance(frame, Peeked):
        return []
    kept = [f"{name} ({shape(tuple(tensor.shape))})" for name, tensor in frame.kept.items()]
    return [*([f"kept: {html.shortened(', '.join(kept), 2000)}"] if kept else []), *frame.notes]


@dataclass(frozen=True)
class _View:
    """A frame, and each statistic of all its sites once."""

    frame: Frame

    @cached_property
    def _columns(self) -> dict[str, list[float]]:
        names = ("mean", "std", "min", "max", "norm", "zero_fraction", "ratio", "nan_count", "inf_count")
        return {name: self.frame.stat(name).tolist() for name in names}

    @cached_property
    def _kinds(self) -> set[str]:
        return {site.kind for site in self.frame.sites}

    def section(self, title: str, heading: str, columns: Columns) -> str:
        """One table; nothing where the frame has none of its kinds."""
        kinds = tuple(dict.fromkeys(kind for _, kind, _ in columns))
        names = names_of(self.frame, kinds)
        if not names:
            return ""
        marks = findings.marks(self.frame.findings, kinds)
        shown, left_out = _ends_and(names, marks)
        used = [column for column in columns if self._is_drawn(column, len(names), heading)]
        about = self._about(shown) if heading == "module" and columns[0][1] == "activation" else {}
        rows = [
            [_marked(name, marks), *about.get(name, ()), *(self._cell(name, *column[1:]) for column in used)]
            for name in shown
        ]
        header = [heading, *(("<type", "<output", "<dtype") if about else ()), *(title for title, *_ in used)]
        unfolded = heading != "parameter" or bool(marks) or len(names) <= MOST_UNFOLDED_PARAMETERS
        fine = ", no NaN or Inf in any" if heading == "parameter" and not self._is_wrong("weight") else ""
        return html.folded(f"{title} ({len(names):,}){fine}", html.table(header, rows) + left_out, unfolded=unfolded)

    def _is_drawn(self, column: tuple[str, str, str], rows: int, heading: str) -> bool:
        _, kind, what = column
        if what == DISTRIBUTION and (not self.frame.buckets.shape[1] or kind not in self._kinds):
            return False
        if heading == "parameter" and what == DISTRIBUTION:
            return kind in self._kinds and rows <= MOST_PARAMETER_PICTURES
        if heading == "parameter" and what == NOT_FINITE:
            return self._is_wrong(kind)
        return kind in self._kinds

    def _is_wrong(self, kind: str) -> bool:
        bad = self.frame.values[:, NANS] + self.frame.values[:, INFS] > 0
        return any(site.kind == kind and wrong for site, wrong in zip(self.frame.sites, bad, strict=True))

    def _about(self, names: Sequence[str]) -> Mapping[str, tuple[str, str, str]]:
        outputs = outputs_of(self.frame)
        if not outputs:
            return {}
        known = {name: (html.name(o.module), shape(o.shape), html.text(o.dtype)) for name, o in outputs.items()}
        return {name: known.get(name, ("-", "-", "-")) for name in names}

    def _cell(self, name: str, kind: str, what: str) -> str:
        i = self.frame._index.get((name, kind))
        if i is None:
            return "-"
        bad = int(self._columns["nan_count"][i] + self._columns["inf_count"][i])
        if what == NOT_FINITE:
            return _not_finite(int(self._columns["nan_count"][i]), int(self._columns["inf_count"][i]))
        if what == DISTRIBUTION:
            return histogram.drawn(self.frame.buckets[i], self._columns["min"][i], self._columns["max"][i])
        return number(self._columns[what][i], what, bad if kind.endswith("gradient") or what == "ratio" else 0)


def _marked(name: str, marks: Mapping[str, str]) -> str:
    return f"{html.name(name)} {marks[name]}" if name in marks else html.name(name)


def _not_finite(nans: int, infs: int) -> str:
    return ", ".join(f"{n:,} {word}" for n, word in ((nans, "NaN"), (infs, "Inf")) if n) or "0"


def _ends_and(names: list[str], marks: Mapping[str, str]) -> tuple[list[str], str]:
    """The rows of a table that is not too long, and a sentence on those left out."""
    if len(names) <= MOST_ROWS:
        return names, ""
    ends = {*names[:ENDS], *names[-ENDS:]}
    shown = [name for name in names if name in ends or name in marks][:MOST_ROWS]
    left = len(names) - len(shown)
    return shown, f"<p>{left:,} more between these are left out; <code>frame.to_pandas()</code> has every one.</p>"
