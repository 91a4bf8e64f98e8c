"""A search returns the result of replaying all mappings, prunes only slower ones, and reports what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.hardware_table import cluster_named
from moe_comm.plan.model.files import model_named
from moe_comm.plan.model.load import Workload
from moe_comm.plan.model.mapping import RECOMPUTE, Mapping
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.search.bound import BoundedStepModel, PassBounds
from moe_comm.plan.search.partial_mapping import PartialMapping
from moe_comm.plan.search.request import PlanCandidate, PlanRequest
from moe_comm.plan.search.search import changes, search
from moe_comm.plan.search.space import SearchSpace

SMALL = ModelShape("small", 6, 512, 8, 4, 64, 4096, 8, 2, 1024, dense_layers=1, dense_ffn=2048)
"""Uneven in all ways: layers, kinds of layers, a head that is as large as a layer."""


def request(
    shape: ModelShape, gpus: int, batch: int, seq: int, *, host: int = 8, spare: float = 1.0, shared: float = 1.0
) -> PlanRequest:
    """Return a request. spare: available share of an accelerator's memory. shared: ranks per core."""
    cluster = cluster_named("h100", gpus, host)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, shared=shared))
    memory = cluster.accelerator.memory_bytes
    return PlanRequest(shape, cluster, Workload(seq), batch, reserve=round((1 - spare) * memory))


def everything(replays: PlanRequest, space: SearchSpace) -> list[PlanCandidate]:
    """Replay all mappings; return the fastest of each degrees, stages and micro-batch, in order."""
    result = sorted((replays.candidate(one) for one in space.candidates(replays)), key=lambda one: one.step.seconds)
    fitting = [one for one in result if one.fit]
    keys = [
        (one.mapping.parallel, one.mapping.schedule, one.mapping.virtual, one.mapping.micro_batch) for one in fitting
    ]
    return [one for at, one in enumerate(fitting) if keys.index(keys[at]) == at]


@pytest.mark.parametrize(
    ("gpus", "batch", "host", "spare", "overlap", "shared"),
    [
        (4, 4, 8, 1.0, ("none",), 1.0),
        (4, 8, 2, 0.012, ("none",), 1.0),
        (6, 12, 3, 0.02, ("inter",), 1.0),
        (4, 4, 8, 1.0, ("none",), 2.0),
    ],
)
def test_the_best_are_those_of_replaying_everything(
    gpus: int, batch: int, host: int, spare: float, overlap: tuple[str, ...], shared: float
) -> None:
    replays = request(SMALL, gpus, batch, 1024, host=host, spare=spare, shared=shared)
    space = SearchSpace(overlap=overlap)  # type: ignore[arg-type]
    expected = everything(replays, space)
    assert {one.mapping.schedule for one in expected} >= {"1f1b", "zero_bubble", "zbv", "dualpipev"}
    result = search(replays, space)
    assert result.complete and len(result.best) == min(10, len(expected)) > 1
    seconds = [one.step.seconds for one in result.best]
    assert seconds == sorted(seconds)
    assert seconds == pytest.approx([one.step.seconds for one in expected[: len(seconds)]], rel=1e-8)
    assert all(one == replays.candidate(one.mapping) and one.fit for one in result.best)
    assert result.tried == len(list(space.candidates(replays)))
    assert result.tried == result.replayed + sum(result.pruned.values()) and min(result.pruned.values()) >= 0
    assert not result.nearest


@pytest.mark.parametrize(("gpus", "host", "overlap"), [(4, 2, "none"), (4, 4, "inter"), (8, 4, "all")])
def test_the_best_are_those_of_trying_every_dispatcher(gpus: int, host: int, overlap: str) -> None:
    replays = request(replace(SMALL, top_k=6), gpus, 8, 1024, host=host, spare=0.02)
    space = SearchSpace(overlap=(overlap,), sharding=("zero1",), micro_batches=(1, 2))  # type: ignore[arg-type]
    every = everything(replays, space)
    result = search(replays, space, keep=20)
    best = {(one.mapping.parallel, one.mapping.virtual, one.mapping.micro_batch): one for one in result.best}
    assert [one.step.seconds for one in result.best] == pytest.approx(
        [one.step.seconds for one in every[:20]], rel=1e-8
    )
    assert len({one.mapping.dispatcher for one in best.values()}) > 1, "no dispatcher is always the best"
    one = search(replays, replace(space, dispatcher=("all_gather",))).best[0]
    assert one.mapping.dispatcher == "all_gather"
    assert one.step.seconds >= result.best[0].step.seconds * (1 - 1e-9)


def test_to_compute_more_again_may_be_faster_where_backward_is_split() -> None:
    """Full recomputation means complete backward passes, which are less work than halves."""
    degrees = "pp=2,vpp=8,ep=2,etp=2"
    replays = PlanRequest(model_named("olmoe-1b-7b"), cluster_named("b200", 16), Workload(512, "fp8"), 64)
    first = Mapping.parse(degrees, 16, micro_batch=4, pipeline="zero_bubble", dispatcher="all_gather")
    every = {again: replace(first, recompute=again) for again in RECOMPUTE}
    fit = replays.fit(first)
    tight = replace(replays, reserve=replays.reserve + fit.available - fit.fullest.total + 1)
    fitting = {again: tight.candidate(one).step.seconds for again, one in every.items() if tight.fit(one)}
    assert set(fitting) == {"selective", "full"} and fitting["full"] < fitting["selective"]
    given = PartialMapping(degrees, micro_batch=4, schedule="zero_bubble", dispatcher="all_gather").candidate(tight)
    assert (given.mapping.recompute, given.step.seconds) == ("full", fitting["full"])
    space = SearchSpace.of(sharding="zero1", schedule="zero_bubble", micro_batch=4, virtual=8, dispatcher="all_gather")
    (result,) = (one for one in search(tight, space, keep=1000).best if one.mapping.parallel == first.parallel)
    assert result.step.seconds == fitting["full"]


def test_a_dispatcher_that_nothing_can_run_with_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="dispatcher hierarchical"):
        search(request(SMALL, 4, 4, 512), SearchSpace(dispatcher=("hierarchical",)))


@pytest.mark.parametrize(
    ("overlap", "shared"), [("none", 1.0), ("outer", 1.0), ("inter", 1.0), ("all", 1.0), ("none", 3.0)]
)
def test_no_step_is_faster_than_its_bounds(overlap: str, shared: float) -> None:
    replays = request(replace(SMALL, top_k=5), 8, 16, 512, host=4, shared=shared)
    floor, space = PassBounds(replays), SearchSpace(overlap=(overlap,))  # type: ignore[arg-type]
    every = list(space.candidates(replays))
    assert len({one.dispatcher for one in every}) == 3
    for mapping in every[:: len(every) // 150]:
        bounded = BoundedStepModel.of(replays, mapping)
        step = bounded.predict().seconds
        assert floor.of(mapping) <= bounded.bound() * (1 + 1e-8), mapping
        assert bounded.bound() <= step, mapping


def test_the_bound_of_equal_stages_is_the_step() -> None:
    replays = PlanRequest(model_named("llama3-8x70b"), cluster_named("h100", 256), Workload(4096), 256)
    mapping = next(
        one
        for one in SearchSpace(recompute=("full",), sharding=("zero1",), micro_batches=(1,), virtual=(1,)).candidates(
            replays
        )
        if (one.parallel.tp, one.parallel.pp) == (8, 16)
    )
    bounded = BoundedStepModel.of(replays, mapping)
    assert bounded.bound() == pytest.approx(bounded.predict().seconds, rel=0.03)


def test_thousands_of_mappings_are_looked_at_and_few_replayed() -> None:
    result = search(
        request(model_named("mixtral-8x22b"), 64, 128, 4096), SearchSpace(recompute=("full",), micro_batches=(1, 2))
    )
    assert result.tried > 2_000 and len(result.best) == 10 and result.replayed < 100


def test_out_of_time_the_best_so_far_are_the_answer() -> None:
    result = search(request(SMALL, 4, 8, 1024), limit_s=0.0)
    assert not result.complete and result.best and result.replayed <= 11


def test_where_nothing_fits_the_nearest_say_what_is_missing_and_what_would_do() -> None:
    replays = PlanRequest(model_named("mixtral-8x22b"), cluster_named("h100", 16), Workload(4096), 32)
    result = search(replays)
    assert not result.best and result.tried == result.pruned["do not fit"]
    missing = [one.fit.missing for one in result.nearest]
    assert missing == sorted(missing) and missing[0] > 0
    assert result.gpus is not None and result.gpus > 16 and result.gpus % 16 == 0
    more = replace(replays, cluster=replace(replays.cluster, gpus=result.gpus))
    assert any(more.fit(one) for one in SearchSpace(recompute=("full",), micro_batches=(1,)).candidates(more))


def test_a_space_that_is_too_narrow_says_what_outside_of_it_would_fit() -> None:
    replays = PlanRequest(model_named("mixtral-8x7b"), cluster_named("h100", 32), Workload(4096), 1024)
    result = search(replays, SearchSpace(recompute=("none",), sharding=("replicate",), micro_batches=(32,)))
    assert not result.best and result.nearest[0].changes
    assert all(change.fit for one in result.nearest for change in one.changes)
    assert changes(replays, result.nearest[0].mapping) == result.nearest[0].changes


def test_what_cannot_run_at_all_is_an_error_that_says_which_batch_would() -> None:
    replays = PlanRequest(model_named("mixtral-8x7b"), cluster_named("h100", 80_000), Workload(4096), 256)
    with pytest.raises(ConfigError, match=r"dp is at least .*"):
        search(replays)
