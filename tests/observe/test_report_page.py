"""The report page in a browser: panels, filters, colours and keyboard control work without network access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_comm.observe.records import FAULTS, METRICS, FaultRecord, append
from moe_comm.observe.report import write_report
from moe_comm.observe.report.page import PANELS
from tests.browser import WIDTH, headless, wait_until_drawn
from tests.support.synthetic import Straggler, SyntheticFault, SyntheticRun, write_run

pytest.importorskip("plotly", reason="needs the observe extra")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of two small runs, and their comparison."""
    folder = tmp_path_factory.mktemp("runs")
    faults = (SyntheticFault(10, "died", (1,)), SyntheticFault(20, "nonfinite", (2,), "skip", injected=True))
    a = SyntheticRun(
        ranks=4,
        steps=40,
        offloads=True,
        ranks_per_host=2,
        pp=2,
        ep=2,
        layers=3,
        stragglers=(Straggler(3, 1.4),),
        faults=faults,
    )
    write_run(folder / "a", a)
    hostile = "<img src=x onerror=window.hacked=1></script><script>window.hacked=1</script>"
    append(folder / "a" / FAULTS, FaultRecord(1_700_000_050.0, 12, hostile, [3], "none", hostile))
    for step in (20, 40):
        append(folder / "a" / METRICS, {"step": step, "validation/loss": 2.0})
    write_run(folder / "b", SyntheticRun(ranks=2, steps=30, step_s=1.2, seed=1, offloads=True))
    reports = {"a": [folder / "a"], "b": [folder / "b"], "both": [folder / "a", folder / "b"]}
    return {name: write_report(runs, folder / f"{name}.html") for name, runs in reports.items()}


@pytest.fixture
def page(browser: Any, pages: dict[str, Path]) -> Any:
    """Open a report; at the end, check that there were no console messages and no network requests."""

    opened: list[str] = []

    def show(name: str) -> Any:
        opened.append(pages[name].as_uri())
        browser.get(opened[-1])
        wait_until_drawn(browser)
        return browser

    yield show
    assert browser.get_log("browser") == []
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = [one["params"] for one in events if one["method"] == "Network.requestWillBeSent"]
    # Only requests of the report count; the first tab of the browser may send others.
    urls = [one["request"]["url"] for one in sent if one["documentURL"] in opened]
    assert urls and [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.execute_script("return window.hacked") is None


def run_in(browser: Any, script: str, *arguments: Any) -> Any:
    return browser.execute_script(script, *arguments)


def set_to(browser: Any, name: str, value: str) -> None:
    """Select ``value`` in the control ``name``."""
    script = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'));"
    )
    run_in(browser, script, name, value)
    assert run_in(browser, "return document.getElementById(arguments[0]).value", name) == value


def traces(browser: Any, name: str) -> list[dict[str, Any]]:
    """Return the traces passed to Plotly."""
    script = (
        "return (document.getElementById('chart-' + arguments[0]).data || [])"
        ".map(t => ({type: t.type, x: Array.from(t.x || []), y: Array.from(t.y || []), z: t.z || null, name: t.name}))"
    )
    found: list[dict[str, Any]] = run_in(browser, script, name)
    return found


def marks(browser: Any, name: str) -> int:
    """Return the visible lines, bars, images and points."""
    script = (
        "return document.querySelectorAll('#chart-' + arguments[0] + ' :is(.js-line, .point, .js-fill, image, .hm)')"
        ".length"
    )
    return int(run_in(browser, script, name))


def check_panels(browser: Any) -> None:
    """Check that every panel is drawn and labelled."""
    for panel in PANELS:
        assert marks(browser, panel.name), f"{panel.name} is empty"
        box = run_in(browser, f"return document.getElementById('chart-{panel.name}').getBoundingClientRect().toJSON()")
        assert box["width"] > 300 and box["height"] >= 300
        label = run_in(browser, f"return document.getElementById('chart-{panel.name}').getAttribute('aria-label')")
        assert label.startswith(panel.title) and "series" in label
    assert run_in(browser, "return document.documentElement.scrollWidth") <= WIDTH, "the page is wider than the window"


def test_every_panel_is_drawn_and_later_starts_and_validation_losses_are_marked(page: Any) -> None:
    browser = page("a")
    check_panels(browser)
    marked = "const layout = document.getElementById('chart-' + arguments[0]).layout; "
    for name in ("loss", "throughput", "split", "memory"):
        shapes = run_in(browser, marked + "return layout.shapes.map((one) => [one.x0, one.line.dash])", name)
        assert shapes == [[4.5, "dot"]], name
    assert run_in(browser, marked + "return layout.annotations.map((one) => one.text)", "loss") == ["start 1"]
    assert not run_in(browser, marked + "return layout.shapes", "timeline")
    (validation,) = (one for one in traces(browser, "loss") if one["name"] == "validation loss")
    assert (validation["x"], validation["y"]) == ([20, 40], [2, 2])


def test_steps_ranks_hosts_and_layers_can_be_filtered(page: Any) -> None:
    browser = page("a")
    set_to(browser, "from", "11")
    set_to(browser, "to", "20")
    assert traces(browser, "loss")[0]["x"] == list(range(11, 21))
    assert traces(browser, "split")[0]["x"] == list(range(11, 21))
    assert traces(browser, "memory")[0]["x"] == list(range(11, 21))
    set_to(browser, "ranks", "0, 2-3")
    assert [one["name"] for one in traces(browser, "memory")] == ["rank 0", "rank 2", "rank 3"]
    set_to(browser, "host", "1")
    assert [one["name"] for one in traces(browser, "memory")] == ["rank 2", "rank 3"]
    assert run_in(browser, "return document.getElementById('filter-status').textContent") == "2 of 4 rank(s) shown"
    set_to(browser, "ranks", "two")
    assert run_in(browser, "return document.getElementById('ranks').getAttribute('aria-invalid')") == "true"
    before = traces(browser, "health")
    set_to(browser, "layer", "2")
    after = traces(browser, "health")
    assert len(before) == 2 and [one["name"] for one in after] == ["layers.2.moe"]
    heat = traces(browser, "experts")[0]
    assert heat["y"] == [20] and len(heat["z"][0]) == 16 and heat["z"][0][-1] == 0, "the dead expert of the last layer"
    run_in(browser, "document.getElementById('reset').click()")
    wait = "const done = arguments[0]; setTimeout(done, 50)"
    browser.execute_async_script(wait)
    assert traces(browser, "loss")[0]["x"] == list(range(1, 41))
    assert len(traces(browser, "memory")) == 4


def test_expert_load_moves_through_time_and_stragglers_have_two_views(page: Any) -> None:
    browser = page("a")
    last = traces(browser, "experts")[0]
    assert last["y"] == [0, 1, 2]
    set_to(browser, "slide", "0")
    first = traces(browser, "experts")[0]
    assert run_in(browser, "return document.getElementById('slide-step').textContent") == "step 1"
    assert first["z"] != last["z"]
    folded = traces(browser, "stragglers")[0]
    assert folded["y"] == ["PP 0", "PP 1"] and folded["z"][1][1] == pytest.approx(1.4 / 1.2, rel=0.05)
    set_to(browser, "view-stragglers", "host")
    assert traces(browser, "stragglers")[0]["y"] == ["host-000", "host-001"]
    assert "rank 3 (host-001)" in run_in(browser, "return document.getElementById('slowest').textContent")
    assert {one["type"] for one in traces(browser, "links")} == {"bar"}
    for view in ("rank", "host", "probe"):
        set_to(browser, "view-links", view)
        assert traces(browser, "links")[0]["type"] == "heatmap" and marks(browser, "links")


def test_owners_of_experts_are_shown_for_all_layers_and_over_the_switches_of_one(page: Any) -> None:
    browser = page("a")
    last = traces(browser, "owners")[0]
    assert last["y"] == ["layers.0.moe", "layers.1.moe", "layers.2.moe"] and len(last["x"]) == 16
    assert sorted(last["z"][0]) == [0] * 8 + [1] * 8
    set_to(browser, "layer", "0")
    switches = traces(browser, "owners")[0]
    assert switches["y"][0] == "step 1" and switches["z"][-1] == last["z"][0]
    set_to(browser, "to", "1")
    assert traces(browser, "owners")[0]["z"] == switches["z"][:1]


def test_two_runs_are_overlaid_with_a_table_of_differences(page: Any) -> None:
    browser = page("both")
    check_panels(browser)
    assert [one["name"] for one in traces(browser, "loss")] == ["a", "b", "a: validation loss"]
    rows = run_in(browser, "return [...document.querySelectorAll('#differences tr')].map(r => r.innerText)")
    steps = next(row for row in rows if row.startswith("Step, median"))
    assert len(rows) > 10 and "better" not in steps.split("\t")[1]
    assert traces(browser, "split")[0]["y"] == ["a", "b"]
    assert len(traces(browser, "memory")) == 2
    set_to(browser, "run", "1")
    assert traces(browser, "stragglers")[0]["y"] == ["PP 0"]


def test_colours_follow_the_system_and_the_switch(page: Any, browser: Any) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    lines = "return document.getElementById('chart-loss').data[0].line.color"
    try:
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        page("b")
        dark = run_in(browser, background), run_in(browser, lines)
        set_to(browser, "theme", "light")
        light = run_in(browser, background), run_in(browser, lines)
        assert dark[0] == "rgb(15, 19, 24)" and light[0] == "rgb(255, 255, 255)" and dark[1] != light[1]
        set_to(browser, "theme", "system")
        assert run_in(browser, background) == dark[0]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_all_controls_and_tables_are_reachable_by_keyboard(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser = page("a")
    reached: list[str] = []
    outlined: list[bool] = []
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        found = run_in(
            browser,
            "const e = document.activeElement; return [e === document.body ? 'BODY' : e.id || e.parentElement.id"
            " || e.className,"
            "getComputedStyle(e).outlineStyle !== 'none', e.getBoundingClientRect().left >= 0]",
        )
        if found[0] in reached or found[0] == "BODY":
            break
        reached.append(found[0])
        outlined.append(found[1] and found[2])
    controls = ["skip", "from", "to", "host", "ranks", "layer", "theme", "reset", "view-loss", "slide", "view-links"]
    assert [name for name in reached if name in controls] == [
        *controls[:9],
        *(name for name in reached if name in controls[9:]),
    ]
    assert set(controls) <= set(reached) and {f"table-{panel.name}" for panel in PANELS} <= set(reached)
    without_outline = [name for name, is_visible in zip(reached, outlined, strict=True) if not is_visible]
    assert not without_outline, "no visible outline in focus"
    slide = browser.find_element("id", "slide")
    slide.send_keys(Keys.HOME)
    assert run_in(browser, "return document.getElementById('slide').getAttribute('aria-valuetext')") == "step 1"
    browser.find_element("css selector", "#table-loss summary").send_keys(Keys.ENTER)
    browser.execute_async_script("const done = arguments[0]; setTimeout(done, 50)")
    assert run_in(browser, "return document.querySelectorAll('#table-loss tr').length") == 40 + 2
