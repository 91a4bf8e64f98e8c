"""``deep_ep.ElasticBuffer``: the second interface of DeepEP. Its Engram, pipeline and all-gather calls are absent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.per_rank import Bias, RankRoutes, Rows, check_input, slot_positions
from moe_comm.dispatch.slots import plain
from moe_comm.errors import ConfigError, InputError
from moe_comm.integrations.deepep.events import (
    EventHandle,
    EventOverlap,
    GroupBuffer,
    check_handle,
    finished,
    placed,
    wait_for,
)

Event = EventOverlap | EventHandle | None


class EPHandle:
    """The routes of a dispatch, with the attributes of ``deep_ep.EPHandle``.

    Attributes:
        topk_idx: [T, K] ids of the dispatch.
        num_recv_tokens, num_expanded_tokens: rows in each layout, with padding.
        num_recv_tokens_per_expert_list: aligned rows of each local expert; empty without ``do_cpu_sync``.
        psum_num_recv_tokens_per_scaleup_rank: [W] int32 end of the rows of each source rank.
        psum_num_recv_tokens_per_expert: [L] int32 ends of the experts' aligned rows; in the expanded layout the aligned
            start of an expert plus its rows.
        num_unaligned_recv_tokens_per_expert: [L] int32.
        recv_src_metadata: [R, 2 + K] int32: source rank times ``num_max_tokens_per_rank`` plus token; index of the row;
            row of each slot in the expanded layout, -1 elsewhere.
        routes: the routes of moe_comm.
        place_RK: int64 row of each slot in the expanded layout; -1 elsewhere. Without padding.
    """

    num_sms = 0
    token_metadata_at_forward = channel_linked_list = None

    def __init__(
        self,
        routes: RankRoutes,
        topk_idx: Tensor,
        num_experts: int,
        alignment: int,
        most: int,
        expand: bool,
        sync: bool,
    ) -> None:
        self.routes, self.topk_idx, self.num_experts = routes, topk_idx, num_experts
        self.expert_alignment, self.num_max_tokens_per_rank, self.do_expand = alignment, most, expand
        local_RK, counts_L, aligned_L = routes.local_ids_RK, routes.rows_per_expert, routes.aligned(alignment)
        assert local_RK is not None
        starts_L = aligned_L.cumsum(0) - aligned_L
        self.place_RK = slot_positions(local_RK, counts_L, starts_L)
        source_R1 = (routes.source_R * most + routes.token_R).unsqueeze(1)
        index_R1 = torch.arange(routes.num_rows, device=local_RK.device).unsqueeze(1)
        metadata = torch.cat((source_R1, index_R1, self.place_RK), 1).int()
        self.recv_src_metadata, self.dst_buffer_slot_idx = routes.pad(metadata, -1), metadata.new_empty(0)
        self.num_recv_tokens = routes.padded_rows
        self.num_expanded_tokens = int(aligned_L.sum())
        if not sync:
            slots = routes.padded_rows * min(topk_idx.shape[1], max(1, len(counts_L)))
            self.num_expanded_tokens = -(-(slots + len(counts_L) * (alignment - 1)) // alignment) * alignment
        self.num_recv_tokens_per_expert_list: list[int] = aligned_L.tolist() if sync else []
        self.psum_num_recv_tokens_per_scaleup_rank = routes.rank_ends
        self.psum_num_recv_tokens_per_expert = (starts_L + counts_L if expand else aligned_L.cumsum(0)).int()
        self.num_unaligned_recv_tokens_per_expert = counts_L.int()

    def laid_out(self, x: Rows, weights_RK: Tensor | None) -> tuple[Rows, Tensor | None, Tensor | None]:
        """Return received rows, ids and weights in the layout of this handle, with padding."""
        if not self.do_expand:
            return self.routes.padded(x, weights_RK)
        has_slot = self.place_RK >= 0
        place_N, row_N = self.place_RK[has_slot], has_slot.nonzero()[:, 0]

        def expanded(rows_NX: Tensor) -> Tensor:
            return placed(rows_NX, place_N, self.num_expanded_tokens)

        rows = (expanded(x[0][row_N]), expanded(x[1][row_N])) if isinstance(x, tuple) else expanded(x[row_N])
        return rows, None, None if weights_RK is None else expanded(weights_RK[has_slot])


class ElasticBuffer(GroupBuffer):
    """Dispatch and combine of tokens with the interface of ``deep_ep.ElasticBuffer``; see ``Buffer``.

    Args:
        group: process group of the experts.
        num_bytes, num_cpu_bytes, hidden, num_topk, use_fp8_dispatch: sizes, not used.
        num_max_tokens_per_rank: default of ``dispatch``.
        allow_multiple_reduction: must be True for ``combine`` of the expanded layout.
        ignored: further arguments of DeepEP.

    Raises:
        ConfigError: no ``group``.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        *ignored: Any,
        explicitly_destroy: bool = False,
        **also_ignored: Any,
    ) -> None:
        super().__init__(group)
        self.rank_idx, self.num_ranks = self.rank, self.group_size
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank
        self.allow_multiple_reduction, self.deterministic = allow_multiple_reduction, True
        self.allow_hybrid_mode, self.explicitly_destroy = False, explicitly_destroy
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.num_scaleup_ranks = self.num_nvlink_ranks = self.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_allocated_qps = 1

    @staticmethod
    def get_buffer_size_hint(*ignored: Any, **also_ignored: Any) -> int:
        """Return 0: buffers are allocated on demand."""
        return 0

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all ranks."""
        self.group.barrier().wait()

    @staticmethod
    def capture() -> EventHandle:
        """Return an event at the current end of the current stream."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return (1, number of ranks): rows are not relayed by the buffer."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *ignored: Any, **also_ignored: Any) -> int:
        """Return 0. ``num_sms`` of the other calls is accepted and ignored."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 1. ``num_qps`` of the other calls is accepted and ignored."""
        return 1

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to each rank that has one of its experts, as ``Buffer.dispatch``. Collective.

        Args:
            x, topk_idx, topk_weights, expert_alignment: as in ``Buffer.dispatch``. In the expanded layout, the rows of
                an expert are padded to multiples of ``expert_alignment``.
            handle: as in ``Buffer.dispatch``, but ``topk_weights`` may be sent with it.
            num_max_tokens_per_rank: largest T of any rank, here or in the constructor; not needed with ``handle``.
            do_cpu_sync: False pads results to the largest possible number of rows. True with ``handle`` is an error.
            do_expand: one row per slot, ordered by (expert, source rank, token), instead of one row per token. Padding
                is always zero.
            num_sms, num_qps, do_zero_padding, use_tma_aligned_col_major_sf: accepted and ignored.

        Returns:
            Rows; local ids, None if expanded; weights [R, K], or [R] if expanded, or None; the handle; the event.
        """
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        with self._checks(x):
            _wait(previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
            if handle is not None:
                if topk_idx is not None or do_cpu_sync:
                    raise InputError("with a handle, topk_idx must be None and do_cpu_sync must not be True")
                check_input(x, check_handle(handle, EPHandle).topk_idx, topk_weights)
            else:
                if num_experts is None or topk_idx is None:
                    raise InputError("dispatch without a handle needs topk_idx and num_experts")
                check_input(x, topk_idx, topk_weights, num_experts)
                if most < (needed := max(1, len(topk_idx))):
                    raise InputError(
                        f"num_max_tokens_per_rank, here or in the constructor, must be {needed} or more, not {most}"
                    )
        if handle is not None:
            rows, weights = handle.routes.again(x, topk_weights)
        else:
            assert topk_idx is not None and num_experts is not None
            sync = do_cpu_sync is None or do_cpu_sync
            least = 0 if sync else self.num_ranks * most
            routes, rows, weights = self._exchange(x, topk_idx, topk_weights, num_experts, least_rows=least)
            ids_TK = topk_idx.clone() if do_handle_copy else topk_idx
            handle = EPHandle(routes, ids_TK, num_experts, expert_alignment or 1, most, do_expand, sync)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats += routes.rows_per_expert
        return *handle.laid_out(rows, weights), handle, finished(async_with_compute_stream, x)

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Add the rows of each token; see ``Buffer.combine``. Collective.

        In the expanded layout ``topk_weights`` is [R], and each rank first adds the rows of a token in slot order and
        rounds the sum once. Each weight is returned by the rank of its expert.

        Raises:
            ConfigError: the expanded layout with ``allow_multiple_reduction=False``; on every rank.
        """
        with self._checks(x):
            _wait(previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
            routes = check_handle(handle, EPHandle).routes
            if handle.do_expand and not self.allow_multiple_reduction:
                raise ConfigError(
                    "combine of expanded rows adds the rows of a token on each rank first; make the ElasticBuffer with "
                    "allow_multiple_reduction=True"
                )
            routes.check_combine(x, topk_weights, bias, handle.num_expanded_tokens if handle.do_expand else None)
        place_RK, weights = handle.place_RK, topk_weights
        if handle.do_expand:
            x = plain.weighted_sum(x, place_RK, None)
            if weights is not None:  # a rank without rows has nothing to index
                weights = weights[place_RK.clamp(min=0)] if len(weights) else weights.new_zeros(place_RK.shape)
        if weights is not None:
            weights = weights[: routes.num_rows].masked_fill(place_RK < 0, 0.0)
        y, weights = routes.combine(x, weights, bias)
        return y, weights, finished(async_with_compute_stream, x)


def _wait(previous: Event, before_epilogue: Event, allocates: bool) -> None:
    """Make the current stream wait for the events. Raise ConfigError for arguments that DeepEP excludes."""
    wait_for(previous, before_epilogue)
    if previous is not None and not allocates:
        raise ConfigError("previous_event needs allocate_on_comm_stream=True, as in DeepEP")
