"""The live view: what it remembers, what it says, what it costs, and where it ends up in a real notebook."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tbhooks
from tbhooks.data.errors import ArgumentError
from tbhooks.data.frame import Finding, Frame, Site
from tbhooks.views.live import LARGEST_SHARE, SHORTEST_PAUSE_S, Live, Pace, panel
from tbhooks.views.live.timeline import MOST_COLUMNS, MOST_ROWS, StepMatrix, Timeline
from tests.support.frames import make_frame, make_model, train

pytestmark = pytest.mark.xdist_group("notebook_live")  # they share a kernel
ROOT = Path(__file__).parents[3]
HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m"
NOTHING = panel.Status((), (), "following")


def layers(step: int, names: list[str], **more: Any) -> Frame:
    data = {Site(name, "activation"): [0.0, 2.0 * (i + 1) * (step + 1)] for i, name in enumerate(names)}
    return make_frame(step, data, histograms=False, **more)


def same_at(steps: int, names: list[str], **scalars: float) -> list[Frame]:
    first = layers(0, names)
    return [replace(first, step=step, time=first.time + step, scalars=scalars) for step in range(steps)]


def timeline_of(frames: list[Frame], kind: str = "activation", stat: str = "std") -> Timeline:
    timeline = Timeline(kind, stat)
    for frame in frames:
        timeline.add(frame)
    return timeline


@pytest.fixture
def watching() -> Iterator[Any]:
    model = make_model()
    with tbhooks.watch(model, every=1) as w:
        w.train = lambda steps: train(model, steps)
        yield w


# --- What it remembers ------------------------------------------------------------------------------


def test_a_matrix_keeps_the_value_furthest_from_zero_of_the_steps_a_column_covers() -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 1000))
    matrix = StepMatrix(most_columns=50)
    rows = matrix.rows(["a", "b", "c"])
    for step in range(1000):
        matrix.put(step, rows, numbers[:, step], np.zeros(3, dtype=np.int64))
    grid = matrix.grid("activation", "std", rows.tolist())
    assert matrix.columns <= 50
    assert matrix.span == 32
    for column in range(matrix.columns):
        first, last = matrix.steps(column)
        assert grid.steps[column] == first == column * 32
        part = numbers[:, first : last + 1]
        np.testing.assert_array_equal(grid.values[:, column], part[[0, 1, 2], np.abs(part).argmax(axis=1)])
    for row in range(3):
        series = numbers[row]
        assert matrix.ends(row) == (series[0], series[-1], series.min(), series.max())


def test_what_is_not_finite_stays_marked_when_columns_are_added_up() -> None:
    names = ["a", "b"]
    frames = [layers(step, names) for step in range(500)]
    frames[77] = make_frame(77, {Site("a", "activation"): [1.0, 2.0], Site("b", "activation"): [1.0, np.nan]})
    timeline = timeline_of(frames)
    assert timeline.layers.span == 8
    assert timeline.grid().wrong.sum() == timeline.grid().wrong[1].sum() == 1
    assert "1 of 2 rows, first in b at step 77" in panel.nonfinite_note(timeline.grid(), timeline.layers)


def test_a_large_model_is_thinned_to_the_limits_and_keeps_its_flagged_layers() -> None:
    names = [f"layers.{i}" for i in range(300)]
    timeline = timeline_of(same_at(130, names))
    grid = timeline.grid(flagged={"layers.123", "layers.124"})
    assert grid.values.shape[0] == len(grid.names) == MOST_ROWS
    assert grid.values.shape[1] <= MOST_COLUMNS
    assert {"layers.0", "layers.123", "layers.124", "layers.299"} <= set(grid.names)
    assert list(grid.names) == sorted(grid.names, key=names.index)


def test_gradients_stand_in_the_order_of_the_forward_pass() -> None:
    data = {Site(name, "activation"): [1.0] for name in "abc"} | {Site(name, "gradient"): [1.0] for name in "cba"}
    assert timeline_of([make_frame(0, data)], "gradient").grid().names == ("a", "b", "c")


def test_scalars_that_come_late_join_their_step() -> None:
    frames = [layers(0, ["a"]), layers(1, ["a"], scalars={"train/loss": 5.0}), layers(2, ["a"])]
    frames += [make_frame(2, {}, scalars={"train/loss": 3.0}), make_frame(1, {}, scalars={"train/extra": 9.0})]
    timeline = timeline_of(frames)
    assert [timeline.scalars.steps(i) for i in range(timeline.scalars.columns)] == [(1, 1), (2, 2)]
    loss, extra = timeline.scalars.grid("scalar", "value", [0, 1]).values
    np.testing.assert_array_equal(loss, [5.0, 3.0])
    np.testing.assert_array_equal(extra, [9.0, np.nan])


# --- What it says -----------------------------------------------------------------------------------


def test_the_page_escapes_names_holds_no_script_and_stays_small() -> None:
    names = [HOSTILE, *(f"model.layers.{i}.mlp.dense_h_to_4h" for i in range(300))]
    timeline = timeline_of(same_at(300, names, **{"train/" + HOSTILE: 1.0}))
    site = Site(HOSTILE, "activation")
    findings = [Finding(step, site, "dead_units", "error", HOSTILE * 50, {"x": HOSTILE}) for step in range(40)]
    page = panel.render_html(timeline, panel.Status(findings, (HOSTILE,), "following"))
    assert len(page) < 60_000
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    assert "34 earlier findings" in page


def test_words_and_numbers_tell_it_without_colours() -> None:
    finding = Finding(3, Site("b", "activation"), "dead_units", "warning", "b is dead", {})
    timeline = timeline_of([layers(step, ["a", "b"], scalars={"train/loss": 1 / (step + 1)}) for step in range(4)])
    status = panel.Status([finding], ("2 logged steps were dropped",), "following")
    for view in (panel.render_html(timeline, status), panel.text(timeline, status)):
        said = re.sub(r"<style>.*?</style>|<[^>]+>", " ", view)
        for words in ("step 3", "1 steps/s", "following", "train/loss", "0.25", "began at 1", "activation std",
                      "warning", "b is dead", "2 logged steps were dropped"):  # fmt: skip
            assert words in said, words
    assert "a: last 4, 1 to 4" in panel.render_html(timeline, status)


def test_a_hundred_layers_are_drawn_in_milliseconds() -> None:
    names = [f"model.layers.{i}.mlp" for i in range(100)]
    timeline = timeline_of(same_at(MOST_COLUMNS, names))
    panel.render_html(timeline, NOTHING)
    spent = []
    for _ in range(20):
        started = time.thread_time()
        panel.render_html(timeline, NOTHING)
        spent.append(time.thread_time() - started)
    assert min(spent) < 5e-3


# --- What may be asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "activations"}, "did you mean 'activation'"),
        ({"stat": "stdd"}, "did you mean 'std'"),
        ({"kind": "input"}, "does not read 'input'"),
        ({"stat": "ratio"}, "only the kind 'update' has a ratio"),
        ({"interactive": "yes"}, "True, False or None"),
        ({"interactive": True}, "needs a notebook"),
    ],
)
def test_what_cannot_be_shown_is_refused_at_the_call(watching: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        watching.live(**options)


def test_an_interactive_view_without_anywidget_says_what_to_install(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(ArgumentError, match=r'pip install "tbhooks\[jupyter\]"'):
        watching.live(interactive=True)
    assert watching.live().updates == 0


# --- Following a run --------------------------------------------------------------------------------


class Shown:
    """A screen that keeps what it was asked to show."""

    def __init__(self, cost: Callable[[], None] = lambda: None) -> None:
        self.said: list[str] = []
        self._cost = cost

    def open(self, live: Live) -> None:
        self.update(live, final=True)

    def update(self, live: Live, *, final: bool) -> None:
        self._cost()
        self.said.append(panel.headline(live.timeline, live.status()))


def test_outside_a_notebook_it_is_text_and_prints_nothing(watching: Any, capsys: pytest.CaptureFixture[str]) -> None:
    watching.train(2)
    view = watching.live()
    watching.train(3)
    watching.flush()
    assert "step 4" in repr(view)
    watching.close()
    assert "step 4" in repr(view)
    assert "ended" in repr(view)
    assert set(view._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert capsys.readouterr() == ("", "")


def test_all_frames_are_timeline_once_whether_they_came_before_or_after(watching: Any) -> None:
    watching.train(5)
    view = watching.live(kind="weight", stat="norm")
    watching.train(6)
    assert len(watching.history) == 11
    repr(view)
    assert [view.timeline.layers.steps(i) for i in range(view.timeline.layers.columns)] == [(i, i) for i in range(11)]
    row = view.timeline.layers.row("0.weight")
    _, reference = watching.history.series("0.weight", "weight", "norm")
    np.testing.assert_array_equal(view.timeline.grid().values[row], reference)


def test_the_last_state_is_drawn_when_the_watch_closes(watching: Any) -> None:
    view = watching.live()
    view._screens.append(screen := Shown())
    watching.train(30)
    watching.close()
    assert screen.said[-1].startswith("step 29,")
    assert screen.said[-1].endswith("ended")
    assert view.updates == len(screen.said)


def test_a_screen_that_fails_is_counted_and_training_goes_on(watching: Any) -> None:
    def fail() -> None:
        raise OSError("the notebook is gone")

    watching.live()._screens.append(Shown(fail))
    watching.train(5)
    watching.flush()
    assert watching.stats.errors >= 1
    assert "live view: OSError: the notebook is gone" in watching.stats.messages
    assert len(watching.history) == 5
    assert watching.stats.dropped == 0


def test_a_cell_that_is_run_again_replaces_its_view(watching: Any) -> None:
    first, other = watching.live(), watching.live(stat="norm")
    first._screens.append(screen := Shown())
    watching.live()
    assert screen.said[-1].endswith("ended")
    assert "following" in repr(other)


def test_it_draws_at_most_twice_a_second_and_for_at_most_a_hundredth_of_the_time() -> None:
    for cost in (0.0, 0.001, 0.05, 2.0):
        now, spent, drawn = [0.0], 0.0, 0
        pace = Pace(lambda now=now: now[0])
        while now[0] < 3000.0:
            if pace.is_due:
                with pace.drawing():
                    now[0] += cost
                spent, drawn = spent + cost, drawn + 1
            now[0] += 0.1
        assert drawn > 5
        assert drawn <= 3000.0 / SHORTEST_PAUSE_S + 1
        assert spent <= LARGEST_SHARE * 3000.0


def test_a_slow_renderer_costs_a_real_loop_under_a_hundredth(watching: Any) -> None:
    cost = 0.01
    view = watching.live()
    view._screens.append(Shown(lambda: time.sleep(cost)))
    started = time.perf_counter()
    while time.perf_counter() - started < 2.2:
        watching.train(1)
    updates, elapsed = view.updates, time.perf_counter() - started
    watching.close()
    assert 1 <= updates <= 3
    assert cost * (updates - 1) < LARGEST_SHARE * elapsed
    for counted in (view.seconds, watching.stats.seconds_views):
        assert counted >= cost * (updates + 1)


# --- The interactive view ---------------------------------------------------------------------------


@pytest.fixture
def widget() -> Any:
    pytest.importorskip("anywidget", reason="anywidget is an extra")
    from tbhooks.views.live import widget

    return widget


def test_the_widget_shows_the_numbers_of_the_history_and_follows_a_choice(watching: Any, widget: Any) -> None:
    view = watching.live()
    screen = widget.WidgetScreen(view, "static")
    view._screens.append(screen)
    watching.train(4)
    watching.close()
    shown = screen._widget.view
    values = np.frombuffer(shown["values"], dtype=np.float32).reshape(len(shown["names"]), -1)
    _, reference = watching.history.series("0", "activation", "std")
    np.testing.assert_array_equal(values[shown["names"].index("0")], reference.astype(np.float32))
    assert shown["steps"] == [(i, i) for i in range(4)]
    screen._widget.kind, screen._widget.stat = "update", "ratio"
    assert (screen._widget.view["kind"], screen._widget.view["stat"]) == ("update", "ratio")
    assert screen._widget.view["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    screen._widget.stat = "no such thing"
    assert screen._widget.stat == "ratio"
    assert watching.stats.errors == 0


def test_a_click_is_answered_with_the_distribution_of_that_step(watching: Any, widget: Any) -> None:
    view = watching.live()
    watching.train(4)
    reading = watching.history[2]["0", "activation"]
    shown = widget.histogram(view, {"name": "0", "first": 2, "last": 2})
    assert shown["title"] == "activation of 0 at step 2"
    assert sum(shown["heights"]) == pytest.approx(reading.count)
    assert f"std {reading.std:.3g}" in shown["words"]
    for asked in ({"name": "0", "first": 90, "last": 99}, {"name": "none", "first": 2, "last": 2}, {"name": 7}):
        assert "heights" not in widget.histogram(view, asked)
        assert widget.histogram(view, asked)["why"]


# --- In a real kernel -------------------------------------------------------------------------------

SETUP = """
import tbhooks
from tests.support.frames import make_model, make_optimizer, train_step
def watched():
    model = make_model()
    optimizer = make_optimizer(model)
    w = tbhooks.watch(model, every=1)
    def train(steps):
        for _ in range(steps):
            w.log({"loss": train_step(model, optimizer)})
    return w, train
w, train = watched()
left_open, train_more = watched()
"""
CELLS = {
    "shown": "w.live(interactive=False)",
    "interactive": "left_open.live()",
    "trained": "train(40); train_more(33)",
    "same cell": "view = w.live(kind='gradient', interactive=False)\ntrain(25)",
    "printed": "print(w.live(stat='mean', interactive=False))",
    "closed": "train(5); w.close(); print(w.stats.errors, w.stats.messages)",
    "later": "view",
}
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def saved() -> dict[str, list[Any]]:
    """The outputs of these cells in a notebook that was run and saved."""
    import nbformat  # they take a second to import
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(cell) for cell in (SETUP, *CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    read = nbformat.reads(nbformat.writes(notebook), as_version=4)
    return {name: cell.outputs for name, cell in zip(CELLS, read.cells[1:], strict=True)}


@pytest.mark.parametrize("cell", ["shown", "same cell", "later"])
def test_a_saved_notebook_keeps_the_last_state_in_the_cell_that_asked_for_it(
    saved: dict[str, list[Any]], cell: str
) -> None:
    (output,) = saved[cell]
    assert output.output_type == "display_data"
    assert re.search(r"step 69, [^<]*, ended", output.data["text/html"])
    assert output.data["text/plain"].startswith("step 69,")
    assert ("gradient std" in output.data["text/html"]) == (cell != "shown")


def test_nothing_goes_to_the_cell_that_trains(saved: dict[str, list[Any]]) -> None:
    assert not saved["trained"]
    assert [output.text for output in saved["closed"]] == ["0 ()\n"]


def test_a_view_that_is_printed_where_it_shows_itself_is_there_once(saved: dict[str, list[Any]]) -> None:
    shown, printed = sorted(saved["printed"], key=lambda output: str(output.output_type))
    assert "activation mean" in shown.data["text/html"]
    assert re.fullmatch(r"step 64, [^\n]*following\n", printed.text)


def test_without_a_close_the_end_of_the_cell_draws_the_last_step(saved: dict[str, list[Any]]) -> None:
    assert re.search(r"step 32, [^<]*, following", saved["interactive"][0].data["text/html"])


def test_an_interactive_view_has_a_picture_beside_it_for_readers_without_a_kernel(
    saved: dict[str, list[Any]],
) -> None:
    pytest.importorskip("anywidget", reason="anywidget is an extra")
    picture, widget = saved["interactive"]
    assert set(picture.data) == {"text/html", "text/plain"}
    assert "<script" not in picture.data["text/html"]
    assert set(widget.data) == {WIDGET, "text/plain"}
