"""A run, or two, as sections of a text report: what they say is decided here, once for terminals and pipes.

Strings out; nothing is printed. `rich` only lays the same cells out, where it is installed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tbhooks.data.frame import EVALUATION, KINDS
from tbhooks.drawing.text import number, printable, trend
from tbhooks.runs import Run
from tbhooks.runs.compare import MOST_SHOWN, Comparison
from tbhooks.runs.report_data import Grid, by_severity, own_scalars, run_grids

# Heading of the table, and its columns: heading, kind, statistic.
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
# Longer tables show their ends and what has a finding.
MOST_ROWS, ENDS = 80, 30
LEAST_TREND, MOST_TREND = 4, 24
SHORTEST_NAME = 12
# Behind the name of what has a finding.
_MARK = " *"


@dataclass(frozen=True)
class Section:
    """A heading, a table (columns whose heading starts with ">" are set right), and sentences below it."""

    title: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    verbatim: bool = False


def of_run(run: Run, width: int, *, everything: bool = False) -> list[Section]:
    """The whole report, worst news in the middle where the eye ends up: after the tables, before the hints."""
    found = run_grids(run)
    return [
        Section(_headline(run)),
        *_scalars(run, width),
        *_tables(found, _sick(run), width, everything),
        _findings(run),
        *([Section("problems with the files", notes=[printable(p) for p in run.problems])] if run.problems else []),
        Section("to look further", notes=_hints(run), verbatim=True),
    ]


def _headline(run: Run) -> str:
    steps = [frame.step for frame in run.training]
    span = f"{len(steps)} logged steps, {steps[0]} to {steps[-1]}" if steps else "no frames of training"
    evaluations = f", {len(run.evaluations)} evaluations" if run.evaluations else ""
    return printable(f"{run.directory}: {span}{evaluations}")


def _sick(run: Run) -> set[str]:
    return {finding.site.name for finding in run.findings if finding.site is not None}


def _scalars(run: Run, width: int) -> list[Section]:
    rows = []
    room = max(min(width - 60, MOST_TREND), 0)
    for tag, series in own_scalars(run).items():
        values = series.values
        shown = trend(values, ~np.isfinite(values), room)
        rows.append([printable(tag), number(values[0]), number(values[-1]), str(series.steps[-1]), shown])
    return [Section("scalars", ("scalar", ">first", ">last", ">at step", "trend"), rows)] if rows else []


def _tables(found: list[Grid], sick: set[str], width: int, everything: bool) -> list[Section]:
    by_what = {(grid.kind, grid.stat): grid for grid in found}
    tables = [*_TABLES, *_others(found)]
    evaluations = [(f"{heading} in evaluation", _evaluated(columns)) for heading, columns in tables[: len(_TABLES)]]
    sections = [_table(heading, columns, by_what, sick, width, everything) for heading, columns in tables + evaluations]
    return [section for section in sections if section is not None]


def _evaluated(columns: Columns) -> Columns:
    return tuple((title, EVALUATION + kind, stat) for title, kind, stat in columns)


def _others(found: list[Grid]) -> list[tuple[str, Columns]]:
    """Kinds this file does not know by name still get a table."""
    unknown = [grid for grid in found if grid.kind.removeprefix(EVALUATION) not in _IN_TABLES]
    return [(grid.kind, ((grid.stat, grid.kind, grid.stat),)) for grid in unknown]


def _table(
    heading: str, columns: Columns, found: Mapping[tuple[str, str], Grid], sick: set[str], width: int, everything: bool
) -> Section | None:
    used = [(title, found[kind, stat]) for title, kind, stat in columns if (kind, stat) in found]
    names = list(dict.fromkeys(name for _, grid in used for name in grid.names))
    if not names:
        return None
    shown = names if everything or len(names) <= MOST_ROWS else _ends_and(names, sick)
    marked = [printable(name) + (_MARK if name in sick else "") for name in shown]
    numbers = [[_last(grid, name) for name in shown] for _, grid in used]
    bars = _room_for_trends(width, marked, [[title, *cells] for (title, _), cells in zip(used, numbers, strict=True)])
    trends = [[_trend(grid, name, bars) for name in shown] for _, grid in used]
    pairs = [column for pair in zip(numbers, trends, strict=True) for column in pair]
    rows = [list(row) for row in zip(marked, *pairs, strict=True)]
    header = [heading, *(cell for title, _ in used for cell in (f">{title}", "trend"))]
    notes = ["* has a finding"] if sick & set(shown) else []
    if len(shown) < len(names):
        notes.append(f"{len(names) - len(shown)} more between these; --all shows every one")
    return Section(heading, header, rows, notes)


def _ends_and(names: list[str], sick: set[str]) -> list[str]:
    ends = {*names[:ENDS], *names[-ENDS:]}
    return [name for name in names if name in ends or name in sick]


def _room_for_trends(width: int, names: Sequence[str], columns: Sequence[Sequence[str]]) -> int:
    taken = sum(max(map(len, cells)) for cells in (names, *columns)) + 4 * len(columns)
    return min(max((width - taken) // len(columns), LEAST_TREND), MOST_TREND)


def _last(grid: Grid, name: str) -> str:
    row = grid.row(name)
    if row is None or not grid.seen[row].any():
        return "-"
    last = int(np.flatnonzero(grid.seen[row])[-1])
    told_beside = grid.stat == "zero_fraction"
    return number(float(grid.values[row, last]), grid.stat, 0 if told_beside else int(grid.bad[row, last]))


def _trend(grid: Grid, name: str, bars: int) -> str:
    row = grid.row(name)
    return "" if row is None else trend(grid.values[row], grid.wrong[row], bars)


def _findings(run: Run) -> Section:
    worst = by_severity(run)
    notes = [printable(f"{f.severity}, step {f.step}, {f.rule}: {f.message}") for f in worst]
    return Section(f"findings ({len(worst)})", notes=notes or ["nothing wrong was found"])


def _hints(run: Run) -> list[str]:
    where = printable(str(run.directory))
    return [
        f"heat maps of every layer:  tbhooks report {where} --html report.html",
        f"against another run:       tbhooks report {where} OTHER_RUN",
        f"curves and histograms:     tensorboard --logdir {where}",
    ]


def of_comparison(comparison: Comparison) -> list[Section]:
    """Where two runs part, and what differs most."""
    first, second = map(printable, comparison.runs)
    sections = [Section(f"{first} (1) against {second} (2): {comparison.common_steps} steps in common")]
    if not comparison.common_steps:
        return [*sections, Section("no step was logged in both runs, so there is nothing to compare")]
    if comparison.parted is None:
        sections.append(Section("they do not part: nothing differs by more than 10 % beyond its step-to-step noise"))
    else:
        what = [printable(name) for name in comparison.what_parted]
        more = [f"and {len(what) - MOST_SHOWN} more"] if len(what) > MOST_SHOWN else []
        sections.append(Section(f"they part at step {comparison.parted}, in", notes=[*what[:MOST_SHOWN], *more]))
        rows = [
            [printable(d.what), str(d.parted), str(d.at), number(d.first), number(d.second), _share(d.share)]
            for d in comparison.differences[:MOST_SHOWN]
        ]
        header = ("what differs most", ">since step", ">most at", ">run 1", ">run 2", ">by")
        left = len(comparison.differences) - len(rows)
        more = [f"and {left} more"] if left else []
        sections.append(Section("differences", header, rows, more))
    sections += _only("1", comparison.only_first) + _only("2", comparison.only_second)
    return sections


def _share(share: float) -> str:
    return f"{share:.0%}" if np.isfinite(share) else "not finite"


def _only(which: str, names: Sequence[str]) -> list[Section]:
    if not names:
        return []
    listed = ", ".join(printable(name) for name in names[:5])
    return [Section(f"only in run {which}: {listed}" + (f" and {len(names) - 5} more" if len(names) > 5 else ""))]


# --- Laid out -----------------------------------------------------------------------------------------


def plain(sections: Sequence[Section], width: int, *, whole_names: bool = False) -> str:
    """Text for terminals, in which names are cut where they do not fit, and for pipes and files, in which none is."""
    parts = []
    for section in sections:
        fitted = section if whole_names else _fitted(section, width)
        lines = _aligned(fitted) if section.rows else [section.title]
        notes = [f"  {note}" if section.verbatim else _wrapped(note, width) for note in fitted.notes]
        parts.append("\n".join([*lines, *notes]))
    return "\n\n".join(parts) + "\n"


def _aligned(section: Section) -> list[str]:
    right = [title.startswith(">") for title in section.header]
    return [
        "  ".join(
            (cell.rjust(size) if set_right else cell.ljust(size))
            for cell, size, set_right in zip(line, _widths(section), right, strict=True)
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


# --- Names that are too long --------------------------------------------------------------------------


def _fitted(section: Section, width: int) -> Section:
    """The names of a table cut so that it is no wider than this, or than it has to be to tell them apart."""
    if not section.rows:
        return section
    others = _widths(section)[1:]
    room = max(width - sum(others) - 2 * len(others), SHORTEST_NAME)
    marks = [_MARK if row[0].endswith(_MARK) else "" for row in section.rows]
    names, prefix = shortened([row[0].removesuffix(_MARK) for row in section.rows], room - max(map(len, marks)))
    rows = [[name + mark, *row[1:]] for name, mark, row in zip(names, marks, section.rows, strict=True)]
    return replace(section, rows=rows, notes=[*section.notes, *([f"… stands for {prefix}"] if prefix else [])])


def shortened(names: Sequence[str], width: int) -> tuple[list[str], str]:
    """Names of at most this width, or of the least at which they differ; and the prefix that "…" stands for, if any.

    First what the long ones have in common at their beginning goes. If that is not enough, the middle goes, as names
    differ at both ends.
    """
    long = [name for name in names if len(name) > width]
    prefix = _common_prefix(long) if len(set(long)) > 1 else ""
    shorter = [f"…{name[len(prefix) :]}" if prefix and name.startswith(prefix) else name for name in names]
    longest = max(map(len, shorter), default=0)
    for size in range(max(width, 1), longest):
        cut = [_cut(name, size) for name in shorter]
        if len(set(cut)) == len(set(names)):
            return cut, prefix
    return shorter, prefix


def _common_prefix(names: Sequence[str]) -> str:
    """What all begin with, up to a dot or a slash."""
    first, last = min(names), max(names)  # what these have in common, all have
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: max(first.rfind(".", 0, common), first.rfind("/", 0, common)) + 1]


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def styled(sections: Sequence[Section], width: int, *, colour: bool) -> str:
    """The same for a terminal, laid out by rich; raises ImportError where that is not installed."""
    from rich.console import Console  # noqa: PLC0415  an extra
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    screen = io.StringIO()
    how = {"file": screen, "force_terminal": True, "no_color": not colour, "highlight": False}
    console = Console(width=width, **how)  # type: ignore[arg-type]
    for section in (_fitted(section, width) for section in sections):
        if section.rows:
            table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
            for title in section.header:
                justify = "right" if title.startswith(">") else "left"
                table.add_column(title.lstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
            for row in section.rows:
                table.add_row(*map(Text, row))
            needed = sum(_widths(section)) + 2 * len(section.header)
            Console(width=max(needed, width), **how).print(table)  # type: ignore[arg-type]
        else:
            console.print(Text(section.title, style="bold"))
        for note in section.notes:
            console.print(Text(f"  {note}", style=_STYLES.get(note.partition(",")[0], "")))
        console.print()
    return screen.getvalue()
