"""Parsing of mappings, their checks, and the spans of their groups on a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.mapping import Mapping, PlacedMapping


def test_a_mapping_is_parsed() -> None:
    result = Mapping.parse("tp=2, pp=8,vpp=7,ep=8", 128, micro_batch=2, recompute="full")
    assert result.parallel == ParallelConfig(tp=2, dp=8, pp=8, ep=8)
    assert (result.virtual, result.stages, result.micro_batch, result.recompute) == (7, 56, 2, "full")
    assert result.micro_batches(256) == 16
    assert str(result).startswith("tp=2,cp=1,dp=8,pp=8,vpp=7,ep=8,etp=1,micro-batch 2")
    assert Mapping.parse("", 4).parallel == ParallelConfig(dp=4)
    replicated = Mapping.parse("dp=8,replicas=2", 8, sharding="fsdp")
    assert replicated.replicas == 2 and Mapping.parse(replicated.degrees, 8, sharding="fsdp") == replicated


def test_coupled_experts_have_the_tensor_parallel_size_of_attention() -> None:
    assert Mapping.parse("tp=2,ep=4,pp=8", 128, coupled=True).parallel.etp == 2
    with pytest.raises(ConfigError, match="without folding, etp must equal tp; got etp=1, tp=2"):
        Mapping.parse("tp=2,ep=4,etp=1", 128, coupled=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2;pp=4", "a mapping must look like"),
        ("tp", "a mapping must look like"),
        ("zp=2", "a mapping must look like"),
        ("tp=-2", "a mapping must look like"),
        ("tp=2.0", "a mapping must look like"),
        ("tp=2,tp=2", "tp occurs twice"),
        ("tp=3", "must divide the 128 ranks"),
        ("tp=0", "must divide|at least 1"),
        ("ep=3", "must divide the ranks of a pipeline stage"),
        ("vpp=2", "needs a pipeline"),
        ("pp=2,vpp=0", "virtual must be an integer"),
    ],
)
def test_an_invalid_mapping_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mapping.parse(text, 128)


def test_the_schedule_has_a_default_and_can_be_set() -> None:
    result = {text: Mapping.parse(text, 8) for text in ("pp=4", "pp=4,vpp=2")}
    assert [one.schedule for one in result.values()] == ["1f1b", "interleaved_1f1b"]
    named = Mapping.parse("pp=4", 8, pipeline="zbv")
    assert (named.schedule, named.virtual) == ("zbv", 2) and str(named).endswith(", zbv")
    assert Mapping.parse("pp=4,vpp=3", 8, pipeline="zero_bubble").virtual == 3
    assert Mapping.parse("pp=4", 8, pipeline="1f1b") == result["pp=4"]
    assert Mapping.parse("pp=4,vpp=2", 8, pipeline="interleaved_1f1b") == result["pp=4,vpp=2"]


@pytest.mark.parametrize(
    ("text", "schedule", "message"),
    [
        ("pp=4,vpp=1", "zbv", "needs exactly 2 stages per rank"),
        ("pp=4,vpp=3", "dualpipev", "needs exactly 2 stages per rank"),
        ("pp=4,vpp=2", "1f1b", "needs exactly 1 stages per rank"),
        ("pp=4,vpp=1", "interleaved_1f1b", "needs at least 2"),
        ("tp=2", "zbv", "schedule = zbv needs a pipeline"),
        ("pp=4", "2f2b", "schedule must be one of"),
    ],
)
def test_a_schedule_that_the_trainer_rejects_is_rejected(text: str, schedule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mapping.parse(text, 8, pipeline=schedule)


def test_an_indivisible_batch_is_rejected() -> None:
    with pytest.raises(ConfigError, match="100 sequences cannot be divided into micro-batches of 1 on 8"):
        Mapping.parse("tp=2,pp=8,ep=8", 128).micro_batches(100)


def test_spans_of_groups() -> None:
    place = PlacedMapping(Mapping.parse("tp=2,pp=8,ep=8", 128), cluster_named("h100", 128))
    hosts = {axis: (span.ranks, span.hosts) for axis, span in place.spans.items()}
    assert hosts["tp"] == (2, 1) and hosts["ep"] == (8, 1), "tp and ep groups must be inside a host"
    assert hosts["dp"] == (8, 2) and hosts["edp"] == (2, 2) and hosts["pp"] == (2, 2)
    coupled = PlacedMapping(Mapping.parse("tp=2,pp=8,ep=8", 128, coupled=True), cluster_named("h100", 128))
    assert (coupled.spans["ep"].ranks, coupled.spans["ep"].hosts) == (8, 2), "coupled expert groups span hosts"
    with pytest.raises(ConfigError, match="the mapping has 128 ranks, but the cluster has 64"):
        replace(place, cluster=cluster_named("h100", 64))
