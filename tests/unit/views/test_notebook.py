"""What objects look like in a notebook: the numbers are there, in words too, and the HTML is safe, valid and small."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.data.errors import ArgumentError
from tbhooks.data.findings import Findings
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.data.history import History
from tbhooks.data.peek_result import Output, Peeked
from tbhooks.drawing.names import shorten
from tbhooks.views import notebook
from tbhooks.views.notebook import compare, histogram, html
from tbhooks.views.notebook import history as history_view
from tests.support.frames import make_frame
from tests.support.loops import mlp, train

RNG = np.random.default_rng(0)
DEAD = Finding(
    7, Site("relu", "activation"), "dead_units", "warning", "90% of the units of relu are zero", {"dead": {"deep": 0.9}}
)
LOST = Finding(7, Site("fc.weight", "weight_gradient"), "non_finite", "error", "NaN in fc.weight", {"share": 0.123456})


def a_frame(step: int = 7, **changes: Any) -> Frame:
    """A small net with a dead layer and a gradient that is not finite."""
    rng = np.random.default_rng(step)
    data = {
        Site("fc", "activation"): rng.normal(0.5, 2.0, 400),
        Site("relu", "activation"): np.maximum(rng.normal(-3, 2.0, 400), 0),
        Site("deep", "activation"): np.full(40, 2.5),
        Site("deep", "gradient"): rng.normal(0, 1e-3, 40),
        Site("relu", "gradient"): rng.normal(0, 1e-4, 400),
        Site("fc", "gradient"): rng.normal(0, 1e-5, 400),
        Site("fc.weight", "weight"): rng.normal(0, 0.1, 100),
        Site("fc.weight", "weight_gradient"): [1.0, math.nan, math.inf],
        Site("fc.weight", "update"): rng.normal(0, 1e-3, 100),
        **changes.pop("more", {}),
    }
    return make_frame(
        step,
        data,
        findings=[replace(found, step=step) for found in (DEAD, LOST)],
        scalars={"train/loss": 0.25, "train.lr/0": 0.1},
        **changes,
    )


def peeked(frame: Frame, **known: Any) -> Peeked:
    outputs = {"outputs": {"fc": Output("Linear", (8, 50), "float32"), "relu": Output("ReLU", (8, 50), "bfloat16")}}
    return Peeked(**{field.name: getattr(frame, field.name) for field in fields(frame)}, **{**outputs, **known})


def a_history() -> History:
    history = History()
    for step in range(0, 60, 10):
        history.append(replace(a_frame(step), scalars={"train/loss": 3.0 / (step + 1)}))
    return history


def html_of(shown: Any) -> str:
    return shown._repr_mimebundle_()["text/html"]


def text_of(shown: Any) -> str:
    return shown._repr_mimebundle_()["text/plain"]


@cache
def shown_watch() -> tuple[str, str]:
    model = mlp()
    with tbhooks.watch(model, every=1) as watching:
        train(model, 3)
    return notebook.render_watch(watching)


VIEWS: dict[str, Callable[[], str]] = {
    "frame": lambda: html_of(a_frame()),
    "peeked": lambda: html_of(peeked(a_frame(), notes=("head was not <seen>",), kept={"fc": np.zeros((8, 50))})),
    "evaluation": lambda: html_of(an_evaluation()),
    "comparison": lambda: html_of(a_frame().compare(a_frame(8))),
    "history": lambda: html_of(a_history()),
    "finding": lambda: html_of(DEAD),
    "findings": lambda: html_of(Findings([DEAD, LOST])),
    "watch": lambda: shown_watch()[1],
    "nothing": lambda: html_of(make_frame(0, {})) + html_of(History()) + html_of(Findings()),
    "hostile": lambda: html_of(hostile()) + html_of(hostile().compare(hostile())) + html_of(hostile_history()),
}
every_view = pytest.mark.parametrize("view", VIEWS)


def an_evaluation() -> Frame:
    frame = a_frame()
    return replace(frame, sites=tuple(replace(site, kind=f"eval.{site.kind}") for site in frame.sites))


HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a\u202eb\u05d0\nc",
    "x" * 5000,
    "a&amp;b",
    "",
)


def hostile() -> Frame:
    data = {Site(name, kind): RNG.normal(size=9) for kind in ("activation", "<b>kind") for name in HOSTILE}
    found = [Finding(0, Site(name, "activation"), "<i>rule", "error", name, {name: name}) for name in HOSTILE]
    known = {name: Output(name, (3,), name[:20]) for name in HOSTILE}
    return peeked(make_frame(0, data, findings=found, scalars={"train/<u>": 1.0}), outputs=known, notes=HOSTILE)


def hostile_history() -> History:
    history = History()
    history.append(hostile())
    return history


# --- Valid, and nothing but a picture ----------------------------------------------------------------

VOID = {"img", "image", "path", "rect", "br", "meta"}
TAGS = {
    *("div", "style", "p", "b", "bdi", "code", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "ul"),
    *("li", "svg", "title", "path", "image", "text", "rect", "span", "img", "h4"),
}
INSIDE = {
    "tr": {"thead", "tbody"}, "td": {"tr"}, "th": {"tr"}, "thead": {"table"}, "tbody": {"table"}, "li": {"ul"},
    "summary": {"details"}, "path": {"svg"}, "title": {"svg", "rect"}, "image": {"svg"}, "text": {"svg"},
}  # fmt: skip
NOT_IN_A_PARAGRAPH = {"div", "p", "table", "details", "ul"}


class Strict(HTMLParser):
    """Every tag is known, closed in order and where it may be; the text and the attributes are kept."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.styles: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, f"<{tag}>"
        assert len(dict(attrs)) == len(attrs)
        parent = self.open[-1] if self.open else None
        assert tag not in INSIDE or parent in INSIDE[tag], f"<{tag}> in <{parent}>"
        assert not ("p" in self.open and tag in NOT_IN_A_PARAGRAPH)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.styles if "style" in self.open else self.words).append(data)


@every_view
def test_html_is_balanced_and_has_no_script_no_id_no_handler_and_no_address(view: str) -> None:
    parsed = Strict(VIEWS[view]())
    for tag, attributes in parsed.tags:
        assert not {"id", "name"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:image/png;base64,").startswith("data:image/png;base64,"), tag
    assert not re.search(r"url\(|@import|https?:", VIEWS[view]().replace("data:image/png", ""))


@every_view
def test_no_rule_of_the_style_reaches_outside(view: str) -> None:
    for style in Strict(VIEWS[view]()).styles:
        inner = re.sub(r"@media \(prefers-color-scheme:dark\)\{(.*?\})\}", r"\1", style)
        for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", inner):
            for selector in selectors.split(","):
                assert re.search(r"(^| )(\.tbhooks)+( |$)", selector), selector


def test_light_and_dark_follow_the_notebook_before_the_browser() -> None:
    style = html.STYLE
    browser = style.index("prefers-color-scheme:dark")
    for says, paper in (('[data-jp-theme-light="true"] ', "#fff"), ('[data-jp-theme-light="false"] ', "#111"),
                        (".vscode-light ", "#fff"), (".vscode-dark ", "#111")):  # fmt: skip
        place = style.index(f"{says}.tbhooks")
        assert place > browser
        assert re.search(r"--paper:(#\w+)", style[place:])[1] == paper


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_words_and_nothing_else(name: str) -> None:
    parsed = Strict(VIEWS["hostile"]())
    words = "".join(parsed.words)
    assert not {"script", "img onerror", "u", "i"} & {tag for tag, _ in parsed.tags}
    assert shorten(name, 200).replace("\u202e", "\\u202e").replace("\n", "\\n") in words
    assert "\u202e" not in words
    assert len(VIEWS["hostile"]()) < 120_000


# --- The frame ---------------------------------------------------------------------------------------


def rows_of(shown: str) -> Iterator[list[str]]:
    """The cells of every row, as text."""
    for row in re.findall(r"<tr>(.*?)</tr>", shown):
        yield [
            re.sub("<[^>]*>", "", re.sub(r"<svg.*?</svg>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]


def test_modules_come_in_execution_order_and_then_parameters() -> None:
    names = [row[0].split()[0] for row in rows_of(html_of(a_frame()))]
    assert names == ["module", "fc", "relu", "deep", "parameter", "fc.weight"]


def test_every_number_is_the_frames_own() -> None:
    frame = a_frame()
    header, *rows = rows_of(html_of(frame))
    cells = dict(zip(header, rows[0], strict=True))
    activation = frame["fc", "activation"]
    for title, stat in (("mean", "mean"), ("std", "std"), ("min", "min"), ("max", "max")):
        assert cells[title] == f"{getattr(activation, stat):.3g}"
    assert cells["grad norm"] == f"{frame['fc', 'gradient'].norm:.3g}"
    assert dict(zip(header, rows[1], strict=True))["zeros"] == f"{frame['relu', 'activation'].zero_fraction:.0%}"
    assert dict(zip(header, rows[2], strict=True))["distribution"] == "all 2.5"


def test_only_a_peeked_frame_has_types_shapes_and_dtypes() -> None:
    known = html_of(peeked(a_frame()))
    row = next(row for row in rows_of(known) if row[0].startswith("relu"))
    assert row[1:4] == ["ReLU", "8x50", "bfloat16"]
    assert next(row for row in rows_of(known) if row[0].startswith("deep"))[1:4] == ["-", "-", "-"]
    assert "dtype" not in html_of(a_frame())
    assert re.search(r"relu +ReLU +8x50 +bfloat16", text_of(peeked(a_frame())))


def test_notes_and_kept_tensors_are_reported() -> None:
    shown = peeked(a_frame(), notes=("head was not seen",), kept={"fc": np.zeros((8, 50))})
    for words in (html_of(shown), text_of(shown)):
        assert "head was not seen" in words
        assert "kept: fc (8x50)" in words


def test_findings_stand_above_the_tables_and_mark_their_rows_in_words() -> None:
    shown = html_of(a_frame())
    assert shown.index(DEAD.message) < shown.index("<table")
    assert shown.index(LOST.message) < shown.index(DEAD.message), "the worst comes first"
    assert "1 error, 1 warning" in shown
    assert "share 0.123" in shown
    marked = {row[0] for row in rows_of(shown) if ":" in row[0]}
    assert marked == {"relu warning: dead units", "deep warning: dead units", "fc.weight error: non finite"}
    assert text_of(a_frame()).startswith("error, step 7, non_finite: NaN in fc.weight")


def test_what_is_not_finite_is_counted_in_words() -> None:
    shown = html_of(make_frame(0, {Site("a", "activation"): [1.0, math.nan, math.nan, math.inf]}))
    assert "2 NaN, 1 Inf" in shown
    assert "(2 NaN/Inf)" in html_of(a_frame()), "of a gradient beside its norm"
    assert "Parameters (1), no NaN or Inf in any" in html_of(a_frame())
    lost = html_of(make_frame(0, {Site("w", "weight"): [1.0, math.nan]}))
    assert "Parameters (1)</summary>" in lost
    assert "1 NaN" in lost


def stripped(shown: str) -> str:
    """What is left where styles, pictures and classes are taken out."""
    bare = re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", shown)
    return re.sub(r"<[^>]*>", " ", bare)


def test_without_styles_and_pictures_all_numbers_are_still_there() -> None:
    frame = a_frame()
    left = stripped(html_of(frame))
    activation, weight = frame["fc", "activation"], frame["fc.weight", "weight"]
    numbers = [getattr(activation, stat) for stat in ("mean", "std", "min", "max")]
    numbers += [weight.norm, frame["fc", "gradient"].norm, frame["fc.weight", "update"].ratio]
    for number in numbers:
        assert f" {number:.3g} " in left
    assert "warning" in left
    grid = history_view.grid_of(a_history(), "std", "activation")
    left = stripped(html_of(a_history()))
    for number in (grid.values[0, 0], grid.values[0, -1], grid.values[1].max()):
        assert f" {number:.3g} " in left
    change = a_frame().compare(a_frame(8)).changes[0]
    assert change.words in stripped(html_of(a_frame().compare(a_frame(8))))


def test_an_evaluation_is_shown_as_one() -> None:
    shown = html_of(an_evaluation())
    assert "<b>Step 7</b> in evaluation: 3 modules, 1 parameter" in shown
    assert [row[0].split()[0] for row in rows_of(shown)] == [row[0].split()[0] for row in rows_of(html_of(a_frame()))]
    assert "dead units" in next(row for row in rows_of(shown) if row[0].startswith("relu"))[0]


def test_kinds_nobody_knows_have_a_table_too() -> None:
    shown = html_of(make_frame(0, {Site("a", "surprise"): [1.0, 3.0], Site("b", "functional"): [2.0]}))
    assert "surprise (1)" in shown
    assert "Operations (1)" in shown


def test_a_histogram_is_small_says_its_axis_and_has_its_bars_where_the_numbers_are() -> None:
    frame = make_frame(0, {Site("a", "activation"): [0.0] * 10 + [9.5] * 90 + [10.0]})
    drawn = histogram.draw(frame.buckets[0], 0.0, 10.0)
    assert len(drawn) < 300
    assert "<title>0 to 10, linear</title>" in drawn
    heights = re.findall(r"V(\d+)h(\d+)", drawn)
    assert heights[0] == ("9", "5"), "ten, against 91 in the 3.2 bars of the bucket from 8 on"
    assert heights[1][0] == "15", "nothing between"
    assert sum(int(width) for _, width in heights) == histogram.BARS * histogram.BAR


def test_bars_hold_every_element_wherever_the_ends_fall() -> None:
    from tbhooks.drawing.text import rebinned

    for data in ([1.0, 2.0], [-1.0, 1.0], [-1.5, -1.0], [0.0, 1e-30], [-3.0, 0.0, 4.0], RNG.normal(size=99)):
        frame = make_frame(0, {Site("a", "activation"): data})
        reading = frame["a", "activation"]
        assert rebinned(reading.counts, reading.min, reading.max, 20).sum() == pytest.approx(len(data))


def test_a_frame_without_histograms_has_a_table_without_pictures() -> None:
    shown = html_of(a_frame(histograms=False))
    assert "<svg" not in shown
    assert "distribution" not in shown


@cache
def a_large_frame() -> Frame:
    """Three hundred modules, each with a weight and a bias, after one real step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(300)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tbhooks.watch(model, every=1, rules=()) as watching:
        model(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
    return watching.latest


def test_300_modules_with_gradients_and_weights_take_less_than_200_kilobytes() -> None:
    """With names as long as those of a transformer."""
    frame = a_large_frame()
    sites = tuple(replace(site, path=f"transformer.encoder.layers.{site.path}.attention") for site in frame.sites)
    outputs = {site.path: Output("Linear", (16, 128, 768), "float32") for site in sites if site.kind == "activation"}
    shown = html_of(peeked(replace(frame, sites=sites), outputs=outputs))
    assert len(list(rows_of(shown))) == 1 + 301 + 1 + 600
    assert len(shown.encode()) < 200_000
    Strict(shown)


def test_a_table_too_long_keeps_its_ends_and_rows_with_findings_and_says_so() -> None:
    names = [f"layer{i}" for i in range(1000)]
    flagged = Finding(0, Site("layer500", "activation"), "dead_units", "error", "dead")
    shown = html_of(make_frame(0, {Site(name, "activation"): [1.0, 2.0] for name in names}, findings=[flagged]))
    listed = [row[0].split()[0] for row in rows_of(shown)]
    assert {"layer0", "layer500", "layer999"} <= set(listed)
    assert len(listed) < 700
    assert "399 rows in the middle are left out" in shown


# They differ in the middle only, where long names are cut.
ALIKE = [f"encoder{'.block' * 40}.{i}{'.projection' * 40}.weight" for i in range(3)]


def first_cells(shown: str) -> list[str]:
    return [row[0] for row in rows_of(shown) if "…" in row[0]]


@pytest.mark.parametrize("view", ["frame", "comparison", "history"])
def test_long_names_are_never_cut_to_the_same_text(view: str) -> None:
    frame = make_frame(0, {Site(name, "activation"): [1.0, 2.0 + i] for i, name in enumerate(ALIKE)})
    other = make_frame(0, {Site(name, "activation"): [1.0, 9.0 + i] for i, name in enumerate(ALIKE)})
    history = History()
    history.append(frame)
    cells = first_cells(html_of({"frame": frame, "comparison": frame.compare(other), "history": history}[view]))
    assert len(set(cells)) == 3
    assert max(map(len, cells)) < len(ALIKE[0]) / 2


def test_labels_of_a_heat_map_are_never_cut_to_the_same_text() -> None:
    history = History()
    names = [f"transformer.encoder.{kind}.{i}.projection.weight" for kind in ("left", "right") for i in range(3)]
    history.append(make_frame(0, {Site(name, "activation"): [1.0, 2.0] for name in names}))
    (drawn,) = re.findall(r"<svg role.*?</svg>", html_of(history))[:1]
    labels = re.findall(r'text-anchor="end">([^<]*)<', drawn)
    assert len(set(labels)) == 6
    assert labels[0] == "…left.0.projection.weight"


def test_names_in_the_text_of_a_comparison_are_never_cut_to_the_same_text() -> None:
    names = [f"model.transformer.decoder.layers.{i}.self_attention.query_projection.weight" for i in range(12)]
    pair = [make_frame(0, {Site(name, "weight"): [1.0, high] for name in names}) for high in (2.0, 9.0)]
    rows = [line.split()[0] for line in repr(pair[0].compare(pair[1])).splitlines() if line.startswith("…")]
    assert len(set(rows)) == len(rows) == 12


def test_print_shows_the_table_and_repr_stays_a_line() -> None:
    assert "act mean" in str(a_frame())
    assert "\n" not in repr(a_frame())


# --- Findings, watches, bundles ----------------------------------------------------------------------


def test_findings_are_a_list_that_shows_itself() -> None:
    found = Findings([DEAD, LOST])
    assert isinstance(found, list)
    assert found == [DEAD, LOST]
    assert [*found, DEAD] == [DEAD, LOST, DEAD]
    assert text_of(found).splitlines()[0].startswith("error, step 7, non_finite")
    assert "no issues found" in text_of(Findings())
    assert DEAD.message in text_of(DEAD)


def test_many_findings_are_folded_but_none_is_lost() -> None:
    found = Findings(replace(DEAD, message=f"message {i:03}.") for i in range(40))
    assert all(f"message {i:03}." in html_of(found) for i in range(40))
    assert "28 more findings" in html_of(found)


def test_a_watch_tells_its_state_its_newest_frame_and_what_it_cost() -> None:
    for shown in shown_watch():
        assert "3 steps logged" in shown
        assert "seconds training" in shown
        assert "act mean" in shown or "<th>mean</th>" in shown


def test_a_bundle_has_what_was_asked_for() -> None:
    frame = a_frame()
    assert set(frame._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert set(frame._repr_mimebundle_(include={"text/plain"})) == {"text/plain"}
    assert set(frame._repr_mimebundle_(exclude={"text/plain"})) == {"text/html"}


# --- Two passes --------------------------------------------------------------------------------------


def both(first: dict[Site, Any], second: dict[Site, Any]) -> compare.FrameComparison:
    return make_frame(0, first).compare(make_frame(1, second))


A, B, W = Site("a", "activation"), Site("b", "activation"), Site("norm.weight", "weight")
NORMAL = RNG.normal(0, 1, 2000)


def test_a_frame_agrees_with_itself() -> None:
    same = a_frame().compare(a_frame())
    assert same.headline == "step 7 (first) against step 7 (second): 9 of 9 tensors match within 1%."
    assert all(change.agrees and change.amount == 0 and change.words == "unchanged" for change in same.changes)


def test_nan_comes_before_everything_and_the_first_tensor_before_the_next() -> None:
    found = both({A: NORMAL, B: NORMAL, W: NORMAL}, {A: 1e6 * NORMAL, B: [*NORMAL, math.nan], W: [*NORMAL, math.inf]})
    assert [change.site for change in found.changes] == [B, W, A]
    assert found.changes[0].what == "NaN/Inf"
    assert "largest change: activation of b, NaN/Inf 0 → 1" in found.headline


@pytest.mark.parametrize(
    ("second", "what", "amount"),
    [
        (4.0 * NORMAL, "std", 2.0),
        (NORMAL / 8, "std", 3.0),
        (NORMAL + 3.0, "mean", 3.0),
        (np.where(np.arange(2000) < 1000, 0.0, NORMAL), "zeros", 0.5),
        (np.sign(NORMAL) * NORMAL.std(), "distribution", None),
    ],
)
def test_each_change_is_named_and_measured(second: Any, what: str, amount: float | None) -> None:
    (change,) = both({A: NORMAL}, {A: second}).changes
    if what == "mean":  # the whole distribution moves by as much, and the rms changes less
        assert change.what in ("mean", "distribution")
    else:
        assert change.what == what
    if amount is not None:
        assert change.amount == pytest.approx(amount, rel=0.03)
    assert not change.agrees


def test_a_mean_near_zero_is_no_change_however_much_it_differs_from_itself() -> None:
    shifted = NORMAL - NORMAL.mean() + 1e-6
    (change,) = both({A: NORMAL - NORMAL.mean() - 1e-6}, {A: shifted}).changes
    assert change.agrees


def test_numbers_that_cross_the_edge_of_a_bucket_have_hardly_moved() -> None:
    ones = np.ones(100)
    moved = np.where(np.arange(100) % 2, 0.9999, 1.0001)
    (change,) = both({W: ones}, {W: moved}).changes
    assert change.agrees


def test_the_distance_is_that_of_the_sorted_elements() -> None:
    first, second = NORMAL, np.sort(RNG.laplace(0.4, 0.7, 2000))
    frame, other = make_frame(0, {A: first}), make_frame(0, {A: second})
    exact = np.abs(np.sort(first) - second).mean()
    assert compare._distance(frame["a", "activation"], other["a", "activation"]) == pytest.approx(exact, rel=0.1)


def test_changes_are_sorted_and_the_norm_of_more_samples_is_none() -> None:
    found = both({A: NORMAL, B: NORMAL}, {A: np.tile(NORMAL, 4), B: 2 * NORMAL})
    assert [change.site for change in found.changes] == [B, A]
    assert found.changes[1].agrees


def test_a_negligible_gradient_that_changed_much_comes_after_an_ordinary_one_that_changed_less() -> None:
    sites = {name: Site(name, "gradient") for name in ("a", "b", "c", "tiny")}
    first = {site: NORMAL * (1e-13 if name == "tiny" else 1.0) for name, site in sites.items()}
    second = first | {sites["b"]: 2 * NORMAL, sites["tiny"]: 50 * 1e-13 * NORMAL}
    found = both(first, second)
    assert [change.site.path for change in found.changes][:2] == ["b", "tiny"]
    assert found.changes[1].amount > found.changes[0].amount
    assert "largest change: gradient of b" in found.headline


def test_a_layer_that_died_or_woke_up_is_among_the_most_changed() -> None:
    found = both({A: NORMAL, B: np.zeros(50)}, {A: 9 * NORMAL, B: NORMAL[:50]})
    assert found.changes[0].site == B
    assert found.changes[0].amount == compare.MOST_OCTAVES


def test_an_update_is_compared_by_its_ratio() -> None:
    first = {Site("w", "weight"): NORMAL, Site("w", "update"): NORMAL * 1e-3}
    second = {Site("w", "weight"): NORMAL, Site("w", "update"): NORMAL * 1e-2}
    change = both(first, second).changes[0]
    assert change.amount == pytest.approx(math.log2(10), rel=1e-3)
    assert "(x 10)" in change.words


def test_what_only_one_has_and_other_outputs_are_shown_in_both_forms() -> None:
    first = peeked(a_frame(), outputs={"fc": Output("Linear", (8, 50), "float32")})
    second = peeked(a_frame(more={Site("new", "input"): [1.0]}), outputs={"fc": Output("Linear", (8, 50), "bfloat16")})
    found = first.compare(second)
    assert found.only_first == ()
    assert found.only_second == (Site("new", "input"),)
    for shown in (repr(found), html_of(found)):
        assert "only in the second: input of new" in shown
        assert "dtype float32 → bfloat16 in 1 module: fc" in shown
    assert len(a_frame().compare(first).changes) == 9, "a frame and a peeked one"


def test_an_evaluation_is_compared_with_training() -> None:
    assert len(a_frame().compare(an_evaluation()).changes) == 9


def test_nothing_in_common_is_said_and_what_is_no_frame_refused() -> None:
    assert "no tensor in common" in repr(both({A: NORMAL}, {B: NORMAL}))
    with pytest.raises(ArgumentError, match=r"another logged step \(a Frame\), not dict"):
        a_frame().compare({})


def test_both_histograms_are_drawn_on_one_axis() -> None:
    (change,) = both({A: np.full(9, 1.0)}, {A: np.full(9, 3.0)}).changes
    drawn = histogram.draw_both(change.first, change.second)
    filled, line = re.findall(r'd="([^"]*)"', drawn)
    assert filled.startswith("M0 15V0h5V15")
    assert line.endswith("V0h5V15")
    assert "1 to 3, linear" in drawn


# --- Histories ---------------------------------------------------------------------------------------


def test_a_history_shows_steps_scalars_findings_and_maps() -> None:
    shown = html_of(a_history())
    assert "6 logged steps, 0 to 50" in shown
    assert "1 error, 1 warning" in shown, "a problem of every step is listed once"
    assert ["train/loss", "3", "0.0588", "50"] in [row[:4] for row in rows_of(shown)]
    for title in ("activation std", "gradient norm", "update ratio"):
        assert f"<details open><summary>{title}</summary>" in shown
    assert "NaN or infinite values in 1 of 1 rows, first in fc.weight at step 0." in shown
    assert re.search(r"train/loss +3 +0.0588 +█", text_of(a_history()))


def test_a_history_of_300_modules_and_100_steps_takes_less_than_300_kilobytes() -> None:
    frame, history = a_large_frame(), History()
    for step in range(100):
        noisy = frame.values * RNG.uniform(0.5, 2.0, frame.values.shape)
        history.append(replace(frame, step=step, values=noisy))
    shown = html_of(history)
    assert shown.count("<image") == 6
    assert "120 of 301 rows" in shown
    assert len(shown.encode()) < 300_000


def test_rows_with_nan_stay_on_a_map_with_fewer_rows() -> None:
    history = History()
    data = {Site(f"layer{i}", "activation"): [1.0, 2.0, math.nan if i == 333 else 3.0] for i in range(500)}
    history.append(make_frame(0, data))
    shown = html_of(history)
    assert "layer333" in {row[0] for row in rows_of(shown)}
    assert "first in layer333 at step 0" in shown


def test_a_grid_is_what_the_series_say_for_every_stat() -> None:
    history = a_history()
    for kind, stat in (("activation", "std"), ("gradient", "p50"), ("update", "ratio"), ("activation", "count")):
        grid = history_view.grid_of(history, stat, kind)
        for name, row in zip(grid.names, grid.values, strict=True):
            assert row.tolist() == history.series(name, kind, stat)[1].tolist()
    assert history_view.grid_of(history, "norm", "gradient").names == ("fc", "relu", "deep"), "in forward order"


def test_the_grid_of_the_gain_is_the_ratio_of_successive_modules() -> None:
    history = History()
    data = {Site(f"layers.{i}", "gradient"): RNG.normal(size=30) * 2.0**-i for i in (2, 1, 0)}
    history.append(make_frame(0, data))
    rms = {site.name: np.sqrt(np.square(array).mean()) for site, array in data.items()}
    grid = history_view.grid_of(history, "gain", "gradient")
    found = dict(zip(grid.names, grid.values[:, 0], strict=True))
    assert found["layers.1"] == pytest.approx(rms["layers.0"] / rms["layers.1"])
    assert found["layers.2"] == pytest.approx(rms["layers.1"] / rms["layers.2"])
    assert grid.undefined[grid.names.index("layers.0"), 0], "the first has no module before it"
    assert not grid.wrong.any()
    with pytest.raises(tbhooks.ArgumentError, match="only the kind 'gradient' has a gain"):
        history_view.grid_of(a_history(), "gain", "activation")


def test_a_grid_that_cannot_be_is_refused_with_the_nearest_name() -> None:
    for stat, kind, message in (
        ("sdt", "gradient", "'std'"),
        ("std", "gradeint", "'gradient'"),
        ("ratio", "weight", "update"),
    ):
        with pytest.raises(ArgumentError, match=message):
            history_view.grid_of(a_history(), stat, kind)


# --- pandas ------------------------------------------------------------------------------------------


def test_a_table_of_pandas_has_a_row_a_site_and_every_statistic() -> None:
    frame = a_frame()
    table = frame.to_pandas()
    assert table.columns[:4].tolist() == ["step", "path", "index", "kind"]
    assert list(zip(table.path, table.kind, strict=True)) == [(site.path, site.kind) for site in frame.sites]
    row = table[(table.path == "fc") & (table.kind == "activation")].iloc[0]
    data = np.random.default_rng(7).normal(0.5, 2.0, 400)
    assert row["mean"] == pytest.approx(data.mean(), rel=1e-12)
    assert row["std"] == pytest.approx(data.std(), rel=1e-12)
    assert row["p50"] == frame["fc", "activation"].p50
    assert {str(table[name].dtype) for name in ("step", "count", "nan_count", "inf_count")} == {"int64"}
    assert str(table.kind.dtype) == "category"
    assert table.ratio.notna().tolist() == [site.kind == "update" for site in frame.sites]
    assert "dtype" not in table.columns
    assert "dead_fraction" not in table.columns


def test_what_peek_knows_is_in_the_table_for_activations_only() -> None:
    table = peeked(a_frame()).to_pandas().set_index(["path", "kind"])
    assert table.loc[("relu", "activation"), ["type", "shape", "dtype"]].tolist() == ["ReLU", (8, 50), "bfloat16"]
    assert table.loc[[("relu", "gradient"), ("deep", "activation")], "type"].isna().all()


def test_a_history_has_a_row_a_step_and_site() -> None:
    history = a_history()
    history.append(replace(a_frame(60), scalars={"activation.dead_fraction/relu": 0.75}))
    table = history.to_pandas()
    assert len(table) == sum(len(frame.sites) for frame in history)
    picked = table[(table.path == "relu") & (table.kind == "activation")]
    assert picked.step.tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert picked["std"].tolist() == history.series("relu", "activation", "std")[1].tolist()
    assert picked.dead_fraction.tolist()[-1] == 0.75
    assert picked.dead_fraction.isna().sum() == 6
    assert History().to_pandas().columns[:4].tolist() == ["step", "path", "index", "kind"]


def test_missing_pandas_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ArgumentError, match=re.escape('pip install "tbhooks[pandas]"')):
        a_frame().to_pandas()


def test_views_need_none_of_the_optional_packages() -> None:
    program = """
import sys
packages = ("torch", "matplotlib", "pandas", "IPython", "anywidget")
for package in packages:
    sys.modules[package] = None
from tbhooks import Frame, History, Site
import numpy as np
frame = Frame(0, 0.0, 0, (Site("a", "activation"),), np.array([[2, 1, 2, 0, 2, 1, 0, 0, 0.0]]), np.zeros((1, 0), int))
history = History()
history.append(frame)
for shown in (frame, history, frame.compare(frame)):
    assert "<table" in shown._repr_mimebundle_()["text/html"], shown
print([name for name in packages if sys.modules[name] is not None])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
