"""Low-rank adapters (LoRA) of the experts of one rank, in forward and backward, by row range as ``expert_mlp.py``.

    h_RG = rows_RD @ w13.T + (rows_RD @ a13.T) @ b13         out_RD = act_RF @ w2.T + (act_RF @ a2.T) @ b2

A pair of tensors a [E, L, inputs], b [E, L, outputs] holds the active adapters of a weight: their ranks are
concatenated along L, and their scalings are factors of b. No tensor has the size of a weight. The
gradients of an expert's a and b are one product each over all of its rows. An adapter with dropout is a pair of its
own, as it multiplies other inputs.

In suffixes, L is the rank of all active adapters together, I the inputs and O the outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.cpu_gemm import ExpertWeights, weight_gradients
from moe_comm.kernels.expert_mlp import (
    Alloc,
    BackwardInputs,
    ExpertBackward,
    ExpertForward,
    ExpertMLP,
    LocalExperts,
    MLPBackward,
    MLPForward,
    Part,
    Sizes,
)
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.token_rows import Rows

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
        p: probability of zero. Other elements are divided by 1 - p.
        seed: of one forward pass and adapter.
        experts: global ids of the local experts.
        offsets: index of the first row that this rank computes, for each of them. (): 0.
    """

    p: float
    seed: int
    experts: tuple[int, ...]
    offsets: tuple[int, ...] = ()

    def factors(self, expert: int, first: int, like_rI: Tensor) -> Tensor:
        """Return the factors of rows ``first``, ``first`` + 1, ... of a local expert, in the shape of ``like_rI``."""
        rows, width = like_rI.shape
        first += self.offsets[expert] if self.offsets else 0
        begin = first // _MASK_ROWS
        blocks = -(-(first + rows) // _MASK_ROWS) - begin
        mask = like_rI.new_empty(blocks * _MASK_ROWS, width)
        generator = torch.Generator(like_rI.device)
        for index, block in enumerate(mask.split(_MASK_ROWS)):
            generator.manual_seed(_mixed(self.seed, self.experts[expert], begin + index))
            block.bernoulli_(1 - self.p, generator=generator)
        start = first - begin * _MASK_ROWS
        return mask[start : start + rows].div_(1 - self.p if self.p < 1 else 1)


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
    tensors, dtype, places = list(mlp.tensors[:_WEIGHTS]), mlp.tensors[0].dtype, []
    for is_last, adapters in ((False, first), (True, last)):
        together = [one for one in adapters if one.dropout is None]
        for parts in filter(None, (together, *([one] for one in adapters if one.dropout is not None))):
            tensors += _concatenated(parts, dtype)
            places.append(Place(is_last, parts[0].dropout))
    return AdaptedMLP(**(vars(mlp) | {"tensors": tuple(tensors), "places": tuple(places)}))


def _concatenated(adapters: Sequence[LowRank], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a and b of all ``adapters``, dense."""
    # Scaled before the cast, so that the factor is exact.
    parts = [(one.a_ELI.to(dtype), (one.b_ELO * one.scaling).to(dtype)) for one in adapters]
    a_ELI, b_ELO = (torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts, strict=True))
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

    def without_adapters(self) -> ExpertMLP:
        """Return the experts without their adapters."""
        settings = {name: value for name, value in vars(self).items() if name != "places"}
        return ExpertMLP(**(settings | {"tensors": self.tensors[:_WEIGHTS]}))

    def check_weights(self, rows: Rows) -> None:
        self.without_adapters().check_weights(rows)
        if self.gemm_dtype == "fp8":
            raise InputError("experts with adapters need GEMMs in the dtype of the rows; got gemm_dtype='fp8'")
        for index, place in enumerate(self.places):
            name, w_EOI = ("w2", self.tensors[1]) if place.last else ("w13", self.tensors[0])
            experts, (outputs, inputs) = self.num_experts, w_EOI.shape[1:]
            shapes = [None if t is None else (t.shape[0], t.shape[2], t.dtype) for t in _pair_of(self.tensors, index)]
            if shapes != [(experts, inputs, rows.dtype), (experts, outputs, rows.dtype)]:
                raise InputError(
                    f"adapters of {name} {tuple(w_EOI.shape)} need a [{experts}, rank, {inputs}] and b [{experts}, "
                    f"rank, {outputs}]; got {shapes}"
                )

    def new_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        adapters = self.with_tensors(self.tensors[_WEIGHTS:])
        return [
            *self.without_adapters().new_gradients(needed[:_WEIGHTS]),
            *LocalExperts.new_gradients(adapters, needed[_WEIGHTS:]),
        ]

    def for_autograd(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [*super().for_autograd(grads[:_WEIGHTS]), *grads[_WEIGHTS:]]

    def forward(self, rows: Rows | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        assert isinstance(rows, Tensor)
        return _AdaptedForward(self, rows, out_RD, sizes, keep and not self.recompute, alloc)

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
        self.index, self._dropout = index, mlp.places[index].dropout
        self._a, self._b = ExpertWeights(a_ELI), ExpertWeights(b_ELO)
        self._low_RL = alloc(rows, a_ELI.shape[1], a_ELI.dtype, a_ELI.device)

    def add(self, part: Part, x_rI: Tensor, out_rO: Tensor) -> None:
        """out += (x @ a.T) @ b."""
        low_rL = self._low_RL[: x_rI.shape[0]]
        self._a.multiply(self._dropped(part, x_rI), low_rL, part.sizes, part.expert)
        self._b.transposed.add(low_rL, out_rO, part.sizes, part.expert)

    def add_back(self, part: Part, grad_rO: Tensor, grad_in_rI: Tensor, local: slice) -> None:
        """grad_in += (grad @ b.T) @ a. Keeps grad @ b.T at ``local``."""
        low_rL, a = self.back(part, grad_rO, local), self._a.transposed
        if self._dropout is None:
            a.add(low_rL, grad_in_rI, part.sizes, part.expert)
            return
        grad_x_rI = torch.empty_like(grad_in_rI)
        a.multiply(low_rL, grad_x_rI, part.sizes, part.expert)
        grad_in_rI += self._dropped(part, grad_x_rI)

    def back(self, part: Part, grad_rO: Tensor, local: slice) -> Tensor:
        """Return grad @ b.T, which is kept at ``local``."""
        low_rL = self._low_RL[local]
        self._b.multiply(grad_rO, low_rL, part.sizes, part.expert)
        return low_rL

    def kept(self, local: slice) -> Tensor:
        """Return grad @ b.T of the rows at ``local``."""
        return self._low_RL[local]

    def weights_of(
        self, part: Part, x_rI: Tensor, grad_rO: Tensor, low_rL: Tensor, grads: Sequence[Tensor | None]
    ) -> None:
        """Write the gradients of a and b of whole experts. low_rL: grad @ b.T of their rows."""
        grad_ELI, grad_ELO = (None if grad is None else grad[part.experts] for grad in grads)
        x_rI = self._dropped(part, x_rI)
        if grad_ELI is not None:
            weight_gradients(low_rL, x_rI, grad_ELI, part.sizes)
        if grad_ELO is not None:
            x_low_rL = torch.empty_like(low_rL)
            self._a.multiply(x_rI, x_low_rL, part.sizes, part.expert)
            weight_gradients(x_low_rL, grad_rO, grad_ELO, part.sizes)

    def _dropped(self, part: Part, x_rI: Tensor) -> Tensor:
        """Return ``x_rI`` after dropout."""
        if self._dropout is None:
            return x_rI
        experts = range(part.expert, part.expert + len(part.sizes))
        of_experts = zip(experts, x_rI.split(part.sizes), strict=True)
        return torch.cat([self._dropout.factors(expert, part.first, x).mul_(x) for expert, x in of_experts])


def _pairs(mlp: AdaptedMLP, last: bool, rows: int, alloc: Alloc) -> list[_Pair]:
    """Return the pairs of w13, or those of w2."""
    return [_Pair(mlp, index, rows, alloc) for index, place in enumerate(mlp.places) if place.last == last]


class _AdaptedForward(MLPForward):
    extended = True

    def __init__(
        self, mlp: AdaptedMLP, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> None:
        super().__init__(mlp.without_adapters(), rows_RD, out_RD, sizes, keep, alloc)
        self._first, self._last = (_pairs(mlp, last, self._most_rows, alloc) for last in (False, True))

    def _up(self, part: Part, rows_rD: Rows, h_rG: Tensor) -> None:
        super()._up(part, rows_rD, h_rG)
        for pair in self._first:
            assert isinstance(rows_rD, Tensor)
            pair.add(part, rows_rD, h_rG)

    def _down(self, part: Part, act_rF: Tensor, out_rD: Tensor) -> None:
        super()._down(part, act_rF, out_rD)
        for pair in self._last:
            pair.add(part, act_rF, out_rD)


class _AdaptedBackward(MLPBackward):
    extended = True

    def __init__(self, mlp: AdaptedMLP, inputs: BackwardInputs) -> None:
        needs = inputs.needs_weights
        super().__init__(mlp.without_adapters(), replace(inputs, needs_weights=needs[:_WEIGHTS]))
        rows = self._most_rows if inputs.at_once else inputs.rows_RD.shape[0]
        self._first, self._last = (_pairs(mlp, last, rows, inputs.alloc) for last in (False, True))
        # For h, which is computed again if it was not saved.
        self._forward_first = [] if inputs.saved_RG is not None else _pairs(mlp, False, self._most_rows, inputs.alloc)
        trained = {place.last for index, place in enumerate(mlp.places) if any(_pair_of(needs, index))}
        self._needs_grad_h = self._needs_grad_h or False in trained
        self._needs_act = self._needs_act or True in trained

    def _up(self, part: Part, rows_rD: Rows, h_rG: Tensor) -> None:
        super()._up(part, rows_rD, h_rG)
        for pair in self._forward_first:
            assert isinstance(rows_rD, Tensor)
            pair.add(part, rows_rD, h_rG)

    def _back_down(self, part: Part, grad_rD: Tensor, act_rF: Tensor, local: slice) -> None:
        super()._back_down(part, grad_rD, act_rF, local)
        for pair in self._last:
            pair.add_back(part, grad_rD, act_rF, local)

    def _back_up(self, part: Part, grad_h_rG: Tensor, grad_rows_rD: Tensor, local: slice) -> None:
        super()._back_up(part, grad_h_rG, grad_rows_rD, local)
        for pair in self._first:
            pair.add_back(part, grad_h_rG, grad_rows_rD, local)

    def _weights(self, part: Part, grads: Sequence[Tensor | None]) -> None:
        super()._weights(part, grads[:_WEIGHTS])
        rows, local = part.rows, self._local(part.rows)
        # Of each kind of pair: its inputs, the gradient of its outputs, and whether grad @ b.T was kept.
        assert isinstance(self._rows_RD, Tensor)
        first = self._rows_RD[rows], self._grad_h_RG[local], self._grad_rows_RD is not None
        last = self._act_RF[local], self._grad(rows), self._needs_grad_h
        for pairs, (x_rI, grad_rO, kept) in ((self._first, first), (self._last, last)):
            for pair in pairs:
                of_pair = _pair_of(grads, pair.index)
                if any(t is not None for t in of_pair):
                    low_rL = pair.kept(local) if kept else pair.back(part, grad_rO, local)
                    pair.weights_of(part, x_rI, grad_rO, low_rL, of_pair)
