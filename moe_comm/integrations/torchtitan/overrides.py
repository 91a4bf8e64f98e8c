"""A token dispatcher of torchtitan that moves rows with moe_comm, and overrides that select it.

Pass them as ``--override.imports moe_comm.integrations.torchtitan.overrides.NAME``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common import token_dispatcher as theirs

from moe_comm.dispatch import Dispatcher, DispatchOptions, operators
from moe_comm.dispatch.selection.factory import shared_dispatcher


class MoeCommTokenDispatcher(theirs.BaseEPTokenDispatcher):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Dispatch and combine over the expert-parallel mesh, in place of ``AllToAllTokenDispatcher``.

    Rows and counts have the bits of ``AllToAllTokenDispatcher``. ``combine`` adds the rows of a token in fp32 in slot
    order and rounds once; ``AllToAllTokenDispatcher`` rounds each product. Without a mesh, this is torchtitan's
    ``LocalTokenDispatcher``. Experts need not divide by the ranks of the mesh. ``dispatch`` and ``combine`` are
    collective and raise the errors of ``Dispatcher.dispatch`` and ``Dispatcher.combine``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.BaseEPTokenDispatcher.Config):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """Args: backend: see ``make_dispatcher``. timeout_s: seconds to wait for a live peer."""

        backend: str = "auto"
        timeout_s: float = 300.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._transport = config.backend, DispatchOptions(timeout_s=config.timeout_s)

    def _dispatcher(self, device: torch.device) -> Dispatcher:
        return shared_dispatcher(self.num_experts, self.ep_mesh, device, *self._transport)

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Return rows [R, D], rows per local expert [L] int64, and metadata for ``combine``."""
        if self.ep_mesh is None:
            return theirs.LocalTokenDispatcher.dispatch(  # type: ignore[no-any-return, unused-ignore]
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        dispatcher = operators.register(self._dispatcher(x_TD.device))
        rows_RD, counts_L, number = operators.dispatch(x_TD, topk_expert_ids_TK, dispatcher)
        return rows_RD, counts_L, (topk_scores_TK, number, operators.sent_of(number))  # the last keeps the handle

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Return [T, D], the sum of each token's outputs times their scores."""
        if self.ep_mesh is None:
            return theirs.LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)  # type: ignore[no-any-return, unused-ignore]
        return operators.combine(routed_output_RD, *metadata[:2])  # type: ignore[no-any-return]


class MoeCommSelectiveAC(SelectiveAC):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """torchtitan's selective checkpointing that also saves dispatched rows and combined outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """As torchtitan's."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's operators and those of moe_comm."""
        return {*super().get_save_ops(), torch.ops.moe_comm_ep.dispatch.default, torch.ops.moe_comm_ep.combine.default}


@override(target=theirs.AllToAllTokenDispatcher.Config, exact=True, description="dispatch with moe_comm")  # type: ignore[untyped-decorator, unused-ignore]
def moe_comm(cfg: Any, *, backend: str = "auto", timeout_s: float = 300.0) -> Any:
    """Replace torchtitan's all-to-all dispatcher; see ``MoeCommTokenDispatcher.Config``."""
    return derive(cfg, MoeCommTokenDispatcher.Config, backend=backend, timeout_s=timeout_s)


@override(target=SelectiveAC.Config, exact=True, description="save the transfers of moe_comm")  # type: ignore[untyped-decorator, unused-ignore]
def save_transfers(cfg: Any) -> Any:
    """Replace selective checkpointing by one that does not send rows again in the backward pass."""
    return derive(cfg, MoeCommSelectiveAC.Config)
