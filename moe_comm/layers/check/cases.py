"""Inputs of ``check_grads``: ordinary batches and edge cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.dispatch import DROPPED

CASES = (
    "routed",
    "unequal tokens",
    "no tokens on rank 0",
    "no tokens anywhere",
    "empty experts",
    "all to one expert",
    "dropped slots",
    "all dropped",
)


@dataclass(frozen=True)
class CheckBatch:
    """Input of one rank. If ``ids_TK`` and ``weights_TK`` are None, the layer's router routes."""

    x_TD: Tensor
    grad_TD: Tensor
    ids_TK: Tensor | None
    weights_TK: Tensor | None


@dataclass(frozen=True)
class CaseShape:
    """Shape of a case.

    tokens: tokens per rank, unless the case changes them. experts: all experts of the router. real: those of them that
    have parameters (not zero-computation experts).
    """

    tokens: int
    hidden: int
    experts: int
    real: int
    top_k: int
    dtype: torch.dtype
    device: torch.device


def tokens_of(case: str, tokens: int, rank: int, world: int) -> int:
    """Return the number of tokens of ``rank``."""
    if case == "no tokens anywhere" or (case == "no tokens on rank 0" and rank == 0):
        return 0
    if case == "unequal tokens":
        return tokens * (world - rank) // world + 3 * rank
    return tokens


def _expert_ids(case: str, tokens: int, shape: CaseShape, generator: torch.Generator) -> Tensor:
    usable = max(shape.top_k, shape.experts // 4) if case == "empty experts" else shape.experts
    ids_TK = (
        torch.rand(tokens, usable, generator=generator, dtype=torch.float32, device="cpu")
        .topk(shape.top_k, dim=1)
        .indices
    )
    if case == "all to one expert":
        ids_TK = torch.full_like(ids_TK, DROPPED)
        ids_TK[:, -1] = shape.real - 1
    if case == "dropped slots":
        ids_TK = ids_TK.masked_fill(
            torch.rand(ids_TK.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.4, DROPPED
        )
    if case == "all dropped":
        ids_TK = torch.full_like(ids_TK, DROPPED)
    return ids_TK


def make_batch(case: str, shape: CaseShape, seed: int, rank: int, world: int) -> CheckBatch:
    """Return the input of ``rank``; each rank can compute the inputs of all ranks."""
    generator = torch.Generator().manual_seed((seed * 1009 + CASES.index(case)) * 4099 + rank)
    tokens = tokens_of(case, shape.tokens, rank, world)
    x_TD = torch.randn(tokens, shape.hidden, generator=generator, dtype=torch.float32, device="cpu")
    grad_TD = torch.randn(tokens, shape.hidden, generator=generator, dtype=torch.float32, device="cpu")
    ids_TK = weights_TK = None
    if case != "routed":
        ids_TK = _expert_ids(case, tokens, shape, generator).to(shape.device)
        wide = torch.promote_types(shape.dtype, torch.float32)
        weights_TK = torch.rand(tokens, shape.top_k, generator=generator, dtype=torch.float32, device="cpu").to(
            shape.device, wide
        )
    return CheckBatch(x_TD.to(shape.device, shape.dtype), grad_TD.to(shape.device, shape.dtype), ids_TK, weights_TK)


def concat_batches(batches: list[CheckBatch]) -> CheckBatch:
    """Return the tokens of all ranks as one batch, in order of rank."""

    def cat(tensors: list[Tensor | None]) -> Tensor | None:
        present = [t for t in tensors if t is not None]
        return torch.cat(present) if present else None

    return CheckBatch(
        torch.cat([b.x_TD for b in batches]),
        torch.cat([b.grad_TD for b in batches]),
        cat([b.ids_TK for b in batches]),
        cat([b.weights_TK for b in batches]),
    )
