"""The tab over time and elsewhere: links, themes, screens, files, runs that grow or vanish, a server that is silent."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser_tab import (
    ALONE,
    FIRST,
    MODULES,
    ROWS,
    STEPS,
    Board,
    Pages,
    Tab,
    alone,
    frame_of_tab,
    in_tensorboard,
    level,
    parameters,
    shown,
)

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

OUTSIDE = """() => [...document.querySelectorAll(".controls *, .under *")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).length"""


def test_a_link_shows_the_same_view_again(pages: Pages) -> None:
    tab = in_tensorboard(pages, FIRST)
    tab.choose("Stat", "max")
    tab.height("Fit")
    tab.click(3, 200)
    tab.page.mouse.move(*tab.place(3, 200))
    tab.page.keyboard.down("Control")
    tab.page.mouse.wheel(0, -400)
    tab.page.keyboard.up("Control")
    before = tab.state()
    view = tab.layout()["view"]
    assert view[1] - view[0] < 590
    tab.page.reload()
    again = Tab(tab.page, frame_of_tab(tab.page))
    expect(again.frame.get_by_label("Stat", exact=True)).to_have_value("max")
    expect(again.frame.locator(".detail-name")).to_have_text("blocks.0.norm")
    assert again.layout()["view"] == pytest.approx(view, abs=0.02)
    assert again.state() == before


def test_the_back_button_and_other_tabs_still_work(pages: Pages) -> None:
    tab = in_tensorboard(pages, FIRST)
    entries = tab.page.evaluate("() => history.length")
    tab.choose("Stat", "max")
    tab.click(3, 200)
    assert tab.page.evaluate("() => history.length") == entries, "choices do not fill the history"
    assert tab.state()["stat"] == "max"
    tab.page.evaluate("() => { location.hash = location.hash.replace('stat=max', 'stat=min'); }")
    expect(tab.frame.get_by_label("Stat", exact=True)).to_have_value("min")
    tab.page.go_back()
    expect(tab.frame.get_by_label("Stat", exact=True)).to_have_value("max")
    assert tab.state()["stat"] == "max"


def test_the_theme_is_that_of_tensorboard_and_changes_with_it(pages: Pages, screenshots: Path) -> None:
    tab = in_tensorboard(pages, FIRST)
    background = "() => getComputedStyle(document.body).backgroundColor"
    assert tab.frame.evaluate(background) == "rgb(255, 255, 255)"
    tab.page.evaluate("() => document.body.classList.add('dark-mode')")
    tab.frame.wait_for_selector("html.dark", state="attached")
    assert tab.frame.evaluate(background) == tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    tab.settle()
    tab.page.screenshot(path=screenshots / "dark.png")


def test_numbers_are_downloaded_as_they_are_shown(pages: Pages) -> None:
    tab = alone(pages, FIRST + "&" + parameters(**{"from": "95", "to": "205"}))
    with Path(tab.save("Download the shown numbers").path()).open(newline="") as file:
        head, *lines = list(csv.reader(file))
    steps = [int(word) for word in head[5:]]
    assert steps == [step for step in STEPS if 95 <= step <= 205]
    assert [line[3] for line in lines] == list(ROWS)
    assert [line[3] for line in lines if line[4] == "median"] == ["blocks"], "which is not watched itself"
    for line in lines:
        if line[4] == "median":
            continue
        wanted = [level("first", MODULES.index(line[3]), step) for step in steps]
        assert [float(word) for word in line[5:]] == pytest.approx(wanted, rel=1e-6)


def test_the_picture_has_the_maps_a_title_and_a_legend(pages: Pages, screenshots: Path) -> None:
    tab = alone(pages, FIRST + "&" + parameters(vs="second"))
    download = tab.save("Save the maps as a picture")
    saved = screenshots / "saved.png"
    download.save_as(saved)
    assert saved.read_bytes().startswith(b"\x89PNG")
    width, height = (int.from_bytes(saved.read_bytes()[at : at + 4], "big") for at in (16, 20))
    box = tab.frame.locator(".map-stage").bounding_box()
    assert width > 2 * box["width"]
    rows = tab.layout()["top"] + len(ROWS) * tab.layout()["rowHeight"]
    assert height > 2 * rows + 200, "a title above and a legend below"
    assert download.suggested_filename == "tbhooks-first-second-activation-std.png"


def test_new_steps_arrive_and_nobody_loses_his_place(pages: Pages, board: Board) -> None:
    board.grow(40)
    tab = alone(pages, parameters(run="live", kind="activation", stat="max"))
    expect(tab.frame.locator(".fresh")).to_have_text(re.compile("live; last step"))
    first = tab.layout()["view"][1]
    tab.click(2, 20)
    earlier = alone(pages, parameters(run="live", kind="activation", stat="max", **{"from": "5", "to": "15"}))
    at_end = alone(
        pages, parameters(run="live", kind="activation", stat="max", **{"from": str(first - 10), "to": str(first)})
    )
    last = round(first - 0.5)
    board.grow(last + 1, last + 2)
    for each, wanted in ((tab, [-0.5, first + 2]), (earlier, [5, 15]), (at_end, [first - 8, first + 2])):
        each.look_again()
        expect(each.frame.locator(".fresh")).to_contain_text(f"last step {last + 2}")
        each.settle()
        assert each.layout()["view"] == pytest.approx(wanted)
    assert shown(1.0 + last + 2) in tab.hover(1, last + 2), "the value of the new step"
    expect(tab.frame.locator(".detail-name")).to_have_text("layer.1")


def test_a_silent_server_is_reported_quietly_and_recovered_from(pages: Pages) -> None:
    pages.expected = "Failed to load resource"  # the browser itself says so
    tab = alone(pages, FIRST)
    banner = tab.frame.locator(".banner")
    tab.page.route("**/runs", lambda route: route.abort())
    tab.look_again()
    expect(banner).to_contain_text("TensorBoard does not answer")
    assert "step 100" in tab.hover(0, 100), "what was there stays"
    tab.page.unroute("**/runs")
    tab.look_again()
    expect(banner).to_be_hidden()


def answer_runs(tab_page: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    def respond(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, json=change(response.json()))

    tab_page.route("**/runs", respond)


def test_a_run_that_vanishes_is_reported_and_stays_on_show(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    answer_runs(tab.page, lambda reply: reply | {"runs": [run for run in reply["runs"] if run["name"] != "first"]})
    tab.look_again()
    expect(tab.frame.locator(".banner")).to_contain_text("first is no longer in the log directory")
    assert "step 100" in tab.hover(0, 100)
    tab.page.unroute("**/runs")
    tab.look_again()
    expect(tab.frame.locator(".banner")).to_be_hidden()


def test_a_run_that_begins_meanwhile_does_not_take_the_place_of_the_one_on_show(pages: Pages) -> None:
    tab = alone(pages, parameters(page="map"))
    expect(tab.frame.get_by_label("Run", exact=True)).to_have_value("live")
    later = {"first": {"last_time": 4e9}}
    answer_runs(tab.page, lambda reply: reply | {"runs": [run | later.get(run["name"], {}) for run in reply["runs"]]})
    tab.look_again()
    tab.choose("Stat", "max")
    expect(tab.frame.locator("canvas.legend")).to_have_attribute("aria-label", re.compile("activation max"))
    expect(tab.frame.get_by_label("Run", exact=True)).to_have_value("live")


def test_data_without_new_steps_is_called_stale(pages: Pages) -> None:
    tab = alone(pages, FIRST)
    answer_runs(
        tab.page, lambda reply: reply | {"runs": [run | {"last_time": reply["now"] - 180} for run in reply["runs"]]}
    )
    tab.look_again()
    expect(tab.frame.locator(".fresh")).to_have_text("no new step for 3 min; last step 590")


def test_without_data_the_tab_says_how_to_get_it_and_fills_by_itself(pages: Pages, screenshots: Path) -> None:
    page = pages.open("/data/plugin/tbhooks/core/style.css")
    answer_runs(page, lambda reply: reply | {"runs": []})
    page.goto(pages.address + ALONE)
    expect(page.locator(".empty")).to_be_visible()
    expect(page.locator(".empty")).to_contain_text("tbhooks.watch(model, SummaryWriter(")
    page.screenshot(path=screenshots / "empty.png")
    page.unroute("**/runs")
    Tab(page, page).look_again()
    expect(page.locator(".card").first).to_be_visible()
    expect(page.locator(".empty")).to_be_hidden()


def test_a_run_the_link_names_but_nobody_has_is_reported(pages: Pages) -> None:
    tab = alone(pages, parameters(page="map", run="gone", picks="not json", depth="-7", scale="odd"))
    expect(tab.frame.locator(".banner")).to_contain_text("Run gone is not in the log directory")


@pytest.mark.parametrize("dense", [1, 2])
def test_the_canvas_has_a_pixel_for_every_pixel_of_the_screen(pages: Pages, dense: int) -> None:
    tab = alone(pages, FIRST, device_scale_factor=dense)
    backing, shown_as = tab.frame.evaluate(
        "() => { const c = document.querySelector('.map-base'); return [c.width, c.clientWidth]; }"
    )
    assert backing == dense * shown_as


@pytest.mark.parametrize("width", [900, 1300, 2000])
def test_nothing_overflows_on_narrow_and_wide_screens(pages: Pages, screenshots: Path, width: int) -> None:
    tab = alone(pages, FIRST + "&" + parameters(vs="second"), viewport={"width": width, "height": 800})
    tab.page.screenshot(path=screenshots / f"wide-{width}.png")
    assert tab.frame.evaluate(
        "() => document.documentElement.scrollWidth <= innerWidth && document.body.scrollHeight <= innerHeight"
    )
    outside = tab.frame.evaluate(OUTSIDE)
    assert outside == 0
