"""Looking at a run in the tab, in a real browser over a real TensorBoard, with numbers that are known beforehand."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser_tab import (
    ALONE,
    BAD_SINCE,
    FIRST,
    HOSTILE,
    MODULES,
    Pages,
    Tab,
    alone,
    in_tensorboard,
    level,
    parameters,
    shown,
)
from tests.support.processes import wait_for

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

COLOURS = """() => {
  const canvas = document.querySelector(".map-base");
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
}"""
NAMELESS = """() => [...document.querySelectorAll("button, select, input")]
  .filter((each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim())).length"""


def test_the_tab_opens_in_tensorboard_and_shows_the_map_and_the_findings(pages: Pages, screenshots: Path) -> None:
    tab = in_tensorboard(pages, FIRST)
    expect(tab.frame.locator(".finding")).to_have_count(3)
    assert tab.layout()["view"] == [-5, 595]
    tab.page.screenshot(path=screenshots / "tab.png")
    painted = tab.frame.evaluate(COLOURS)
    assert painted > 50


def test_the_tab_is_loaded_as_one_script_and_one_style_sheet(pages: Pages) -> None:
    tab = in_tensorboard(pages, FIRST)
    names = "() => performance.getEntriesByType('resource').map(({ name }) => new URL(name).pathname)"
    loaded = [name for name in tab.frame.evaluate(names) if name.endswith((".js", ".css"))]
    assert sorted(loaded) == ["/data/plugin/tbhooks/tab.css", "/data/plugin/tbhooks/tab.js"]


BUILT = """window.asked = [];
const original = window.fetch;
window.fetch = (url, ...more) => {
  window.asked.push([new URL(url).pathname.split("/").at(-1), document.querySelector(".app") !== null]);
  return original(url, ...more);
};"""


def test_the_map_of_the_address_is_asked_for_before_the_page_is_built_and_once(pages: Pages) -> None:
    page = pages.context().new_page()
    page.add_init_script(BUILT)
    page.goto(pages.address + ALONE + "#tbhooks&" + parameters(run="first", vs="second", kind="activation"))
    tab = Tab(page, page)
    tab.settle()
    expect(page.locator(".fresh").first).to_contain_text("first")
    expect(page.locator(".fresh").last).to_contain_text("second")
    asked = page.evaluate("window.asked")
    assert sorted(name for name, _ in asked) == sorted(["runs", "findings", *2 * ["matrix", "scalars", "sites"]])
    assert [name for name, built in asked if built] == []


def test_an_address_that_changes_before_the_page_is_built_is_followed(pages: Pages) -> None:
    page = pages.context().new_page()

    def change(route: Any) -> None:
        other = "#tbhooks&" + parameters(run="second", kind="activation")
        page.evaluate("hash => (window.location.hash = hash)", other)
        route.continue_()

    page.route("**/runs", change, times=1)
    page.goto(pages.address + ALONE + "#tbhooks&" + FIRST)
    tab = Tab(page, page)
    tab.settle()
    assert page.get_by_label("Run", exact=True).input_value() == "second"


def test_the_server_computes_the_other_stats_while_the_map_is_looked_at(pages: Pages) -> None:
    page = alone(pages, parameters(run="second", kind="activation", stat="rms")).page
    asked = "performance.getEntriesByType('resource').map(({ name }) => /stat=(.+)&after=590/.exec(name)?.[1])"
    page.wait_for_function(f"() => {asked}.includes('p99')")
    prepared = ["norm", "abs_max", "zero_fraction", "p50", "p01", "p25", "p75", "p99"]
    assert [stat for stat in page.evaluate(asked) if stat is not None] == prepared


def test_hovering_a_cell_tells_module_step_and_value(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    for row, module, step in ((0, "stem", 100), (3, "blocks.0.norm", 250), (8, "head", 590)):
        tooltip = tab.hover(row, step)
        assert module in tooltip
        assert f"step {step}" in tooltip
        assert shown(level("first", MODULES.index(module), step)) in tooltip


def test_resting_on_a_cell_asks_for_what_its_details_need_and_the_click_does_not_ask_again(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url) if "/history?" in request.url else None)
    tab.hover(3, 250)
    wait_for(lambda: tab.page.wait_for_timeout(20) or bool(asked), "the question")
    tab.click(3, 250)
    expect(tab.frame.locator(".detail-name")).to_have_text("blocks.0.norm")
    expect(tab.frame.locator(".detail-section[aria-busy=true]")).to_have_count(0)
    assert len(asked) == 1


def test_hovering_says_what_was_not_seen_what_is_not_finite_and_what_is_a_median(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    assert "no data in this step" in tab.hover(0, 20)
    assert "holds NaN or Inf" in tab.hover(7, BAD_SINCE)
    assert "1 NaN in blocks.1.up" in tab.hover(7, BAD_SINCE), "the finding that began here"
    x, y = tab.place(1, 0)
    tab.page.mouse.click(tab.frame.locator(".map-stage").bounding_box()["x"] + 30, y)
    tooltip = tab.hover(1, 300)
    assert "median of the 6 below" in tooltip
    six = sorted(level("first", MODULES.index(name), 300) for name in MODULES if name.startswith("blocks."))
    assert shown((six[2] + six[3]) / 2) in tooltip
    assert x > 0


def test_choosing_kind_and_stat_changes_the_numbers(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    tab.choose("Stat", "mean")
    number = shown(level("first", 0, 100) * math.cos(100 / 60))
    wait_for(lambda: number in tab.hover(0, 100), "the mean")
    tab.choose("Kind", "weight")
    expect(tab.frame.get_by_label("Kind", exact=True)).to_have_value("weight")
    wait_for(lambda: "weight" in tab.hover(1, 100), "the weights")
    assert tab.state()["kind"] == "weight"


def test_the_scale_can_be_linear_and_full_and_the_legend_tells(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    legend = tab.frame.locator("canvas.legend")
    expect(legend).to_have_attribute("aria-label", re.compile("logarithmic"))
    tab.frame.get_by_text("Linear", exact=True).click()
    tab.frame.get_by_text("Full", exact=True).click()
    expect(legend).to_have_attribute("aria-label", re.compile("from 1e\u22124 to 6,900, linear"))


def test_clicking_a_cell_opens_its_details_and_shift_adds_others(pages: Pages, screenshots: Path) -> None:
    tab = alone(pages, FIRST)
    tab.click(3, 200)
    expect(tab.frame.locator(".detail-name")).to_have_text("blocks.0.norm")
    tab.click(4, 200, shift=True)
    tab.click(0, 200, shift=True)
    expect(tab.frame.locator(".chip-name")).to_have_text(["blocks.0.norm", "blocks.0.up", "stem"])
    colours = tab.frame.locator(".chip").evaluate_all(
        "(chips) => chips.map((chip) => chip.style.getPropertyValue('--c'))"
    )
    assert len(set(colours)) == 3
    tab.frame.get_by_label("Stop comparing blocks.0.up").click()
    expect(tab.frame.locator(".chip")).to_have_count(2)
    tab.page.screenshot(path=screenshots / "detail.png")


def test_the_compare_button_adds_without_a_key(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    tab.click(3, 200)
    tab.frame.get_by_role("button", name="+ Compare").click()
    for row in (0, 4, 6, 8):
        tab.click(row, 200)
    expect(tab.frame.locator(".chip")).to_have_count(4)


def test_a_row_that_is_a_median_says_how_to_get_details(pages: Pages) -> None:
    tab = alone(pages, FIRST + "&" + parameters(depth="1"))
    tab.click(1, 200)
    expect(tab.frame.locator(".hint")).to_contain_text("blocks is not watched itself")
    tab.frame.get_by_role("button", name="Open it").click()
    assert "blocks.0" in tab.hover(2, 200)


def test_a_finding_leads_to_its_module_kind_and_step(pages: Pages) -> None:
    tab = alone(pages, parameters(run="first", kind="weight", stat="norm", depth="1"))
    finding = tab.frame.locator(".finding", has_text="non finite")
    expect(finding).to_contain_text(f"step {BAD_SINCE}")
    finding.click()
    expect(tab.frame.locator(".detail-name")).to_have_text("blocks.1.up")
    expect(tab.frame.get_by_label("Kind", exact=True)).to_have_value("activation")
    assert tab.state() | {"step": str(BAD_SINCE), "kind": "activation"} == tab.state()
    names = [tab.hover(row, 100).splitlines()[0] for row in range(6)]
    assert "blocks.1.up" in names, "the tree is open down to the module"


def test_findings_stand_by_severity_with_their_first_step(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    expect(tab.frame.locator(".finding-rule")).to_have_text(["non finite", "unchanged weight", "loss spike"])
    expect(tab.frame.locator(".finding-step")).to_have_text(["step 500", "step 300", "step 400"])


def test_two_runs_share_a_scale_and_show_their_ratio(pages: Pages, screenshots: Path) -> None:
    tab = alone(pages, FIRST)
    tab.compare("second")
    expect(tab.frame.locator("canvas.legend")).to_have_attribute("aria-label", re.compile("second \u00f7 first"))
    tab.settle()
    assert len(tab.layout()["panes"]) == 3
    assert shown(level("second", 1, 200)) in tab.hover(3, 200, pane=1)
    tooltip = tab.hover(3, 200, pane=2)
    assert "\u00d72.00" in tooltip
    assert shown(level("first", 1, 200)) in tooltip
    tab.page.screenshot(path=screenshots / "two-runs.png")
    tab.frame.get_by_text("Linear", exact=True).click()
    assert "+" + shown(level("second", 1, 200) - level("first", 1, 200)) in tab.hover(3, 200, pane=2)


def test_search_finds_text_and_regular_expressions_and_forgives_wrong_ones(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    box = tab.frame.get_by_label("Find modules by text")
    note = tab.frame.locator(".search-note")
    box.fill("NORM")
    expect(note).to_have_text("2 found")
    assert "blocks.1.norm" in tab.hover(1, 100)
    box.fill("/^blocks\\.\\d$/")
    expect(note).to_have_text("2 found")
    box.fill("/(/")
    expect(note).to_contain_text("not a regular expression yet")
    box.fill("")
    expect(note).to_have_text("")


def test_the_depth_slider_closes_and_opens_levels(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    slider = tab.frame.get_by_label("Depth of the module tree")
    for depth, count in ((1, 3), (2, 5), (3, 9)):
        slider.fill(str(depth))
        tab.settle()
        assert tab.hover(count - 1, 100).startswith("head")


def test_everything_can_be_done_from_the_keyboard(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    spoken = tab.frame.locator(".map [aria-live]")
    stage = tab.frame.locator(".map-stage")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    expect(stage).to_be_focused()
    expect(spoken).to_contain_text("stem, step 590")
    tab.page.keyboard.press("ArrowLeft")
    expect(spoken).to_contain_text(f"step 580, activation std {shown(level('first', 0, 580))}")
    for _ in range(3):
        tab.page.keyboard.press("ArrowDown")
    expect(spoken).to_contain_text("blocks.0.norm, step 580")
    tab.page.keyboard.press("Home")
    expect(spoken).to_contain_text("step 0")
    tab.page.keyboard.press("Enter")
    expect(tab.frame.locator(".detail-name")).to_have_text("blocks.0.norm")
    tab.page.keyboard.press("ArrowUp")
    tab.page.keyboard.press("Shift+Enter")
    expect(tab.frame.locator(".chip")).to_have_count(2)
    tab.page.keyboard.press(" ")
    tab.settle()
    assert "blocks.1" in tab.hover(3, 100), "blocks.0 is closed"
    tab.page.keyboard.press("+")
    tab.settle()
    assert tab.layout()["view"][1] < 400
    tab.page.keyboard.press("0")
    tab.settle()
    assert tab.layout()["view"] == [-5, 595]
    nameless = tab.frame.evaluate(NAMELESS)
    assert nameless == 0


def test_dragging_pans_and_a_double_click_shows_all(pages: Pages) -> None:
    tab = alone(pages, FIRST + "&" + parameters(**{"from": "200", "to": "300"}))
    x, y = tab.place(4, 250)
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 50, y, steps=4)
    tab.page.mouse.up()
    tab.settle()
    low, high = tab.layout()["view"]
    moved = 50 * 100 / tab.layout()["panes"][0]["width"]
    assert (low, high) == pytest.approx((200 - moved, 300 - moved), abs=0.5)
    assert "picks" not in tab.state(), "a drag is not a click"
    tab.page.mouse.dblclick(x, y)
    tab.settle()
    assert tab.layout()["view"] == [-5, 595]


def test_hostile_names_stay_text(pages: Pages) -> None:
    tab = alone(pages, parameters(run="hostile", kind="activation", stat="std"))
    for row, name in enumerate(HOSTILE[:3]):
        assert name in tab.hover(row, 5)
        tab.click(row, 5, shift=True)
    expect(tab.frame.locator(".chip-name")).to_have_text(list(HOSTILE[:3]))
    expect(tab.frame.locator(".finding-message")).to_have_text(HOSTILE[1])
    assert tab.frame.evaluate("() => window.hacked") is None
    assert tab.frame.locator("img, .map script").count() == 0
    with Path(tab.save("Download the shown numbers").path()).open(newline="") as file:
        names = [line[3] for line in csv.reader(file)]
    assert "'=1+1" in names, "no spreadsheet takes it for a formula"
    assert tab.state()["run"] == "hostile"
