"""The search space: all mappings can run, numbers of accelerators need not be powers of two, no duplicates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology.pipeline import check_micro_batches, plan_stages
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping
from moe_plan.model.memory import memory
from moe_plan.search.request import PlanRequest, changes_that_fit, divisors, fits, indivisible
from moe_plan.search.space import SCHEDULES, SearchSpace


def request(name: str, gpus: int, batch: int, seq: int = 4096, host: int = 8) -> PlanRequest:
    return PlanRequest(model_named(name), cluster_named("h100", gpus, host), Workload(seq), batch)


ONE_SHARDING = SearchSpace(recompute=("none",), sharding=("zero1",))


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "host"),
    [("mixtral-8x7b", 6, 48, 8), ("olmoe-1b-7b", 12, 24, 6), ("qwen3-30b-a3b", 16, 32, 4), ("mixtral-8x22b", 5, 10, 8)],
)
def test_all_mappings_can_run_and_are_unique(name: str, gpus: int, batch: int, host: int) -> None:
    plan_request = request(name, gpus, batch, host=host)
    result = list(ONE_SHARDING.candidates(plan_request))
    assert result and len(set(result)) == len(result)
    for mapping in result[:: max(1, len(result) // 15)]:
        p, shape = mapping.parallel, plan_request.shape
        assert p.world == gpus and indivisible(shape, p, plan_request.load) is None and shape.experts % p.ep == 0
        assert host % p.tp == 0 or (gpus % p.tp == 0 and gpus <= host)
        assert plan_request.candidate(mapping).step.seconds > 0  # raises if it cannot


def test_degrees_are_not_only_powers_of_two() -> None:
    result = {p.pp for p in ONE_SHARDING.degrees(request("megascale-moe-352b", 240, 720))}
    assert {1, 3, 5, 10, 15, 30} <= result
    assert 7 not in result
    six = {(p.tp, p.pp) for p in ONE_SHARDING.degrees(request("mixtral-8x7b", 6, 48))}
    assert (2, 3) in six and not any(tp == 3 for tp, _ in six)  # 8 key heads


def test_coupled_mappings_have_experts_inside_data_parallelism() -> None:
    plan_request = request("mixtral-8x7b", 16, 64)
    coupled = list(replace(ONE_SHARDING, folded=False).degrees(plan_request))
    assert coupled and all(p.etp == p.tp and p.dp % p.ep == 0 for p in coupled)
    assert set(coupled) < set(ONE_SHARDING.degrees(plan_request))


def test_tp_stays_inside_a_host_and_cp_leaves_it_only_with_wide() -> None:
    plan_request = request("mixtral-8x7b", 16, 64, host=4)
    narrow, wide = (
        list(ONE_SHARDING.degrees(plan_request)),
        list(replace(ONE_SHARDING, wide=True).degrees(plan_request)),
    )
    assert max(p.tp for p in wide) == max(p.etp for p in wide) == 4
    assert max(p.tp * p.cp for p in narrow) == 4 < max(p.tp * p.cp for p in wide)
    refused: Counter[str] = Counter()
    list(ONE_SHARDING.degrees(plan_request, refused))
    assert refused["cp would exceed a host"]


def test_choices_can_be_fixed() -> None:
    plan_request = request("mixtral-8x7b", 8, 32)
    space = SearchSpace.of(micro_batch=2, recompute="full", sharding=None, overlap="all", virtual=2)
    result = list(space.candidates(plan_request))
    assert {(one.micro_batch, one.recompute, one.overlap, one.virtual) for one in result} == {(2, "full", "all", 2)}
    assert {one.sharding for one in result} == {"replicate", "zero1", "fsdp"}
    for settings in ({"recompute": "some"}, {"micro_batch": 0}, {"tp": 2}, {"overlap": ()}):
        with pytest.raises(ConfigError):
            SearchSpace.of(**settings)


def test_degrees_and_the_number_of_micro_batches_can_be_fixed() -> None:
    plan_request = request("mixtral-8x7b", 8, 32)
    result = list(replace(ONE_SHARDING, fixed=(("ep", 4), ("tp", 1)), steps=4).candidates(plan_request))
    assert {(one.parallel.ep, one.parallel.tp, one.micro_batches(32)) for one in result} == {(4, 1, 4)}
    assert {one.parallel.dp for one in result} == {1, 2, 4, 8}
    free = [one for one in ONE_SHARDING.candidates(plan_request) if one.micro_batches(32) == 4]
    assert set(result) == {one for one in free if (one.parallel.ep, one.parallel.tp) == (4, 1)}


def test_schedules_are_valid_for_the_trainer_and_can_be_fixed() -> None:
    plan_request = request("mixtral-8x7b", 16, 48)
    space = replace(ONE_SHARDING, micro_batches=(1, 2))
    by_schedule = {name: set(replace(space, schedule=(name,)).candidates(plan_request)) for name in SCHEDULES}
    assert set().union(*by_schedule.values()) - by_schedule["gpipe"] <= set(space.candidates(plan_request))
    layers = plan_request.shape.layers
    for name, result in by_schedule.items():
        piped = {one for one in result if one.parallel.pp > 1}
        assert piped and {one.schedule for one in piped} == {name}
        for one in piped:
            plan_stages(layers, one.parallel.pp, name, virtual=one.virtual)
            check_micro_batches(name, one.parallel.pp, one.micro_batches(48))
    assert not {one for one in space.candidates(plan_request) if one.schedule == "gpipe"}
    short = request("mixtral-8x7b", 16, 16)  # 4 micro-batches for 8 ranks: not enough for 1f1b
    used_schedules = {one.schedule for one in space.candidates(short) if one.micro_batches(16) < one.parallel.pp}
    assert used_schedules and not used_schedules & {"1f1b", "dualpipev"}
    with pytest.raises(ConfigError, match="schedule must be"):
        SearchSpace.of(schedule="1f2b")


def test_dispatchers_are_tried_where_they_can_run_and_can_be_faster() -> None:
    plan_request = request("deepseek-v3", 64, 128)
    by_degrees = {}
    for p in ONE_SHARDING.degrees(plan_request):
        result = ONE_SHARDING.dispatchers(plan_request, p)
        assert result[0] == "all_to_all" and len(set(result)) == len(result)
        assert result == ("all_to_all",) or p.ep * p.etp > 1
        assert "hierarchical" not in result or (p.ep * p.etp > 8 and p.etp < 8)
        assert "all_gather" not in result or (p.ep, p.etp) != (8, 1), (
            "8 ranks and top-k 8: all_gather sends no fewer rows"
        )
        by_degrees[p.ep, p.etp] = result
    assert by_degrees[2, 1] == ("all_to_all", "all_gather") and by_degrees[64, 1] == ("all_to_all", "hierarchical")
    coarse = request("hunyuan-large", 16, 32)
    assert {ONE_SHARDING.dispatchers(coarse, p) for p in ONE_SHARDING.degrees(coarse)} == {("all_to_all",)}, (
        "top-k is 1"
    )
    only = replace(ONE_SHARDING, dispatcher=("hierarchical",))
    assert {one.dispatcher for one in only.candidates(coarse)} == {"hierarchical"}, "a fixed dispatcher must be kept"
    assert all(one.parallel.ep * one.parallel.etp == 16 for one in only.candidates(coarse))


def test_divisors() -> None:
    assert divisors(1) == [1] and divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(7) == [1, 7]


def test_two_changes_are_proposed_if_one_is_not_sufficient() -> None:
    shape, load, h100 = model_named("mixtral-8x22b"), Workload(4096), cluster_named("h100", 64)
    mapping = Mapping.parse("ep=8", 64, micro_batch=2, sharding="replicate")
    result = changes_that_fit(PlanRequest(shape, h100, load, 256), mapping)
    assert result
    for change in result:
        assert " and " in change.what and change.fit
        assert change.fit == fits(memory(shape, change.mapping, load, 256), h100.accelerator)
        assert 8 % change.mapping.parallel.tp == 0
