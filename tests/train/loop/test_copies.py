"""Training while experts get copies on other ranks, compared with fixed experts."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import pytest
import torch

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.records import ATTEMPTS, PLACEMENTS, Attempt, PlacementLine, read_lines
from moe_comm.runtime.persistent_memory import LauncherProcess
from moe_comm.topology import Placement
from moe_comm.topology.rebalance import publications
from moe_comm.train.checkpoint import CheckpointReader
from moe_comm.train.config import load
from tests.pool import RankPool
from tests.train.common import Trained, assert_floats, session, train, whole
from tests.train.loop.test_placement import (
    CHANGES,
    LONG,
    RELOCATE,
    metrics_of,
    placement_at_end,
    run_relocating,
    run_with_memory,
)
from tests.train.loop.test_resume import AUTO, losses_of

SLOTS = 2
SLOW = partial(pytest.param, marks=pytest.mark.slow)
CHUNKS = "parallel.overlap_chunks=2"
INTERLEAVED = ("parallel.interleave=true", CHUNKS)
SHORTCUT = ("model.shortcut=true", "model.dense_ffn=16", "data.micro_batches=1")
FSDP = ("parallel.sharding=fsdp",)
REPLICATE = ("placement.kind=replicate", f"placement.slots={SLOTS}")


def replicated(old: Placement, seed: int) -> Placement:
    """Return a random placement with the counts and slots of ``old``, and copies."""
    rng = random.Random(seed)
    homes = list(old.homes)
    rng.shuffle(homes)
    left, owners = [SLOTS] * old.world, []
    for home in homes:
        chosen = [rank for rank in range(old.world) if rank != home and left[rank] and rng.random() < 0.5]
        for rank in chosen:
            left[rank] -= 1
        owners.append((home, *chosen))
    return Placement(tuple(owners), old.world, old.version + 1, old.slots)


def train_replicating(rank: int, world: int, settings: list[str]) -> tuple[Trained, bool]:
    """Train, and change copies after steps 1, 2 and 3; return also whether all copies have their home's weights."""
    equal = []
    with session([*settings, *REPLICATE, "placement.every=1000"]) as active:
        state = active.trainer.train_state

        def change(report: Any) -> None:
            if report.step in CHANGES:
                state.placements.switch(
                    {name: replicated(old, report.step) for name, old in state.placements.by_layer.items()}
                )
                state.data_parallel.publish()
            for name, layer in moe_layers(active.stages[0]):
                assert layer.placement == state.placements.by_layer[name] and layer.copies is not None
                if layer.copies.rematerialized:  # another layer has its weights in the stack
                    layer.publish_copies()
                local = dict(zip(layer.local_experts, layer.copies.stacked()["w13"], strict=False))
                shards = layer.experts.expert_gradients.shards
                full = shards.gather("w13", layer.experts.w13.detach())
                assert full is not None
                one = layer.experts.sharding_of_one("w13")
                parts = {expert: one.take(full[expert], layer.place, layer.sizes) for expert in local}
                equal.append(all(torch.equal(parts[expert], value) for expert, value in local.items()))

        status = active.trainer.fit(change)
        reports = active.trainer.reports
        losses, norms = [report.loss for report in reports], [report.grad_norm for report in reports]
        return Trained(losses, norms, [], active.parts(), active.trainer.evaluate(), status), all(equal)


@pytest.mark.parametrize(
    ("world", "extra"),
    [
        (2, ()),
        SLOW(4, ()),
        (2, ("model.dtype=bfloat16", "model.recompute=full")),
        (4, ("parallel.ep=2", "parallel.sharding=zero1", "data.micro_batches=2")),
        SLOW(4, ("parallel.tp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=2")),
        SLOW(2, (*INTERLEAVED, "parallel.backend=all_to_all")),
        (2, (*INTERLEAVED, "data.micro_batches=4")),
        SLOW(2, (*INTERLEAVED, "data.micro_batches=4", "model.recompute=full")),
        SLOW(2, FSDP),
        SLOW(4, (*FSDP, "parallel.ep=2", "data.micro_batches=2")),
    ],
    ids=[
        *("ep2", "ep4", "bf16", "zero1_edp2", "etp2", "interleaved", "interleaved_pairs", "recomputed_pairs"),
        *("fsdp", "fsdp_edp2"),
    ],
)
def test_losses_and_norms_are_those_of_fixed_experts_while_copies_change(
    request: pytest.FixtureRequest, shared_settings: list[str], world: int, extra: tuple[str, ...]
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    settings = [*shared_settings, *LONG, *extra]
    rtol = 2e-3 if "model.dtype=bfloat16" in extra else 1e-5
    expected = pool.run(train, settings, timeout=200)
    results = pool.run(train_replicating, settings, timeout=200)
    for (got, equal), wanted in zip(results, expected, strict=True):
        assert equal
        assert_floats(got.losses, wanted.losses, rtol)
        assert_floats(got.norms[:1], wanted.norms[:1], max(rtol, 1e-6))
        assert_floats(got.norms, wanted.norms, 100 * rtol)
    weights = whole([wanted.parts for wanted in expected])
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in whole([got.parts for got, _ in results]).items()
    }


@pytest.mark.parametrize(
    ("world", "extra"),
    [
        (2, ()),
        SLOW(4, ("parallel.overlap_gradients=on",)),
        SLOW(4, ("parallel.ep=2", "model.dtype=bfloat16", "model.recompute=full", "data.micro_batches=2")),
        SLOW(4, ("parallel.ep=2", "parallel.etp=2", "guard.on_spike=rerun")),
        SLOW(4, (*INTERLEAVED, "parallel.ep=2", "model.dtype=bfloat16", "data.micro_batches=4", "data.batch=16")),
        SLOW(4, ("model.layers=4", "data.micro_batches=4", "parallel.pp=2", "parallel.ep=2", "parallel.schedule=1f1b")),
        SLOW(2, ("model.layers=4", "data.micro_batches=2", "placement.rematerialize=true")),
    ],
    ids=["ep2", "overlapped", "edp2_bf16", "etp2", "edp2_interleaved", "pipeline", "rematerialized"],
)
def test_with_fsdp_copies_train_with_the_bits_of_zero1(
    request: pytest.FixtureRequest, shared_settings: list[str], world: int, extra: tuple[str, ...]
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    settings = [*shared_settings, *LONG, *extra]
    expected, results = (
        pool.run(train_replicating, [*settings, f"parallel.sharding={kind}"], timeout=200) for kind in ("zero1", "fsdp")
    )
    for (got, equal), (wanted, _) in zip(results, expected, strict=True):
        assert equal and got.losses == wanted.losses and got.norms == wanted.norms
        assert got.validation == wanted.validation
    weights = whole([wanted.parts for wanted, _ in expected])
    for name, value in whole([got.parts for got, _ in results]).items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    ("world", "extra"),
    [
        (2, ("model.recompute=selective", "data.micro_batches=2")),
        SLOW(2, ("model.dtype=bfloat16", "model.recompute=full", "data.micro_batches=2")),
        SLOW(2, (*INTERLEAVED, "data.micro_batches=4")),
        SLOW(2, (*INTERLEAVED, "data.micro_batches=4", "model.recompute=full")),
        SLOW(4, ("parallel.tp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=2")),
        (4, (*SHORTCUT, "parallel.ep=2", "parallel.sharding=zero1", "parallel.backend=all_to_all", CHUNKS)),
    ],
    ids=["recomputed", "bf16", "interleaved", "interleaved_recomputed", "etp2", "shortcut_zero1"],
)
def test_rematerialized_copies_train_with_the_same_bits_while_copies_change(
    request: pytest.FixtureRequest, shared_settings: list[str], world: int, extra: tuple[str, ...]
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    settings = [*shared_settings, *LONG, "model.layers=4", *extra]
    kept, shared = (
        pool.run(train_replicating, [*settings, f"placement.rematerialize={value}"], timeout=200)
        for value in ("false", "true")
    )
    for (got, equal), (wanted, _) in zip(shared, kept, strict=True):
        assert equal and got.losses == wanted.losses and got.norms == wanted.norms
        assert got.validation == wanted.validation
    weights = whole([wanted.parts for wanted, _ in kept])
    for name, value in whole([got.parts for got, _ in shared]).items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    "extra", [SLOW(()), ("placement.rematerialize=true",), SLOW(FSDP)], ids=["kept", "rematerialized", "fsdp"]
)
def test_runs_decide_on_copies_and_resume_with_them(
    pool2: RankPool, settings: list[str], extra: tuple[str, ...]
) -> None:
    settings = [*settings, "model.layers=4"]
    # Norms are summed in another order with FSDP. The difference may change a choice of the router in later steps.
    without_copies = [*settings, *RELOCATE, *(FSDP if extra == FSDP else ()), "placement.kind=fixed", "run.name=fixed"]
    fixed = pool2.run(run_relocating, without_copies, timeout=200)[0]
    whole_run = [*settings, *RELOCATE, *REPLICATE, *extra, "run.name=copies", "checkpoint.every=10"]
    copied = pool2.run(run_relocating, whole_run, timeout=200)[0]
    decisions = list(read_lines(copied.folder / PLACEMENTS, PlacementLine))
    assert any(line.switched and line.placement.has_copies for line in decisions)
    assert all(max(line.placement.copies_per_rank) <= SLOTS for line in decisions)
    assert_floats([line["loss"] for line in metrics_of(copied)], [line["loss"] for line in metrics_of(fixed)], 1e-5)
    middle = CheckpointReader(copied.folder / "checkpoints" / "step-00000010")
    placements = [Placement.from_json(json.dumps(one)) for one in middle.state["placement"]["layers"].values()]
    assert any(one.has_copies for one in placements) and all(one.slots == SLOTS for one in placements)
    wanted = losses_of(copied.folder), placement_at_end(copied)
    resume = [*whole_run, f"checkpoint.resume={middle.path}"]
    resumed = pool2.run(run_relocating, resume, timeout=200)[0]  # repeats the later steps in the same folder
    assert (losses_of(resumed.folder), placement_at_end(resumed)) == wanted
    # Without slots, the experts stay at their homes, and the copies are dropped.
    without = [
        "placement.kind=fixed",
        "placement.slots=0",
        "placement.rematerialize=false",
        "run.steps=11",
    ]
    dropped = pool2.run(run_relocating, [*resume, *without], timeout=200)[0]
    end = placement_at_end(dropped)["layers"]
    for one, before in zip(end.values(), placements, strict=True):
        after = Placement.from_json(json.dumps(one))
        assert after.homes == before.homes and not after.has_copies and after.slots is None
    assert_floats([losses_of(dropped.folder)[-1]], [wanted[0][10]], 1e-5)


def test_a_snapshot_in_memory_is_restored_with_its_copies(
    pool2: RankPool, settings: list[str], owner: LauncherProcess
) -> None:
    copied = [*settings, *RELOCATE, *REPLICATE]
    expected = pool2.run(run_relocating, [*copied, "run.name=expected"], timeout=200)[0]
    decisions = list(read_lines(expected.folder / PLACEMENTS, PlacementLine))
    assert any(line.switched and line.placement.has_copies and line.step < 10 for line in decisions)
    snapshots = [*copied, "run.name=memory", "checkpoint.peer_every=1"]
    pool2.run(run_with_memory, (snapshots, owner, 10), timeout=200)
    pool2.run(run_with_memory, ([*snapshots, AUTO], owner, None), timeout=200)
    (folder,) = expected.folder.parent.glob("memory-*")
    assert [attempt.source for attempt in read_lines(folder / ATTEMPTS, Attempt)] == ["fresh", "peer memory"]
    assert losses_of(folder) == losses_of(expected.folder)


@pytest.mark.parametrize(
    "extra",
    [
        SLOW(("parallel.schedule=1f1b", "parallel.sharding=zero1", "parallel.overlap_gradients=on")),
        SLOW(("parallel.schedule=1f1b", "model.layers=8", "placement.rematerialize=true", "model.recompute=full")),
        ("parallel.schedule=interleaved_1f1b",),
        SLOW(("parallel.schedule=zero_bubble", "model.recompute=selective")),
        SLOW(("parallel.schedule=zbv", "model.layers=8", "placement.rematerialize=true")),
        SLOW(("parallel.schedule=dualpipev", "model.layers=8", *INTERLEAVED, "data.micro_batches=8", "data.batch=16")),
    ],
    ids=["zero1", "rematerialized", "interleaved_1f1b", "zero_bubble", "zbv_rematerialized", "dualpipev_interleaved"],
)
def test_pipelines_train_as_with_fixed_experts_while_copies_change(
    pool4: RankPool, shared_settings: list[str], extra: tuple[str, ...]
) -> None:
    pipeline = ("model.layers=4", "data.micro_batches=4", "parallel.pp=2", "parallel.ep=2")
    settings = [*shared_settings, *LONG, *pipeline, *extra]
    fixed = [text for text in settings if not text.startswith("placement.")]
    expected, results = pool4.run(train, fixed, timeout=200), pool4.run(train_replicating, settings, timeout=200)
    for (got, equal), wanted in zip(results, expected, strict=True):
        assert equal
        assert_floats(got.losses, wanted.losses)
        assert_floats(got.norms, wanted.norms, 1e-3)


def count_publications(rank: int, world: int, settings: list[str]) -> list[float]:
    """Return how often each layer has sent the weights of this rank's experts to their copies in a step."""
    with session([*settings, *REPLICATE, "placement.every=1000"]) as active:
        state = active.trainer.train_state
        state.placements.switch({name: replicated(old, 1) for name, old in state.placements.by_layer.items()})
        state.data_parallel.publish()
        active.trainer.train_step(0)
        counts = []
        for layer in (layer for stage in active.stages for _, layer in moe_layers(stage)):
            assert layer.copies is not None
            copies = sum(len(ranks) - 1 for ranks in layer.placement.owners if ranks[0] == layer.place["ep"])
            expert = sum(param[0].nbytes for param in layer.experts.parameters())
            counts.append(layer.copies.published_bytes / (expert * copies))
        return counts


@pytest.mark.parametrize(("schedule", "split"), [("1f1b", False), ("zero_bubble", True)])
def test_rematerialized_copies_are_published_for_each_pass(
    pool4: RankPool, shared_settings: list[str], schedule: str, split: bool
) -> None:
    pipeline = ("model.layers=8", "data.micro_batches=4", "parallel.pp=2", "parallel.ep=2")
    settings = [*shared_settings, *LONG, *pipeline, f"parallel.schedule={schedule}", "placement.rematerialize=true"]
    counts = pool4.run(count_publications, settings, timeout=200)
    assert max(map(max, counts)) == publications(4, split)


@pytest.mark.parametrize(
    "extra",
    [
        SLOW(("parallel.ep=4",)),
        ("parallel.ep=2", "parallel.sharding=zero1", "data.micro_batches=2"),
        SLOW(("parallel.ep=2", "parallel.sharding=zero1", "placement.rematerialize=true", "model.layers=4")),
        SLOW(("parallel.tp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=1")),
    ],
    ids=["ep4", "zero1", "rematerialized", "tp2"],
)
def test_gradients_reduced_during_backward_have_the_same_bits(
    pool4: RankPool, shared_settings: list[str], extra: tuple[str, ...]
) -> None:
    settings = [*shared_settings, *LONG, *extra]
    after, during = (
        pool4.run(train_replicating, [*settings, f"parallel.overlap_gradients={value}"], timeout=200)
        for value in ("off", "on")
    )
    for (got, equal), (wanted, _) in zip(during, after, strict=True):
        assert equal and got.losses == wanted.losses and got.norms == wanted.norms
        assert got.validation == wanted.validation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("placement.slots=1",), "kind 'fixed' and slots 1"),
        (("placement.kind=replicate",), "at least one; got kind 'replicate' and slots 0"),
        (
            ("placement.rematerialize=true",),
            "rematerialize applies to the copies of kind 'replicate'; got kind 'fixed'",
        ),
    ],
)
def test_settings_that_copies_do_not_support_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, settings)


def build_with_slots(rank: int, world: int, settings: list[str]) -> str:
    try:
        with session(settings):
            return "nothing raised"
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("placement.slots=5",), "at most 4: 8 experts less the 4 that a rank is the home of; got 5"),
        (
            ("placement.slots=2", "placement.rematerialize=true"),
            "saves no memory with placement.slots 2: the memory that layers share has room for 6 experts, and the "
            "slots of 2 MoE layers for 4",
        ),
    ],
    ids=["more_than_experts_of_other_ranks", "less_memory_without_rematerialization"],
)
def test_slots_that_do_not_fit_the_model_are_refused_on_every_rank(
    pool2: RankPool, shared_settings: list[str], settings: tuple[str, ...], message: str
) -> None:
    for text in pool2.run(build_with_slots, [*shared_settings, *LONG, *REPLICATE[:1], *settings], timeout=60):
        assert message in text
