"""Run the experts that a module of transformers holds, on rows that are already grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.integrations.hugging_face.families import ExpertsLayout
from moe_comm.kernels.autocast import compute_dtype, without_autocast
from moe_comm.layers.grouped_mlp import grouped_mlp
from moe_comm.overlap.experts import MLPWeights
from moe_comm.runtime.memory import Alloc


def expert_input(x_TD: Tensor, weight: Tensor) -> Tensor:
    """``x_TD`` in the dtype that experts compute in, so that no wider rows are sent than they read."""
    return x_TD.to(compute_dtype(x_TD) if torch.is_autocast_enabled(x_TD.device.type) else weight.dtype)


def run_experts(
    layout: ExpertsLayout, weights: Any, rows_RD: Tensor, rows_per_expert: Sequence[int], alloc: Alloc
) -> Tensor:
    """Each expert's MLP on its own rows.

    Args:
        layout: how ``weights`` are stored; the number of experts is that of the weights, not of the layout.
        weights: whatever has the parameters of ``layout`` as attributes, as local tensors.
        rows_RD: [R, D] expert after expert, as dispatch gives them.
        rows_per_expert: one count for each expert of ``weights``.
        alloc: where output and gradients of rows are taken from; ``Dispatcher.empty_rows`` spares combine a copy.

    Returns:
        [R, D] in the dtype of ``rows_RD``.
    """
    found = mlp_weights(layout, weights, rows_RD)
    with without_autocast(rows_RD):
        return grouped_mlp(rows_RD, rows_per_expert, *found.tensors, found.activation, alloc)


def mlp_weights(layout: ExpertsLayout, weights: Any, rows: Tensor) -> MLPWeights:
    """The parameters of ``layout`` that ``weights`` has, as products with ``rows`` take them."""
    cast = {name: getattr(weights, name).to(rows.dtype) for name in layout.parameters}
    w13, w2 = cast["gate_up_proj"], cast["down_proj"]
    if layout.transposed:
        # Views: the products take any strides, and the gradients come back in transformers' own layout.
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return MLPWeights(w13, w2, cast.get("gate_up_proj_bias"), cast.get("down_proj_bias"), layout.activation)
