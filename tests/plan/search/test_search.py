"""A search returns the result of replaying all mappings, prunes only slower ones, and reports what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import RECOMPUTE, Mapping
from moe_plan.search.bound import BoundedStepModel, PassBounds
from moe_plan.search.request import PlanCandidate, PlanRequest, changes_that_fit
from moe_plan.search.search import search
from moe_plan.search.space import PartialMapping, SearchSpace

SMALL = ModelShape("small", 6, 512, 8, 4, 64, 4096, 8, 2, 1024, dense_layers=1, dense_ffn=2048)
"""A model with unequal stages: one dense layer, and a head that is as large as a layer."""


def request(
    shape: ModelShape, gpus: int, batch: int, seq: int, *, host: int = 8, spare: float = 1.0, shared: float = 1.0
) -> PlanRequest:
    """Return a request. spare: available share of an accelerator's memory. shared: ranks per core."""
    cluster = cluster_named("h100", gpus, host)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, shared=shared))
    memory = cluster.accelerator.memory_bytes
    return PlanRequest(shape, cluster, Workload(seq), batch, reserve=round((1 - spare) * memory))


def replay_all(plan_request: PlanRequest, space: SearchSpace) -> list[PlanCandidate]:
    """Replay all mappings. Return the fastest for each combination of degrees, schedule and micro-batch, in order."""
    result = sorted(
        (plan_request.candidate(one) for one in space.candidates(plan_request)), key=lambda one: one.step.seconds
    )
    fitting = [one for one in result if one.fit]
    keys = [
        (one.mapping.parallel, one.mapping.schedule, one.mapping.virtual, one.mapping.micro_batch) for one in fitting
    ]
    return [one for at, one in enumerate(fitting) if keys.index(keys[at]) == at]


@pytest.mark.parametrize(
    ("gpus", "batch", "host", "spare", "overlap", "shared"),
    [
        pytest.param(4, 8, 2, 0.012, ("none",), 1.0, marks=pytest.mark.slow),
        (6, 12, 3, 0.02, ("inter",), 1.0),
        (4, 4, 8, 1.0, ("none",), 2.0),
    ],
)
def test_the_best_mappings_equal_those_of_an_exhaustive_replay(
    gpus: int, batch: int, host: int, spare: float, overlap: tuple[str, ...], shared: float
) -> None:
    plan_request = request(SMALL, gpus, batch, 1024, host=host, spare=spare, shared=shared)
    space = SearchSpace(overlap=overlap)  # type: ignore[arg-type]
    expected = replay_all(plan_request, space)
    assert {one.mapping.schedule for one in expected} >= {"1f1b", "zero_bubble", "zbv", "dualpipev"}
    result = search(plan_request, space)
    assert result.complete and len(result.best) == min(10, len(expected)) > 1
    seconds = [one.step.seconds for one in result.best]
    assert seconds == sorted(seconds)
    assert seconds == pytest.approx([one.step.seconds for one in expected[: len(seconds)]], rel=1e-8)
    assert all(one == plan_request.candidate(one.mapping) and one.fit for one in result.best)
    assert result.tried == len(list(space.candidates(plan_request)))
    assert result.tried == result.replayed + sum(result.pruned.values()) and min(result.pruned.values()) >= 0
    assert not result.nearest


@pytest.mark.parametrize(
    ("gpus", "host", "overlap"), [(4, 2, "none"), (4, 4, "inter"), pytest.param(8, 4, "all", marks=pytest.mark.slow)]
)
def test_the_best_mappings_have_the_best_dispatcher(gpus: int, host: int, overlap: str) -> None:
    plan_request = request(replace(SMALL, top_k=6), gpus, 8, 1024, host=host, spare=0.02)
    space = SearchSpace(overlap=(overlap,), sharding=("zero1",), micro_batches=(1, 2))  # type: ignore[arg-type]
    expected = replay_all(plan_request, space)
    result = search(plan_request, space, keep=20)
    best = {(one.mapping.parallel, one.mapping.virtual, one.mapping.micro_batch): one for one in result.best}
    assert [one.step.seconds for one in result.best] == pytest.approx(
        [one.step.seconds for one in expected[:20]], rel=1e-8
    )
    assert len({one.mapping.dispatcher for one in best.values()}) > 1, "the best dispatcher must depend on the mapping"
    one = search(plan_request, replace(space, dispatcher=("all_gather",))).best[0]
    assert one.mapping.dispatcher == "all_gather"
    assert one.step.seconds >= result.best[0].step.seconds * (1 - 1e-9)


def test_full_recomputation_is_selected_if_it_is_faster_with_a_split_backward() -> None:
    """With full recomputation, backward passes are not split, so work that both halves need is not repeated."""
    degrees = "pp=2,vpp=8,ep=2,etp=2"
    plan_request = PlanRequest(model_named("olmoe-1b-7b"), cluster_named("b200", 16), Workload(512, "fp8"), 64)
    first = Mapping.parse(degrees, 16, micro_batch=4, pipeline="zero_bubble", dispatcher="all_gather")
    all_mappings = {recompute: replace(first, recompute=recompute) for recompute in RECOMPUTE}
    fit = plan_request.fit(first)
    tight = replace(plan_request, reserve=plan_request.reserve + fit.available - fit.fullest.total + 1)
    fitting = {
        recompute: tight.candidate(one).step.seconds for recompute, one in all_mappings.items() if tight.fit(one)
    }
    assert set(fitting) == {"selective", "full"} and fitting["full"] < fitting["selective"]
    candidate = PartialMapping(degrees, micro_batch=4, schedule="zero_bubble", dispatcher="all_gather").candidate(tight)
    assert (candidate.mapping.recompute, candidate.step.seconds) == ("full", fitting["full"])
    space = SearchSpace.of(sharding="zero1", schedule="zero_bubble", micro_batch=4, virtual=8, dispatcher="all_gather")
    (result,) = (one for one in search(tight, space, keep=1000).best if one.mapping.parallel == first.parallel)
    assert result.step.seconds == fitting["full"]


def test_an_inapplicable_dispatcher_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="dispatcher hierarchical"):
        search(request(SMALL, 4, 4, 512), SearchSpace(dispatcher=("hierarchical",)))


@pytest.mark.parametrize(
    ("overlap", "shared"), [("none", 1.0), ("outer", 1.0), ("inter", 1.0), ("all", 1.0), ("none", 3.0)]
)
def test_no_step_is_faster_than_its_bounds(overlap: str, shared: float) -> None:
    plan_request = request(replace(SMALL, top_k=5), 8, 16, 512, host=4, shared=shared)
    floor, space = PassBounds(plan_request), SearchSpace(overlap=(overlap,))  # type: ignore[arg-type]
    all_mappings = list(space.candidates(plan_request))
    assert len({one.dispatcher for one in all_mappings}) == 3
    for mapping in all_mappings[:: len(all_mappings) // 150]:
        bounded = BoundedStepModel.of(plan_request, mapping)
        step = bounded.predict().seconds
        assert floor.of(mapping) <= bounded.bound() * (1 + 1e-8), mapping
        assert bounded.bound() <= step, mapping


def test_the_bound_of_equal_stages_is_the_step() -> None:
    plan_request = PlanRequest(model_named("llama3-8x70b"), cluster_named("h100", 256), Workload(4096), 256)
    mapping = next(
        one
        for one in SearchSpace(recompute=("full",), sharding=("zero1",), micro_batches=(1,), virtual=(1,)).candidates(
            plan_request
        )
        if (one.parallel.tp, one.parallel.pp) == (8, 16)
    )
    bounded = BoundedStepModel.of(plan_request, mapping)
    assert bounded.bound() == pytest.approx(bounded.predict().seconds, rel=0.03)


def test_few_of_thousands_of_mappings_are_replayed() -> None:
    result = search(
        request(model_named("mixtral-8x22b"), 64, 128, 4096), SearchSpace(recompute=("full",), micro_batches=(1, 2))
    )
    assert result.tried > 2_000 and len(result.best) == 10 and result.replayed < 100


def test_after_the_time_limit_the_best_so_far_are_returned() -> None:
    result = search(request(SMALL, 4, 8, 1024), limit_s=0.0)
    assert not result.complete and result.best and result.replayed <= 11


def test_without_a_fitting_mapping_the_missing_memory_and_enough_gpus_are_reported() -> None:
    plan_request = PlanRequest(model_named("mixtral-8x22b"), cluster_named("h100", 16), Workload(4096), 32)
    result = search(plan_request)
    assert not result.best and result.tried == result.pruned["do not fit"]
    missing = [one.fit.missing for one in result.nearest]
    assert missing == sorted(missing) and missing[0] > 0
    assert result.gpus is not None and result.gpus > 16 and result.gpus % 16 == 0
    larger = replace(plan_request, cluster=replace(plan_request.cluster, gpus=result.gpus))
    assert any(larger.fit(one) for one in SearchSpace(recompute=("full",), micro_batches=(1,)).candidates(larger))


def test_without_a_fitting_mapping_changes_outside_the_space_are_proposed() -> None:
    plan_request = PlanRequest(model_named("mixtral-8x7b"), cluster_named("h100", 32), Workload(4096), 1024)
    result = search(plan_request, SearchSpace(recompute=("none",), sharding=("replicate",), micro_batches=(64,)))
    assert not result.best and result.nearest[0].changes
    assert all(change.fit for one in result.nearest for change in one.changes)
    assert changes_that_fit(plan_request, result.nearest[0].mapping) == result.nearest[0].changes


def test_a_batch_that_is_too_small_is_rejected_with_the_smallest_dp() -> None:
    plan_request = PlanRequest(model_named("mixtral-8x7b"), cluster_named("h100", 80_000), Workload(4096), 256)
    with pytest.raises(ConfigError, match=r"dp is at least .*"):
        search(plan_request)
