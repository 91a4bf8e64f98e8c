"""Seeded inputs and expected results of the contestants, which are the implementations that a benchmark compares.

Each rank can generate the inputs of all ranks, so it checks its results against plain torch without communication.
Each expert multiplies its rows by a power of two, which is exact. A row at the wrong expert changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.bench.common.settings import BatchShape
from moe_comm.errors import MoeCommError
from moe_comm.kernels import row_weights
from moe_comm.topology import ExpertPlacement

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest allowed difference from the reference relative to its largest value, where the summation order may differ."""


@dataclass(frozen=True)
class RankInputs:
    """Inputs of one rank. ``scale_E`` has the factor of each expert; ``grad_TD`` is the gradient of the output."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor
    scale_E: Tensor


def make_ids(shape: BatchShape, rank: int) -> Tensor:
    """Return K distinct, uniformly distributed expert ids for each token, [T, K] int64."""
    generator = torch.Generator().manual_seed(1 + 2 * (shape.seed * 4096 + rank))
    ids_TK = torch.empty(shape.tokens, shape.top_k, dtype=torch.int64, device="cpu")
    for start in range(0, shape.tokens, 8192):
        block = ids_TK[start : start + 8192]
        block.copy_(
            torch.rand(len(block), shape.experts, generator=generator, dtype=torch.float32, device="cpu")
            .topk(shape.top_k, dim=1)
            .indices
        )
    return ids_TK


def make_x(shape: BatchShape, rank: int) -> Tensor:
    """Return the tokens of ``rank``, [T, D]."""
    generator = torch.Generator().manual_seed(2 * (shape.seed * 4096 + rank))
    return torch.randn(shape.tokens, shape.hidden, generator=generator, dtype=torch.float32, device="cpu").to(
        shape.torch_dtype
    )


def make_inputs(shape: BatchShape, rank: int) -> RankInputs:
    """Return all inputs of ``rank`` on the device of ``shape``."""
    generator = torch.Generator().manual_seed(shape.seed * 4096 + rank + (1 << 40))
    weights_TK = torch.rand(shape.tokens, shape.top_k, generator=generator, dtype=torch.float32, device="cpu") + 0.1
    weights_TK /= weights_TK.sum(1, keepdim=True)
    grad_TD = torch.randn(shape.tokens, shape.hidden, generator=generator, dtype=torch.float32, device="cpu").to(
        shape.torch_dtype
    )
    scale_E = 2.0 ** (torch.arange(shape.experts, device="cpu") % 3 - 1)
    tensors = (make_x(shape, rank), make_ids(shape, rank), weights_TK, grad_TD, scale_E.to(shape.torch_dtype))
    return RankInputs(*(tensor.to(shape.device) for tensor in tensors))


def expected_rows(shape: BatchShape, rank: int) -> Tensor:
    """Return the rows that dispatch must deliver to ``rank``, [R, D], by (expert, source rank, token, slot)."""
    local = ExpertPlacement.balanced(shape.experts, shape.ranks).local_range(rank)
    rows, experts = [], []
    for source in range(shape.ranks):
        flat = make_ids(shape, source).reshape(-1)
        slots = ((flat >= local.start) & (flat < local.stop)).nonzero().squeeze(1)
        rows.append(make_x(shape, source)[slots // shape.top_k])
        experts.append(flat[slots])
    order = torch.cat(experts).argsort(stable=True)
    return torch.cat(rows)[order]


def expected_sum(inputs: RankInputs, weights_TK: Tensor | None, per_slot: Tensor) -> Tensor:
    """Sum weight times expert scale times ``per_slot`` [T, D] over the slots of each token in slot order, [T, D]."""
    total = torch.zeros(per_slot.shape, dtype=torch.float32, device=per_slot.device)
    for k in range(inputs.ids_TK.shape[1]):
        row = (per_slot * inputs.scale_E[inputs.ids_TK[:, k], None]).to(per_slot.dtype).float()
        total += row if weights_TK is None else row * weights_TK[:, k, None]
    return total.to(per_slot.dtype)


def expected_y(inputs: RankInputs) -> Tensor:
    """Return the expected output of combine, [T, D]. It is bit-exact for fp32 sums in slot order."""
    return expected_sum(inputs, inputs.weights_TK, inputs.x_TD)


def expected_dx(inputs: RankInputs) -> Tensor:
    """Return the expected gradient of the tokens, [T, D]."""
    total = torch.zeros_like(inputs.grad_TD, dtype=torch.float32)
    for k in range(inputs.ids_TK.shape[1]):
        total += (
            inputs.grad_TD.float() * inputs.weights_TK[:, k, None] * inputs.scale_E[inputs.ids_TK[:, k], None].float()
        )
    return total.to(inputs.grad_TD.dtype)


def expected_dweights(inputs: RankInputs) -> Tensor:
    """Return the expected gradient of the routing weights, [T, K]."""
    dot_T = row_weights.lane_dot(inputs.grad_TD, inputs.x_TD.float())
    return dot_T[:, None] * inputs.scale_E[inputs.ids_TK].float()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; inf for NaN or different shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=float("inf")))


class WrongAnswer(MoeCommError):
    """The result of a contestant differs from the reference, so it is not timed."""


def check_result(contestant: str, what: str, actual: Tensor, expected: Tensor, *, bits: bool) -> float:
    """Raise ``WrongAnswer`` unless the result is bit-identical (``bits``) or within ``TOLERANCE``. Return the error."""
    error = relative_error(actual, expected)
    allowed = 0.0 if bits else TOLERANCE[expected.dtype]
    if error > allowed or (bits and not torch.equal(actual, expected)):
        raise WrongAnswer(
            f"{contestant}: {what} differs from plain torch by {error:.3g} (allowed: {allowed:.3g}); "
            "nothing was timed. Please report this with the settings."
        )
    return error
