"""Which calls of a layer are one autograd function on a GPU.

    over ``local``                                   ``dispatch/device_layer.py``
    over ``peer_to_peer`` with ``capacity_rows``     ``dispatch/peer_to_peer/peer_layer.py``

``whole_call`` includes the router. It is for layers that have no part which others may see or replace: no hooks of the
router, no capacity, shared expert, identity experts, auxiliary loss, padding, autocast and no given routing.
``given_call`` runs dispatch, experts and combine with any routing. Neither is for hooks of the experts, adapters,
published copies of experts, or shards by FSDP2. Both lend experts by plans on the device. Hooks of the layer itself,
such as FSDP's, activation checkpointing and recomputed activations are supported.

All other calls run dispatch, experts and combine one after the other, with the same bits. So do calls with operators
that a program cannot repeat: activations without ``glu``, ``main_grad``, and over ``local`` the sort of many slots.
Over ``peer_to_peer`` both kinds of calls run the same operations between ranks, so ranks may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.channel import AbortOnError
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.device_call import DeviceHandle, device_counts
from moe_comm.dispatch.device_layer import device_layer
from moe_comm.dispatch.operation import dispatch_fault
from moe_comm.dispatch.types import DeviceCounts, OnDevice
from moe_comm.dispatch.whole_layer import DeviceRouting
from moe_comm.dispatch.wire_dtype import UNCHANGED
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.native import for_triton
from moe_comm.layers.data_parallel.lent_call import LentCall
from moe_comm.layers.moe.experts import Experts, has_hooks
from moe_comm.layers.moe.router import Router
from moe_comm.layers.parallel.recompute import recomputing

Ran = tuple[Tensor, Callable[[], DeviceHandle], int]
"""The output [T, D], a function that returns the handle, and ``MoELayer.saved_bytes``."""


def whole_call(layer: Any, x: Tensor) -> Ran | None:
    """Run a call without routing, positions and mask, or return None if it cannot be one function.

    Args:
        layer: an ``MoELayer``, which this module does not import.
    """
    router, experts = layer.router, layer.experts
    if type(router) is not Router or type(experts) is not Experts:
        return None
    config, zero, bias_E = router.config, layer.zero_experts, router.correction_bias
    local, gradients = isinstance(layer.dispatcher, LocalDispatcher), getattr(experts, "expert_gradients", None)
    if (
        layer.shared is not None
        or layer.capacity is not None
        or zero.identity
        or zero.zero
        or router.bias is not None
        or router.drop_invalid
        or (router.training and (config.balance_loss or config.z_loss))
        or router.weight.dtype != x.dtype
        or x.shape[-1:] != (router.hidden,)
        or torch.is_autocast_enabled(x.device.type)
        or not experts.is_uncounted(x)
        or (experts.b2 is not None and experts.part.count > 1)  # padded, which allocates memory and may fail
        or has_hooks(experts, router, known=None if local else getattr(gradients, "before_forward", None))
    ):
        return None
    tensors = experts.w13, experts.w2, experts.b13, experts.b2, router.weight, bias_E
    if not _takes(layer, experts, tensors, experts.activation, x, "tokens"):
        return None
    from moe_comm.kernels.triton.router import MAX_EXPERTS  # needs Triton
    from moe_comm.kernels.triton.slot_order import FEW, SLOTS

    x_TD = x.reshape(-1, router.hidden)
    if x_TD.stride(1) != 1 or config.num_choices > MAX_EXPERTS:
        return None
    if local and x_TD.shape[0] * config.top_k > FEW * SLOTS:
        return None  # a sort, which a program cannot repeat
    # Look at threads only inside a backward pass, where a forward pass may be a recomputation.
    training = router.training and (torch._C._current_graph_task_id() == -1 or not recomputing())
    others = bias_E, router.load_E if training else None
    routing = DeviceRouting(router.weight, others, config, (config.top_k, config.num_choices))
    trained = x.requires_grad or router.weight.requires_grad
    return _run(layer, experts, x_TD, routing, partial(experts.mlp_for, x_TD), trained)


def given_call(
    parallel: Any,
    experts: Any,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    on_device: OnDevice,
    mlp: Callable[[LentCall | None], ExpertMLP],
) -> Callable[[], Ran] | None:
    """Return the run of a call with given routing, or None if it cannot be one function.

    Args:
        parallel, experts: an ``ExpertParallel`` and its experts module.
        x_TD: tokens in the dtype of the experts.
        ids_TK, weights_TK: as ``ExpertParallel._start_call`` takes them.
        on_device: what the experts can be computed from.
        mlp: returns the parameters of the experts in the dtype of the tokens, or what a call that lends computes with.
    """
    if not on_device or ids_TK.dim() != 2 or weights_TK.shape != ids_TK.shape or not weights_TK.is_floating_point():
        return None
    if getattr(getattr(experts, "expert_gradients", None), "prepared_for_fsdp", False):
        return None
    if not ids_TK.numel() or dispatch_fault(x_TD, ids_TK, None) is not None:
        return None
    # The casts allocate memory. The other ranks would wait for a rank that raises.
    with AbortOnError(partial(parallel._abort, experts)):
        of_experts = None
        if getattr(experts, "copies", None) is not None:
            tensors, activation = (experts.w13, experts.w2, experts.b13, experts.b2), experts.activation
            if experts.w13.dtype is not x_TD.dtype:
                return None
        else:
            of_experts = mlp(None)
            tensors, activation = of_experts.tensors, of_experts.activation
            if of_experts.gemm_dtype != "same":
                return None
        if not _takes(parallel, experts, (*tensors, ids_TK, weights_TK), activation, x_TD, on_device):
            return None
        from moe_comm.kernels.triton.slot_order import FEW, SLOTS  # needs Triton

        if x_TD.stride(1) != 1 or (isinstance(parallel.dispatcher, LocalDispatcher) and ids_TK.numel() > FEW * SLOTS):
            return None
        sizes = ids_TK.shape[1], parallel.dispatcher.num_experts
        wide_TK = weights_TK.to(torch.float32).contiguous()
        routing = DeviceRouting(wide_TK, (ids_TK.to(torch.int64).contiguous(), None), None, sizes)
    run = mlp if of_experts is None else lambda _: of_experts
    return partial(_run, parallel, experts, x_TD, routing, run, weights_TK.requires_grad)


def _takes(
    parallel: Any, experts: Any, tensors: tuple[Any, ...], activation: Any, x: Tensor, on_device: OnDevice
) -> bool:
    """Return whether dispatch, experts and combine can be one function. tensors: w13, w2, their biases or None, and
    those of the routing."""
    dispatcher = parallel.dispatcher
    local = isinstance(dispatcher, LocalDispatcher)
    gradients, options = getattr(experts, "expert_gradients", None), dispatcher.options
    return not (
        not on_device
        or not (local or dispatcher.runs_whole_layers(x))
        or parallel.overlap is not None
        or parallel.in_flight_hook is not None
        or (parallel.slots is not None and (local or options.balance is None))
        or experts._modules
        or activation.glu is None
        or hasattr(tensors[0], "main_grad")
        or hasattr(tensors[1], "main_grad")
        or (gradients is not None and (local or gradients.prepared_for_fsdp))
        or options.checksums
        or options.wire_dtypes != UNCHANGED
        or dispatcher.before_dispatch
        or "_send_with" in vars(dispatcher)
        or x.dtype not in expert_mlp_gpu.DTYPES
        or not x.numel()
        or (on_device == "rows" and (local or has_hooks(experts, known=getattr(gradients, "before_forward", None))))
        or not for_triton(x, *tensors)
    )


def _run(
    parallel: Any, experts: Any, x_TD: Tensor, routing: DeviceRouting, mlp: Callable[[LentCall | None], ExpertMLP],
    trained: bool,
) -> Ran:  # fmt: skip
    """Run the call. mlp: see ``given_call``. trained: whether the routing weights require gradients, as ranks compare
    it."""
    dispatcher, label, top_k = parallel.dispatcher, parallel.label, routing.sizes[0]
    if isinstance(dispatcher, LocalDispatcher):
        invalid = dispatcher.invalid_ids(x_TD.device)
        y_TD, counts, saved_bytes = device_layer(x_TD, routing, mlp(None), invalid, label)
        counted = partial(device_counts, counts, invalid)
    else:
        gradients = getattr(experts, "expert_gradients", None)
        try:
            if gradients is not None:
                gradients.before_forward(experts)  # a hook of the experts
                dispatcher.trained = gradients.trained(experts, trained)
            dispatcher.plan_digest = 0
            over_peers = dispatcher.whole_layers.get(label)
            if over_peers is None:
                from moe_comm.dispatch.peer_to_peer.peer_layer import PeerLayer  # only on a GPU

                over_peers = dispatcher.whole_layers[label] = PeerLayer(dispatcher, label)
            lent: LentCall | None = None
            native: Any = None
            copies = getattr(experts, "copies", None)
            if copies is not None:
                lent, native = copies.native_call(x_TD.shape[0] * top_k, parallel.training)
            y_TD, counts, place_TK, saved_bytes = over_peers(x_TD, routing, mlp(lent), native)
            if copies is not None:
                parallel.last_plan = copies.plan_of(native.plan)
        except Exception as error:
            dispatcher.abort(error, label=label)
            raise
        counted = partial(dispatcher.counts_of, counts, place_TK)
    return y_TD, partial(_handle, counted, x_TD.shape, x_TD.dtype, x_TD.device, top_k, label), saved_bytes


def _handle(
    counted: Callable[[], DeviceCounts], shape: torch.Size, dtype: torch.dtype, device: torch.device, top_k: int,
    label: str,
) -> DeviceHandle:  # fmt: skip
    return DeviceHandle(shape[0], top_k, shape[1], dtype, device, counted(), label)
