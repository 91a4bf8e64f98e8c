"""State dicts of expert-parallel modules in their global form, as if one rank held every expert.

    rank 0: experts.w13 [4, 2F, D]  ┐  gather_state_dict      ┌ experts.w13 [7, 2F, D] on every rank
    rank 1: experts.w13 [3, 2F, D]  ┘  ◀─ load_full_state_dict └

``module.state_dict()`` itself stays local: each rank's own experts, under the same keys. See ``layers.data_parallel``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_comm.dispatch import make_dispatcher
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.state import experts_gathered, load_state_dict
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import Router


def gather_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """``module.state_dict()`` with every expert weight as [E, ...] over all experts, on every rank. Collective.

    As ``moe_comm.state_dict``, but all tensors are copies.
    """
    return {key: value.detach().clone() for key, value in experts_gathered(module, "full").items()}


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """``moe_comm.load_state_dict``: each rank takes its own experts. Not collective."""
    load_state_dict(module, state, strict=strict)


def single_rank_copy(layer: MoELayer, dtype: torch.dtype | None = None) -> MoELayer:
    """A copy of ``layer`` in which this rank holds every expert. Collective over the layer's group.

    Args:
        dtype: of the copy's weights, if another.

    Raises:
        ConfigError: the layer is not made of this library's router and experts.
    """
    router, experts = layer.router, layer.experts
    if not isinstance(router, Router) or not isinstance(experts, Experts):
        raise ConfigError(f"cannot copy a layer made of {type(router).__name__} and {type(experts).__name__}")
    state = gather_state_dict(layer)
    like = experts.w13
    full = Experts(
        layer.num_experts,
        experts.hidden,
        experts.ffn,
        experts.activation,
        bias=experts.b13 is not None,
        transposed=experts.transposed,
        recompute=experts.recompute,
        dtype=like.dtype,
        device=like.device,
    )
    alone = Router(router.hidden, router.config, None, dtype=router.weight.dtype, device=router.weight.device)
    copied = MoELayer(
        alone,
        full,
        make_dispatcher(layer.num_experts, options=layer.dispatcher.options),
        copy.deepcopy(layer.shared),
        capacity=layer.capacity,
        zero_experts=layer.zero_experts,
        label=layer.label,
    )
    copied.load_state_dict(state)
    copied.train(layer.training)
    return copied if dtype is None else copied.to(dtype)
