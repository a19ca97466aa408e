"""From a question to its answer in few actions: an action is a click, a key or a choice. The runs are whole models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import tbhooks
from tests.support.browser_tab import ALONE, Pages, Tab, alone, parameters

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

WIDE = {"viewport": {"width": 1440, "height": 900}}


class Actions:
    """Does what a user does, and counts it."""

    def __init__(self, page: Any) -> None:
        self.page, self.count = page, 0

    def click(self, target: Any) -> None:
        self.count += 1
        target.click()

    def press(self, key: str) -> None:
        self.count += 1
        self.page.keyboard.press(key)


def landing(models: Pages, **options: Any) -> Any:
    page = models.open(ALONE, **(WIDE | options))
    expect(page.locator(".card[data-level]")).to_have_count(5)
    return page


def card(page: Any, run: str) -> Any:
    return page.get_by_role("article", name=f"Run {run}", exact=True)


# --- The overview ---


def test_the_first_page_has_a_verdict_on_every_run(models: Pages) -> None:
    page = landing(models)
    expect(card(page, "baseline").locator(".verdict")).to_contain_text("No issues found in 60 logged steps")
    expect(card(page, "diverged").locator(".level")).to_have_text("Problem")
    expect(card(page, "diverged").locator(".run-state")).to_contain_text("failed")
    expect(card(page, "baseline").locator(".run-state")).to_contain_text("ended")
    expect(card(page, "diverged").locator(".curve-tag")).to_have_text(["train/loss", "train.grad_norm", "train.lr/0"])
    expect(card(page, "diverged").locator(".curve-last").first).to_have_text("NaN")
    expect(card(page, "baseline").locator(".watched")).to_contain_text("111 activations")
    expect(card(page, "baseline").locator(".watched")).to_contain_text("Not watched: evaluation passes")
    expect(card(page, "wide").locator(".watched")).to_contain_text("gradients of activations")


def test_findings_of_one_cause_are_a_chain_from_the_learning_rate_to_nan(models: Pages) -> None:
    page = landing(models)
    chain = card(page, "diverged").locator(".chain").first.locator("li")
    expect(chain).to_have_text(
        [
            re.compile(r"learning rate 0\.012.*step 260"),
            re.compile("layers.3.up.weight.*step 260"),
            re.compile("exploding gradients in layers.3.up.*step 310"),
            re.compile("NaN or infinity in layers.3.norm1.*step 420"),
        ]
    )


def test_running_failed_and_ended_runs_are_distinguished(models: Pages) -> None:
    page = models.open("/data/plugin/tbhooks/core/style.css", **WIDE)

    def now_running(route: Any) -> None:
        reply = route.fetch().json()
        runs = [run | ({"last_time": reply["now"]} if run["name"] == "outlier" else {}) for run in reply["runs"]]
        route.fulfill(json=reply | {"runs": runs})

    page.route("**/runs", now_running)
    page.goto(models.address + ALONE)
    states = {name: card(page, name).locator(".run-state") for name in ("outlier", "diverged", "baseline")}
    expect(states["outlier"]).to_contain_text("running")
    expect(states["diverged"]).to_contain_text("failed")
    expect(states["baseline"]).to_contain_text("ended")
    card(page, "outlier").get_by_role("button", name="Open map").click()
    options = page.get_by_label("Run", exact=True).locator("option")
    expect(options).to_have_text(
        ["\u25a0 baseline", "\u2715 diverged", "\u25b6 outlier", "\u25a0 vanishing", "\u25a0 wide"]
    )


# --- Tasks ---


def test_the_vanishing_layer_is_found_with_two_actions(models: Pages) -> None:
    page = landing(models)
    do = Actions(page)
    do.click(card(page, "vanishing").locator(".chain-link").first)
    expect(page.locator(".detail-name")).to_have_text("layers.0.q_proj")
    expect(page.get_by_label("Kind", exact=True)).to_have_value("gradient")
    assert do.count <= 2


def test_the_first_divergence_is_found_with_one_action(models: Pages) -> None:
    page = landing(models)
    do = Actions(page)
    do.click(card(page, "diverged").locator(".chain-link").first)
    expect(page.locator(".detail-name")).to_have_text("layers.3.up.weight")
    expect(page.locator(".detail-step")).to_have_text("step 260")
    assert do.count <= 1


def test_the_outlier_among_a_thousand_modules_is_found_with_two_actions(models: Pages) -> None:
    page = landing(models)
    do = Actions(page)
    do.click(card(page, "wide").get_by_role("button", name="20 most unusual"))
    tab = Tab(page, page)
    tab.settle()
    tooltip = tab.hover(0, 40)
    assert tooltip.startswith("blocks.54.part5")
    assert "robust deviations from the median of blocks.*.part5" in tooltip
    assert do.count <= 2


def test_one_layer_over_time_takes_two_actions_and_no_scrolling(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="outlier", kind="activation"), **WIDE)
    do = Actions(tab.page)
    do.count += 1
    tab.click(3, 300)
    chart = tab.frame.get_by_role("slider", name="Steps of the stat")
    expect(chart).to_be_visible()
    box = chart.bounding_box()
    assert box["y"] + box["height"] <= 900, "in sight without scrolling"
    assert do.count <= 2


def test_four_runs_are_compared_with_four_actions(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **WIDE)
    do = Actions(tab.page)
    do.click(tab.frame.locator(".menu-button", has_text="Compare"))
    for run in ("diverged", "outlier", "vanishing"):
        do.click(tab.frame.locator(".tick", has_text=run))
    expect(tab.frame.locator(".menu-button", has_text="Compare: 4 runs")).to_be_visible()
    tab.settle()
    assert len(tab.layout()["panes"]) == 4
    expect(tab.frame.locator(".fresh").first).to_contain_text("baseline, outlier, vanishing: last step 590")
    expect(tab.frame.locator(".fresh").last).to_contain_text("diverged: failed")
    assert do.count <= 4


def test_all_runs_are_compared_from_the_overview_with_one_action(models: Pages) -> None:
    page = landing(models)
    page.get_by_role("button", name="Compare all 5 runs").click()
    tab = Tab(page, page)
    tab.settle()
    assert len(tab.layout()["panes"]) == 5
    expect(page.locator(".remark").first).to_contain_text("have no module in common: these are different models")


# --- Many runs ---


def test_runs_can_be_shown_as_ratios_to_the_first(models: Pages) -> None:
    state = {"page": "map", "run": "baseline", "vs": "outlier", "more": '["vanishing"]', "kind": "activation"}
    tab = alone(models, parameters(**state, search="layers.7.up"), **WIDE)
    assert len(tab.layout()["panes"]) == 3
    tab.open_menu("Compare")
    tab.frame.get_by_text("Ratio to the first", exact=True).click()
    expect(tab.frame.locator("canvas.legend")).to_have_attribute("aria-label", re.compile("ratio to baseline"))
    tab.page.keyboard.press("Escape")
    found = re.search(r"\u00d7(\d+\.\d)", tab.hover(0, 400, pane=1))
    assert found is not None
    assert 30 < float(found[1]) < 50, "a run with forty times as much"
    assert tab.state()["against"] == "first"


# --- Roles, order, groups ---


def test_many_modules_are_grouped_by_role_and_few_are_not(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **WIDE)
    expect(tab.frame.get_by_label("Group", exact=True)).to_have_value("roles")
    assert tab.hover(1, 100).startswith("layers.*.norm1")
    assert "median of the 12 modules of this role" in tab.hover(1, 100)
    tab.frame.get_by_label("Depth of the module tree").fill("1")
    tab.settle()
    assert "layers.*.q_proj" in tab.hover(2, 100)
    tab.open_menu("View")
    tab.frame.get_by_text("Most", exact=True).click()
    tab.page.keyboard.press("Escape")
    assert "most of the 12 modules" in tab.hover(2, 100)
    tab.choose("Group", "tree")
    tab.settle()
    assert tab.hover(1, 100).startswith("layers")


def test_groups_have_no_blank_rows(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation", group="tree", depth="2"), **WIDE)
    assert "median of the 108 below" in tab.hover(1, 100), "an open group shows the median of its modules"


def test_rows_can_be_sorted_by_value_and_by_change(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="outlier", kind="activation"), **WIDE)
    for order in ("value", "change", "unusual"):
        tab.choose("Sort", order)
        tab.settle()
        assert tab.hover(0, 400).startswith("layers.7.up"), order
    assert tab.state()["sort"] == "unusual"


# --- The strip of scalars ---


def test_scalars_stand_above_the_map_on_its_steps(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **WIDE)
    x, _ = tab.place(0, 300)
    box = tab.frame.locator(".map-stage").bounding_box()
    tab.page.mouse.move(x, box["y"] + 30)
    tip = tab.frame.locator(".tip")
    expect(tip).to_contain_text("train/loss 1.4")
    expect(tip).to_contain_text("train.lr/0 3.00e\u22124")
    tab.open_menu("View")
    tab.frame.locator(".menu-box .tick", has_text="accuracy").click()
    tab.page.keyboard.press("Escape")
    tab.page.mouse.move(x + 1, box["y"] + 30)
    expect(tip).to_contain_text("accuracy")
    assert "accuracy" in tab.state()["scalars"]


# --- Findings ---


def test_a_card_tells_onset_peak_last_and_count(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="vanishing", kind="gradient"), **WIDE)
    finding = tab.frame.locator(".finding-card", has_text="vanishing gradient")
    expect(finding.locator(".finding-step")).to_have_text("step 90")
    expect(finding.locator(".finding-when")).to_have_text("since step 90, worst at 410, last at 590, 51 times")


def test_a_finding_zooms_to_its_onset_and_links_to_its_rule(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="vanishing", kind="gradient"), **WIDE)
    finding = tab.frame.locator(".finding-card", has_text="vanishing gradient")
    finding.get_by_role("button", name="Zoom to onset: step 90").click()
    tab.settle()
    low, high = tab.layout()["view"]
    assert low < 90 < high
    assert high - low < 120
    link = finding.get_by_role("link", name="What to do")
    assert link.get_attribute("href").endswith("/tbhooks/docs.html#vanishing_gradient")


def test_a_muted_rule_stays_muted_in_the_address(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="vanishing", kind="gradient"), **WIDE)
    tab.frame.get_by_role("button", name="Mute: do not show findings of low precision").click()
    expect(tab.frame.locator(".finding-rule")).to_have_text(["vanishing gradient"])
    assert tab.state()["muted"] == '["low_precision"]'
    tab.page.reload()
    expect(tab.frame.locator(".finding-rule")).to_have_text(["vanishing gradient"])
    tab.frame.get_by_role("button", name="low precision: show its findings again").click()
    expect(tab.frame.locator(".finding-rule")).to_have_text(["vanishing gradient", "low precision"])


# --- What the colours cannot show ---


def test_an_update_of_a_zero_weight_has_no_reference_yet_and_is_not_infinite(models: Pages) -> None:
    state = {"page": "map", "run": "baseline", "kind": "update", "stat": "ratio", "search": "layers.2.down"}
    tab = alone(models, parameters(**state), **WIDE)
    tooltip = tab.hover(0, 0)
    assert "no reference yet" in tooltip
    assert "Inf" not in tooltip
    assert "no reference yet" not in tab.hover(0, 10)
    label = tab.frame.locator("canvas.legend").get_attribute("aria-label")
    assert "blue grey is no reference yet" in label


def test_cells_beyond_the_range_of_the_colours_say_so_and_the_full_range_has_none(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="wide", kind="activation", search="blocks.54."), **WIDE)
    legend = tab.frame.locator("canvas.legend")
    assert "above the range of the colours" in tab.hover(5, 50)
    expect(legend).to_have_attribute("aria-label", re.compile("with values beyond it as far as"))
    tab.frame.get_by_text("Full", exact=True).click()
    expect(legend).not_to_have_attribute("aria-label", re.compile("beyond"))
    assert "above the range" not in tab.hover(5, 50)


# --- Keys and space ---


def test_keys_search_help_and_close(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **WIDE)
    tab.page.keyboard.press("/")
    expect(tab.frame.get_by_label("Find modules by text")).to_be_focused()
    tab.page.keyboard.type("q_proj?")
    expect(tab.frame.locator(".help")).to_be_hidden()
    tab.frame.get_by_label("Find modules by text").fill("")
    tab.frame.locator(".map-stage").focus()
    tab.page.keyboard.press("?")
    expect(tab.frame.locator(".help")).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(tab.frame.locator(".help")).to_be_hidden()
    tab.click(3, 200)
    expect(tab.frame.locator(".detail-name")).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(tab.frame.locator(".detail-name")).to_have_count(0)


def test_the_tooltip_leaves_with_its_run(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **WIDE)
    tab.hover(3, 200)
    expect(tab.frame.locator(".tip")).to_be_visible()
    tab.choose("Run", "outlier")
    expect(tab.frame.locator(".tip")).to_be_hidden()


@pytest.mark.parametrize("width", [1100, 1440])
def test_the_controls_are_two_rows(models: Pages, width: int) -> None:
    size = {"viewport": {"width": width, "height": 800}}
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **size)
    assert tab.frame.locator(".controls").bounding_box()["height"] < 90


def test_few_rows_leave_room_for_the_panel_below_the_map(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation", search="layers.3."), **WIDE)
    below = tab.frame.locator(".panel").bounding_box()["y"]
    maps = tab.frame.locator(".map-stage").bounding_box()
    assert below >= maps["y"] + maps["height"] - 1
    assert maps["width"] > 1300


def test_the_picture_has_all_rows_also_those_out_of_sight(models: Pages, tmp_path: Any) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation", group="tree", rows="read", depth="9"))
    saved = tmp_path / "saved.png"
    tab.save("Save the maps as a picture").save_as(saved)
    height = int.from_bytes(saved.read_bytes()[20:24], "big")
    rows = 111 + 13  # modules, and the groups above them
    assert height > rows * tab.layout()["rowHeight"], "at least a pixel for each of the screen's"
    assert rows * tab.layout()["rowHeight"] > 1000, "more than the screen shows"


# --- Distributions ---


def test_a_distribution_is_linear_at_first_and_signed_log_on_request(models: Pages) -> None:
    picks = '[["layers.3.up",""]]'
    state = {"page": "map", "run": "baseline", "vs": "outlier", "kind": "activation", "picks": picks, "step": "300"}
    tab = alone(models, parameters(**state), **WIDE)
    part = tab.frame.locator(".detail-distribution")
    expect(part.get_by_label("axis")).to_have_value("linear")
    expect(part.locator("svg")).to_contain_text("count per bin")
    part.get_by_label("axis").select_option("log")
    expect(part.locator("svg")).to_contain_text("count per half-octave bin")
    part.get_by_label("axis").select_option("linear")
    part.get_by_label("over it").select_option("first")
    expect(part.locator(".detail-outline")).to_have_count(2)
    part.get_by_label("over it").select_option("run outlier")
    expect(part.locator(".detail-outline")).to_have_count(2)


def test_the_steps_of_a_distribution_can_be_played_and_scrubbed(models: Pages) -> None:
    picks = '[["layers.3.up",""]]'
    state = {"page": "map", "run": "baseline", "kind": "activation", "picks": picks, "step": "500"}
    tab = alone(models, parameters(**state), **WIDE)
    part = tab.frame.locator(".detail-distribution")
    slider = part.get_by_label("Step of the distribution")
    expect(part.locator(".scrubber-step")).to_have_text("step 500")
    slider.fill("2")
    expect(tab.frame.locator(".detail-step")).to_have_text("step 100")
    part.get_by_role("button", name="Play").click()
    expect(part.locator(".scrubber-step")).to_have_text("step 550")
    expect(tab.frame.locator(".detail-step")).to_have_text("step 550")


def test_the_histograms_of_a_map_are_read_before_somebody_clicks(models: Pages) -> None:
    page = models.open("/data/plugin/tbhooks/core/style.css", **WIDE)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/distribution?" in request.url else None)
    page.goto(models.address + ALONE + "#tbhooks&" + parameters(page="map", run="baseline", kind="activation"))
    tab = Tab(page, page)
    tab.settle()
    page.wait_for_timeout(1000)
    assert len(asked) == 1
    tab.choose("Stat", "max")
    page.wait_for_timeout(1000)
    assert len(asked) == 1, "once for each kind"


# --- Small things on the map ---

PIXELS = """([query, x, y, width, height]) => {
  const canvas = document.querySelector(query), scale = canvas.width / canvas.clientWidth;
  const box = [x, y, width, height].map((each) => Math.round(each * scale));
  const { data } = canvas.getContext("2d").getImageData(...box);
  return [...data].some((value, i) => i % 4 === 3 ? false : value !== data[i % 4]);
}"""


def test_a_row_has_a_sparkline_of_its_own_beside_its_name(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="outlier", kind="activation", search="layers.7."), **WIDE)
    layout = tab.layout()
    left = layout["panes"][0]["x"]
    for row in range(3):
        top = layout["top"] + row * layout["rowHeight"]
        box = [left - 46, top + 2, 34, layout["rowHeight"] - 4]
        assert tab.frame.evaluate(PIXELS, [".map-base", *box]), "something is drawn between the name and the cells"


def test_a_finding_is_marked_in_the_strip_at_its_onset(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="vanishing", kind="gradient"), **WIDE)
    layout = tab.layout()
    low, high = layout["view"]
    pane = layout["panes"][0]
    at = {step: pane["x"] + (step - low) / (high - low) * pane["width"] for step in (90, 200)}
    drawn = {step: tab.frame.evaluate(PIXELS, [".map-over", x - 3, 20, 7, 10]) for step, x in at.items()}
    assert drawn == {90: True, 200: False}


def test_a_finding_is_reached_from_the_first_page_with_the_keyboard_alone(models: Pages) -> None:
    page = landing(models)
    link = card(page, "vanishing").locator(".chain-link").first
    for _ in range(40):
        page.keyboard.press("Tab")
        if link.evaluate("(each) => each === document.activeElement"):
            break
    outline = link.evaluate("(each) => getComputedStyle(each).outlineStyle")
    assert outline != "none", "where the focus is can be seen"
    page.keyboard.press("Enter")
    expect(page.locator(".detail-name")).to_have_text("layers.0.q_proj")
    page.keyboard.press("Escape")
    expect(page.locator(".detail-name")).to_have_count(0)


def test_a_name_breaks_after_its_dots(models: Pages) -> None:
    picks = '[["layers.0.q_proj",""]]'
    tab = alone(models, parameters(page="map", run="vanishing", kind="gradient", picks=picks, step="300"), **WIDE)
    name = tab.frame.locator(".detail-name")
    expect(name).to_have_text("layers.0.q_proj")
    assert name.locator("wbr").count() >= 2


def test_a_run_without_scalars_is_told_a_call_that_works(models: Pages) -> None:
    page = models.open("/data/plugin/tbhooks/core/style.css", **WIDE)
    page.route("**/scalars*", lambda route: route.fulfill(json={"scalars": []}))
    page.goto(models.address + ALONE)
    hint = card(page, "baseline").get_by_text("No scalars in this run").inner_text()
    found = re.search(r"w\.log\(.*?\)", hint)
    assert found is not None
    with tbhooks.watch(torch.nn.Linear(1, 1)) as w:
        eval(found[0], {"w": w, "loss": torch.tensor(1.0)})


def test_another_stat_asks_for_its_numbers_only(models: Pages) -> None:
    tab = alone(models, parameters(page="map", run="baseline", kind="activation"), **WIDE)
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url.partition("/tbhooks/")[2].partition("?")[0]))
    tab.choose("Stat", "max")
    expect(tab.frame.locator("canvas.legend")).to_have_attribute("aria-label", re.compile("activation max"))
    assert set(asked) - {"runs"} == {"matrix"}
    assert tab.hover(1, 100).startswith("layers.*.norm1")
