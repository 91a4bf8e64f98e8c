"""Switches of placements that fail: ranks that disagree or are killed, and checkpoints with a damaged placement."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.errors import CheckpointError, ConfigError, MoeCommError, PeerError, RankMismatch
from moe_comm.layers.moe import relocation as rows
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.records import PLACEMENTS, PlacementLine, read_lines
from moe_comm.topology import Placement
from moe_comm.topology.load_window import MOST_MEMORY
from moe_comm.train.checkpoint import CheckpointReader, latest
from moe_comm.train.loop import placement as placement_module
from moe_comm.train.loop.build import TrainState
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.optim import Optimizer
from moe_comm.train.parallel.relocation import expert_size, relocate_experts
from tests.pool import RankPool, with_longer_deadline
from tests.train.checkpoint.common import patched
from tests.train.common import session
from tests.train.loop.test_placement import LONG, RELOCATE, run_relocating, shuffled
from tests.train.loop.test_resume import AUTO, folder_of, losses_of, state_of


def kill_myself(*args: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def killed_in_switch(moment: str) -> Iterator[None]:
    """Kill this rank in the next switch.

    moment: "agreed": before it sends rows. "received": when it has rows, before it tells the others that it has read
    theirs. "second": after the first layer has moved. "stopped": before it sends rows, with SIGSTOP instead of SIGKILL.
    "state": when it waits for the optimizer state, which it has not sent.
    """
    calls = []

    def count(*args: Any) -> Any:
        calls.append(args)
        if moment == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if moment == "agreed" or len(calls) == 2:
            kill_myself()
        return relocate_experts(*args)

    run = rows.RowMoves.run

    def run_without_state(moves: rows.RowMoves, group: Any, what: str) -> None:
        if what.endswith("optimizer state"):
            threading.Event().wait()
        run(moves, group, what)

    def wait_state(optimizer: Optimizer) -> None:
        if optimizer.in_flight:
            kill_myself()

    with ExitStack() as stack:
        if moment == "state":
            stack.enter_context(patched(rows.RowMoves, "run", run_without_state))
            stack.enter_context(patched(Optimizer, "wait_state", wait_state))
        elif moment == "received":
            stack.enter_context(patched(rows.RowMoves, "apply", kill_myself))
        else:
            stack.enter_context(patched(placement_module, "relocate_experts", count))
        yield


def switch_while_a_rank_is_killed(rank: int, world: int, arg: tuple[list[str], str]) -> tuple[str, list[bool]]:
    """Switch all layers; return the error, and for each layer whether weights, state and placement are the old ones."""
    settings, moment = arg
    with session(settings) as active:
        state = active.trainer.train_state
        old = dict(state.placements.by_layer)
        owned = {item.name: item for item in state.data_parallel.owned()}
        states = state.optimizer.state_tensors()
        tensors = {name: [item.value.detach(), *states[name].values()] for name, item in owned.items()}
        before = {name: [tensor.clone() for tensor in parts] for name, parts in tensors.items()}
        with ExitStack() as stack:
            if rank == 1:
                stack.enter_context(killed_in_switch(moment))
            with pytest.raises(PeerError) as caught:
                state.placements.switch({name: shuffled(one, 1) for name, one in old.items()})
        kept = []
        for name, layer in moe_layers(active.stages[0]):
            parts = [part for part in tensors if part.startswith(f"{name}.experts.")]
            same = all(torch.equal(*pair) for part in parts for pair in zip(tensors[part], before[part], strict=True))
            kept.append(same and layer.placement == old[name] == state.placements.by_layer[name])
        return f"{caught.type.__name__}: {caught.value}", kept
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("moment", "kept"), [("agreed", [True, True]), ("received", [True, True]), ("second", [False, True])]
)
def test_a_rank_killed_in_a_switch_is_reported_and_its_layer_keeps_placement_weights_and_state(
    pool2: RankPool, shared_settings: list[str], moment: str, kept: list[bool]
) -> None:
    arg = ([*shared_settings, *LONG], moment)
    text, layers = pool2.run(switch_while_a_rank_is_killed, arg, timeout=100, expect_dead={1})[0]
    layer = 1 if moment == "second" else 0
    assert f"relocating the experts of layer 'layers.{layer}.moe' to version 1" in text
    assert layers == kept


def test_a_rank_that_hangs_in_a_switch_is_a_timeout_on_the_others(pool2: RankPool, shared_settings: list[str]) -> None:
    def check(deadline_s: float) -> None:
        arg = ([*shared_settings, *LONG, f"parallel.timeout_s={deadline_s:g}"], "stopped")
        text, layers = pool2.run(switch_while_a_rank_is_killed, arg, timeout=100, expect_dead={1})[0]
        assert text.startswith("PeerTimeout: ") and "relocating the experts of layer 'layers.0.moe'" in text, text
        assert layers == [True, True]

    with_longer_deadline(check, 2, 20)


def run_until_killed(rank: int, world: int, arg: tuple[list[str], int, str]) -> str:
    """Train; rank 1 is killed in the first switch after step ``arg[1]`` or later. Returns the error of another rank."""
    settings, first, moment = arg
    with ExitStack() as stack:
        train_step = Trainer.train_step

        def train(self: Trainer, step: int) -> Any:
            if rank == 1 and step + 1 == first:
                stack.enter_context(killed_in_switch(moment))
            return train_step(self, step)

        stack.enter_context(patched(Trainer, "train_step", train))
        try:
            run_relocating(rank, world, settings)
        except MoeCommError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing raised"


@pytest.mark.parametrize(
    "mapping",
    [
        pytest.param("parallel.ep=4", marks=pytest.mark.slow),
        "parallel.ep=2 parallel.pp=2",
        "parallel.ep=2 parallel.sharding=zero1",
    ],
    ids=["ep4", "pp2", "edp2"],
)
def test_ranks_of_all_groups_and_stages_raise_when_one_is_killed_in_a_switch(
    pool4: RankPool, settings: list[str], mapping: str
) -> None:
    moving = [*settings, *RELOCATE, *mapping.split()]
    pids = pool4.pids
    texts = pool4.run(run_until_killed, (moving, 1, "agreed"), timeout=100, expect_dead={1})
    assert all(texts[rank].startswith(("PeerDied: ", "PeerTimeout: ")) for rank in (0, 2, 3)), texts
    # Processes of other tests have segments, too.
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"moe_comm.{pid}.*")]


def placements_at(folder: Path, step: int) -> dict[str, Placement]:
    """Return the placement of each layer after ``step`` steps."""
    lines = (line for line in read_lines(folder / PLACEMENTS, PlacementLine) if line.step <= step)
    return {line.layer: line.placement for line in lines}


@pytest.mark.parametrize(
    "moment", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("agreed", "received")), "state"]
)
def test_a_run_killed_in_a_switch_resumes_with_the_old_placement_and_the_same_losses(
    pool2: RankPool, settings: list[str], tmp_path: Path, moment: str
) -> None:
    overlap = "on" if moment == "state" else "off"
    moving = [*settings, *RELOCATE, "checkpoint.every=3", "checkpoint.background=false"]
    moving.append(f"parallel.overlap_gradients={overlap}")
    whole_run = [*moving, f"run.folder={tmp_path / 'whole'}"]
    expected = pool2.run(run_relocating, whole_run, timeout=200)[0].folder
    switches = [line.step for line in read_lines(expected / PLACEMENTS, PlacementLine) if line.switched]
    last = max(switches)
    assert min(switches) < last - last % 3  # the checkpoint before has placements that were switched once already
    killed = [*moving, f"run.folder={tmp_path / 'killed'}"]
    pids = pool2.pids
    text = pool2.run(run_until_killed, (killed, last, moment), timeout=200, expect_dead={1})[0]
    assert text.startswith("PeerDied") and "relocating the experts of layer" in text
    assert ("optimizer state" in text) == (moment == "state")
    # Processes of other tests have segments, too.
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"moe_comm.{pid}.*")]
    folder = folder_of(killed)
    path = latest(folder / "checkpoints")
    assert path is not None
    saved = CheckpointReader(path)
    assert saved.step == (last - 1) // 3 * 3
    old = {name: one["owners"] for name, one in saved.state["placement"]["layers"].items()}
    wanted = placements_at(expected, saved.step)
    assert old == {name: [list(ranks) for ranks in one.owners] for name, one in wanted.items()}
    assert wanted != placements_at(expected, last)
    pool2.run(run_relocating, [*killed, AUTO], timeout=200)
    assert losses_of(folder) == losses_of(expected)
    assert placements_at(folder, 20) == placements_at(expected, 20)
    state, whole = state_of(folder), state_of(expected)
    assert state.keys() == whole.keys() and all(torch.equal(state[name], whole[name]) for name in whole)


# --- ranks that disagree, and damaged state ---


def refused_switches(rank: int, world: int, settings: list[str]) -> tuple[list[str], list[bool], float]:
    """Pass wrong placements on the last rank only; return errors, whether nothing changed, and a later loss."""
    with session(settings) as active:
        refused = [_refused_switch(active.trainer.train_state, case, rank == world - 1) for case in REFUSED]
        texts, same = zip(*refused, strict=True)
        return list(texts), list(same), active.trainer.evaluate()


def _refused_switch(state: TrainState, case: str, wrong: bool) -> tuple[str, bool]:
    old = dict(state.placements.by_layer)
    new = {name: shuffled(one, 1) for name, one in old.items()}
    name, last = next(reversed(new)), new[next(reversed(new))]
    if wrong and case == "counts":
        new[name] = replace(last, owners=((1 - last.homes[0],), *last.owners[1:]))
    elif wrong and case == "ranks":
        new[name] = Placement.contiguous(last.num_experts, 3)
    elif wrong and case == "owners":
        new[name] = shuffled(old[name], 2)
    elif wrong and case == "layers":
        del new[name]
    elif wrong and case == "name":
        new["layers.9.moe"] = last
    elif wrong and case == "state":
        factored = state.optimizer.state_tensors()
        for tensors in factored.values():
            tensors["row_mean"] = torch.zeros(4, 1)
        state.optimizer.state_tensors = lambda: factored  # type: ignore[method-assign]
    before = [owned.value.detach().clone() for owned in state.data_parallel.owned()]
    with pytest.raises((ConfigError, RankMismatch)) as caught:
        state.placements.switch(new)
    after = [owned.value for owned in state.data_parallel.owned()]
    same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return f"{caught.type.__name__}: {caught.value}", same and state.placements.by_layer == old


REFUSED = {
    "counts": "ConfigError: .*keeps the number of experts of each rank",
    "ranks": "ConfigError: .*8 experts on 3 ranks",
    "owners": "RankMismatch: .*layers.1.moe: rank 0: .version 1 .*",
    "layers": "RankMismatch: .*layers.1.moe: .*not given",
    "name": "ConfigError: .*layers.9.moe",
    "state": "ConfigError: .*'row_mean' of layers.[01].moe.experts.w13",  # last, because the state stays wrong
}


@pytest.mark.parametrize("mapping", ["parallel.ep=2", "parallel.ep=2 parallel.pp=2"])
def test_a_wrong_placement_on_one_rank_is_refused_on_all_ranks_before_experts_move(
    pool2: RankPool, pool4: RankPool, shared_settings: list[str], mapping: str
) -> None:
    pool = pool4 if "pp" in mapping else pool2
    results = pool.run(refused_switches, [*shared_settings, *LONG, *mapping.split()], timeout=60)
    for texts, same, _ in results:
        assert all(same)
        for text, expected in zip(texts, REFUSED.values(), strict=True):
            assert re.match(expected, text), text
    assert len({loss for _, _, loss in results}) == 1


DAMAGES: dict[str, Any] = {
    "owner": {"layers": {"owners": [[9]] * 8, "world": 2, "version": 1}},
    "ranks": {"layers": {"owners": [[0], [2]] * 4, "world": 3, "version": 1}},
    "experts": {"layers": {"owners": [[0], [1]], "world": 2, "version": 1}},
    "counts": {"layers": {"owners": [[0]] * 8, "world": 2, "version": 1}},
    "type": {"layers": {"owners": [[0.5], [1]] * 4, "world": 2, "version": 1}},
    "infinite": {"layers": {"owners": [[float("inf")], [1]] * 4, "world": 2, "version": 1}},
    "list": {"layers": [1, 2]},
    "load": {"windows": {"memory": 2, "recent": [[1, 2]], "intervals": [], "previous": None}},
    "negative": {"windows": {"memory": 2, "recent": [[-1] * 8], "intervals": [], "previous": None}},
    "memory": {"windows": {"memory": 10**9, "recent": [], "intervals": [], "previous": None}},
    "window": {"windows": None},
}


def load_damaged(rank: int, world: int, settings: list[str]) -> dict[tuple[str, bool], str]:
    """Load placements that are damaged on rank 1 only, from a checkpoint and from memory; return the errors."""
    texts = {}
    with session(settings) as active:
        placements = active.trainer.train_state.placements
        old = dict(placements.by_layer)
        for damage, values in DAMAGES.items():
            state = placements.state()
            for key, value in values.items() if rank else ():
                state[key] = dict.fromkeys(state[key], value)
            for move in (True, False):
                with pytest.raises(CheckpointError) as caught:
                    placements.load(state, move=move)
                texts[damage, move] = str(caught.value)
            assert placements.by_layer == old
            placements.load(placements.state(), move=True)
    return texts


def test_a_placement_that_is_damaged_on_one_rank_is_a_checkpoint_error_on_all(
    pool2: RankPool, shared_settings: list[str]
) -> None:
    for texts in pool2.run(load_damaged, [*shared_settings, *LONG], timeout=60):
        assert not [case for case, text in texts.items() if "rank 1: the placement of experts" not in text]


def load_other(rank: int, world: int, settings: list[str]) -> str:
    with session(settings) as active:
        placements = active.trainer.train_state.placements
        state = placements.state()
        name = next(iter(state["layers"]))
        state["layers"][name] |= {"version": rank}
        with pytest.raises(CheckpointError) as caught:
            placements.load(state, move=True)
        return str(caught.value)


def test_ranks_that_read_different_placements_raise(pool2: RankPool, shared_settings: list[str]) -> None:
    for text in pool2.run(load_other, [*shared_settings, *LONG], timeout=60):
        assert "the ranks have read different placements" in text


# --- sizes ---


def largest_state(rank: int, world: int, settings: list[str]) -> tuple[int, int]:
    """Return the size of a state with as many and as large loads as possible, and the limit."""
    with session(settings) as active:
        placements = active.trainer.train_state.placements
        for name, old in placements.by_layer.items():
            window = placements.windows[name]
            loads = [10**12] * old.num_experts
            window.memory, window.recent = MOST_MEMORY, [loads] * window.size
            window.intervals, window.previous = [window.recent] * MOST_MEMORY, old
        return len(json.dumps(placements.state())), placements.most_state_bytes


@pytest.mark.parametrize("sizes", ["model.experts=2 placement.window=1", "model.experts=64 placement.window=4"])
def test_the_state_of_placements_has_a_limit_for_which_snapshots_in_memory_have_room(
    pool2: RankPool, shared_settings: list[str], sizes: str
) -> None:
    relocate = ["placement.kind=relocate", *sizes.split()]
    for size, limit in pool2.run(largest_state, [*shared_settings, *LONG, *relocate], timeout=60):
        assert size <= limit < 2 * size + 4096
    for _, limit in pool2.run(largest_state, [*shared_settings, *LONG], timeout=60):
        assert limit == 0  # experts never move


def sizes_of_experts(rank: int, world: int, settings: list[str]) -> tuple[int, int]:
    with session(settings) as active:
        state = active.trainer.train_state
        (name, layer), *_ = moe_layers(active.stages[0])
        return expert_size(layer, name, state.data_parallel, state.optimizer.state_tensors())


@pytest.mark.parametrize(
    ("mapping", "slices", "shards"),
    [
        ("parallel.ep=4", 1, 1),
        ("parallel.ep=4 model.experts=3", 1, 1),
        ("parallel.ep=2", 1, 1),
        ("parallel.ep=2 parallel.sharding=zero1", 1, 1),
        ("parallel.ep=2 parallel.sharding=zero1 model.experts=2", 1, 2),
        ("parallel.ep=2 parallel.sharding=fsdp model.experts=2", 1, 2),
        ("parallel.tp=2 parallel.ep=2 parallel.etp=2", 2, 1),
    ],
)
def test_the_size_of_an_expert_counts_what_a_rank_computes_with_and_what_it_owns(
    pool4: RankPool, shared_settings: list[str], mapping: str, slices: int, shards: int
) -> None:
    """With fewer experts than replicas, ZeRO and FSDP divide each expert over the replicas."""
    elements = 3 * 16 * 8
    for weights, num_bytes in pool4.run(sizes_of_experts, [*shared_settings, *LONG, *mapping.split()], timeout=60):
        assert weights == elements // slices
        assert num_bytes == elements // slices // shards * 4 * 3  # master and two moments
