"""Seeded inputs, and what every contestant's answer must be.

Any rank can make any rank's input again, so each checks its results against plain torch without communication.
Experts are stand-ins that multiply by a power of two, which is exact: a row sent to the wrong expert shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.bench.common.settings import Shape
from moe_comm.dispatch import plain
from moe_comm.errors import MoeCommError
from moe_comm.topology import ExpertPlacement

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference from the reference, relative to the reference's largest value, where the order of sums is free."""


@dataclass(frozen=True)
class Case:
    """One rank's input. ``scale_E`` is what each expert multiplies by; ``grad_TD`` the gradient of the output."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor
    scale_E: Tensor


def make_ids(shape: Shape, rank: int) -> Tensor:
    """[T, K] int64: K distinct experts a token, uniform."""
    generator = torch.Generator().manual_seed(1 + 2 * (shape.seed * 4096 + rank))
    ids_TK = torch.empty(shape.tokens, shape.top_k, dtype=torch.int64)
    for start in range(0, shape.tokens, 8192):
        part = ids_TK[start : start + 8192]
        part.copy_(torch.rand(len(part), shape.experts, generator=generator).topk(shape.top_k, dim=1).indices)
    return ids_TK


def make_x(shape: Shape, rank: int) -> Tensor:
    """[T, D] in the shape's dtype."""
    generator = torch.Generator().manual_seed(2 * (shape.seed * 4096 + rank))
    return torch.randn(shape.tokens, shape.hidden, generator=generator).to(shape.torch_dtype)


def make_case(shape: Shape, rank: int) -> Case:
    """This rank's whole input, on the shape's device."""
    generator = torch.Generator().manual_seed(shape.seed * 4096 + rank + (1 << 40))
    weights_TK = torch.rand(shape.tokens, shape.top_k, generator=generator) + 0.1
    weights_TK /= weights_TK.sum(1, keepdim=True)
    grad_TD = torch.randn(shape.tokens, shape.hidden, generator=generator).to(shape.torch_dtype)
    scale_E = 2.0 ** (torch.arange(shape.experts) % 3 - 1)
    parts = (make_x(shape, rank), make_ids(shape, rank), weights_TK, grad_TD, scale_E.to(shape.torch_dtype))
    return Case(*(part.to(shape.device) for part in parts))


def expected_rows(shape: Shape, rank: int) -> Tensor:
    """[R, D] rows of this rank's experts, by (expert, source rank, token, slot)."""
    local = ExpertPlacement.balanced(shape.experts, shape.ranks).local_range(rank)
    rows, experts = [], []
    for source in range(shape.ranks):
        flat = make_ids(shape, source).reshape(-1)
        slots = ((flat >= local.start) & (flat < local.stop)).nonzero().squeeze(1)
        rows.append(make_x(shape, source)[slots // shape.top_k])
        experts.append(flat[slots])
    order = torch.cat(experts).argsort(stable=True)
    return torch.cat(rows)[order]


def expected_sum(case: Case, weights_TK: Tensor | None, per_slot: Tensor) -> Tensor:
    """[T, D] sum over the slots of weight times scale of the slot's expert times ``per_slot`` [T, D], in slot order."""
    total = torch.zeros(per_slot.shape, dtype=torch.float32, device=per_slot.device)
    for k in range(case.ids_TK.shape[1]):
        row = (per_slot * case.scale_E[case.ids_TK[:, k], None]).to(per_slot.dtype).float()
        total += row if weights_TK is None else row * weights_TK[:, k, None]
    return total.to(per_slot.dtype)


def expected_y(case: Case) -> Tensor:
    """[T, D] what combine gives; bit for bit where sums follow slot order in fp32."""
    return expected_sum(case, case.weights_TK, case.x_TD)


def expected_dx(case: Case) -> Tensor:
    """[T, D] gradient of the input, through the stand-in experts."""
    total = torch.zeros_like(case.grad_TD, dtype=torch.float32)
    for k in range(case.ids_TK.shape[1]):
        total += case.grad_TD.float() * case.weights_TK[:, k, None] * case.scale_E[case.ids_TK[:, k], None].float()
    return total.to(case.grad_TD.dtype)


def expected_dweights(case: Case) -> Tensor:
    """[T, K] gradient of the routing weights."""
    dot_T = plain.lane_dot(case.grad_TD, case.x_TD.float())
    return dot_T[:, None] * case.scale_E[case.ids_TK].float()


def error_of(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value of ``want``; infinite where shapes differ or NaN appears."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    difference = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=float("inf")))


class WrongAnswer(MoeCommError):
    """A contestant's result is not what plain torch gives, so its time means nothing."""


def require(contestant: str, what: str, got: Tensor, want: Tensor, *, bits: bool) -> float:
    """Raise ``WrongAnswer`` unless equal, in bits or within ``TOLERANCE``; returns the error."""
    error = error_of(got, want)
    allowed = 0.0 if bits else TOLERANCE[want.dtype]
    if error > allowed or (bits and not torch.equal(got, want)):
        raise WrongAnswer(
            f"{contestant}: {what} differs from plain torch by {error:.3g} (allowed {allowed:.3g}); "
            "nothing was timed. Please report this with the settings."
        )
    return error
