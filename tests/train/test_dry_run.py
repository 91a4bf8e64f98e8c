"""The dry run: all presets build, and the reported memory is that of real ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import get_schedule_class

from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, RopeConfig
from moe_comm.layers.moe.layer import MoEConfig
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.layers.transformer.shape import ModelShape, Recompute
from moe_comm.topology import ParallelMesh
from moe_comm.topology.pipeline import SCHEDULES, check_micro_batches
from moe_comm.train.config import load, ready_configs
from moe_comm.train.dry_run import DryRun, describe, examine, fake_ranks
from moe_comm.train.loop.build import architecture_of, build
from moe_plan.model.activations import ActivationMemory
from moe_plan.orders import in_flight_peaks
from tests.pool import RankPool
from tests.support.activation_memory import activation_bytes

PARAMETERS = {  # published: total, and active per token in billions; DeepSeek-V3 without multi-token prediction
    "mixtral-8x7b": (46_702_792_704, 12.9),
    "mixtral-8x22b": (140_630_071_296, 39.2),
    "qwen3-30b-a3b": (30_532_122_624, 3.35),
    "deepseek-v3": (671_026_404_352, 37.6),
}
FOLDED = (
    "parallel.ranks=4",
    "parallel.tp=2",
    "parallel.dp=2",
    "model.hidden=16",
    "model.layers=3",
    "model.heads=4",
    "model.kv_heads=2",
    "model.experts=6",
    "model.ffn=24",
    "data.seq_len=16",
    "data.batch=8",
    "data.micro_batches=2",
)


def dry_run(*settings: str, base: str | None = None) -> DryRun:
    return examine(load(base, settings))


@pytest.mark.parametrize("name", ready_configs())
def test_every_preset_builds_and_is_described(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(name)
    run = examine(config)
    monkeypatch.setattr("moe_comm.train.dry_run.examine", lambda config: run)  # ``describe`` need not build it again
    assert not dist.is_initialized()
    if name in PARAMETERS:
        params, active = PARAMETERS[name]
        assert run.shape.params == params
        assert run.shape.active / 1e9 == pytest.approx(active, rel=0.01)
    elements = [math.prod(s.shape) for position in run.positions for s in position.shardings.values()]
    assert sum(elements) == run.shape.params
    text = describe(config)
    assert f"builds on {config.parallel.ranks} ranks" in text
    assert len([line for line in text.splitlines() if line.startswith(tuple("0123456789 "))]) >= len(run.positions)
    assert max(len(line) for line in text.splitlines()) <= 130
    if run.mapping.pp > 1:
        [fullest] = [line for line in text.splitlines() if "<- peak" in line]
        totals = [position.fullest.total for position in run.positions]
        assert fullest.split()[0] == str(totals.index(max(totals)))
    # All presets fit accelerators with 80 GiB.
    assert max(position.fullest.total for position in run.positions) < 80 * 2**30


UNEVEN = (*FOLDED, "parallel.ep=4", "model.experts=7", "model.first_dense=1", "model.dense_ffn=40", "model.vocab=261")
PIPELINE = (*FOLDED, "parallel.ranks=8", "parallel.pp=2", "parallel.ep=2", "parallel.etp=2", "model.layers=5")


@pytest.mark.parametrize(
    "settings",
    [
        UNEVEN,
        (*FOLDED, "parallel.ep=2", "model.family=deepseek_v3", "model.shared_ffn=16"),
        (*PIPELINE, "model.tie=true", "parallel.schedule=zbv"),
    ],
    ids=["uneven", "latent", "tied and a V"],
)
def test_the_parameters_of_the_ranks_add_up_to_the_model_times_its_replicas(settings: tuple[str, ...]) -> None:
    run = dry_run(*settings)
    for position in run.positions:
        copies = 0
        for sharding in position.shardings.values():
            num_shards = math.prod(run.mapping.sizes[split.axis] for split in sharding.splits)
            copies += math.prod(sharding.shape) * run.mapping.stage // num_shards
        assert sum(rank.fixed.params for rank in position.ranks) == copies
        # In fp32 and replicated: weights, gradients, and two Adam states.
        weights = [rank.fixed.weights for rank in position.ranks]
        assert sum(weights) == 4 * copies
        assert [rank.fixed.gradients for rank in position.ranks] == weights
        assert [rank.fixed.optimizer for rank in position.ranks] == [2 * weight for weight in weights]
    total = sum(math.prod(s.shape) for position in run.positions for s in position.shardings.values())
    tied = run.architecture.vocab * run.architecture.hidden if run.architecture.tie else 0
    assert total == run.shape.params + tied


def test_lent_experts_take_slots_in_each_layer_and_the_gradients_of_one() -> None:
    settings = ("parallel.ranks=2", "parallel.ep=2", "model.experts=6", "model.dtype=bfloat16", "data.batch=16")
    found = []
    for layers in (2, 4):
        run, lends = (
            dry_run(*settings, f"model.layers={layers}", *more) for more in ((), ("placement.balance={copies = 1}",))
        )
        fixed = [one.positions[0].ranks[0].fixed for one in (run, lends)]
        found.append((fixed[1].weights - fixed[0].weights, fixed[1].gradients - fixed[0].gradients))
    model = run.architecture
    expert = 3 * model.hidden * model.moe.ffn
    assert found == [(2 * layers * expert, 4 * (3 + 1) * expert) for layers in (2, 4)]


def test_copies_that_are_read_in_shared_memory_take_no_slots() -> None:
    settings = ("parallel.ranks=2", "parallel.ep=2", "model.experts=6", "data.batch=16")
    weights = {}
    for backend in ("shared_memory", "all_to_all"):
        more = (f"parallel.backend={backend}", "placement.balance={copies = 2}")
        weights[backend] = dry_run(*settings, *more).positions[0].ranks[0].fixed
    model = dry_run(*settings).architecture
    slots = 2 * len(model.moe_layers) * 3 * model.hidden * model.moe.ffn
    assert weights["all_to_all"].weights - weights["shared_memory"].weights == 4 * slots
    assert weights["all_to_all"].gradients == weights["shared_memory"].gradients


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_sharded_state_is_stored_once(strategy: str) -> None:
    even = ("parallel.ranks=4", "parallel.dp=4", "parallel.ep=2", "model.vocab=256", "data.tokenizer=none.json")
    run = dry_run(*even, f"parallel.sharding={strategy}", "model.dtype=bfloat16", "data.batch=16")
    [position] = run.positions
    assert sum(rank.fixed.optimizer for rank in position.ranks) == 12 * run.shape.params  # masters and Adam's two
    alone = dry_run(*even, f"parallel.sharding={strategy}", "parallel.ranks=1", "parallel.dp=1", "parallel.ep=1")
    assert alone.positions[0].ranks[0].fixed.optimizer == 8 * run.shape.params  # fp32 weights are their own masters


@pytest.mark.parametrize(("strategy", "stored"), [("zero1", 12), ("fsdp", 8)])
def test_offloaded_state_is_counted_by_its_budget(strategy: str, stored: int) -> None:
    even = ("parallel.ranks=4", "parallel.dp=4", "parallel.ep=2", "model.vocab=256", "data.tokenizer=none.json")
    shape = (*even, f"parallel.sharding={strategy}", "model.dtype=bfloat16", "data.batch=16")
    offload = ("offload.optimizer=file", "offload.budget=64KiB", "offload.path=/var/tmp")
    run, resident = dry_run(*shape, *offload), dry_run(*shape)
    assert sum(rank.fixed.stored for rank in run.positions[0].ranks) == stored * run.shape.params
    for rank, before in zip(run.positions[0].ranks, resident.positions[0].ranks, strict=True):
        assert before.fixed.stored == 0
        assert rank.fixed.optimizer == before.fixed.optimizer - rank.fixed.stored + (64 << 10)
    text = describe(load(None, [*shape, *offload]))
    assert "in file" in text and "counts the offloaded state by its budget" in text
    assert "in file" not in describe(load(None, list(shape)))


def test_offloaded_activations_are_counted_by_their_budget() -> None:
    shape = ("parallel.ranks=2", "parallel.ep=2", "data.tokenizer=none.json", "model.vocab=256", "model.layers=8")
    shape = (*shape, "model.recompute=full", "data.batch=16", "data.seq_len=64", "model.hidden=64")
    offload = ("offload.activations=file", "offload.activation_budget=192KiB", "offload.path=/var/tmp")
    run, resident = dry_run(*shape, *offload), dry_run(*shape)
    config = load(None, [*shape])
    tokens = config.data.batch * config.data.seq_len // 2 // config.data.micro_batches
    layer = tokens * 64 * 4  # the input of one layer
    before, rank = resident.positions[0].ranks[0], run.positions[0].ranks[0]
    assert before.activations - rank.activations == 8 * layer - (192 << 10) - layer
    moved = 2 * (8 * layer - (192 << 10)) * config.data.micro_batches
    assert (before.moved, rank.moved) == (0, pytest.approx(moved))
    text = describe(load(None, [*shape, *offload]))
    assert "recompute instead" in text and "counts the offloaded state" not in text


@pytest.mark.parametrize(("micro_batches", "gathers"), [(1, 2), (2, 4)])
def test_offloaded_weights_are_on_the_host_with_their_gradients_and_state(micro_batches: int, gathers: int) -> None:
    shape = ("parallel.ranks=4", "parallel.dp=4", "parallel.ep=2", "model.vocab=256", "data.tokenizer=none.json")
    shape = (*shape, "parallel.sharding=fsdp", "model.dtype=bfloat16", "data.batch=16")
    shape = (*shape, f"data.micro_batches={micro_batches}")
    run, resident = dry_run(*shape, "offload.weights=host"), dry_run(*shape)
    root = 4 * 2 * 256 * run.architecture.hidden + 4 * run.architecture.hidden  # embedding, head and norm in fp32
    weights = 4 * run.shape.params
    ranks = run.positions[0].ranks
    assert sum(rank.fixed.host for rank in ranks) == 4 * weights  # masters, gradients and Adam's two
    # Layers are gathered before each pass, the root once for each micro-batch, and gradients are copied once.
    assert sum(rank.copied for rank in ranks) == (gathers + 1) * weights - gathers // 2 * root
    for rank, before in zip(ranks, resident.positions[0].ranks, strict=True):
        assert (before.fixed.host, before.copied) == (0, 0)
        assert (rank.fixed.weights, rank.activations) == (before.fixed.weights, before.activations)
        assert (rank.fixed.optimizer, rank.fixed.at_update) == (0, 0)
        # Several micro-batches add complete gradients on the device.
        assert rank.fixed.gradients == (0 if micro_batches == 1 else before.fixed.gradients)
    text = describe(load(None, [*shape, "offload.weights=host"]))
    assert "are in the host's memory" in text and "at 10 GB/s" in text
    alone = ("parallel.ranks=1", "parallel.dp=1", "parallel.ep=1", "offload.weights=host")
    assert dry_run(*shape, *alone).positions[0].ranks[0].fixed.host == 4 * weights


def measured_bytes(rank: int, world: int, settings: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of a real run on this rank before its first step."""
    config = load(None, settings)
    train_state = build(config, architecture_of(config, 257), ParallelMesh(config.parallel.mapping(world)))
    data_parallel = train_state.data_parallel
    data_parallel.zero_grad()
    params = {p for stage in train_state.stages for p in stage.parameters()}
    weights = _storages([] if config.parallel.sharding == "fsdp" else [p.data for p in params])
    masters = _storages([owned.value.data for owned in data_parallel.owned()])
    state = [t for tensors in train_state.optimizer.state_tensors().values() for t in tensors.values()]
    result = {
        "weights": sum(weights.values()),
        "optimizer": sum(size for key, size in masters.items() if key not in weights) + sum(t.nbytes for t in state),
        "gradients": sum(p.grad.nbytes for p in params if p.grad is not None),
    }
    for stage in train_state.stages:
        stage.close()  # type: ignore[operator]
    train_state.runner.close()
    return result


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.ep=2", "model.dtype=bfloat16", "optimizer.kind=muon", "optimizer.momentum=0.9"),
        ("parallel.ep=2", "parallel.sharding=zero1", "model.dtype=bfloat16"),
        ("parallel.ep=2", "parallel.sharding=fsdp", "optimizer.kind=lamb", "model.dtype=bfloat16"),
        ("parallel.tp=1", "parallel.pp=2", "parallel.ep=1", "parallel.etp=2", "parallel.sharding=zero1"),
        ("parallel.ep=1", "model.experts=3", "model.top_k=1", "parallel.sharding=zero1", "model.ffn=21"),
        ("parallel.ep=2", "model.experts=1", "model.top_k=1", "parallel.sharding=fsdp"),
        ("parallel.ep=2", "parallel.sharding=fsdp", "placement.balance={copies = 1}"),
        (
            "parallel.tp=1",
            "parallel.dp=4",
            "parallel.ep=2",
            "parallel.sharding=fsdp",
            "parallel.dp_replicate=2",
            "model.dtype=bfloat16",
        ),
    ],
    ids=" ".join,
)
def test_the_memory_is_that_of_real_ranks(settings: tuple[str, ...], pool4: RankPool) -> None:
    all_settings = (*FOLDED, *settings)
    measured_by_rank = pool4.run(measured_bytes, all_settings, timeout=120)
    run = dry_run(*all_settings)
    ranks = {rank.rank: rank.fixed for position in run.positions for rank in position.ranks}
    fsdp, fp32 = "parallel.sharding=fsdp" in settings, "model.dtype=bfloat16" not in settings
    for rank, measured in enumerate(measured_by_rank):
        assert ranks[rank].optimizer == measured["optimizer"], rank
        if not fsdp:
            assert ranks[rank].weights == measured["weights"], rank
        if not fsdp and not fp32:  # fp32 gradients, as those of routers, do not exist before backward
            routers = 3 * 6 * 16 * 4
            assert ranks[rank].gradients == measured["gradients"] + routers, rank


MODEL = TransformerConfig(
    vocab=200,
    hidden=64,
    layers=3,
    attention=AttentionConfig(64, 8, 4, 8, qk_norm="head"),
    moe=MoEConfig(64, 48, RouterConfig(8, 2), shared_ffn=40),
    max_length=128,
    dense_layers=(1,),
    dense_ffn=160,
)
LATENT = AttentionConfig(64, 8, 8, 8, rope=RopeConfig(interleaved=True), mla=MLAConfig(24, 16, 8, 4, 8))


@pytest.mark.parametrize(
    ("latent", "dtype", "recompute"),
    [
        (False, torch.float32, "none"),
        (True, torch.bfloat16, "none"),
        (False, torch.bfloat16, "selective"),
        (True, torch.float32, "selective"),
        (False, torch.float32, "full"),
    ],
    ids=str,
)
def test_the_estimate_of_activations_is_within_a_fifth(latent: bool, dtype: torch.dtype, recompute: Recompute) -> None:
    moe = replace(MODEL.moe, recompute=recompute != "none")
    config = replace(MODEL, moe=moe, attention=LATENT if latent else MODEL.attention)
    model = Transformer(config, ModelPlan(recompute=recompute, dtype=dtype))
    initialize(model, 0)
    ids = torch.randint(200, (2, 128), generator=torch.Generator().manual_seed(0))
    measured = activation_bytes(lambda: model.loss(model(ids), ids), [*model.parameters(), *model.buffers(), ids])
    shape, tokens = ModelShape.of(config), ids.numel()
    estimate = ActivationMemory(
        shape, dtype.itemsize, recompute=recompute, recompute_experts=moe.recompute, on_cpu=True
    )
    logits = 4 * tokens * config.vocab  # a chunk of them is freed when the loss is computed
    assert tokens * estimate.saved(1, 2, 1) + estimate.loss(tokens) - logits == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_in_flight_are_those_of_torchs_schedules(name: str) -> None:
    compared = 0
    for pp in (2, 3, 4):
        for virtual in range(SCHEDULES[name].least, (SCHEDULES[name].most or 3) + 1):
            for count in (1, 2, 3, 4, 6, 8, 12):
                try:
                    check_micro_batches(name, pp, count)
                except ConfigError:
                    continue
                for rank, actions in _order(name, pp, virtual, count).items():
                    peak = _peak_in_flight(actions)
                    assert sum(in_flight_peaks(name, pp, virtual, count)[rank][0][0]) == peak, (
                        pp,
                        virtual,
                        count,
                        rank,
                    )
                    compared += 1
    assert compared > 20


def _order(name: str, pp: int, virtual: int, micro_batches: int) -> dict[int, list[Any]]:
    """Return the actions of each rank in torch's schedule."""
    schedule: Any = get_schedule_class(SCHEDULES[name].torch_name)
    if SCHEDULES[name].single:
        single = schedule.__new__(schedule)
        single._num_stages, single._n_microbatches = pp, micro_batches
        order: dict[int, list[Any]] = single._get_pipeline_order()
        return order
    stages = [
        SimpleNamespace(group_size=pp, group_rank=0, num_stages=pp * virtual, stage_index=i, submod=torch.nn.Identity())
        for i in range(virtual)
    ]
    whole: dict[int, list[Any]] = schedule(stages, micro_batches, scale_grads=False).pipeline_order
    return whole


def _peak_in_flight(actions: list[Any]) -> int:
    in_flight = peak = 0
    flat = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
    for action in flat:
        kind = action.computation_type.name
        in_flight += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
        peak = max(peak, in_flight)
    return peak


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "fsdp"])
def test_offloaded_state_needs_the_budget(strategy: str) -> None:
    settings = ("parallel.ranks=4", "parallel.ep=2", f"parallel.sharding={strategy}", "model.dtype=bfloat16")
    none = ("optimizer.kind=sgd", "optimizer.momentum=0")  # no state: masters only
    offload = ("offload.optimizer=file", "offload.path=/data", "offload.budget=1000")
    resident, masters, stored = (dry_run(*settings, *more).positions[0].ranks[0].fixed for more in ((), none, offload))
    kept = masters.optimizer if strategy == "fsdp" else 0
    assert kept + 1000 == stored.optimizer < resident.optimizer
    assert replace(stored, optimizer=resident.optimizer, stored=0) == resident


def test_with_fsdp_experts_with_slots_are_whole_and_their_optimizer_state_is_sharded() -> None:
    mapping = ("parallel.ranks=4", "parallel.ep=2", "model.experts=6", "model.hidden=16", "model.ffn=24")
    shards, slots = ("parallel.sharding=fsdp", "model.layers=4"), ("placement.balance={copies = 2}",)
    without, with_slots = (dry_run(*mapping, *shards, *extra).positions[0].ranks[0].fixed for extra in ((), slots))
    expert = 4 * 3 * 16 * 24
    # 3 homes and 2 slots in each of 4 layers, instead of the experts of two layers.
    assert with_slots.weights - without.weights == expert * (4 * (3 + 2) - 2 * 3)
    assert (with_slots.params, with_slots.optimizer) == (without.params, without.optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.pp=3"], "but there are 4 ranks"),
        (["model.kv_heads=1"], r"kv_heads \(1\) must be a multiple of tp \(2\)"),
        (["parallel.ep=1", "parallel.etp=4", "model.ffn=6"], "ffn = 6 must be a multiple of etp = 4"),
        (["parallel.dp=1", "parallel.pp=2", "model.layers=1"], "1 layers cannot fill 2 stages"),
        (["parallel.dp=1", "parallel.pp=2", "data.micro_batches=1"], "at least 2 micro-batches"),
        (["data.batch=2"], "1 sequences .* for 2 data-parallel ranks"),
        (["data.seq_len=15"], r"data\.seq_len \(15\)"),
        (["data.tokenizer=missing.json"], "vocabulary size is unknown"),
        (["model.vocab=256"], "smaller than the tokenizer's"),
        (["model.pretrained=/nonexistent"], "is not a Hugging Face model folder"),
    ],
)
def test_an_invalid_model_is_a_config_error(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dry_run(*FOLDED, *settings)
    assert not dist.is_initialized()


def test_an_initialized_process_group_is_an_error() -> None:
    with fake_ranks(2, 1):
        with pytest.raises(ConfigError, match="without a process group"):
            dry_run()
        assert dist.get_rank() == 1


def test_the_command_prints_the_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "tiny", "--dry-run", "parallel.ranks=4"]) == 0
    assert capsys.readouterr().out == describe(load("tiny", ["parallel.ranks=4"])) + "\n"
