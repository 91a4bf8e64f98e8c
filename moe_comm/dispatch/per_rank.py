"""One row per (token, rank): dispatches of a dispatcher whose experts are the ranks, as DeepEP sends tokens.

    token 5, experts 0 1 on rank 0 and 2 3 on rank 1, ids [2, 0, 3]

    slots      2 0 3
    owners     1 0 1
    sent to    . 0 1        each rank once, in the order of its last slot: combine adds as DeepEP's reference does

A rank receives the rows in the order (source rank, token). The extra values of a row are 32-bit words: source rank,
token, and what the caller adds, such as expert ids, weights and scales. No autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.operation import ID_DTYPES
from moe_comm.dispatch.selection.factory import shared_dispatcher
from moe_comm.dispatch.slots import sums
from moe_comm.dispatch.types import DROPPED, DispatchHandle, DispatchOptions
from moe_comm.errors import InputError, MoeCommError, known_to_peers
from moe_comm.kernels.fp8 import E4M3
from moe_comm.kernels.native import core, on_cpu
from moe_comm.runtime.memory import address, materialized, readable
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

        The dispatcher is for the device of ``x``. If ``x`` is not a tensor, or is on meta, the device of the last rows
        is used, as on the other ranks.
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
            least_rows: minimum number of rows that are returned, with padding.

        Returns:
            The routes, the received rows, and the weights [R, K].
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
            counts_L = counts_N1.view(-1, self.group_size).sum(1)  # rows from all ranks for this rank's experts
        routes = RankRoutes(dispatcher, ids_TN)
        rows, words_RX = routes.send_with(values, words)
        if topk_idx is not None:
            weighted = topk_weights is not None
            local_RK, weights_RK, counts_L = local_slots(words_RX, topk_idx.shape[1], own, topk_idx.dtype, weighted)
        routes.received(words_RX, local_RK, counts_L, least_rows)
        return routes, rows if scales is None else narrow_rows(rows, words_RX, scales), weights_RK


SENDER_WORDS = 2
"""Words of each row in front of the caller's: source rank and token."""


@dataclass(frozen=True)
class RankLayout:
    """Where the slots of this rank's tokens are sent.

    Attributes:
        ranks_TN: int64 ranks of each token, in the order of the last slots that they own; then -1. N is the smaller one
            of K and W.
        per_rank_W, per_expert_E: int32 tokens for each rank, and slots of each expert.
        in_rank_TW: bool.
    """

    ranks_TN: Tensor
    per_rank_W: Tensor
    per_expert_E: Tensor
    in_rank_TW: Tensor


def rank_layout(ids_TK: Tensor, num_experts: int, world: int) -> RankLayout:
    """Return the layout of expert ids, int32 or int64, that are -1 or valid."""
    (tokens, top_k), device = ids_TK.shape, ids_TK.device
    owner_E = _owners(num_experts, world, device)
    if on_cpu(ids_TK):
        ids_TK, ranks_TN = ids_TK.contiguous(), torch.empty(tokens, min(top_k, world), dtype=torch.int64, device="cpu")
        per_rank_W, per_expert_E = (torch.zeros(size, dtype=torch.int32, device="cpu") for size in (world, num_experts))
        in_rank_TW = torch.zeros(tokens, world, dtype=torch.bool, device="cpu")
        outputs = (
            address(per_rank_W, torch.int32),
            address(per_expert_E, torch.int32),
            address(in_rank_TW, torch.bool),
            address(ranks_TN, torch.int64),
        )
        ids, owner = address(ids_TK, ids_TK.dtype), address(owner_E, torch.int32, (num_experts,))
        core().rank_layout(ids, (tokens, top_k), ids_TK.itemsize, owner, world, outputs)
        return RankLayout(ranks_TN, per_rank_W, per_expert_E, in_rank_TW)
    owner_TK = F.pad(owner_E, (1, 0), value=DROPPED)[ids_TK.long() + 1].long()
    repeated_TK = torch.stack([(owner_TK[:, k + 1 :] == owner_TK[:, k, None]).any(1) for k in range(top_k)], 1)
    in_rank_TW = (owner_TK.unsqueeze(2) == torch.arange(world, device=device)).any(1)
    per_expert_E = torch.bincount(ids_TK.flatten() + 1, minlength=1 + num_experts)[1:].int()
    last_TK = owner_TK.masked_fill(repeated_TK, DROPPED)
    order_TN = (last_TK < 0).byte().argsort(dim=1, stable=True)[:, :world]
    return RankLayout(last_TK.gather(1, order_TN), in_rank_TW.sum(0, dtype=torch.int32), per_expert_E, in_rank_TW)


@cache
def _owners(num_experts: int, world: int, device: torch.device) -> Tensor:
    """Return [E] int32, the rank of each expert."""
    counts = torch.tensor(ExpertPlacement.of(num_experts, world).experts_per_rank, dtype=torch.int64, device="cpu")
    return torch.arange(world, dtype=torch.int32, device="cpu").repeat_interleave(counts).to(device)


def local_slots(
    words_RX: Tensor, top_k: int, own: range, dtype: torch.dtype, weighted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Decode the received words for the experts ``own`` of this rank.

    Args:
        words_RX: int32: those of the sender, K expert ids and, if ``weighted``, the bits of K weights.

    Returns:
        [R, K] local ids in ``dtype``, int32 or int64, -1 for experts of other ranks; [R, K] fp32 weights, 0 there, or
        None; [L] int64 slots of each expert.
    """
    rows, first = len(words_RX), SENDER_WORDS
    if on_cpu(words_RX) and words_RX.is_contiguous():
        local_RK = torch.empty(rows, top_k, dtype=dtype, device="cpu")
        weights_RK = torch.empty(rows, top_k, dtype=torch.float32, device="cpu") if weighted else None
        counts_L = torch.empty(len(own), dtype=torch.int64, device="cpu")
        outputs = (
            address(local_RK, dtype),
            address(weights_RK, torch.float32, local_RK.shape),
            address(counts_L, torch.int64),
        )
        shape = rows, words_RX.shape[1], top_k
        core().local_slots(address(words_RX, torch.int32), shape, (own.start, len(own)), dtype.itemsize, outputs)
        return local_RK, weights_RK, counts_L
    ids_RK, bits_RK = words_RX[:, first : first + top_k], words_RX[:, first + top_k : first + 2 * top_k]
    others_RK = (ids_RK < own.start) | (ids_RK >= own.stop)
    local_RK = (ids_RK - own.start).masked_fill(others_RK, DROPPED)
    counts_L = torch.bincount(local_RK.flatten() + 1, minlength=1 + len(own))[1:]
    weights_RK = bits_RK.masked_fill(others_RK, 0).view(torch.float32) if weighted else None
    return local_RK.to(dtype), weights_RK, counts_L


def slot_positions(local_RK: Tensor, counts_L: Tensor, starts_L: Tensor) -> Tensor:
    """Return [R, K] int64: the index of each slot's row, if an expert's rows begin at ``starts_L``; -1 for other
    slots."""
    if not len(counts_L):
        return torch.full(local_RK.shape, DROPPED, dtype=torch.int64, device=local_RK.device)
    _, place_RK = sums.order(local_RK, len(counts_L))
    shift_L = starts_L - (counts_L.cumsum(0) - counts_L)
    return torch.where(local_RK < 0, DROPPED, place_RK + shift_L[local_RK.clamp(min=0).long()])


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [T, H], or e4m3 values [T, H] and fp32 or int32 scales [T, S]."""
Bias = Tensor | tuple[Tensor, Tensor] | None


def unpacked(x: Any) -> tuple[Any, Any]:
    """Return values and scales."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def checked(name: str, value: Any, dtypes: Sequence[torch.dtype], *shapes: tuple[int | None, ...]) -> Tensor:
    """Return a tensor with one of ``dtypes`` and ``shapes``, or raise InputError. None: any size."""
    got = type(value).__name__
    if isinstance(value, Tensor) and not value.is_nested:
        size, known = value.shape, value.dtype in dtypes
        for shape in shapes:
            if known and len(shape) == len(size) and all(n in (None, m) for n, m in zip(shape, size, strict=True)):
                return readable(value, name)
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


def wide_rows(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Return values and scales. e4m3 values become bf16, which holds each of them, so that combine can return bf16."""
    values, scales = unpacked(x)
    return (values, None) if scales is None else (values.to(torch.bfloat16), scales)


def narrow_rows(rows_RD: Tensor, words_RX: Tensor, scales: Tensor) -> Rows:
    """Split received words into e4m3 values and, from the last words, scales in the format of ``scales``."""
    first = words_RX.shape[1] - scales.shape[1]
    return rows_RD.to(E4M3), words_RX[:, first:].contiguous().view(scales.dtype)


class RankRoutes:
    """Routes for rows of any width and dtype. Creating an instance counts the slots again.

    Attributes:
        ids_TN: [T, N] int64 ranks of each token, each at most once; -1 elsewhere.
        source_R, token_R: int32 source rank and token of each received row.
        local_ids_RK: ids of this rank's experts, -1 for experts of other ranks; None without ids.
        rows_per_expert: [L].
        padded_rows: number of rows after padding.
    """

    source_R: Tensor
    token_R: Tensor
    local_ids_RK: Tensor | None
    rows_per_expert: Tensor
    padded_rows: int

    def __init__(self, dispatcher: Dispatcher, ids_TN: Tensor) -> None:
        self.dispatcher, self.ids_TN = dispatcher, ids_TN
        self._handles: dict[tuple[bool, int, torch.dtype], DispatchHandle] = {}

    def send(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank receives. Collective."""
        key = False, x_TD.shape[1], x_TD.dtype
        if key in self._handles:
            return self.dispatcher.spread(x_TD, self._handles[key])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN)
        self._handles[key] = sent.handle
        return sent.rows_RD

    def send_with(self, x_TD: Tensor, words: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return received rows and int32 words: the sender's, and ``words`` [T, X], fp32 or integers. Collective.

        The label of the dispatch lists the words, so that ranks that send different words of the same width raise
        RankMismatch.
        """
        sent_words = {name: materialized(part) for name, part in words.items() if part is not None}
        label = " and ".join(f"{part.shape[1]} {name}" for name, part in sent_words.items())
        if (scales := sent_words.get("scales")) is not None:
            label += f" ({str(scales.dtype).removeprefix('torch.')})"
        tokens = len(x_TD)
        token_T1 = torch.arange(tokens, dtype=torch.int32, device=x_TD.device).unsqueeze(1)
        sender_T2 = F.pad(token_T1, (1, 0), value=self.dispatcher.rank)
        bits = [part.view(torch.int32) if part.is_floating_point() else part.int() for part in sent_words.values()]
        words_TX = torch.cat([sender_T2, *bits], 1)
        extra = words_TX.unsqueeze(1).expand(tokens, self.ids_TN.shape[1], words_TX.shape[1])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN, extra_TKX=extra, label=label)
        assert sent.extra_RX is not None
        self._handles[False, x_TD.shape[1], x_TD.dtype] = sent.handle
        return sent.rows_RD, sent.extra_RX

    def sum(self, rows_RD: Tensor, terms: Sequence[Tensor] = ()) -> Tensor:
        """Return [T, D]: ``terms`` and each token's rows, added in fp32 in slot order and rounded once. Collective."""
        if not terms:
            return self._sum(rows_RD, slots=False)
        slots_TND = self._sum(rows_RD, slots=True).view(*self.ids_TN.shape, rows_RD.shape[1])
        return reduce(torch.add, (term.float() for term in (*terms, *slots_TND.unbind(1)))).to(rows_RD.dtype)

    def _sum(self, rows_RD: Tensor, slots: bool) -> Tensor:
        """Return the sums [T, D]. slots: [T * N, D], the row of each slot; zeros without one."""
        ids = self.ids_TN.reshape(-1, 1) if slots else self.ids_TN
        key = slots, rows_RD.shape[1], rows_RD.dtype
        if key not in self._handles:
            nothing = rows_RD.new_zeros(1, 1).expand(len(ids), rows_RD.shape[1])
            self._handles[key] = self.dispatcher.dispatch(nothing, ids).handle
        return self.dispatcher.combine(
            rows_RD, torch.ones(ids.shape, device=rows_RD.device, dtype=torch.float32), self._handles[key]
        )

    def received(self, words_RX: Tensor, local_ids_RK: Tensor | None, rows_per_expert: Tensor, least_rows: int) -> None:
        """Store the description of the received rows."""
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
        """Send other rows along the same routes, and weights [T, K] or None. Return the received ones. Collective."""
        values, scales = wide_rows(x)
        if scales is None and topk_weights is None:
            return self.send(values), None
        rows, words_RX = self.send_with(values, {"weights": topk_weights, "scales": scales})
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
