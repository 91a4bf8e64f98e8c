"""Low-rank adapters (LoRA) of the experts of one rank, in forward and backward, by row range as ``expert_mlp.py``.

    h_RG = rows_RD @ w13.T + (rows_RD @ a13.T) @ b13         out_RD = act_RF @ w2.T + (act_RF @ a2.T) @ b2

A pair of tensors a [E, L, inputs], b [E, L, outputs] holds all active adapters of a weight: their ranks are
concatenated along L, and their scalings are factors of b. L is padded with zeros to a multiple of ``TILE``. So both
products have whole tiles, and a row has the same bits in every batch, as in ``expert_mm``. No tensor has the size of a
weight. The gradients of an expert's a and b are one product each over all of its rows.

In suffixes, L is the rank of all active adapters together, I the inputs and O the outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.expert_mlp import (
    Alloc,
    BackwardInputs,
    ExpertBackward,
    ExpertForward,
    ExpertMLP,
    MLPBackward,
    MLPForward,
    Sizes,
)
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.row_invariant import TILE, add_product, aligned, expert_mm, product_into

_WEIGHTS = 4
"""Number of tensors of ``ExpertMLP``; those of the adapters follow."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """One adapter of a stacked weight of the experts: adds scaling * (x @ a[e].T) @ b[e] to x @ w[e].T.

    Attributes:
        a_ELI: [E, rank, inputs] for the local experts; any strides and floating dtype.
        b_ELO: [E, rank, outputs].
        scaling: factor of the product.
    """

    a_ELI: Tensor
    b_ELO: Tensor
    scaling: float = 1.0


def with_adapters(mlp: ExpertMLP, first: Sequence[LowRank] = (), last: Sequence[LowRank] = ()) -> ExpertMLP:
    """Return ``mlp`` with these adapters of w13 and w2, which are cast to the dtype of w13. Differentiable.

    Gradients of the adapters are computed if they require them, also if the weights do not.
    """
    if not first and not last:
        return mlp
    weights = mlp.tensors[:_WEIGHTS]
    assert weights[0] is not None
    pairs = [_concatenated(adapters, weights[0].dtype) for adapters in (first, last)]
    return AdaptedMLP((*weights, *pairs[0], *pairs[1]), mlp.activation, mlp.recompute, mlp.gemm_dtype)


def _concatenated(adapters: Sequence[LowRank], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return a and b of all ``adapters``, dense and padded; None without adapters."""
    if not adapters:
        return None, None
    # Scaled before the cast, so that the factor is exact.
    parts = [(one.a_ELI.to(dtype), (one.b_ELO * one.scaling).to(dtype)) for one in adapters]
    a_ELI, b_ELO = (torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
    padding = (0, 0, 0, -a_ELI.shape[1] % TILE)
    if padding[-1]:
        a_ELI, b_ELO = F.pad(a_ELI, padding), F.pad(b_ELO, padding)
    return a_ELI.contiguous(), b_ELO.contiguous()


@dataclass(frozen=True, eq=False)
class AdaptedMLP(ExpertMLP):
    """``ExpertMLP`` with adapters; ``with_adapters`` creates it.

    tensors: those of ``ExpertMLP``, a13 [E, L, D], b13 [E, L, G], a2 [E, L, F], b2 [E, L, D]. Both tensors of a pair
        may be None.
    """

    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> AdaptedMLP:
        return AdaptedMLP(tuple(tensors), self.activation, self.recompute, self.gemm_dtype)

    def without_adapters(self) -> ExpertMLP:
        """Return the experts without their adapters."""
        return ExpertMLP(self.tensors[:_WEIGHTS], self.activation, self.recompute, self.gemm_dtype)

    def check_weights(self, rows: Tensor) -> None:
        self.without_adapters().check_weights(rows)
        if self.gemm_dtype == "fp8":
            raise InputError("experts with adapters need GEMMs in the dtype of the rows; got gemm_dtype='fp8'")
        for name, w_EOI, pair in (("w13", self.tensors[0], 4), ("w2", self.tensors[1], 6)):
            a_ELI, b_ELO = self.tensors[pair : pair + 2]
            if a_ELI is None and b_ELO is None:
                continue
            assert w_EOI is not None
            experts, outputs, inputs = w_EOI.shape
            shapes = [None if t is None else (t.shape[0], t.shape[2], t.dtype) for t in (a_ELI, b_ELO)]
            if shapes != [(experts, inputs, rows.dtype), (experts, outputs, rows.dtype)]:
                raise InputError(
                    f"adapters of {name} {tuple(w_EOI.shape)} need a [{experts}, rank, {inputs}] and b [{experts}, "
                    f"rank, {outputs}]; got {shapes}"
                )

    def forward(
        self, rows: Tensor | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> ExpertForward:
        assert isinstance(rows, Tensor)
        return _AdaptedForward(self, rows, out_RD, sizes, keep and not self.recompute, alloc)

    def backward_inputs(
        self, rows_RD: Tensor, scale_RB: Tensor | None, h_RG: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        return rows_RD, h_RG

    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        return _AdaptedBackward(self, inputs)


class _Pair:
    """The tensors a and b of one weight in a pass.

    rows: rows of the scratch buffer, which has x @ a.T in forward and grad @ b.T in backward.
    """

    def __init__(self, a_ELI: Tensor, b_ELO: Tensor, rows: int, alloc: Alloc) -> None:
        self._a, self._b = a_ELI.unbind(0), b_ELO.unbind(0)
        self._low_RL = alloc(rows, a_ELI.shape[1], a_ELI.dtype, a_ELI.device)

    def add(self, expert: int, x_rI: Tensor, out_rO: Tensor) -> None:
        """out += (x @ a.T) @ b."""
        low_rL = self._low_RL[: x_rI.shape[0]]
        expert_mm(aligned(x_rI), aligned(self._a[expert]).t(), low_rL)
        add_product(low_rL, aligned(self._b[expert]), out_rO)

    def add_back(self, expert: int, grad_rO: Tensor, grad_in_rI: Tensor, local: slice) -> None:
        """grad_in += (grad @ b.T) @ a. Keeps grad @ b.T at ``local``."""
        add_product(aligned(self.back(expert, grad_rO, local)), aligned(self._a[expert]), grad_in_rI)

    def back(self, expert: int, grad_rO: Tensor, local: slice) -> Tensor:
        """Return grad @ b.T, which is kept at ``local``."""
        low_rL = self._low_RL[local]
        expert_mm(aligned(grad_rO), aligned(self._b[expert]).t(), low_rL)
        return low_rL

    def kept(self, local: slice) -> Tensor:
        """Return grad @ b.T of the rows at ``local``."""
        return self._low_RL[local]

    def weights_of(
        self, expert: int, x_rI: Tensor, grad_rO: Tensor, low_rL: Tensor, into: Sequence[Tensor | None]
    ) -> None:
        """Write the gradients of a and b of an expert. low_rL: grad @ b.T of its rows."""
        into_LI, into_LO = into
        x_rI = aligned(x_rI)
        if into_LI is not None:
            product_into(aligned(low_rL).t(), x_rI, into_LI)
        if into_LO is not None:
            x_low_rL = x_rI.new_empty(x_rI.shape[0], into_LO.shape[0])
            expert_mm(x_rI, aligned(self._a[expert]).t(), x_low_rL)
            product_into(x_low_rL.t(), aligned(grad_rO), into_LO)


def _pairs(mlp: AdaptedMLP, rows: int, alloc: Alloc) -> tuple[_Pair | None, _Pair | None]:
    a13, b13, a2, b2 = mlp.tensors[_WEIGHTS:]
    return (
        None if a13 is None or b13 is None else _Pair(a13, b13, rows, alloc),
        None if a2 is None or b2 is None else _Pair(a2, b2, rows, alloc),
    )


class _AdaptedForward(MLPForward):
    def __init__(
        self, mlp: AdaptedMLP, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> None:
        super().__init__(mlp.without_adapters(), rows_RD, out_RD, sizes, keep, alloc)
        self._only_weights = False
        self._first, self._last = _pairs(mlp, max(sizes, default=0), alloc)

    def _up(self, e: int, rows_rD: Tensor, w13_GD: Tensor, h_rG: Tensor) -> None:
        super()._up(e, rows_rD, w13_GD, h_rG)
        if self._first is not None:
            self._first.add(e, rows_rD, h_rG)

    def _down(self, e: int, act_rF: Tensor, w2_DF: Tensor, out_rD: Tensor) -> None:
        super()._down(e, act_rF, w2_DF, out_rD)
        if self._last is not None:
            self._last.add(e, act_rF, out_rD)


class _AdaptedBackward(MLPBackward):
    def __init__(self, mlp: AdaptedMLP, inputs: BackwardInputs) -> None:
        needs = inputs.needs_weights
        super().__init__(mlp.without_adapters(), replace(inputs, needs_weights=needs[:_WEIGHTS]))
        largest = max(inputs.sizes, default=0)
        buffer_rows = largest if inputs.per_expert else inputs.rows_RD.shape[0]
        self._first, self._last = _pairs(mlp, buffer_rows, inputs.alloc)
        # For h, which is computed again if it was not saved.
        self._forward_first = None if inputs.saved_RG is not None else _pairs(mlp, largest, inputs.alloc)[0]
        self._needs_grad_h = self._needs_grad_h or any(needs[4:6])
        self._needs_act = self._needs_act or any(needs[6:])

    def _up(self, e: int, rows_rD: Tensor, w13_GD: Tensor, h_rG: Tensor) -> None:
        super()._up(e, rows_rD, w13_GD, h_rG)
        if self._forward_first is not None:
            self._forward_first.add(e, rows_rD, h_rG)

    def _back_down(self, e: int, grad_rD: Tensor, w2_DF: Tensor, act_rF: Tensor, local: slice) -> None:
        super()._back_down(e, grad_rD, w2_DF, act_rF, local)
        if self._last is not None:
            self._last.add_back(e, grad_rD, act_rF, local)

    def _back_up(self, e: int, grad_h_rG: Tensor, w13_GD: Tensor, grad_rows_rD: Tensor, local: slice) -> None:
        super()._back_up(e, grad_h_rG, w13_GD, grad_rows_rD, local)
        if self._first is not None:
            self._first.add_back(e, grad_h_rG, grad_rows_rD, local)

    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        super().weights_of(expert, into[:_WEIGHTS])
        size, of_first, of_last = self._sizes[expert], into[4:6], into[6:]
        if not size:
            for empty in (*of_first, *of_last):
                if empty is not None:
                    empty.zero_()
            return
        rows = self._rows_of(expert)
        local = slice(0, size) if self._per_expert else rows
        if self._first is not None and any(t is not None for t in of_first):
            grad_h_rG = self._grad_h_RG[local]
            kept = self._grad_rows_RD is not None
            low_rL = self._first.kept(local) if kept else self._first.back(expert, grad_h_rG, local)
            self._first.weights_of(expert, self._rows_RD[rows], grad_h_rG, low_rL, of_first)
        if self._last is not None and any(t is not None for t in of_last):
            grad_rD = self._grad_RD[rows]
            low_rL = self._last.kept(local) if self._needs_grad_h else self._last.back(expert, grad_rD, local)
            self._last.weights_of(expert, self._act_RF[local], grad_rD, low_rL, of_last)
