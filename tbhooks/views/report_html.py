"""A run as one HTML page without scripts or network access, which opens from a disk, a mail or a CI artifact.

The tables and maps are those of the notebook views. Everything is in words and numbers, too, not in colours alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

from tbhooks.data.findings import Issue
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.stats import LOWER, MIDDLE, Counts
from tbhooks.drawing.curves import curve
from tbhooks.drawing.heatmap import Scale, legend, picture, svg
from tbhooks.drawing.text import bucket_label, printable
from tbhooks.runs import Run
from tbhooks.runs.report_data import Grid, by_severity, own_scalars, run_grids
from tbhooks.runs.verdict import Link
from tbhooks.views.notebook import findings, html
from tbhooks.views.notebook.history import OPEN_MAPS, heat_map, logged_steps, nonfinite_note, scalar_table
from tbhooks.views.report_text import sampled_note

MOST_COLUMNS, SCALAR_TREND = 200, 40
MOST_HISTOGRAMS, MOST_HISTOGRAM_STEPS = 150, 60
HISTOGRAM_ROW = 5
MOST_CURVES = 6
MOST_ROWS = 60
_DRAWN = ("loss", "train.lr", "train.grad_norm")
# The logarithmic axis of a histogram shows twelve octaves; values closer to zero than that share one row.
HALF_OCTAVES_SHOWN = 24
_ANCHOR = re.compile(r"[^A-Za-z0-9_.]+")
_HISTOGRAM_KINDS = ("activation", "gradient", "weight", "weight_gradient")

STYLE = """
body.tbhooks.tbhooks.tbhooks{margin:0 auto;max-width:60rem;padding:1.5rem 1rem 4rem;font-size:15px}
html{background:#fff}@media (prefers-color-scheme:dark){html{background:#111}}
h1{font-size:1.5rem;margin:0 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .5rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
h3{font-size:1rem;margin:1.4rem 0 .2rem}
.curves{display:flex;flex-wrap:wrap;gap:.8rem}.curve{margin:0;width:270px;font-size:12px}.verdict{font-size:1.1rem}
nav{color:var(--soft)}nav a{margin-right:.9rem}a{color:var(--info)}
.tbhooks.tbhooks.tbhooks svg rect:hover{fill:var(--ink);fill-opacity:.12}
"""


def page(run: Run) -> str:
    """Returns the whole document."""
    title = html.escape(f"tbhooks: {run.directory.name or run.directory}")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{html.STYLE}{STYLE}</style></head>",
        f'<body class="tbhooks"><h1>{html.escape(str(run.directory))}</h1>',
        _verdict(run),
        _summary(run),
        _sampled(run),
        _curves(run),
        _findings(run),
        _heat_maps(run_grids(run)),
        _flights(run),
        _problems(run),
        _scalars(run),
        _histograms(run),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _summary(run: Run) -> str:
    steps = logged_steps([frame.step for frame in run.training], len(run.evaluations))
    sites = len({site for sites in {id(f.sites): f.sites for f in run.frames}.values() for site in sites})
    links = [("findings", "Findings"), ("heat-maps", "Heat maps"), ("scalars", "Scalars"), ("histograms", "Histograms")]
    nav = " ".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in links)
    found = findings.counted(run.findings)
    return f"<p>{steps}; {html.plural(sites, 'tensor')} watched; {found}.</p><nav>{nav}</nav>"


def _sampled(run: Run) -> str:
    note = sampled_note(run)
    return html.paragraph(f"{note[0].upper()}{note[1:]}.", css="") if note else ""


def _verdict(run: Run) -> str:
    """One sentence about the run."""
    return f'<p class="verdict" id="verdict"><b>{html.escape(run.verdict.sentence)}</b></p>' if run.frames else ""


def _chain(chain: Sequence[Link]) -> str:
    return html.escape(" → ".join(f"{link.what} (step {link.step})" for link in chain))


def _course(issue: Issue) -> str:
    """Onset, peak, last step and count of an issue."""
    return html.paragraph(
        f"{issue.rule}: since step {issue.onset}, worst at {issue.peak.step}, last at {issue.last.step}, "
        f"{html.plural(issue.count, 'logged step')}"
    )


def _curves(run: Run) -> str:
    """Losses, learning rates and gradient norms as curves, with a line at the onset of every error."""
    onsets = sorted({issue.onset for issue in run.issues if issue.severity == "error"})
    drawn = [
        curve(
            printable(tag), series.steps.tolist(), series.values, [step for step in onsets if step <= series.steps[-1]]
        )
        for tag, series in own_scalars(run).items()
        if len(series.steps) > 1 and any(word in tag.lower() for word in _DRAWN)
    ]
    return f'<div class="curves">{"".join(drawn[:MOST_CURVES])}</div>' if drawn else ""


def _findings(run: Run) -> str:
    """Errors and warnings by cause, the first of each issue open; and notes folded."""
    anchors = {_key(finding): f"finding-{i}" for i, finding in enumerate(by_severity(run), start=1)}
    verdict = run.verdict
    urgent, notes = [], []
    for cause, chain in zip(verdict.causes, verdict.chains, strict=True):
        blocks = [
            findings.block(finding, anchors.pop(_key(finding)))
            + (_course(issue) if finding is issue.findings[0] else "")
            for issue in cause.issues
            for finding in issue.findings
            if _key(finding) in anchors
        ]
        if cause.severity == "info":
            notes += blocks
        else:
            more = html.details(f"{len(blocks) - 1} more of this cause", "".join(blocks[1:])) if blocks[1:] else ""
            urgent.append(f"<h3>{_chain(chain)}</h3>{''.join(blocks[:1])}{more}")
    folded = html.details(html.plural(len(notes), "note"), "".join(notes)) if notes else ""
    none = html.paragraph(f"{findings.NONE_FOUND.capitalize()}.", css="")
    return '<h2 id="findings">Findings</h2>' + ("".join(urgent) + folded or none)


def _key(finding: Finding) -> tuple[str, Site | None]:
    """Findings of one rule at one site are one entry of `Run.findings`."""
    return finding.rule, finding.site


def _flights(run: Run) -> str:
    texts = [str(flight) for flight in run.flights]
    left_out = [f"missing dump: {reason}" for reason in run.flights_left_out]
    return f'<h2 id="flights">Flight recorder</h2>{html.bullets([*texts, *left_out])}' if texts or left_out else ""


def _problems(run: Run) -> str:
    return f'<h2 id="problems">Problems with the files</h2>{html.bullets(run.problems)}' if run.problems else ""


def _scalars(run: Run) -> str:
    scalars = {tag: (series.steps.tolist(), series.values) for tag, series in own_scalars(run).items()}
    table = scalar_table(scalars, SCALAR_TREND) if scalars else "<p>No scalar was logged.</p>"
    return f'<h2 id="scalars">Scalars</h2>{html.details(html.plural(len(scalars), "scalar"), table)}'


def _heat_maps(grids: Sequence[Grid]) -> str:
    explained = html.paragraph(
        "One row per layer, in execution order; one column per logged step. Of a model with many layers a row is a "
        "role: the median of all layers with the same path but for numbers."
    )
    maps = "".join(map(_heat_map, grids))
    return f'<h2 id="heat-maps">Heat maps</h2>{explained}' + (maps or "<p>No tbhooks data found.</p>")


def _heat_map(grid: Grid) -> str:
    """The map of a statistic: by role if there are many layers, with all of them folded."""
    title = f'<span id="{_ANCHOR.sub("-", f"{grid.kind}-{grid.stat}")}"></span>'
    whole = heat_map(grid, MOST_COLUMNS, [nonfinite_note(grid)], has_details=True)
    if len(grid.names) > MOST_ROWS:
        by_role = heat_map(grid.by_role(), MOST_COLUMNS, [nonfinite_note(grid)], has_details=True)
        whole = by_role + html.details(f"all {len(grid.names)} layers", whole)
    return title + html.details(grid.title, whole, is_open=(grid.kind, grid.stat) in OPEN_MAPS)


# --- Histograms ---------------------------------------------------------------------------------------


def _histograms(run: Run) -> str:
    """Histograms over the steps; those of tensors with findings are open, all others folded together."""
    frames = [frame for frame in run.training if _has_histograms(frame)]
    title = '<h2 id="histograms">Histograms</h2>'
    if not frames:
        return title + "<p>The run has no histograms.</p>"
    positions = np.unique(np.linspace(0, len(frames) - 1, MOST_HISTOGRAM_STEPS).round().astype(int))
    total, frames = len(frames), [frames[i] for i in positions]
    flagged = [finding.site for finding in by_severity(run) if finding.site is not None]
    chosen, left_out = _chosen_sites(frames, flagged)
    counts = _counts_over_steps(frames, chosen)
    known = [site for site in chosen if site in counts]
    drawn = "".join(_histogram(site, counts[site], frames, is_open=True) for site in known if site in flagged)
    rest = [_histogram(site, counts[site], frames, is_open=False) for site in known if site not in flagged]
    folded = html.details(f"histograms of {html.plural(len(rest), 'tensor')} without findings", "".join(rest))
    notes = f"{len(frames)} of {total} steps with histograms. One row is half an octave of values, the largest at the "
    notes += "top; the colour is the fraction of the elements, blank if there are none."
    notes += f" {left_out} more tensors are left out to keep the page small." if left_out else ""
    return title + html.paragraph(notes) + drawn + (folded if rest else "")


def _has_histograms(frame: Frame) -> bool:
    packed = getattr(frame, "has_histograms", None)
    return bool(frame.buckets.shape[1]) if packed is None else bool(packed)


def _chosen_sites(frames: Sequence[Frame], flagged: Collection[Site]) -> tuple[list[Site], int]:
    everywhere = dict.fromkeys(site for sites in {id(f.sites): f.sites for f in frames}.values() for site in sites)
    first = [site for site in dict.fromkeys(flagged) if site in everywhere]
    rest = [site for kind in _HISTOGRAM_KINDS for site in everywhere if site.kind == kind and site not in set(first)]
    room = max(MOST_HISTOGRAMS - len(first), 0)
    step = max(1, -(-len(rest) // room)) if room else 1
    chosen = first[:MOST_HISTOGRAMS] + rest[::step][:room]
    return chosen, len(first) + len(rest) - len(chosen)


def _counts_over_steps(frames: Sequence[Frame], sites: Sequence[Site]) -> dict[Site, Counts]:
    """Bucket counts [steps, buckets] of each site; those of a frame are unpacked once."""
    counts_of = {site: np.zeros((len(frames), len(LOWER)), dtype=np.int64) for site in sites}
    for i, frame in enumerate(frames):
        rows = {site: row for row, site in enumerate(frame.sites)}
        buckets = frame.buckets
        for site, counts in counts_of.items():
            if site in rows and buckets.shape[1]:
                counts[i] = buckets[rows[site]]
    return {site: counts for site, counts in counts_of.items() if counts.any()}


def _histogram(site: Site, counts: Counts, frames: Sequence[Frame], *, is_open: bool) -> str:
    counts, buckets = _merge_around_zero(counts)
    fractions = counts / np.maximum(counts.sum(axis=1), 1)[:, None]
    shown = np.where(fractions > 0, fractions, np.nan).T[::-1]
    scale = Scale.of(shown)
    span = f"{bucket_label(buckets[0])} to {bucket_label(buckets[-1])}"
    labels = [bucket_label(bucket) for bucket in buckets[::-1]]
    pixels = picture(shown, np.zeros(shown.shape, dtype=bool), scale)
    title = printable(f"{site}: distribution over steps, {span}")
    image = svg(title, pixels, labels, (), [frame.step for frame in frames], HISTOGRAM_ROW)
    return html.details(f"{site}: {span}", legend(scale, wrong=False) + image, is_open=is_open)


def _merge_around_zero(counts: Counts) -> tuple[Counts, list[int]]:
    """The used columns and their buckets; those nearest to zero are added up, because buckets reach down to 2**-64."""
    used = np.flatnonzero(counts.any(axis=0))
    low, high = int(used[0]), int(used[-1])
    near = max(max(MIDDLE - low, high - MIDDLE) - HALF_OCTAVES_SHOWN, 0)
    left, right = MIDDLE - near, MIDDLE + near
    middle = counts[:, left : right + 1].sum(axis=1)
    kept = [b for b in range(min(low, MIDDLE), max(high, MIDDLE) + 1) if b < left or b > right or b == MIDDLE]
    merged = counts[:, kept].copy()
    merged[:, kept.index(MIDDLE)] = middle
    inside = [i for i in range(len(kept)) if merged[:, i:].any() and merged[:, : i + 1].any()]
    return merged[:, inside], [kept[i] for i in inside]
