"""Calls of an experts module of transformers, for ``swap_moe`` and both registries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.comm.channel import AbortOnError
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.types import INVALID_LOGITS, OnDevice
from moe_comm.kernels.activations import Composed
from moe_comm.kernels.autograd import compute_dtype
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.fp8 import GemmDtype
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.layers.moe.expert_parallel import ExpertParallel
from moe_comm.layers.moe.experts import has_hooks
from moe_comm.layers.moe.formula import ExpertsLayout
from moe_comm.runtime.memory import as_tensors


def expert_input(x_TD: Tensor, weight: Tensor) -> Tensor:
    """Cast ``x_TD`` to the compute dtype of the experts, so that rows are sent in the dtype that the experts read."""
    return x_TD.to(compute_dtype(x_TD) if torch.is_autocast_enabled(x_TD.device.type) else weight.dtype)


def start_call(
    parallel: ExpertParallel,
    experts: nn.Module,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    fp8: bool = False,
    layout: ExpertsLayout | None = None,
) -> ExpertCall:
    """Dispatch the rows of a call of an experts module; see ``ExpertParallel._start_call``. Collective.

    Args:
        layout: of the weights, if ``expert_mlp`` computes the experts; else None.

    Raises:
        RoutingError: weights are NaN or infinite, or ids are out of range, on any rank. Raised on every rank.
    """
    (x_TD, ids_TK, weights_TK), fault = as_tensors(x=x_TD, ids=ids_TK, weights=weights_TK)
    if fault is not None:
        parallel._refuse(experts, fault)
    with AbortOnError(partial(parallel._abort, experts)):
        ids_TK = mark_invalid(ids_TK, weights_TK)
    device = "" if layout is None or fp8 else on_device(layout, experts, x_TD)
    return parallel._start_call(experts, x_TD, ids_TK, weights_TK, fp8=fp8, on_device=device)


def on_device(layout: ExpertsLayout, experts: nn.Module, x_TD: Tensor) -> OnDevice:
    """Return what a GPU can compute all experts from without row counts on the CPU; see ``Experts.on_device``."""
    if x_TD.device.type not in TRITON_DEVICES:
        return ""
    tensors = (getattr(experts, name) for name in layout.parameters)
    supported = isinstance(layout.activation, Composed) and all(
        type(t) is nn.Parameter and t.dtype == x_TD.dtype and t.shape[0] > 0 and (t.dim() > 2 or t.stride(1) == 1)
        for t in tensors
    )
    if not supported:
        return ""
    return "rows" if has_hooks(experts) else "tokens"


def mark_invalid(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Replace the ids of tokens whose weights are NaN or infinite by ``INVALID_LOGITS``.

    Routers of transformers turn NaN logits into NaN weights with ids that are in range, so the ids show no error.
    """
    if ids_TK.dim() != 2 or ids_TK.shape != weights_TK.shape:
        return ids_TK  # dispatch or combine raises
    finite_T = torch.isfinite(weights_TK.detach()).all(dim=1, keepdim=True)
    return torch.where(finite_T, ids_TK, INVALID_LOGITS)


def expert_mlp(layout: ExpertsLayout, weights: Any, dtype: torch.dtype, gemm_dtype: GemmDtype = "same") -> ExpertMLP:
    """Return the experts of a module for rows of ``dtype``.

    Args:
        layout: storage layout of the weights. Its ``num_experts`` may be larger than the number of local experts.
        weights: object whose attributes are the parameters of ``layout``, as local tensors.
        gemm_dtype: see ``Experts.gemm_dtype``.
    """
    tensors = oriented(layout, {name: getattr(weights, name).to(dtype) for name in layout.parameters})
    return ExpertMLP(tensors, layout.activation, gemm_dtype=gemm_dtype)


def oriented(layout: ExpertsLayout, values: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Return views of parameters, by name, as ``ExpertMLP`` takes them; None for missing ones."""
    w13, w2 = values.get("gate_up_proj"), values.get("down_proj")
    if layout.transposed:
        # Views: the GEMMs accept any strides, and autograd returns the gradients in transformers' layout.
        w13, w2 = (None if w is None else w.transpose(1, 2) for w in (w13, w2))
    return w13, w2, values.get("gate_up_proj_bias"), values.get("down_proj_bias")
