"""The page: sound HTML that needs nothing, shows what the frames say, and lets no name out of its place."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbhooks import runs
from tbhooks.cli import commands
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.drawing import heatmap
from tbhooks.drawing.heatmap import LEVELS, PALETTE, Scale
from tbhooks.drawing.text import bucket_label
from tbhooks.runs import Run, report_data
from tbhooks.runs.report_data import Grid
from tbhooks.views import report_html, report_text
from tests.support.frames import make_frame, training_frame, write_run

VOID = {"meta", "img", "image", "br"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'onmouseover='x",
    "&lt;b&gt;",
    "\x1b[31m\n\u202e",
]


class Checked(HTMLParser):
    """Reads a page and fails where a tag is not closed or is one that has no place in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


ALLOWED = {
    "figure", "figcaption", "polyline", "line",
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "nav", "a", "div", "b", "bdi", "ul", "li",
    "table", "thead", "tbody", "tr", "th", "td", "svg", "image", "text", "rect", "details", "summary", "img", "span",
}  # fmt: skip


def checked(text: str) -> Checked:
    read = Checked(text)
    assert {tag for tag, _ in read.tags} <= ALLOWED
    attributes = [(name, value or "") for _, attrs in read.tags for name, value in attrs.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    for name, value in attributes:
        if name in ("href", "src"):
            assert value.startswith(("#", "data:image/png;base64,"))
    visible = re.sub(r"base64,[A-Za-z0-9+/=]*", "", text).lower()
    assert "<script" not in visible
    assert "http" not in visible
    assert "url(" not in visible
    assert "@import" not in visible
    return read


def run_of(*frames: Frame, problems: Any = (), directory: str = "runs/x") -> Run:
    findings = {(f.rule, f.site): f for frame in reversed(frames) for f in frame.findings}
    tags = dict.fromkeys(tag for frame in frames for tag in frame.scalars)
    logged = {tag: [(f.step, f.scalars[tag]) for f in frames if tag in f.scalars] for tag in tags}
    scalars = {
        tag: runs.Series(np.array([step for step, _ in points]), np.array([value for _, value in points]))
        for tag, points in logged.items()
    }
    return Run(Path(directory), list(frames), list(findings.values()), scalars, list(problems))


def test_the_page_tells_findings_scalars_maps_and_histograms_in_words() -> None:
    found = Finding(1, Site("a", "activation"), "dead_units", "warning", "half of a is dead", {"share": 0.5})
    given = [
        make_frame(
            step,
            {Site("a", "activation"): [0.0, 1.0 + step], Site("b", "activation"): [1.0, 5.0]},
            scalars={"train/loss": 1.0 / (1 + step)},
            findings=[found] if step else [],
        )
        for step in range(4)
    ]
    text = report_html.page(run_of(*given, problems=["x.tfevents: cut short at byte 5, the last step may be missing"]))
    read = checked(text)
    for words in ("half of a is dead", "share 0.5", "cut short at byte 5", "train/loss", "activation std", "1 warning",
                  "4 logged steps, 0 to 3", "activation/a"):  # fmt: skip
        assert words in read.text, words
    anchors = {attrs["id"] for _, attrs in read.tags if "id" in attrs}
    links = {(attrs["href"] or "")[1:] for tag, attrs in read.tags if tag == "a"}
    assert links <= anchors
    assert {"finding-1", "activation-std", "histograms"} <= anchors
    assert f"{given[-1]['a', 'activation'].std:.3g}" in read.text
    unfolded = [i for i, (tag, attrs) in enumerate(read.tags) if tag == "details" and "open" in attrs]
    assert len(unfolded) == 2, "the map of activations, and the histogram of the tensor with a finding"
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_gets_out_of_its_place(name: str) -> None:
    found = Finding(0, Site(name, "activation"), name, "error", name, {name: name})
    frame = make_frame(0, {Site(name, "activation"): [1.0, math.nan], Site(name, name): [1.0]}, scalars={name: 1.0},
                       findings=[found])  # fmt: skip
    text = report_html.page(run_of(frame, problems=[name], directory=f"runs/{name}"))
    read = checked(text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    if name.isprintable():
        assert name in read.text


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=1, max_size=30), st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_any_name_and_any_numbers_make_a_sound_page(name: str, numbers: list[float]) -> None:
    given_frames = [
        make_frame(i, {Site(name, "activation"): [x, 0.5]}, scalars={name: x}) for i, x in enumerate(numbers)
    ]
    checked(report_html.page(run_of(*given_frames)))


def test_runs_of_next_to_nothing_make_a_page() -> None:
    checked(report_html.page(run_of()))
    nothing_finite = make_frame(0, {}, scalars={"a/b": math.nan})
    empty = make_frame(3, {Site("x", "activation"): []})
    for frame in (make_frame(0, {}), nothing_finite, empty, make_frame(histograms=False)):
        checked(report_html.page(run_of(frame)))


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = write_run(tmp_path / "r", training_frame(0), training_frame(1))
    assert commands.main(["report", str(where), "--html", str(tmp_path / "p.html")]) == 0
    assert "p.html" in capsys.readouterr().out
    read = checked((tmp_path / "p.html").read_text(encoding="utf-8"))
    for words in ("activation zero fraction", "gradient norm", "weight norm", "weight_gradient norm", "update ratio"):
        assert words in read.text
    assert commands.main(["report", str(where), "--html", str(tmp_path / "no" / "p.html")]) == 2


# --- Pictures -----------------------------------------------------------------------------------------


def pixels(uri: str) -> np.ndarray:
    """A PNG read back by hand: a palette number a pixel."""
    data = base64.b64decode(uri.partition(",")[2])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(name + content)
        chunks[name] = content
        at += 12 + length
    width, height, depth, colour = struct.unpack_from(">IIBB", chunks[b"IHDR"])
    assert (depth, colour) == (8, 3)
    assert chunks[b"PLTE"] == PALETTE
    assert chunks[b"tRNS"][255] == 0
    return np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)[:, 1:]


def test_colours_go_from_the_least_to_the_most_and_what_is_wrong_or_absent_has_its_own() -> None:
    values = np.array([[1.0, 2.0, 3.0, math.nan, math.nan]])
    wrong = np.array([[False, False, False, True, False]])
    image = pixels(heatmap.picture(values, wrong, Scale.of(values)))
    assert image.tolist() == [[0, round((LEVELS - 1) / 2), LEVELS - 1, 254, 255]]


def test_the_scale_is_logarithmic_where_numbers_are_positive_and_wide() -> None:
    wide = Scale.of(np.array([0.0, 1e-4, 1e-2, 1.0]))
    assert wide.logarithmic
    assert (wide.low, wide.high) == (1e-4, 1.0)
    assert wide.levels(np.array([0.0, 1e-4, 1e-2, 1.0])).tolist() == [0, 0, round((LEVELS - 1) / 2), LEVELS - 1]
    assert not Scale.of(np.array([-1.0, 1e-4, 1.0])).logarithmic
    assert not Scale.of(np.array([1.0, 50.0])).logarithmic
    assert "logarithmic" in heatmap.legend(wide, wrong=False)


def test_lightness_rises_all_along_the_scale() -> None:
    colours = np.frombuffer(PALETTE, np.uint8).reshape(-1, 3)[:LEVELS].astype(float) / 255
    lightness = (colours**2.2) @ np.array([0.2126, 0.7152, 0.0722])
    assert (lightness[4:] > lightness[:-4]).all()  # neighbours may round to the same
    assert lightness[-1] > 10 * lightness[0]


def grid_of(values: np.ndarray) -> Grid:
    shape = values.shape
    names = tuple(f"m{i}" for i in range(shape[0]))
    return Grid("activation", "std", names, np.arange(shape[1]) * 10, values, np.zeros(shape, int), ~np.isnan(values))


def test_thinned_columns_show_the_value_furthest_from_zero_and_lose_no_nan() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 1003))
    values[1, 500:520] = math.nan
    whole = grid_of(values)
    whole.bad[2, 778] = 4
    thin = whole.thinned(200)
    assert thin.values.shape == (3, 200)
    starts = [*(np.arange(200) * 1003 // 200), 1003]
    for row in range(3):
        for column in range(200):
            part = values[row, starts[column] : starts[column + 1]]
            known = part[~np.isnan(part)]
            if len(known):
                assert abs(thin.values[row, column]) == np.abs(known).max()
                assert thin.seen[row, column]
            else:
                assert math.isnan(thin.values[row, column])
                assert not thin.seen[row, column]
    assert thin.wrong.sum() == 1
    assert thin.bad.sum() == 4
    assert thin.steps[0] == 0
    assert grid_of(values[:, :150]).thinned(200).values.shape == (3, 150)


def test_a_page_says_when_steps_were_put_together() -> None:
    frames = [make_frame(s, {Site("x", "activation"): [1.0, s]}, histograms=False) for s in range(230)]
    assert "230 steps in 200 columns" in checked(report_html.page(run_of(*frames))).text


def test_what_is_not_finite_is_said_in_words_with_its_first_step() -> None:
    frames = [make_frame(s, {Site("x", "activation"): [1.0], Site("y", "activation"): [math.nan if s == 2 else 1.0]})
              for s in range(4)]  # fmt: skip
    text = checked(report_html.page(run_of(*frames))).text
    assert "NaN or infinite values in 1 of 2 rows, first in y at step 2." in text
    assert report_data.run_grids(run_of(*frames))[0].wrong.tolist() == [[False] * 4, [False, False, True, False]]


def test_an_update_of_a_weight_of_zero_is_nothing_wrong() -> None:
    frame = make_frame(0, {Site("b", "weight"): [0.0, 0.0], Site("b", "update"): [0.1, 0.1]})
    (ratio,) = [grid for grid in report_data.run_grids(run_of(frame)) if grid.kind == "update"]
    assert math.isnan(ratio.values[0, 0])
    assert not ratio.wrong.any()
    assert ratio.undefined.all()
    assert "no reference yet" in checked(report_html.page(run_of(frame))).text
    text = report_text.plain(report_text.run_report(run_of(frame), 100), 100)
    assert "no reference yet" in text
    assert "inf" not in text.replace("info", "")


def test_histograms_hold_every_element_whatever_is_folded() -> None:
    rng = np.random.default_rng(0)
    frame = make_frame(0, {Site("x", "activation"): np.concatenate([rng.normal(size=500), [0.0, 1e-15, -1e-9, 3e4]])})
    folded, buckets = report_html._merge_around_zero(frame.buckets)
    assert folded.sum() == 504
    assert len(buckets) == folded.shape[1] <= 2 * report_html.HALF_OCTAVES_SHOWN + 1
    assert buckets == sorted(buckets)
    ones, where = report_html._merge_around_zero(make_frame(0, {Site("x", "activation"): [5.0, 6.5]}).buckets)
    assert ones.sum() == 2
    assert [bucket_label(b) for b in where] == ["4", "6"]


def test_a_large_run_makes_a_small_page() -> None:
    sites = tuple(Site(f"layers.{i}.block", kind) for kind in ("activation", "gradient") for i in range(500))
    rng = np.random.default_rng(0)
    frames = []
    for step in range(250):
        values = np.zeros((1000, 9))
        values[:, 0], values[:, 2] = 100, rng.random(1000)
        counts = rng.integers(0, 50, size=(1000, 385)) if step % 50 == 0 else np.zeros((1000, 0), int)
        frames.append(Frame(step, 0.0, 0, sites, values, counts))
    text = report_html.page(run_of(*frames))
    assert len(text) < 3_000_000
    assert "more tensors are left out" in checked(text).text


def test_a_page_begins_with_the_verdict_and_curves_and_folds_notes() -> None:
    error = Finding(2, Site("x", "activation"), "exploding_activation", "error", "Exploding", {"since": 1})
    note = Finding(2, Site("x", "activation"), "low_precision", "info", "A note", {})
    data = {Site("x", "activation"): [1.0, -1.0]}
    frames = [
        make_frame(s, data, scalars={"train/loss": 1.0 + s}, findings=[error, note] if s == 2 else ()) for s in range(4)
    ]
    made = report_html.page(run_of(*frames))
    order = [made.index(part) for part in ('id="verdict"', "<polyline", "<b>error</b>", "1 note<", 'id="heat-maps"')]
    assert order == sorted(order)
    assert "since step 1, worst at 2, last at 2, 1 logged step" in checked(made).text


def test_findings_are_grouped_by_cause_and_what_followed_is_folded() -> None:
    first = Finding(1, None, "loss_spike", "warning", "The loss jumped", {})
    then = Finding(2, Site("x", "activation"), "non_finite", "error", "NaN in x", {})
    other = Finding(3, Site("y", "activation"), "dead_units", "warning", "Dead units in y", {"since": 0})
    data = {Site("x", "activation"): [1.0, -1.0], Site("y", "activation"): [1.0]}
    found = {1: [first], 2: [then], 3: [other]}
    made = report_html.page(run_of(*(make_frame(s, data, findings=found.get(s, ())) for s in range(5))))
    text = checked(made).text
    assert "loss spike (step 1) \u2192 NaN or infinity" in text
    folded = made[made.index("The loss jumped") : made.index("NaN in x")]
    assert "1 more of this cause" in folded
    assert made.count("<h3>") == 2, "two causes"


def test_many_layers_are_shown_by_role_with_all_of_them_folded() -> None:
    data = {Site(f"layers.{i}.{part}", "activation"): [0.0, 2.0 * (i + 1)] for i in range(41) for part in ("q", "k")}
    made = report_html.page(run_of(make_frame(0, data), make_frame(1, data)))
    text = checked(made).text
    assert "layers.*.q (41)" in text
    assert "all 82 layers" in text
    (std, *_) = report_data.run_grids(run_of(make_frame(0, data)))
    assert std.by_role().names == ("layers.*.q (41)", "layers.*.k (41)")
    assert std.by_role().values.tolist() == [[21.0], [21.0]], "the median"


def test_one_outlier_does_not_take_all_colours() -> None:
    values = np.concatenate([np.linspace(1.0, 2.0, 999), [1e6]]).reshape(10, 100)
    scale = Scale.robust(values)
    assert scale.low == pytest.approx(np.quantile(values, 0.01))
    assert scale.high == pytest.approx(np.quantile(values, 0.99))
    assert scale.beyond == 20
    assert "20 cells beyond" in heatmap.legend(scale, wrong=False)
    assert Scale.robust(np.linspace(1.0, 2.0, 1000)) == Scale.of(np.linspace(1.0, 2.0, 1000))
