"""Training configurations of plans: equal parallel sizes, models that build, and runs that train."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_comm.cli import run as command
from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.topology.rebalance import PlacementKind
from moe_comm.train.config import TrainConfig, load
from moe_comm.train.dry_run import examine
from moe_comm.train.loop.build import _dispatch_options, architecture_of
from moe_comm.train.plan_config import differences, model_named, train_config
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.load import ExpertLoads, Workload
from moe_plan.model.mapping import Dispatcher, Mapping
from moe_plan.model.memory import MemoryPolicy
from moe_plan.search.request import PlanRequest
from moe_plan.search.search import search
from moe_plan.search.space import PartialMapping, SearchSpace

TINY = ModelShape("tiny plan", 4, 64, 4, 2, 16, 512, 8, 2, 96, qk_norm="head")


def write_and_load(request: PlanRequest, mapping: Mapping, folder: Path) -> TrainConfig:
    path = folder / "planned.toml"
    path.write_text(train_config(request, request.candidate(mapping)))
    return load(path)


@pytest.mark.slow
def test_the_best_of_a_search_trains(tmp_path: Path) -> None:
    request = PlanRequest(TINY, cluster_named("h100", 4, 2), Workload(32, "fp32"), 8)
    axes = {"sharding": "zero1", "recompute": "selective", "micro_batch": 1, "virtual": 2, "dispatcher": "all_gather"}
    space = SearchSpace.of(**axes, schedule="interleaved_1f1b")
    best = next(candidate for candidate in search(request, space).best if candidate.mapping.parallel.pp == 2)
    config = write_and_load(request, best.mapping, tmp_path)
    assert config.parallel.mapping(4) == best.mapping.parallel and config.parallel.backend == "all_gather"
    assert (config.parallel.schedule, config.parallel.virtual) == ("interleaved_1f1b", 2)
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox jumps over the lazy dog, again and again\n" * 300)
    settings = ["run.steps=2", f"run.folder={tmp_path}", f"data.source={text}", f"data.cache={tmp_path / 'cache'}"]
    assert command(["train", str(tmp_path / "planned.toml"), "--ranks", "4", "run.eval_batches=1", *settings]) == 0
    (result,) = tmp_path.glob("*/result.json")
    record = json.loads(result.read_text())
    assert (record["status"], record["steps"]) == ("finished", 2)
    assert record["mapping"] == str(best.mapping.parallel)


@pytest.mark.parametrize(
    ("name", "gpus", "text"),
    [
        ("mixtral-8x22b", 128, "tp=2,pp=8,vpp=7,ep=8"),
        ("olmoe-1b-7b", 8, "tp=2,cp=2,ep=4,etp=2"),
        ("deepseek-v3", 64, "tp=4,pp=2,ep=32"),
        ("qwen3-30b-a3b", 24, "pp=3,ep=8"),
    ],
)
def test_models_by_name_build_with_the_planned_mapping(name: str, gpus: int, text: str, tmp_path: Path) -> None:
    mapping = Mapping.parse(text, gpus, recompute="full")
    request = PlanRequest(model_named(name), cluster_named("h100", gpus), Workload(4096, capacity=1.0), 2 * gpus)
    config = write_and_load(request, mapping, tmp_path)
    p, data = config.parallel, config.data
    assert p.mapping(p.ranks) == mapping.parallel and p.ranks == gpus
    assert (p.schedule, p.virtual or 1) == (mapping.schedule, mapping.virtual)
    assert (p.sharding, config.model.recompute, config.model.dtype) == ("zero1", "full", "bfloat16")
    assert (data.batch, data.micro_batches, data.seq_len) == (2 * gpus, mapping.micro_batches(2 * gpus), 4096)
    assert config.model.capacity == 1.0
    if mapping.parallel.pp <= 3:  # examine builds one pipeline position after another
        assert examine(config).shape.params == request.shape.params


def test_an_unsupported_model_is_an_error_that_names_the_differences() -> None:
    def text(shape: ModelShape, dtype: str = "bf16") -> str:
        request = PlanRequest(shape, cluster_named("h100", 8), Workload(64, dtype), 8)
        return train_config(request, request.candidate(Mapping.parse("ep=8", 8)))

    with pytest.raises(ConfigError, match=r"qkv_bias = True.*shared_gate = True"):
        text(model_named("qwen2-57b-a14b"))
    with pytest.raises(ConfigError, match="fp8"):
        text(TINY, "fp8")
    with pytest.raises(ConfigError, match="vocabulary has 200 ids"):
        text(replace(TINY, vocab=200))


def test_overlap_is_written_as_far_as_the_trainer_supports_it(tmp_path: Path) -> None:
    request = PlanRequest(TINY, replace(cluster_named("h100", 4), direct=True), Workload(64), 8)
    interleaved = Mapping.parse("ep=4", 4, overlap="all")
    config = write_and_load(request, interleaved, tmp_path)
    assert config.parallel.interleave and config.parallel.overlap_chunks == "auto"
    (gradient_difference,) = differences(request, request.candidate(interleaved))
    assert "after the last backward pass" in gradient_difference
    over_links = replace(request, cluster=cluster_named("h100", 4))
    assert not differences(over_links, over_links.candidate(interleaved))
    in_pairs = Mapping.parse("pp=2,ep=2", 4, overlap="all", sharding="fsdp", recompute="full")
    assert write_and_load(request, in_pairs, tmp_path).parallel.interleave
    assert "two interleaved micro-batches are one pass" in differences(request, request.candidate(in_pairs))[0]
    piped = Mapping.parse("pp=2,ep=2", 4, overlap="all", micro_batch=2)
    config = write_and_load(request, piped, tmp_path)
    assert not config.parallel.interleave and config.parallel.overlap_chunks == "auto"
    outer = Mapping.parse("ep=4", 4, overlap="outer")
    assert not write_and_load(request, outer, tmp_path).parallel.overlap_chunks
    assert differences(request, request.candidate(outer)) == (gradient_difference,)
    assert not differences(request, request.candidate(Mapping.parse("ep=4", 4)))
    write_and_load(request, piped, tmp_path)
    deviation = differences(request, request.candidate(piped))[-1]
    assert (
        "requires interleaved micro-batches" in deviation
        and f"# Deviation from the plan: {deviation}." in (tmp_path / "planned.toml").read_text()
    )


@pytest.mark.parametrize(
    ("dispatcher", "top_k", "backend", "deterministic"),
    [
        ("all_to_all", 5, "auto", True),
        ("all_gather", 2, "all_gather", True),
        ("all_gather", 5, "all_gather", False),
        ("hierarchical", 2, "hierarchical", False),
    ],
)
def test_the_dispatcher_is_written_and_whether_it_sends_sums(
    dispatcher: Dispatcher, top_k: int, backend: str, deterministic: bool, tmp_path: Path
) -> None:
    host = 2 if dispatcher == "hierarchical" else 4
    request = PlanRequest(replace(TINY, top_k=top_k), cluster_named("h100", 4, host), Workload(64), 8)
    mapping = Mapping.parse(f"ep={4 // host * 2}", 4, dispatcher=dispatcher)
    config = write_and_load(request, mapping, tmp_path)
    assert (config.parallel.backend, config.parallel.deterministic) == (backend, deterministic)
    options = _dispatch_options(config, architecture_of(config, None), ParallelMesh(ParallelConfig()))
    assert options.deterministic == deterministic
    overlapped = replace(mapping, overlap="all")
    deviations = differences(request, request.candidate(overlapped))
    assert len(deviations) == {"all_to_all": 0, "all_gather": 1, "hierarchical": 2}[dispatcher]


@pytest.mark.parametrize(
    ("kind", "loads", "written"),
    [
        ("relocate", (40, 30, 20, 10, 0, 0, 0, 0), "relocate"),
        ("relocate", (10,) * 8, "fixed"),
        ("fixed", (40, 30, 20, 10, 0, 0, 0, 0), "fixed"),
    ],
)
def test_the_placement_of_experts_is_written_if_loads_need_it(
    tmp_path: Path, kind: PlacementKind, loads: tuple[int, ...], written: str
) -> None:
    steps = tuple(tuple(1000 * load for load in loads) for _ in range(3))
    workload = Workload(32, "fp32", loads=ExpertLoads((steps,), kind))
    request = PlanRequest(TINY, cluster_named("h100", 4, 4), workload, 8)
    mapping = PartialMapping("dp=4,ep=4").candidate(request).mapping
    placement = write_and_load(request, mapping, tmp_path).placement
    assert placement.kind == written
    assert write_and_load(request, replace(mapping, sharding="fsdp"), tmp_path).placement == placement


def test_groups_of_experts_are_written(tmp_path: Path) -> None:
    request = PlanRequest(replace(TINY, groups=4, top_groups=2), cluster_named("h100", 4), Workload(64), 8)
    config = write_and_load(request, Mapping.parse("ep=4", 4), tmp_path)
    assert (config.model.expert_groups, config.model.top_groups) == (4, 2)


def test_deviations_of_memory_are_reported() -> None:
    shape = replace(TINY, shared_ffn=64)
    request = PlanRequest(shape, cluster_named("h100", 4), Workload(64), 8, MemoryPolicy(reshard=True, cut_shared=True))
    assert len(differences(request, request.candidate(Mapping.parse("tp=2,ep=2", 4, sharding="fsdp")))) == 2


def test_a_model_name_with_line_breaks_stays_a_comment() -> None:
    model = replace(model_named("tiny"), name="two\n[run]\nname = 1")
    request = PlanRequest(model, cluster_named("h100", 1), Workload(64, "fp32"), 2)
    assert "# two [run] name = 1 on 1 h100" in train_config(request, request.candidate(Mapping.parse("", 1)))


def test_replicas_are_written(tmp_path: Path) -> None:
    request = PlanRequest(TINY, cluster_named("h100", 8, 4), Workload(32, "fp32"), 8)
    config = write_and_load(request, Mapping.parse("dp=8,ep=2,replicas=2", 8, sharding="fsdp"), tmp_path)
    assert (config.parallel.sharding, config.parallel.dp_replicate, config.parallel.ep) == ("fsdp", 2, 2)
    config = write_and_load(request, Mapping.parse("dp=8,ep=2", 8, sharding="fsdp"), tmp_path)
    assert config.parallel.dp_replicate == 1
