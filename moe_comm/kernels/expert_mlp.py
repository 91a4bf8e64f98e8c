"""The arithmetic of one rank's experts, by row range: forward, backward and gradients of weights. No autograd.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Everything that runs experts (``overlap/executors``) calls this code: all rows at once, or row range by row range as
they arrive. Rows of one expert have the same bits in every split into ranges, provided that operands and results stand
at equally aligned addresses: BLAS adds in another order at odd ones. Slices that do not (widths that are not a multiple
of 64 bytes) are copied (``row_invariant.py``). Gradients of weights are one product over all rows of an expert.

``ExpertMLP`` is both products and the activation; ``ExpertLinear`` is one product. What either saves for backward is
``rows_RD`` and, unless it is recomputed, ``h_RG``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.row_invariant import aligned, are_aligned, expert_mm, product_into

Alloc = Callable[[int, int, torch.dtype, torch.device], Tensor]
"""(rows, width, dtype, device) to an uninitialised [rows, width] tensor."""
Sizes = tuple[int, ...]


class ExpertForward(ABC):
    """One forward pass over rows that stand expert after expert.

    Attributes:
        saved_RG: what backward needs besides the rows; None: nothing.
    """

    saved_RG: Tensor | None = None

    @abstractmethod
    def row_range(self, expert: int, rows: slice) -> None:
        """Compute the output of ``rows``, all of local expert ``expert``."""

    @abstractmethod
    def all_rows(self) -> None:
        """Compute the output of all rows."""


class ExpertBackward(ABC):
    """One backward pass. First ``row_range`` for all rows of an expert, then ``weights_of`` it; or ``all_rows``."""

    @abstractmethod
    def row_range(self, expert: int, rows: slice) -> None:
        """Compute the gradient of ``rows``, and what the gradients of weights need of them."""

    @abstractmethod
    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        """Write the gradients of an expert's tensors, once all its rows are computed. An expert without rows has zeros:
        an optimizer or a reduction over ranks treats it like any other.

        Args:
            into: one expert's gradient of each of ``LocalExperts.tensors``; None where it is not wanted.
        """

    @abstractmethod
    def all_rows(self, grads: Sequence[Tensor | None]) -> None:
        """Compute everything, expert by expert. grads: of all experts, as ``into`` of one."""


@dataclass(frozen=True)
class Wanted:
    """Which gradients a backward pass computes.

    grad_rows_RD: where that of the rows is written; None: it is not wanted.
    weights: which of ``LocalExperts.tensors`` will have one, now or in a later call of ``weights_of``.
    """

    grad_rows_RD: Tensor | None
    weights: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class LocalExperts(ABC):
    """The experts of one rank, their weights stacked.

    tensors: parameters in the dtype of the rows, any strides; empty where only the settings are kept.
    """

    tensors: tuple[Tensor | None, ...]

    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> Self:
        """The same settings with other parameters."""
        return replace(self, tensors=tuple(tensors))

    @property
    @abstractmethod
    def columns(self) -> int:
        """Width of the output."""

    @property
    @abstractmethod
    def recomputes(self) -> bool:
        """Whether backward computes the hidden rows again instead of saving them."""

    @abstractmethod
    def forward(self, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        """A forward pass from ``rows_RD`` to ``out_RD``, which may still be filled. keep: save for backward."""

    @abstractmethod
    def backward(
        self,
        rows_RD: Tensor,
        saved_RG: Tensor | None,
        grad_RD: Tensor,
        sizes: Sizes,
        wanted: Wanted,
        alloc: Alloc,
        whole: bool,
    ) -> ExpertBackward:
        """A backward pass. whole: rows come expert after expert, so that scratch memory of one expert's size will do;
        only ``all_rows`` may be called then."""


@dataclass(frozen=True, eq=False)
class ExpertMLP(LocalExperts):
    """activation(rows @ w13[e].T + b13[e]) @ w2[e].T + b2[e].

    tensors: w13 [E, G, D], w2 [E, D, F], b13 [E, G] or None, b2 [E, D] or None.
    recompute: keep only the rows for backward, at the price of one product more there.
    """

    activation: Activation
    recompute: bool = False

    @property
    def columns(self) -> int:
        return int(self.tensors[1].shape[1])  # type: ignore[union-attr]

    @property
    def recomputes(self) -> bool:
        return self.recompute

    def check(self, rows_RD: Tensor, rows_per_expert: Sequence[int]) -> None:
        """Raise InputError unless shapes and dtypes fit rows [R, D] of so many per expert."""
        if rows_RD.dim() != 2 or rows_RD.shape[1] != self.tensors[0].shape[2]:  # type: ignore[union-attr]
            hidden = self.tensors[0].shape[2]  # type: ignore[union-attr]
            raise InputError(f"experts of hidden size {hidden} need rows [R, {hidden}]; got {tuple(rows_RD.shape)}")
        experts = self.tensors[0].shape[0]  # type: ignore[union-attr]
        if len(rows_per_expert) != experts or sum(rows_per_expert) != rows_RD.shape[0]:
            raise InputError(
                f"rows_per_expert must hold {experts} counts that add up to {rows_RD.shape[0]} rows; "
                f"got {list(rows_per_expert)} (sum {sum(rows_per_expert)})"
            )
        self.check_weights(rows_RD)

    def check_weights(self, rows: Tensor) -> None:
        """Raise InputError unless the weights fit each other and the dtype of ``rows``, of any shape."""
        w13, w2, b13, b2 = self.tensors
        assert w13 is not None
        assert w2 is not None
        width = w2.shape[2] * (2 if self.activation.gated else 1)
        if w2.shape[:2] != (w13.shape[0], w13.shape[2]) or w13.shape[1] != width:
            raise InputError(
                f"{self.activation.name} with w2 {tuple(w2.shape)} needs w13 [{w2.shape[0]}, {width}, "
                f"{w2.shape[1]}]; got {tuple(w13.shape)}"
            )
        for name, bias, shape in (("b13", b13, w13.shape[:2]), ("b2", b2, w2.shape[:2])):
            if bias is not None and bias.shape != shape:
                raise InputError(f"{name} must be {tuple(shape)}; got {tuple(bias.shape)}")
        for t in self.tensors:
            if t is not None and t.dtype != rows.dtype:
                raise InputError(
                    f"rows are {rows.dtype} and the experts' weights {t.dtype}; "
                    "convert one of them, or run under torch.autocast"
                )

    def forward(self, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        return _MLPForward(self, rows_RD, out_RD, sizes, keep and not self.recompute, alloc)

    def backward(
        self,
        rows_RD: Tensor,
        saved_RG: Tensor | None,
        grad_RD: Tensor,
        sizes: Sizes,
        wanted: Wanted,
        alloc: Alloc,
        whole: bool,
    ) -> ExpertBackward:
        return _MLPBackward(self, rows_RD, saved_RG, grad_RD, sizes, wanted, alloc, whole)


class _MLPForward(ExpertForward):
    def __init__(self, mlp: ExpertMLP, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> None:
        w13_EGD, w2_EDF, b13_EG, b2_ED = mlp.tensors
        assert w13_EGD is not None
        assert w2_EDF is not None
        experts, width_h, _ = w13_EGD.shape
        dtype, device, largest = rows_RD.dtype, rows_RD.device, max(sizes, default=0)
        self._activation, self._sizes, self._rows_RD, self._out_RD = mlp.activation, sizes, rows_RD, out_RD
        self._h_RG = alloc(rows_RD.shape[0] if keep else largest, width_h, dtype, device)
        self.saved_RG = self._h_RG if keep else None
        self._act_RF = alloc(largest, w2_EDF.shape[2], dtype, device)
        self._aligned = are_aligned(rows_RD, w13_EGD, w2_EDF)
        self._w13, self._w2 = w13_EGD.unbind(0), w2_EDF.unbind(0)
        none = [None] * experts
        self._b13 = none if b13_EG is None else b13_EG.unbind(0)
        self._b2 = none if b2_ED is None else b2_ED.unbind(0)

    def row_range(self, expert: int, rows: slice) -> None:
        h = self._h_RG[: rows.stop - rows.start] if self.saved_RG is None else self._h_RG[rows]
        self._run(expert, self._rows_RD[rows], h, self._out_RD[rows])

    def all_rows(self) -> None:
        kept = None if self.saved_RG is None else self.saved_RG.split(self._sizes)
        out = self._out_RD.split(self._sizes)
        for expert, rows in enumerate(self._rows_RD.split(self._sizes)):
            if size := self._sizes[expert]:
                self._run(expert, rows, self._h_RG[:size] if kept is None else kept[expert], out[expert])

    def _run(self, e: int, rows_rD: Tensor, h_rG: Tensor, out_rD: Tensor) -> None:
        act_rF, w13_GD, w2_DF = self._act_RF[: rows_rD.shape[0]], self._w13[e], self._w2[e]
        if not self._aligned:
            rows_rD, w13_GD, w2_DF = aligned(rows_rD), aligned(w13_GD), aligned(w2_DF)
        expert_mm(rows_rD, w13_GD.t(), h_rG, self._b13[e])
        self._activation.forward(h_rG, act_rF)
        expert_mm(act_rF, w2_DF.t(), out_rD, self._b2[e])


class _MLPBackward(ExpertBackward):
    def __init__(
        self,
        mlp: ExpertMLP,
        rows_RD: Tensor,
        saved_RG: Tensor | None,
        grad_RD: Tensor,
        sizes: Sizes,
        wanted: Wanted,
        alloc: Alloc,
        whole: bool,
    ) -> None:
        w13_EGD, w2_EDF, b13_EG, _ = mlp.tensors
        assert w13_EGD is not None
        assert w2_EDF is not None
        dtype, device = rows_RD.dtype, rows_RD.device
        self._activation, self._sizes, self._scratch = mlp.activation, sizes, whole
        self._rows_RD, self._saved_RG, self._grad_RD = rows_RD, saved_RG, grad_RD
        self._grad_rows_RD, self._weights = wanted.grad_rows_RD, wanted.weights
        # Whether the gradient goes through the activation, or is needed for w2 and b2 alone.
        self._through = wanted.grad_rows_RD is not None or wanted.weights[0] or wanted.weights[2]
        room = max(sizes, default=0) if whole else rows_RD.shape[0]
        self._act_RF = alloc(room, w2_EDF.shape[2], dtype, device)
        self._grad_h_RG = alloc(room, w13_EGD.shape[1], dtype, device)
        self._aligned = are_aligned(rows_RD, grad_RD, w13_EGD, w2_EDF, self._act_RF, self._grad_h_RG)
        self._w13, self._w2 = w13_EGD.unbind(0), w2_EDF.unbind(0)
        self._b13 = [None] * len(sizes) if b13_EG is None else b13_EG.unbind(0)
        self._starts = starts_of(sizes)

    def row_range(self, expert: int, rows: slice) -> None:
        room = slice(0, rows.stop - rows.start) if self._scratch else rows
        act, grad_h, grad = self._act_RF[room], self._grad_h_RG[room], self._grad_RD[rows]
        w13, w2 = self._w13[expert], self._w2[expert]
        if not self._aligned:
            grad, w13, w2 = aligned(grad), aligned(w13), aligned(w2)
        if self._saved_RG is not None:
            h = self._saved_RG[rows]
        else:
            h = grad_h  # whose place it takes, and which is written once it has been read
            expert_mm(aligned(self._rows_RD[rows]), w13.t(), h, self._b13[expert])
        if self._through:
            expert_mm(grad, w2, act)
            # The activation takes the place of its gradient, which is read first.
            self._activation.backward(h, act, grad_h, act)
        elif self._weights[1]:
            self._activation.forward(h, act)
        if self._grad_rows_RD is not None:
            expert_mm(grad_h if self._aligned else aligned(grad_h), w13, self._grad_rows_RD[rows])

    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        w13, w2, b13, b2 = into
        size = self._sizes[expert]
        if not size:
            for empty in into:
                if empty is not None:
                    empty.zero_()
            return
        rows = slice(self._starts[expert], self._starts[expert + 1])
        room = slice(0, size) if self._scratch else rows
        rows_rD, grad, grad_h, act = self._rows_RD[rows], self._grad_RD[rows], self._grad_h_RG[room], self._act_RF[room]
        if not self._aligned:
            rows_rD, grad, grad_h, act = aligned(rows_rD), aligned(grad), aligned(grad_h), aligned(act)
        if w2 is not None:
            product_into(grad.t(), act, w2)
        if b2 is not None:
            torch.sum(grad, 0, out=b2)
        if w13 is not None:
            product_into(grad_h.t(), rows_rD, w13)
        if b13 is not None:
            torch.sum(grad_h, 0, out=b13)

    def all_rows(self, grads: Sequence[Tensor | None]) -> None:
        for expert, into in enumerate(zip(*by_expert(grads, len(self._sizes)), strict=True)):
            if self._sizes[expert]:
                self.row_range(expert, slice(self._starts[expert], self._starts[expert + 1]))
            self.weights_of(expert, into)


@dataclass(frozen=True, eq=False)
class ExpertLinear(LocalExperts):
    """rows @ w[e].T. tensors: w [E, G, D]."""

    @property
    def columns(self) -> int:
        return int(self.tensors[0].shape[1])  # type: ignore[union-attr]

    @property
    def recomputes(self) -> bool:
        return True  # there is nothing between the rows and the output

    def forward(self, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        return _LinearForward(self.tensors[0], rows_RD, out_RD, sizes)  # type: ignore[arg-type]

    def backward(
        self,
        rows_RD: Tensor,
        saved_RG: Tensor | None,
        grad_RD: Tensor,
        sizes: Sizes,
        wanted: Wanted,
        alloc: Alloc,
        whole: bool,
    ) -> ExpertBackward:
        return _LinearBackward(self.tensors[0], rows_RD, grad_RD, sizes, wanted)  # type: ignore[arg-type]


class _LinearForward(ExpertForward):
    def __init__(self, w_EGD: Tensor, rows_RD: Tensor, out_RG: Tensor, sizes: Sizes) -> None:
        self._rows_RD, self._out_RG, self._sizes = rows_RD, out_RG, sizes
        self._w = w_EGD.unbind(0)

    def row_range(self, expert: int, rows: slice) -> None:
        expert_mm(aligned(self._rows_RD[rows]), aligned(self._w[expert]).t(), self._out_RG[rows])

    def all_rows(self) -> None:
        first = 0
        for expert, size in enumerate(self._sizes):
            if size:
                self.row_range(expert, slice(first, first + size))
            first += size


class _LinearBackward(ExpertBackward):
    def __init__(self, w_EGD: Tensor, rows_RD: Tensor, grad_RG: Tensor, sizes: Sizes, wanted: Wanted) -> None:
        self._rows_RD, self._grad_RG, self._grad_rows_RD = rows_RD, grad_RG, wanted.grad_rows_RD
        self._w, self._sizes, self._starts = w_EGD.unbind(0), sizes, starts_of(sizes)

    def row_range(self, expert: int, rows: slice) -> None:
        if self._grad_rows_RD is not None:
            expert_mm(aligned(self._grad_RG[rows]), aligned(self._w[expert]), self._grad_rows_RD[rows])

    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        (into_GD,) = into
        if into_GD is None:
            return
        if not self._sizes[expert]:
            into_GD.zero_()
            return
        rows = slice(self._starts[expert], self._starts[expert + 1])
        product_into(aligned(self._grad_RG[rows]).t(), aligned(self._rows_RD[rows]), into_GD)

    def all_rows(self, grads: Sequence[Tensor | None]) -> None:
        for expert, into in enumerate(zip(*by_expert(grads, len(self._sizes)), strict=True)):
            if self._sizes[expert]:
                self.row_range(expert, slice(self._starts[expert], self._starts[expert + 1]))
            self.weights_of(expert, into)


def starts_of(sizes: Sizes) -> list[int]:
    """Where each expert's rows begin, and the last ones end."""
    return [0, *accumulate(sizes)]


def by_expert(grads: Sequence[Tensor | None], num_experts: int) -> list[Sequence[Tensor | None]]:
    """Each gradient's views of the experts, in the order of ``grads``."""
    found: list[Sequence[Tensor | None]] = []
    for grad in grads:
        found.append([None] * num_experts if grad is None else grad.unbind(0))
    return found
