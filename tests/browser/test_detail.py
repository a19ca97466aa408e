"""The detail panel in a real browser: what it draws, says, and does with answers that are late, missing or strange.

A small server hands out the panel's own files and a page; answers come from NumPy, so no TensorBoard is needed.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tbhooks

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
STATIC = Path(tbhooks.__file__).parent / "plugin" / "static"
OWN = sorted((STATIC / "detail").iterdir())
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}

PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<style>
:root { --ink: #202020; --ink-soft: #606060; --line: #d0d0d0; --paper: #f4f4f4; --panel: #ffffff;
        --accent: #0050c0; --bad: #b00020; --warn: #a06000; }
.dark { --ink: #eeeeee; --ink-soft: #a0a0a0; --line: #404040; --paper: #101010; --panel: #181818; }
body { margin: 0; font-family: sans-serif; }
</style><div id="box"></div><script type="module" src="page.js"></script>"""

# Answers are keyed by route and path. A path in `held` answers only when the test lets it, in the test's order.
SCRIPT = """import { createDetail } from "./detail/panel.js";
window.answers = {};
window.held = {};
window.asked = [];
window.picked = [];
window.closings = 0;
const reply = (key) => {
  const answer = window.answers[key] ?? (key.startsWith("samples ") ? { step: null } : undefined);
  if (answer && answer.error === undefined) return structuredClone(answer);
  return Promise.reject(new Error(answer ? answer.error : "no " + key));
};
const route = (name) => async (question) => {
  const key = name + " " + (question.path ?? question.run) + (question.step === undefined ? "" : " " + question.step);
  const found = key in window.answers || key in window.held ? key : name + " " + question.path;
  window.asked.push(key);
  if (found in window.held) await new Promise((resolve) => (window.held[found] = resolve));
  return reply(found);
};
window.detail = createDetail(document.getElementById("box"), {
  api: { distribution: route("distribution"), history: route("history"), samples: route("samples") },
  onClose: () => (window.closings += 1),
  onPickStep: (step) => window.picked.push(step),
  axis: "log",
});
"""


class Files(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.split("?")[0].lstrip("/") or "index.html"
        pages = {"index.html": PAGE, "page.js": SCRIPT}
        file = STATIC / name
        if name not in pages and not file.is_file():
            return self.send_error(404)
        body = pages[name].encode() if name in pages else file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", TYPES[Path(name).suffix])
        self.send_header("Content-Length", str(len(body)))
        self.send_header(
            "Content-Security-Policy", "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:"
        )
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page with an empty panel; whatever it complains about in its console fails the test."""
    context = browser.new_context(viewport={"width": 420, "height": 900}, device_scale_factor=2)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(5000)
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(address)
    until(opened, "Boolean(window.detail)")
    yield opened
    context.close()
    assert complaints == []


def until(page: Any, condition: str) -> None:
    """Waits for a condition; Playwright's own way needs `eval`, which the page's security policy forbids."""
    end = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came true: {condition}"
        page.wait_for_timeout(10)


# --- Answers, made with NumPy -------------------------------------------------------------------------------

_STARTS = np.sort(np.concatenate([2.0 ** np.arange(-64, 32), 1.5 * 2.0 ** np.arange(-64, 32)]))
_MOST = [np.finfo(np.float64).max]
EDGES = np.concatenate([np.negative(_MOST), -_STARTS[::-1], _STARTS, _MOST])
NAMES = ("p01", "p25", "p50", "p75", "p99")


def plain(value: float) -> float | str:
    return float(value) if np.isfinite(value) else {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(float(value))]


def stats_of(x: NDArray[np.float64]) -> dict[str, float | str]:
    finite = x[np.isfinite(x)]
    some = finite if finite.size else np.array([np.nan])
    numbers = {
        "count": x.size,
        "mean": some.mean(),
        "std": some.std(),
        "norm": np.sqrt(np.square(some).sum()),
        "rms": np.sqrt(np.square(some).mean()),
        "min": some.min(),
        "max": some.max(),
        "abs_max": np.abs(some).max(),
        "zero_fraction": (x == 0).mean(),
        "nan_count": np.isnan(x).sum(),
        "inf_count": np.isinf(x).sum(),
        "ratio": np.nan,
    }
    numbers |= dict(zip(NAMES, np.quantile(some, [0.01, 0.25, 0.5, 0.75, 0.99]), strict=True))
    return {name: plain(value) for name, value in numbers.items()}


def histogram(x: NDArray[np.float64]) -> tuple[list[float], list[int]]:
    """Counts in the signed half-octave buckets, trimmed, with the ends clipped to minimum and maximum."""
    finite = x[np.isfinite(x)]
    if not finite.size:
        return [], []
    counts, _ = np.histogram(finite, EDGES)
    first, last = np.flatnonzero(counts)[[0, -1]]
    edges = np.clip(EDGES[first : last + 2], finite.min(), finite.max())
    return edges.tolist(), counts[first : last + 1].tolist()


def distribution(
    x: NDArray[np.float64], step: int, histogram_step: int | None = -1, row_step: int | None = None
) -> dict[str, Any]:
    edges, counts = histogram(x)
    stored = step if histogram_step == -1 else histogram_step
    return {
        "step": step,
        "histogram_step": stored,
        "row_step": step if row_step is None else row_step,
        "stats": stats_of(x),
        "edges": edges if stored is not None else [],
        "counts": counts if stored is not None else [],
    }


def history(samples: Sequence[NDArray[np.float64]], steps: Sequence[int]) -> dict[str, Any]:
    rows = [stats_of(x) for x in samples]
    names = [name for name in rows[0] if name not in NAMES]
    counts = np.array([np.histogram(x[np.isfinite(x)], EDGES)[0] for x in samples])
    used = np.flatnonzero(counts.sum(axis=0))
    trim = slice(used[0], used[-1] + 1) if used.size else slice(0, 0)
    edges = EDGES[trim.start : trim.stop + 1] if used.size else EDGES[:0]
    return {
        "steps": list(steps),
        "stats": {name: [row[name] for row in rows] for name in names},
        "quantile_steps": list(steps),
        "quantiles": {name: [row[name] for row in rows] for name in NAMES},
        "ridges": {"steps": list(steps), "edges": edges.tolist(), "counts": counts[:, trim].tolist()},
    }


def normal(scale: float = 1.0, size: int = 4000, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=size) * scale


def answer(page: Any, **by_path: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for path, (at_step, over_steps) in by_path.items():
        put(page, f"distribution {path}", at_step)
        put(page, f"history {path}", over_steps)


def put(page: Any, key: str, value: dict[str, Any]) -> None:
    page.evaluate("([key, value]) => { window.answers[key] = value; }", [key, json.loads(json.dumps(value))])


def show(
    page: Any, *paths: str, step: int = 100, kind: str = "activation", dark: bool = False, wait: bool = True
) -> None:
    sites = [{"path": path, "index": "", "name": path, "colour": COLOURS[i]} for i, path in enumerate(paths)]
    page.evaluate("view => detail.show(view)", {"run": "r", "kind": kind, "sites": sites, "step": step, "dark": dark})
    if wait:
        settled(page)


def settled(page: Any) -> None:
    until(page, "[...document.querySelectorAll('.detail-section')].every(s => s.ariaBusy === 'false')")


def usual(page: Any, x: NDArray[np.float64] | None = None, **more: Any) -> NDArray[np.float64]:
    """One module `a` with five logged steps, shown at step 100."""
    x = normal() if x is None else x
    steps = [0, 50, 100, 150, 200]
    answer(page, a=(distribution(x, 100), history([x * s for s in (0.5, 0.7, 1, 1.2, 2)], steps)))
    show(page, "a", **more)
    return x


def choose(page: Any, part: str, name: str, value: str) -> None:
    page.locator(f".detail-{part} select[name='{name}']").select_option(value)


def bars(page: Any) -> NDArray[np.float64]:
    """[x0, x1, height] of every bar, in pixels, from left to right."""
    path = page.locator(".detail-distribution .detail-bars").first.get_attribute("d")
    boxes = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)H([\d.]+)V", path)
    return np.array(sorted((float(x0), float(x1), float(low) - float(top)) for x0, low, top, x1 in boxes))


def hover(page: Any, part: str, x: float, y: float) -> str:
    box = page.locator(f".detail-{part} .detail-cursor").bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    return str(page.locator(f".detail-{part} .detail-tooltip").inner_text())


def number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace(",", ""))


def label(page: Any, part: str) -> str:
    return str(page.locator(f".detail-{part} svg[role=img]").get_attribute("aria-label"))


def test_an_update_that_was_estimated_from_a_sample_says_so(page: Any) -> None:
    usual(page, kind="update")
    assert "Estimated" not in page.locator(".detail-stats").inner_text()
    x = normal()
    answer(page, b=(distribution(x, 100) | {"sampled": 0.125}, history([x], [100])))
    show(page, "b", kind="update")
    assert "Estimated from a sample of the elements: 13 % of b" in page.locator(".detail-stats").inner_text()


# --- The distribution ---------------------------------------------------------------------------------------


def test_every_bucket_has_the_same_width_and_its_count_as_height(page: Any) -> None:
    x = usual(page)
    choose(page, "distribution", "counts", "linear")
    drawn = bars(page)
    counts = np.histogram(x, EDGES)[0]
    expected = counts[counts > 0]
    widths = drawn[:, 1] - drawn[:, 0]
    assert len(drawn) == len(expected)
    assert np.ptp(widths) < 0.05
    np.testing.assert_allclose(
        drawn[:, 2] / drawn[:, 2].max(), np.maximum(expected / expected.max(), 1 / drawn[:, 2].max()), atol=0.01
    )


def test_the_negative_side_is_the_mirror_image_of_the_positive_one(page: Any) -> None:
    half = np.abs(normal())
    usual(page, np.concatenate([half, -half, np.zeros(10)]))
    drawn = bars(page)
    zero = drawn[len(drawn) // 2]
    middle = (zero[0] + zero[1]) / 2
    mirrored = 2 * middle - drawn[::-1, [1, 0]]
    np.testing.assert_allclose(drawn[:, :2], mirrored, atol=0.1)
    np.testing.assert_allclose(drawn[:, 2], drawn[::-1, 2], atol=0.1)


def test_ticks_are_signed_powers_of_ten_where_their_values_are(page: Any) -> None:
    usual(page)
    ticks = page.evaluate(
        """() => [...document.querySelectorAll('.detail-distribution .detail-tick-below')].map(t => ({
             x: Number(t.getAttribute('x')),
             base: t.firstChild.textContent,
             raised: t.querySelector('tspan')?.textContent ?? null}))"""
    )
    values = [
        number(t["base"]) if t["raised"] is None else np.sign(number(t["base"])) * 10 ** number(t["raised"])
        for t in ticks
    ]
    assert 0 in values
    assert min(values) < 0 < max(values)
    for tick, value in zip(ticks, values, strict=True):
        if value == 0:
            continue
        near = [hover(page, "distribution", tick["x"] + away, 100).splitlines()[0] for away in (-2, 2)]
        ends = [[number(end) for end in text.split(" to ")] for text in near]
        assert min(map(min, ends)) - abs(value) / 100 <= value <= max(map(max, ends)) + abs(value) / 100


def test_nothing_around_zero_makes_a_break_and_not_a_desert(page: Any) -> None:
    usual(page, np.concatenate([np.linspace(0.5, 2, 100), -np.linspace(0.5, 2, 100)]))
    choose(page, "distribution", "range", "step")
    drawn = bars(page)
    gaps = drawn[1:, 0] - drawn[:-1, 1]
    assert gaps.max() < (drawn[-1, 1] - drawn[0, 0]) / 2, "126 empty octaves take no more room than the values"
    slanted = [line for line in page.locator(".detail-distribution line.detail-axis").all() if is_slanted(line)]
    assert len(slanted) == 4, "two strokes on each side of zero"


def is_slanted(line: Any) -> bool:
    return all(line.get_attribute(f"{axis}1") != line.get_attribute(f"{axis}2") for axis in "xy")


def test_zeros_nan_and_inf_are_written_in_words_and_have_bars_of_their_own(page: Any) -> None:
    x = np.concatenate([normal(size=900), np.zeros(60), np.full(30, np.nan), np.full(10, np.inf)])
    usual(page, x)
    words = page.locator(".detail-distribution .detail-words").inner_text()
    assert words == "1,000 elements, 6% zeros (60), 30 NaN, 10 Inf"
    assert len(page.query_selector_all(".detail-bad-bar")) == 2
    names = page.locator(".detail-distribution text.detail-bad").all_text_contents()
    assert names == ["NaN", "Inf"]
    for column, tooltip in ((-1, "10 (1%)"), (-2, "30 (3%)")):
        box = page.query_selector_all(".detail-bad-bar")[column].bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
        assert tooltip in page.locator(".detail-distribution .detail-tooltip").inner_text()


def test_the_bucket_of_zero_tells_how_many_are_in_it(page: Any) -> None:
    usual(page, np.concatenate([normal(size=900), np.zeros(100)]))
    drawn = bars(page)
    texts = [hover(page, "distribution", (x0 + x1) / 2, 100) for x0, x1, _ in drawn]
    about_zero = [text for text in texts if text.startswith("zero")]
    assert len(about_zero) == 1
    assert "100 (10%)" in about_zero[0]


def test_the_tooltip_counts_what_numpy_counts(page: Any) -> None:
    x = usual(page)
    counts = np.histogram(x, EDGES)[0]
    tooltip = [hover(page, "distribution", (b[0] + b[1]) / 2, 100) for b in bars(page)]
    found = [int(number(re.search(r"([\d,]+) \(", text).group(1))) for text in tooltip]  # type: ignore[union-attr]
    assert found == counts[counts > 0].tolist()


def test_a_histogram_of_another_step_says_so(page: Any) -> None:
    answer(page, a=(distribution(normal(), 1234, histogram_step=1200, row_step=1234), history([normal()], [1234])))
    show(page, "a", step=1234)
    note = page.locator(".detail-distribution .detail-note").inner_text()
    assert note == "histogram of step 1200, the nearest logged one with a histogram; you chose 1234"
    assert "at step 1200" in label(page, "distribution")


def test_the_histogram_of_the_chosen_step_needs_no_note(page: Any) -> None:
    usual(page)
    assert not page.locator(".detail-distribution .detail-note").is_visible()


def test_nothing_moves_when_a_step_has_no_histogram_of_its_own(page: Any) -> None:
    x = usual(page)
    before = [plot.bounding_box() for plot in page.locator(".detail-plot").all()]
    put(page, "distribution a 90", distribution(x, 90, histogram_step=100, row_step=100))
    show(page, "a", step=90)
    assert page.locator(".detail-distribution .detail-note").is_visible()
    assert [plot.bounding_box() for plot in page.locator(".detail-plot").all()] == before


def test_without_histograms_the_stats_and_their_history_remain(page: Any) -> None:
    over_steps = history([normal(), normal()], [0, 100]) | {
        "quantile_steps": [],
        "quantiles": {name: [] for name in NAMES},
        "ridges": {"steps": [], "edges": [], "counts": []},
    }
    answer(page, a=(distribution(normal(), 100, histogram_step=None), over_steps))
    show(page, "a")
    assert "no histogram is stored" in page.locator(".detail-distribution .detail-note").inner_text()
    assert not page.locator(".detail-distribution .detail-plot").is_visible()
    assert not page.locator(".detail-ridges").is_visible()
    assert page.locator(".detail-lines .detail-line").count() == 1
    assert page.locator(".detail-table").is_visible()


@pytest.mark.parametrize(
    "x", [np.zeros(8), np.full(8, np.nan), np.full(8, 0.7), np.array([1e-30, 1e30]), np.array([-5.0])], ids=str
)
def test_strange_tensors_are_drawn_without_a_complaint(page: Any, x: NDArray[np.float64]) -> None:
    usual(page, x)
    assert page.locator(".detail-distribution svg").bounding_box()["height"] > 100
    assert not re.search(
        r'\b(d|[rxy]|[cxy][12xy]|width|height|style|opacity)="[^"]*(NaN|Infinity|undefined)',
        page.locator(".detail-grid").inner_html(),
    )


def test_where_nothing_is_finite_the_text_says_so(page: Any) -> None:
    usual(page, np.full(8, np.nan))
    assert "8 elements none of them finite" in label(page, "distribution")
    assert "At step 200: no finite element." in label(page, "ridges")


def test_a_constant_fills_one_bucket(page: Any) -> None:
    usual(page, np.full(8, 0.7))
    assert len(bars(page)) == 1
    assert "0.700" in hover(page, "distribution", bars(page)[0, :2].mean(), 100)


# --- History ------------------------------------------------------------------------------------------------


def step_pixel(page: Any, part: str) -> float:
    return float(page.locator(f".detail-{part} line.detail-chosen").get_attribute("x1"))


def test_the_chosen_step_is_marked_in_every_history(page: Any) -> None:
    usual(page)
    for part in ("lines", "bands"):
        assert page.locator(f".detail-{part} text.detail-chosen-label").text_content() == "step 100"
    assert page.locator(".detail-ridges text.detail-chosen-label").text_content() == "100"
    assert page.locator(".detail-ridge-chosen").count() == 1


@pytest.mark.parametrize("part", ["lines", "bands"])
def test_clicking_a_history_picks_the_nearest_logged_step(page: Any, part: str) -> None:
    usual(page)
    plot = page.locator(f".detail-{part} .detail-cursor")
    plot.click(position={"x": step_pixel(page, part) + 5, "y": 80})
    show(page, "a", step=200)
    plot.click(position={"x": step_pixel(page, part) - 3, "y": 80})
    assert page.evaluate("picked") == [100, 200]


def test_clicking_a_ridge_picks_its_step(page: Any) -> None:
    usual(page)
    labels = page.locator(".detail-ridges .detail-tick-left")
    for text in ("0", "200"):
        mark = labels.get_by_text(text, exact=True).first
        page.locator(".detail-ridges .detail-cursor").click(
            position={"x": 200, "y": float(mark.get_attribute("y")) - 5}
        )
    assert page.evaluate("picked") == [0, 200]


def test_bands_tell_the_quantiles_numpy_finds(page: Any) -> None:
    x = usual(page)
    tooltip = hover(page, "bands", step_pixel(page, "bands"), 60)
    found = dict(re.findall(r"(max|p99|p75|median|p25|p01|min)\s+(\S+)", tooltip))
    expected = dict(zip(NAMES, np.quantile(x, [0.01, 0.25, 0.5, 0.75, 0.99]), strict=True)) | {
        "max": x.max(),
        "min": x.min(),
    }
    assert len(found) == 7
    for name, text in found.items():
        assert number(text) == pytest.approx(expected["p50" if name == "median" else name], rel=6e-3)


def test_steps_that_are_not_finite_are_gaps_with_a_mark(page: Any) -> None:
    over_steps = history([normal()] * 5, [0, 50, 100, 150, 200])
    over_steps["stats"]["std"] = [1.0, "nan", None, "inf", 2.0]
    answer(page, a=(distribution(normal(), 100), over_steps))
    show(page, "a")
    assert page.locator(".detail-lines .detail-line").get_attribute("d").count("M") == 2
    assert page.locator(".detail-lines .detail-broken").get_attribute("d").count("M") == 2
    assert page.locator(".detail-lines .detail-words").inner_text() == "Red marks: not finite at 2 steps."
    assert "not finite at 2 steps" in label(page, "lines")


def test_many_steps_are_thinned_without_losing_a_spike(page: Any) -> None:
    over_steps = history([normal()], [0])
    values = np.ones(20_000)
    values[12_345] = 500.0
    over_steps["steps"] = list(range(20_000))
    over_steps["stats"] = {"std": values.tolist(), "min": (-values).tolist(), "max": values.tolist()}
    answer(page, a=(distribution(normal(), 100), over_steps))
    show(page, "a")
    choose(page, "lines", "scale", "linear")
    path = page.locator(".detail-lines .detail-line").get_attribute("d")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert len(heights) < 3000
    assert min(heights) < 40 < 150 < max(heights)


def test_ridges_show_first_and_last_step_and_at_most_what_can_be_distinguished(page: Any) -> None:
    steps = list(range(0, 600, 10))
    answer(page, a=(distribution(normal(), 330), history([normal(seed=s) for s in steps], steps)))
    show(page, "a", step=330)
    assert 20 <= page.locator(".detail-ridge:not(.detail-ridge-chosen)").count() <= 31
    named = page.locator(".detail-ridges .detail-tick-left").all_text_contents()
    assert {"0", "330", "590"} <= set(named)


def test_the_arrows_in_the_head_walk_along_logged_steps(page: Any) -> None:
    usual(page)
    page.get_by_role("button", name="next logged step").click()
    page.get_by_role("button", name="previous logged step").click()
    show(page, "a", step=120)
    page.get_by_role("button", name="previous logged step").click()
    page.get_by_role("button", name="next logged step").click()
    assert page.evaluate("picked") == [150, 50, 100, 150]
    show(page, "a", step=200)
    assert page.get_by_role("button", name="next logged step").is_disabled()


# --- The table ----------------------------------------------------------------------------------------------


def test_the_table_has_three_digits_to_read_and_all_of_them_to_keep(page: Any) -> None:
    x = usual(page)
    cells = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('.detail-table tbody tr:not(.detail-group)')].map(
             row => [row.cells[0].textContent, [row.cells[1].textContent, row.cells[1].title]]))"""
    )
    expected = {
        "mean": x.mean(),
        "std": x.std(),
        "norm": np.sqrt(np.square(x).sum()),
        "min": x.min(),
        "p99": np.quantile(x, 0.99),
    }
    for name, value in expected.items():
        assert float(cells[name][1]) == value
        assert number(cells[name][0]) == pytest.approx(value, rel=6e-3)
        assert len(re.sub(r"e.*|\D|^0\.0*", "", cells[name][0].lstrip("\u2212").lstrip("0."))) <= 3
    assert cells["count"][0] == "4,000"
    assert "ratio" not in cells
    assert page.locator(".detail-table th[scope=rowgroup]").count() == 4


def test_copy_gives_exact_numbers_with_tabs(page: Any) -> None:
    x = usual(page)
    page.locator(".detail-stats button").click()
    playwright.expect(page.locator(".detail-copied")).to_have_text("copied")
    lines = dict(line.split("\t") for line in page.evaluate("navigator.clipboard.readText()").splitlines())
    assert lines["stat"] == "a @ step 100"
    assert float(lines["mean"]) == x.mean()


def test_words_for_numbers_stay_words(page: Any) -> None:
    at_step = distribution(normal(), 100)
    at_step["stats"] |= {"max": "inf", "min": "-inf", "mean": "nan"}
    answer(page, a=(at_step, history([normal()], [100])))
    show(page, "a")
    texts = page.locator(".detail-table td").all_inner_texts()
    assert {"NaN", "Inf", "\u2212Inf"} <= set(texts)


def test_for_updates_the_ratio_comes_first(page: Any) -> None:
    at_step, over_steps = distribution(normal(), 100), history([normal()] * 3, [0, 100, 200])
    at_step["stats"]["ratio"] = 0.00123
    over_steps["stats"]["ratio"] = [0.001, 0.00123, 0.002]
    answer(page, a=(at_step, over_steps))
    show(page, "a", kind="update")
    assert page.locator(".detail-headline").inner_text() == "ratio 0.00123"
    assert page.locator(".detail-table tbody th[scope=row]").first.inner_text() == "ratio"
    assert page.locator(".detail-lines h3").inner_text() == "ratio over steps"


def test_kinds_of_evaluation_are_named(page: Any) -> None:
    usual(page, kind="eval.gradient")
    assert page.locator(".detail-about").inner_text() == "gradients of activations in evaluation, run r"
    assert page.locator(".detail-lines h3").inner_text() == "norm over steps"


# --- Comparing ----------------------------------------------------------------------------------------------


def compared(page: Any) -> dict[str, NDArray[np.float64]]:
    tensors = {
        name: normal(scale, size=size, seed=i)
        for i, (name, scale, size) in enumerate([("a", 1, 500), ("b", 10, 900), ("c", 0.1, 200), ("d", 1e-3, 100)])
    }
    for name, x in tensors.items():
        answer(page, **{name: (distribution(x, 100), history([x, 2 * x, 3 * x], [0, 100, 200]))})
    show(page, *tensors)
    return tensors


def test_four_modules_are_outlines_lines_and_columns_in_their_colours(page: Any) -> None:
    tensors = compared(page)
    for drawn in (".detail-distribution .detail-outline", ".detail-lines .detail-line"):
        strokes = page.evaluate(f"[...document.querySelectorAll('{drawn}')].map(e => getComputedStyle(e).stroke)")
        assert strokes == [f"rgb({int(c[1:3], 16)}, {int(c[3:5], 16)}, {int(c[5:7], 16)})" for c in COLOURS]
    assert [text.strip() for text in page.locator(".detail-table thead th").all_inner_texts()] == ["stat", *tensors]
    row = page.locator(".detail-table tr", has=page.get_by_role("rowheader", name="std", exact=True)).locator("td")
    titles = [float(cell.get_attribute("title")) for cell in row.all()]
    assert titles == [x.std() for x in tensors.values()]
    assert not page.locator(".detail-ridges").is_visible()


def test_modules_of_different_size_are_compared_by_share(page: Any) -> None:
    tensors = compared(page)
    assert (
        page.locator(".detail-distribution .detail-axis-title").text_content()
        == "share of elements per half-octave bin"
    )
    tooltip = hover(page, "distribution", 330, 100)
    assert all(name in tooltip for name in tensors)
    small = normal(size=300)
    large = np.repeat(small, 7)
    answer(
        page,
        e=(distribution(small, 100), history([small], [100])),
        f=(distribution(large, 100), history([large], [100])),
    )
    show(page, "e", "f")
    first, second = (path.get_attribute("d") for path in page.locator(".detail-distribution .detail-outline").all())
    assert first == second


@pytest.mark.parametrize("mode", ["linear", "log"])
def test_shares_are_labelled_in_percent_on_both_scales(page: Any, mode: str) -> None:
    compared(page)
    choose(page, "distribution", "counts", mode)
    ticks = page.locator(".detail-distribution .detail-tick-left").all_text_contents()
    assert len(ticks) >= 2
    assert all(re.fullmatch(r"[\d.]+%", tick) for tick in ticks)
    assert page.evaluate(OVERLAPS) == []


def test_any_stat_can_be_compared_on_both_scales(page: Any) -> None:
    tensors = compared(page)
    choose(page, "lines", "stat", "abs_max")
    assert page.locator(".detail-lines h3").inner_text() == "abs_max over steps"
    for mode in ("linear", "log"):
        choose(page, "lines", "scale", mode)
        tooltip = hover(page, "lines", step_pixel(page, "lines"), 60)
        for name, x in tensors.items():
            found = re.search(rf"\b{name}\s+(\S+)", tooltip)
            assert found
            assert number(found.group(1)) == pytest.approx(2 * np.abs(x).max(), rel=6e-3)
    assert page.locator(".detail-lines tspan.detail-raised").count() > 0


def test_one_module_that_fails_does_not_hide_the_others(page: Any) -> None:
    usual(page)
    put(page, "distribution b", {"error": "no site 'b'; the nearest is 'a'"})
    put(page, "history b", {"error": "no site 'b'; the nearest is 'a'"})
    show(page, "a", "b")
    assert page.locator(".detail-distribution .detail-problems").inner_text() == "b: no site 'b'; the nearest is 'a'"
    assert page.locator(".detail-distribution .detail-bars").count() == 1


# --- Answers that are late, or none -------------------------------------------------------------------------


def test_a_late_answer_never_overwrites_a_newer_one(page: Any) -> None:
    usual(page)
    early, late = normal(1, size=111), normal(1, size=222)
    put(page, "distribution a 50", distribution(early, 50))
    put(page, "distribution a 150", distribution(late, 150))
    page.evaluate("held['distribution a 50'] = null")
    show(page, "a", step=50, wait=False)
    until(page, "held['distribution a 50'] !== null")
    show(page, "a", step=150)
    assert "222 elements" in page.locator(".detail-distribution .detail-words").inner_text()
    page.evaluate("held['distribution a 50']()")
    page.wait_for_timeout(400)
    assert "222 elements" in page.locator(".detail-distribution .detail-words").inner_text()
    assert page.locator(".detail-step").inner_text() == "step 150"


def test_the_old_picture_stays_until_the_new_one_is_complete(page: Any) -> None:
    usual(page)
    before = page.locator(".detail-distribution .detail-bars").get_attribute("d")
    answer(page, b=(distribution(normal(100), 100), history([normal(100)], [100])))
    page.evaluate("held['distribution b'] = null; held['history b'] = null")
    show(page, "b", wait=False)
    until(page, "Boolean(held['distribution b'] && held['history b'])")
    page.evaluate("held['history b']()")
    page.wait_for_timeout(400)
    assert page.locator(".detail-distribution .detail-bars").get_attribute("d") == before
    assert page.locator(".detail-distribution").get_attribute("aria-busy") == "true"
    page.evaluate("held['distribution b']()")
    settled(page)
    assert page.locator(".detail-distribution .detail-bars").get_attribute("d") != before


def test_a_slow_history_does_not_keep_the_distribution_back(page: Any) -> None:
    answer(page, a=(distribution(normal(), 100), history([normal()], [100])))
    page.evaluate("held['history a'] = null")
    show(page, "a", wait=False)
    playwright.expect(page.locator(".detail-distribution .detail-bars")).to_have_count(1)
    assert page.locator(".detail-lines").get_attribute("aria-busy") == "true"


def test_a_picture_is_drawn_again_only_for_an_answer_that_it_shows(page: Any) -> None:
    answer(page, a=(distribution(normal(), 100), history([normal(), normal(2.0)], [100, 200])))
    page.evaluate("held['distribution a'] = null; held['samples r 100'] = null")
    first = "document.querySelector('.detail-' + name + ' .detail-picture').firstElementChild"
    page.evaluate(f"() => {{ window.drawn = (name) => [{first}]; }}")
    show(page, "a", wait=False)
    until(page, "Boolean(drawn('bands')[0] && drawn('ridges')[0] && held['distribution a'])")
    page.evaluate("window.before = ['bands', 'ridges', 'lines'].flatMap(drawn); held['distribution a']()")
    settled(page)
    until(page, "Boolean(held['samples r 100'])")
    page.evaluate("window.before.push(...drawn('distribution')); held['samples r 100']()")
    page.wait_for_timeout(100)
    assert page.evaluate("before.map((node) => node !== null && node.isConnected)") == [True] * 4
    page.get_by_label("scale").first.select_option("linear")
    assert page.evaluate("before.map((node) => node.isConnected)") != [True] * 4


def test_before_the_first_answer_it_says_that_it_is_loading(page: Any) -> None:
    page.evaluate("held['distribution a'] = null; held['history a'] = null")
    show(page, "a", wait=False)
    assert page.locator(".detail-waiting").is_visible()
    assert page.locator(".detail-name").inner_text() == "a"


def test_the_servers_sentence_is_shown_and_goes_away_again(page: Any) -> None:
    sentence = "unknown path 'a': did you mean 'b'?"
    put(page, "distribution a", {"error": sentence})
    put(page, "history a", {"error": sentence})
    show(page, "a")
    assert page.locator(".detail-problems:visible").all_inner_texts() == [sentence]
    usual(page)
    assert page.locator(".detail-problems:visible").count() == 0
    assert page.locator(".detail-bars").count() == 1


def test_a_question_that_fails_is_asked_once_and_not_for_ever(page: Any) -> None:
    page.evaluate(
        "() => { window.answers['samples r 100'] = window.answers['samples undefined'] = { error: 'gone' }; }"
    )
    usual(page)
    page.wait_for_timeout(100)
    assert page.evaluate("asked.filter((key) => key.startsWith('samples')).length") == 1


def test_the_same_cell_again_is_drawn_without_asking_again(page: Any) -> None:
    usual(page)
    asked = page.evaluate("asked.length")
    show(page, "a", dark=True)
    assert page.evaluate("asked.length") == asked


def test_clear_empties_the_place_and_show_fills_it_again(page: Any) -> None:
    usual(page)
    page.evaluate("detail.clear()")
    assert page.evaluate("document.getElementById('box').childElementCount") == 0
    usual(page)
    assert page.locator(".detail-bars").is_visible()


# --- Reading, pointing, typing ------------------------------------------------------------------------------


def test_every_chart_has_its_main_numbers_as_text(page: Any) -> None:
    x = usual(page)
    tooltip = label(page, "distribution")
    assert f"{x.size:,} elements" in tooltip
    assert "0% zeros, no NaN, no Inf" in tooltip
    assert [float(n) for n in re.search(r"from \u2212([\d.]+) to ([\d.]+)", tooltip).groups()] == pytest.approx(  # type: ignore[union-attr]
        [-x.min(), x.max()], rel=6e-3
    )
    assert "5 steps from 0 to 200" in label(page, "bands")
    assert "std from" in label(page, "lines")
    assert "At step 200" in label(page, "ridges")


def test_all_of_it_can_be_reached_and_read_with_the_keyboard(page: Any) -> None:
    usual(page)
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.name"))
    assert {
        "Buckets of the distribution",
        "Steps of the stat",
        "Steps of the quantiles",
        "Steps of the ridgeline",
    } <= reached
    assert {"counts", "axis", "stat", "scale", "Close the detail panel"} <= reached


def test_arrow_keys_read_values_and_enter_picks_the_step(page: Any) -> None:
    usual(page)
    cursor = page.locator(".detail-lines .detail-cursor")
    cursor.focus()
    page.keyboard.press("ArrowRight")
    assert cursor.get_attribute("aria-valuetext").startswith("step 100")
    page.keyboard.press("ArrowRight")
    assert cursor.get_attribute("aria-valuetext").startswith("step 150")
    assert page.locator(".detail-lines .detail-tooltip").is_visible()
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate("picked") == [150, 200]
    assert not page.locator(".detail-lines .detail-tooltip").is_visible()


def test_the_close_button_closes(page: Any) -> None:
    usual(page)
    page.get_by_role("button", name="Close").click()
    assert page.evaluate("closings") == 1


def test_hostile_names_stay_names(page: Any) -> None:
    name = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    answer(
        page,
        **{name: (distribution(normal(), 100), history([normal()], [100]))},
        b=(distribution(normal(), 100), history([normal()], [100])),
    )
    show(page, name, "b")
    hover(page, "lines", step_pixel(page, "lines"), 60)
    assert page.locator(".detail-name").first.inner_text() == name
    assert page.locator("#box img, #box script").count() == 0


def test_a_very_long_name_does_not_widen_the_panel(page: Any) -> None:
    name = "x" * 300
    answer(page, **{name: (distribution(normal(), 100), history([normal()], [100]))})
    show(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


SHAPES = {
    "normal": normal(),
    "tiny": normal(1e-12),
    "relu": np.maximum(normal(), 0),
    "wide": np.concatenate([np.logspace(-15, 9, 500), -np.logspace(-10, 3, 300), [np.nan]]),
    "outlier": np.concatenate([normal(), [1e9, -1e-15]]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_tick_label_touches_another_at_any_width(page: Any, shape: str) -> None:
    usual(page, SHAPES[shape])
    for width in (380, 460, 560, 700, 720, 900):
        page.set_viewport_size({"width": width, "height": 900})
        until(page, f"document.querySelector('.detail').clientWidth === {width}")
        page.wait_for_timeout(60)
        for mode in ("log", "linear"):
            choose(page, "bands", "scale", mode)
            choose(page, "distribution", "counts", mode)
            assert page.evaluate(OVERLAPS) == [], (width, mode)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


OVERLAPS = """() => [...document.querySelectorAll('.detail-picture')].flatMap(picture => {
  if (!picture.checkVisibility()) return [];
  const texts = [...picture.querySelectorAll('text')].filter(t => t.textContent);
  const boxes = texts.map(t => t.getBBox());
  const limit = picture.clientWidth;
  const outside = texts.filter((_, i) => boxes[i].x < -1 || boxes[i].x + boxes[i].width > limit + 1);
  const found = outside.map(t => 'outside: ' + t.textContent);
  const slack = 2.5;  // boxes are as high as the font's line, letters are not
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
    const beside = a.x + a.width <= b.x || b.x + b.width <= a.x;
    const above = a.y + a.height - slack <= b.y + slack || b.y + b.height - slack <= a.y + slack;
    if (!beside && !above)
      found.push(texts[i].textContent + ' | ' + texts[i + 1 + j].textContent);
  }));
  return found;
})"""


def test_charts_follow_the_width_of_their_place(page: Any) -> None:
    usual(page)
    narrow = float(page.locator(".detail-distribution svg").get_attribute("width"))
    page.set_viewport_size({"width": 600, "height": 900})
    until(page, f"document.querySelector('.detail-distribution svg').width.baseVal.value > {narrow + 100}")
    assert bars(page)[-1, 1] > narrow


def test_dark_and_light_come_from_the_variables(page: Any) -> None:
    usual(page)
    ink = "getComputedStyle(document.querySelector('.detail-tick')).fill"
    assert page.evaluate(ink) == "rgb(32, 32, 32)"
    page.evaluate("document.documentElement.classList.add('dark')")
    show(page, "a", dark=True)
    assert page.evaluate(ink) == "rgb(238, 238, 238)"
    assert page.evaluate("getComputedStyle(document.querySelector('.detail')).backgroundColor") == "rgb(24, 24, 24)"


# --- The files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_the_files_are_small_and_set_names_as_text_only(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|console\.|eval\(|new Function", text)
    assert re.findall(r"https?://[^\s\"']+", text) in ([], ["http://www.w3.org/2000/svg"])
