"""A copy of an expert-parallel layer in which each rank holds every expert.

    rank 0: experts.w13 [4, 2F, D]  ┐
    rank 1: experts.w13 [3, 2F, D]  ┴──single_rank_copy──▶  experts.w13 [7, 2F, D] on every rank

State dicts of expert-parallel modules are in ``layers.data_parallel.state``.
"""

from __future__ import annotations

import copy

import torch

from moe_comm.dispatch.selection.factory import new_dispatcher
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.state import gather_state_dict
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import Router


def single_rank_copy(layer: MoELayer, dtype: torch.dtype | None = None) -> MoELayer:
    """Return a copy of ``layer`` in which this rank holds all experts. Collective over the layer's group.

    Args:
        dtype: dtype of the copy; None: the layer's.

    Raises:
        ConfigError: the layer does not consist of this library's router and experts.
    """
    router, experts = layer.router, layer.experts
    if not isinstance(router, Router) or not isinstance(experts, Experts):
        raise ConfigError(
            f"expected a layer of Router and Experts; got {type(router).__name__} and {type(experts).__name__}"
        )
    state = gather_state_dict(layer)
    w13 = experts.w13
    all_experts = Experts(
        layer.num_experts,
        experts.hidden,
        experts.ffn,
        experts.activation,
        bias=experts.b13 is not None,
        transposed=experts.transposed,
        dtype=w13.dtype,
        device=w13.device,
    )
    all_experts.recompute, all_experts.gemm_dtype = experts.recompute, experts.gemm_dtype
    single_router = Router(router.hidden, router.config, None, dtype=router.weight.dtype, device=router.weight.device)
    copied = MoELayer(
        single_router,
        all_experts,
        new_dispatcher(layer.num_experts, options=layer.dispatcher.options),
        copy.deepcopy(layer.shared),
        capacity=layer.capacity,
        label=layer.label,
    )
    copied.load_state_dict(state)
    copied.train(layer.training)
    return copied if dtype is None else copied.to(dtype)
