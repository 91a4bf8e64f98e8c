"""Send each token once to each rank that has one of its experts: what the adapters of several systems share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.per_rank.arguments import Rows, unpacked
from moe_comm.dispatch.per_rank.layout import RankLayout, local_slots, rank_layout
from moe_comm.dispatch.per_rank.routes import RankRoutes, narrow_rows, wide_rows
from moe_comm.dispatch.selection.shared import shared_dispatcher
from moe_comm.dispatch.types import DROPPED, DispatchOptions
from moe_comm.errors import InputError, MoeCommError, known_to_peers
from moe_comm.tensor_memory import materialized
from moe_comm.topology import ExpertPlacement


class RankExchange:
    """Base class of adapters that exchange one row per (token, rank). The first use of a dispatcher is collective.

    Attributes:
        backend: see ``make_dispatcher``. timeout_s: seconds to wait for a live peer.
    """

    backend: str = "auto"
    timeout_s: float = 300.0
    _layout: tuple[Tensor, int, RankLayout] | None = None
    """Ids, their version and layout, for the next exchange. Inference tensors have no version."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    @cached_property
    def _device(self) -> torch.device:
        """Device of the last rows; before the first ones, the default of the group."""
        return Channel(communicator_of(self.group, self.timeout_s), self.timeout_s).rows_device

    def _dispatcher(self, x: Any, num_experts: int | None = None) -> Dispatcher:
        """Return the dispatcher of ``num_experts`` experts, or the one whose experts are the ranks.

        It is for the device of x. An x that is no tensor, or on meta, has the device of the last rows, as on the other
        ranks.
        """
        values, _ = unpacked(x)
        if isinstance(values, Tensor) and not values.is_meta:
            self._device = values.device
        options = DispatchOptions(timeout_s=self.timeout_s)
        return shared_dispatcher(num_experts or self.group_size, self.group, self._device, self.backend, options)

    @contextmanager
    def _checks(self, x: Any, num_experts: int | None = None) -> Iterator[None]:
        """Raise an error of the block on every rank, with the dispatcher that the other ranks call next."""
        try:
            yield
        except Exception as error:
            if known_to_peers(error):
                raise
            fault = error if isinstance(error, MoeCommError) else InputError(f"{type(error).__name__}: {error}")
            try:
                self._dispatcher(x, num_experts).refuse(fault)
            except MoeCommError as raised:
                if raised is not error:
                    raise raised from error
                raise

    def _layout_of(self, topk_idx: Tensor, num_experts: int) -> RankLayout:
        """Return the layout that is stored for these ids; a new one if they differ or changed."""
        stored, self._layout = self._layout, None
        if stored is not None:
            ids, version, layout = stored
            if ids is topk_idx and ids._version == version and len(layout.per_expert_E) == num_experts:
                return layout
        return rank_layout(topk_idx, num_experts, self.group_size)

    def _exchange(
        self,
        x: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int,
        is_token_in_rank: Tensor | None = None,
        tokens_per_expert: Tensor | None = None,
        *,
        least_rows: int = 0,
    ) -> tuple[RankRoutes, Rows, Tensor | None]:
        """Send each token once to each rank that has one of its experts. Collective. No autograd.

        Args:
            is_token_in_rank, tokens_per_expert: [T, W] and [E], in place of ids.
            least_rows: rows that the caller sees at least.

        Returns:
            The routes, the received rows, and the weights [R, K].

        Raises:
            InputError, RankMismatch, PeerDied, PeerTimeout: on every rank.
        """
        dispatcher = self._dispatcher(x)
        own = ExpertPlacement.of(num_experts, self.group_size).local_range(self.rank)
        local_RK = weights_RK = None
        with self._checks(x):
            values, scales = wide_rows(x)
            words = {"ids": topk_idx, "weights": topk_weights, "scales": scales}
            if topk_idx is not None:
                ids_TN = self._layout_of(topk_idx, num_experts).ranks_TN
        if topk_idx is None:
            assert is_token_in_rank is not None and tokens_per_expert is not None
            ids_TN = torch.arange(self.group_size, device=self._device).where(is_token_in_rank, DROPPED)
            ids_E1 = torch.arange(num_experts, device=self._device).unsqueeze(1)
            counts_E1 = materialized(tokens_per_expert).int().view(torch.float32).unsqueeze(1)
            counts_N1 = self._dispatcher(x, num_experts).dispatch(counts_E1, ids_E1).rows_RD.view(torch.int32)
            counts_L = counts_N1.view(-1, self.group_size).sum(1)  # of all ranks, for this rank's experts
        routes = RankRoutes(dispatcher, ids_TN)
        rows, words_RX = routes.send_with(values, words)
        if topk_idx is not None:
            weighted = topk_weights is not None
            local_RK, weights_RK, counts_L = local_slots(words_RX, topk_idx.shape[1], own, topk_idx.dtype, weighted)
        routes.received(words_RX, local_RK, counts_L, least_rows)
        return routes, rows if scales is None else narrow_rows(rows, words_RX, scales), weights_RK
