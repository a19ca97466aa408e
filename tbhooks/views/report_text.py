"""The text report on a run, or on two: sections of tables and sentences, laid out for a terminal or for a pipe.

Returns strings and prints nothing. If `rich` is installed, it lays out the same cells.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tbhooks.data.frame import EVALUATION, KINDS
from tbhooks.data.self_report import listed
from tbhooks.drawing.names import shorten_all
from tbhooks.drawing.text import number, printable, trend
from tbhooks.runs import Run, report_data
from tbhooks.runs.bit_comparison import BitComparison
from tbhooks.runs.compare import MOST_SHOWN, Comparison
from tbhooks.runs.report_data import Grid, own_scalars, run_grids
from tbhooks.views.notebook import findings
from tbhooks.views.notebook.history import logged_steps

# The heading of each table, and its columns: heading, kind, statistic.
Columns = tuple[tuple[str, str, str], ...]
_TABLES: tuple[tuple[str, Columns], ...] = (
    ("input", (("std", "input", "std"), ("zeros", "input", "zero_fraction"))),
    (
        "module",
        (("act std", "activation", "std"), ("zeros", "activation", "zero_fraction"), ("grad norm", "gradient", "norm")),
    ),
    ("operation", (("std", "functional", "std"), ("zeros", "functional", "zero_fraction"))),
    (
        "parameter",
        (
            ("norm", "weight", "norm"),
            ("grad norm", "weight_gradient", "norm"),
            ("update/weight", "update", "ratio"),
        ),
    ),
)
_IN_TABLES = {kind for _, columns in _TABLES for _, kind, _ in columns} | set(KINDS)
_NOT_CHECKED = "the run has no tbhooks data, so no rule has checked it"
# Longer tables show their ends and the rows with a finding.
MOST_ROWS, ENDS = 80, 30
LEAST_TREND, MOST_TREND = 4, 24
SHORTEST_NAME = 12
# Follows the name of a module or parameter with a finding.
_FLAG = " *"


@dataclass(frozen=True)
class Section:
    """A heading, a table (a column whose heading starts with ">" is aligned right), and sentences below it."""

    title: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    verbatim: bool = False


def run_report(run: Run, width: int, *, all_rows: bool = False) -> list[Section]:
    """Returns the sections of the report on one run, for a terminal of this width."""
    flagged = {finding.site.name for finding in run.findings if finding.site is not None}
    steps = logged_steps([frame.step for frame in run.training], len(run.evaluations))
    lines = findings.lines(run.findings)
    return [
        Section(printable(f"{run.directory}: {steps}"), notes=[printable(run.verdict.sentence)] if run.frames else []),
        *_scalars(run, width),
        *_tables(run_grids(run), flagged, width, all_rows),
        *([Section("sampled updates", notes=[note])] if (note := sampled_note(run)) else []),
        Section(f"findings ({len(lines)})", notes=lines or [findings.NONE_FOUND if run.frames else _NOT_CHECKED]),
        *_flights(run),
        *([Section("problems with the files", notes=[printable(p) for p in run.problems])] if run.problems else []),
        Section("more", notes=_hints(run), verbatim=True),
    ]


def _flights(run: Run) -> list[Section]:
    """What the flight recorder has dumped, and what was left out."""
    notes = [printable(str(flight)) for flight in run.flights]
    if run.flights_left_out:
        notes.append(printable(f"missing dumps ({len(run.flights_left_out)}): {listed(run.flights_left_out)}"))
    return [Section(f"flight recorder ({len(run.flights)})", notes=notes)] if notes else []


def sampled_note(run: Run) -> str:
    """A sentence about updates that are estimates; empty if there are none."""
    sampled = report_data.sampled(run)
    if not sampled:
        return ""
    least = min(sampled.values())
    return printable(
        f"updates of {len(sampled)} parameters are estimates from a sample of at least {least:.2g} of their elements, "
        f"because the device had too little memory for a copy of the weights: {listed(sorted(sampled), most=3)}"
    )


def _scalars(run: Run, width: int) -> list[Section]:
    rows = []
    room = max(min(width - 60, MOST_TREND), 0)
    for tag, series in own_scalars(run).items():
        values = series.values
        bars = trend(values, ~np.isfinite(values), room)
        rows.append([printable(tag), number(values[0]), number(values[-1]), str(series.steps[-1]), bars])
    return [Section("scalars", ("scalar", ">first", ">last", ">at step", "trend"), rows)] if rows else []


def _tables(grids: list[Grid], flagged: set[str], width: int, all_rows: bool) -> list[Section]:
    grid_of = {(grid.kind, grid.stat): grid for grid in grids}
    others = [grid for grid in grids if grid.kind.removeprefix(EVALUATION) not in _IN_TABLES]
    tables = [
        *_TABLES,
        *((grid.kind, ((grid.stat, grid.kind, grid.stat),)) for grid in others),
        *((f"{heading} in evaluation", tuple((title, EVALUATION + kind, stat) for title, kind, stat in columns))
          for heading, columns in _TABLES),
    ]  # fmt: skip
    sections = [_table(heading, columns, grid_of, flagged, width, all_rows) for heading, columns in tables]
    return [section for section in sections if section is not None]


def _table(
    heading: str, columns: Columns, grid_of: Mapping[tuple[str, str], Grid], flagged: set[str], width: int,
    all_rows: bool,
) -> Section | None:  # fmt: skip
    used = [(title, grid_of[kind, stat]) for title, kind, stat in columns if (kind, stat) in grid_of]
    names = list(dict.fromkeys(name for _, grid in used for name in grid.names))
    if not names:
        return None
    ends = {*names[:ENDS], *names[-ENDS:]}
    shown = [n for n in names if all_rows or len(names) <= MOST_ROWS or n in ends or n in flagged]
    marked = [printable(name) + (_FLAG if name in flagged else "") for name in shown]
    numbers = [[_last(grid, name) for name in shown] for _, grid in used]
    bars = _room_for_trends(width, marked, [[title, *cells] for (title, _), cells in zip(used, numbers, strict=True)])
    trends = [[_trend(grid, name, bars) for name in shown] for _, grid in used]
    pairs = [column for pair in zip(numbers, trends, strict=True) for column in pair]
    rows = [list(row) for row in zip(marked, *pairs, strict=True)]
    header = [heading, *(cell for title, _ in used for cell in (f">{title}", "trend"))]
    notes = ["* has a finding"] if flagged & set(shown) else []
    if len(shown) < len(names):
        notes.append(f"{len(names) - len(shown)} rows in the middle are left out; --all shows them")
    return Section(heading, header, rows, notes)


def _room_for_trends(width: int, names: Sequence[str], columns: Sequence[Sequence[str]]) -> int:
    taken = sum(max(map(len, cells)) for cells in (names, *columns)) + 4 * len(columns)
    return min(max((width - taken) // len(columns), LEAST_TREND), MOST_TREND)


def _last(grid: Grid, name: str) -> str:
    row = grid.row(name)
    if row is None or not grid.seen[row].any():
        return "-"
    last = int(np.flatnonzero(grid.seen[row])[-1])
    nonfinite = 0 if grid.stat == "zero_fraction" else int(grid.bad[row, last])  # the column beside it has the count
    return number(float(grid.values[row, last]), grid.stat, nonfinite)


def _trend(grid: Grid, name: str, bars: int) -> str:
    row = grid.row(name)
    return "" if row is None else trend(grid.values[row], grid.wrong[row], bars)


def _hints(run: Run) -> list[str]:
    where = printable(str(run.directory))
    return [
        f"heat maps of all layers:  tbhooks report {where} --html report.html",
        f"comparison with a run:    tbhooks report {where} OTHER_RUN",
        f"curves and histograms:    tensorboard --logdir {where}",
    ]


def comparison_report(comparison: Comparison) -> list[Section]:
    """Returns the sections on two runs: where they first differ, and what differs most."""
    first, second = map(printable, comparison.runs)
    sections = [Section(f"{first} (1) against {second} (2): {comparison.common_steps} steps in common")]
    if comparison.are_unrelated:
        sections.append(Section(
            f"these runs look unrelated: they have {comparison.common} values of tensors in common, and "
            f"{len(comparison.only_first) + len(comparison.only_second)} in only one of them"
        ))  # fmt: skip
    if not comparison.common_steps:
        return [*sections, Section("the runs have no logged step in common: nothing to compare")]
    sections += _bits(comparison.bits)
    if comparison.parted is None:
        sections.append(Section("no difference above 10% beyond the step-to-step noise"))
    else:
        names = [printable(name) for name in comparison.what_parted]
        more = [f"and {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else []
        sections.append(Section(f"first difference at step {comparison.parted}:", notes=[*names[:MOST_SHOWN], *more]))
        rows = [
            [printable(d.what), str(d.parted), str(d.at), number(d.first), number(d.second), _share(d.share)]
            for d in comparison.differences[:MOST_SHOWN]
        ]
        header = ("largest differences", ">since step", ">largest at", ">run 1", ">run 2", ">by")
        left = len(comparison.differences) - len(rows)
        more = [f"and {left} more"] if left else []
        sections.append(Section("differences", header, rows, more))
    sections += _only("1", comparison.only_first) + _only("2", comparison.only_second)
    return sections


def _bits(bits: BitComparison | None) -> list[Section]:
    """The first bit that differs, and what can be concluded from it."""
    if bits is None:
        return []
    notes = []
    if bits.step is None or bits.site is None:
        title = f"bits: all checksums are equal in {bits.steps} logged steps"
    else:
        title = f"bits: the first difference is at step {bits.step}, in {printable(str(bits.site))}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in bits.kinds.items())
        notes.append(f"tensors that differ in that step: {kinds}")
        if bits.last_equal is not None:
            notes.append(f"all are equal up to step {bits.last_equal}, the logged step before it")
    for name, (one, two) in list(bits.other_types.items())[:1]:
        more = f" and {len(bits.other_types) - 1} others" if len(bits.other_types) > 1 else ""
        notes.append(f"not compared, because the type is another: {printable(name)} ({one}, {two}){more}")
    for name, (one, two) in bits.environments.items():
        notes.append(f"{name}: {printable(one)} in run 1, {printable(two)} in run 2")
    if bits.environments:
        notes.append(
            "another version, device or number of threads may round differently: then a difference is no error"
        )
    if not bits.is_environment_known:
        notes.append("versions and devices are not known: the runs have no description of their environment")
    return [Section(title, notes=notes)]


def _share(share: float) -> str:
    return f"{share:.0%}" if np.isfinite(share) else "not finite"


def _only(which: str, names: Sequence[str]) -> list[Section]:
    if not names:
        return []
    listed = ", ".join(printable(name) for name in names[:5])
    return [Section(f"only in run {which}: {listed}" + (f" and {len(names) - 5} more" if len(names) > 5 else ""))]


# --- Layout -------------------------------------------------------------------------------------------


def plain(sections: Sequence[Section], width: int, *, whole_names: bool = False) -> str:
    """Returns the sections as text of this width; long names are shortened unless `whole_names` is set."""
    parts = []
    for section in sections:
        fitted = section if whole_names else _fit_names(section, width)
        lines = _aligned(fitted) if section.rows else [section.title]
        notes = [f"  {note}" if section.verbatim else _wrapped(note, width) for note in fitted.notes]
        parts.append("\n".join([*lines, *notes]))
    return "\n\n".join(parts) + "\n"


def _aligned(section: Section) -> list[str]:
    right = [title.startswith(">") for title in section.header]
    return [
        "  ".join(
            (cell.rjust(size) if is_right else cell.ljust(size))
            for cell, size, is_right in zip(line, _widths(section), right, strict=True)
        ).rstrip()
        for line in _lines(section)
    ]


def _lines(section: Section) -> list[Sequence[str]]:
    return [[title.lstrip(">") for title in section.header], *section.rows]


def _widths(section: Section) -> list[int]:
    return [max(len(line[i]) for line in _lines(section)) for i in range(len(section.header))]


def _wrapped(note: str, width: int) -> str:
    return textwrap.fill(
        note, max(width, 20), initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _fit_names(section: Section, width: int) -> Section:
    """Shortens the names of a table to this width, or to the least width at which they stay distinct."""
    if not section.rows:
        return section
    others = _widths(section)[1:]
    room = max(width - sum(others) - 2 * len(others), SHORTEST_NAME)
    flags = [_FLAG if row[0].endswith(_FLAG) else "" for row in section.rows]
    names, prefix = shorten_all([row[0].removesuffix(_FLAG) for row in section.rows], room - max(map(len, flags)))
    rows = [[name + flag, *row[1:]] for name, flag, row in zip(names, flags, section.rows, strict=True)]
    return replace(section, rows=rows, notes=[*section.notes, *([f"… stands for {prefix}"] if prefix else [])])


_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def styled(sections: Sequence[Section], width: int, *, colour: bool) -> str:
    """Returns the same text laid out by rich for a terminal. Raises ImportError if rich is not installed."""
    from rich.console import Console  # noqa: PLC0415  an extra
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    screen = io.StringIO()
    options = {"file": screen, "force_terminal": True, "no_color": not colour, "highlight": False}
    console = Console(width=width, **options)  # type: ignore[arg-type]
    for section in (_fit_names(section, width) for section in sections):
        if section.rows:
            table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
            for title in section.header:
                justify = "right" if title.startswith(">") else "left"
                table.add_column(title.lstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
            for row in section.rows:
                table.add_row(*map(Text, row))
            needed = sum(_widths(section)) + 2 * len(section.header)
            Console(width=max(needed, width), **options).print(table)  # type: ignore[arg-type]
        else:
            console.print(Text(section.title, style="bold"))
        for note in section.notes:
            text = f"  {note}" if section.verbatim else _wrapped(note, width)
            console.print(Text(text, style=_STYLES.get(note.partition(",")[0], "")), soft_wrap=True)
        console.print()
    return screen.getvalue()
