"""Low-rank adapters (LoRA) of the experts of one rank, in forward and backward, by row range as ``expert_mlp.py``.

    h_RG = rows_RD @ w13.T + (rows_RD @ a13.T) @ b13         out_RD = act_RF @ w2.T + (act_RF @ a2.T) @ b2

A pair of tensors a [E, L, inputs], b [E, L, outputs] holds the active adapters of a weight: their ranks are
concatenated along L, and their scalings are factors of b. L is padded with zeros to a multiple of ``TILE``. So both
products have whole tiles, and a row has the same bits in every batch, as in ``expert_mm``. No tensor has the size of a
weight. The gradients of an expert's a and b are one product each over all of its rows. An adapter with dropout is a
pair of its own, as it multiplies other inputs.

In suffixes, L is the rank of all active adapters together, I the inputs and O the outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

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
_MASK_ROWS = 16
"""Rows of an expert whose mask is drawn at once."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of the inputs of an adapter: which elements of a row are zero.

    An element depends on the seed, the expert, the index of the row among those of the expert, and the kind of device.
    So row ranges, backward and every number of ranks have the same mask if they have the same seed.

    Attributes:
        p: probability of zero, in [0, 1). Other elements are divided by 1 - p.
        seed: of one forward pass and adapter.
        experts: global ids of the local experts.
    """

    p: float
    seed: int
    experts: tuple[int, ...]

    def factors(self, expert: int, first: int, like_rI: Tensor) -> Tensor:
        """Return the factors of rows ``first``, ``first`` + 1, ... of a local expert, in the shape of ``like_rI``."""
        rows, width = like_rI.shape
        begin = first // _MASK_ROWS
        blocks = -(-(first + rows) // _MASK_ROWS) - begin
        mask = like_rI.new_empty(blocks * _MASK_ROWS, width)
        generator = torch.Generator(like_rI.device)
        for index, block in enumerate(mask.split(_MASK_ROWS)):
            generator.manual_seed(_mixed(self.seed, self.experts[expert], begin + index))
            block.bernoulli_(1 - self.p, generator=generator)
        start = first - begin * _MASK_ROWS
        return mask[start : start + rows].div_(1 - self.p)


def _mixed(*numbers: int) -> int:
    """Return a 32-bit hash, which is equal in all processes."""
    value = 0
    for number in numbers:
        value = (value ^ number) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 29
    return value >> 32


@dataclass(frozen=True, eq=False)
class LowRank:
    """One adapter of a stacked weight of the experts: adds scaling * (x @ a[e].T) @ b[e] to x @ w[e].T.

    Attributes:
        a_ELI: [E, rank, inputs] for the local experts; any strides and floating dtype.
        b_ELO: [E, rank, outputs].
        scaling: factor of the product.
        dropout: of x in this product.
    """

    a_ELI: Tensor
    b_ELO: Tensor
    scaling: float = 1.0
    dropout: Dropout | None = None


def with_adapters(mlp: ExpertMLP, first: Sequence[LowRank] = (), last: Sequence[LowRank] = ()) -> ExpertMLP:
    """Return ``mlp`` with these adapters of w13 and w2, which are cast to the dtype of w13. Differentiable.

    Gradients of the adapters are computed if they require them, also if the weights do not.
    """
    if not first and not last:
        return mlp
    weights = mlp.tensors[:_WEIGHTS]
    assert weights[0] is not None
    tensors, places = list(weights), []
    for is_last, adapters in ((False, first), (True, last)):
        together = [one for one in adapters if one.dropout is None]
        for parts in filter(None, (together, *([one] for one in adapters if one.dropout is not None))):
            tensors += _concatenated(parts, weights[0].dtype)
            places.append(Place(is_last, parts[0].dropout))
    return AdaptedMLP(tuple(tensors), mlp.activation, mlp.recompute, mlp.gemm_dtype, tuple(places))


def _concatenated(adapters: Sequence[LowRank], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a and b of all ``adapters``, dense and padded."""
    # Scaled before the cast, so that the factor is exact.
    parts = [(one.a_ELI.to(dtype), (one.b_ELO * one.scaling).to(dtype)) for one in adapters]
    a_ELI, b_ELO = (torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
    padding = (0, 0, 0, -a_ELI.shape[1] % TILE)
    if padding[-1]:
        a_ELI, b_ELO = F.pad(a_ELI, padding), F.pad(b_ELO, padding)
    return a_ELI.contiguous(), b_ELO.contiguous()


@dataclass(frozen=True)
class Place:
    """Where a pair of tensors is added: to w2 if ``last``, else to w13. dropout: of its inputs."""

    last: bool
    dropout: Dropout | None = None


@dataclass(frozen=True, eq=False)
class AdaptedMLP(ExpertMLP):
    """``ExpertMLP`` with adapters; ``with_adapters`` creates it.

    tensors: those of ``ExpertMLP``, then a [E, L, inputs] and b [E, L, outputs] of each of ``places``.
    """

    places: tuple[Place, ...] = ()

    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> AdaptedMLP:
        return AdaptedMLP(tuple(tensors), self.activation, self.recompute, self.gemm_dtype, self.places)

    def without_adapters(self) -> ExpertMLP:
        """Return the experts without their adapters."""
        return ExpertMLP(self.tensors[:_WEIGHTS], self.activation, self.recompute, self.gemm_dtype)

    def check_weights(self, rows: Tensor) -> None:
        self.without_adapters().check_weights(rows)
        if self.gemm_dtype == "fp8":
            raise InputError("experts with adapters need GEMMs in the dtype of the rows; got gemm_dtype='fp8'")
        for index, place in enumerate(self.places):
            name, w_EOI = ("w2", self.tensors[1]) if place.last else ("w13", self.tensors[0])
            assert w_EOI is not None
            experts, outputs, inputs = w_EOI.shape
            shapes = [None if t is None else (t.shape[0], t.shape[2], t.dtype) for t in _pair_of(self.tensors, index)]
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


T = TypeVar("T")


def _pair_of(values: Sequence[T], index: int) -> Sequence[T]:
    """Return what belongs to a and b of one of ``places``. values: one for each tensor."""
    return values[_WEIGHTS + 2 * index : _WEIGHTS + 2 * index + 2]


class _Pair:
    """The tensors a and b of one of ``places`` in a pass.

    rows: rows of the scratch buffer, which has x @ a.T in forward and grad @ b.T in backward.
    """

    def __init__(self, mlp: AdaptedMLP, index: int, rows: int, alloc: Alloc) -> None:
        a_ELI, b_ELO = _pair_of(mlp.tensors, index)
        assert a_ELI is not None
        assert b_ELO is not None
        self.index, self._dropout = index, mlp.places[index].dropout
        self._a, self._b = a_ELI.unbind(0), b_ELO.unbind(0)
        self._low_RL = alloc(rows, a_ELI.shape[1], a_ELI.dtype, a_ELI.device)

    def add(self, expert: int, x_rI: Tensor, out_rO: Tensor, first: int) -> None:
        """out += (x @ a.T) @ b. first: index of the first row among those of the expert."""
        low_rL = self._low_RL[: x_rI.shape[0]]
        expert_mm(self._dropped(expert, x_rI, first), aligned(self._a[expert]).t(), low_rL)
        add_product(low_rL, aligned(self._b[expert]), out_rO)

    def add_back(self, expert: int, grad_rO: Tensor, grad_in_rI: Tensor, local: slice, first: int) -> None:
        """grad_in += (grad @ b.T) @ a. Keeps grad @ b.T at ``local``."""
        low_rL, a_LI = aligned(self.back(expert, grad_rO, local)), aligned(self._a[expert])
        if self._dropout is None:
            add_product(low_rL, a_LI, grad_in_rI)
            return
        grad_x_rI = torch.empty_like(grad_in_rI)
        expert_mm(low_rL, a_LI, grad_x_rI)
        grad_in_rI += grad_x_rI.mul_(self._dropout.factors(expert, first, grad_x_rI))

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
        """Write the gradients of a and b of an expert. x, grad: all of its rows. low_rL: grad @ b.T of them."""
        into_LI, into_LO = into
        x_rI = self._dropped(expert, x_rI, 0)
        if into_LI is not None:
            product_into(aligned(low_rL).t(), x_rI, into_LI)
        if into_LO is not None:
            x_low_rL = x_rI.new_empty(x_rI.shape[0], into_LO.shape[0])
            expert_mm(x_rI, aligned(self._a[expert]).t(), x_low_rL)
            product_into(x_low_rL.t(), aligned(grad_rO), into_LO)

    def _dropped(self, expert: int, x_rI: Tensor, first: int) -> Tensor:
        """Return ``x_rI``, aligned, after dropout."""
        return aligned(x_rI if self._dropout is None else self._dropout.factors(expert, first, x_rI).mul_(x_rI))


def _pairs(mlp: AdaptedMLP, last: bool, rows: int, alloc: Alloc) -> list[_Pair]:
    """Return the pairs of w13, or those of w2."""
    return [_Pair(mlp, index, rows, alloc) for index, place in enumerate(mlp.places) if place.last == last]


class _AdaptedForward(MLPForward):
    def __init__(
        self, mlp: AdaptedMLP, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> None:
        super().__init__(mlp.without_adapters(), rows_RD, out_RD, sizes, keep, alloc)
        self._only_weights = False
        self._first, self._last = (_pairs(mlp, last, max(sizes, default=0), alloc) for last in (False, True))
        self._starts, self._at = [0, *accumulate(sizes)], 0

    def row_range(self, expert: int, rows: slice) -> None:
        self._at = rows.start - self._starts[expert]
        super().row_range(expert, rows)
        self._at = 0

    def _up(self, e: int, rows_rD: Tensor, w13_GD: Tensor, h_rG: Tensor) -> None:
        super()._up(e, rows_rD, w13_GD, h_rG)
        for pair in self._first:
            pair.add(e, rows_rD, h_rG, self._at)

    def _down(self, e: int, act_rF: Tensor, w2_DF: Tensor, out_rD: Tensor) -> None:
        super()._down(e, act_rF, w2_DF, out_rD)
        for pair in self._last:
            pair.add(e, act_rF, out_rD, self._at)


class _AdaptedBackward(MLPBackward):
    def __init__(self, mlp: AdaptedMLP, inputs: BackwardInputs) -> None:
        needs = inputs.needs_weights
        super().__init__(mlp.without_adapters(), replace(inputs, needs_weights=needs[:_WEIGHTS]))
        largest = max(inputs.sizes, default=0)
        buffer_rows = largest if inputs.per_expert else inputs.rows_RD.shape[0]
        self._first, self._last = (_pairs(mlp, last, buffer_rows, inputs.alloc) for last in (False, True))
        # For h, which is computed again if it was not saved.
        self._forward_first = [] if inputs.saved_RG is not None else _pairs(mlp, False, largest, inputs.alloc)
        trained = {place.last for index, place in enumerate(mlp.places) if any(_pair_of(needs, index))}
        self._needs_grad_h = self._needs_grad_h or False in trained
        self._needs_act = self._needs_act or True in trained
        self._at = 0

    def row_range(self, expert: int, rows: slice) -> None:
        self._at = rows.start - self._starts[expert]
        super().row_range(expert, rows)

    def _up(self, e: int, rows_rD: Tensor, w13_GD: Tensor, h_rG: Tensor) -> None:
        super()._up(e, rows_rD, w13_GD, h_rG)
        for pair in self._forward_first:
            pair.add(e, rows_rD, h_rG, self._at)

    def _back_down(self, e: int, grad_rD: Tensor, w2_DF: Tensor, act_rF: Tensor, local: slice) -> None:
        super()._back_down(e, grad_rD, w2_DF, act_rF, local)
        for pair in self._last:
            pair.add_back(e, grad_rD, act_rF, local, self._at)

    def _back_up(self, e: int, grad_h_rG: Tensor, w13_GD: Tensor, grad_rows_rD: Tensor, local: slice) -> None:
        super()._back_up(e, grad_h_rG, w13_GD, grad_rows_rD, local)
        for pair in self._first:
            pair.add_back(e, grad_h_rG, grad_rows_rD, local, self._at)

    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        super().weights_of(expert, into[:_WEIGHTS])
        size = self._sizes[expert]
        if not size:
            for empty in into[_WEIGHTS:]:
                if empty is not None:
                    empty.zero_()
            return
        rows = self._rows_of(expert)
        local = slice(0, size) if self._per_expert else rows
        # Of each kind of pair: its inputs, the gradient of its outputs, and whether grad @ b.T was kept.
        first = self._rows_RD[rows], self._grad_h_RG[local], self._grad_rows_RD is not None
        last = self._act_RF[local], self._grad_RD[rows], self._needs_grad_h
        for pairs, (x_rI, grad_rO, kept) in ((self._first, first), (self._last, last)):
            for pair in pairs:
                into_pair = _pair_of(into, pair.index)
                if any(t is not None for t in into_pair):
                    low_rL = pair.kept(local) if kept else pair.back(expert, grad_rO, local)
                    pair.weights_of(expert, x_rI, grad_rO, low_rL, into_pair)
