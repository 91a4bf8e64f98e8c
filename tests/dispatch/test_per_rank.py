"""Layouts of one row per (token, rank), in the native core and in torch, against loops."""

from __future__ import annotations

import pytest
import torch

from moe_comm.dispatch import per_rank as rank_layouts
from moe_comm.dispatch.per_rank import SENDER_WORDS, local_slots, rank_layout
from moe_comm.topology import ExpertPlacement


@pytest.fixture(params=["native", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both; on other devices than the CPU, only the second one runs."""
    if request.param == "torch":
        monkeypatch.setattr(rank_layouts, "on_cpu", lambda *_: False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "world"), [(0, 3, 8, 2), (23, 1, 3, 4), (40, 5, 7, 3), (19, 8, 8, 2)]
)
def test_layout(tokens: int, top_k: int, num_experts: int, world: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids_TK = torch.randint(-1, num_experts, (tokens, top_k), generator=generator, dtype=dtype)
    for given in (ids_TK, ids_TK.T.contiguous().T):
        layout = rank_layout(given, num_experts, world)
        placement = ExpertPlacement.of(num_experts, world)
        owner = [rank for rank in range(world) for _ in placement.local_range(rank)]
        expected = torch.full((tokens, min(top_k, world)), -1)
        in_rank = torch.zeros(tokens, world, dtype=torch.bool)
        for token, ids in enumerate(ids_TK.tolist()):
            owners = [owner[expert] for expert in ids if expert >= 0]
            in_rank[token, owners] = True
            last = [rank for slot, rank in enumerate(owners) if rank not in owners[slot + 1 :]]
            expected[token, : len(last)] = torch.tensor(last, dtype=torch.int64)
        assert torch.equal(layout.ranks_TN, expected) and torch.equal(layout.in_rank_TW, in_rank)
        assert torch.equal(layout.per_rank_W, in_rank.sum(0).int())
        assert torch.equal(layout.per_expert_E, torch.tensor([(ids_TK == e).sum() for e in range(num_experts)]).int())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("own", [range(2, 5), range(3, 3), range(8)])
@pytest.mark.parametrize("rows", [0, 17])
def test_received_slots(rows: int, own: range, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids_RK = torch.randint(-1, 8, (rows, 3), generator=generator)
    weights_RK = torch.rand(rows, 3, generator=generator)
    weights_RK[:1] = torch.nan
    sender_R2 = torch.full((rows, SENDER_WORDS), 3, dtype=torch.int32)
    words_RX = torch.cat((sender_R2, ids_RK.int(), weights_RK.view(torch.int32), sender_R2), 1)
    mine_RK = (ids_RK >= own.start) & (ids_RK < own.stop)
    for weighted in (True, False):
        local, weights, counts = local_slots(words_RX, 3, own, dtype, weighted)
        assert torch.equal(local, torch.where(mine_RK, ids_RK - own.start, -1).to(dtype))
        assert counts.tolist() == [int((ids_RK == expert).sum()) for expert in own]
        bits = weights_RK.view(torch.int32).masked_fill(~mine_RK, 0)
        assert weights is None if not weighted else torch.equal(weights.view(torch.int32), bits)
