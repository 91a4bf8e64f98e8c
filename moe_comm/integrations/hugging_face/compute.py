"""One expert-parallel call of the experts that a module of transformers holds: what its three entry points share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import INVALID_LOGITS
from moe_comm.integrations.hugging_face.families import ExpertsLayout
from moe_comm.kernels.autocast import compute_dtype, without_autocast
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.options import Overlap


def expert_input(x_TD: Tensor, weight: Tensor) -> Tensor:
    """``x_TD`` in the dtype that experts compute in, so that no wider rows are sent than they read."""
    return x_TD.to(compute_dtype(x_TD) if torch.is_autocast_enabled(x_TD.device.type) else weight.dtype)


def expert_layer(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    run: Callable[[ExpertCall], Tensor],
    overlap: Overlap | None = None,
    *,
    width: int = 0,
    label: str = "",
) -> Tensor:
    """[T, D] every token's weighted sum over its experts, wherever they are. Collective over the dispatcher's group.

    Args:
        x_TD: [T, D] tokens in the dtype of the experts. ids_TK: [T, K] global ids of the dispatcher's experts; -1 drops
            a slot. weights_TK: [T, K] routing weights, any floating dtype.
        run: computes the rows of the call; autocast is off.
        overlap, width, label: see ``dispatch_rows``. With ``overlap``, ``run`` must be ``ExpertCall.compute``.

    Raises:
        RoutingError: on every rank, if on any rank a token's weights are NaN or infinite, or ids are out of range.
    """
    call = dispatch_rows(
        dispatcher, x_TD, mark_invalid(ids_TK, weights_TK), weights_TK, overlap, width=width, label=label
    )
    with call.abort_on_error(), without_autocast(x_TD):
        rows = run(call)
    return call.combine(rows)


def mark_invalid(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """``ids_TK`` with the ids of tokens whose weights are NaN or infinite replaced by ``INVALID_LOGITS``.

    Routers of transformers turn NaN logits into ids that are in range and weights that are NaN; only the weights tell.
    """
    finite_T = torch.isfinite(weights_TK.detach()).all(dim=1, keepdim=True)
    return torch.where(finite_T, ids_TK, INVALID_LOGITS)


def run_experts(layout: ExpertsLayout, weights: Any, call: ExpertCall) -> Tensor:
    """Run the experts that ``weights`` holds on the rows of ``call``.

    Args:
        layout: how ``weights`` are stored; the number of experts is that of the weights, not of the layout.
        weights: whatever has the parameters of ``layout`` as attributes, as local tensors.
    """
    return call.compute(call.rows, call.handle.rows_per_expert, expert_mlp(layout, weights, call.rows))


def expert_mlp(layout: ExpertsLayout, weights: Any, rows: Tensor) -> ExpertMLP:
    """The parameters of ``layout`` that ``weights`` has, as products with ``rows`` take them."""
    cast = {name: getattr(weights, name).to(rows.dtype) for name in layout.parameters}
    w13, w2 = cast["gate_up_proj"], cast["down_proj"]
    if layout.transposed:
        # Views: the products take any strides, and the gradients come back in transformers' own layout.
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return ExpertMLP((w13, w2, cast.get("gate_up_proj_bias"), cast.get("down_proj_bias")), layout.activation)
