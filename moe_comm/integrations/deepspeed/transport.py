"""MoE layers of DeepSpeed whose rows are moved by the dispatchers of this library.

    ``MoE``     DeepSpeed   gate ─▶ [E, C, D] with empty slots ─▶ all-to-all ─▶ experts ─▶ all-to-all ─▶ weigh, sum
                moe_comm    gate ─▶ ids, weights ─▶ dispatch the rows in use ─▶ experts ─▶ combine

    AutoEP      DeepSpeed   router ─▶ sort, copy ─▶ all-to-all ─▶ permute, pad ─▶ experts ─▶ the same back, weigh, sum
                moe_comm    router ─▶ ids, weights ─▶ dispatch ─▶ experts ─▶ combine

Gates and routers decide as before. A slot that a capacity drops has the id -1.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.module_inject.auto_ep_comm import DEEPEP_BACKEND
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, apply_scores_before_experts_if_enabled
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from moe_comm.dispatch import Dispatched, Dispatcher, DispatchOptions
from moe_comm.dispatch.selection.factory import shared_dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel


def _check_parallelism(layer: Any) -> None:
    """Raise UnsupportedModel for tensor parallelism. DeepSpeed knows of it only after ``deepspeed.initialize``."""
    folding = getattr(layer, "folding_group_handles", None)  # of AutoEP
    if max(bwc_tensor_model_parallel_world_size(groups.mpu), folding.spec.tp_size if folding else 1) > 1:
        raise UnsupportedModel("tensor parallelism of DeepSpeed gives ranks of a layer the same tokens; turn it off")


def _dispatch(layer: Any, num_experts: int, x_TD: Tensor, ids_TK: Tensor) -> tuple[Dispatcher, Dispatched]:
    """Dispatch over the group of ``layer``. The first call makes the dispatcher. Collective."""
    _check_parallelism(layer)
    if layer.ep_size > 1 and layer.ep_group is None:
        raise ConfigError(
            "the MoE layer has no expert-parallel group; call deepspeed.initialize(model=...) first, or "
            "set_deepspeed_parallelism() of the layer"
        )
    group = layer.ep_group if layer.ep_size > 1 else None
    dispatcher = shared_dispatcher(num_experts, group, x_TD.device, *layer.transport)
    return dispatcher, dispatcher.dispatch(x_TD, ids_TK, label=layer.label)


class MoeCommMOELayer(MOELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """DeepSpeed's ``MOELayer`` after ``swap_transport``."""

    def forward(self, *input: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the experts, weighted and added, in the shape of the input. Collective.

        Args:
            input: hidden states [..., D], and the mask of used tokens, which only top-1 gates read, or None.
        """
        hidden, used_token = input
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        # As routes: capacity, experts, ids [K, T] and their positions in the buffers, weights [K, T] in fp32.
        self.l_aux, _, num_experts, ids_KT, _, weights_KT, self.exp_counts = self.gate(x_TD, used_token, True, False)
        dispatcher, sent = _dispatch(self, num_experts, x_TD, ids_KT.t().contiguous())
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


class MoeCommAutoEPLayer(AutoEPMoELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """DeepSpeed's ``AutoEPMoELayer`` after ``swap_transport``."""

    def _deepep_route(self, tokens: Tensor, ro: Any) -> Tensor:
        """Return the outputs of the experts [T, D], weighted and added. Collective.

        Args:
            tokens: [T, D].
            ro: the router's scores [T, K] and expert ids [T, K].
        """
        x_TD, weights_TK, ids_TK = tokens, ro.top_scores, ro.selected_experts
        if self.score_apply == "pre":  # each slot becomes a token, which the router's score multiplies
            x_TD = apply_scores_before_experts_if_enabled(x_TD.repeat_interleave(self.top_k, 0), weights_TK, "pre")
            ids_TK = ids_TK.reshape(-1, 1)
            weights_TK = torch.ones(ids_TK.shape, device=x_TD.device, dtype=torch.float32)
        dispatcher, sent = _dispatch(self, self.num_experts, x_TD, ids_TK)
        counts_L = torch.tensor(sent.handle.rows_per_expert, dtype=torch.int32, device=x_TD.device)
        y_TD = dispatcher.combine(self.experts(sent.rows_RD, counts_L), weights_TK, sent.handle)
        return y_TD.view(tokens.shape[0], -1, tokens.shape[1]).sum(1) if self.score_apply == "pre" else y_TD


def swap_transport(model: nn.Module, *, backend: str = "auto", options: DispatchOptions | None = None) -> nn.Module:
    """Move the rows of all MoE layers of ``model`` with the dispatchers of this library.

    ``deepspeed.initialize`` makes the layers of AutoEP; those of ``MoE`` may be swapped before or after it. Parameters,
    their names, ZeRO groups, routers, auxiliary losses and checkpoints remain DeepSpeed's. The forward pass raises the
    errors of ``Dispatcher.dispatch`` and, without the groups of ``deepspeed.initialize``, ConfigError.

    Args:
        backend, options: see ``make_dispatcher``. Layers with the same group share their dispatchers.

    Returns:
        ``model``, changed in place.

    Raises:
        UnsupportedModel: no such layer, or one that uses Tutel or tensor parallelism. The model is unchanged. If
            ``deepspeed.initialize`` starts tensor parallelism later, the first forward pass raises this.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MOELayer | AutoEPMoELayer)}
    if not layers:
        raise UnsupportedModel("the model has no deepspeed.moe.layer.MoE and no layer of AutoEP")
    if any(getattr(layer, "use_tutel", False) for layer in layers.values()):
        raise UnsupportedModel("use_tutel=True lets Tutel build the buffers of DeepSpeed; set use_tutel=False")
    for layer in layers.values():
        _check_parallelism(layer)
    for name, layer in layers.items():
        layer.transport, layer.label = (backend, options), name
        if isinstance(layer, MOELayer):
            layer.__class__ = MoeCommMOELayer
        else:
            layer.__class__, layer.comm_backend = MoeCommAutoEPLayer, DEEPEP_BACKEND  # this calls _deepep_route
    return model
