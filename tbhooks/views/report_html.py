"""A run as one page: no script, no network, every name escaped; opens from a disk, a mail or a CI artifact.

What matters is in words and numbers, too, so the page still tells it without styles or colours.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

import numpy as np

from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.stats import LOWER, MIDDLE, UPPER, Counts, Floats
from tbhooks.drawing.heatmap import Scale, legend, picture, row_height, svg
from tbhooks.drawing.text import number, printable, trend
from tbhooks.runs import Run
from tbhooks.runs.report_data import Grid, by_severity, own_scalars, run_grids

MOST_COLUMNS = 200
MOST_HISTOGRAMS, MOST_HISTOGRAM_STEPS = 150, 60
HISTOGRAM_ROW = 5
# On its logarithmic axis a histogram shows twelve octaves; what is closer to zero than that is one row.
HALF_OCTAVES_SHOWN = 24
_ANCHOR = re.compile(r"[^A-Za-z0-9_.]+")
_WORDS = {"error": "error", "warning": "warning", "info": "note"}
_HISTOGRAM_KINDS = ("activation", "gradient", "weight", "weight_gradient")

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--paper:#fff;--line:#d9dee3;--card:#f6f8fa;
--error:#b3151f;--warning:#8a5a00;--info:#0b5cad}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4ae;--paper:#14171a;--line:#323940;--card:#1d2125;
--error:#ff8a8f;--warning:#f2c14e;--info:#7cbcff}}
body{margin:0 auto;max-width:60rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 .25rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2.2rem 0 .5rem;
border-bottom:1px solid var(--line);padding-bottom:.2rem}h3{font-size:1rem;margin:1.4rem 0 .2rem}
p{margin:.3rem 0}.soft,.legend,nav{color:var(--soft)}nav a{margin-right:.9rem}a{color:var(--info)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem}
th,td{padding:.15rem .7rem .15rem 0;text-align:right;white-space:nowrap}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}td.trend,th.trend{text-align:left;letter-spacing:-.5px}
tbody tr:hover{background:var(--card)}.scroll{overflow-x:auto}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
svg image{image-rendering:pixelated}svg rect{fill:transparent}svg rect:hover{fill:var(--ink);fill-opacity:.12}
.ramp{width:9rem;height:.8rem;vertical-align:-1px;image-rendering:pixelated}
.swatch{display:inline-block;width:.8rem;height:.8rem;margin-left:1rem;vertical-align:-1px}
.finding{border-left:4px solid var(--line);background:var(--card);padding:.5rem .8rem;margin:.5rem 0}
.finding.error{border-color:var(--error)}.finding.warning{border-color:var(--warning)}
.finding.info{border-color:var(--info)}.error>b{color:var(--error)}.warning>b{color:var(--warning)}
.info>b{color:var(--info)}.finding p,li{overflow-wrap:anywhere}details{margin:.4rem 0}
summary{cursor:pointer;overflow-wrap:anywhere}
"""


def page(run: Run) -> str:
    """The whole document."""
    found = run_grids(run)
    title = f"tbhooks: {run.directory.name or run.directory}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(str(run.directory))}</h1>",
        _summary(run),
        _findings(run),
        _problems(run),
        _scalars(run),
        _heat_maps(found),
        _histograms(run),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    return html.escape(printable(text))


def _summary(run: Run) -> str:
    steps = [frame.step for frame in run.training]
    span = f"{len(steps)} logged steps, {steps[0]} to {steps[-1]}" if steps else "No frames of training"
    sites = len({site for sites in {id(f.sites): f.sites for f in run.frames}.values() for site in sites})
    told = ", ".join(
        _plural(n, word)
        for severity, word in _WORDS.items()
        if (n := sum(f.severity == severity for f in run.findings))
    )
    links = [("findings", "Findings"), ("scalars", "Scalars"), ("heat-maps", "Heat maps"), ("histograms", "Histograms")]
    nav = " ".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in links)
    evaluated = f", {_plural(len(run.evaluations), 'evaluation')}" if run.evaluations else ""
    found = told or "nothing wrong was found"
    return f"<p>{span}{evaluated}; {_plural(sites, 'place')} watched; {found}.</p><nav>{nav}</nav>"


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


# --- Findings -----------------------------------------------------------------------------------------


def _findings(run: Run) -> str:
    told = [_finding(finding, i) for i, finding in enumerate(by_severity(run), start=1)]
    return '<h2 id="findings">Findings</h2>' + ("".join(told) or "<p>Nothing wrong was found.</p>")


def _finding(finding: Finding, i: int) -> str:
    where = "" if finding.site is None else f", {_text(finding.site.kind)} of {_text(finding.site.name)}"
    evidence = ", ".join(f"{key} {value}" for key, value in finding.evidence.items())
    numbers = f'<p class="soft">{_text(evidence)}</p>' if evidence else ""
    return (
        f'<div class="finding {finding.severity}" id="finding-{i}"><b>{finding.severity}</b> '
        f'<a href="#finding-{i}">{_text(finding.rule)}</a> at step {finding.step}{where}'
        f"<p>{_text(finding.message)}</p>{numbers}</div>"
    )


def _problems(run: Run) -> str:
    items = "".join(f"<li>{_text(problem)}</li>" for problem in run.problems)
    return f'<h2 id="problems">Problems with the files</h2><ul>{items}</ul>' if items else ""


# --- Scalars ------------------------------------------------------------------------------------------


def _scalars(run: Run) -> str:
    rows = []
    for tag, series in own_scalars(run).items():
        values = series.values
        bars = _text(trend(values, ~np.isfinite(values), 40))
        cells = [number(values[0]), number(values[-1]), str(series.steps[-1])]
        rows.append([_text(tag), *cells, bars])
    if not rows:
        return '<h2 id="scalars">Scalars</h2><p>None were logged.</p>'
    return '<h2 id="scalars">Scalars</h2>' + _table(("scalar", "first", "last", "at step", "trend"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; the last column is a picture of bars."""
    last = len(header) - 1
    css = [' class="trend"' if i == last else "" for i in range(len(header))]
    head = "".join(f"<th{css[i]}>{title}</th>" for i, title in enumerate(header))
    body = "".join("<tr>" + "".join(f"<td{css[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- Heat maps ----------------------------------------------------------------------------------------


def _heat_maps(found: Sequence[Grid]) -> str:
    title = '<h2 id="heat-maps">Heat maps</h2><p class="soft">A row a layer in execution order, a column a step.</p>'
    return title + ("".join(map(_heat_map, found)) or "<p>There are no frames.</p>")


def _heat_map(grid: Grid) -> str:
    thin = grid.thinned(MOST_COLUMNS)
    scale = Scale.of(np.where(thin.wrong, np.nan, thin.values))
    names = [printable(name) for name in grid.names]
    told = [_row_in_words(grid, i) for i in range(len(names))]
    hints = [f"{name}: {words}" for name, words in zip(names, told, strict=True)]
    note = ""
    if len(thin.steps) < len(grid.steps):
        note = (
            f'<p class="soft">{len(grid.steps)} steps in {len(thin.steps)} columns, '
            "each the value furthest from zero of its steps.</p>"
        )
    image = svg(printable(f"{grid.title}, {scale.words}"), picture(thin.values, thin.wrong, scale), names, hints,
                thin.steps.tolist(), row_height(len(names)))  # fmt: skip
    return (
        f'<h3 id="{_ANCHOR.sub("-", f"{grid.kind}-{grid.stat}")}">{_text(grid.title)}</h3>'
        f"{legend(scale, wrong=bool(grid.wrong.any()))}{_alarm(grid, names)}{note}{image}{_numbers(grid, names)}"
    )


def _alarm(grid: Grid, names: Sequence[str]) -> str:
    """What the colour of its own says, in words."""
    columns = np.flatnonzero(grid.wrong.any(axis=0))
    if not len(columns):
        return ""
    rows = int(grid.wrong.any(axis=1).sum())
    first = names[int(grid.wrong[:, columns[0]].argmax())]
    since = f"the first is {html.escape(first)} at step {grid.steps[columns[0]]}"
    return f"<p>NaN or infinite values in {rows} of {len(names)} rows; {since}.</p>"


def _row_in_words(grid: Grid, i: int) -> str:
    known = grid.values[i][np.isfinite(grid.values[i])]
    if not len(known):
        return "nothing finite"
    bad = int((grid.wrong[i]).sum())
    last = f"last {number(known[-1], grid.stat)}, {number(known.min(), grid.stat)} to {number(known.max(), grid.stat)}"
    return last + (f", not finite at {bad} steps" if bad else "")


def _numbers(grid: Grid, names: Sequence[str]) -> str:
    """The map's first, last and extreme values, for readers who do not see it."""
    rows = []
    for i, name in enumerate(names):
        known = grid.values[i][np.isfinite(grid.values[i])]
        cells = [number(float(v), grid.stat) for v in _ends(known)] if len(known) else ["-"] * 4
        rows.append([html.escape(name), *cells, html.escape(trend(grid.values[i], grid.wrong[i], 24))])
    table = _table((_text(grid.kind), "first", "last", "least", "most", "trend"), rows)
    return f"<details><summary>{_text(grid.title)} in numbers</summary>{table}</details>"


def _ends(known: Floats) -> tuple[float, float, float, float]:
    return known[0], known[-1], known.min(), known.max()


# --- Histograms ---------------------------------------------------------------------------------------


def _histograms(run: Run) -> str:
    """Distributions over the steps: those with findings open, the others to be unfolded."""
    frames = [frame for frame in run.training if _has_histograms(frame)]
    title = '<h2 id="histograms">Histograms</h2>'
    if not frames:
        return title + "<p>The run has none.</p>"
    places = np.unique(np.linspace(0, len(frames) - 1, MOST_HISTOGRAM_STEPS).round().astype(int))
    total, frames = len(frames), [frames[i] for i in places]
    sick = [f.site for f in by_severity(run) if f.site is not None]
    chosen, left_out = _chosen_sites(frames, sick)
    counts = _counts_over_steps(frames, chosen)
    drawn = [_histogram(site, counts[site], frames, site in sick) for site in chosen if site in counts]
    notes = f'<p class="soft">{len(frames)} of {total} steps with histograms; a row is half an octave of values, the '
    notes += "largest on top, its colour the share of the elements; blank where there are none."
    notes += f" {left_out} more sites are left out to keep the page small." if left_out else ""
    return title + notes + "</p>" + "".join(drawn)


def _has_histograms(frame: Frame) -> bool:
    packed = getattr(frame, "has_histograms", None)
    return bool(frame.buckets.shape[1]) if packed is None else bool(packed)


def _chosen_sites(frames: Sequence[Frame], sick: Sequence[Site]) -> tuple[list[Site], int]:
    everywhere = dict.fromkeys(site for sites in {id(f.sites): f.sites for f in frames}.values() for site in sites)
    first = [site for site in dict.fromkeys(sick) if site in everywhere]
    rest = [site for kind in _HISTOGRAM_KINDS for site in everywhere if site.kind == kind and site not in set(first)]
    room = max(MOST_HISTOGRAMS - len(first), 0)
    step = max(1, -(-len(rest) // room)) if room else 1
    chosen = first[:MOST_HISTOGRAMS] + rest[::step][:room]
    return chosen, len(first) + len(rest) - len(chosen)


def _counts_over_steps(frames: Sequence[Frame], sites: Sequence[Site]) -> dict[Site, Counts]:
    """Bucket counts [steps, buckets] of each site; a frame's are unpacked once."""
    found = {site: np.zeros((len(frames), len(LOWER)), dtype=np.int64) for site in sites}
    for i, frame in enumerate(frames):
        place = {site: row for row, site in enumerate(frame.sites)}
        buckets = frame.buckets
        for site, counts in found.items():
            if site in place and buckets.shape[1]:
                counts[i] = buckets[place[site]]
    return {site: counts for site, counts in found.items() if counts.any()}


def _histogram(site: Site, counts: Counts, frames: Sequence[Frame], unfolded: bool) -> str:
    counts, buckets = _around_zero_in_one(counts)
    shares = counts / np.maximum(counts.sum(axis=1), 1)[:, None]
    shown = np.where(shares > 0, shares, np.nan).T[::-1]
    scale = Scale.of(shown)
    names = [_bucket(bucket) for bucket in buckets[::-1]]
    low, high = buckets[0], buckets[-1]
    nothing = np.zeros(shown.shape, dtype=bool)
    label = f"{site}: distribution over steps, {_bucket(low)} to {_bucket(high)}"
    image = svg(printable(label), picture(shown, nothing, scale), names, (), [f.step for f in frames], HISTOGRAM_ROW)
    return (
        f"<details{' open' if unfolded else ''}><summary>{_text(str(site))}: {_bucket(low)} to {_bucket(high)}"
        f"</summary>{legend(scale, wrong=False)}{image}</details>"
    )


def _around_zero_in_one(counts: Counts) -> tuple[Counts, list[int]]:
    """The columns that are used, with those around zero added up: the buckets reach down to 2**-64."""
    used = np.flatnonzero(counts.any(axis=0))
    low, high = int(used[0]), int(used[-1])
    near = max(max(MIDDLE - low, high - MIDDLE) - HALF_OCTAVES_SHOWN, 0)
    left, right = MIDDLE - near, MIDDLE + near
    middle = counts[:, left : right + 1].sum(axis=1)
    kept = [b for b in range(min(low, MIDDLE), max(high, MIDDLE) + 1) if b < left or b > right or b == MIDDLE]
    folded = counts[:, kept].copy()
    folded[:, kept.index(MIDDLE)] = middle
    inside = [i for i in range(len(kept)) if folded[:, i:].any() and folded[:, : i + 1].any()]
    return folded[:, inside], [kept[i] for i in inside]


def _bucket(bucket: int) -> str:
    """The end of a bucket that is nearer to zero."""
    if bucket == MIDDLE:
        return "0"
    end = LOWER[bucket] if bucket > MIDDLE else UPPER[bucket]
    return f"{end:.2g}"
