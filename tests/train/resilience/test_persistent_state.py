"""What ranks keep of each other's tensors: every bit, of one step, also where a copy fails half-way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.runtime.persistent_memory import Owner, PersistentMemory
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.checkpoint import Entry
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience import find_snapshot, peer_memory
from moe_comm.train.resilience.peer_memory import Kept, PeerMemory
from moe_comm.train.resilience.persistent_state import kept_runs, run_id
from tests.pool import RankPool

RUN = Path("runs/a")


@dataclass(frozen=True)
class Arg:
    """broken: steps that rank 1 cannot complete. large: of which the JSON does not fit. host: of each rank."""

    owner: Owner
    steps: int
    hosts: str = "ab"
    broken: tuple[int, ...] = ()
    large: tuple[int, ...] = ()
    width: int = 5
    run: Path = RUN


@dataclass
class Found:
    restored: tuple[int, dict[str, Any]] | None
    same: bool
    said: list[str]
    reports: list[Kept] = field(default_factory=list)
    runs: frozenset[str] = frozenset()


def tensors(rank: int, step: int, width: int) -> dict[str, Tensor]:
    """Of several kinds; none the same on another rank or after another step."""
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


def entries(of: dict[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry.whole(tensor) for name, tensor in of.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    x, y = a.contiguous(), b.contiguous()
    return (
        x.dtype == y.dtype
        and x.shape == y.shape
        and bytes(x.view(-1).view(torch.uint8)) == bytes(y.view(-1).view(torch.uint8))
    )


def _memory(rank: int, world: int, arg: Arg, live: dict[str, Tensor]) -> tuple[PeerMemory, PersistentMemory, Ranks]:
    kept = PersistentMemory(arg.owner, host=arg.hosts[rank])
    ranks = Ranks.make()
    mesh = ParallelMesh(ParallelConfig(dp=world))

    def capture(step: int) -> tuple[dict[str, Entry], dict[str, Any]]:
        return entries(live), {"step": step, "more": "x" * (1 << 18 if step in arg.large else 10)}

    return PeerMemory(kept, ranks, mesh, arg.run, 1, capture), kept, ranks


def _train(rank: int, world: int, arg: Arg) -> list[Kept]:
    live = tensors(rank, 0, arg.width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "BLOCK", 20_000)
        memory, kept, _ = _memory(rank, world, arg, live)
        exchange: Any = PeerMemory._exchange

        def failing(self: PeerMemory, content: memoryview, header: bytes) -> str:
            """The other rank's state does not arrive whole, and this rank's own is lost in the middle."""
            if rank == 1 and self._last in arg.broken:
                assert self._own is not None
                self._own.clear(self._spare(self._own))
                return str(exchange(self, content, b"") or "lost")
            return str(exchange(self, content, header))

        patch.setattr(PeerMemory, "_exchange", failing)
        for step in range(1, arg.steps + 1):
            memory.wait_staged()
            for name, tensor in tensors(rank, step, arg.width).items():
                live[name].copy_(tensor)
            memory.before_step(step + 1)
            memory.wait()
        memory.close()
        kept.close()
        assert not memory._broken, memory._broken
        return memory.reports


def _restore(rank: int, world: int, arg: Arg) -> Found:
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors(rank, 0, arg.width).items()}
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_snapshot, "BLOCK", 500)
        memory, kept, ranks = _memory(rank, world, arg, live)
        runs = kept_runs(kept, ranks)
        restored = memory.restore(entries(live), 1, said.append)
        memory.close()
        kept.close()
    step = restored[0] if restored else -1
    expected = tensors(rank, step, arg.width) if restored else {n: torch.zeros_like(t) for n, t in live.items()}
    return Found(restored, all(same_bits(live[name], expected[name]) for name in live), said, runs=runs)


@pytest.mark.parametrize("hosts", ["aaaa", "abab", "aaab"])
def test_every_bit_of_the_newest_step_comes_back(pool4: RankPool, owner: Owner, hosts: str) -> None:
    reports = pool4.run(_train, Arg(owner, 3, hosts))
    for rank, of_rank in enumerate(reports):
        assert [one.step for one in of_rank] == [1, 2, 3]
        for one in of_rank:
            assert one.bytes > 0 and 0 <= one.stage_s <= one.total_s
            assert one.buddy == -1 if hosts == "aaaa" else hosts[one.buddy] != hosts[rank]
    for found in pool4.run(_restore, Arg(owner, 0, hosts)):
        assert found.restored == (3, {"step": 3, "more": "x" * 10}) and found.same and not found.said
        assert found.runs == {run_id(RUN)}


def test_ranks_that_are_numbered_otherwise_find_their_states_on_other_hosts(pool4: RankPool, owner: Owner) -> None:
    pool4.run(_train, Arg(owner, 2, "aabb"))
    for found in pool4.run(_restore, Arg(owner, 0, "baab")):
        assert found.restored is not None and found.restored[0] == 2 and found.same
    # Where a host is new, and one is gone, the rest have enough.
    for found in pool4.run(_restore, Arg(owner, 0, "cbbc")):
        assert found.restored is not None and found.restored[0] == 2 and found.same


def test_a_step_that_a_rank_could_not_keep_does_not_cost_the_one_before(pool2: RankPool, owner: Owner) -> None:
    reports = pool2.run(_train, Arg(owner, 4, broken=(3, 4)))
    assert [[one.step for one in of_rank] for of_rank in reports] == [[1, 2], [1, 2]]
    for found in pool2.run(_restore, Arg(owner, 0)):
        assert found.restored is not None and found.restored[0] == 2 and found.same
        assert any("not in memory as a whole: nothing of rank 1" in text for text in found.said)


def test_a_state_that_grew_too_large_is_left_out_on_all_ranks(pool2: RankPool, owner: Owner) -> None:
    reports = pool2.run(_train, Arg(owner, 3, large=(2,)))
    assert [[one.step for one in of_rank] for of_rank in reports] == [[1, 3], [1, 3]]
    assert all(found.restored and found.restored[0] == 3 for found in pool2.run(_restore, Arg(owner, 0)))


@pytest.mark.parametrize("change", [{"run": Path("runs/b")}, {"width": 6}])
def test_nothing_changes_where_only_another_run_or_model_is_kept(
    pool2: RankPool, owner: Owner, change: dict[str, Any]
) -> None:
    pool2.run(_train, Arg(owner, 2))
    for found in pool2.run(_restore, Arg(owner, 0, **change)):
        assert found.restored is None and found.same
