"""Snapshots of tensors in the memory of hosts are restored bit for bit and from one step, also if a save fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moe_comm.runtime.persistent_memory import LauncherProcess, PersistentMemory
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.checkpoint import Entry
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience import peer_memory, persistent_state as find_snapshot
from moe_comm.train.resilience.peer_memory import PeerSnapshots, SnapshotStats
from moe_comm.train.resilience.persistent_state import run_id, runs_in_memory
from tests.pool import RankPool
from tests.train.checkpoint.common import same_bits

RUN = Path("runs/a")


@dataclass(frozen=True)
class Arg:
    """broken: steps that rank 1 cannot complete. large: steps whose JSON has 256 KiB. growth: room for that.

    hosts: host of each rank.
    """

    owner: LauncherProcess
    steps: int
    hosts: str = "ab"
    broken: tuple[int, ...] = ()
    large: tuple[int, ...] = ()
    growth: int = 0
    width: int = 5
    run: Path = RUN


class Restored(NamedTuple):
    restored: tuple[int, dict[str, Any]] | None
    same: bool
    messages: list[str]
    runs: frozenset[str]


def tensors(rank: int, step: int, width: int) -> dict[str, Tensor]:
    """Return tensors of several dtypes and shapes, different on every rank and in every step."""
    g = torch.Generator().manual_seed(1000 * rank + step)
    wide = torch.randn(width, 7, generator=g)
    return {
        "contiguous": torch.randn(3, width, generator=g),
        "transposed": wide.T,
        "strided": torch.randn(8, 6, generator=g)[::2, 1:4],
        "bf16": torch.randn(9, generator=g).bfloat16(),
        "scalar": torch.tensor(float(rank + step)),
        "count": torch.tensor([step, rank]),
        "nothing": torch.empty(0, 4),
        "bits": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def entries(tensors_by_name: dict[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry.whole(tensor) for name, tensor in tensors_by_name.items()}


def _memory(rank: int, world: int, arg: Arg, live: dict[str, Tensor]) -> tuple[PeerSnapshots, PersistentMemory, Ranks]:
    host_memory = PersistentMemory(arg.owner, host=arg.hosts[rank])
    ranks = Ranks.make()
    mesh = ParallelMesh(ParallelConfig(dp=world))

    def capture(step: int) -> tuple[dict[str, Entry], dict[str, Any]]:
        return entries(live), {"step": step, "more": "x" * (1 << 18 if step in arg.large else 10)}

    memory = PeerSnapshots(host_memory, ranks, mesh, arg.run, 1, capture, growth=arg.growth)
    return memory, host_memory, ranks


def _save_snapshots(rank: int, world: int, arg: Arg) -> list[SnapshotStats]:
    live = tensors(rank, 0, arg.width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "BLOCK", 20_000)
        memory, host_memory, _ = _memory(rank, world, arg, live)
        exchange: Any = PeerSnapshots._exchange

        def failing(self: PeerSnapshots, content: memoryview, header: bytes) -> str:
            """The buddy receives an incomplete state, and this rank's own replica is lost."""
            if rank == 1 and self._last_step in arg.broken:
                assert self._own_slots is not None
                self._own_slots.clear(self._free_slot(self._own_slots))
                return str(exchange(self, content, b"") or "lost")
            return str(exchange(self, content, header))

        patch.setattr(PeerSnapshots, "_exchange", failing)
        for step in range(1, arg.steps + 1):
            memory.wait_staged()
            for name, tensor in tensors(rank, step, arg.width).items():
                live[name].copy_(tensor)
            memory.before_step(step + 1)
            memory.wait()
        memory.close()
        host_memory.close()
        assert not memory._failure, memory._failure
        return memory.reports


def _restore(rank: int, world: int, arg: Arg) -> Restored:
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors(rank, 0, arg.width).items()}
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_snapshot, "BLOCK", 500)
        memory, host_memory, ranks = _memory(rank, world, arg, live)
        runs = runs_in_memory(host_memory, ranks)
        restored = memory.restore(entries(live), 1, messages.append)
        memory.close()
        host_memory.close()
    step = restored[0] if restored else -1
    expected = tensors(rank, step, arg.width) if restored else {n: torch.zeros_like(t) for n, t in live.items()}
    return Restored(restored, all(same_bits(live[name], expected[name]) for name in live), messages, runs)


@pytest.mark.parametrize("hosts", ["aaaa", "aaab"])
def test_the_newest_snapshot_is_restored_bit_for_bit(pool4: RankPool, owner: LauncherProcess, hosts: str) -> None:
    reports = pool4.run(_save_snapshots, Arg(owner, 3, hosts))
    for rank, of_rank in enumerate(reports):
        assert [report.step for report in of_rank] == [1, 2, 3]
        for report in of_rank:
            assert report.bytes > 0 and 0 <= report.stage_s <= report.total_s
            assert report.buddy == -1 if hosts == "aaaa" else hosts[report.buddy] != hosts[rank]
    for result in pool4.run(_restore, Arg(owner, 0, hosts)):
        assert result.restored == (3, {"step": 3, "more": "x" * 10}) and result.same and not result.messages
        assert result.runs == {run_id(RUN)}


def test_renumbered_ranks_restore_their_states_from_other_hosts(pool4: RankPool, owner: LauncherProcess) -> None:
    pool4.run(_save_snapshots, Arg(owner, 2, "aabb"))
    for result in pool4.run(_restore, Arg(owner, 0, "baab")):
        assert result.restored is not None and result.restored[0] == 2 and result.same
    # With a new host and a lost one, the remaining hosts have all replicas.
    for result in pool4.run(_restore, Arg(owner, 0, "cbbc")):
        assert result.restored is not None and result.restored[0] == 2 and result.same


def test_a_failed_snapshot_does_not_damage_the_previous_one(pool2: RankPool, owner: LauncherProcess) -> None:
    reports = pool2.run(_save_snapshots, Arg(owner, 4, broken=(3, 4)))
    assert [[report.step for report in of_rank] for of_rank in reports] == [[1, 2], [1, 2]]
    for result in pool2.run(_restore, Arg(owner, 0)):
        assert result.restored is not None and result.restored[0] == 2 and result.same
        assert any("is incomplete: it lacks rank 1" in text for text in result.messages)


@pytest.mark.parametrize(("large", "growth", "saved"), [((2,), 0, [1, 3]), ((2, 3), 1 << 18, [1, 2, 3])])
def test_a_state_that_grew_is_saved_if_announced_and_else_skipped_on_all_ranks(
    pool2: RankPool, owner: LauncherProcess, large: tuple[int, ...], growth: int, saved: list[int]
) -> None:
    reports = pool2.run(_save_snapshots, Arg(owner, 3, large=large, growth=growth))
    assert [[report.step for report in of_rank] for of_rank in reports] == [saved] * 2
    assert all(result.restored and result.restored[0] == 3 for result in pool2.run(_restore, Arg(owner, 0)))


@pytest.mark.parametrize("change", [{"run": Path("runs/b")}, {"width": 6}])
def test_a_snapshot_of_another_run_or_model_is_not_restored(
    pool2: RankPool, owner: LauncherProcess, change: dict[str, Any]
) -> None:
    pool2.run(_save_snapshots, Arg(owner, 2))
    for result in pool2.run(_restore, Arg(owner, 0, **change)):
        assert result.restored is None and result.same
