"""The page about a mapping in a browser: all panels draw for any pipeline, without network access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping
from moe_plan.pages.plan_page import OPERATORS, PASSES, data_of, panels, write_page
from moe_plan.pages.timeline import timeline
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.step.simulate import simulate
from tests.browser import WIDTH, headless, wait_until_drawn

pytest.importorskip("plotly", reason="needs the observe extra")
MAX_BYTES = 5_000_000


def request(name: str, gpus: int, batch: int) -> PlanRequest:
    return PlanRequest(model_named(name), cluster_named("h100", gpus), Workload(4096, capacity=1.0), batch)


def candidates(plan_request: PlanRequest, *mappings: str) -> list[PlanCandidate]:
    return [plan_request.candidate(Mapping.parse(one, plan_request.cluster.gpus, overlap="inter")) for one in mappings]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a page for pp 1 without other candidates, and one for pp 32 with candidates and a slow rank."""
    folder = tmp_path_factory.mktemp("pages")
    plan_request = request("olmoe-1b-7b", 8, 16)
    (one,) = candidates(plan_request, "ep=8")
    write_page(plan_request, one, timeline(plan_request.model(one.mapping)), (), folder / "deep" / "short.html")
    plan_request = request("deepseek-v3", 512, 2048)
    result = candidates(plan_request, "pp=32,vpp=1,ep=16", "pp=16,ep=16", "tp=2,pp=16,ep=16")
    model = plan_request.model(result[0].mapping)
    slow = simulate(model, {137: 1.5})
    write_page(plan_request, result[0], timeline(model, most=20_000), result, folder / "long.html", slow)
    return {"short": folder / "deep" / "short.html", "long": folder / "long.html"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def test_every_panel_is_drawn_without_network_access(browser: Any, pages: dict[str, Path]) -> None:
    marks = "return document.querySelectorAll(`#chart-${arguments[0]} :is(.js-line, .point, image, .hm)`).length"
    panels_by_page = {"short": ("step", "operators", "time", "memory", "links")}
    panels_by_page["long"] = (*panels_by_page["short"], "ranks")
    for name, names in panels_by_page.items():
        browser.get(pages[name].as_uri())
        run = browser.execute_script
        wait_until_drawn(browser)
        assert [one.get_attribute("id") for one in browser.find_elements("css selector", ".chart")] == [
            f"chart-{panel}" for panel in names
        ]
        for panel in names:
            assert run(marks, panel), f"{name}: {panel} is empty"
            label = run("return document.getElementById(`chart-${arguments[0]}`).getAttribute('aria-label')", panel)
            assert "series, from" in label
        assert run("return document.documentElement.scrollWidth") <= WIDTH, "the page is wider than the window"
    for view, value in (("operators", "1"), ("ranks", "compute")):
        before = run("return JSON.stringify(document.getElementById(`chart-${arguments[0]}`).data)", view)
        run(
            "const e = document.getElementById(`view-${arguments[0]}`); e.value = arguments[1];"
            "e.dispatchEvent(new Event('change'))",
            view,
            value,
        )
        after = run("return JSON.stringify(document.getElementById(`chart-${arguments[0]}`).data)", view)
        assert before != after
    background = "return getComputedStyle(document.body).backgroundColor"
    colours = set()
    for theme in ("light", "dark"):
        run(
            "const e = document.getElementById('theme'); e.value = arguments[0]; e.dispatchEvent(new Event('change'))",
            theme,
        )
        colours.add((run(background), run("return document.getElementById('chart-step').data[0].marker.color")))
    assert len({one for one, _ in colours}) == len({one for _, one in colours}) == 2
    browser.find_element("css selector", "#table-step summary").send_keys("\n")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert run("return document.querySelectorAll('#table-step tr').length") == 200
    assert browser.get_log("browser") == []
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    urls = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert not [url for url in urls if url.startswith("http")]


def test_a_page_is_small_and_contains_the_predictions(pages: dict[str, Path]) -> None:
    for path in pages.values():
        assert path.stat().st_size < MAX_BYTES
    text = pages["long"].read_text()
    plan_request = request("deepseek-v3", 512, 2048)
    best, *others = candidates(plan_request, "pp=32,vpp=1,ep=16", "pp=16,ep=16", "tp=2,pp=16,ep=16")
    for one in (best, *others):
        assert f"<td>{one.step.seconds:.4g}</td>" in text and f"<td>{one.step.mfu:.1%}</td>" in text
    assert 'id="candidates"' in text and 'id="candidates"' not in pages["short"].read_text()


def test_page_data_is_small_and_consistent() -> None:
    plan_request = request("deepseek-v3", 2048, 8192)
    result = candidates(plan_request, "pp=32,ep=64", "pp=16,ep=64")
    model = plan_request.model(result[0].mapping)
    line = timeline(model, most=50_000)
    slow = simulate(model, {3: 1.5})
    data = data_of(plan_request, result[0], line, result, slow)
    bars = data["step"]["bars"]  # by kind: columns position, begin, seconds, micro-batch, stage, number of passes
    total = sum(len(columns[0]) for columns in bars.values())
    assert total <= PASSES + 8 * line.ranks and data["step"]["note"]
    assert sum(len(one["rows"][0]) for one in data["operators"]) <= OPERATORS
    passes = sum(sum(columns[5]) for columns in bars.values())
    assert passes == 2 * 32 * model.micro_batches, "a bar that joins several passes must count each of them"
    ends = [begin + length for columns in bars.values() for begin, length in zip(columns[1], columns[2], strict=True)]
    assert max(ends) == pytest.approx(line.seconds, rel=1e-3)
    assert [sum(causes) for causes in zip(*data["time"]["causes"].values(), strict=True)] == pytest.approx(
        [one.step.seconds for one in result], rel=1e-3
    )
    held = [sum(terms) for terms in zip(*data["memory"]["terms"].values(), strict=True)]
    assert max(held) == pytest.approx(result[0].fit.fullest.total / 2**30, rel=1e-3)
    sent = sum(sum(sent_gb) for sent_gb in data["links"]["links"].values())
    assert sent == pytest.approx(sum(sum(links.values()) for links in result[0].step.sent.values()) / 1e9, rel=1e-3)
    assert len(data["ranks"]["wait"]) == 32 and min(min(row) for row in data["ranks"]["wait"]) >= 0
    assert data["ranks"]["joined"] * len(data["ranks"]["wait"][0]) >= 2048 // 32
    assert len(json.dumps(data)) < 170_000
    assert [panel.name for panel in panels(data, line)][-1] == "ranks"
