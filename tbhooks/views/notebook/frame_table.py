"""One frame as tables: its findings, then modules in execution order, then parameters.

The columns of each table are listed here; a column whose kind the frame does not have is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tbhooks.data.frame import ALL_KINDS, Frame
from tbhooks.data.grids import is_of_site
from tbhooks.data.peek_result import Peeked
from tbhooks.data.stats import INFS, NANS
from tbhooks.drawing.names import shorten
from tbhooks.drawing.text import names_of, number, outputs_of, shape
from tbhooks.drawing.text import table as text_table
from tbhooks.views.notebook import findings, histogram, html

# Longer tables show their ends and what has a finding; many parameters get no histograms, to keep a notebook small.
MOST_ROWS, ENDS = 700, 300
MOST_PARAMETER_HISTOGRAMS, MOST_OPEN_PARAMETERS = 150, 24
NOT_FINITE, DISTRIBUTION = "not finite", "distribution"

# Heading, kind, statistic (or one of the two names above).
Columns = tuple[tuple[str, str, str], ...]


def _all_columns(kind: str) -> Columns:
    return (
        ("mean", kind, "mean"), ("std", kind, "std"), ("min", kind, "min"), ("max", kind, "max"),
        ("zeros", kind, "zero_fraction"), ("NaN/Inf", kind, NOT_FINITE), ("distribution", kind, DISTRIBUTION),
    )  # fmt: skip


_TABLES: tuple[tuple[str, str, Columns], ...] = (
    ("Modules, in execution order", "module", (*_all_columns("activation"), ("grad norm", "gradient", "norm"))),
    ("Inputs of modules", "module", _all_columns("input")),
    ("Operations", "operation", _all_columns("functional")),
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
    """Findings, then the tables."""
    notes = "\n".join(_notes(frame))
    parts = [findings.as_text(frame.findings) if frame.findings else "", text_table(_as_training(frame)), notes]
    return "\n\n".join(filter(None, parts))


def as_html(frame: Frame) -> str:
    """Headline, findings, tables and notes, without the style around them."""
    view = _View(_as_training(frame))
    sections = [view.section(*table) for table in (*_TABLES, *_other_tables(view.frame))]
    notes = html.bullets(_notes(frame))
    return _headline(frame) + findings.as_html(frame.findings) + "".join(sections) + notes


def _as_training(frame: Frame) -> Frame:
    return frame.without_phase() if frame.is_evaluation else frame


def _other_tables(frame: Frame) -> list[tuple[str, str, Columns]]:
    """Kinds without a table above get one of their own."""
    unknown = dict.fromkeys(site.kind for site in frame.sites if site.kind not in ALL_KINDS)
    return [(kind, "tensor", _all_columns(kind)) for kind in unknown]


def _headline(frame: Frame) -> str:
    what = "One pass" if isinstance(frame, Peeked) else f"Step {frame.step}"
    sizes = [
        html.plural(n, word)
        for word, kinds in (("module", ("activation", "gradient")), ("parameter", ("weight", "weight_gradient")))
        if (n := len(names_of(_as_training(frame), kinds)))
    ]
    phase = " in evaluation" if frame.is_evaluation else ""
    scalars = ", ".join(f"{tag} {number(value)}" for tag, value in frame.scalars.items() if not is_of_site(tag))
    headline = f"<p><b>{what}</b>{phase}: {', '.join([*sizes, findings.counted(frame.findings)])}.</p>"
    return headline + html.paragraph(shorten(scalars, 1000))


def _notes(frame: Frame) -> list[str]:
    """What `peek` has besides the numbers: kept tensors, and its notes."""
    if not isinstance(frame, Peeked):
        return []
    kept = [f"{name} ({shape(tuple(tensor.shape))})" for name, tensor in frame.kept.items()]
    return [*([f"kept: {shorten(', '.join(kept), 2000)}"] if kept else []), *frame.notes]


@dataclass(frozen=True)
class _View:
    """A frame, with each statistic computed once for all its sites."""

    frame: Frame

    @cached_property
    def _columns(self) -> dict[str, list[float]]:
        names = ("mean", "std", "min", "max", "norm", "zero_fraction", "ratio", "nan_count", "inf_count")
        return {name: self.frame.stat(name).tolist() for name in names}

    @cached_property
    def _rows(self) -> dict[tuple[str, str], int]:
        return {(site.name, site.kind): i for i, site in enumerate(self.frame.sites)}

    @cached_property
    def _kinds(self) -> set[str]:
        return {site.kind for site in self.frame.sites}

    def section(self, title: str, heading: str, columns: Columns) -> str:
        """One table; empty if the frame has none of its kinds."""
        kinds = tuple(dict.fromkeys(kind for _, kind, _ in columns))
        names = names_of(self.frame, kinds)
        if not names:
            return ""
        labels = findings.row_labels(self.frame.findings, kinds)
        shown, left_out = _ends_and_labelled(names, labels)
        used = [column for column in columns if self._is_shown(column, len(names), heading)]
        outputs = self._outputs(shown) if heading == "module" and columns[0][1] == "activation" else {}
        rows = [
            [
                " ".join(filter(None, (cell, labels.get(name)))),
                *outputs.get(name, ()),
                *(self._cell(name, *column[1:]) for column in used),
            ]
            for name, cell in zip(shown, html.escape_names(shown), strict=True)
        ]
        header = [heading, *(("<type", "<output", "<dtype") if outputs else ()), *(title for title, *_ in used)]
        is_open = heading != "parameter" or bool(labels) or len(names) <= MOST_OPEN_PARAMETERS
        finite = ", no NaN or Inf in any" if heading == "parameter" and not self._has_nonfinite("weight") else ""
        return html.details(f"{title} ({len(names):,}){finite}", html.table(header, rows) + left_out, is_open=is_open)

    def _is_shown(self, column: tuple[str, str, str], rows: int, heading: str) -> bool:
        _, kind, what = column
        if kind not in self._kinds or (what == DISTRIBUTION and not self.frame.buckets.shape[1]):
            return False
        if heading == "parameter" and what == DISTRIBUTION:
            return rows <= MOST_PARAMETER_HISTOGRAMS
        return heading != "parameter" or what != NOT_FINITE or self._has_nonfinite(kind)

    def _has_nonfinite(self, kind: str) -> bool:
        nonfinite = self.frame.values[:, NANS] + self.frame.values[:, INFS] > 0
        return any(site.kind == kind and bad for site, bad in zip(self.frame.sites, nonfinite, strict=True))

    def _outputs(self, names: Sequence[str]) -> Mapping[str, tuple[str, str, str]]:
        outputs = outputs_of(self.frame)
        if not outputs:
            return {}
        known = {n: (html.escape_name(o.module), shape(o.shape), html.escape(o.dtype)) for n, o in outputs.items()}
        return {name: known.get(name, ("-", "-", "-")) for name in names}

    def _cell(self, name: str, kind: str, what: str) -> str:
        i = self._rows.get((name, kind))
        if i is None:
            return "-"
        nans, infs = int(self._columns["nan_count"][i]), int(self._columns["inf_count"][i])
        if what == NOT_FINITE:
            return ", ".join(f"{n:,} {word}" for n, word in ((nans, "NaN"), (infs, "Inf")) if n) or "0"
        if what == DISTRIBUTION:
            return histogram.draw(self.frame.buckets[i], self._columns["min"][i], self._columns["max"][i])
        has_no_column = kind.endswith("gradient") or what == "ratio"
        return number(self._columns[what][i], what, nans + infs if has_no_column else 0)


def _ends_and_labelled(names: list[str], labels: Mapping[str, str]) -> tuple[list[str], str]:
    """The names to show of a table that may be too long, and a sentence on how many were left out."""
    if len(names) <= MOST_ROWS:
        return names, ""
    ends = {*names[:ENDS], *names[-ENDS:]}
    shown = [name for name in names if name in ends or name in labels][:MOST_ROWS]
    left = len(names) - len(shown)
    return shown, f"<p>{left:,} rows in the middle are left out; <code>frame.to_pandas()</code> has all of them.</p>"
