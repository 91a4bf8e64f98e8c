"""Memory model: agrees with the trainer's dry run, with real ranks, and with published runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import AttentionConfig
from moe_comm.layers.moe.config import MoEConfig, MoEGroups
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, StageInput, Transformer
from moe_comm.layers.transformer.shape import ModelShape, Recompute
from moe_comm.train.config import load
from moe_comm.train.dry_run import DryRun, examine
from moe_comm.train.loop.build import overlaps_experts
from moe_plan.machine.hardware_table import H100, cluster_named
from moe_plan.model.activations import ActivationMemory, split_gradient_bytes
from moe_plan.model.files import model_named
from moe_plan.model.fixed_memory import StageContents
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, hosts_reached
from moe_plan.model.memory import MemoryPolicy, PositionMemory, _Buffers, fullest, memory
from moe_plan.orders import in_flight_peaks, pass_order
from moe_plan.search.request import Fit, PlanRequest, changes_that_fit, fits
from tests.plan.pipelines import peak_held
from tests.pool import RankPool

GIB = 1 << 30
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
SEQ = Workload(4096)
EVEN = ModelShape("even", 24, 256, 8, 4, 32, 512, 8, 2, 128)


def dry_run_and_memory(name: str | None, *settings: str) -> tuple[DryRun, tuple[PositionMemory, ...], _Buffers]:
    """Return the trainer's dry run of a configuration, the prediction of the memory model, and its buffers."""
    config = load(name, settings)
    run, data, optimizer = examine(config), config.data, config.optimizer
    mapping = Mapping(
        run.mapping,
        run.plan.virtual,
        data.batch // data.micro_batches // run.mapping.dp,
        config.parallel.sharding,
        config.model.recompute,
        pipeline=config.parallel.schedule if run.mapping.pp > 1 else None,
        overlap="chunks" if overlaps_experts(config, run.architecture) else "none",
        replicas=config.parallel.dp_replicate,
    )
    policy = MemoryPolicy(optimizer.kind, optimizer.momentum_of_kind > 0)
    shape = ModelShape.of(run.architecture)
    even = Workload(data.seq_len, DTYPES[config.model.dtype])
    return run, memory(shape, mapping, even, data.batch, policy), _Buffers.of(shape, mapping, even, even.size, None)


MIXTRAL = ("mixtral-8x7b", "model.layers=6")
QWEN = ("qwen3-30b-a3b", "model.layers=5")
DEEPSEEK = ("deepseek-v3", "model.layers=12", "parallel.ranks=64", "parallel.pp=4", "parallel.dp=16", "parallel.ep=8")
INTERLEAVED = ("parallel.schedule=interleaved_1f1b", "model.recompute=selective", "parallel.virtual=3")
SMALL = ("data.seq_len=32", "data.batch=16", "data.micro_batches=4", "model.hidden=64", "model.layers=4")

HSDP = (None, *SMALL, "parallel.ranks=4", "parallel.dp=4", "parallel.sharding=fsdp", "parallel.dp_replicate=2")


@pytest.mark.parametrize(
    "settings",
    [
        ("mixtral-8x7b",),
        ("qwen3-30b-a3b",),
        (None,),
        (*MIXTRAL, "model.recompute=none", "parallel.sharding=replicate"),
        (*MIXTRAL, "model.recompute=full", "parallel.sharding=fsdp", "parallel.schedule=gpipe"),
        (*QWEN, "data.micro_batches=1", "data.batch=32"),
        (*QWEN, "parallel.tp=2", "parallel.cp=2", "parallel.dp=8", "parallel.ep=4", "parallel.sharding=zero1"),
        (*QWEN, "parallel.tp=4", "parallel.dp=8", "parallel.ep=16", "optimizer.kind=muon", "model.tie=true"),
        (*DEEPSEEK, "data.batch=512", "data.micro_batches=16"),
        (*DEEPSEEK, "data.batch=256", "data.micro_batches=8", "parallel.schedule=zero_bubble", "model.recompute=none"),
        (*DEEPSEEK, *INTERLEAVED, "data.batch=128", "data.micro_batches=8", "parallel.tp=2", "parallel.dp=8"),
        (None, *SMALL, "parallel.ranks=4", "parallel.pp=2", "parallel.dp=2", "parallel.schedule=zbv", "model.tie=true"),
        (None, *SMALL, "optimizer.kind=sgd", "parallel.ranks=4", "parallel.dp=4", "parallel.ep=2"),
        (None, *SMALL, "parallel.ranks=4", "parallel.dp=4", "parallel.etp=2", "model.recompute=selective"),
        (*HSDP, "parallel.ep=1", "model.dtype=bfloat16"),
        (*HSDP, "parallel.ep=2", "model.dtype=bfloat16", "data.micro_batches=1"),
        (*HSDP, "parallel.ep=2"),
        (*HSDP, "parallel.ep=4"),
        (*HSDP, "parallel.ep=2", "parallel.tp=2", "parallel.ranks=8", "parallel.pp=1"),
        (*HSDP, "parallel.ep=1", "parallel.pp=2", "parallel.ranks=8"),
    ],
    ids=lambda settings: " ".join(str(one).split(".")[-1] for one in settings),
)
def test_the_memory_model_agrees_with_the_dry_run(settings: tuple[str | None, ...]) -> None:
    name, *others = settings
    run, result, buffers = dry_run_and_memory(name, *(other for other in others if other))
    assert len(result) == len(run.positions)
    for pp, (position, modelled) in enumerate(zip(run.positions, result, strict=True)):
        dry_run = position.fullest
        for term in ("weights", "gradients", "optimizer", "at_update"):
            assert getattr(modelled, term) == pytest.approx(getattr(dry_run.fixed, term), rel=0.01), term
        assert modelled.parameters == pytest.approx(dry_run.fixed.params, rel=0.01)
        stages = run.plan.stages_of(pp)
        ids = {layer for stage in stages for layer in run.plan.layers_of(stage)}
        dense = len(ids & set(run.architecture.dense_layers))
        ends = (0 in stages, run.plan.num_stages - 1 in stages)
        # Gradients between the halves of a backward are activations in the dry run and buffers in the memory model.
        between = 0.0
        if "parallel.schedule=zero_bubble" in others or "parallel.schedule=zbv" in others or name == "deepseek-v3":
            between = modelled.buffers - buffers.at(StageContents(dense, len(ids) - dense, *ends), len(stages))
        assert modelled.activations + between == pytest.approx(dry_run.activations, rel=1e-6)
        fixed = modelled.weights + modelled.gradients + modelled.optimizer
        assert modelled.total == fixed + max(modelled.activations + modelled.buffers, modelled.at_update)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zero_bubble", 1),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_activations_in_flight_equal_those_of_the_pass_order(schedule: str, virtual: int) -> None:
    mapping = Mapping.parse(f"pp=4,vpp={virtual}", 4, pipeline=schedule)
    order = pass_order(schedule, 4, 8, virtual)
    held = kept_of_a_layer() * 24 / order.stages
    between = (
        4096
        * split_gradient_bytes(ActivationMemory(EVEN, 2), mapping.fuses)[1]
        * 24
        / order.stages
        * np.ones(order.stages)
    )
    between[0] = 0  # the first stage runs its whole backward in the weight half
    peak = peak_held(order, np.full(order.stages, held), held + between)
    result = memory(EVEN, mapping, SEQ, 8)
    plain = _Buffers.of(EVEN, mapping, SEQ, 2, None)
    for rank in range(4):
        if rank != (0 if schedule in ("zbv", "dualpipev") else 3):  # the rank of the last stage
            buffers = plain.at(StageContents(0, 24 // 4, int(rank == 0), 0), virtual)
            assert result[rank].activations + result[rank].buffers - buffers == pytest.approx(peak[rank], rel=1e-6)


def kept_of_a_layer() -> float:
    """Return the additional memory of more micro-batches in flight."""
    several = memory(EVEN, Mapping.parse("pp=4", 4), SEQ, 8)
    return (several[1].activations - several[2].activations) / 6


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("shared", [0, 48])
def test_a_split_backward_saves_the_bytes_that_torch_saves(recompute: Recompute, shared: int) -> None:
    """Gradients that the input half of a dense and of an MoE layer saves for the weight half."""
    shape = ModelShape("halves", 2, 64, 4, 2, 16, 64, 8, 2, 96, shared_ffn=shared, dense_layers=1, dense_ffn=160)
    attention, moe = AttentionConfig(64, 4, 2, 16), MoEConfig(64, 96, RouterConfig(8, 2), shared_ffn=shared)
    config = TransformerConfig(512, 64, 2, attention, moe, 256, dense_layers=(0,), dense_ffn=160)
    model = Transformer(config, ModelPlan(recompute=recompute))
    initialize(model, seed=1)
    for layer in model.moe_layers():  # let experts on the CPU receive rows, as on a GPU
        layer.experts.register_forward_hook(lambda *_: None)
    x, tokens = model._prepare_input(StageInput(torch.arange(256)[None], None, None))
    expected_bytes = split_gradient_bytes(ActivationMemory(shape, 4), fused=False)
    for layer, expected in zip(model.layers.values(), expected_bytes, strict=True):
        inside = x.detach().requires_grad_()
        y = layer(inside, tokens)
        y = y.view_as(y).clone()
        _, groups = stage_backward_input([y], [torch.randn_like(y)], [inside], iter(layer.parameters()))
        kept = {
            g.untyped_storage().data_ptr(): g for group in groups for of in group["grads"] for g in of if g is not None
        }
        assert sum(g.untyped_storage().nbytes() for g in kept.values()) == pytest.approx(256 * expected, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("zero_bubble", 1), ("zero_bubble", 3), ("zbv", 2), ("dualpipev", 2)]
)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_in_flight_peaks_of_a_long_step_equal_those_of_the_pass_order(schedule: str, virtual: int, pp: int) -> None:
    result = in_flight_peaks(schedule, pp, virtual, 12 * pp)
    order = pass_order(schedule, pp, 12 * pp, virtual)
    for share in (0.0, 0.3, 1.0):
        between = np.full(order.stages, share)
        between[0] = 0
        peak = peak_held(order, np.ones(order.stages), 1 + between)
        most = [max(sum(n) + share * sum(late) for n, late in of_rank) for of_rank in result]
        assert most == pytest.approx(peak.tolist())


def test_the_activation_peak_equals_the_pass_order_with_unequal_stages() -> None:
    """Count bytes in flight by rank and pass, with dense layers first and a head last."""
    config = load(*(DEEPSEEK[0], (*DEEPSEEK[1:], "data.batch=256", "data.micro_batches=8", "model.recompute=none")))
    run, result, _ = dry_run_and_memory(
        DEEPSEEK[0], *DEEPSEEK[1:], "data.batch=256", "data.micro_batches=8", "model.recompute=none"
    )
    tokens = 2 * config.data.seq_len
    estimate = ActivationMemory(ModelShape.of(run.architecture), 2)
    dense, stages = set(run.architecture.dense_layers), range(run.plan.num_stages)
    early = [len(dense & set(run.plan.layers_of(stage))) for stage in stages]
    late = [len(run.plan.layers_of(stage)) - n for stage, n in zip(stages, early, strict=True)]
    kept = [tokens * estimate.saved(early[stage], late[stage], run.plan.is_last(stage)) for stage in stages]
    peak = peak_held(pass_order("dualpipev", 4, 8, 2), np.array(kept))
    peak[run.plan.last_rank] += estimate.loss(tokens)
    assert [one.activations for one in result] == pytest.approx(peak.tolist(), rel=0.05)


def kept_by_experts(rank: int, world: int, etp: int) -> int:
    """Return the bytes that the experts of a layer save for 512 tokens per rank."""
    groups = MoEGroups(dist.group.WORLD, etp)
    layer = MoELayer.build(MoEConfig(64, 96, RouterConfig(8, 2)), groups, backend="all_to_all", seed=0)
    x_TD = torch.randn(512, 64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    layer(x_TD)
    return layer.saved_bytes


def test_ranks_of_an_etp_group_each_save_all_rows() -> None:
    """Compare with real ranks."""
    with RankPool(2) as pool:
        apart, shared = (sum(pool.run(kept_by_experts, etp, timeout=60)) for etp in (1, 2))
    shape = ModelShape("one", 1, 64, 4, 4, 16, 64, 8, 2, 96)
    modelled = [fullest(memory(shape, Mapping.parse(text, 2), Workload(512, "fp32"), 2)) for text in ("ep=2", "etp=2")]
    assert shared > apart
    assert 2 * (modelled[1].activations - modelled[0].activations) == shared - apart


def test_imbalance_increases_activations_and_buffers_up_to_the_capacity() -> None:
    mapping = Mapping.parse("ep=8", 8)
    even, uneven, capped = (
        fullest(memory(EVEN, mapping, Workload(4096, imbalance=busy, capacity=capacity), 8))
        for busy, capacity in ((1.0, None), (3.0, None), (3.0, 1.5))
    )
    rows = 4096 * EVEN.top_k * 2  # bytes of an element of all rows
    assert uneven.activations - even.activations == 24 * 2 * rows * (EVEN.hidden + 2 * EVEN.ffn)
    assert even.buffers < capped.buffers < uneven.buffers
    assert even.activations < capped.activations < uneven.activations
    assert even.weights == uneven.weights


def test_dispatcher_buffers_hold_gathered_and_relayed_rows() -> None:
    """Count the buffer rows of one layer, without those that experts save."""
    shape, row = replace(EVEN, top_k=6), 256 * 2

    def rows(dispatcher: str, ep: int, host: int | None = None, imbalance: float = 1.0) -> float:
        mapping = Mapping.parse(f"ep={ep}", 8, dispatcher=dispatcher)
        plain = replace(mapping, parallel=replace(mapping.parallel, ep=1), dispatcher="all_to_all")
        load = Workload(4096, imbalance=imbalance)
        held, none = (memory(shape, one, load, 8, host=host)[0].buffers for one in (mapping, plain))
        return (held - none) / (4096 * row)  # without dispatch

    assert rows("all_to_all", 8) == pytest.approx(2 * (6 + 6))
    assert rows("all_gather", 8) == pytest.approx((8 + 6) + (6 + 6)), "tokens and rows, sent and received"
    assert rows("all_gather", 2) == pytest.approx((2 + 6) + 2 * (2 + 6)), "combine holds sums in fp32"
    assert rows("hierarchical", 8, host=8) == rows("all_to_all", 8), "no relays on one host"
    over = [rows("hierarchical", 8, host=host) for host in (4, 2)]
    copies = [hosts_reached(shape, hosts) * (hosts - 1) / hosts for hosts in (2, 4)]
    assert over == pytest.approx([2 * (6 + 2 * 6 + each) for each in copies])


def test_recomputation_and_sharding_reduce_memory() -> None:
    mapping = Mapping.parse("tp=2,pp=4,ep=4", 64, sharding="replicate")
    recompute = [replace(mapping, recompute="selective"), replace(mapping, recompute="full")]
    for less in ([mapping, *recompute], [mapping, replace(mapping, sharding="zero1")]):
        result = [fullest(memory(EVEN, one, SEQ, 64)).total for one in less]
        assert all(after < before for before, after in pairwise(result))


def test_reshard_stores_sharded_gradients_under_fsdp() -> None:
    mapping = Mapping.parse("", 16, sharding="fsdp")
    kept, scattered = (memory(EVEN, mapping, SEQ, 64, MemoryPolicy(reshard=reshard))[0] for reshard in (False, True))
    assert kept.gradients == 4 * EVEN.params
    assert scattered.gradients == pytest.approx(4 * EVEN.params / 16, rel=0.01)
    assert (scattered.weights, scattered.optimizer) == (kept.weights, kept.optimizer)


def test_shared_experts_are_sharded_over_tp_only_with_cut_shared() -> None:
    shape, mapping = replace(EVEN, shared_ffn=512), Mapping.parse("tp=4", 4, sharding="replicate")
    whole, cut = (memory(shape, mapping, SEQ, 4, MemoryPolicy(cut_shared=one))[0].parameters for one in (False, True))
    assert whole - cut == 24 * 3 * 512 * 256 * 3 // 4


def test_reshard_gathers_two_layers_at_a_time_under_fsdp() -> None:
    mapping = Mapping.parse("pp=4", 16, sharding="fsdp")
    kept, scattered = (memory(EVEN, mapping, SEQ, 64, MemoryPolicy(reshard=reshard))[1] for reshard in (False, True))
    assert kept.weights == 3 * scattered.weights  # six layers per stage
    halves = replace(mapping, pipeline="zero_bubble")
    assert memory(EVEN, halves, SEQ, 64, MemoryPolicy(reshard=True))[1].weights == kept.weights, (
        "torch keeps the gathered weights for both halves"
    )


def test_an_unsplit_schedule_is_proposed_if_a_split_backward_does_not_fit() -> None:
    shape, plain = model_named("mixtral-8x22b"), Mapping.parse("tp=2,pp=8,ep=8", 128)
    mapping = replace(plain, pipeline="dualpipev", virtual=2)
    held = {one: fullest(memory(shape, one, SEQ, 256)).total for one in (plain, mapping)}
    assert held[plain] < held[mapping]
    reserve = H100.memory_bytes - held[plain]
    changes = changes_that_fit(PlanRequest(shape, cluster_named("h100", 128), SEQ, 256, reserve=reserve), mapping)
    assert ("schedule 1f1b", plain) in {(one.what, one.mapping) for one in changes}
    assert not any(one.what.startswith("vpp") for one in changes), "V schedules have exactly two stages per rank"


# --- does it fit


def held(model: str, text: str, gpus: int, batch: int = 256, *, coupled: bool = False, **settings: object) -> Fit:
    mapping = Mapping.parse(text, gpus, coupled=coupled, **settings)
    return fits(memory(model_named(model), mapping, SEQ, batch), H100)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_published_runs_that_ran_out_of_memory_do_not_fit(recompute: str) -> None:
    """MoE Parallel Folding (arXiv 2504.14960), table 3: Llama3-8x70B on 256 H100s."""
    assert not held("llama3-8x70b", "", 256, sharding="fsdp", recompute=recompute)
    assert not held("llama3-8x70b", "tp=8,ep=8", 256, coupled=True, recompute=recompute)


@pytest.mark.parametrize(
    ("model", "text", "gpus", "recompute"),
    [
        ("mixtral-8x22b", "tp=2,pp=8,ep=8", 128, "none"),
        ("mixtral-8x22b", "tp=4,ep=8,etp=4", 128, "none"),
        ("qwen2-57b-a14b", "tp=2,pp=4,ep=4", 64, "none"),
        ("llama3-8x70b", "tp=8,pp=16,ep=8", 256, "none"),
    ],
)
def test_published_runs_that_ran_fit(model: str, text: str, gpus: int, recompute: str) -> None:
    """The same table."""
    assert held(model, text, gpus, recompute=recompute)


def test_missing_bytes_and_the_largest_term_are_reported() -> None:
    result = held("llama3-8x70b", "", 256, sharding="fsdp")
    assert result.missing == result.fullest.total - result.available > 0
    assert result.fullest.largest == "activations"
    assert "GiB too much" in str(result) and "activations" in str(result)
    fine = held("mixtral-8x22b", "tp=2,pp=8,ep=8", 128)
    assert fine.missing == 0 and str(fine).startswith("fits")
    with pytest.raises(ConfigError, match="reserve"):
        fits((fine.fullest,), H100, H100.memory_bytes)


def test_proposed_changes_modify_one_setting_and_fit() -> None:
    shape, mapping = model_named("llama3-8x70b"), Mapping.parse("tp=8,ep=8", 256, coupled=True, recompute="full")
    request = PlanRequest(shape, cluster_named("h100", 256), SEQ, 256)
    result = changes_that_fit(request, mapping)
    assert {change.what for change in result} >= {"sharding fsdp", "pp 2"}
    for change in result:
        assert fits(memory(shape, change.mapping, SEQ, 256), H100) == change.fit
        assert change.fit
        assert change.mapping.parallel.world == 256
        before, after = vars(mapping), vars(change.mapping)
        assert sum(before[name] != after[name] for name in before) == 1
    # Eight key heads are not divisible by 16, and a micro-batch of one sequence cannot be smaller.
    assert not [change for change in result if change.what.startswith(("tp", "micro-batch"))]
    smaller = changes_that_fit(request, replace(mapping, micro_batch=8, sharding="fsdp", recompute="none"))
    assert "recompute full" in {change.what for change in smaller}


def test_another_dispatcher_is_proposed_if_it_fits() -> None:
    shape, mapping = model_named("deepseek-v3"), Mapping.parse("ep=64", 64, dispatcher="hierarchical", recompute="full")
    least, most = (
        fullest(memory(shape, replace(mapping, dispatcher=one), SEQ, 64, host=8)).total
        for one in ("all_to_all", "hierarchical")
    )
    cluster = cluster_named("h100", 64)
    tight = replace(H100, memory_bytes=(least + most) // 2 + (4 << 30))
    result = changes_that_fit(PlanRequest(shape, replace(cluster, accelerator=tight), SEQ, 64), mapping)
    (one,) = [change for change in result if change.what == "dispatcher all_to_all"]
    assert one.fit and one.mapping == replace(mapping, dispatcher="all_to_all")


def test_invalid_batches_and_pipelines_are_rejected() -> None:
    with pytest.raises(ConfigError, match="micro-batches"):
        memory(EVEN, Mapping.parse("pp=8", 8), SEQ, 4)
    with pytest.raises(ConfigError, match="cannot be divided"):
        memory(EVEN, Mapping.parse("", 8), SEQ, 9)
    with pytest.raises(ConfigError, match="cannot fill"):
        memory(EVEN, Mapping.parse("pp=32", 32), SEQ, 32)


def test_split_backward_buffers_grow_only_with_overlap_inter_and_all() -> None:
    def kept(overlap: str) -> float:
        mapping = Mapping.parse("pp=2,vpp=2,ep=2", 4, pipeline="zbv", overlap=overlap)
        return sum(one.buffers for one in memory(EVEN, mapping, SEQ, 8))

    assert kept("outer") == kept("none") < kept("inter") == kept("all")
