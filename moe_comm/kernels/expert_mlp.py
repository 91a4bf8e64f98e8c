"""The MLPs of one rank's experts, by row range: forward, backward and weight gradients, without autograd.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

All executors (``overlap/executors``) call this code, with all rows at once or row range by row range as they are
received. The bits of a row do not depend on how its expert's rows are split into ranges, if operands and results have
equal alignment: BLAS adds in another order at unaligned addresses. Slices whose width is not a multiple of 64 bytes are
copied (``row_invariant.py``). Weight gradients are one GEMM over all rows of an expert.

With ``gemm_dtype="fp8"`` the operands of the forward GEMMs are e4m3 (``fp8.py``). Rows are the bytes that dispatch
received, or quantized here:

    rows e4m3 ──w13 e4m3──▶ h_RG ──activation──▶ act ──quantize──▶ act e4m3 ──w2 e4m3──▶ out_RD

h_RG, the activation and out_RD are in the dtype of the rows. Weights are quantized once per pass. All rows are one
launch per GEMM on a GPU. Backward uses the dequantized rows and the weights before quantization, in the dtype of the
rows, so rounding to e4m3 has the gradient of the identity.

In suffixes, R is all rows of this rank and r the rows of one range. ``ExpertMLP`` is two GEMMs and the activation;
``ExpertLinear`` is one GEMM. Both save ``rows_RD`` for backward and, without recompute, ``h_RG``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.activations import Activation, SwiGLU
from moe_comm.kernels.fp8 import (
    BLOCK,
    GemmDtype,
    ScaledRows,
    of_packed,
    quantize_rows,
    quantize_weights,
    scaled_grouped_mm_into,
)
from moe_comm.kernels.native import for_triton
from moe_comm.kernels.row_invariant import MIN_ROWS, TILE, aligned, are_aligned, expert_mm, is_small, product_into

Alloc = Callable[[int, int, torch.dtype, torch.device], Tensor]
"""Maps (rows, width, dtype, device) to an uninitialized [rows, width] tensor."""
Sizes = tuple[int, ...]
Saved = tuple[Tensor, Tensor | None, Tensor | None]
"""Rows of a forward pass, or their e4m3 values and scales; and h_RG, or None."""
_ALL = slice(None)


class ExpertForward(ABC):
    """One forward pass over rows that are sorted by expert.

    Attributes:
        saved: what backward needs.
    """

    saved: Saved

    @abstractmethod
    def row_range(self, expert: int, rows: slice) -> None:
        """Compute the output of ``rows``, all of local expert ``expert``."""

    @abstractmethod
    def all_rows(self) -> None:
        """Compute the output of all rows."""


class ExpertBackward(ABC):
    """One backward pass. Call ``row_range`` for all rows of an expert, then ``weights_of`` it; or call ``all_rows``."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._starts = [0, *accumulate(sizes)]

    @abstractmethod
    def row_range(self, expert: int, rows: slice) -> None:
        """Compute the gradient of ``rows``, and keep the operands of their weight gradients."""

    @abstractmethod
    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        """Write the gradients of an expert's tensors, after all its rows are computed; zeros for an expert without
        rows.

        Args:
            into: One expert's gradient of each of ``LocalExperts.tensors``; None if it is not needed.
        """

    def all_rows(self, grads: Sequence[Tensor | None]) -> None:
        """Compute all gradients, expert by expert. grads: as ``into`` of ``weights_of``, but for all experts."""
        for expert, into in enumerate(zip(*by_expert(grads, len(self._sizes)), strict=True)):
            if self._sizes[expert]:
                self.row_range(expert, self._rows_of(expert))
            self.weights_of(expert, into)

    def _rows_of(self, expert: int) -> slice:
        return slice(self._starts[expert], self._starts[expert + 1])


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Inputs and outputs of a backward pass.

    rows_RD, saved_RG, grad_RD: rows and saved tensor of the forward pass, and the gradient of its output.
    sizes: rows of each expert.
    grad_rows_RD: output for the gradient of the rows; None if it is not needed.
    needs_weights: which of ``LocalExperts.tensors`` need a gradient, now or in a later call of ``weights_of``.
    per_expert: only ``all_rows`` is called, so scratch buffers have one expert's size.
    """

    rows_RD: Tensor
    saved_RG: Tensor | None
    grad_RD: Tensor
    sizes: Sizes
    grad_rows_RD: Tensor | None
    needs_weights: tuple[bool, ...]
    alloc: Alloc
    per_expert: bool


@dataclass(frozen=True, eq=False)
class LocalExperts(ABC):
    """The experts of one rank, with stacked weights.

    tensors: parameters in the dtype of the rows, any strides; empty if only the settings are stored.
    """

    tensors: tuple[Tensor | None, ...]

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> LocalExperts:
        """Return the same settings with other parameters."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Width of the output."""

    @abstractmethod
    def forward(
        self, rows: Tensor | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> ExpertForward:
        """Return a forward pass from ``rows``, which may still be in flight, to ``out_RD``. keep: save h_RG for
        backward, unless it is recomputed."""

    @abstractmethod
    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        """Return a backward pass."""


@dataclass(frozen=True, eq=False)
class ExpertMLP(LocalExperts):
    """activation(rows @ w13[e].T + b13[e]) @ w2[e].T + b2[e].

    tensors: w13 [E, G, D], w2 [E, D, F], b13 [E, G] or None, b2 [E, D] or None.
    recompute: save only the rows for backward, which then needs one more GEMM.
    gemm_dtype: operands of the forward GEMMs.
    """

    activation: Activation
    recompute: bool = False
    gemm_dtype: GemmDtype = "same"

    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> ExpertMLP:
        return ExpertMLP(tuple(tensors), self.activation, self.recompute, self.gemm_dtype)

    @property
    def columns(self) -> int:
        return int(self.tensors[1].shape[1])  # type: ignore[union-attr]

    def check(self, rows_RD: Tensor, rows_per_expert: Sequence[int]) -> None:
        """Raise InputError unless shapes and dtypes match rows [R, D] with these counts per expert."""
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
        if self.gemm_dtype == "fp8" and rows_RD.shape[1] % BLOCK:
            raise InputError(f"experts with fp8 GEMMs need a multiple of {BLOCK} channels; got {rows_RD.shape[1]}")

    def check_weights(self, rows: Tensor) -> None:
        """Raise InputError unless the weights match each other and the dtype of ``rows``, of any shape."""
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

    def forward(
        self, rows: Tensor | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> ExpertForward:
        keep = keep and not self.recompute
        if self.gemm_dtype == "fp8":
            scaled = rows if isinstance(rows, ScaledRows) else quantize_rows(rows)
            return _Fp8Forward(self, scaled, out_RD, sizes, keep)
        assert isinstance(rows, Tensor)
        return MLPForward(self, rows, out_RD, sizes, keep, alloc)

    def backward_inputs(
        self, rows_RD: Tensor, scale_RB: Tensor | None, h_RG: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of ``ExpertForward.saved`` in ``dtype``, and h_RG; None if ``backward`` recomputes it."""
        if scale_RB is None:
            return rows_RD, h_RG
        rows = ScaledRows(rows_RD, scale_RB)
        if h_RG is None:
            w13_EGD, _, b13_EG, _ = self.tensors
            assert w13_EGD is not None
            h_RG = torch.empty(rows_RD.shape[0], w13_EGD.shape[1], dtype=dtype, device=w13_EGD.device)
            _QuantizedLinear(w13_EGD, b13_EG)(rows, _ALL, sizes, h_RG)
        return rows.dequantized(dtype), h_RG

    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        return MLPBackward(self, inputs)


class MLPForward(ExpertForward):
    """The forward pass of ``ExpertMLP`` in the dtype of the rows. ``low_rank.py`` overrides both GEMMs."""

    def __init__(self, mlp: ExpertMLP, rows_RD: Tensor, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> None:
        w13_EGD, w2_EDF, b13_EG, b2_ED = mlp.tensors
        assert w13_EGD is not None
        assert w2_EDF is not None
        experts, width_h, _ = w13_EGD.shape
        dtype, device, largest = rows_RD.dtype, rows_RD.device, max(sizes, default=0)
        self._activation, self._sizes, self._rows_RD, self._out_RD = mlp.activation, sizes, rows_RD, out_RD
        self._h_RG = alloc(rows_RD.shape[0] if keep else largest, width_h, dtype, device)
        self._keep = keep
        self.saved = rows_RD, None, self._h_RG if keep else None
        self._act_RF = alloc(largest, w2_EDF.shape[2], dtype, device)
        self._aligned = are_aligned(rows_RD, w13_EGD, w2_EDF, self._h_RG, self._act_RF, out_RD)
        self._w13, self._w2 = w13_EGD.unbind(0), w2_EDF.unbind(0)
        self._only_weights = b13_EG is None and b2_ED is None
        self._b13 = [None] * experts if b13_EG is None else b13_EG.unbind(0)
        self._b2 = [None] * experts if b2_ED is None else b2_ED.unbind(0)

    def row_range(self, expert: int, rows: slice) -> None:
        h = self._h_RG[rows] if self._keep else self._h_RG[: rows.stop - rows.start]
        self._run(expert, self._rows_RD[rows], h, self._out_RD[rows])

    def all_rows(self) -> None:
        saved = self._h_RG.split(self._sizes) if self._keep else None
        out, act_RF = self._out_RD.split(self._sizes), self._act_RF
        # What ``expert_mm`` decides for each GEMM is equal for all experts with enough rows.
        whole = (
            self._aligned
            and self._only_weights
            and not (self._w2 and is_small(MIN_ROWS, self._w2[0]))
            and not (self._rows_RD.shape[1] % TILE or act_RF.shape[1] % TILE or self._h_RG.shape[1] % TILE)
        )
        for expert, rows_rD in enumerate(self._rows_RD.split(self._sizes)):
            size = self._sizes[expert]
            h_rG = self._h_RG[:size] if saved is None else saved[expert]
            if whole and size >= MIN_ROWS:
                torch.mm(rows_rD, self._w13[expert].t(), out=h_rG)
                self._activation.forward(h_rG, act_RF[:size])
                torch.mm(act_RF[:size], self._w2[expert].t(), out=out[expert])
            elif size:
                self._run(expert, rows_rD, h_rG, out[expert])

    def _run(self, e: int, rows_rD: Tensor, h_rG: Tensor, out_rD: Tensor) -> None:
        act_rF, w13_GD, w2_DF = self._act_RF[: rows_rD.shape[0]], self._w13[e], self._w2[e]
        if not self._aligned:
            rows_rD, w13_GD, w2_DF = aligned(rows_rD), aligned(w13_GD), aligned(w2_DF)
        self._up(e, rows_rD, w13_GD, h_rG)
        self._activation.forward(h_rG, act_rF)
        self._down(e, act_rF, w2_DF, out_rD)

    def _up(self, e: int, rows_rD: Tensor, w13_GD: Tensor, h_rG: Tensor) -> None:
        expert_mm(rows_rD, w13_GD.t(), h_rG, self._b13[e])

    def _down(self, e: int, act_rF: Tensor, w2_DF: Tensor, out_rD: Tensor) -> None:
        expert_mm(act_rF, w2_DF.t(), out_rD, self._b2[e])


class _QuantizedLinear:
    """Weights [E, N, K], quantized, and biases [E, N] or None."""

    def __init__(self, w_ENK: Tensor, bias_EN: Tensor | None) -> None:
        self.columns = w_ENK.shape[1]
        self._values_ENK, self._scale_ECB = quantize_weights(w_ENK)
        self._bias_EN = bias_EN

    def __call__(self, rows: ScaledRows, experts: slice, sizes: Sequence[int], out_RN: Tensor) -> None:
        """Write the products of the rows of ``experts``. sizes: rows of each of them."""
        scaled_grouped_mm_into(rows, (self._values_ENK[experts], self._scale_ECB[experts]), sizes, out_RN)
        if self._bias_EN is not None:
            for bias_N, of_expert in zip(self._bias_EN[experts].unbind(0), out_RN.split(tuple(sizes)), strict=True):
                of_expert += bias_N


class _Fp8Forward(ExpertForward):
    def __init__(self, mlp: ExpertMLP, rows: ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool) -> None:
        w13_EGD, w2_EDF, b13_EG, b2_ED = mlp.tensors
        assert w13_EGD is not None
        assert w2_EDF is not None
        self._activation, self._width, self._sizes = mlp.activation, w2_EDF.shape[2], sizes
        self._rows, self._out_RD = rows, out_RD
        self._first, self._last = _QuantizedLinear(w13_EGD, b13_EG), _QuantizedLinear(w2_EDF, b2_ED)
        self._saved_RG = self._new_h(out_RD.shape[0]) if keep else None
        self.saved = rows.values_RD, rows.scale_RB, self._saved_RG

    def row_range(self, expert: int, rows: slice) -> None:
        self._run(slice(expert, expert + 1), (rows.stop - rows.start,), rows)

    def all_rows(self) -> None:
        self._run(_ALL, self._sizes, _ALL)

    def _run(self, experts: slice, sizes: Sequence[int], rows: slice) -> None:
        out_rD = self._out_RD[rows]
        h_rG = self._new_h(out_rD.shape[0]) if self._saved_RG is None else self._saved_RG[rows]
        self._first(self._rows[rows], experts, sizes, h_rG)
        self._last(_activated(self._activation, h_rG, self._width), experts, sizes, out_rD)

    def _new_h(self, num_rows: int) -> Tensor:
        return self._out_RD.new_empty(num_rows, self._first.columns)


def _activated(activation: Activation, h_RG: Tensor, width: int) -> ScaledRows:
    if isinstance(activation, SwiGLU) and for_triton(h_RG):
        from moe_comm.kernels.triton.quantize import swiglu_quantize  # needs Triton

        return of_packed(swiglu_quantize(h_RG), width)
    act_RF = h_RG.new_empty(h_RG.shape[0], width)
    activation.forward(h_RG, act_RF)
    return quantize_rows(act_RF)


class MLPBackward(ExpertBackward):
    """The backward pass of ``ExpertMLP``. ``low_rank.py`` overrides the GEMMs."""

    def __init__(self, mlp: ExpertMLP, inputs: BackwardInputs) -> None:
        super().__init__(inputs.sizes)
        w13_EGD, w2_EDF, b13_EG, _ = mlp.tensors
        assert w13_EGD is not None
        assert w2_EDF is not None
        rows_RD, alloc = inputs.rows_RD, inputs.alloc
        dtype, device = rows_RD.dtype, rows_RD.device
        self._activation, self._per_expert = mlp.activation, inputs.per_expert
        self._rows_RD, self._saved_RG, self._grad_RD = rows_RD, inputs.saved_RG, inputs.grad_RD
        self._grad_rows_RD, self._weights = inputs.grad_rows_RD, inputs.needs_weights
        # False if only w2 and b2 need gradients.
        self._needs_grad_h = self._grad_rows_RD is not None or self._weights[0] or self._weights[2]
        self._needs_act = self._weights[1]
        buffer_rows = max(inputs.sizes, default=0) if inputs.per_expert else rows_RD.shape[0]
        self._act_RF = alloc(buffer_rows, w2_EDF.shape[2], dtype, device)
        self._grad_h_RG = alloc(buffer_rows, w13_EGD.shape[1], dtype, device)
        self._aligned = are_aligned(rows_RD, self._grad_RD, w13_EGD, w2_EDF, self._act_RF, self._grad_h_RG)
        self._w13, self._w2 = w13_EGD.unbind(0), w2_EDF.unbind(0)
        (self._b13,) = by_expert((b13_EG,), len(inputs.sizes))

    def row_range(self, expert: int, rows: slice) -> None:
        local = slice(0, rows.stop - rows.start) if self._per_expert else rows
        act, grad_h, grad = self._act_RF[local], self._grad_h_RG[local], self._grad_RD[rows]
        w13, w2 = self._w13[expert], self._w2[expert]
        if not self._aligned:
            grad, w13, w2 = aligned(grad), aligned(w13), aligned(w2)
        if self._saved_RG is not None:
            h = self._saved_RG[rows]
        else:
            h = grad_h  # h shares the buffer: grad_h is written after h has been read
            self._up(expert, aligned(self._rows_RD[rows]), w13, h)
        if self._needs_grad_h:
            self._back_down(expert, grad, w2, act, local)
            # ``act`` contains the gradient of the activation, which is read before the activation overwrites it.
            self._activation.backward(h, act, grad_h, act)
        elif self._needs_act:
            self._activation.forward(h, act)
        if self._grad_rows_RD is not None:
            grad_h = grad_h if self._aligned else aligned(grad_h)
            self._back_up(expert, grad_h, w13, self._grad_rows_RD[rows], local)

    def _up(self, e: int, rows_rD: Tensor, w13_GD: Tensor, h_rG: Tensor) -> None:
        expert_mm(rows_rD, w13_GD.t(), h_rG, self._b13[e])

    def _back_down(self, e: int, grad_rD: Tensor, w2_DF: Tensor, act_rF: Tensor, local: slice) -> None:
        """Write the gradient of the activation. local: the rows in the buffers of this pass."""
        expert_mm(grad_rD, w2_DF, act_rF)

    def _back_up(self, e: int, grad_h_rG: Tensor, w13_GD: Tensor, grad_rows_rD: Tensor, local: slice) -> None:
        expert_mm(grad_h_rG, w13_GD, grad_rows_rD)

    def weights_of(self, expert: int, into: Sequence[Tensor | None]) -> None:
        w13, w2, b13, b2 = into
        size = self._sizes[expert]
        if not size:
            for empty in into:
                if empty is not None:
                    empty.zero_()
            return
        rows = self._rows_of(expert)
        local = slice(0, size) if self._per_expert else rows
        rows_rD, grad = self._rows_RD[rows], self._grad_RD[rows]
        grad_h, act = self._grad_h_RG[local], self._act_RF[local]
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


@dataclass(frozen=True, eq=False)
class ExpertLinear(LocalExperts):
    """rows @ w[e].T. tensors: w [E, G, D]."""

    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> ExpertLinear:
        return ExpertLinear(tuple(tensors))

    @property
    def columns(self) -> int:
        return int(self.tensors[0].shape[1])  # type: ignore[union-attr]

    def forward(
        self, rows: Tensor | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
    ) -> ExpertForward:
        return _LinearForward(self.tensors[0], rows, out_RD, sizes)  # type: ignore[arg-type]

    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        return _LinearBackward(self.tensors[0], inputs)  # type: ignore[arg-type]


class _LinearForward(ExpertForward):
    def __init__(self, w_EGD: Tensor, rows_RD: Tensor, out_RG: Tensor, sizes: Sizes) -> None:
        self._rows_RD, self._out_RG, self._sizes = rows_RD, out_RG, sizes
        self.saved = rows_RD, None, None
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
    def __init__(self, w_EGD: Tensor, inputs: BackwardInputs) -> None:
        super().__init__(inputs.sizes)
        self._rows_RD, self._grad_RG, self._grad_rows_RD = inputs.rows_RD, inputs.grad_RD, inputs.grad_rows_RD
        self._w = w_EGD.unbind(0)

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
        rows = self._rows_of(expert)
        product_into(aligned(self._grad_RG[rows]).t(), aligned(self._rows_RD[rows]), into_GD)


def by_expert(tensors: Sequence[Tensor | None], num_experts: int) -> list[Sequence[Tensor | None]]:
    """Return the views of the experts of each tensor; Nones for a tensor that is None."""
    return [[None] * num_experts if t is None else t.unbind(0) for t in tensors]
