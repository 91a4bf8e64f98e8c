"""Which calls of a layer are one autograd function on a GPU (``dispatch/device_layer.py``), router included.

Such a call has no part that others may see or replace: no hooks of router and experts, no capacity, shared expert,
identity experts, auxiliary loss, padding, autocast, adapters, copies or shards of experts, and no given routing. Hooks
of the layer itself, such as FSDP's, activation checkpointing and recomputed activations are supported. All other calls
run router, dispatch, experts and combine one after the other, with the same bits. So do calls with operators that a
program cannot repeat: other activations than SwiGLU, ``main_grad``, and the sort of many slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.backends.local import InvalidIds, LocalDispatcher
from moe_comm.dispatch.device_call import DeviceHandle, device_counts
from moe_comm.dispatch.device_layer import DeviceRouter, device_layer
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
    if type(router) is not Router or type(experts) is not Experts or not isinstance(dispatcher, LocalDispatcher):
        return None
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
        or getattr(experts, "expert_gradients", None) is not None
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
        or experts.on_device(x) != "tokens"
        or has_hooks(router)
        or not for_triton(x, router.weight, bias_E, experts.w13, experts.w2)
    ):
        return None
    from moe_comm.kernels.triton.router import MAX_EXPERTS  # needs Triton
    from moe_comm.kernels.triton.slot_order import FEW, SLOTS

    x_TD = x.reshape(-1, router.hidden)
    if x_TD.stride(1) != 1 or config.num_choices > MAX_EXPERTS or x_TD.shape[0] * config.top_k > FEW * SLOTS:
        return None
    # Look at threads only inside a backward pass, where a forward pass may be a recomputation.
    counted = router.training and (torch._C._current_graph_task_id() == -1 or not recomputing())
    given = DeviceRouter(router.weight, bias_E, router.load_E if counted else None, config)
    invalid = dispatcher.invalid_ids(x.device)
    y_TD, counts, layer.saved_bytes = device_layer(x_TD, given, experts.mlp_for(x_TD), invalid, layer.label)
    return y_TD.view(x.shape), partial(_handle, counts, invalid, x_TD.shape, x.dtype, config.top_k, layer.label)


def _handle(
    counts: Tensor, invalid: InvalidIds, shape: torch.Size, dtype: torch.dtype, top_k: int, label: str
) -> DeviceHandle:
    rows = device_counts(counts, invalid)
    return DeviceHandle(shape[0], top_k, shape[1], dtype, counts.device, rows, label)
