"""A token dispatcher of torchtitan that moves rows with moe_comm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from moe_comm.dispatch import Dispatcher, DispatchOptions, operators
from moe_comm.dispatch.selection.shared import shared_dispatcher


@dataclass(frozen=True)
class Metadata:
    """What ``combine`` needs of a dispatch. ``sent`` keeps the handle."""

    number: Tensor
    weights_TK: Tensor
    sent: operators.Sent


class MoeCommTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Dispatch and combine over the expert-parallel mesh, in place of ``AllToAllTokenDispatcher``.

    Rows and counts have the bits of ``AllToAllTokenDispatcher``. ``combine`` adds the rows of a token in fp32 in slot
    order and rounds once; ``AllToAllTokenDispatcher`` rounds each product. Without a mesh, this is torchtitan's
    ``LocalTokenDispatcher``. Experts need not divide by the ranks of the mesh.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """Args: backend: see ``make_dispatcher``. timeout_s: seconds to wait for a live peer."""

        backend: str = "auto"
        timeout_s: float = 300.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._backend = config.backend
        self._options = DispatchOptions(timeout_s=config.timeout_s)

    def _dispatcher(self, device: torch.device) -> Dispatcher:
        return shared_dispatcher(self.num_experts, self.ep_mesh, device, self._backend, self._options)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Return rows [R, D], rows per local expert, and metadata for ``combine``. Collective over the mesh.

        Raises:
            InputError, RoutingError, RankMismatch, PeerDied, PeerTimeout: as ``Dispatcher.dispatch``.
        """
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(  # type: ignore[no-any-return, unused-ignore]
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        dispatcher = self._dispatcher(x_TD.device)
        rows_RD, counts_L, number = operators.dispatch(x_TD, topk_expert_ids_TK, operators.register(dispatcher))
        dtype = num_local_tokens_per_expert_E.dtype
        counts_L = counts_L if dtype == torch.int32 else counts_L.to(dtype)  # torch sums int32 as int64
        return rows_RD, counts_L, Metadata(number, topk_scores_TK, operators.sent_of(number))

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Return [T, D], the sum of each token's outputs times their scores. Collective over the mesh."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)  # type: ignore[no-any-return, unused-ignore]
        return operators.combine(routed_output_RD, metadata.weights_TK, metadata.number)  # type: ignore[no-any-return]


class MoeCommSelectiveAC(SelectiveAC):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """torchtitan's selective checkpointing that also saves dispatched rows and combined outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """As torchtitan's."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's operators and those of moe_comm."""
        return {*super().get_save_ops(), torch.ops.moe_comm_ep.dispatch.default, torch.ops.moe_comm_ep.combine.default}
