"""Known bugs of MoE training with folded parallelism, compared with one process on the same micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.layers import MoELayer
from tests.pool import RankPool
from tests.train.common import (
    SGD,
    Parts,
    Trained,
    assert_close,
    assert_floats,
    assert_same_training,
    session,
    train,
    whole,
)

DEEPSEEK = ("model.family=deepseek_v3", "model.shared_ffn=24", "model.bias_rate=0.05")
CP_RING = ("parallel.cp=2", "parallel.context=ring")
CP_ULYSSES = ("parallel.cp=2", "parallel.context=ulysses")
LEARNING = ("run.steps=25", "model.init_std=0.05", "optimizer.lr=0.02")
ZBV = ("parallel.pp=2", "parallel.schedule=zbv")


def _first_gradients(rank: int, world: int, settings: list[str]) -> Parts:
    """Return the reduced gradients of the first step, before clipping."""
    with session(settings) as active:
        train_state, batch = active.trainer.train_state, active.trainer.feed.train(0)
        train_state.data_parallel.zero_grad()
        train_state.runner.step(batch.micro, 1 / batch.num_targets)
        train_state.data_parallel.reduce()
        return active.parts(grads=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_auxiliary_losses_reach_the_router_as_on_one_process(
    pool2: RankPool, shared_settings: list[str], family: str
) -> None:
    """The losses have the batch and the sequence form. Large coefficients make them dominate the router's gradient."""
    common = [*shared_settings, "model.layers=4", "data.micro_batches=4", f"model.family={family}"]
    losses = ("model.aux_loss=3.0", "model.z_loss=0.3")
    one_process = whole([_first_gradients(0, 1, [*common, *losses])])
    without = whole([_first_gradients(0, 1, [*common, "model.aux_loss=0.0", "model.z_loss=0.0"])])
    routers = [name for name in one_process if name.endswith("router.weight")]
    assert len(routers) == 4
    for name in routers:
        assert float((one_process[name] - without[name]).norm() / one_process[name].norm()) > 0.3, (
            "the losses must matter"
        )
    mappings = (CP_RING, CP_ULYSSES, ("parallel.tp=2",), ("parallel.dp=2",), ZBV, ("parallel.etp=2", "parallel.ep=1"))
    for mapping in mappings:
        parallel = whole(pool2.run(_first_gradients, [*common, *losses, *mapping], timeout=90))
        assert_close(parallel, one_process, 2e-5)


def _weights_and_biases(rank: int, world: int, settings: list[str]) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    with session(settings) as active:
        active.trainer.fit()
        tensors = {
            f"{number}.{name}": tensor.clone()
            for number, stage in enumerate(active.stages)
            for name, tensor in stage.named_buffers()
        }
        tensors |= {name: piece for name, (_, pieces) in active.parts().items() for _, piece in pieces}
        reports = active.trainer.reports
        return [report.loss for report in reports], [report.load for report in reports], tensors


@pytest.mark.parametrize("mapping", [("parallel.ep=2",), ZBV], ids=" ".join)
def test_recomputation_and_evaluation_change_no_bit_of_losses_loads_biases_and_weights(
    pool2: RankPool, shared_settings: list[str], mapping: tuple[str, ...]
) -> None:
    common = [*shared_settings, *DEEPSEEK, *mapping, "model.layers=4", "model.capacity=1.0"]
    plain = pool2.run(_weights_and_biases, common, timeout=90)
    for changes in (("model.recompute=full", "run.eval_every=1"), ("model.recompute=selective",)):
        changed = pool2.run(_weights_and_biases, [*common, *changes], timeout=90)
        for (losses, loads, tensors), (losses_2, loads_2, tensors_2) in zip(plain, changed, strict=True):
            assert (losses, loads) == (losses_2, loads_2)
            assert tensors.keys() == tensors_2.keys()
            assert all(torch.equal(tensors[name], tensors_2[name]) for name in tensors)
            biases = [tensor for name, tensor in tensors.items() if name.endswith("correction_bias")]
            assert biases and all(bool(bias.any()) for bias in biases)


def _initial(rank: int, world: int, settings: list[str]) -> Parts:
    with session(settings) as active:
        return active.parts()


@pytest.mark.parametrize(
    "mapping",
    [
        ("parallel.tp=2", "parallel.cp=2", "parallel.etp=2", "parallel.ep=2"),
        ("parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "parallel.schedule=zbv", "parallel.sharding=fsdp"),
        ("parallel.dp=4", "parallel.ep=4", "parallel.sharding=zero1"),
    ],
    ids=" ".join,
)
def test_initial_weights_do_not_depend_on_the_mapping(
    pool4: RankPool, shared_settings: list[str], mapping: tuple[str, ...]
) -> None:
    common = [*shared_settings, *DEEPSEEK, "model.layers=4"]
    one_process = whole([_initial(0, 1, common)])
    parallel = whole(pool4.run(_initial, [*common, *mapping], timeout=90))
    assert parallel.keys() == one_process.keys()
    assert all(torch.equal(parallel[name], one_process[name]) for name in one_process)
    halves = [one_process["layers.0.attention.o.weight"][:, :8], one_process["layers.0.attention.o.weight"][:, 8:]]
    assert not torch.equal(*halves), "the shards of one tensor differ"


@pytest.mark.parametrize(
    ("model", "mappings"),
    [
        (("model.tie=true",), ("parallel.schedule=1f1b", "parallel.schedule=zbv")),
        ((*DEEPSEEK, "model.first_dense=2", "model.dense_ffn=24"), ("parallel.schedule=1f1b",)),
        ((*DEEPSEEK, "model.first_dense=4", "model.dense_ffn=24"), ("parallel.schedule=zbv",)),
    ],
    ids=["tied embedding", "a stage without experts", "no experts at all"],
)
def test_a_pipeline_trains_as_one_process(
    pool2: RankPool, shared_settings: list[str], model: tuple[str, ...], mappings: tuple[str, ...]
) -> None:
    common = [*shared_settings, *SGD, *model, "model.layers=4", "data.micro_batches=4"]
    one_process = train(0, 1, common)
    for mapping in mappings:
        assert_same_training(pool2.run(train, [*common, "parallel.pp=2", mapping], timeout=90), one_process)


def _slot_counts(rank: int, world: int, settings: list[str]) -> tuple[int, int, int]:
    """Return routed slots, dropped slots and received rows over a step and all layers of this rank."""
    received = []
    dispatch = MoELayer._dispatch
    with pytest.MonkeyPatch.context() as patch, session(settings) as active:

        def counting(self: MoELayer, *args: Any, **options: Any) -> Any:
            call = dispatch(self, *args, **options)
            received.append(call.handle.num_rows)
            return call

        patch.setattr(MoELayer, "_dispatch", counting)
        batch = active.trainer.feed.train(0)
        active.trainer.train_state.runner.step(batch.micro, 1.0)
        layers = [layer for stage in active.stages for layer in stage.moe_layers()]
        routed = sum(int(layer.router.load_E.sum()) for layer in layers)
        dropped = sum(int(layer.dropped_total) for layer in layers)
        return routed, dropped, sum(received)


@pytest.mark.parametrize(
    ("mapping", "scope"),
    [
        (("parallel.tp=2", "parallel.ep=2"), "batch"),
        (("parallel.tp=2", "parallel.ep=2"), "rank"),
        (CP_RING, None),
        (CP_RING, "batch"),
        (ZBV, "rank"),
    ],
)
def test_every_routed_slot_is_received_or_dropped(
    pool2: RankPool, shared_settings: list[str], mapping: tuple[str, ...], scope: str | None
) -> None:
    drops = [] if scope is None else ["model.capacity=0.75", f"model.capacity_scope={scope}"]
    settings = [*shared_settings, *drops, *mapping, "model.layers=4"]
    routed, dropped, received = map(sum, zip(*pool2.run(_slot_counts, settings, timeout=90), strict=True))
    layers, tokens, top_k = 4, 8 * 16, 2
    assert routed == layers * tokens * top_k
    assert received == routed - dropped
    assert (dropped > 0) == (scope is not None)


def test_capacity_over_the_batch_trains_as_one_process(pool4: RankPool, shared_settings: list[str]) -> None:
    common = [*shared_settings, *SGD, "model.capacity=0.75", "model.capacity_scope=batch"]
    mapping = ("parallel.tp=2", "parallel.cp=2", "parallel.context=ring", "parallel.ep=4")
    one_process, results = train(0, 1, common), pool4.run(train, [*common, *mapping], timeout=90)
    assert all(min(load.dropped) > 0 for load in one_process.loads)
    assert [load.dropped for load in results[0].loads] == [load.dropped for load in one_process.loads]
    assert_same_training(results, one_process)


@pytest.mark.parametrize("kind", ["lamb", "muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_every_optimizer_trains_on_shards_as_on_full_parameters(
    pool4: RankPool, shared_settings: list[str], kind: str
) -> None:
    """LAMB must use the norms, and Muon the matrices, of full parameters with every sharding."""
    common = [*shared_settings, f"optimizer.kind={kind}", "optimizer.lr=0.01", "optimizer.eps=1e-5"]
    common += ["optimizer.momentum=0.9"] if kind == "muon" else []
    mapping = ("parallel.tp=2", "parallel.dp=2", "parallel.etp=2", "parallel.ep=2", "parallel.sharding=fsdp")
    one_process, results = train(0, 1, common), pool4.run(train, [*common, *mapping], timeout=90)
    assert one_process.losses[-1] < one_process.losses[0]
    assert_floats(results[0].losses, one_process.losses)
    assert_close(whole([trained.parts for trained in results]), whole([one_process.parts]), 1e-3)


@pytest.fixture(scope="module")
def learned(pool2: RankPool, shared_settings: list[str]) -> Trained:
    """Return the result of a run that learns, with settings that do not change it much in the tests below."""
    return pool2.run(train, [*shared_settings, *LEARNING], timeout=90)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("sharding", [pytest.param("replicate", marks=pytest.mark.slow), "fsdp"])
def test_compressed_gradients_change_the_final_loss_less_than_the_seed(
    pool2: RankPool, shared_settings: list[str], learned: Trained, sharding: str
) -> None:
    common = [*shared_settings, *LEARNING, f"parallel.sharding={sharding}"]
    compressed, other = (
        pool2.run(train, [*common, change], timeout=90)[0] for change in ("parallel.compress=true", "run.seed=1")
    )
    assert learned.losses[-1] < learned.losses[0] - 1
    assert compressed.losses != learned.losses
    noise = abs(other.validation - learned.validation)
    assert abs(compressed.validation - learned.validation) < max(0.3 * noise, 0.005)


def test_bf16_learns_on_fp32_masters(pool2: RankPool, shared_settings: list[str], learned: Trained) -> None:
    plain, rounded = learned, pool2.run(train, [*shared_settings, *LEARNING, "model.dtype=bfloat16"], timeout=90)[0]
    assert rounded.losses != plain.losses
    assert rounded.losses[-1] == pytest.approx(plain.losses[-1], rel=0.02)
    assert all(piece.dtype == torch.float32 for _, pieces in rounded.parts.values() for _, piece in pieces)


def test_separate_documents_under_context_parallelism(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path
) -> None:
    texts = [f"document {n} " * (1 + n % 5) for n in range(300)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    separate = [f"data.source={tmp_path / 'documents.jsonl'}", "data.documents=separate", "data.packing=best_fit"]
    common = [*shared_settings, *SGD, *separate, "data.seq_len=32"]
    alone = train(0, 1, common)
    assert alone.losses != train(0, 1, [*common, "data.documents=joined"]).losses
    for mapping in (CP_ULYSSES, (*CP_RING, "parallel.sharding=fsdp")):
        assert_same_training(pool2.run(train, [*common, *mapping], timeout=90), alone)
