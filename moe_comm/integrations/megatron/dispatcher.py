"""A token dispatcher of Megatron-Core that moves rows with moe_comm, and two ways to put it into MoE layers.

Megatron multiplies by the probabilities inside the experts, so each row is sent with its probability, and combine is a
plain sum. With expert tensor parallelism each expert has one slice on each rank of the ETP group. A slice is an expert
of moe_comm, and a token is sent to all slices:

    4 experts, ETP 2 x EP 2     rank of the ETP x EP group    0       1       2       3
                                slices                        0a 1a   0b 1b   2a 3a   2b 3b
                                ids                           0  1    2  3    4  5    6  7

    a token of experts 1 and 2  ids [1, 3, 4, 6]
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn

from moe_comm.dispatch import DROPPED, DispatchOptions
from moe_comm.dispatch.selection.factory import shared_dispatcher
from moe_comm.dispatch.slots.plain import ids_of_mask
from moe_comm.errors import ConfigError, InputError
from moe_comm.topology import ExpertPlacement

UNSUPPORTED = {
    "moe_shared_expert_overlap": "shared experts run before dispatch",
    "overlap_moe_expert_parallel_comm": "the layers of two micro-batches do not overlap",
    "moe_router_padding_for_quantization": "rows are not padded for quantization",
}
"""Options of Megatron that must be False, with the reason."""


class MoeCommTokenDispatcher(MoETokenDispatcher):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Dispatch and combine over the ranks of the ETP x EP group, in place of Megatron's dispatchers.

    Rows are ordered by (local expert, rank of the ETP x EP group, token), as in ``MoEAllGatherTokenDispatcher``.
    ``token_combine`` adds the rows of a token in fp32 in the order of the experts and rounds once. ``token_dispatch``
    and ``token_combine`` are collective and raise the errors of ``Dispatcher.dispatch`` and ``Dispatcher.combine``.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: as for Megatron's dispatchers.
        backend: see ``make_dispatcher``. timeout_s: seconds to wait for a live peer.
        label: name of the layer, for error messages.

    Raises:
        ConfigError: an option of ``config`` is not supported, or the ranks of an ETP group are not adjacent.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any,
        *,
        backend: str = "auto",
        timeout_s: float = 300.0,
        label: str = "",
    ) -> None:
        _check_config(config)
        super().__init__(config=config, pg_collection=pg_collection)
        members = dist.get_process_group_ranks(self.tp_ep_group)
        slices = [members.index(rank) for rank in dist.get_process_group_ranks(self.tp_group)]
        first = self.ep_group.rank() * self.tp_size
        if slices != list(range(first, first + self.tp_size)) or len(members) != self.tp_size * self.ep_size:
            raise ConfigError(
                f"the ranks of an expert-tensor-parallel group must be adjacent in the ETP x EP group; got {slices} of "
                f"{len(members)} with EP {self.ep_size}. Initialize Megatron with an order in which tp precedes ep"
            )
        self.num_experts: int = num_local_experts * self.ep_size
        self._slices_EW = torch.tensor(
            ExpertPlacement.balanced(self.num_experts, self.ep_size).slice_ids(self.tp_size),
            dtype=torch.int64,
            device="cpu",
        )
        self._transport, self._label = (backend, DispatchOptions(timeout_s=timeout_s)), label
        self._device = torch.device("cpu")

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [T, H] and the probability [T, K] of each slot. The first call is collective.

        Args:
            hidden_states: [S, B, H], with T = S * B.
            routing_map: [T, E] bool, the experts of each token.
            probs: [T, E].

        Raises:
            InputError: shapes do not match, or a token has more experts than ``moe_router_topk``; on every rank.
        """
        # Tokens without a device take that of the last ones, because the other ranks use this dispatcher.
        for given in (probs, hidden_states):
            if isinstance(given, Tensor) and not given.is_meta:
                self._device = given.device
        num_slices = self.num_experts * self.tp_size
        self._dispatcher = shared_dispatcher(num_slices, self.tp_ep_group, self._device, *self._transport)
        hidden_states, routing_map, probs = self._dispatcher.readable(
            self._label, hidden_states=hidden_states, routing_map=routing_map, probs=probs
        )
        if not hidden_states.dim():
            self._dispatcher.refuse(InputError("hidden_states must be [S, B, H]; got a scalar"), label=self._label)
        self._shape = hidden_states.shape
        x_TD = hidden_states.reshape(-1, self._shape[-1])
        # Padding to the capacity adds rows of tokens that have not chosen the expert, so a token may have any experts.
        padded = self.config.moe_pad_expert_input_to_capacity
        top_k = self.num_experts if padded else self.config.moe_router_topk
        expected = x_TD.shape[0], self.num_experts
        if routing_map.dtype != torch.bool or routing_map.shape != expected or probs.shape != expected:
            fault = InputError(
                f"routing_map must be bool {expected} and probs {expected}; got {routing_map.dtype} "
                f"{tuple(routing_map.shape)} and {tuple(probs.shape)}"
            )
            self._dispatcher.refuse(fault, x_TD, label=self._label)
        ids_TK, most = ids_of_mask(routing_map, top_k)
        if most > top_k:
            fault = InputError(f"a token has {most} experts, but moe_router_topk is {top_k}")
            self._dispatcher.refuse(fault, x_TD, label=self._label)
        weights_TK = probs.gather(1, ids_TK.clamp(min=0))
        if self.tp_size > 1:
            self._slices_EW = self._slices_EW.to(x_TD.device)
            ids_TKW = self._slices_EW[ids_TK].masked_fill_((ids_TK < 0).unsqueeze(2), DROPPED)
            ids_TK, weights_TK = ids_TKW.flatten(1), weights_TK.repeat_interleave(self.tp_size, 1)
        self._ids_TK = ids_TK
        return x_TD, weights_TK

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [R, H] of this rank's experts and their probabilities [R]."""
        probs_TK1 = probs.float().unsqueeze(2)
        sent = self._dispatcher.dispatch(hidden_states, self._ids_TK, label=self._label, extra_TKX=probs_TK1)
        assert sent.extra_RX is not None
        self._handle = sent.handle
        return sent.rows_RD, sent.extra_RX.squeeze(1).to(probs.dtype)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, rows per local expert [L] int64 on the CPU, and probabilities."""
        return hidden_states, torch.tensor(self._handle.rows_per_expert, dtype=torch.int64, device="cpu"), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return ``hidden_states``."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return [T, H], the sum of the rows [R, H] of each token."""
        ones_TK = torch.ones(self._ids_TK.shape, device=hidden_states.device, dtype=torch.float32)
        return self._dispatcher.combine(hidden_states, ones_TK, self._handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return [S, B, H]."""
        return hidden_states.view(self._shape)


def _check_config(config: Any) -> None:
    """Raise ConfigError for an option of Megatron's ``TransformerConfig`` that the dispatcher does not support."""
    for option, reason in UNSUPPORTED.items():
        if getattr(config, option, False):
            raise ConfigError(f"moe_comm does not support {option}=True: {reason}; set it to False")
    scopes = {scope.name for scope in config.cuda_graph_scope}
    if config.cuda_graph_impl != "none" and (not scopes or scopes & {"full_iteration", "moe", "moe_preprocess"}):
        raise ConfigError(
            "moe_comm exchanges numbers of rows on the CPU, which a CUDA graph cannot contain; use "
            "cuda_graph_impl='none', or a cuda_graph_scope without full_iteration, moe and moe_preprocess; got "
            f"{sorted(scopes)}"
        )


def replace_dispatchers(
    model: nn.Module | Sequence[nn.Module], *, backend: str = "auto", timeout_s: float = 300.0
) -> int:
    """Replace the token dispatcher of each ``MoELayer`` in a model of Megatron-Core.

    Call it on every rank after the model has been built, before or after it is wrapped. Parameters, their names and the
    process groups of the layers do not change.

    Args:
        model: a module, or the list of the chunks of a pipeline stage.
        backend, timeout_s: of ``MoeCommTokenDispatcher``.

    Returns:
        The number of layers. A pipeline stage may have none.

    Raises:
        ConfigError: an option of Megatron is not supported.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    layers = [pair for chunk in chunks for pair in chunk.named_modules() if isinstance(pair[1], MoELayer)]
    for name, layer in layers:
        old = layer.token_dispatcher
        groups = SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group)
        experts = layer.num_local_experts, layer.local_expert_indices
        layer.token_dispatcher = MoeCommTokenDispatcher(
            *experts, layer.config, groups, backend=backend, timeout_s=timeout_s, label=name
        )
    return len(layers)


class MoeCommMoELayer(MoELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Megatron's ``MoELayer`` with the dispatcher of moe_comm, for layer specs.

    ``config.moe_token_dispatcher_type`` is not used, so no CUDA stream and no DeepEP are needed to build the layer. In
    a ``TransformerLayer`` its groups are those of ``parallel_state``; for others, use ``replace_dispatchers``.

    Args:
        config, args, kwargs: of ``MoELayer``.
        backend, timeout_s: of ``MoeCommTokenDispatcher``, from ``ModuleSpec.params``.

    Raises:
        ConfigError: an option of Megatron is not supported.
    """

    def __init__(self, config: Any, *args: Any, backend: str = "auto", timeout_s: float = 300.0, **kwargs: Any) -> None:
        _check_config(config)  # before anything is allocated
        kind = config.moe_token_dispatcher_type
        config.moe_token_dispatcher_type = "allgather"  # needs neither CUDA nor DeepEP
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = kind
        replace_dispatchers(self, backend=backend, timeout_s=timeout_s)
