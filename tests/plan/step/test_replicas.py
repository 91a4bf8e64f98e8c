"""Replicas of FSDP's shards: bytes per link equal those of real ranks, and slow links between hosts favour replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_comm.bench.train.contestant import predicted_ms
from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.train.loop.build import architecture_of
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.load import ExpertLoads, Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.model.memory import PositionMemory
from moe_plan.search.plan_json import plan_json
from moe_plan.search.request import PlanRequest, changes_that_fit
from moe_plan.search.search import search
from moe_plan.search.space import PartialMapping, SearchSpace
from moe_plan.step.step import StepModel
from tests.pool import RankPool
from tests.train.common import config_of, session, write_text

SHAPE = ModelShape("replicas", 6, 1024, 8, 4, 128, 32000, 8, 2, 2048)
"""1 GB of weights in bf16."""
GBIT = Link("1 Gbit/s", 1.25e8, 2e-5, 0.9)


def cluster(gpus: int = 8, host: int = 4, between: Link | None = None) -> Cluster:
    result = cluster_named("h100", gpus, host)
    return result if between is None else replace(result, between=between)


def step(mapping: str, where: Cluster, *, batch: int = 8, **settings: object) -> StepModel:
    settings = {"sharding": "fsdp", **settings}
    placed = PlacedMapping(Mapping.parse(mapping, where.gpus, **settings), where)
    return StepModel(SHAPE, placed, Workload(1024, capacity=1.0), batch)


def sent(mapping: str, where: Cluster) -> dict[str, dict[str, float]]:
    result = step(mapping, where).predict().sent
    return {name: links for name, links in result.items() if name.endswith(("weights", "gradients"))}


def test_only_gradients_are_sent_between_hosts() -> None:
    experts = SHAPE.parameters()["experts"]
    dense = SHAPE.params - experts
    result = sent("dp=8,replicas=2", cluster())
    for name, count in (("dense", dense), ("expert", experts)):
        # A block of 4 ranks gathers bf16 weights twice and scatters fp32 gradients; two ranks then sum a quarter.
        assert result[f"{name} weights"] == {"inside": pytest.approx(2 * 2 * count * 3 / 4), "between": 0, "across": 0}
        assert result[f"{name} gradients"]["inside"] == pytest.approx(4 * count * 3 / 4)
        assert result[f"{name} gradients"]["between"] == pytest.approx(2 * 4 * count / 4 / 2)
    sharded = sent("dp=8", cluster())
    assert sharded["dense weights"]["between"] == pytest.approx(2 * 2 * dense * 7 / 8 / 4), "four NICs per host"


def test_experts_on_one_rank_of_each_host_are_not_sharded_and_those_on_one_rank_are_not_summed() -> None:
    experts = SHAPE.parameters()["experts"]
    unsharded = sent("dp=8,ep=4,replicas=2", cluster())
    assert "expert weights" not in unsharded
    gradients = {"inside": 0, "between": pytest.approx(4 * experts / 4), "across": 0}
    assert unsharded["expert gradients"] == gradients
    assert not any(name.startswith("expert") for name in sent("dp=8,ep=8,replicas=2", cluster()))


def test_replicas_are_faster_over_a_slow_link() -> None:
    seconds = {
        (text, link): step(text, cluster(between=link)).predict().seconds
        for text in ("dp=8", "dp=8,replicas=2")
        for link in (None, GBIT)
    }
    assert seconds["dp=8,replicas=2", GBIT] < 0.7 * seconds["dp=8", GBIT]
    serial, overlapped = (
        step("dp=8,replicas=2", cluster(between=GBIT), batch=128, micro_batch=16, overlap=overlap).predict()
        for overlap in ("none", "outer")
    )
    assert overlapped.seconds < serial.seconds and overlapped.hidden["dense gradients"] > 0
    assert sum(overlapped.breakdown.values()) == pytest.approx(overlapped.seconds)


def test_replicas_store_more_state_per_rank_and_unsharded_weights_are_never_freed() -> None:
    def memory_of(text: str) -> PositionMemory:
        return PlanRequest(SHAPE, cluster(), Workload(1024), 8).fit(Mapping.parse(text, 8, sharding="fsdp")).fullest

    sharded, replicated = memory_of("dp=8"), memory_of("dp=8,replicas=2")
    assert replicated.optimizer == pytest.approx(2 * sharded.optimizer, rel=1e-3)
    assert replicated.weights == sharded.weights, "gathered weights of two layers"
    experts = 2 * SHAPE.parameters()["experts"] / 4
    kept = memory_of("dp=8,ep=4,replicas=2").weights - memory_of("dp=8,ep=4").weights
    assert kept == pytest.approx(experts * 4 / 6), "those of the other four layers"


def test_a_search_chooses_replicas_over_a_slow_link_only() -> None:
    def best(link: Link | None, **settings: object) -> Mapping:
        space = SearchSpace.of(sharding="fsdp", fixed=(("pp", 1), ("ep", 1), ("tp", 1), ("cp", 1)), **settings)
        request = PlanRequest(SHAPE, cluster(between=link), Workload(1024, capacity=1.0), 8)
        result = search(request, space)
        assert result.tried == len(list(space.candidates(request)))
        output = plan_json(request, result.best[0], result)
        mapping = output["mapping"]
        repeated = PartialMapping(mapping["option"], sharding="fsdp").candidate(request)
        assert repeated.step.seconds == result.best[0].step.seconds and mapping["replicas"] == repeated.mapping.replicas
        return result.best[0].mapping

    assert best(GBIT).replicas == 2
    assert best(GBIT, replicas=1).replicas == 1
    assert best(GBIT, replicas=4).replicas == 4
    fast = Link("as fast as inside", 450e9, 0.0, 1.0)
    assert best(fast).replicas == 1, "every rank updates fewer parameters"


def test_a_search_tries_one_replica_per_host_with_equal_hosts() -> None:
    def tried(gpus: int, host: int, **settings: object) -> set[tuple[str, int]]:
        request = PlanRequest(SHAPE, cluster(gpus, host), Workload(1024), 24)
        space = SearchSpace.of(fixed=(("pp", 1),), **settings)
        for mapping in (mappings := list(space.candidates(request))):
            p, replicas = mapping.parallel, mapping.replicas
            assert replicas in (1, gpus // host) and not p.cp * p.dp % replicas
            assert p.edp == 1 or not p.edp % replicas
            assert request.candidate(mapping).step.seconds > 0
        return {(mapping.sharding, mapping.replicas) for mapping in mappings}

    usual = {("replicate", 1), ("zero1", 1), ("fsdp", 1)}
    small = {"micro_batches": (1,), "recompute": "none", "dispatcher": "all_to_all"}
    assert tried(8, 4, **small) == {*usual, ("fsdp", 2)}
    assert tried(8, 8, **small) == usual, "one host"
    assert tried(2, 1, **small) == usual, "a replica on each rank is plain replication"
    assert tried(6, 4, **small) == usual, "hosts with 4 and 2 ranks"


def test_unsupported_replicas_are_rejected() -> None:
    for text, sharding, message in (
        ("dp=8,replicas=2", "zero1", "requires sharding fsdp"),
        ("dp=8,replicas=3", "fsdp", r"must divide cp x dp, and edp unless it is 1; got 3 and \{'cp x dp': 8"),
        ("dp=8,ep=2,replicas=8", "fsdp", "must divide cp x dp"),
        ("dp=8,replicas=0", "fsdp", "replicas must be an integer of at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Mapping.parse(text, 8, sharding=sharding)
    with pytest.raises(ConfigError, match="sharding and 3 replicas do not apply"):
        search(PlanRequest(SHAPE, cluster(), Workload(1024), 8), SearchSpace(sharding=("fsdp",), replicas=3))
    with pytest.raises(ConfigError, match="replicas must be an integer"):
        SearchSpace(replicas=0)


def test_experts_that_move_have_no_replicas() -> None:
    rows = [40, 40, 2, 2, 2, 2, 2, 2]
    loads = ExpertLoads.of({f"layers.{layer}": dict.fromkeys(range(10), rows) for layer in range(6)}, "relocate")
    request = PlanRequest(SHAPE, cluster(), Workload(1024, loads=loads), 8)
    placed = {ep: loads.placed(ep).kind for ep in (1, 2, 4)}
    assert set(placed.values()) == {"fixed", "relocate"}
    for mapping in SearchSpace(sharding=("fsdp",)).candidates(request):
        assert mapping.replicas == 1 or loads.placed(mapping.parallel.ep).kind == "fixed"
    ep = next(ep for ep, kind in placed.items() if kind == "relocate")
    for method in (request.fit, request.model):
        with pytest.raises(ConfigError, match="replicas = 2 requires a fixed placement"):
            method(Mapping.parse(f"dp=8,ep={ep},replicas=2", 8, sharding="fsdp"))


def test_fewer_replicas_are_proposed_if_memory_is_missing() -> None:
    where = cluster()
    request = PlanRequest(SHAPE, where, Workload(1024), 8)
    both = [request.fit(Mapping.parse(f"dp=8{text}", 8, sharding="fsdp")) for text in ("", ",replicas=2")]
    between = (both[0].fullest.total + both[1].fullest.total) // 2
    small = replace(request, reserve=where.accelerator.memory_bytes - between)
    found = changes_that_fit(small, Mapping.parse("dp=8,replicas=2", 8, sharding="fsdp"))
    assert "replicas 1" in [change.what for change in found] and all(change.fit for change in found)


# ---- real ranks


def gathered_in(active: Any, step: int) -> int:
    """Return the bytes of weights that a rank gathers in a training step."""
    since = max(span.index for span in read_spans(EVENTS.region)) + 1
    active.trainer.train_step(step)
    spans = read_spans(EVENTS.region, since=since)
    return sum(span.nbytes for span in spans if span.name == "gather of weights")


def transferred(rank: int, world: int, settings: list[str]) -> tuple[int, int]:
    """Return the bytes of a training step that the ranks count: gathered weights, and gradients."""
    with session(settings) as active:
        traffic = active.trainer.train_state.data_parallel.traffic
        active.trainer.train_step(1)
        before = active.trainer.train_state.data_parallel.traffic.reduced
        assert before > traffic.reduced
        gathered = gathered_in(active, 2)
        return gathered, active.trainer.train_state.data_parallel.traffic.reduced - before


def gathered_by_stage(rank: int, world: int, settings: list[str]) -> int:
    with session(settings) as active:
        active.trainer.train_step(1)
        return gathered_in(active, 2)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("ep", "micro_batches"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_predicted_bytes_are_those_of_real_ranks(
    ep: int, micro_batches: int, compress: bool, pool4: RankPool, tmp_path: Path
) -> None:
    settings = [*write_text(tmp_path), f"data.micro_batches={micro_batches}", "model.vocab=260"]
    settings += ["parallel.sharding=fsdp"]
    settings += [f"parallel.ep={ep}", "parallel.dp_replicate=2", f"parallel.compress={str(compress).lower()}"]
    counted = pool4.run(transferred, settings, timeout=120)
    assert len(set(counted)) == 1
    gathered, reduced = counted[0]
    config = config_of([*settings, "parallel.ranks=4"])
    shape = ModelShape.of(architecture_of(config, None))
    mapping = Mapping(config.parallel.mapping(4), micro_batch=2 // micro_batches, sharding="fsdp", replicas=2)
    load = Workload(config.data.seq_len, "fp32", gradient_bytes=2 if compress else 4)
    model = StepModel(shape, PlacedMapping(mapping, cluster(4, 2)), load, config.data.batch)
    result = model.predict().sent
    weights = sum(sum(links.values()) for name, links in result.items() if name.endswith("weights"))
    gradients = [links for name, links in result.items() if name.endswith("gradients")]
    # The trainer keeps the gathered weights of the root between the two passes of a micro-batch.
    root = 4 * (shape.embedding_block.params + shape.head_block.params)
    assert gathered == weights - micro_batches * root / 2
    # FSDP counts the reduce-scatters within a block only if they are compressed.
    kinds = ("inside", "between") if compress else ("between",)
    assert reduced == sum(links[kind] for links in gradients for kind in kinds)
    assert not any(links["between"] for name, links in result.items() if name.endswith("weights"))


def test_a_pipeline_gathers_its_weights_once_per_step(pool4: RankPool, tmp_path: Path) -> None:
    settings = [*write_text(tmp_path), "model.vocab=260", "parallel.sharding=fsdp", "parallel.pp=2", "parallel.ep=1"]
    settings += ["data.batch=16"]
    one, two = (
        pool4.run(gathered_by_stage, [*settings, f"data.micro_batches={count}"], timeout=120) for count in (2, 4)
    )
    assert one == two and all(one)


def test_a_benchmark_with_replicas_is_predicted() -> None:
    settings = ["parallel.ranks=4", "parallel.ep=1", "parallel.sharding=fsdp", "data.batch=8", "model.vocab=260"]

    def predicted(*more: str) -> float:
        config = config_of([*settings, *more])
        report = SimpleNamespace(load=SimpleNamespace(slots=np.ones((config.model.layers, config.model.experts))))
        own_loop = SimpleNamespace(
            config=config, parallel=config.parallel.mapping(4), backend="all_to_all", reports=[report]
        )
        inputs = SimpleNamespace(architecture=architecture_of(config, None))
        result = predicted_ms(inputs, own_loop, cluster(4, 2, GBIT))  # type: ignore[arg-type]
        assert result is not None
        return result

    assert predicted("parallel.dp_replicate=2") < predicted()
