"""Causal attention in pieces: which parts of the scores there are to compute, and each by a flash kernel.

    ring, cp 2, rank 0 holds chunks 0 and 3         window 2 of 6 tokens, in blocks of 2 queries
         keys  0 1 2 3                                   keys  0 1 2 3 4 5
    queries 0  ◣                                    queries 0  ◣ .
            3  ■ ■ ■ ◣                                      1  ■ ◣ .           ◣ causal   ■ full   ▨ under a mask
                                                            2  . ▨ ▨ .

A piece's kernel returns its output and the log of the sum of its exponentials (lse); two pieces for the same queries
are merged by them exactly. Backward runs piece by piece with the merged output and lse, and adds up (FlashAttention,
arXiv 2205.14135; ring attention, arXiv 2310.01889). Where there is no piece nothing is computed or stored, so a window
or packed documents cost what they attend to and never a mask of S x S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.wide import wide_dtype
from moe_comm.layers.attention.sequence import Documents

BLOCK_MIN, BLOCK_MAX = 128, 1024
"""Queries in a block under a window: about as many as the window, within these bounds."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tokens: ``at`` in the whole sequence, ``place`` in the local tensor."""

    at: int
    place: int
    size: int


@dataclass(frozen=True)
class Piece:
    """One rectangle of the scores, in local places.

    causal: only what is on or below its diagonal; it is square then. may_BQK: what is allowed, [rows or 1, Q, K]
    bool; None: all. first: no earlier piece is for these queries.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    may_BQK: Tensor | None = None
    first: bool = False


def plan(
    queries: Sequence[Chunk],
    keys: Sequence[Chunk],
    *,
    batch: int,
    window: int | None,
    documents: Documents | None,
    device: torch.device,
    first: bool,
) -> list[Piece]:
    """The pieces for these queries and keys; empty where no query sees a key.

    Args:
        queries, keys: in order of the sequence.
        first: these are the first keys the queries meet (their own, so that every query has a piece).
    """
    groups = [(slice(0, batch), 0, 2**62, False)] if documents is None else documents.groups
    masks: dict[tuple[int, int, int], Tensor] = {}
    found = []
    for rows, begin, end, mixed in groups:
        for query in queries:
            stop = min(query.at + query.size, end)
            start = max(query.at, begin)
            block = stop - start if window is None else min(max(window, BLOCK_MIN), BLOCK_MAX)
            for at in range(start, stop, max(block, 1)):
                until = min(at + block, stop)
                fresh = first
                for key in keys:
                    low = max(key.at, begin, at - window + 1 if window is not None else 0)
                    high = min(key.at + key.size, until)
                    if low >= high:
                        continue
                    causal, may_BQK = False, None
                    in_window = window is None or until - low <= window
                    if mixed or not in_window or high - 1 > at:
                        causal = not mixed and in_window and (low, high) == (at, until)
                        if not causal:
                            shape = (at - low, until - at, high - low)
                            if shape not in masks:
                                masks[shape] = _allowed(*shape, window, device)
                            may_BQK = masks[shape]
                            if mixed:
                                assert documents is not None
                                runs = documents.runs_BS[rows]
                                may_BQK = may_BQK & (runs[:, at:until, None] == runs[:, None, low:high])
                    found.append(
                        Piece(
                            rows,
                            slice(at - query.at + query.place, until - query.at + query.place),
                            slice(low - key.at + key.place, high - key.at + key.place),
                            causal,
                            may_BQK,
                            fresh,
                        )
                    )
                    fresh = False
    return found


def _allowed(offset: int, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[1, Q, K] for queries that begin ``offset`` tokens after the keys."""
    ahead = offset + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    allowed = ahead >= 0
    if window is not None:
        allowed &= ahead < window
    return allowed.unsqueeze(0)


@dataclass(frozen=True)
class State:
    """Sums over pieces, in wide precision. out [B, h, S, dv], lse [B, h, S]."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q_BhSd: Tensor, width: int) -> State:
        shape, wide = q_BhSd.shape[:-1], wide_dtype(q_BhSd.dtype)
        out = torch.empty(*shape, width, dtype=wide, device=q_BhSd.device)
        return cls(out, torch.empty(shape, dtype=wide, device=q_BhSd.device))

    @classmethod
    def nothing(cls, q_BhSd: Tensor, width: int) -> State:
        """Of queries that have seen no key: zeros, and -inf."""
        state = cls.empty(q_BhSd, width)
        state.out.zero_()
        state.lse.fill_(-math.inf)
        return state

    def add(self, q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, pieces: Sequence[Piece], scale: float) -> None:
        """Attend ``pieces`` of these tensors. k and v may have fewer heads than q, and v another width."""
        for piece in pieces:
            q, k, v = _parts(piece, q_BhSd, k_BkSd, v_BkSd)
            out, lse = _attend(q, k, v, piece, scale)
            mine = State(self.out[piece.rows, :, piece.queries], self.lse[piece.rows, :, piece.queries])
            if piece.first:
                mine.out.copy_(out)
                mine.lse.copy_(lse)
            else:
                mine.merge(out, lse)

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Take in what the same queries got from other keys."""
        both = torch.logaddexp(self.lse, lse.to(self.lse.dtype))
        # Neither has seen a key: -inf - -inf. The output stays 0.
        old, new = (self.lse - both).exp_().nan_to_num_(0.0), (lse - both).exp_().nan_to_num_(0.0)
        self.out.mul_(old.unsqueeze(-1)).addcmul_(out.to(self.out.dtype), new.unsqueeze(-1))
        self.lse.copy_(both)


@dataclass(frozen=True)
class Gradients:
    """Sums over pieces of the gradients, in wide precision; q [B, h, S, d], k and v those of the keys at hand."""

    q: Tensor
    k: Tensor
    v: Tensor

    def add(
        self,
        grad: Tensor,
        out_lse: tuple[Tensor, Tensor],
        qkv: tuple[Tensor, Tensor, Tensor],
        pieces: Sequence[Piece],
        scale: float,
    ) -> None:
        """Add what ``pieces`` contribute. grad, out_lse: of the whole output, merged over all its pieces."""
        for piece in pieces:
            q, k, v = _parts(piece, *qkv)
            mine = (piece.rows, slice(None), piece.queries)
            dq, dk, dv = _attend_backward(grad[mine], out_lse[0][mine], out_lse[1][mine], q, k, v, piece, scale)
            self.q[mine] += dq
            self.k[piece.rows, :, piece.keys] += dk
            self.v[piece.rows, :, piece.keys] += dv


def _parts(piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = (piece.rows, slice(None), piece.keys)
    return q[piece.rows, :, piece.queries], k[keys], v[keys]


# --- one piece ---


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse of one piece. A query that sees no key of it has output 0 and lse -inf."""
    kernel = _kernel(q, piece)
    if kernel == "cpu flash":
        bias = None if piece.may_BQK is None else _bias(piece.may_BQK, q.dtype)
        width = max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _to(q, width), _to(k, width), _to(v, width), 0.0, piece.causal, attn_mask=bias, scale=scale
        )
        if piece.may_BQK is not None:
            lse = lse.masked_fill(~piece.may_BQK.any(-1).unsqueeze(1), -math.inf)
        return out[..., : v.shape[-1]], lse
    if kernel == "cuda flash":
        width = _padded(q, v)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            _to(q, width), _to(k, width), _to(v, width), 0.0, piece.causal, False, scale=scale
        )
        return out[..., : v.shape[-1]], lse
    scores = _scores(q, k, piece, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)
    return (weights @ v.to(weights.dtype).unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


def _attend_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one piece, given the output and lse over all pieces."""
    kernel = _kernel(q, piece)
    if kernel == "cpu flash":
        bias = None if piece.may_BQK is None else _bias(piece.may_BQK, q.dtype)
        width = max(q.shape[-1], v.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _to(grad, width), _to(q, width), _to(k, width), _to(v, width), _to(out, width), lse,
            0.0, piece.causal, attn_mask=bias, scale=scale,
        )  # fmt: skip
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]
    if kernel == "cuda flash":
        width = _padded(q, v)
        # Dropout is off, so the kernel takes the random state and does not read it.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            _to(grad, width), _to(q, width), _to(k, width), _to(v, width), _to(out, width), lse.contiguous(),
            None, None, q.shape[2], k.shape[2], 0.0, piece.causal, state, torch.empty_like(state[0]), scale=scale,
        )  # fmt: skip
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]
    heads = k.shape[1]
    weights = (_scores(q, k, piece, scale) - lse.unflatten(1, (heads, -1)).unsqueeze(-1)).exp_()
    grad_, out_, q_ = (t.to(weights.dtype).unflatten(1, (heads, -1)) for t in (grad, out, q))
    k_, v_ = (t.to(weights.dtype).unsqueeze(2) for t in (k, v))
    dv = (weights.mT @ grad_).sum(2)
    dscores = weights * (grad_ @ v_.mT - (grad_ * out_).sum(-1, keepdim=True)) * scale
    return (dscores @ k_).flatten(1, 2), (dscores.mT @ q_).sum(2), dv


def _scores(q: Tensor, k: Tensor, piece: Piece, scale: float) -> Tensor:
    """[B, k heads, q heads each, Q, K] in wide precision, -inf where forbidden."""
    wide = wide_dtype(q.dtype)
    scores: Tensor = (q.to(wide).unflatten(1, (k.shape[1], -1)) @ k.to(wide).unsqueeze(2).mT) * scale
    if piece.may_BQK is not None:
        return scores.masked_fill_(~piece.may_BQK[:, None, None], -math.inf)
    if piece.causal:
        return scores.masked_fill_(~_allowed(0, q.shape[2], k.shape[2], None, q.device), -math.inf)
    return scores


def _bias(may_BQK: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows or 1, 1, Q, K]: 0 where allowed and -inf elsewhere, which is how the kernel takes a mask."""
    return torch.zeros(may_BQK.shape, dtype=dtype, device=may_BQK.device).masked_fill_(~may_BQK, -math.inf).unsqueeze(1)


def _kernel(q: Tensor, piece: Piece) -> str:
    """What computes a piece. CUDA's flash kernel takes 16-bit floats and no mask; "plain" anything, and more memory."""
    if q.device.type == "cpu":
        return "cpu flash"
    half = q.dtype in (torch.float16, torch.bfloat16)
    return (
        "cuda flash" if q.device.type == "cuda" and half and piece.may_BQK is None and q.shape[-1] <= 256 else "plain"
    )


def _padded(q: Tensor, v: Tensor) -> int:
    """One width for q, k and v, of which the CUDA kernel wants a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _to(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros up to ``width``, which change neither scores nor outputs."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
