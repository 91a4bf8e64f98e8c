"""The forward pass of ``ExpertMLP`` with fp8 GEMMs: e4m3 operands, fp32 sums, results in the dtype of the rows.

    rows (values, scales) ──w13──▶ h_RG ──activation──▶ (values, scales) ──w2──▶ out_RD

Weights are quantized in blocks of 128 x 128, once per pass, because they change between passes. The activation is first
rounded to the dtype of ``h_RG`` and then quantized per 128 channels. On CPUs, the bits of a row do not depend on the
other rows of its range. Backward uses the other modules: its GEMMs are in the dtype of the rows, on dequantized rows,
``h_RG`` and the weights before quantization. So rounding to e4m3 has the gradient of the identity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.kernels.activations import Activation, SwiGLU
from moe_comm.kernels.expert_mlp import Alloc, ExpertForward, ExpertMLP, LocalExperts, Sizes
from moe_comm.kernels.fp8 import ScaledRows, of_packed, quantize_rows, quantize_weights, scaled_grouped_mm_into
from moe_comm.kernels.native import for_triton

ALL = slice(None)


def forward_pass(
    experts: LocalExperts, rows: Tensor | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc
) -> ExpertForward:
    """Return ``LocalExperts.forward`` of rows, or of an ``ExpertMLP`` with fp8 GEMMs for scaled rows."""
    if not isinstance(rows, ScaledRows):
        return experts.forward(rows, out_RD, sizes, keep, alloc)
    assert isinstance(experts, ExpertMLP)
    return _Fp8Forward(experts, rows, out_RD, sizes, keep)


def backward_inputs(
    mlp: ExpertMLP, rows: ScaledRows, saved_RG: Tensor | None, sizes: Sizes, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the dequantized rows in ``dtype``, and h_RG, which is computed again if it was not saved."""
    if saved_RG is None:
        w13_EGD, _, b13_EG, _ = mlp.tensors
        assert w13_EGD is not None
        saved_RG = torch.empty(rows.values_RD.shape[0], w13_EGD.shape[1], dtype=dtype, device=w13_EGD.device)
        _Linear(w13_EGD, b13_EG)(rows, ALL, sizes, saved_RG)
    return rows.dequantized(dtype), saved_RG


class _Linear:
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
        self._first, self._last = _Linear(w13_EGD, b13_EG), _Linear(w2_EDF, b2_ED)
        self.saved_RG = self._new_h(out_RD.shape[0]) if keep else None

    def row_range(self, expert: int, rows: slice) -> None:
        self._run(slice(expert, expert + 1), (rows.stop - rows.start,), rows)

    def all_rows(self) -> None:
        self._run(ALL, self._sizes, ALL)

    def _run(self, experts: slice, sizes: Sequence[int], rows: slice) -> None:
        out_rD = self._out_RD[rows]
        h_rG = self._new_h(out_rD.shape[0]) if self.saved_RG is None else self.saved_RG[rows]
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
