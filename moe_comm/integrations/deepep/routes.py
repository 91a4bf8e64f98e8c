"""What both buffers of DeepEP share: checks of arguments, dispatchers, and routes with padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.dispatch import DROPPED, Dispatcher, DispatchOptions
from moe_comm.dispatch.input_faults import ID_DTYPES
from moe_comm.dispatch.per_rank import SENDER_WORDS, RankLayout, RankRoutes, local_slots, rank_layout
from moe_comm.dispatch.selection.shared import shared_dispatcher
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.kernels.fp8 import E4M3
from moe_comm.topology import ExpertPlacement

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [T, H], or e4m3 values [T, H] and fp32 or int32 scales [T, S]."""
Bias = Tensor | tuple[Tensor, Tensor] | None
HandleT = TypeVar("HandleT")


def unpacked(x: Any) -> tuple[Any, Any]:
    """Return values and scales."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def checked(name: str, value: Any, dtypes: Sequence[torch.dtype], *shapes: tuple[int | None, ...]) -> Tensor:
    """Return a tensor with one of ``dtypes`` and ``shapes``, or raise InputError. None: any size."""
    got = type(value).__name__
    if isinstance(value, Tensor):
        size, known = value.shape, value.dtype in dtypes
        for shape in shapes:
            if known and len(shape) == len(size) and all(n in (None, m) for n, m in zip(shape, size, strict=True)):
                return value
        got = f"{value.dtype} {list(size)}"
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise InputError(f"{name} must be {names} {str(list(shapes[-1])).replace('None', '*')}; got {got}")


def check_input(x: Any, topk_idx: Any, topk_weights: Any, num_experts: int | None = None) -> None:
    """Raise InputError for rows, ids and weights that a dispatch cannot send. num_experts None: any ids."""
    values, scales = unpacked(x)
    tokens = len(checked("x", values, FLOATS if scales is None else (E4M3,), (None, None)))
    if scales is not None:
        checked("the scales of x", scales, (torch.float32, torch.int32), (tokens, None))
    if topk_idx is not None:
        check_ids(topk_idx, tokens, num_experts)
    if topk_weights is not None:
        if topk_idx is None:
            raise InputError("topk_weights needs topk_idx")
        checked("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape))


def check_ids(topk_idx: Any, tokens: int | None, num_experts: int | None = None) -> None:
    """Raise InputError for ids that are not [T, K], or out of range."""
    ids_TK = checked("topk_idx", topk_idx, ID_DTYPES, (tokens, None))
    if not ids_TK.shape[1]:
        raise InputError("topk_idx needs at least one column; -1 selects no expert")
    if num_experts is None:
        return
    low, high = (int(v) for v in torch.aminmax(ids_TK)) if ids_TK.numel() else (DROPPED, DROPPED)
    if low < DROPPED or high >= num_experts or num_experts < 1:
        raise InputError(f"topk_idx must be -1 or an expert id below {num_experts}; got ids from {low} to {high}")


def check_handle(handle: Any, kind: type[HandleT]) -> HandleT:
    """Return ``handle``, or raise InputError if it is of another kind."""
    if isinstance(handle, kind):
        return handle
    raise InputError(f"handle must come from dispatch of the same buffer; got {type(handle).__name__}")


def placed(rows_NX: Tensor, place: Tensor, *shape: int) -> Tensor:
    """Return zeros [*shape, X] with ``rows_NX`` at ``place``, an index or a mask. Torch cannot index e4m3."""
    bits_NX = rows_NX.view(torch.uint8) if rows_NX.dtype.itemsize == 1 else rows_NX
    out = bits_NX.new_zeros(*shape, *rows_NX.shape[1:])
    out[place] = bits_NX
    return out.view(rows_NX.dtype)


class GroupBuffer:
    """What both buffers share. Dispatchers are created on first use, which is collective.

    Raises:
        ConfigError: there is no process group.
    """

    backend: str = "auto"
    timeout_s: float = 300.0
    _layout: tuple[Tensor, int, RankLayout] | None = None
    """Ids, their version and layout, of ``get_dispatch_layout`` for one dispatch. Inference tensors have no version."""

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is None:
            raise ConfigError("a deep_ep buffer of moe_comm needs group=, a torch.distributed process group")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    def destroy(self) -> None:
        """Do nothing: the dispatchers are released with the process group."""

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which all operations run. Needs CUDA."""
        return torch.cuda.current_stream()

    @cached_property
    def _device(self) -> torch.device:
        """Device of the last rows; before the first ones, the default of the group."""
        return Channel(communicator_of(self.group, self.timeout_s), self.timeout_s).rows_device

    def _dispatcher(self, x: Any, num_experts: int | None = None) -> Dispatcher:
        """Return the dispatcher of ``num_experts`` experts, or the one whose experts are the ranks.

        It is for the device of x. An x that is no tensor has the device of the last rows, as on the other ranks.
        """
        values, _ = unpacked(x)
        if isinstance(values, Tensor):
            self._device = values.device
        options = DispatchOptions(timeout_s=self.timeout_s)
        return shared_dispatcher(num_experts or self.group_size, self.group, self._device, self.backend, options)

    @contextmanager
    def _checks(self, x: Any, num_experts: int | None = None) -> Iterator[None]:
        """Raise an error of the block on every rank, with the dispatcher that the other ranks call next."""
        try:
            yield
        except MoeCommError as fault:
            self._dispatcher(x, num_experts).refuse(fault, torch.empty(0, device=self._device))

    def _layout_of(self, topk_idx: Tensor, num_experts: int) -> RankLayout:
        """Return the layout that ``get_dispatch_layout`` stored for these ids; a new one if they differ or changed."""
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
    ) -> tuple[Routes, Rows, Tensor | None]:
        """Send each token once to each rank that has one of its experts. Collective. No autograd.

        Args:
            is_token_in_rank, tokens_per_expert: [T, W] and [E], in place of ids.
            least_rows: rows that the caller sees at least.

        Returns:
            The routes, the received rows, and the weights [R, K].

        Raises:
            InputError, RankMismatch, PeerDied, PeerTimeout: on every rank.
        """
        dispatcher, values, scales = self._dispatcher(x), *wide_rows(x)
        own = ExpertPlacement.of(num_experts, self.group_size).local_range(self.rank)
        words = [part for part in (topk_idx, topk_weights, scales) if part is not None]
        local_RK = weights_RK = None
        if topk_idx is None:
            assert is_token_in_rank is not None and tokens_per_expert is not None
            ids_TN = torch.arange(self.group_size, device=self._device).where(is_token_in_rank, DROPPED)
            ids_E1 = torch.arange(num_experts, device=self._device).unsqueeze(1)
            counts_E1 = tokens_per_expert.int().view(torch.float32).unsqueeze(1)
            counts_N1 = self._dispatcher(x, num_experts).dispatch(counts_E1, ids_E1).rows_RD.view(torch.int32)
            counts_L = counts_N1.view(-1, self.group_size).sum(1)  # of all ranks, for this rank's experts
        else:
            ids_TN = self._layout_of(topk_idx, num_experts).ranks_TN
        routes = Routes(dispatcher, ids_TN)
        rows, words_RX = routes.send_with(values, words)
        if topk_idx is not None:
            weighted = topk_weights is not None
            local_RK, weights_RK, counts_L = local_slots(words_RX, topk_idx.shape[1], own, topk_idx.dtype, weighted)
        routes.received(words_RX, local_RK, counts_L, least_rows)
        return routes, rows if scales is None else narrow_rows(rows, words_RX, scales), weights_RK


def wide_rows(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Return values and scales. e4m3 values become bf16, which holds each of them, so that combine can return bf16."""
    values, scales = unpacked(x)
    return (values, None) if scales is None else (values.to(torch.bfloat16), scales)


def narrow_rows(rows_RD: Tensor, words_RX: Tensor, scales: Tensor) -> Rows:
    """Return received e4m3 values, and scales like ``scales``, which are the last words."""
    first = words_RX.shape[1] - scales.shape[1]
    return rows_RD.to(E4M3), words_RX[:, first:].contiguous().view(scales.dtype)


class Routes(RankRoutes):
    """The routes of one dispatch, for combine and for further rows.

    Attributes:
        source_R, token_R: int32 source rank and token of each received row.
        local_ids_RK: ids of this rank's experts, -1 for experts of other ranks; None without ids.
        rows_per_expert: [L].
        padded_rows: number of rows that the caller sees.
    """

    source_R: Tensor
    token_R: Tensor
    local_ids_RK: Tensor | None
    rows_per_expert: Tensor
    padded_rows: int

    def received(self, words_RX: Tensor, local_ids_RK: Tensor | None, rows_per_expert: Tensor, least_rows: int) -> None:
        """Store what the rows are."""
        self.source_R, self.token_R = words_RX[:, 0].contiguous(), words_RX[:, 1].contiguous()
        self.local_ids_RK, self.rows_per_expert = local_ids_RK, rows_per_expert
        self.padded_rows = max(len(words_RX), least_rows)

    @property
    def num_rows(self) -> int:
        """Number R of received rows."""
        return len(self.source_R)

    @property
    def rank_ends(self) -> Tensor:
        """[W] int32 end of the received rows of each source rank."""
        ranks_W = torch.arange(self.dispatcher.world, dtype=torch.int32, device=self.source_R.device)
        return torch.searchsorted(self.source_R, ranks_W, right=True, out_int32=True)

    def aligned(self, alignment: int) -> Tensor:
        """Return the rows per expert, rounded up."""
        counts_L = self.rows_per_expert
        return counts_L if alignment == 1 else (counts_L + alignment - 1) // alignment * alignment

    def again(self, x: Rows, topk_weights: Tensor | None = None) -> tuple[Rows, Tensor | None]:
        """Send other rows, and weights [T, K] or None. Return those of this rank's experts. Collective."""
        values, scales = wide_rows(x)
        if scales is None and topk_weights is None:
            return self.send(values), None
        rows, words_RX = self.send_with(values, [part for part in (topk_weights, scales) if part is not None])
        weights = None
        if topk_weights is not None:
            assert self.local_ids_RK is not None
            bits_RK = words_RX[:, SENDER_WORDS : SENDER_WORDS + topk_weights.shape[1]]
            weights = bits_RK.masked_fill(self.local_ids_RK < 0, 0).view(torch.float32)
        return rows if scales is None else narrow_rows(rows, words_RX, scales), weights

    def combine(self, rows_RD: Tensor, weights_RK: Tensor | None, bias: Bias) -> tuple[Tensor, Tensor | None]:
        """Return the sums of each token's rows [T, D] and weights [T, K] over the ranks. Collective.

        Rows are added in fp32, starting with ``bias``, and rounded once. Ranks that disagree on the presence of weights
        or bias start different operations, which raises RankMismatch.
        """
        weights_TK = None if weights_RK is None else self.sum(weights_RK[: self.num_rows])
        terms = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        return self.sum(rows_RD[: self.num_rows], terms), weights_TK

    def pad(self, rows: Tensor, fill: float = 0) -> Tensor:
        """Append rows up to ``padded_rows``."""
        missing = self.padded_rows - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))

    def padded(self, x: Rows, weights_RK: Tensor | None) -> tuple[Rows, Tensor | None, Tensor | None]:
        """Return rows, local ids and weights of a dispatch, with padding."""
        rows = (self.pad(x[0]), self.pad(x[1])) if isinstance(x, tuple) else self.pad(x)
        ids = None if self.local_ids_RK is None else self.pad(self.local_ids_RK, -1)
        return rows, ids, None if weights_RK is None else self.pad(weights_RK)

    def check_combine(self, x: Any, topk_weights: Any, bias: Any, expanded: int | None = None) -> None:
        """Raise InputError for arguments that combine does not accept. expanded: rows of the expanded layout."""
        counts = [self.num_rows, self.padded_rows] if expanded is None else [expanded]
        rows = checked("x, all rows that were received,", x, FLOATS, *((count, None) for count in counts))
        if topk_weights is not None:
            top_k = None if self.local_ids_RK is None else self.local_ids_RK.shape[1]
            shapes = [(count, top_k) if expanded is None else (count,) for count in counts]
            checked("topk_weights", topk_weights, (torch.float32,), *shapes)
        terms = bias if isinstance(bias, tuple) else (bias,)
        if len(terms) not in (1, 2):
            raise InputError(f"bias must be one or two tensors; got {len(terms)}")
        for term in () if bias is None else terms:
            checked("bias", term, FLOATS, (len(self.ids_TN), rows.shape[1]))
