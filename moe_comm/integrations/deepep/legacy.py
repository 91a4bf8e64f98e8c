"""``deep_ep.Buffer``: the first interface of DeepEP, and its low-latency calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import DROPPED, DispatchHandle
from moe_comm.dispatch.operation import ID_DTYPES
from moe_comm.dispatch.per_rank import (
    FLOATS,
    Bias,
    RankRoutes,
    Rows,
    check_ids,
    check_input,
    checked,
    rank_layout,
    unpacked,
)
from moe_comm.errors import ConfigError, InputError
from moe_comm.integrations.deepep.events import (
    Config,
    EventHandle,
    EventOverlap,
    GroupBuffer,
    check_handle,
    finished,
    placed,
    wait_for,
)
from moe_comm.kernels.fp8 import BLOCK, E4M3, E4M3_MAX, in_blocks, scales_for


class Handle(tuple[Any, ...]):
    """DeepEP's tuple of tensors, with the routes that moe_comm uses in its place."""

    routes: RankRoutes


class LowLatencyHandle(tuple[Any, ...]):
    """DeepEP's (source tokens, ranges, max tokens, hidden, number of experts), with the handle of moe_comm.

    Source tokens and ranges, which only DeepEP's kernels read, are None.

    Attributes:
        sent: dispatch handle. mask_LS: which positions of the padded blocks hold a row. buffer: of
            ``get_next_low_latency_combine_buffer``.
    """

    sent: DispatchHandle
    mask_LS: Tensor
    buffer: Tensor | None


class Buffer(GroupBuffer):
    """Dispatch and combine of tokens with the interface of ``deep_ep.Buffer``, on any device that moe_comm supports.

    Operations run on the current stream and are queued when they return. Memory is allocated on demand, so all sizes
    are accepted and not used. Hidden sizes, top-k, numbers of experts and of ranks are not limited. Collective methods
    raise InputError, RankMismatch, PeerDied and PeerTimeout on every rank.

    Args:
        group: process group of the experts.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy: stored as attributes.
        ignored: further arguments of DeepEP.

    Raises:
        ConfigError: no ``group``.
    """

    num_sms: ClassVar[int] = 20
    _num_experts: int | None = None
    """Of the last ``low_latency_dispatch``."""

    def __init__(
        self,
        group: ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        *ignored: Any,
        explicitly_destroy: bool = False,
        **also_ignored: Any,
    ) -> None:
        super().__init__(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: fp8 rows are accepted on every device."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Store the number of SMs, which is not used.

        Raises:
            InputError: an odd number.
        """
        if new_num_sms % 2:
            raise InputError(f"the number of SMs must be even; got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event at the current end of the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return a configuration, for any number of ranks."""
        return Config(cls.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return 0: buffers are allocated on demand."""
        return 0

    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Count tokens by rank and by expert. Not collective.

        Args:
            topk_idx: [T, K] expert ids; -1 selects none.

        Returns:
            [W] int32 tokens to each rank, None, [E] int32 tokens to each expert, [T, W] bool, and the event.

        Raises:
            InputError: not [T, K], or ids out of range. Only on this rank, which has not communicated.
        """
        _wait(previous_event, async_finish, allocate_on_comm_stream)
        check_ids(topk_idx, None, num_experts)
        layout = rank_layout(topk_idx, num_experts, self.group_size)
        self._layout = None if topk_idx.is_inference() else (topk_idx, topk_idx._version, layout)
        return layout.per_rank_W, None, layout.per_expert_E, layout.in_rank_TW, finished(async_finish)

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Send each token once to each rank that has one of its experts. Collective.

        Args:
            x: [T, H] of a float type, or e4m3 [T, H] and scales [T, S].
            handle: of an earlier dispatch, whose routes are used again. Excludes ids and weights.
            is_token_in_rank, num_tokens_per_expert: from ``get_dispatch_layout``.
            topk_idx: [T, K] expert ids; -1 selects none. topk_weights: [T, K] fp32.
            expert_alignment: the returned counts are rounded up to multiples of it.
            num_worst_tokens: pad all results to this number of rows, and return an empty list.

        Returns:
            Rows ordered by (source rank, token); local expert ids, -1 for experts of other ranks; weights, 0 there; the
            rows of each local expert; the handle; the event. With ``handle``, the rows, four None and the event.
        """
        with self._checks(x):
            _wait(previous_event, async_finish, allocate_on_comm_stream)
            if handle is not None:
                if topk_idx is not None or topk_weights is not None:
                    raise InputError("topk_idx and topk_weights must be None with a handle, which has the routes")
                check_handle(handle, Handle)
                check_input(x, None, None)
            else:
                if num_worst_tokens and topk_idx is None:
                    raise InputError("num_worst_tokens needs topk_idx")
                counts_E = checked("num_tokens_per_expert", num_tokens_per_expert, ID_DTYPES, (None,))
                check_input(x, topk_idx, topk_weights, len(counts_E))
                shape = len(unpacked(x)[0]), self.group_size
                in_rank_TW = checked("is_token_in_rank", is_token_in_rank, (torch.bool,), shape)
        if handle is not None:
            rows, _, _ = handle.routes.padded(*handle.routes.again(x))
            return rows, None, None, None, None, finished(async_finish, x)
        routes, rows, weights = self._exchange(
            x, topk_idx, topk_weights, len(counts_E), in_rank_TW, counts_E, least_rows=num_worst_tokens
        )
        if routes.num_rows > num_worst_tokens > 0:
            error = InputError(f"received {routes.num_rows} rows; num_worst_tokens is {num_worst_tokens}")
            routes.dispatcher.abort(error, label="deep_ep")
            raise error
        rows, ids, weights = routes.padded(rows, weights)
        aligned = [] if num_worst_tokens else routes.aligned(expert_alignment).tolist()
        return rows, ids, weights, aligned, self._handle(routes, in_rank_TW), finished(async_finish, x)

    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Add the rows of each token, without weights, in fp32. Collective.

        Ranks are added in the order of the last slots that they own in a token, as in DeepEP's reference.

        Args:
            x: [R, H] one row for each received row.
            topk_weights: [R, K] fp32, added in the same way.
            bias: one or two [T, H], which the sum starts with.

        Returns:
            [T, H] in the dtype of ``x``; [T, K] or None; the event.

        Raises:
            RankMismatch: also if only some ranks pass ``topk_weights``, or ``bias``; on every rank.
        """
        with self._checks(x):
            _wait(previous_event, async_finish, allocate_on_comm_stream)
            check_handle(handle, Handle).routes.check_combine(x, topk_weights, bias)
        y, weights = handle.routes.combine(x, topk_weights, bias)
        return y, weights, finished(async_finish, x)

    internode_dispatch, internode_combine = dispatch, combine

    def _handle(self, routes: RankRoutes, in_rank_TW: Tensor) -> Handle:
        """Return DeepEP's tuple. Of its prefix matrix, only the column of this rank is known; the others are -1."""
        prefix_WW = routes.token_R.new_full((self.group_size, self.group_size), -1)
        prefix_WW[:, self.rank] = routes.rank_ends
        none = prefix_WW.new_empty(0)
        handle = Handle((prefix_WW, none, none, routes.pad(routes.token_R, -1), in_rank_TW, none))
        handle.routes = routes
        return handle

    # --- low latency ---

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: no rows are kept in a buffer."""

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Send a row for each slot, into blocks of fixed size. Collective.

        Rows have been received when this returns, so the hook does nothing. Any number of results may be kept.

        Args:
            x: [T, H]. topk_idx: [T, K]; -1 selects none.
            num_max_dispatch_tokens_per_rank: largest T of any rank, M.
            use_fp8: return e4m3 values and a scale for 128 channels. round_scale: scales are powers of two. use_ue8m0:
                scales are exponents, four in an int32.

        Returns:
            [L, W * M, H] with each expert's rows in front, ordered by source rank and token; [L] int32 counts; the
            handle; the event; the hook.
        """
        self._num_experts, most = num_experts, num_max_dispatch_tokens_per_rank
        with self._checks(x, num_experts):
            checked("x", x, FLOATS, (None, None))
            check_ids(topk_idx, len(x))
            if len(x) > most:
                raise InputError(f"{len(x)} tokens are more than num_max_dispatch_tokens_per_rank={most}")
            if use_fp8 and x.shape[1] % (4 * BLOCK if use_ue8m0 else BLOCK):
                shape = tuple(x.shape)
                raise InputError(f"fp8 rows need a multiple of 128 channels (512 with use_ue8m0); got {shape}")
            sorted_TK = topk_idx.sort(1).values
            if bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] != DROPPED)).any()):
                raise InputError("a token has an expert twice, but a low-latency block has one place for each token")
        sent = self._dispatcher(x, num_experts).dispatch(x, topk_idx)
        counts_L = torch.tensor(sent.handle.rows_per_expert, dtype=torch.int32, device=x.device)
        mask_LS = torch.arange(self.group_size * most, device=x.device) < counts_L.unsqueeze(1)
        handle = LowLatencyHandle((None, None, most, x.shape[1], num_experts))
        handle.sent, handle.mask_LS, handle.buffer = sent.handle, mask_LS, None
        if use_fp8:
            values, scales = _quantized(sent.rows_RD, round_scale, use_ue8m0)
            by_column = placed(scales, mask_LS, *mask_LS.shape).mT.contiguous().mT
            rows: Rows = placed(values, mask_LS, *mask_LS.shape), by_column
        else:
            rows = placed(sent.rows_RD, mask_LS, *mask_LS.shape)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts_L
        return rows, counts_L, handle, finished(async_finish, x), _nothing_left if return_recv_hook else None

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Return the weighted sum of each token's expert outputs, in fp32 and in slot order. Collective.

        Args:
            x: [L, W * M, H], at the positions of the dispatched rows.
            topk_weights: [T, K] fp32.
            zero_copy: read the buffer of ``get_next_low_latency_combine_buffer`` in place of ``x``.

        Returns:
            [T, H], the event and the hook, as in ``low_latency_dispatch``.

        Raises:
            ConfigError: ``use_logfmt``.
        """
        num_experts = handle[4] if isinstance(handle, LowLatencyHandle) else self._num_experts
        with self._checks(x, num_experts):
            made = check_handle(handle, LowLatencyHandle)
            given = made.buffer if zero_copy and made.buffer is not None else x
            blocks = checked("x", given, FLOATS, (*made.mask_LS.shape, made[3]))
            checked("topk_weights", topk_weights, FLOATS, (made.sent.num_tokens, made.sent.top_k))
            if use_logfmt:
                raise ConfigError("moe_comm has no LogFMT rows; call low_latency_combine with use_logfmt=False")
        y_TD = self._dispatcher(x, num_experts).combine(blocks[handle.mask_LS], topk_weights, handle.sent)
        y_TD = y_TD if out is None else out.copy_(y_TD)
        return y_TD, finished(async_finish, x), _nothing_left if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return [L, W * M, H] in the dtype of the dispatched tokens, for ``low_latency_combine(zero_copy=True)``."""
        handle.buffer = handle.mask_LS.new_zeros(*handle.mask_LS.shape, handle[3], dtype=handle.sent.dtype)
        return handle.buffer


def _nothing_left() -> None:
    """Return: the rows have been received."""


def _wait(previous: EventOverlap | None, asynchronous: bool, allocates: bool) -> None:
    """Make the current stream wait for ``previous``. Raise ConfigError for arguments that DeepEP excludes."""
    wait_for(previous)
    if allocates and (previous is None or not asynchronous):
        raise ConfigError("allocate_on_comm_stream needs previous_event and async_finish=True, as in DeepEP")


def _quantized(rows_RD: Tensor, powers_of_two: bool, exponents: bool) -> tuple[Tensor, Tensor]:
    """Return e4m3 values and [R, D / 128] fp32 scales or, four in an int32, their exponents, as DeepEP does."""
    blocks = in_blocks(rows_RD.float())
    largest = blocks.abs().amax(2).clamp(min=1e-4)
    scales = scales_for(largest, powers_of_two or exponents)
    factors = scales.reciprocal() if powers_of_two or exponents else E4M3_MAX / largest
    if exponents:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return (blocks * factors.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).flatten(1), scales
