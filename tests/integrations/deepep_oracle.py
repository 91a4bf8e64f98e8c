"""DeepEP's reference (``deep_ep/utils/refs.py``), restated without communication: every rank can make every batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class Case:
    """tokens: of rank r, ``tokens[r % len(tokens)]``. routing: random | one (all slots to one expert) | dropped."""

    name: str
    tokens: tuple[int, ...] = (13, 7)
    hidden: int = 128
    num_experts: int = 8
    top_k: int = 3
    routing: str = "random"
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False


CASES = (
    Case("plain"),
    Case("zero tokens on the first rank", tokens=(0, 9)),
    Case("no tokens", tokens=(0,)),
    Case("all to one expert", routing="one"),
    Case("dropped slots", routing="dropped", top_k=4),
    Case("uneven experts", num_experts=7),
    Case("fewer experts than ranks", num_experts=3, top_k=2),
    Case("top-k 8 of 8, float32, odd hidden", top_k=8, dtype=torch.float32, hidden=33),
    Case("fp8", hidden=256, fp8=True),
)


@dataclass(frozen=True)
class Batch:
    x: Tensor | tuple[Tensor, Tensor]
    ids: Tensor
    weights: Tensor
    bias: tuple[Tensor, Tensor]

    def rows(self, index: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (self.x[0][index], self.x[1][index]) if isinstance(self.x, tuple) else self.x[index]


def batch(case: Case, rank: int) -> Batch:
    """Return the tokens of a rank."""
    g = torch.Generator().manual_seed(100 + rank)
    tokens = case.tokens[rank % len(case.tokens)]
    values = torch.randn(tokens, case.hidden, generator=g)
    ids = torch.rand(tokens, case.num_experts, generator=g).argsort(1)[:, : case.top_k].contiguous()
    if case.routing == "one":
        ids = torch.full_like(ids, case.num_experts - 1)
    if case.routing == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.4, -1)
    scales = torch.rand(tokens, case.hidden // 128, generator=g)
    x = (values.to(torch.float8_e4m3fn), scales) if case.fp8 else values.to(case.dtype)
    bias = tuple(torch.randn(tokens, case.hidden, generator=g).to(case.dtype) for _ in range(2))
    return Batch(x, ids, torch.rand(ids.shape, generator=g), bias)  # type: ignore[arg-type]


def cat(parts: list[Tensor | tuple[Tensor, Tensor]]) -> Tensor | tuple[Tensor, Tensor]:
    """Concatenate rows, or values and scales."""
    if isinstance(parts[0], tuple):
        values = torch.cat([part[0].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        return values, torch.cat([part[1] for part in parts])
    return torch.cat(parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Received:
    """Reference of what a rank receives. ids are local; source is the rank, token the index there."""

    x: Tensor | tuple[Tensor, Tensor]
    ids: Tensor
    weights: Tensor
    source: Tensor
    token: Tensor


def dispatch(case: Case, rank: int, world: int) -> Received:
    own = ExpertPlacement.of(case.num_experts, world).local_range(rank)
    parts = []
    for source in range(world):
        sent = batch(case, source)
        mine = (sent.ids >= own.start) & (sent.ids < own.stop)
        index = mine.any(1).nonzero()[:, 0]
        ids = torch.where(mine, sent.ids - own.start, -1)[index]
        weights = torch.where(mine, sent.weights, 0.0)[index]
        parts.append((sent.rows(index), ids, weights, torch.full_like(index, source), index))
    x, ids, weights, source_R, token_R = zip(*parts, strict=True)
    return Received(cat(list(x)), torch.cat(ids), torch.cat(weights), torch.cat(source_R), torch.cat(token_R))


def outputs(case: Case, source: Tensor, token: Tensor) -> Tensor:
    """Return [R, K, H]: an expert output for each slot of tokens, which any rank can compute."""
    seed = (source * 1000 + token).unsqueeze(1) * case.top_k + torch.arange(case.top_k)
    channels = torch.arange(1, case.hidden + 1)
    return torch.sin((seed % 977 + 1).unsqueeze(-1) / 977 * channels).to(case.dtype)


def in_order(terms: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the fp32 sum of [T, K, H] over the slots in order, rounded once."""
    total = torch.zeros_like(terms[:, 0], dtype=torch.float32) if start is None else start.clone()
    for k in range(terms.shape[1]):
        total += terms[:, k].float()
    return total.to(terms.dtype)


def combine(case: Case, rank: int, world: int, num_bias: int = 0) -> Tensor:
    """Sum the slots of each rank in order, round, store the sum in the rank's last slot, and sum these in order."""
    sent = batch(case, rank)
    tokens = torch.arange(len(sent.ids))
    slots = outputs(case, torch.full_like(tokens, rank), tokens).masked_fill(sent.ids.unsqueeze(-1) < 0, 0)
    partial = torch.zeros_like(slots)
    for peer in range(world):
        own = ExpertPlacement.of(case.num_experts, world).local_range(peer)
        mine = (sent.ids >= own.start) & (sent.ids < own.stop)
        total = in_order(slots.masked_fill(~mine.unsqueeze(-1), 0))
        last = mine.int().cumsum(1).argmax(1)
        chosen = mine.any(1).nonzero()[:, 0]
        partial[chosen, last[chosen]] = total[chosen]
    bias = sum((b.float() for b in sent.bias[:num_bias]), torch.zeros(())) if num_bias else None
    return in_order(partial, bias)
