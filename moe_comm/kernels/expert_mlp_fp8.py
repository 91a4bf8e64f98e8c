"""The forward pass of ``ExpertMLP`` with fp8 GEMMs: e4m3 operands, fp32 sums, results in the dtype of the rows.

    rows (values, scales) ──w13──▶ h_RG ──activation──▶ (values, scales) ──w2──▶ out_RD

Weights are quantized in blocks of 128 x 128 in every call, because they change between calls. The activation is first
rounded to the dtype of ``h_RG`` and then quantized per 128 channels. Backward uses the other modules: its GEMMs are in
the dtype of the rows, on dequantized rows, ``h_RG`` and the weights before quantization. So rounding to e4m3 has the
gradient of the identity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.kernels.activations import Activation, SwiGLU
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.fp8 import ScaledRows, of_packed, quantize_rows, quantize_weights, scaled_grouped_mm_into
from moe_comm.kernels.native import for_triton


def hidden_rows(mlp: ExpertMLP, rows: ScaledRows, rows_per_expert: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return h_RG of ``dtype``, the input of the activation. Backward calls it again if it was not saved."""
    w13_EGD, _, b13_EG, _ = mlp.tensors
    assert w13_EGD is not None
    h_RG = torch.empty(rows.values_RD.shape[0], w13_EGD.shape[1], dtype=dtype, device=w13_EGD.device)
    _product(rows, w13_EGD, b13_EG, rows_per_expert, h_RG)
    return h_RG


def forward(mlp: ExpertMLP, rows: ScaledRows, rows_per_expert: Sequence[int], out_RD: Tensor) -> Tensor:
    """Write the experts' output into ``out_RD``, in its dtype. Returns h_RG, for backward."""
    _, w2_EDF, _, b2_ED = mlp.tensors
    assert w2_EDF is not None
    h_RG = hidden_rows(mlp, rows, rows_per_expert, out_RD.dtype)
    _product(_activated(mlp.activation, h_RG, w2_EDF.shape[2]), w2_EDF, b2_ED, rows_per_expert, out_RD)
    return h_RG


def _product(
    rows: ScaledRows, w_ENK: Tensor, bias_EN: Tensor | None, rows_per_expert: Sequence[int], out_RN: Tensor
) -> None:
    scaled_grouped_mm_into(rows, quantize_weights(w_ENK), rows_per_expert, out_RN)
    if bias_EN is not None:
        for bias_N, of_expert in zip(bias_EN.unbind(0), out_RN.split(tuple(rows_per_expert)), strict=True):
            of_expert += bias_N


def _activated(activation: Activation, h_RG: Tensor, width: int) -> ScaledRows:
    if isinstance(activation, SwiGLU) and for_triton(h_RG):
        from moe_comm.kernels.triton.quantize import swiglu_quantize  # needs Triton

        return of_packed(swiglu_quantize(h_RG), width)
    act_RF = h_RG.new_empty(h_RG.shape[0], width)
    activation.forward(h_RG, act_RF)
    return quantize_rows(act_RF)
