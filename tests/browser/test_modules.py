"""The tab's pure functions, run where they live: in a browser, against numbers from NumPy or plain sense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.browser_tab import Board, Pages

STATIC = "/data/plugin/tbhooks/"


@pytest.fixture(scope="module")
def page(browser: Any, board: Board) -> Iterator[Any]:
    """A page of the server's own that runs nothing: modules are imported into it."""
    opened = browser.new_context().new_page()
    opened.goto(board.address + STATIC + "core/style.css")
    yield opened
    opened.context.close()


def run(page: Any, module: str, expression: str, **given: Any) -> Any:
    """Evaluates an expression with a module's exports as `m` and the given values by name."""
    names = ", ".join(given)
    body = f"async ([file, {{ {names} }}]) => {{ const m = await import(file); return {expression}; }}"
    return page.evaluate(body, [STATIC + module, given])


def sites(*names: str) -> list[dict[str, str]]:
    return [{"path": name, "index": "", "name": name} for name in names]


# --- Kinds ---


def test_kinds_of_single_channels_are_called_so(page: Any) -> None:
    words = '["weight_gradient", "eval.activation", "channel.activation"].map(m.kindWords)'
    wanted = ["weight gradient", "activation (evaluation)", "activation by channel"]
    assert run(page, "core/runs.js", words) == wanted
    answer = run(page, "detail/cells.js", 'm.kindOf("channel.weight")')
    assert answer == {"base": "weight", "words": "weights by channel", "headline": "norm"}


# --- tree.js ---

TREE = "m.buildTree(given)"
LABELS = "m.visibleRows(m.buildTree(given), depth, new Set(toggled)).map((row) => [row.depth, row.label, row.open])"


def test_rows_stand_in_execution_order_below_their_modules(page: Any) -> None:
    rows = run(page, "map/tree.js", LABELS, given=sites("b.x", "b.y", "b", "a"), depth=9, toggled=[])
    assert rows == [[0, "b", True], [1, "x", False], [1, "y", False], [0, "a", False]]


def test_gradients_stand_in_the_order_of_the_forward_pass(page: Any) -> None:
    in_order = "m.inOrderOf(forward, backward).map((site) => site.name)"
    backward = sites("(root)", "late", "head", "b", "a")
    assert run(page, "map/matrix.js", in_order, forward=sites("a", "b", "head", "(root)"), backward=backward) == [
        "a", "b", "head", "(root)", "late",
    ]  # fmt: skip
    assert run(page, "map/matrix.js", in_order, forward=[], backward=backward) == [site["name"] for site in backward]


def test_a_group_that_holds_only_a_group_is_one_row(page: Any) -> None:
    rows = run(page, "map/tree.js", LABELS, given=sites("a.b.c.x", "a.b.c.y"), depth=9, toggled=[])
    assert rows == [[0, "a.b.c", True], [1, "x", False], [1, "y", False]]


def test_outputs_of_one_module_stand_below_it(page: Any) -> None:
    given = [{"path": "lstm", "index": f"[{i}]", "name": f"lstm[{i}]"} for i in range(2)]
    rows = run(page, "map/tree.js", LABELS, given=given, depth=9, toggled=[])
    assert rows == [[0, "lstm", True], [1, "[0]", False], [1, "[1]", False]]


def test_depth_closes_and_a_toggle_wins_over_it(page: Any) -> None:
    given = sites("a.b.x", "a.b.y", "a.c", "d")
    assert [row[1] for row in run(page, "map/tree.js", LABELS, given=given, depth=1, toggled=[])] == ["a", "d"]
    assert [row[1] for row in run(page, "map/tree.js", LABELS, given=given, depth=1, toggled=["a"])] == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert [row[1] for row in run(page, "map/tree.js", LABELS, given=given, depth=9, toggled=["a.b"])] == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_a_hidden_module_is_revealed_or_shown_by_its_closed_group(page: Any) -> None:
    given = sites("a.b.x", "a.b.y", "a.c", "d")
    opened = run(page, "map/tree.js", f"[...m.revealing({TREE}, 'a.b.x', 1, new Set())]", given=given)
    assert opened == ["a", "a.b"]
    shown = run(
        page,
        "map/tree.js",
        "((root) => m.rowFinder(root, m.visibleRows(root, 2, new Set()))(site))(m.buildTree(given))",
        given=given, site=given[0],
    )  # fmt: skip
    assert shown == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [("B", ["a.b.x", "a.b.y"]), ("/\\.[xc]$/", ["a.b.x", "a.c"]), ("/^d", ["d"]), ("nothing", []), ("<b>", [])],
)
def test_search_takes_text_in_any_case_or_a_regular_expression(page: Any, text: str, found: list[str]) -> None:
    given = sites("a.b.x", "a.b.y", "a.c", "d")
    answer = run(page, "map/tree.js", f"m.matchingRows({TREE}, text)", given=given, text=text)
    assert [row["label"] for row in answer["rows"]] == found
    assert answer["error"] is None


def test_a_wrong_regular_expression_hides_nothing(page: Any) -> None:
    answer = run(page, "map/tree.js", f"m.matchingRows({TREE}, '/(/')", given=sites("a", "b"))
    assert len(answer["rows"]) == 2
    assert "group" in answer["error"]


# --- matrix.js ---


def test_cells_meet_halfway_and_gaps_stay_gaps(page: Any) -> None:
    edges = run(page, "map/matrix.js", "[...m.cellEdges(steps)]", steps=[0, 10, 20, 40, 400, 410])
    assert edges == [-5, 5, 5, 15, 15, 30, 30, 60, 390, 405, 405, 415]
    assert run(page, "map/matrix.js", "[...m.cellEdges([7])]") == [6.5, 7.5]
    assert run(page, "map/matrix.js", "[...m.cellEdges([])]") == []


def test_answers_are_appended_and_steps_known_already_are_not_doubled(page: Any) -> None:
    given = """(() => {
      const sites = ["a", "b"].map((path) => ({ path, index: "", name: path }));
      const matrix = m.createMatrix({ run: "r", kind: "k", stat: "s" }, sites);
      const values = (steps) => Float32Array.from([...steps, ...steps.map((s) => -s)]);
      const answer = (steps, nonfinite = []) => ({ header: { sites: 2, steps, nonfinite }, values: values(steps) });
      m.append(matrix, answer([1, 2]));
      m.append(matrix, answer([2, 3], [[0, 0], [1, 1]]));
      const [a, b] = matrix.rows;
      return [matrix.steps, [...a.values.slice(0, 3)], [...b.values.slice(0, 3)], a.bad, [...b.bad.slice(0, 3)]];
    })()"""
    assert run(page, "map/matrix.js", given) == [[1, 2, 3], [1, 2, 3], [-1, -2, -3], None, [0, 0, 1]]


@pytest.mark.parametrize("count", [5, 6, 24, 25, 26, 91])
def test_the_median_of_a_group_is_that_of_what_was_seen(page: Any, count: int) -> None:
    data = np.random.default_rng(count).normal(size=(count, 7)).round(1).astype(np.float32)
    data[1, 3] = data[4, 3] = np.nan
    data[:, 5] = np.nan
    given = "rows.map((row) => ({ values: Float32Array.from(row, (v) => v ?? NaN), bad: null }))"
    expression = f"m.combinedRow({given}, 7, 'median')"
    rows = [[None if math.isnan(v) else float(v) for v in row] for row in data]
    answer = run(page, "map/matrix.js", f"[...({expression}).values].map((v) => Number.isNaN(v) ? null : v)", rows=rows)
    assert answer[5] is None
    seen = [i for i in range(7) if i != 5]
    assert [answer[i] for i in seen] == pytest.approx(np.nanmedian(data.astype(np.float64)[:, seen], axis=0), rel=1e-6)


def test_a_ratio_to_nothing_is_more_than_any_number_but_not_an_illness(page: Any) -> None:
    expression = """(() => {
      const row = (values) => ({ values: Float32Array.from(values), bad: null });
      const pairs = [[0, 0], [1, 1], [2, 2], [3, 3]];
      const { values, bad } = m.differenceRow(row([1, 0, 0, 2]), row([4, 3, 0, Infinity]), pairs, true);
      return [[...values].map((v) => v === m.FROM_ZERO ? "from zero" : v), [...bad]];
    })()"""
    values, bad = run(page, "map/matrix.js", expression)
    assert values[:3] == [4, "from zero", 1]
    assert bad == [0, 0, 0, 1]


# --- colour.js ---


@pytest.mark.parametrize("limit", [10_000, 500])
def test_a_sample_has_finite_values_only_and_always_the_extreme_ones(page: Any, limit: int) -> None:
    data = np.random.default_rng(0).normal(size=(30, 100)).astype(np.float32)
    data[3, 7], data[20, 50], data[11, 11] = 1e9, -1e9, 1e-20
    bad = np.zeros(data.shape, dtype=bool)
    bad[5, :50] = True
    data[5, 3] = 1e20  # not seen, because it is bad
    rows = data.tolist()
    for k, value in enumerate((math.nan, math.inf, -math.inf)):
        data[8 + k, 10:40] = value
        rows[8 + k][10:40] = [str(value)] * 30
    numbers = "Float32Array.from(row, (v) => Number(String(v).replace('inf', 'Infinity')))"
    given = f"rows.map((row, i) => ({{ values: {numbers}, bad: i === 5 ? Uint8Array.from(bad) : null }}))"
    found = run(
        page, "map/colour.js", f"[...m.sample({given}, 100, limit)]", rows=rows, bad=bad[5].tolist(), limit=limit
    )
    usable = np.sort(data[np.isfinite(data) & ~bad].astype(np.float64))
    assert found == sorted(found)
    assert (found[0], found[-1], min(value for value in found if value > 0)) == (-1e9, 1e9, np.float32(1e-20))
    if limit > data.size:
        np.testing.assert_array_equal(found, usable)
    else:
        assert set(found) <= set(usable.tolist())
        assert 0.9 * limit < len(found) <= limit + 3
        assert np.median(found) == pytest.approx(np.median(usable), abs=0.15)


def test_quantiles_are_those_of_numpy(page: Any) -> None:
    data = np.sort(np.random.default_rng(1).normal(size=101))
    answer = run(page, "map/colour.js", "[0, 0.01, 0.5, 0.99, 1].map((q) => m.quantile(data, q))", data=data.tolist())
    assert answer == pytest.approx(np.quantile(data, [0, 0.01, 0.5, 0.99, 1]))


SCALE = "m.makeScale(Float64Array.from(data), { log, full })"


@pytest.mark.parametrize(
    ("log", "value", "place"), [(True, 1e-2, 1 / 3), (True, 0.0, 0.0), (False, 5.0005, 0.5), (True, 1e9, 1.0)]
)
def test_values_stand_where_the_scale_says(page: Any, log: bool, value: float, place: float) -> None:
    data = [1e-3, 1e-2, 0.1, 1.0] if log else [1e-3, 10.0]
    assert run(
        page, "map/colour.js", f"{SCALE}.place(value)", data=data, log=log, full=True, value=value
    ) == pytest.approx(place, abs=1e-3)


@pytest.mark.parametrize("log", [True, False])
def test_signed_numbers_diverge_around_zero(page: Any, log: bool) -> None:
    data = np.sort(np.random.default_rng(2).normal(size=1000)).tolist()
    answer = run(
        page,
        "map/colour.js",
        f"((s) => [s.diverging, s.place(0), s.place(-1) + s.place(1), s.place(0.5) > 0.5])({SCALE})",
        data=data,
        log=log,
        full=False,
    )
    assert answer == [True, 0.5, pytest.approx(1.0), True]


def test_the_robust_range_is_not_moved_by_an_outlier(page: Any) -> None:
    data = [*np.linspace(1, 2, 999).tolist(), 1e30]
    assert run(page, "map/colour.js", f"{SCALE}.to", data=data, log=False, full=False) < 2.1
    assert run(page, "map/colour.js", f"{SCALE}.to", data=data, log=False, full=True) == 1e30


@pytest.mark.parametrize("data", [[], [0.0], [0.0, 0.0], [3.0, 3.0], [-1.0], [1e-45], [3.4e38]])
@pytest.mark.parametrize("log", [True, False])
def test_scales_exist_for_odd_data(page: Any, data: list[float], log: bool) -> None:
    answer = run(
        page,
        "map/colour.js",
        f"((s) => [s.from < s.to, ...data.map(s.place), ...m.legendTicks(s).map((t) => t.at)])({SCALE})",
        data=data,
        log=log,
        full=False,
    )
    assert answer[0] is True
    assert all(0 <= place <= 1 for place in answer[1:])


def test_codes_keep_unseen_and_not_finite_apart_from_all_values(page: Any) -> None:
    expression = """(() => {
      const scale = m.makeScale(Float64Array.of(1, 2, 3), { log: false, full: true });
      const row = { values: Float32Array.of(1, 3, NaN, Infinity, -1e9, 2), bad: Uint8Array.of(0, 0, 0, 0, 0, 1) };
      const undefinedOne = { values: Float32Array.of(Infinity, 2), bad: Uint8Array.of(2, 0) };
      return [[...m.codesOf(row, 6, scale)], [...m.codesOf(undefinedOne, 2, scale)]];
    })()"""
    codes, undefined = run(page, "map/colour.js", expression)
    assert codes == [4, 254, 0, 1, 3, 1], "the ends of the range, no data, Inf, below the range, NaN"
    assert undefined == [2, 129]


@pytest.mark.parametrize("dark", [True, False])
@pytest.mark.parametrize("diverging", [True, False])
def test_no_value_has_the_colour_of_what_is_not_finite(page: Any, diverging: bool, dark: bool) -> None:
    table = np.array(
        run(page, "map/colour.js", "[...m.palette(diverging, dark)]", diverging=diverging, dark=dark), dtype=np.uint32
    )
    channels = np.stack([table & 255, table >> 8 & 255, table >> 16 & 255], axis=1).astype(int)
    assert np.abs(channels[2:] - channels[1]).sum(axis=1).min() > 90
    assert np.abs(channels[0] - channels[1]).sum() > 90
    if not diverging:
        brightness = channels[4:255] @ np.array([0.299, 0.587, 0.114])
        assert (np.diff(brightness) > -1).all(), "from dark to bright, so that it reads without colours"


# --- cells.js ---

CONDENSED = """(() => {
  const columns = m.columnsOf(Float64Array.from(edges), [edges[0], edges[edges.length - 1]], width, 1e9);
  const [out, chosen] = [new Uint8Array(width), new Int32Array(width)];
  m.condensed(Uint8Array.from(codes), columns, out, chosen);
  return [[...out], [...chosen]];
})()"""


def condensed(page: Any, codes: list[int], width: int) -> tuple[list[int], list[int]]:
    edges = [edge for i in range(len(codes)) for edge in (i, i + 1)]
    out, chosen = run(page, "map/cells.js", CONDENSED, codes=codes, edges=edges, width=width)
    return out, chosen


@pytest.mark.parametrize("extreme", [255, 3, 1])
@pytest.mark.parametrize("at", [0, 1, 3, 500, 1999])
def test_one_remarkable_step_among_thousands_is_never_lost(page: Any, extreme: int, at: int) -> None:
    codes = [100] * 2000
    codes[at] = extreme
    out, chosen = condensed(page, codes, 150)
    assert extreme in out
    assert chosen[out.index(extreme)] == at, "and pointing at it finds it"


def test_a_step_wider_than_a_pixel_fills_its_pixels(page: Any) -> None:
    out, chosen = condensed(page, [10, 0, 1, 200], 12)
    assert out == [10, 10, 10, 0, 0, 0, 1, 1, 1, 200, 200, 200]
    assert chosen == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_rows_thinner_than_a_pixel_keep_what_is_not_finite(page: Any) -> None:
    expression = """(() => {
      const pixels = new Uint32Array(4 * 10);
      const columns = m.columnsOf(Float64Array.of(0, 1), [0, 1], 4, 1e9);
      const table = Uint32Array.from({ length: 256 }, (_, code) => code);
      const codes = (row) => Uint8Array.of(row === 37 ? 1 : 50);
      const size = { width: 4, height: 10, first: 0, last: 100, gap: 0, pitch: 100 };
      m.paintCells(pixels, { ...size, top: (row) => Math.floor(row / 10), codes, columns, table });
      return [...pixels.keys()].filter((i) => pixels[i] !== 50).map((i) => Math.floor(i / 4));
    })()"""
    assert set(run(page, "map/cells.js", expression)) == {3}


# --- view.js ---


def test_zooming_keeps_the_step_under_the_mouse_and_stays_inside(page: Any) -> None:
    low, high = run(page, "map/view.js", "m.zoomed(null, [0, 100], 2, 25, 1)")
    assert (high - low, (25 - low) / (high - low)) == pytest.approx((50, 0.25))
    assert run(page, "map/view.js", "m.zoomed([0, 50], [0, 100], 0.1, 25, 1)") is None
    assert run(page, "map/view.js", "m.zoomed([40, 44], [0, 100], 100, 42, 4)") == pytest.approx([40, 44])
    assert run(page, "map/view.js", "m.panned([0, 50], [0, 100], 500, 1)") == [50, 100]


def test_who_looks_at_the_end_stays_there_and_who_does_not_stays_put(page: Any) -> None:
    assert run(page, "map/view.js", "m.afterNewSteps([80, 100], [0, 100], [0, 130])") == [110, 130]
    assert run(page, "map/view.js", "m.afterNewSteps([10, 30], [0, 100], [0, 130])") == [10, 30]
    assert run(page, "map/view.js", "m.afterNewSteps(null, [0, 100], [0, 130])") is None


# --- state.js ---


def test_a_state_survives_the_address_and_other_peoples_parts_stay(page: Any) -> None:
    wish = {"run": "a&b=c/é #1", "picks": [["x.y", "[0]"]], "from": 1.5, "to": 20, "depth": 2, "search": "/a+/"}
    before = "#scalars&tagFilter=x&p.other.k=v&p.tbhooks.run=old"
    state = run(page, "core/state.js", "({ ...m.initialState(), ...wish })", wish=wish)
    address = run(page, "core/state.js", "m.hashWith(before, state)", before=before, state=state)
    assert address.startswith("#tbhooks&tagFilter=x&p.other.k=v&p.tbhooks.run=a%26b%3Dc")
    assert run(page, "core/state.js", "m.stateFrom(address)", address=address) == state


@pytest.mark.parametrize(
    "address",
    [
        "#tbhooks&p.tbhooks.picks=[1,2]",
        "#tbhooks&p.tbhooks.capture.step.step=x&p.tbhooks.scale=9",
        "#tbhooks&p.tbhooks.run=%E0%A4%A",
    ],
)
def test_a_broken_address_is_read_as_the_default(page: Any, address: str) -> None:
    assert run(page, "core/state.js", "m.stateFrom(address)", address=address) == run(
        page, "core/state.js", "m.initialState()"
    )


def test_an_address_without_us_says_nothing(page: Any) -> None:
    assert run(page, "core/state.js", "m.stateFrom('#scalars&tagFilter=x')") is None


# --- save.js ---


def test_numbers_are_written_as_the_shortest_text_that_reads_back_the_same(page: Any) -> None:
    data = np.random.default_rng(3).normal(size=500).astype(np.float32) * np.float32(10) ** np.arange(-30, 30).repeat(
        9
    )[:500].astype(np.float32)
    answer = run(page, "map/save.js", "data.map((v) => m.shortest(Math.fround(v)))", data=[float(v) for v in data])
    assert np.array_equal(np.array(answer, dtype=np.float64).astype(np.float32), data)
    assert run(page, "map/save.js", "[0.1, 1, NaN, Infinity].map((v) => m.shortest(Math.fround(v)))") == [
        "0.1",
        "1",
        "",
        "inf",
    ]


@pytest.mark.parametrize(
    ("text", "field"), [("a.b", "a.b"), ('say "x", y', '"say ""x"", y"'), ("=1+1", "'=1+1"), ("@x", "'@x")]
)
def test_names_are_fields_and_never_formulas(page: Any, text: str, field: str) -> None:
    assert run(page, "map/save.js", "m.field(text)", text=text) == field


# --- labels.js ---

WIDTHS = "(text) => text.length <= room"


def test_shortened_names_are_never_the_same_and_keep_whole_parts(page: Any) -> None:
    names = [f"encoder.layers.{i}.attention.{part}.weight" for i in range(3) for part in ("query", "quart", "value")]
    for room in (60, 24, 14, 8, 5):
        texts = run(page, "map/labels.js", f"[...m.distinct(names, {WIDTHS}).values()]", names=names, room=room)
        assert len(set(texts)) == len(names), room
    assert run(page, "map/labels.js", f"m.shortened(names[0], {WIDTHS})", names=names, room=60) == names[0]
    short = run(page, "map/labels.js", f"m.shortened(names[0], {WIDTHS})", names=names, room=24)
    assert short == "encoder.\u2026query.weight"


# --- order.js ---


def test_unusual_is_what_is_far_from_the_median_of_its_role(page: Any) -> None:
    rng = np.random.default_rng(8)
    values = np.exp(rng.normal(size=(40, 12)) * 0.1)
    values[:, 7] *= 20
    values[3, 2] *= 50  # one step of forty is not lasting
    expression = """(() => {
      const sites = values[0].map((_, i) => ({ path: `l.${i}.q`, index: "", name: `l.${i}.q`, role: "l.*.q" }));
      const rows = sites.map((_, i) => ({ values: Float32Array.from(values, (step) => step[i]), bad: null }));
      const matrix = { sites, rows, steps: values.map((_, i) => i) };
      return m.ordered(matrix, "unusual", [-Infinity, Infinity], true).map((one) => [one.site.name, one.score]);
    })()"""
    found = run(page, "map/order.js", expression, values=values.tolist())
    assert found[0][0] == "l.7.q"
    logs = np.log(values)
    away = logs - np.median(logs, axis=1, keepdims=True)
    spread = np.maximum(1.4826 * np.median(np.abs(away), axis=1), 0.01 * np.abs(np.median(logs, axis=1)))
    z = np.sort(np.abs(away / spread[:, None]), axis=0)[::-1][4]
    assert dict(found) == pytest.approx({f"l.{i}.q": z[i] for i in range(12)}, rel=1e-4)


# --- linear.js ---


def test_bins_of_equal_width_keep_every_element(page: Any) -> None:
    expression = """(() => {
      const counts = new Map([[0, 5], [1, 10], [2, 30]]);
      const bounds = new Map([[0, [0, 0]], [1, [0, 1]], [2, [1, 4]]]);
      return [...m.rebinned(counts, bounds, [0, 4], 8)];
    })()"""
    assert run(page, "detail/linear.js", expression) == pytest.approx([10, 5, 5, 5, 5, 5, 5, 5])


# --- The full range ---


def test_the_full_range_is_the_true_one_however_many_cells_there_are(page: Any) -> None:
    expression = """(() => {
      const rows = Array.from({ length: 600 }, () => ({ values: new Float32Array(1000).fill(1), bad: null }));
      rows[311].values[517] = 15932;
      rows[7].values[3] = 0.25;
      const scale = m.makeScale(m.sample(rows, 1000), { log: false, full: true });
      const robust = m.makeScale(m.sample(rows, 1000), { log: false, full: false });
      return [scale.from, scale.to, m.sideOf(15932, scale), m.sideOf(15932, robust), m.sideOf(0.25, robust)];
    })()"""
    assert run(page, "map/colour.js", expression) == [0.25, 15932, 0, 1, -1]


# --- All together ---

RUN_WORDS = """async ([base, name, calls]) => {
  const module = await import(base + "core/runs.js");
  return calls.map((call) => module[name](...call));
}"""


def test_what_a_run_has_is_counted_in_words(page: Any) -> None:
    cases = [
        [3, "weight"],
        [1, "update"],
        [1002, "channel.activation"],
        [2, "eval.weight_gradient"],
        [8, "channel.experts"],
    ]
    assert page.evaluate(RUN_WORDS, [STATIC, "countedKind", cases]) == [
        "3 weights",
        "1 update",
        "1,002 activations by channel",
        "2 weight gradients (evaluation)",
        "8 rows of load by expert",
    ]


def test_how_long_ago_a_run_ended_is_in_words(page: Any) -> None:
    times = [1240.0, 1000.0 + 3 * 86400]
    run = {"last_step": 9, "last_time": 1000.0, "has_ended": True}
    runs = [run | {"state": state} for state in ("finished", "failed", "ended")]
    texts = [page.evaluate(RUN_WORDS, [STATIC, "freshness", [[each, now] for each in runs]]) for now in times]
    assert [one["text"] for one in texts[0]] == [
        "finished 4 min ago; last step 9",
        "failed 4 min ago; last step 9",
        "no new step for 4 min; last step 9",
    ]
    assert texts[1][0]["text"] == "finished on 1 January 1970; last step 9"


AGES = """async ([base, runs, now]) => {
  const { ages } = await import(base + "core/status.js");
  return ages(runs, now).map((line) => line.text);
}"""


def test_every_run_on_show_is_in_a_line_with_those_of_its_state_or_counted(page: Any) -> None:
    def lines(lasts: list[int]) -> list[str]:
        runs = [{"name": f"r{i}", "last_step": last, "last_time": 1000.0, "state": "failed", "has_ended": True}
                for i, last in enumerate(lasts)]  # fmt: skip
        found: list[str] = page.evaluate(AGES, [STATIC, runs, 1240.0])
        return found

    assert lines([9]) == ["failed 4 min ago; last step 9"]
    assert lines([9, 8, 9]) == ["r0, r2: failed 4 min ago; last step 9", "r1: failed 4 min ago; last step 8"]
    assert lines([9] * 12) == ["r0, r1, r2, r3 and 8 more: failed 4 min ago; last step 9"]
    assert lines([1, 2, 3, 4, 4])[2:] == ["r2: failed 4 min ago; last step 3", "and 2 more runs"]


DEPTH = """async ([base, roles, layers]) => {
  const { buildRoles, firstDepth } = await import(base + "map/tree.js");
  const siteOf = (layer, part) => {
    const path = `layers.${layer}.part${part}`;
    return { path, index: "", name: path, role: `layers.*.part${part}` };
  };
  const sites = Array.from({ length: roles * layers }, (_, i) => siteOf(Math.floor(i / roles), i % roles));
  return firstDepth(buildRoles(sites), 8, 240);
}"""


@pytest.mark.parametrize(("roles", "layers", "depth"), [(4, 12, 2), (5, 200, 1), (8, 125, 1), (1, 300, 2)])
def test_roles_are_open_unless_their_modules_are_far_more_than_a_screen_shows(
    page: Any, roles: int, layers: int, depth: int
) -> None:
    assert page.evaluate(DEPTH, [STATIC, roles, layers]) == depth


KEPT = """async ([base]) => {
  const load = (name) => import(base + name);
  const [{ createMatrix, append }, { createModel }, { initialState }] = await Promise.all(
    ["map/matrix.js", "core/model.js", "core/state.js"].map(load));
  const sites = ["a.0", "a.1", "a.2", "a.3"].map((path) => ({ path, index: "", name: path, role: "a.*" }));
  const matrix = createMatrix({ run: "r", kind: "activation", stat: "std" }, sites);
  const grow = (steps, numbers) => {
    append(matrix, { header: { sites: 4, steps, nonfinite: [] }, values: Float32Array.from(numbers) });
  };
  grow([0, 1], [1, 5, 2, 6, 3, 7, 40, 8]);
  const model = createModel();
  const shown = (change) => {
    const state = { ...initialState(), group: "roles", depth: 1, ...change };
    const sides = [{ matrix, findings: [], scalars: [] }];
    const { rows, panes } = model({ state, choice: { kind: "activation", stat: "std" }, sides, dark: false });
    return panes[0].numbers(rows[0]);
  };
  const first = shown({ scale: "log" });
  const linear = shown({ scale: "linear" });
  const most = [...shown({ shows: "most" }).values];
  const least = [...shown({ shows: "least" }).values];
  grow([2], [1, 1, 2, 2]);
  const later = [...shown({ scale: "log" }).values];
  return { same: first === linear, median: [...first.values], most, least, later };
}"""


def test_the_numbers_of_a_group_are_computed_once_until_the_run_grows(page: Any) -> None:
    found = page.evaluate(KEPT, [STATIC])
    assert found == {
        "same": True,
        "median": [2.5, 6.5],
        "most": [40, 8],
        "least": [1, 5],
        "later": [2.5, 6.5, 1.5],
    }


HISTORIES = """async ([base, question]) => {
  const { api } = await import(base + "core/api.js");
  const { historyOf } = await import(base + "detail/cells.js");
  const words = (answer) => JSON.stringify(historyOf(answer), (_, value) =>
    value instanceof Map ? [...value] : Number.isNaN(value) ? "nan" : Math.abs(value) === Infinity ? "inf" : value);
  const plain = await fetch(`${base}history?${new URLSearchParams(question)}`);
  return [words(await api.history(question)), words(await plain.json())];
}"""


@pytest.mark.parametrize("path", ["stem", "blocks.1.up"])
def test_a_history_in_binary_form_is_read_as_the_one_in_json(page: Any, path: str) -> None:
    question = {"run": "first", "kind": "activation", "path": path, "index": ""}
    binary, plain = page.evaluate(HISTORIES, [STATIC, question])
    assert binary == plain
    assert ("null" in binary) == (path == "stem")  # which is missing in a step


LOADED = """async ([base]) => {
  const { createData } = await import(base + "core/data.js");
  const asked = [];
  const sites = [{ path: "a", index: "", name: "a" }];
  const api = {
    sites: async () => sites,
    findings: async () => [],
    scalars: async () => [],
    distribution: async () => asked.push("distribution"),
    matrix: async ({ stat, after }) => {
      asked.push(after === undefined ? stat : `${stat} after ${after}`);
      const steps = after === undefined ? [0, 1] : [];
      return { header: { sites: 1, steps }, values: Float32Array.from(steps) };
    },
  };
  const stats = ["std", "norm", "p01", "p50", "pace"];
  const kinds = [{ kind: "k", sites: 1, last_step: 1, histograms: true, stats }];
  const list = (time) => ({ runs: [{ name: "r", last_time: time, findings: null, kinds }] });
  const data = createData(api);
  const show = (stat, time) => data.load({ runs: ["r"], kind: "k", stat }, list(time));
  const found = {};
  for (const stat of ["std", "norm", "std", "norm"]) await show(stat, 5);
  found.before = asked.splice(0);
  await new Promise((then) => setTimeout(then, 900));
  found.idle = asked.splice(0);
  await show("std", 6);
  found.later = asked.splice(0);
  return found;
}"""


def test_what_was_shown_is_not_asked_for_again_and_other_stats_are_computed_ahead(page: Any) -> None:
    """A run that was written again since is asked for again, even if it has as many steps as before."""
    assert page.evaluate(LOADED, [STATIC]) == {
        "before": ["std", "norm"],
        "idle": ["distribution", "norm after 1", "p50 after 1", "p01 after 1"],
        "later": ["std"],
    }


DRAWING = """async ([base]) => {
  const load = (name) => import(base + name);
  const [{ createMatrix, append }, { createModel }, { createHeatmap }, { initialState }] = await Promise.all(
    ["map/matrix.js", "core/model.js", "map/heatmap.js", "core/state.js"].map(load));
  const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: base + "core/style.css" });
  const box = Object.assign(document.createElement("div"), { style: "position: fixed; inset: 0; background: white" });
  await new Promise((done) => { link.onload = done; document.head.append(link); document.body.append(box); });
  const paths = Array.from({ length: 1000 }, (_, i) => `layers.${i >> 3}.part${i & 7}`);
  const sites = paths.map((path) => ({ path, index: "", name: path }));
  const steps = Array.from({ length: 2000 }, (_, i) => i * 10);
  const values = Float32Array.from({ length: 2e6 }, (_, i) => Math.exp(Math.sin(i % 1000) * 4 + Math.sin(i / 1e5)));
  const matrix = createMatrix({ run: "r", kind: "activation", stat: "std" }, sites);
  append(matrix, { header: { sites: 1000, steps, nonfinite: [[77, 999]] }, values });
  const state = { ...initialState(), rows: "fit", depth: 9 };
  const sides = [{ matrix, findings: [], scalars: [] }];
  const rest = { choice: { kind: "activation", stat: "std" }, sides, dark: false };
  const map = createHeatmap(box, { describe: () => ({ title: "", lines: [] }) });
  const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const times = {};
  for (const name of ["first", "again"]) {
    const began = performance.now();
    map.update(createModel()({ state, ...rest }));
    await frames();
    times[name] = performance.now() - began;
  }
  const scroller = document.querySelector(".map-scroll");
  map.update(createModel()({ state: { ...state, rows: "read" }, ...rest }));
  await frames();
  const slowest = [];
  for (let i = 0; i < 10; i++) {
    scroller.scrollTop += 400;
    await frames();
    slowest.push(Number(document.querySelector(".map-base").dataset.drawMs));
  }
  return { ...times, scroll: slowest.sort((a, b) => a - b)[5], moved: scroller.scrollTop };
}"""


def test_a_thousand_modules_of_two_thousand_steps_are_drawn_in_time(
    pages: Pages, record_testsuite_property: Any
) -> None:
    page = pages.open(STATIC + "core/style.css", device_scale_factor=2)
    times = page.evaluate(DRAWING, [STATIC])
    for name, milliseconds in times.items():
        record_testsuite_property(f"tab {name}", milliseconds)
    assert times["moved"] == 4000
    assert times["first"] < 5000
    assert times["scroll"] < 1000
