"""``moe-comm plan`` states the error of its predictions, prefers memory that is not full, and lists common mappings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from moe_comm.cli.plan_text import search_parts
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.search.plan_json import plan_json
from moe_plan.search.preference import STEP_ERROR, common_mappings, is_equal, is_full, preferred
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.search.search import search
from moe_plan.search.space import SearchSpace

MIXTRAL = PlanRequest(model_named("mixtral-8x22b"), cluster_named("h100", 128), Workload(4096), 256)
SPACE = {"schedule": ("dualpipev",), "sharding": ("zero1",), "recompute": ("none",), "dispatcher": ("all_gather",)}


@pytest.fixture(scope="module")
def example() -> PlanCandidate:
    request = PlanRequest(model_named("olmoe-1b-7b"), cluster_named("h100", 8), Workload(4096), 64)
    return search(request, SearchSpace.of(micro_batch=1, recompute="none", sharding="zero1"), keep=1).best[0]


def like(one: PlanCandidate, seconds: float, share: float) -> PlanCandidate:
    """Return ``one`` with another predicted step and another share of the memory."""
    fit = replace(one.fit, available=int(one.fit.fullest.total / share))
    return replace(one, step=replace(one.step, seconds=seconds), fit=fit)


def test_of_equal_mappings_those_that_leave_memory_are_first(example: PlanCandidate) -> None:
    full, roomy, slow, slow_full = (
        like(example, 1.0, 0.97),
        like(example, 1 + 0.9 * STEP_ERROR, 0.6),
        like(example, 1 + 1.5 * STEP_ERROR, 0.6),
        like(example, 1 + 1.2 * STEP_ERROR, 0.99),
    )
    order = preferred([full, slow_full, roomy, slow])
    assert order == (roomy, full, slow_full, slow)
    assert [is_equal(one, order) for one in order] == [True, True, False, False]
    assert [is_full(one) for one in order] == [False, True, True, False]


def test_the_mapping_of_published_runs_is_listed_with_its_place_and_reason() -> None:
    """Megatron and its users train Mixtral 8x22B on 128 H100 with EP 8 and PP 4 or 8."""
    common = common_mappings(MIXTRAL, {}, limit_s=120.0)
    degrees = [one.mapping.parallel for one in common]
    assert [p.ep for p in degrees] == [8, 8] and {p.pp for p in degrees} == {4, 8} and {p.etp for p in degrees} == {1}
    found = search(MIXTRAL, SearchSpace.of(**SPACE), keep=2, limit_s=120.0)
    result = replace(found, best=preferred(found.best), common=common)
    console = Console(width=160)
    with console.capture() as captured:
        for part in search_parts(MIXTRAL, result, 160):
            console.print(part)
    lines = [line for line in captured.get().splitlines() if line.strip().startswith(">2")]
    assert len(lines) == 2 and all(" ep8 " in line and "common: +" in line for line in lines), captured.get()
    assert f"± {STEP_ERROR:.0%}" in lines[0] and "%)" in lines[0]
    output = plan_json(MIXTRAL, result.best[0], result)
    assert [one["place"] for one in output["common"]] == [None, None]
    assert all(isinstance(one["why_slower"], str) and one["step_error"] == STEP_ERROR for one in output["common"])
    assert all(one["memory_share"] <= 1 for one in output["candidates"]) and output["candidates"][0]["equal"] is True


def test_settings_of_the_user_replace_those_of_published_runs(example: PlanCandidate) -> None:
    request = PlanRequest(model_named("olmoe-1b-7b"), cluster_named("h100", 8), Workload(4096), 64)
    (one, *_) = common_mappings(request, {"sharding": "fsdp", "micro_batch": 1}, limit_s=120.0)
    assert (one.mapping.sharding, one.mapping.micro_batch, one.mapping.parallel.ep) == ("fsdp", 1, 8)
    dense = replace(request, shape=model_named("llama3-8b"))
    assert common_mappings(dense, {}) == ()
