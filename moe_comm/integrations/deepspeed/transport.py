"""``deepspeed.moe.layer.MoE`` without its capacity buffers.

    DeepSpeed   gate ─▶ [E, C, D] with empty slots ─▶ all-to-all ─▶ experts ─▶ all-to-all ─▶ gather, weigh, sum
    moe_comm    gate ─▶ ids, weights ─▶ dispatch the rows in use ─▶ experts ─▶ combine

The gate decides as before, with its capacity, random token selection and auxiliary loss. A slot that it drops has the
id -1. Only the rows that are in use are sent and computed.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from moe_comm.dispatch import Dispatcher, DispatchOptions, make_dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel


class Transport:
    """The dispatchers that the layers of one model share, by number of experts and name of their group."""

    def __init__(self, backend: str, options: DispatchOptions | None) -> None:
        self._backend, self._options = backend, options
        self._dispatchers: dict[tuple[int, str], Dispatcher] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Transport:
        return self  # copies of a model use the same groups

    def dispatcher(self, layer: MOELayer, num_experts: int, device: torch.device) -> Dispatcher:
        """Return the dispatcher of ``layer``, which the first call makes. That call is collective."""
        key = num_experts, layer.ep_group_name
        if key not in self._dispatchers:
            if layer.ep_size > 1 and layer.ep_group is None:
                raise ConfigError(
                    "the MoE layer has no expert-parallel group; call deepspeed.initialize(model=...) first, or "
                    "set_deepspeed_parallelism() of the layer"
                )
            group = layer.ep_group if layer.ep_size > 1 else None
            self._dispatchers[key] = make_dispatcher(
                num_experts, group, backend=self._backend, options=self._options, device=device
            )
        return self._dispatchers[key]


class MoeCommMOELayer(MOELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """DeepSpeed's ``MOELayer`` after ``swap_transport``. Parameters and their names are the same."""

    transport: Transport

    def forward(self, *input: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the experts, weighted and added, in the shape of the input.

        Args:
            input: hidden states [..., D], and the mask of used tokens, which only top-1 gates read, or None.

        Raises:
            InputError, RoutingError, RankMismatch, PeerDied, PeerTimeout: as ``Dispatcher.dispatch``.
        """
        hidden, used_token = input
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        # As routes: capacity, experts, ids [K, T] and their positions in the buffers, weights [K, T] in fp32.
        self.l_aux, _, num_experts, ids_KT, _, weights_KT, self.exp_counts = self.gate(x_TD, used_token, True, False)
        dispatcher = self.transport.dispatcher(self, num_experts, x_TD.device)
        sent = dispatcher.dispatch(x_TD, ids_KT.t().contiguous(), label="deepspeed")
        parts = sent.rows_RD.split(sent.handle.rows_per_expert)
        out_RD = torch.cat(
            [_run(expert, rows) for expert, rows in zip(self.experts.deepspeed_experts, parts, strict=True)]
        )
        y_TD = dispatcher.combine(out_RD, weights_KT.t().contiguous(), sent.handle)
        return y_TD.reshape(hidden.shape)


def _run(expert: nn.Module, rows_RD: Tensor) -> Tensor:
    """Return [R, D]. An expert without rows runs too, so that its parameters have gradients on every rank."""
    out = expert(rows_RD[None, None])  # DeepSpeed's experts take [ep, 1, C, D]
    out_11RD: Tensor = out[0] if isinstance(out, tuple) else out
    return out_11RD[0, 0]


def swap_transport(model: nn.Module, *, backend: str = "auto", options: DispatchOptions | None = None) -> nn.Module:
    """Move the rows of all ``deepspeed.moe.layer.MoE`` layers of ``model`` with the dispatchers of this library.

        model = swap_transport(model)
        engine, optimizer, _, _ = deepspeed.initialize(model=model, ...)

    Call it before or after ``deepspeed.initialize``. Parameters, ZeRO groups, gates, auxiliary losses and checkpoints
    remain DeepSpeed's.

    Args:
        backend, options: see ``make_dispatcher``. All layers share their dispatchers.

    Returns:
        ``model``, changed in place.

    Raises:
        UnsupportedModel: no such layer, or one that uses Tutel or tensor parallelism. The model is unchanged.
    """
    layers = [module for module in model.modules() if isinstance(module, MOELayer)]
    if not layers:
        raise UnsupportedModel("the model has no deepspeed.moe.layer.MoE")
    if any(layer.use_tutel for layer in layers):
        raise UnsupportedModel("use_tutel=True lets Tutel build the buffers of DeepSpeed; set use_tutel=False")
    if bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        raise UnsupportedModel(
            "tensor parallelism of DeepSpeed gives the ranks of a layer the same tokens; use it without"
        )
    transport = Transport(backend, options)
    for layer in layers:
        layer.__class__ = MoeCommMOELayer
        layer.transport = transport
    return model
