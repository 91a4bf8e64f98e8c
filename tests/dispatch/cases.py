"""Inputs of the contract suite. Each case is one global batch that is divided over different numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DIAGONAL_FROM = 65
"""Below this hidden size an expert is a D x D matrix; from it on, a vector that scales the row (a diagonal matrix)."""


@dataclass(frozen=True)
class Case:
    """A global batch of ``tokens`` tokens and what to do with it.

    routing: random (distinct experts) | duplicates | one_expert | half (no rows for the upper half of the experts) |
        dropped (a third of the slots) | all_dropped | every (top_k = E, shuffled).
    split: how tokens are distributed over the ranks: even | uneven | first (all on rank 0) | last.
    placement: balanced | uneven (rank 0 holds none, the others unequal numbers).
    strided: x is a transposed view, ids and weights are slices. checkpoint: "" | reentrant | plain.
    """

    name: str
    tokens: int = 37
    hidden: int = 8
    num_experts: int = 8
    top_k: int = 2
    dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype = torch.float32
    ids_dtype: torch.dtype = torch.int64
    routing: str = "random"
    split: str = "uneven"
    placement: str = "balanced"
    strided: bool = False
    checkpoint: str = ""
    weights_grad: bool = True
    seed: int = 0

    def tokens_per_rank(self, world: int) -> list[int]:
        if self.split in ("first", "last"):
            sizes = [0] * world
            sizes[0 if self.split == "first" else -1] = self.tokens
            return sizes
        if self.split == "even":
            return [self.tokens // world + (r < self.tokens % world) for r in range(world)]
        # Unequal; with more than two ranks, rank 1 has no tokens.
        shares = [0 if world > 2 and r == 1 else 1 + (3 * r + self.seed) % 5 for r in range(world)]
        sizes = [self.tokens * share // sum(shares) for share in shares]
        sizes[-1] += self.tokens - sum(sizes)
        return sizes

    def rows(self, rank: int, world: int) -> slice:
        """Return the tokens of a rank in the global batch."""
        sizes = self.tokens_per_rank(world)
        return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def experts_per_rank(self, world: int) -> list[int] | None:
        if self.placement == "balanced" or world == 1:
            return None
        sizes = [0] + [1 if r % 2 else 0 for r in range(1, world)]
        sizes[-1] += self.num_experts - sum(sizes)
        return sizes


@dataclass(frozen=True)
class Batch:
    """Tensors of a case, of all ranks or of one rank (``part``)."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor

    def part(self, case: Case, rank: int, world: int) -> Batch:
        rows = case.rows(rank, world)
        return Batch(*(t[rows].clone() for t in (self.x_TD, self.ids_TK, self.weights_TK, self.grad_TD)))


def make(case: Case) -> tuple[Batch, Tensor]:
    """Return the global batch and the experts' fp32 weights, [E, D, D] or [E, D]."""
    g = torch.Generator().manual_seed(1000 * case.seed + sum(map(ord, case.name)))
    tokens, hidden, num_experts, top_k = case.tokens, case.hidden, case.num_experts, case.top_k
    x_TD = torch.randn(tokens, hidden, generator=g, dtype=torch.float32, device="cpu").to(case.dtype)
    grad_TD = torch.randn(tokens, hidden, generator=g, dtype=torch.float32, device="cpu").to(case.dtype)
    weights_TK = (torch.rand(tokens, top_k, generator=g, dtype=torch.float32, device="cpu") + 0.1).to(
        case.weights_dtype
    )
    shuffled_TE = torch.rand(tokens, num_experts, generator=g, dtype=torch.float32, device="cpu").argsort(1)
    any_TK = torch.randint(0, num_experts, (tokens, top_k), generator=g, device="cpu")
    dropped_TK = torch.rand(tokens, top_k, generator=g, dtype=torch.float32, device="cpu") < 1 / 3
    ids_TK = {
        "random": lambda: shuffled_TE[:, :top_k],
        "every": lambda: shuffled_TE[:, :top_k],
        "duplicates": lambda: any_TK,
        "one_expert": lambda: torch.full_like(any_TK, num_experts // 2),
        "half": lambda: any_TK // 2,
        "dropped": lambda: any_TK.masked_fill(dropped_TK, -1),
        "all_dropped": lambda: torch.full_like(any_TK, -1),
    }[case.routing]()
    shape = (num_experts, hidden, hidden) if hidden < DIAGONAL_FROM else (num_experts, hidden)
    experts = torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") / hidden**0.5
    return Batch(x_TD, ids_TK.to(case.ids_dtype), weights_TK, grad_TD), experts


def strided(tensor: Tensor) -> Tensor:
    """Return the same values in a view with gaps and, for two dimensions, swapped strides."""
    wide = torch.full((*tensor.T.shape[:-1], 2 * tensor.shape[0] + 1), 99, dtype=tensor.dtype, device=tensor.device)
    view = wide[:, 1::2].T
    view.copy_(tensor)
    assert not view.is_contiguous() or view.numel() < 2
    return view


CASES = (
    Case("plain"),
    Case("even", split="even", tokens=32),
    Case("one token", tokens=1, split="even"),
    Case("no tokens anywhere", tokens=0),
    Case("all tokens on the first rank", split="first"),
    Case("all tokens on the last rank", split="last"),
    Case("uneven experts, one rank without", placement="uneven"),
    Case("uneven experts, all tokens on the rank without", placement="uneven", split="first"),
    Case("experts do not divide by ranks", num_experts=13, top_k=3),
    Case("fewer experts than ranks", num_experts=3),
    Case("one expert in all", num_experts=1, top_k=1),
    Case("empty experts", routing="half"),
    Case("all tokens to one expert", routing="one_expert", top_k=1),
    Case("all slots to one expert", routing="one_expert", top_k=3),
    Case("some slots dropped", routing="dropped", top_k=4),
    Case("all slots dropped", routing="all_dropped"),
    Case("duplicate experts in a token", routing="duplicates", top_k=5),
    Case("top-k is the number of experts", routing="every", top_k=8),
    Case("top-k 1", top_k=1),
    Case("int32 ids", ids_dtype=torch.int32, routing="dropped"),
    Case("strided inputs", strided=True, hidden=33),
    Case("strided bfloat16", strided=True, hidden=8, dtype=torch.bfloat16),
    Case("bfloat16", dtype=torch.bfloat16, hidden=33, routing="dropped", top_k=4),
    Case("bfloat16 weights", dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    Case("float16", dtype=torch.float16, hidden=33, routing="dropped", top_k=4),
    Case("hidden 1", hidden=1),
    Case("hidden 3", hidden=3, dtype=torch.bfloat16),
    Case("hidden 33", hidden=33),
    Case("hidden 1024", hidden=1024, tokens=19, top_k=3),
    Case("hidden 1024 bfloat16", hidden=1024, tokens=19, top_k=3, dtype=torch.bfloat16),
    Case("many experts", num_experts=67, top_k=6, tokens=101),
    Case("weights need no gradient", weights_grad=False),
    Case("checkpointed", checkpoint="plain"),
    Case("checkpointed, reentrant", checkpoint="reentrant", routing="dropped"),
    Case("checkpointed, no tokens on most ranks", checkpoint="plain", split="first"),
)
BY_NAME = {case.name: case for case in CASES}
