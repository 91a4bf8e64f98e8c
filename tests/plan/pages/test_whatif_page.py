"""The page about stragglers: its data, and its panels in a browser without network access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_plan.pages.whatif_page import page_data, write_page
from moe_plan.whatif.analysis import WhatIf, what_if
from moe_plan.whatif.run_trace import make_run_trace
from moe_plan.whatif.text import rank_heat, stage_heat, text
from tests.browser import headless, wait_until_drawn
from tests.plan.whatif.test_run_trace import Clock, record_collective

HOSTILE = "<img src=x onerror=window.hacked=1></script>"
SLOW = 5
"""The rank with coordinates pp 1, dp 0, tp 1."""


@pytest.fixture(scope="module")
def result() -> WhatIf:
    """Eight ranks, two stages with two of tp and two of dp each; one of them is slow."""
    spans = []
    for step in (1, 2, 3):
        clocks = [Clock(rank, step) for rank in range(8)]
        for clock in clocks:
            clock.work(HOSTILE, 9 if clock.rank == SLOW else 5)
        for first in (0, 2, 4, 6):
            record_collective(clocks[first : first + 2], "collective", "all-gather", 1, step)
        record_collective(clocks, "collective", "sum", 1, step)
        spans += [span for clock in clocks for span in clock.done()]
    trace = make_run_trace(spans, 8, {"tp": 2, "dp": 2, "pp": 2, "ep": 4})
    return what_if(trace.graph, trace.even_N)


def test_the_heat_maps_show_the_slow_rank(result: WhatIf) -> None:
    single = rank_heat(result)
    assert single is not None
    assert single.rows == ("pp 0, tp 0", "pp 0, tp 1", "pp 1, tp 0", "pp 1, tp 1") and single.columns == (
        "dp 0",
        "dp 1",
    )
    assert single.slowdown.argmax() == 3 * 2 + 0
    assert stage_heat(result).slowdown.argmax() == 2, "pp 1, dp 0"
    assert max(result.by_group["tp"], key=lambda group: result.by_group["tp"][group]) == (4, 5)
    assert max(result.by_group["ep"], key=lambda group: result.by_group["ep"][group]) == (4, 5, 6, 7)
    assert result.worst_ranks == (SLOW,)


def test_a_large_heat_map_is_truncated_in_text(result: WhatIf) -> None:
    lines = text(result).splitlines()
    at = lines.index("slowdown by worker")
    assert len(lines) == at + 6 and lines[at + 5].startswith("pp 1, tp 1") and "▓" in lines[at + 5]
    many = tuple(
        replace(result.ranks[0], rank=rank, coordinates={"pp": 0, "dp": rank // 20, "tp": rank % 20})
        for rank in range(400)
    )
    wide = replace(result, ranks=many, worker_DP=np.ones((20, 1)))
    lines = text(wide).splitlines()
    assert lines[-1] == "the first of 20 x 20; --page shows all" and len(lines[-2]) < 160


def test_the_page_data_contains_the_analysis_and_no_nan(result: WhatIf) -> None:
    data = page_data(replace(result, even_S=result.even_S * np.nan, slowest_ranks_share=float("nan")))
    json.dumps(data, allow_nan=False)
    assert [one["name"] for one in data["heats"]] == ["every rank", "data-parallel rank by pipeline stage"]
    assert [one["name"] for one in data["places"]] == ["pp", "dp", "tp", "ep", "tp group", "ep group", "rank"]
    assert data["routing"] == data["even_ms"] == [None, None, None]
    assert data["slowdown"] == pytest.approx([result.slowdown] * 3)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def test_every_panel_is_drawn_without_network_access(browser: Any, result: WhatIf, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs the observe extra")
    page = tmp_path / "deep" / "page.html"
    write_page(result, page, HOSTILE)
    browser.get(page.as_uri())
    run = browser.execute_script
    wait_until_drawn(browser)
    count_marks = "return document.querySelectorAll(`#chart-${arguments[0]} :is(.js-line, .point, image, .hm)`).length"
    for name in ("workers", "operations", "places", "slowdown", "seconds"):
        assert run(count_marks, name), f"{name} is empty"
        label = run("return document.getElementById(`chart-${arguments[0]}`).getAttribute('aria-label')", name)
        assert "series" in label and label.startswith(("Slowdown", "Time"))
    assert run("return document.documentElement.scrollWidth") <= 1280, "the page is wider than the window"
    heat = "return document.getElementById('chart-workers').data[0].z"
    assert run(heat)[3][0] == pytest.approx(max(worker.slowdown for worker in result.ranks))
    choose = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('change'))"
    )
    run(choose, "view-workers", "1")
    assert np.shape(run(heat)) == (2, 2)
    run(choose, "view-places", "6")
    assert len(run("return document.getElementById('chart-places').data[0].y")) == 8
    run("document.querySelector('#table-workers summary').click()")
    browser.execute_async_script("const done = arguments[0]; setTimeout(done, 50)")
    assert run("return document.querySelectorAll('#table-workers tr').length") == 2
    background = "return getComputedStyle(document.body).backgroundColor"
    run(choose, "theme", "dark")
    assert run(background) == "rgb(15, 19, 24)"
    assert run("return window.hacked") is None
    assert browser.get_log("browser") == []
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = [one["params"] for one in events if one["method"] == "Network.requestWillBeSent"]
    urls = [one["request"]["url"] for one in sent if one["documentURL"] == page.as_uri()]
    assert urls and not [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]
