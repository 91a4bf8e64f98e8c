"""One row per (token, rank): dispatches of a dispatcher whose experts are the ranks, as DeepEP sends tokens.

    token 5, experts 0 1 on rank 0 and 2 3 on rank 1, ids [2, 0, 3]

    slots      2 0 3
    owners     1 0 1
    sent to    . 0 1        each rank once, in the order of its last slot: combine adds as DeepEP's reference does

A rank receives the rows in the order (source rank, token). The extra values of a row are 32-bit words: source rank,
token, and what the caller adds, such as expert ids, weights and scales. No autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.slots import plain
from moe_comm.dispatch.types import DROPPED, DispatchHandle
from moe_comm.kernels.native import core, on_host
from moe_comm.topology import ExpertPlacement

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
    if on_host(ids_TK):
        ids_TK, ranks_TN = ids_TK.contiguous(), torch.empty(tokens, min(top_k, world), dtype=torch.int64)
        per_rank_W, per_expert_E = (torch.zeros(size, dtype=torch.int32) for size in (world, num_experts))
        in_rank_TW = torch.zeros(tokens, world, dtype=torch.bool)
        outputs = per_rank_W.data_ptr(), per_expert_E.data_ptr(), in_rank_TW.data_ptr(), ranks_TN.data_ptr()
        core().rank_layout(ids_TK.data_ptr(), (tokens, top_k), ids_TK.itemsize, owner_E.data_ptr(), world, outputs)
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
    counts = torch.tensor(ExpertPlacement.of(num_experts, world).experts_per_rank)
    return torch.arange(world, dtype=torch.int32).repeat_interleave(counts).to(device)


def local_slots(
    words_RX: Tensor, top_k: int, own: range, dtype: torch.dtype, weighted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what received words say of the experts ``own`` of this rank.

    Args:
        words_RX: int32: those of the sender, K expert ids and, if ``weighted``, the bits of K weights.

    Returns:
        [R, K] local ids in ``dtype``, int32 or int64, -1 for experts of other ranks; [R, K] fp32 weights, 0 there, or
        None; [L] int64 slots of each expert.
    """
    rows, first = len(words_RX), SENDER_WORDS
    if on_host(words_RX) and words_RX.is_contiguous():
        local_RK = torch.empty(rows, top_k, dtype=dtype)
        weights_RK = torch.empty(rows, top_k) if weighted else None
        counts_L = torch.empty(len(own), dtype=torch.int64)
        outputs = local_RK.data_ptr(), 0 if weights_RK is None else weights_RK.data_ptr(), counts_L.data_ptr()
        shape = rows, words_RX.shape[1], top_k
        core().local_slots(words_RX.data_ptr(), shape, (own.start, len(own)), dtype.itemsize, outputs)
        return local_RK, weights_RK, counts_L
    ids_RK, bits_RK = words_RX[:, first : first + top_k], words_RX[:, first + top_k : first + 2 * top_k]
    others_RK = (ids_RK < own.start) | (ids_RK >= own.stop)
    local_RK = (ids_RK - own.start).masked_fill(others_RK, DROPPED)
    counts_L = torch.bincount(local_RK.flatten() + 1, minlength=1 + len(own))[1:]
    weights_RK = bits_RK.masked_fill(others_RK, 0).view(torch.float32) if weighted else None
    return local_RK.to(dtype), weights_RK, counts_L


def expert_places(local_RK: Tensor, counts_L: Tensor, starts_L: Tensor) -> Tensor:
    """Return [R, K] int64: the place of each slot among rows by expert, which start at ``starts_L``; else -1."""
    if not len(counts_L):
        return torch.full(local_RK.shape, DROPPED, device=local_RK.device)
    _, place_RK = plain.order_slots(local_RK, len(counts_L))
    shift_L = starts_L - (counts_L.cumsum(0) - counts_L)
    return torch.where(local_RK < 0, DROPPED, place_RK + shift_L[local_RK.clamp(min=0).long()])


@dataclass(eq=False)
class RankRoutes:
    """Routes for rows of any width and dtype. Each new one counts the slots once more.

    Attributes:
        ids_TN: [T, N] int64 ranks of each token, each at most once; -1 elsewhere.
    """

    dispatcher: Dispatcher
    ids_TN: Tensor
    _handles: dict[tuple[bool, int, torch.dtype], DispatchHandle] = field(default_factory=dict)

    def send(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank receives. Collective."""
        key = False, x_TD.shape[1], x_TD.dtype
        if key in self._handles:
            return self.dispatcher.spread(x_TD, self._handles[key])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN)
        self._handles[key] = sent.handle
        return sent.rows_RD

    def send_with(self, x_TD: Tensor, words: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return received rows and int32 words: the sender's, and ``words`` [T, X], fp32 or integers. Collective."""
        tokens = len(x_TD)
        token_T1 = torch.arange(tokens, dtype=torch.int32, device=x_TD.device).unsqueeze(1)
        sender_T2 = F.pad(token_T1, (1, 0), value=self.dispatcher.rank)
        bits = [part.view(torch.int32) if part.is_floating_point() else part.int() for part in words]
        words_TX = torch.cat([sender_T2, *bits], 1)
        extra = words_TX.unsqueeze(1).expand(tokens, self.ids_TN.shape[1], words_TX.shape[1])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN, extra_TKX=extra)
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
        return self.dispatcher.combine(rows_RD, torch.ones(ids.shape, device=rows_RD.device), self._handles[key])
