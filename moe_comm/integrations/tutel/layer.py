"""Tutel's MoE layer with the dispatchers of this library."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.selection.factory import shared_dispatcher
from moe_comm.errors import ConfigError, MissingDependency, UnsupportedModel
from moe_comm.integrations.tutel.routed import run_experts

INSTALL = "moe_comm.integrations.tutel needs Tutel 0.3; run: pip install git+https://github.com/microsoft/tutel"
try:
    from tutel.impls.fast_dispatch import extract_critical
    from tutel.impls.losses import gshard_loss, load_importance_loss
    from tutel.impls.moe_layer import MOELayer
except ImportError as error:
    raise MissingDependency(f"{INSTALL} ({error})") from error
CALL = (
    "self input gate_index capacity_factor top_k a2a_ffn_overlap_degree reserve_dims inequivalent_tokens adaptive_r "
    "megablocks_size"
)
ROUTE = (
    "scores top_k loss_fn capacity_factor batch_prioritized_routing normalize_gate alignment group inequivalent_tokens"
)
for function, expected in ((MOELayer.forward, CALL), (extract_critical, ROUTE)):
    if (found := " ".join(signature(function).parameters)) != expected:
        raise ConfigError(f"{INSTALL}; here {function.__qualname__} has the arguments {found}, and not {expected}")


class moe_layer(MOELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Tutel's ``moe_layer``, which sends and computes only the rows in use, without padding to the capacity.

    Gates, experts, losses, parameters, their names and their initial values are Tutel's. So are the tokens that the
    capacity drops. Ranks may have different numbers of tokens, also zero.

    Args:
        args, kwargs: of Tutel's layer.
        backend, options: see ``make_dispatcher``. Layers with the same group share their dispatchers.

    Raises:
        UnsupportedModel: several ranks share an expert (``count_per_node`` below -1).
    """

    def __init__(
        self, *args: Any, backend: str = "auto", options: DispatchOptions | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.sharded_count > 1:
            raise UnsupportedModel(
                f"{self.sharded_count} ranks share each expert; moe_comm dispatches to whole experts. Use "
                "count_per_node of at least 1, or Tutel's own layer"
            )
        self.transport = backend, options

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """Return the outputs of the experts, weighted and added, with the auxiliary loss as ``l_aux``. Collective.

        Args:
            input: [..., D]; with ``reserve_dims``, that many last dimensions make up D.
            a2a_ffn_overlap_degree: the capacity is rounded up to a multiple of it. There is no overlap.
            adaptive_r: 0 copies the weights of all experts to each rank with Tutel's code; nothing is dispatched then.
            megablocks_size: not used.

        Raises:
            InputError, RankMismatch, PeerRaised, PeerDied, PeerTimeout: as ``run_experts``.
        """
        if adaptive_r is not None:
            self.adaptive_degree = adaptive_r
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        if self.skip_moe or self.adaptive_degree == 0:
            return super().forward(input, gate_index, capacity_factor, top_k, None, reserve_dims, inequivalent_tokens)
        self.megablocks_size, shape, device = 0, input.shape, input.device
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        else:
            dtype = next((param.dtype for param in self.experts.parameters()), input.dtype)
        x_TD = input.reshape(-1, shape[-reserve_dims:].numel()).to(dtype)
        gate = self.gates[gate_index]
        choice = {"top_k": top_k or gate.top_k, "capacity_factor": capacity_factor or gate.capacity_factor}
        routes, l_aux = self._route(x_TD, gate, inequivalent_tokens=inequivalent_tokens, **choice)
        dispatcher = shared_dispatcher(routes[0], self.group, device, *self.transport)
        experts = partial(self.expert_local, reserve_shape=shape[-reserve_dims:])
        y_TD = run_experts(dispatcher, x_TD, routes, experts, is_postscore=self.is_postscore)
        y: Any = y_TD.view(*shape[:-reserve_dims], *self.protected_shape[-reserve_dims:]).to(input.dtype)
        self.l_aux = y.l_aux = l_aux
        return y if self.result_func is None else self.result_func(y)

    def _route(self, x_TD: Tensor, gate: Any, **choice: Any) -> tuple[Any, Tensor]:
        """Return the routes of ``run_experts`` and the auxiliary loss.

        Tutel divides by the number of tokens. A rank without tokens routes one token of zeros, which is not dispatched,
        and has the loss 0.
        """
        tokens_TD = x_TD if len(x_TD) else x_TD.new_zeros(1, x_TD.shape[1])
        # As Tutel: a gate computes in its own dtype on GPUs.
        with torch.autocast("cuda", enabled=False) if x_TD.is_cuda else nullcontext():
            logits_TE = noisy_TE = gate(tokens_TD)
            num_experts, noise = logits_TE.shape[1], gate.gate_noise
            if self.training and noise > 0:
                noisy_TE = logits_TE + noise * torch.randn_like(logits_TE) / num_experts

            def loss(scores_TE: Tensor, ids_TK: Tensor) -> Any:
                if self.is_gshard_loss:
                    return gshard_loss(scores_TE, ids_TK)
                chosen_TK = noisy_TE.gather(1, ids_TK)
                return load_importance_loss(F.softmax(logits_TE, 1), chosen_TK, num_experts, noise)

            degree = self.a2a_ffn_overlap_degree
            routes, l_aux = extract_critical(
                F.softmax(noisy_TE, 1),
                loss_fn=loss,
                batch_prioritized_routing=self.batch_prioritized_routing,
                normalize_gate=self.normalize_gate,
                alignment=degree if degree <= 256 else (degree + 127) // 128 * 128,
                group=self.group,
                **choice,
            )
        self.dispatch_count = routes[-1] * (len(x_TD) > 0)
        return routes, l_aux if len(x_TD) else noisy_TE.sum() * 0
