"""MoE layers of Megatron-Core with the dispatcher of moe_comm."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import nn

from moe_comm.integrations.megatron.dispatcher import MoeCommTokenDispatcher


def replace_dispatchers(
    model: nn.Module | Sequence[nn.Module], *, backend: str = "auto", timeout_s: float = 300.0
) -> int:
    """Replace the token dispatcher of each ``MoELayer`` in a model of Megatron-Core.

    Call it on every rank after the model has been built, before or after it is wrapped. Parameters and their names do
    not change. Layers keep their process groups.

    Args:
        model: a module, or the list of the chunks of a pipeline stage.
        backend: see ``make_dispatcher``.
        timeout_s: seconds to wait for a live peer.

    Returns:
        The number of layers. A pipeline stage may have none.

    Raises:
        ConfigError: an option of Megatron is not supported.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    layers = [pair for chunk in chunks for pair in chunk.named_modules() if isinstance(pair[1], MoELayer)]
    for name, layer in layers:
        before = layer.token_dispatcher
        layer.token_dispatcher = MoeCommTokenDispatcher(
            layer.num_local_experts,
            layer.local_expert_indices,
            layer.config,
            SimpleNamespace(ep=before.ep_group, expt_tp=before.tp_group, tp_ep=before.tp_ep_group),
            backend=backend,
            timeout_s=timeout_s,
            label=name,
        )
    return len(layers)


class MoeCommMoELayer(MoELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Megatron's ``MoELayer`` with the dispatcher of moe_comm, for layer specs.

    ``config.moe_token_dispatcher_type`` is not used, so no CUDA stream and no DeepEP are needed to build the layer.
    ``TransformerLayer`` passes its ``pg_collection`` only to ``MoELayer`` itself; this class then takes the groups of
    ``parallel_state``. For other groups, build ``MoELayer`` and call ``replace_dispatchers``.

    Args:
        config, submodules, layer_number, pg_collection: as for ``MoELayer``.
        backend, timeout_s: as in ``replace_dispatchers``, from ``ModuleSpec.params``.

    Raises:
        ConfigError: an option of Megatron is not supported.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        backend: str = "auto",
        timeout_s: float = 300.0,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        local = config.num_moe_experts // groups.ep.size()
        own = range(groups.ep.rank() * local, (groups.ep.rank() + 1) * local)
        # Before anything is allocated, because it checks the options.
        dispatcher = MoeCommTokenDispatcher(local, own, config, groups, backend=backend, timeout_s=timeout_s)
        kind = config.moe_token_dispatcher_type
        config.moe_token_dispatcher_type = "allgather"  # needs neither CUDA nor DeepEP
        try:
            super().__init__(config, submodules, layer_number, groups)
        finally:
            config.moe_token_dispatcher_type = kind
        self.token_dispatcher = dispatcher
