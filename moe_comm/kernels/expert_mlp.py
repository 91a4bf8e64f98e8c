"""The MLPs of one rank's experts, by row range: forward, backward and weight gradients, without autograd.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

All executors (``overlap/executors``) call this code, with all rows at once or row range by row range as they are
received. On the CPU, the bits of a row do not depend on how its expert's rows are split into ranges (``cpu_gemm.py``).
The gradient of a weight is a sum over all rows of its expert.

With ``gemm_dtype="fp8"`` the operands of the forward GEMMs are e4m3 (``fp8.py``). Rows are the bytes that dispatch
received, or quantized here:

    rows e4m3 ──w13 e4m3──▶ h_RG ──activation──▶ act ──quantize──▶ act e4m3 ──w2 e4m3──▶ out_RD

h_RG, the activation and out_RD are in the dtype of the rows. Weights are quantized once per pass. All rows are one
launch per GEMM on a GPU. Backward uses the dequantized rows and the weights before quantization, in the dtype of the
rows, so rounding to e4m3 has the gradient of the identity.

Experts of other ranks that are read in place are not in the stacks (``others``). Each has GEMMs of its own.

In suffixes, R is all rows of this rank and r the rows of one range. ``ExpertMLP`` is two GEMMs and the activation;
``ExpertLinear`` is one GEMM. Both save ``rows_RD`` for backward and, without recompute, ``h_RG``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.activations import Activation, SwiGLU
from moe_comm.kernels.cpu_gemm import ExpertWeights, GradientBuffers, SwigluExperts, weight_gradients
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
from moe_comm.kernels.row_weights import lane_dot, scale, scale_
from moe_comm.kernels.token_rows import Rows, TokenRows
from moe_comm.runtime.memory import warm_like

Alloc = Callable[[int, int, torch.dtype, torch.device], Tensor]
"""Maps (rows, width, dtype, device) to an uninitialized [rows, width] tensor."""
Sizes = tuple[int, ...]
Saved = tuple[Rows, Tensor | None, Tensor | None]
"""Rows of a forward pass, or their e4m3 values and scales; and h_RG, or None."""
Gradients = Sequence[Tensor | None]
"""Of each of ``LocalExperts.tensors``, [E, ...]; None for those that are not needed."""
BATCH_ROWS = 256
"""Experts with up to this many rows together are computed at once."""


class Part(NamedTuple):
    """Rows of a pass: all rows of some experts, or a range of rows of one.

    expert: the first expert. sizes: rows of it and of each of those that follow. first: index of the first row among
    those of its expert.
    """

    expert: int
    sizes: Sizes
    rows: slice
    first: int = 0

    @property
    def experts(self) -> slice:
        return slice(self.expert, self.expert + len(self.sizes))


class _Pass(ABC):
    """The rows of a pass, sorted by expert."""

    def __init__(self, sizes: Sizes, batch_rows: float = BATCH_ROWS, alone: Collection[int] = ()) -> None:
        self._sizes, self._starts, self._alone = sizes, [0, *accumulate(sizes)], alone
        self._batches = self._split(batch_rows)
        self._most_rows = max((part.rows.stop - part.rows.start for part in self._batches), default=0)

    def _split(self, most_rows: float = inf) -> list[Part]:
        """Return parts of one expert, or of at most ``most_rows``. Experts that are ``alone`` have their own part."""
        first, parts, sizes, alone = 0, list[Part](), self._sizes, self._alone
        for expert in range(1, len(sizes) + 1):
            full = expert == len(sizes) or self._starts[expert + 1] - self._starts[first] > most_rows
            if full or expert in alone or first in alone:
                parts.append(self._part(slice(first, expert)))
                first = expert
        return parts

    def _part(self, experts: slice) -> Part:
        rows = slice(self._starts[experts.start], self._starts[experts.stop])
        return Part(experts.start, self._sizes[experts], rows)

    def row_range(self, expert: int, rows: slice) -> None:
        """Compute ``rows``, all of local expert ``expert``."""
        self._compute(Part(expert, (rows.stop - rows.start,), rows, rows.start - self._starts[expert]))

    @abstractmethod
    def _compute(self, part: Part) -> None:
        """Compute the rows of ``part``."""


class ExpertForward(_Pass):
    """One forward pass over rows that are sorted by expert.

    Attributes:
        saved: what backward needs.
    """

    saved: Saved

    def all_rows(self) -> None:
        """Compute the output of all rows."""
        for part in self._batches:
            if part.rows.stop > part.rows.start:
                self._compute(part)


class ExpertBackward(_Pass):
    """One backward pass. Call ``row_range`` for all rows of an expert, then ``weights_of`` it; or call ``all_rows``.

    ``row_range`` computes the gradient of rows, and keeps the operands of their weight gradients.
    """

    def weights_of(self, expert: int, grads: Sequence[Tensor | None]) -> None:
        """Write the gradients of an expert's tensors, after all its rows are computed; zeros for an expert without
        rows.

        Args:
            grads: Gradients of all experts for each of ``LocalExperts.tensors``; None if they are not needed.
        """
        self._weights(self._part(slice(expert, expert + 1)), grads)

    def all_rows(self, grads: Sequence[Tensor | None]) -> None:
        """Compute all gradients. grads: as of ``weights_of``."""
        for part in self._batches:
            if part.rows.stop > part.rows.start:
                self._compute(part)
            self._weights(part, grads)

    @abstractmethod
    def _weights(self, part: Part, grads: Sequence[Tensor | None]) -> None:
        """Write the gradients of the tensors of the experts of ``part``, which has all their rows."""


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Inputs and outputs of a backward pass.

    rows_RD, saved_RG, grad_RD: rows and saved tensor of the forward pass, and the gradient of its output.
    weights_R: routing weights (wide) by which the output is multiplied outside; ``grad_RD`` is the gradient of the
        product. None: of the output. Only ``ExpertMLP`` takes them.
    dots_R: output for the gradient of ``weights_R`` (wide); None if it is not needed.
    sizes: rows of each expert.
    grad_rows_RD: output for the gradient of the rows; None if it is not needed.
    needs_weights: which of ``LocalExperts.tensors`` need a gradient, now or in a later call of ``weights_of``.
    at_once: only ``all_rows`` is called, so scratch buffers have the size of one batch of experts.
    """

    rows_RD: Rows
    saved_RG: Tensor | None
    grad_RD: Rows
    sizes: Sizes
    grad_rows_RD: Tensor | None
    needs_weights: tuple[bool, ...]
    alloc: Alloc
    at_once: bool
    weights_R: Tensor | None = None
    dots_R: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LocalExperts(ABC):
    """The experts of one rank, with stacked weights.

    tensors: parameters in the dtype of the rows, any strides, or None; empty if only the settings are stored.
    """

    tensors: tuple[Any, ...]

    def with_tensors(self, tensors: Sequence[Tensor | None] = ()) -> Self:
        """Return the same settings with other parameters."""
        result = object.__new__(type(self))  # the constructor takes longer
        result.__dict__.update(self.__dict__, tensors=tuple(tensors))
        return result

    @property
    @abstractmethod
    def columns(self) -> int:
        """Width of the output."""

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return int(self.tensors[0].shape[0])

    @property
    def device(self) -> torch.device:
        """Device of the rows that the experts take."""
        return self.tensors[0].device  # type: ignore[no-any-return]

    def new_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return outputs for the gradients of ``tensors``; None for those that are not needed."""
        pairs = zip(self.tensors, needed, strict=True)
        return [warm_like(t) if t is not None and is_needed else None for t, is_needed in pairs]

    def for_autograd(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what autograd gets of the results of ``new_gradients``."""
        return list(grads)

    @abstractmethod
    def forward(self, rows: Rows | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        """Return a forward pass from ``rows``, which may still be in flight, to ``out_RD``. keep: save h_RG for
        backward, unless it is recomputed."""

    def backward_inputs(
        self, rows_RD: Tensor, scale_RB: Tensor | None, h_RG: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of ``ExpertForward.saved`` in ``dtype``, and h_RG; None if ``backward`` recomputes it."""
        return rows_RD, h_RG

    @abstractmethod
    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        """Return a backward pass."""


@dataclass(frozen=True, eq=False)
class ExpertMLP(LocalExperts):
    """activation(rows @ w13[e].T + b13[e]) @ w2[e].T + b2[e].

    tensors: w13 [E, G, D], w2 [E, D, F], b13 [E, G] or None, b2 [E, D] or None.
    recompute: save only the rows for backward, which then needs one more GEMM.
    gemm_dtype: operands of the forward GEMMs.
    others: tensors [1, ...] of the experts E, E + 1, ..., which are not in the stacks; on the CPU only.
    wide: returns outputs for the gradients of the stacks and of ``others``, in the dtype of the weights or a wider one.
        None: gradients are results of autograd, and there are no ``others`` that need them.
    b2_columns: columns of b2 that ``wide`` has; None: all.
    """

    activation: Activation
    recompute: bool = False
    gemm_dtype: GemmDtype = "same"
    others: tuple[tuple[Tensor | None, ...], ...] = ()
    wide: Callable[[], tuple[Gradients, Gradients]] | None = None
    b2_columns: slice | None = None

    @property
    def num_experts(self) -> int:
        return int(self.tensors[0].shape[0]) + len(self.others)

    def weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Return w13 and w2 with their biases."""
        w13, w2, b13, b2 = self.tensors
        if not self.others:
            return ExpertWeights(w13, b13), ExpertWeights(w2, b2)
        more = [tuple(one[index] for one in self.others) for index in range(4)]
        return ExpertWeights(w13, b13, more[0], more[2]), ExpertWeights(w2, b2, more[1], more[3])

    @property
    def alone(self) -> range:
        """The experts with GEMMs of their own."""
        return range(self.num_experts - len(self.others), self.num_experts)

    def new_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        if self.wide is None or not any(needed):
            return super().new_gradients(needed)
        return [out if is_needed else None for out, is_needed in zip(self.wide()[0], needed, strict=True)]

    def for_autograd(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        return list(grads) if self.wide is None else [None] * len(grads)

    @property
    def columns(self) -> int:
        return int(self.tensors[1].shape[1])

    def check(self, rows_RD: Rows, rows_per_expert: Sequence[int]) -> None:
        """Raise InputError unless shapes and dtypes match rows [R, D] with these counts per expert."""
        hidden = self.tensors[0].shape[2]
        if len(rows_RD.shape) != 2 or rows_RD.shape[1] != hidden:
            raise InputError(f"experts of hidden size {hidden} need rows [R, {hidden}]; got {tuple(rows_RD.shape)}")
        experts = self.num_experts
        if len(rows_per_expert) != experts or sum(rows_per_expert) != rows_RD.shape[0]:
            raise InputError(
                f"rows_per_expert must hold {experts} counts that add up to {rows_RD.shape[0]} rows; "
                f"got {list(rows_per_expert)} (sum {sum(rows_per_expert)})"
            )
        self.check_weights(rows_RD)
        if self.gemm_dtype == "fp8" and rows_RD.shape[1] % BLOCK:
            raise InputError(f"experts with fp8 GEMMs need a multiple of {BLOCK} channels; got {rows_RD.shape[1]}")

    def check_weights(self, rows: Rows) -> None:
        """Raise InputError unless the weights match each other and the dtype of ``rows``, of any shape."""
        w13, w2, b13, b2 = self.tensors
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

    def forward(self, rows: Rows | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        keep = keep and not self.recompute
        if self.gemm_dtype == "fp8":
            assert not isinstance(rows, TokenRows)
            scaled = rows if isinstance(rows, ScaledRows) else quantize_rows(rows)
            return _Fp8Forward(self, scaled, out_RD, sizes, keep)
        assert not isinstance(rows, ScaledRows)
        return MLPForward(self, rows, out_RD, sizes, keep, alloc)

    def backward_inputs(
        self, rows_RD: Tensor, scale_RB: Tensor | None, h_RG: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        if scale_RB is None:
            return rows_RD, h_RG
        rows = ScaledRows(rows_RD, scale_RB)
        if h_RG is None:
            w13_EGD, _, b13_EG, _ = self.tensors
            h_RG = torch.empty(rows_RD.shape[0], w13_EGD.shape[1], dtype=dtype, device=w13_EGD.device)
            _QuantizedLinear(w13_EGD, b13_EG)(rows, slice(None), sizes, h_RG)
        return rows.dequantized(dtype), h_RG

    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        return MLPBackward(self, inputs)


class MLPForward(ExpertForward):
    """The forward pass of ``ExpertMLP`` in the dtype of the rows. ``low_rank.py`` extends both GEMMs.

    On the CPU, SwiGLU experts are one native call for all their rows, or for a row range.
    """

    extended: ClassVar[bool] = False
    """Whether a subclass extends the GEMMs."""

    def __init__(self, mlp: ExpertMLP, rows_RD: Rows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> None:
        super().__init__(sizes, alone=mlp.alone)
        w13_EGD, w2_EDF, _, _ = mlp.tensors
        dtype, device, rows = rows_RD.dtype, rows_RD.device, self._most_rows
        self._activation, self._rows_RD, self._out_RD, self._keep = mlp.activation, rows_RD, out_RD, keep
        self._h_RG = alloc(rows_RD.shape[0] if keep else rows, w13_EGD.shape[1], dtype, device)
        self._act_RF = alloc(rows, w2_EDF.shape[2], dtype, device)
        self.saved = rows_RD, None, self._h_RG if keep else None
        self._w13, self._w2 = mlp.weights()
        self._swiglu = None if self.extended else _swiglu_experts(mlp, self._w13, self._w2)

    def all_rows(self) -> None:
        if self._swiglu is None:
            super().all_rows()
        else:
            for part in self._split():
                self._compute(part)

    def _compute(self, part: Part) -> None:
        rows, count = part.rows, part.rows.stop - part.rows.start
        if self._swiglu is not None:
            buffers = self._h_RG[rows] if self._keep else self._h_RG, self._keep, self._act_RF
            self._swiglu.forward(self._rows_RD[rows], part.sizes, part.expert, buffers, self._out_RD[rows])
            return
        h_rG, act_rF = self._h_RG[rows] if self._keep else self._h_RG[:count], self._act_RF[:count]
        self._up(part, self._rows_RD[rows], h_rG)
        self._activation.forward(h_rG, act_rF)
        self._down(part, act_rF, self._out_RD[rows])

    def _up(self, part: Part, rows_rD: Rows, h_rG: Tensor) -> None:
        self._w13.multiply(rows_rD, h_rG, part.sizes, part.expert)

    def _down(self, part: Part, act_rF: Tensor, out_rD: Tensor) -> None:
        self._w2.multiply(act_rF, out_rD, part.sizes, part.expert)


def _swiglu_experts(mlp: ExpertMLP, w13: ExpertWeights, w2: ExpertWeights) -> SwigluExperts | None:
    """Return what computes the experts in native calls; None if GEMMs and activation are separate calls."""
    if not isinstance(mlp.activation, SwiGLU):
        return None
    experts = SwigluExperts(w13, w2)
    return experts if experts.is_native else None


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
        super().__init__(sizes, inf)
        self._activation, self._width = mlp.activation, w2_EDF.shape[2]
        self._rows, self._out_RD = rows, out_RD
        self._first, self._last = _QuantizedLinear(w13_EGD, b13_EG), _QuantizedLinear(w2_EDF, b2_ED)
        self._saved_RG = self._new_h(out_RD.shape[0]) if keep else None
        self.saved = rows.values_RD, rows.scale_RB, self._saved_RG

    def _compute(self, part: Part) -> None:
        out_rD = self._out_RD[part.rows]
        h_rG = self._new_h(out_rD.shape[0]) if self._saved_RG is None else self._saved_RG[part.rows]
        self._first(self._rows[part.rows], part.experts, part.sizes, h_rG)
        self._last(_activated(self._activation, h_rG, self._width), part.experts, part.sizes, out_rD)

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
    """The backward pass of ``ExpertMLP``. ``low_rank.py`` extends the GEMMs.

    The gradient of a row's routing weight is the dot product of its output and ``grad``. The output is not kept:

        dot(act @ w2.T + b2, grad) = dot(act, grad @ w2) + dot(b2, grad)        each in the order of ``row_weights.py``

    Rows are multiplied by their weights only after that: the gradient of h, and act for the gradient of w2.
    """

    extended: ClassVar[bool] = False
    """Whether a subclass extends the GEMMs."""

    def __init__(self, mlp: ExpertMLP, inputs: BackwardInputs) -> None:
        super().__init__(inputs.sizes, alone=mlp.alone)
        w13_EGD, w2_EDF, _, self._b2_ED = mlp.tensors
        rows_RD, alloc = inputs.rows_RD, inputs.alloc
        dtype, device = rows_RD.dtype, rows_RD.device
        self._activation, self._at_once = mlp.activation, inputs.at_once
        self._rows_RD, self._saved_RG, self._grad_RD = rows_RD, inputs.saved_RG, inputs.grad_RD
        self._grad_rows_RD, needs = inputs.grad_rows_RD, inputs.needs_weights
        self._weights_R, self._dots_R = inputs.weights_R, inputs.dots_R
        # False if only w2 and b2 need gradients.
        self._needs_grad_h = self._grad_rows_RD is not None or needs[0] or needs[2] or self._dots_R is not None
        self._needs_act = needs[1]
        buffer_rows = self._most_rows if inputs.at_once else rows_RD.shape[0]
        self._act_RF = alloc(buffer_rows, w2_EDF.shape[2], dtype, device)
        self._w13, self._w2 = mlp.weights()
        self._w13_back, self._w2_back = self._w13.transposed, self._w2.transposed
        biases = mlp.tensors[2] is not None or self._b2_ED is not None
        separate = self.extended or biases or not self._needs_grad_h
        self._swiglu = None if separate else _swiglu_experts(mlp, self._w13, self._w2)
        if self._weights_R is not None and self._swiglu is None:
            self._grad_act_RF = alloc(self._most_rows, w2_EDF.shape[2], dtype, device)
        self._grad_of: tuple[slice, Tensor] | None = None
        self._grad_h_RG = alloc(buffer_rows, w13_EGD.shape[1], dtype, device)
        self._mlp = mlp

    def all_rows(self, grads: Sequence[Tensor | None]) -> None:
        outputs = grads[0], grads[1]
        if self._swiglu is None or any(grad is not None and 1 not in grad.stride()[1:] for grad in outputs):
            super().all_rows(grads)
            return
        for part in self._split():
            w13, w2, *_ = self._outputs(part, grads)
            self._in_native_call(self._swiglu, part, (w13, w2))

    def _in_native_call(
        self, experts: SwigluExperts, part: Part, grads: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> None:
        def of_rows(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[part.rows]

        local = slice(None) if self._at_once else part.rows
        buffers = GradientBuffers(
            of_rows(self._saved_RG),
            self._act_RF[local],
            self._grad_h_RG[local],
            self._at_once,
            of_rows(self._weights_R),
            of_rows(self._dots_R),
            of_rows(self._grad_rows_RD),
        )
        rows = self._rows_RD[part.rows], self._grad_RD[part.rows]
        experts.backward(rows, part.sizes, part.expert, buffers, grads)

    def _local(self, rows: slice) -> slice:
        """Return where the buffers of this pass have ``rows``."""
        return slice(0, rows.stop - rows.start) if self._at_once else rows

    def _compute(self, part: Part) -> None:
        if self._swiglu is not None:
            self._in_native_call(self._swiglu, part)
            return
        rows, local = part.rows, self._local(part.rows)
        act, grad_h = self._act_RF[local], self._grad_h_RG[local]
        if self._saved_RG is not None:
            h = self._saved_RG[rows]
        else:
            h = grad_h  # h shares the buffer: grad_h is written after h has been read
            self._up(part, self._rows_RD[rows], h)
        if self._weights_R is not None:
            self._weighted(part, h, act, grad_h)
        elif self._needs_grad_h:
            self._back_down(part, self._grad(rows), act, local)
            # ``act`` contains the gradient of the activation, which is read before the activation overwrites it.
            self._activation.backward(h, act, grad_h, act)
        elif self._needs_act:
            self._activation.forward(h, act)
        if self._grad_rows_RD is not None:
            self._back_up(part, grad_h, self._grad_rows_RD[rows], local)

    def _weighted(self, part: Part, h_rG: Tensor, act_rF: Tensor, grad_h_rG: Tensor) -> None:
        """Write the activation and the gradient of h, times the routing weights, and the gradient of these."""
        assert self._weights_R is not None
        weights_r, grad_rD = self._weights_R[part.rows], self._grad(part.rows)
        if not self._needs_grad_h:
            self._activation.forward(h_rG, act_rF)
            scale_(act_rF, weights_r)
            return
        grad_act_rF = self._grad_act_RF[: act_rF.shape[0]]
        self._back_down(part, grad_rD, grad_act_rF, self._local(part.rows))
        self._activation.backward(h_rG, grad_act_rF, grad_h_rG, act_rF)
        dots_r = scale_(act_rF, weights_r, None if self._dots_R is None else grad_act_rF)
        scale_(grad_h_rG, weights_r)
        if self._dots_R is not None:
            assert dots_r is not None
            if self._b2_ED is not None:
                other = part.expert - self._b2_ED.shape[0]
                b2_eD = self._b2_ED[part.experts] if other < 0 else self._mlp.others[other][3]
                assert b2_eD is not None
                biases = b2_eD.unbind(0)
                of_experts = zip(grad_rD.split(part.sizes), biases, strict=True)
                dots_r += torch.cat([lane_dot(grad, bias_D) for grad, bias_D in of_experts])
            self._dots_R[part.rows] = dots_r

    def _grad(self, rows: slice) -> Tensor:
        """Return ``grad_RD`` of ``rows``, copied once if it is read in place."""
        if isinstance(self._grad_RD, Tensor):
            return self._grad_RD[rows]
        if self._grad_of is None or self._grad_of[0] != rows:
            self._grad_of = rows, self._grad_RD[rows].dense()
        return self._grad_of[1]

    def _up(self, part: Part, rows_rD: Rows, h_rG: Tensor) -> None:
        self._w13.multiply(rows_rD, h_rG, part.sizes, part.expert)

    def _back_down(self, part: Part, grad_rD: Tensor, act_rF: Tensor, local: slice) -> None:
        """Write the gradient of the activation. local: the rows in the buffers of this pass."""
        self._w2_back.multiply(grad_rD, act_rF, part.sizes, part.expert)

    def _back_up(self, part: Part, grad_h_rG: Tensor, grad_rows_rD: Tensor, local: slice) -> None:
        self._w13_back.multiply(grad_h_rG, grad_rows_rD, part.sizes, part.expert)

    def _outputs(self, part: Part, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the outputs for the gradients of the tensors of the experts of ``part``."""
        experts, wide, stacked = part.experts, self._mlp.wide, self._mlp.alone.start
        if wide is not None and part.expert >= stacked and any(grad is not None for grad in grads):
            experts = slice(experts.start - stacked, experts.stop - stacked)
            grads = [None if grad is None else out for grad, out in zip(grads, wide()[1], strict=True)]
        return [None if grad is None else grad[experts] for grad in grads]

    def _weights(self, part: Part, grads: Sequence[Tensor | None]) -> None:
        local, sizes = self._local(part.rows), part.sizes
        w13, w2, b13, b2 = self._outputs(part, grads)
        if w2 is not None:
            weight_gradients(self._grad(part.rows), self._act_RF[local], w2, sizes)
        if b2 is not None:
            grad = self._grad(part.rows)
            if self._weights_R is not None:
                grad = scale(grad, self._weights_R[part.rows])
            columns = self._mlp.b2_columns
            _bias_gradients(grad if columns is None else grad[:, columns], b2, sizes)
        if w13 is not None:
            weight_gradients(self._grad_h_RG[local], self._rows_RD[part.rows], w13, sizes)
        if b13 is not None:
            _bias_gradients(self._grad_h_RG[local], b13, sizes)


def _bias_gradients(grad_RN: Tensor, out_EN: Tensor, sizes: Sizes) -> None:
    for grad_rN, out_N in zip(grad_RN.split(sizes), out_EN.unbind(0), strict=True):
        torch.sum(grad_rN, 0, dtype=out_N.dtype, out=out_N)


@dataclass(frozen=True, eq=False)
class ExpertLinear(LocalExperts):
    """rows @ w[e].T. tensors: w [E, G, D]."""

    @property
    def columns(self) -> int:
        return int(self.tensors[0].shape[1])

    def forward(self, rows: Rows | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        return _LinearForward(self.tensors[0], rows, out_RD, sizes)  # type: ignore[arg-type]

    def backward(self, inputs: BackwardInputs) -> ExpertBackward:
        return _LinearBackward(self.tensors[0], inputs)


class _LinearForward(ExpertForward):
    def __init__(self, w_EGD: Tensor, rows_RD: Tensor, out_RG: Tensor, sizes: Sizes) -> None:
        super().__init__(sizes, inf)
        self._rows_RD, self._out_RG, self._w = rows_RD, out_RG, ExpertWeights(w_EGD)
        self.saved = rows_RD, None, None

    def _compute(self, part: Part) -> None:
        self._w.multiply(self._rows_RD[part.rows], self._out_RG[part.rows], part.sizes, part.expert)


class _LinearBackward(ExpertBackward):
    def __init__(self, w_EGD: Tensor, inputs: BackwardInputs) -> None:
        super().__init__(inputs.sizes, inf)
        self._rows_RD, self._grad_RG, self._grad_rows_RD = inputs.rows_RD, inputs.grad_RD, inputs.grad_rows_RD
        self._w = ExpertWeights(w_EGD).transposed

    def _compute(self, part: Part) -> None:
        if self._grad_rows_RD is not None:
            self._w.multiply(self._grad_RG[part.rows], self._grad_rows_RD[part.rows], part.sizes, part.expert)

    def _weights(self, part: Part, grads: Sequence[Tensor | None]) -> None:
        (grad_EGD,) = grads
        if grad_EGD is not None:
            weight_gradients(self._grad_RG[part.rows], self._rows_RD[part.rows], grad_EGD[part.experts], part.sizes)
