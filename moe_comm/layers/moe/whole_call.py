"""Which calls of a layer are one autograd function on a GPU, router included.

    over ``local``                                   ``dispatch/device_layer.py``
    over ``peer_to_peer`` with ``capacity_rows``     ``dispatch/peer_to_peer/peer_layer.py``

Such a call has no part that others may see or replace: no hooks of router and experts, no capacity, shared expert,
identity experts, auxiliary loss, padding, autocast, adapters, copies of experts or shards by FSDP2, and no given
routing. Hooks of the layer itself, such as FSDP's, activation checkpointing and recomputed activations are supported.
All other calls run router, dispatch, experts and combine one after the other, with the same bits. So do calls with
operators that a program cannot repeat: other activations than SwiGLU, ``main_grad``, and over ``local`` the sort of
many slots. Over ``peer_to_peer`` both kinds of calls run the same operations between ranks, so ranks may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.device_call import DeviceHandle, device_counts
from moe_comm.dispatch.device_layer import DeviceRouter, device_layer
from moe_comm.dispatch.types import DeviceCounts
from moe_comm.dispatch.wire_dtype import UNCHANGED
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.activations import SwiGLU
from moe_comm.kernels.native import for_triton
from moe_comm.layers.moe.experts import Experts, has_hooks
from moe_comm.layers.moe.router import Router
from moe_comm.layers.parallel.recompute import recomputing


def whole_call(layer: Any, x: Tensor) -> tuple[Tensor, Callable[[], DeviceHandle]] | None:
    """Run a call without routing, positions and mask, or return None if it cannot be one function.

    Args:
        layer: an ``MoELayer``, which this module does not import.

    Returns:
        The output, and a function that returns the handle.
    """
    router, experts, dispatcher = layer.router, layer.experts, layer.dispatcher
    local = isinstance(dispatcher, LocalDispatcher)
    if type(router) is not Router or type(experts) is not Experts or not (local or dispatcher.runs_whole_layers(x)):
        return None
    gradients = getattr(experts, "expert_gradients", None)
    config, zero, options, bias_E = router.config, layer.zero_experts, dispatcher.options, router.correction_bias
    if (
        layer.shared is not None
        or layer.capacity is not None
        or layer.overlap is not None
        or layer.in_flight_hook is not None
        or layer.slots is not None
        or zero.identity
        or zero.zero
        or experts._modules
        or not isinstance(experts.activation, SwiGLU)
        or hasattr(experts.w13, "main_grad")
        or hasattr(experts.w2, "main_grad")
        or (gradients is not None and (local or gradients.prepared_for_fsdp))
        or router.bias is not None
        or router.drop_invalid
        or (router.training and (config.balance_loss or config.z_loss))
        or options.checksums
        or options.wire_dtypes != UNCHANGED
        or dispatcher.before_dispatch
        or "_send_with" in vars(dispatcher)
        or x.dtype not in expert_mlp_gpu.DTYPES
        or router.weight.dtype != x.dtype
        or x.shape[-1:] != (router.hidden,)
        or not x.numel()
        or torch.is_autocast_enabled(x.device.type)
        or not (device := experts.on_device(x))
        or (device == "rows" and (local or has_hooks(experts, known=getattr(gradients, "before_forward", None))))
        or has_hooks(router)
        or not for_triton(x, router.weight, bias_E, experts.w13, experts.w2)
    ):
        return None
    from moe_comm.kernels.triton.router import MAX_EXPERTS  # needs Triton
    from moe_comm.kernels.triton.slot_order import FEW, SLOTS

    x_TD = x.reshape(-1, router.hidden)
    if x_TD.stride(1) != 1 or config.num_choices > MAX_EXPERTS:
        return None
    if local and x_TD.shape[0] * config.top_k > FEW * SLOTS:
        return None
    # Look at threads only inside a backward pass, where a forward pass may be a recomputation.
    training = router.training and (torch._C._current_graph_task_id() == -1 or not recomputing())
    given = DeviceRouter(router.weight, bias_E, router.load_E if training else None, config)
    if not local:
        return _over_peers(layer, x, x_TD, given, gradients)
    invalid = dispatcher.invalid_ids(x.device)
    y_TD, counts, layer.saved_bytes = device_layer(x_TD, given, experts.mlp_for(x_TD), invalid, layer.label)
    counted = partial(device_counts, counts, invalid)
    return y_TD.view(x.shape), partial(_handle, counted, x_TD.shape, x.dtype, x.device, config.top_k, layer.label)


def _over_peers(
    layer: Any, x: Tensor, x_TD: Tensor, router: DeviceRouter, gradients: Any
) -> tuple[Tensor, Callable[[], DeviceHandle]]:
    """Run a call over ``peer_to_peer``."""
    from moe_comm.dispatch.peer_to_peer.peer_layer import peer_layer  # only on a GPU

    experts, dispatcher = layer.experts, layer.dispatcher
    with dispatcher.abort_on_error(layer.label):
        if gradients is not None:
            gradients.before_forward(experts)  # a hook of the experts
            dispatcher.trained = gradients.trained(experts, x.requires_grad or router.weight_ED.requires_grad)
        dispatcher.plan_digest = 0
        y_TD, counts_E, place_TK, layer.saved_bytes = peer_layer(dispatcher, layer.label)(
            x_TD, router, experts.mlp_for(x_TD)
        )
    counted = partial(dispatcher.counts_of, counts_E, place_TK)
    top_k = router.rule.top_k
    return y_TD.view(x.shape), partial(_handle, counted, x_TD.shape, x.dtype, x.device, top_k, layer.label)


def _handle(
    counted: Callable[[], DeviceCounts], shape: torch.Size, dtype: torch.dtype, device: torch.device, top_k: int,
    label: str,
) -> DeviceHandle:  # fmt: skip
    return DeviceHandle(shape[0], top_k, shape[1], dtype, device, counted(), label)
