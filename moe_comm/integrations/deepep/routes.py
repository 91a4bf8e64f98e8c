"""One row per (token, rank), as DeepEP sends tokens, with a dispatcher whose experts are the ranks.

    token 5, experts 0 1 on rank 0 and 2 3 on rank 1, ids [2, 0, 3]

    slots      2 0 3
    owners     1 0 1
    sent to    . 0 1        each rank once, in the last of its slots: combine adds in the order of DeepEP's reference

A rank receives the rows in the order (source rank, token). A second row per token carries bits in fp32 words: source
rank, token, expert ids, weights and scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import DROPPED, Dispatcher, DispatchHandle, DispatchOptions, make_dispatcher
from moe_comm.dispatch.base import ID_DTYPES
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.topology import ExpertPlacement

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [T, H], or e4m3 values [T, H] and fp32 or int32 scales [T, S]."""
Bias = Tensor | tuple[Tensor, Tensor] | None


class GroupDispatchers:
    """The dispatchers of one buffer over the ranks of ``group``, created on first use, which is collective.

    Raises:
        ConfigError: there is no process group.
    """

    def __init__(self, group: ProcessGroup | None, backend: str, timeout_s: float) -> None:
        if group is None:
            raise ConfigError("a deep_ep buffer of moe_comm needs group=, a torch.distributed process group")
        self.group, self.rank, self.world = group, group.rank(), group.size()
        self._backend, self._options = backend, DispatchOptions(timeout_s=timeout_s)
        self._made: dict[tuple[int, str], Dispatcher] = {}

    def over(self, num_experts: int, device: torch.device) -> Dispatcher:
        """Return the dispatcher of ``num_experts`` experts for rows on ``device``."""
        key = num_experts, device.type
        if key not in self._made:
            self._made[key] = make_dispatcher(
                num_experts, self.group, backend=self._backend, options=self._options, device=device
            )
        return self._made[key]

    def between_ranks(self, device: torch.device) -> Dispatcher:
        """Return the dispatcher whose experts are the ranks."""
        return self.over(self.world, device)

    def owner(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """Return the rank of each expert id; -1 for -1."""
        offsets = ExpertPlacement.of(num_experts, self.world).offsets
        ends = torch.tensor(offsets[1:], device=ids_TK.device)
        owner_TK = torch.bucketize(ids_TK.long(), ends, right=True)
        return owner_TK.masked_fill_(ids_TK < 0, DROPPED)

    def local_range(self, num_experts: int) -> range:
        """Return the ids of this rank's experts."""
        return ExpertPlacement.of(num_experts, self.world).local_range(self.rank)

    def close(self) -> None:
        """Close the dispatchers. Collective."""
        for dispatcher in self._made.values():
            dispatcher.close()
        self._made.clear()


def last_slots(owner_TK: Tensor) -> Tensor:
    """Keep the last slot of each rank in each token, and replace the others by -1."""
    kept = owner_TK.clone()
    for k in range(owner_TK.shape[1] - 1):
        kept[:, k].masked_fill_((owner_TK[:, k + 1 :] == owner_TK[:, k, None]).any(1), DROPPED)
    return kept


def unpacked(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Return values and scales."""
    return x if isinstance(x, tuple) else (x, None)


def input_fault(x: Any, topk_idx: Any, topk_weights: Any) -> MoeCommError | None:
    """Return the error for rows, ids and weights that a dispatch cannot send, without communication."""
    values, scales = unpacked(x)
    if not isinstance(values, Tensor) or values.dim() != 2:
        return InputError("x must be a tensor [tokens, hidden], or a tuple of such a tensor and its scales")
    tokens = values.shape[0]
    if scales is None and values.dtype not in FLOATS:
        return InputError(f"x must be bfloat16 or another float type, or a tuple (e4m3, scales); got {values.dtype}")
    if scales is not None and (values.dtype != FP8 or scales.dim() != 2 or scales.shape[0] != tokens):
        return InputError(
            f"x of values and scales must be {FP8} [tokens, hidden] and [tokens, scales]; got {values.dtype} "
            f"{tuple(values.shape)} and {tuple(scales.shape)}"
        )
    if scales is not None and scales.dtype not in (torch.float32, torch.int32):
        return InputError(f"scales must be float32 or int32; got {scales.dtype}")
    if topk_idx is None:
        return None if topk_weights is None else InputError("topk_weights needs topk_idx")
    if topk_idx.dtype not in ID_DTYPES or topk_idx.dim() != 2 or topk_idx.shape[0] != tokens or not topk_idx.shape[1]:
        return InputError(
            f"topk_idx must be int64 (deep_ep.topk_idx_t) or int32 [{tokens}, top-k]; got {topk_idx.dtype} "
            f"{tuple(topk_idx.shape)}"
        )
    if topk_weights is None or (topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape):
        return None
    return InputError(
        f"topk_weights must be float32 {tuple(topk_idx.shape)}; got {topk_weights.dtype} {tuple(topk_weights.shape)}"
    )


def range_fault(ids_TK: Tensor, num_experts: int) -> MoeCommError | None:
    """Return the error for ids out of range."""
    if not ids_TK.numel():
        return None
    low, high = (int(v) for v in torch.aminmax(ids_TK))
    if low >= DROPPED and high < num_experts:
        return None
    return InputError(f"topk_idx must be -1 or an expert id below {num_experts}; got ids from {low} to {high}")


@dataclass(eq=False)
class Routes:
    """The routes of one dispatch, for combine and for further rows.

    Attributes:
        ids_TN: [T, N] int64 ranks of each token; -1 elsewhere.
        num_rows: number R of received rows.
        source_R, token_R: int32 source rank and token of each received row.
        local_ids_RK: ids of this rank's experts, -1 for experts of other ranks; None without ids.
        padded_rows: number of rows that the caller sees; R or more.
        num_words: width of the last rows of words.
    """

    dispatcher: Dispatcher
    ids_TN: Tensor
    num_rows: int = 0
    source_R: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    token_R: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    local_ids_RK: Tensor | None = None
    padded_rows: int = 0
    num_words: int = 0
    _handles: dict[tuple[int, torch.dtype], DispatchHandle] = field(default_factory=dict, repr=False)

    def send(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank receives. Rows of a new width or dtype count their slots once more."""
        key = x_TD.shape[-1], x_TD.dtype
        if key in self._handles:
            return self.dispatcher.spread(x_TD, self._handles[key])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN)
        self._handles[key] = sent.handle
        return sent.rows_RD

    def send_values(self, x: Rows) -> tuple[Tensor, Tensor | None]:
        """Send rows. e4m3 values are sent as bf16, which holds each of them, so that combine can return bf16."""
        values_TD, scales = unpacked(x)
        if scales is None:
            return self.send(values_TD), None
        values_RD = self.send(values_TD.to(torch.bfloat16)).to(FP8)
        return values_RD, self.send_words(scales.contiguous()).view(scales.dtype)

    def send_words(self, words_TX: Tensor) -> Tensor:
        """Return the received rows of any 32-bit words, as int32. ``send`` may multiply by one, which changes NaN."""
        sent = self.dispatcher.dispatch(words_TX.view(torch.float32), self.ids_TN)
        self._handles.setdefault((words_TX.shape[1], torch.float32), sent.handle)
        self.num_words = words_TX.shape[1]
        return sent.rows_RD.view(torch.int32)

    def sum_weights(self, weights_RK: Tensor) -> Tensor:
        """Return [T, K], the sum of each token's weights over the ranks."""
        top_k = weights_RK.shape[1]
        widened_RX = F.pad(weights_RK.float(), (0, max(0, self.num_words - top_k)))  # a width that has routes
        return self.sum(widened_RX)[:, :top_k]

    def sum(self, rows_RD: Tensor, bias: Bias = None) -> Tensor:
        """Return [T, D], the fp32 sum of each token's rows over the ranks, starting with ``bias``, rounded once."""
        key = rows_RD.shape[-1], rows_RD.dtype
        if key not in self._handles:
            self.send(rows_RD.new_zeros(self.ids_TN.shape[0], rows_RD.shape[-1]))
        handle, rows_RD = self._handles[key], rows_RD[: self.num_rows]
        weights_TN = torch.ones(self.ids_TN.shape, device=rows_RD.device)
        if bias is None:
            return self.dispatcher.combine(rows_RD, weights_TN, handle)
        first, *more = bias if isinstance(bias, tuple) else (bias,)
        total_TD = sum((term.float() for term in more), first.float())
        for slot in range(self.ids_TN.shape[1]):  # one row at a time, so that the sum starts with the bias
            one_TN = torch.zeros_like(weights_TN)
            one_TN[:, slot] = 1
            total_TD = total_TD + self.dispatcher.combine(rows_RD, one_TN, handle).float()
        return total_TD.to(rows_RD.dtype)

    def pad(self, rows: Tensor, fill: float = 0) -> Tensor:
        """Append rows up to ``padded_rows``."""
        missing = self.padded_rows - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))

    def fault_of_rows(self, rows: Any) -> InputError | None:
        """Return the error for rows that combine does not accept."""
        if isinstance(rows, Tensor) and rows.dim() == 2 and rows.shape[0] in (self.num_rows, self.padded_rows):
            return None if rows.dtype in FLOATS else InputError(f"combine needs rows of a float type; got {rows.dtype}")
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        return InputError(f"combine needs [{self.padded_rows}, hidden], as many rows as were received; got {shape}")


@dataclass(eq=False)
class Received:
    """What a rank receives: rows and scales of ``padded_rows`` rows, local ids and weights, and rows per expert."""

    routes: Routes
    x: Rows
    ids_RK: Tensor | None
    weights_RK: Tensor | None
    rows_per_expert: Tensor

    def aligned(self, alignment: int) -> Tensor:
        """Return the rows per expert, rounded up."""
        return (self.rows_per_expert + alignment - 1) // alignment * alignment


def exchange(
    dispatchers: GroupDispatchers,
    x: Rows,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    num_experts: int,
    is_token_in_rank: Tensor | None = None,
    tokens_per_expert: Tensor | None = None,
    fault: MoeCommError | None = None,
) -> Received:
    """Send each token once to each rank that has one of its experts. Collective. No autograd.

    Args:
        is_token_in_rank, tokens_per_expert: [T, W] and [E], in place of ids.
        fault: error of this rank, which all ranks raise.

    Raises:
        InputError, RankMismatch, PeerDied, PeerTimeout: on every rank.
    """
    values_TD, _ = unpacked(x)
    device = values_TD.device
    dispatcher = dispatchers.between_ranks(device)
    fault = fault or input_fault(x, topk_idx, topk_weights)
    if fault is None and topk_idx is not None:
        fault = range_fault(topk_idx, num_experts)
    if fault is not None:
        dispatcher.refuse(fault, values_TD)
    tokens, own = values_TD.shape[0], dispatchers.local_range(num_experts)
    if topk_idx is not None:
        ids_TN = last_slots(dispatchers.owner(topk_idx, num_experts))
    else:
        assert is_token_in_rank is not None
        ranks = torch.arange(dispatchers.world, device=device).expand(tokens, -1)
        ids_TN = ranks.masked_fill(~is_token_in_rank, DROPPED)
    routes = Routes(dispatcher, ids_TN)
    values_RD, scales_RS = routes.send_values(x)
    top_k = 0 if topk_idx is None else topk_idx.shape[1]
    words = [torch.full((tokens, 1), dispatchers.rank, dtype=torch.int32, device=device)]
    words.append(torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1))
    if topk_idx is not None:
        words.append(topk_idx.to(torch.int32))
    if topk_weights is not None:
        words.append(topk_weights.contiguous().view(torch.int32))
    words_RX = routes.send_words(torch.cat(words, 1))
    routes.num_rows = routes.padded_rows = words_RX.shape[0]
    routes.source_R, routes.token_R = words_RX[:, 0].contiguous(), words_RX[:, 1].contiguous()
    local_ids = weights_RK = None
    if topk_idx is not None:
        global_ids = words_RX[:, 2 : 2 + top_k].to(topk_idx.dtype)
        mine = (global_ids >= own.start) & (global_ids < own.stop)
        local_ids = routes.local_ids_RK = torch.where(mine, global_ids - own.start, -1)
        counts = torch.bincount(local_ids[mine].long(), minlength=len(own))
        if topk_weights is not None:
            weights_RK = words_RX[:, 2 + top_k :].contiguous().view(torch.float32).masked_fill(~mine, 0.0)
    else:
        counts = _counts_without_ids(dispatchers, dispatcher, tokens_per_expert)
    received_x = values_RD if scales_RS is None else (values_RD, scales_RS)
    return Received(routes, received_x, local_ids, weights_RK, counts)


def _counts_without_ids(
    dispatchers: GroupDispatchers, dispatcher: Dispatcher, tokens_per_expert: Tensor | None
) -> Tensor:
    """Return the rows of this rank's experts, from the counts that each rank has for all experts."""
    assert tokens_per_expert is not None
    placement = ExpertPlacement.of(tokens_per_expert.shape[0], dispatchers.world)
    counts_WL = tokens_per_expert.new_zeros(dispatchers.world, max(placement.experts_per_rank), dtype=torch.int32)
    for rank in range(dispatchers.world):
        own = placement.local_range(rank)
        counts_WL[rank, : len(own)] = tokens_per_expert[own.start : own.stop]
    ids_W1 = torch.arange(dispatchers.world, device=counts_WL.device).unsqueeze(1)
    received = dispatcher.dispatch(counts_WL.view(torch.float32), ids_W1).rows_RD.view(torch.int32)
    return received.long().sum(0)[: placement.experts_per_rank[dispatchers.rank]]
