"""Training while experts move between ranks: the same bits as with fixed experts, also after a resume."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.records import ATTEMPTS, PLACEMENTS, Attempt, PlacementLine, read_lines
from moe_comm.runtime.persistent_memory import LauncherProcess, PersistentMemory
from moe_comm.topology import Placement
from moe_comm.train import RunResult, run
from moe_comm.train.checkpoint import CheckpointReader
from moe_comm.train.config import load
from moe_comm.train.loop import job
from moe_comm.train.loop.placement import ExpertPlacements, SwitchTimes
from moe_comm.train.parallel.relocation import parameters_of
from tests.pool import RankPool, on_ranks
from tests.train.common import Trained, assert_floats, session, train, whole
from tests.train.loop.test_resume import AUTO, Crash, crash_after, losses_of, state_of

EXPERTS = 8
CHANGES = (1, 2, 3)
"""Steps after which experts move."""
LONG = ("run.steps=5", f"model.experts={EXPERTS}", "model.ffn=8", "optimizer.clip=0.5", "model.aux_loss=0.01")


def shuffled(old: Placement, seed: int) -> Placement:
    """Return a random placement with the counts of ``old``."""
    homes = list(old.homes)
    random.Random(seed).shuffle(homes)
    return Placement(tuple((home,) for home in homes), old.world, old.version + 1)


def train_moving(rank: int, world: int, settings: list[str]) -> tuple[Trained, list[tuple[int, int]]]:
    """Train, and move the experts of each layer after the steps ``CHANGES``; return sent and expected bytes as well."""
    sent = []
    with session(settings) as active:
        state = active.trainer.train_state

        def move(report: Any) -> None:
            if report.step not in CHANGES:
                return
            before = dict(state.placements.by_layer)
            after = {name: shuffled(old, report.step) for name, old in before.items()}
            expected, ep = 0, state.mesh.place["ep"]
            for name, layer in moe_layers(active.stages[0]):
                homes = zip(before[name].homes, after[name].homes, strict=True)
                leaving = [expert for expert, (old, new) in enumerate(homes) if old == ep != new]
                states = state.optimizer.state_tensors()
                expected += len(leaving) * sum(
                    item.value[:1].numel() * 4 * (1 + len(states[item.name]))
                    for item in parameters_of(layer, name, state.data_parallel).values()
                )
            sent.append((state.placements.switch(after), expected))
            state.data_parallel.publish()

        status = active.trainer.fit(move)
        reports = active.trainer.reports
        losses, norms = [report.loss for report in reports], [report.grad_norm for report in reports]
        trained = Trained(losses, norms, [], active.parts(), active.trainer.evaluate(), status)
        return trained, sent


@pytest.mark.parametrize(
    ("world", "extra"),
    [
        (4, ()),
        (2, ("model.dtype=bfloat16", "optimizer.kind=muon")),
        (2, ("optimizer.kind=lamb", "parallel.dp=2", "parallel.sharding=zero1")),
        (4, ("parallel.tp=2", "parallel.dp=2", "parallel.ep=2", "parallel.etp=2")),
        (4, ("parallel.pp=2", "parallel.dp=2", "parallel.ep=2")),
        (4, ("model.experts=3", "parallel.ep=4")),
        (2, ("parallel.overlap_chunks=2", "parallel.executor=pipelined", "parallel.backend=all_to_all")),
    ],
    ids=["ep4", "bf16_muon", "lamb", "etp2", "pp2", "fewer_experts_than_ranks", "pipelined"],
)
def test_steps_have_the_bits_of_fixed_experts(
    request: pytest.FixtureRequest, shared_settings: list[str], world: int, extra: tuple[str, ...]
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    settings = [*shared_settings, *LONG, *extra]
    expected = pool.run(train, settings, timeout=200)
    results = pool.run(train_moving, settings, timeout=200)
    for got, wanted in zip(results, expected, strict=True):
        assert got[0].losses == wanted.losses and got[0].norms == wanted.norms
        assert got[0].validation == wanted.validation
        assert all(actual == formula for actual, formula in got[1])
    assert any(actual for _, sent in results for actual, _ in sent)
    weights = whole([wanted.parts for wanted in expected])
    for name, value in whole([got.parts for got, _ in results]).items():
        assert torch.equal(value, weights[name]), name


OVERLAPPED = "zero1 parallel.overlap_gradients=on"


@pytest.mark.parametrize(
    ("ep", "sharding"),
    [
        *((2, sharding) for sharding in ("replicate", OVERLAPPED, "fsdp")),
        *(pytest.param(4, sharding, marks=pytest.mark.slow) for sharding in ("fsdp", "zero1", OVERLAPPED)),
    ],
)
def test_replicas_of_experts_move_with_every_sharding(
    pool4: RankPool, shared_settings: list[str], ep: int, sharding: str
) -> None:
    settings = [*shared_settings, *LONG, *f"parallel.sharding={sharding}".split(), f"parallel.ep={ep}"]
    expected = pool4.run(train, settings, timeout=200)
    results = [got for got, _ in pool4.run(train_moving, settings, timeout=200)]
    for got, wanted in zip(results, expected, strict=True):
        assert_floats(got.losses, wanted.losses, 1e-6)
        assert_floats(got.norms, wanted.norms, 1e-5)
    weights = whole([wanted.parts for wanted in expected])
    for name, value in whole([got.parts for got in results]).items():
        assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(("ranks", "extra"), [(1, ("parallel.overlap_chunks=auto",)), (2, ())])
def test_with_one_expert_parallel_rank_experts_never_move(
    pool2: RankPool, shared_settings: list[str], ranks: int, extra: tuple[str, ...]
) -> None:
    """On one rank, and on two that hold all experts each, the local backend has the same bits with any version."""
    settings = [*shared_settings, *LONG, *extra, "placement.every=4", "placement.window=2", "parallel.ep=1"]
    relocating = [*settings, "placement.kind=relocate"]

    def run_on(work: Callable[..., Any], settings: list[str]) -> list[Any]:
        return [work(0, 1, settings)] if ranks == 1 else pool2.run(work, settings, timeout=200)

    expected, kept, moved = run_on(train, settings), run_on(train, relocating), run_on(train_moving, settings)
    assert all(sent == [(0, 0)] * 3 for _, sent in moved)
    weights = whole([wanted.parts for wanted in expected])
    for results in (kept, [got for got, _ in moved]):
        for got, wanted in zip(results, expected, strict=True):
            assert (got.losses, got.norms, got.validation) == (wanted.losses, wanted.norms, wanted.validation)
        for name, value in whole([got.parts for got in results]).items():
            assert torch.equal(value, weights[name]), name


# --- decisions, checkpoints and resumption ---

RELOCATE = (
    *LONG,
    "run.steps=12",
    "placement.kind=relocate",
    "placement.every=4",
    "placement.window=3",
    "placement.threshold=0.001",
    "data.batch=32",
    "data.seq_len=32",
    "model.init_std=0.6",
)


def run_relocating(rank: int, world: int, settings: list[str]) -> RunResult:
    """Run as if rows were expensive and transfers cheap, so that decisions do not depend on measured times."""
    make = ExpertPlacements.__init__

    def with_times(self: ExpertPlacements, *args: Any) -> None:
        make(self, *args)
        self.times = SwitchTimes(1.0, 1e-9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertPlacements, "__init__", with_times)
        return run(None, settings)


def run_with_memory(rank: int, world: int, arg: tuple[list[str], LauncherProcess, int | None]) -> None:
    settings, owner, crash = arg
    with pytest.MonkeyPatch.context() as patch, crash_after(crash), contextlib.suppress(Crash):
        patch.setattr(job, "open_host_memory", lambda ranks, say: PersistentMemory(owner, host="a"))
        run_relocating(rank, world, settings)


def metrics_of(result: RunResult) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def placement_at_end(result: RunResult) -> Any:
    """Return the placement in the last checkpoint of a run."""
    return CheckpointReader(result.folder / "checkpoints" / f"step-{result.steps:08}").state["placement"]


def test_runs_switch_resume_and_end_with_the_bits_of_fixed_experts(pool2: RankPool, settings: list[str]) -> None:
    fixed = pool2.run(run_relocating, [*settings, *RELOCATE, "placement.kind=fixed", "run.name=fixed"], timeout=200)[0]
    whole_run = [*settings, *RELOCATE, "run.name=moving", "checkpoint.every=10"]
    moving = pool2.run(run_relocating, whole_run, timeout=200)[0]
    switches = {line["step"]: line["placement"] for line in metrics_of(moving) if "placement" in line}
    assert switches and all(one["ratio_after"] < one["ratio_before"] for one in switches.values())
    assert all(one["moved_bytes"] > 0 for one in switches.values())
    decisions = list(read_lines(moving.folder / PLACEMENTS, PlacementLine))
    assert {line.step for line in decisions} == {4, 8, 12}
    for step in range(4, 13, 4):
        switched = [line.layer for line in decisions if line.step == step and line.switched]
        assert switched == (switches[step]["layers"] if step in switches else [])
    names = ("loss", "grad_norm")
    assert [[line[n] for n in names] for line in metrics_of(moving)] == [
        [line[n] for n in names] for line in metrics_of(fixed)
    ]
    middle = CheckpointReader(moving.folder / "checkpoints" / "step-00000010")
    layers = middle.state["placement"]["layers"]
    assert any(placement["version"] for placement in layers.values())
    windows = middle.state["placement"]["windows"].values()
    assert all([len(steps) for steps in one["intervals"]] == [3, 3] and len(one["recent"]) == 2 for one in windows)
    wanted = losses_of(moving.folder), placement_at_end(moving)
    for line in (line for line in decisions if line.step == 12):
        saved = wanted[1]["layers"][line.layer]
        assert (line.owners, line.version) == (saved["owners"], saved["version"])
    resume = [*whole_run, f"checkpoint.resume={middle.path}"]
    resumed = pool2.run(run_relocating, resume, timeout=200)[0]  # repeats the later steps in the same folder
    assert resumed.steps == 12 and (losses_of(resumed.folder), placement_at_end(resumed)) == wanted
    # Another mapping starts with consecutive experts.
    alone = run_relocating(0, 1, [*resume, "run.steps=11"])
    first = {line["step"]: line["loss"] for line in metrics_of(alone)}[11]
    assert_floats([first], [metrics_of(fixed)[10]["loss"]], 1e-5)
    assert all(placement["version"] == 0 for placement in placement_at_end(alone)["layers"].values())


@on_ranks(2)
def test_checkpoints_with_copies_are_loaded_without_them(shared_settings: list[str]) -> None:
    with session([*shared_settings, *LONG, "placement.kind=relocate"]) as active:
        train_state = active.trainer.train_state
        placements = train_state.placements
        state, homes = placements.state(), {}
        for name, one in placements.by_layer.items():
            moved = shuffled(one, 3)
            owners = tuple((home, 1 - home) if e < 2 else (home,) for e, home in enumerate(moved.homes))
            state["layers"][name] = json.loads(replace(moved, owners=owners, slots=2).to_json())
            homes[name] = moved.homes
        placements.load(state, move=True)
        train_state.data_parallel.publish()
        assert {name: one.homes for name, one in placements.by_layer.items()} == homes
        assert not any(one.has_copies or one.slots for one in placements.by_layer.values())
        assert math.isfinite(active.trainer.train_step(0).loss)


@pytest.mark.slow
def test_a_snapshot_in_memory_is_restored_with_its_placement(
    pool2: RankPool, settings: list[str], owner: LauncherProcess
) -> None:
    moving = [*settings, *RELOCATE]
    expected = pool2.run(run_relocating, [*moving, "run.name=expected"], timeout=200)[0]
    assert any(line["step"] < 10 for line in metrics_of(expected) if "placement" in line)
    snapshots = [*moving, "run.name=memory", "checkpoint.peer_every=1"]
    pool2.run(run_with_memory, (snapshots, owner, 10), timeout=200)
    pool2.run(run_with_memory, ([*snapshots, AUTO], owner, None), timeout=200)
    (folder,) = expected.folder.parent.glob("memory-*")
    assert [attempt.source for attempt in read_lines(folder / ATTEMPTS, Attempt)] == ["fresh", "peer memory"]
    assert losses_of(folder) == losses_of(expected.folder)
    state, wanted = state_of(folder), state_of(expected.folder)
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_a_window_longer_than_the_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"window \(6\) must be at most every \(4\)"):
        load(None, ["placement.kind=relocate", "placement.every=4", "placement.window=6"])
