"""Causal attention in blocks of the score matrix, each computed by a flash kernel.

    ring, cp 2, rank 0 holds chunks 0 and 3         window 2 of 6 tokens, in blocks of 2 queries
         keys  0 1 2 3                                   keys  0 1 2 3 4 5
    queries 0  ◣                                    queries 0  ◣ .
            3  ■ ■ ■ ◣                                      1  ■ ◣ .           ◣ causal   ■ full   ▨ masked
                                                            2  . ▨ ▨ .

The kernel returns the output of a block and the log-sum-exp (lse) of its scores. With these, the outputs of several
blocks for the same queries are merged exactly. Backward runs block by block with the merged output and lse, and sums
the gradients (FlashAttention, arXiv 2205.14135; ring attention, arXiv 2310.01889). Outside of the blocks nothing is
computed or stored, so a window or packed documents never need an S x S mask.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.layers.attention.sequence import Documents, SequenceChunk

BLOCK_MIN, BLOCK_MAX = 128, 1024
"""Bounds on the queries per block under a window; within them a block has as many queries as the window."""


@dataclass(frozen=True)
class ScoreBlock:
    """One rectangle of the score matrix, in positions of the local tensors.

    rows: sequences of the batch. causal: only scores on or below the diagonal count; the block is square. mask_BQK:
    [rows or 1, Q, K] bool, True where a query attends to a key; None: everywhere. first: no earlier block has these
    queries.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    mask_BQK: Tensor | None = None
    first: bool = False


def plan_blocks(
    queries: Sequence[SequenceChunk],
    keys: Sequence[SequenceChunk],
    *,
    batch: int,
    window: int | None,
    documents: Documents | None,
    device: torch.device,
    first: bool,
) -> list[ScoreBlock]:
    """Return the blocks of these queries and keys, which are in order of the sequence.

    The result is empty if no query attends to a key. ``first`` means that these are the first keys for the queries.
    They must then be the keys of the same chunks, so that each query has a block.
    """
    # Tokens that attend to each other: (rows, first token, end, whether it contains several documents).
    groups = [(slice(0, batch), 0, 2**62, False)] if documents is None else documents.groups
    masks: dict[tuple[int, int, int], Tensor] = {}
    blocks = []
    for rows, group_start, group_end, mixed in groups:
        for query in _overlapping(queries, group_start, group_end):
            chunk_end = min(query.start + query.size, group_end)
            chunk_start = max(query.start, group_start)
            size = chunk_end - chunk_start if window is None else min(max(window, BLOCK_MIN), BLOCK_MAX)
            for query_start in range(chunk_start, chunk_end, max(size, 1)):
                query_end = min(query_start + size, chunk_end)
                is_first = first
                for key in _overlapping(keys, group_start, query_end):
                    key_start = max(key.start, group_start, query_start - window + 1 if window is not None else 0)
                    key_end = min(key.start + key.size, query_end)
                    if key_start >= key_end:
                        continue
                    causal, mask_BQK = False, None
                    in_window = window is None or query_end - key_start <= window
                    # A block without several documents, a window edge or the diagonal needs no mask.
                    if mixed or not in_window or key_end - 1 > query_start:
                        causal = not mixed and in_window and (key_start, key_end) == (query_start, query_end)
                        if not causal:
                            shape = (query_start - key_start, query_end - query_start, key_end - key_start)
                            if shape not in masks:
                                masks[shape] = _allowed(*shape, window, device)
                            mask_BQK = masks[shape]
                            if mixed:
                                assert documents is not None
                                document_BS = documents.runs_BS[rows]
                                query_BQ1 = document_BS[:, query_start:query_end, None]
                                mask_BQK = mask_BQK & (query_BQ1 == document_BS[:, None, key_start:key_end])
                    blocks.append(
                        ScoreBlock(
                            rows,
                            slice(
                                query_start - query.start + query.local_start,
                                query_end - query.start + query.local_start,
                            ),
                            slice(key_start - key.start + key.local_start, key_end - key.start + key.local_start),
                            causal,
                            mask_BQK,
                            is_first,
                        )
                    )
                    is_first = False
    return blocks


def _overlapping(chunks: Sequence[SequenceChunk], start: int, end: int) -> Sequence[SequenceChunk]:
    """Return the chunks, which are ascending and not empty, with tokens in [start, end)."""
    first = bisect_right(chunks, start, key=lambda chunk: chunk.start + chunk.size)
    return chunks[first : bisect_left(chunks, end, key=lambda chunk: chunk.start)]


def _allowed(offset: int, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the [1, Q, K] mask for queries that start ``offset`` tokens after the keys."""
    distance = offset + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    return allowed.unsqueeze(0)


@dataclass(frozen=True)
class AttentionState:
    """Output [B, h, S, dv] and lse [B, h, S], accumulated over blocks in wide precision."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q_BhSd: Tensor, width: int) -> AttentionState:
        shape, wide = q_BhSd.shape[:-1], accumulate_dtype(q_BhSd.dtype)
        out = torch.empty(*shape, width, dtype=wide, device=q_BhSd.device)
        return cls(out, torch.empty(shape, dtype=wide, device=q_BhSd.device))

    @classmethod
    def no_keys(cls, q_BhSd: Tensor, width: int) -> AttentionState:
        """Return the state of queries without keys: output 0 and lse -inf."""
        state = cls.empty(q_BhSd, width)
        state.out.zero_()
        state.lse.fill_(-math.inf)
        return state

    def add(self, q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, blocks: Sequence[ScoreBlock], scale: float) -> None:
        """Attend ``blocks`` of these tensors. k and v may have fewer heads than q, and v another width."""
        for block in blocks:
            q, k, v = _block_inputs(block, q_BhSd, k_BkSd, v_BkSd)
            out, lse = _attend(q, k, v, block, scale)
            state = AttentionState(self.out[block.rows, :, block.queries], self.lse[block.rows, :, block.queries])
            if block.first:
                state.out.copy_(out)
                state.lse.copy_(lse)
            else:
                state.merge(out, lse)

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Merge the output and lse of the same queries for other keys."""
        merged = torch.logaddexp(self.lse, lse.to(self.lse.dtype))
        # If neither side has keys, both lse are -inf and their difference is NaN; the output must stay 0.
        old, new = (self.lse - merged).exp_().nan_to_num_(0.0), (lse - merged).exp_().nan_to_num_(0.0)
        self.out.mul_(old.unsqueeze(-1)).addcmul_(out.to(self.out.dtype), new.unsqueeze(-1))
        self.lse.copy_(merged)


@dataclass(frozen=True)
class AttentionGradients:
    """Gradients of q [B, h, S, d], k and v, accumulated over blocks in wide precision."""

    q: Tensor
    k: Tensor
    v: Tensor

    def add(
        self,
        grad: Tensor,
        out_lse: tuple[Tensor, Tensor],
        qkv: tuple[Tensor, Tensor, Tensor],
        blocks: Sequence[ScoreBlock],
        scale: float,
    ) -> None:
        """Add the contributions of ``blocks``. ``grad`` and ``out_lse`` belong to the output merged over all blocks."""
        for block in blocks:
            q, k, v = _block_inputs(block, *qkv)
            queries = (block.rows, slice(None), block.queries)
            out, lse = (t[queries] for t in out_lse)
            dq, dk, dv = _attend_backward(grad[queries], out, lse, q, k, v, block, scale)
            self.q[queries] += dq
            self.k[block.rows, :, block.keys] += dk
            self.v[block.rows, :, block.keys] += dv


def _block_inputs(block: ScoreBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = (block.rows, slice(None), block.keys)
    return q[block.rows, :, block.queries], k[keys], v[keys]


# --- one block ---


def _attend(q: Tensor, k: Tensor, v: Tensor, block: ScoreBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and lse of one block. A query without keys in the block has output 0 and lse -inf."""
    kernel = _kernel(q, block)
    if kernel == "cpu flash":
        bias = None if block.mask_BQK is None else _bias(block.mask_BQK, q.dtype)
        width = max(q.shape[-1], v.shape[-1])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_pad_width(t, width) for t in (q, k, v)), 0.0, block.causal, attn_mask=bias, scale=scale
        )
        if block.mask_BQK is not None:
            lse = lse.masked_fill(~block.mask_BQK.any(-1).unsqueeze(1), -math.inf)
        return out[..., : v.shape[-1]], lse
    if kernel == "cuda flash":
        width = _padded_width(q, v)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *(_pad_width(t, width) for t in (q, k, v)), 0.0, block.causal, False, scale=scale
        )
        return out[..., : v.shape[-1]], lse
    scores = _scores(q, k, block, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)
    return (weights @ v.to(weights.dtype).unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


def _attend_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, block: ScoreBlock, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from one block, given the output and lse over all blocks."""
    kernel = _kernel(q, block)
    if kernel == "cpu flash":
        bias = None if block.mask_BQK is None else _bias(block.mask_BQK, q.dtype)
        width = max(q.shape[-1], v.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_pad_width(t, width) for t in (grad, q, k, v, out)), lse, 0.0, block.causal, attn_mask=bias, scale=scale
        )
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]
    if kernel == "cuda flash":
        width = _padded_width(q, v)
        # Dropout is off, so the kernel does not read the random state.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(_pad_width(t, width) for t in (grad, q, k, v, out)), lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, block.causal, state, torch.empty_like(state[0]), scale=scale,
        )  # fmt: skip
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]
    heads = k.shape[1]
    weights = (_scores(q, k, block, scale) - lse.unflatten(1, (heads, -1)).unsqueeze(-1)).exp_()
    grad_, out_, q_ = (t.to(weights.dtype).unflatten(1, (heads, -1)) for t in (grad, out, q))
    k_, v_ = (t.to(weights.dtype).unsqueeze(2) for t in (k, v))
    dv = (weights.mT @ grad_).sum(2)
    dscores = weights * (grad_ @ v_.mT - (grad_ * out_).sum(-1, keepdim=True)) * scale
    return (dscores @ k_).flatten(1, 2), (dscores.mT @ q_).sum(2), dv


def _scores(q: Tensor, k: Tensor, block: ScoreBlock, scale: float) -> Tensor:
    """Return the scores [B, k heads, q heads per k head, Q, K] in wide precision, -inf where masked."""
    wide = accumulate_dtype(q.dtype)
    scores: Tensor = (q.to(wide).unflatten(1, (k.shape[1], -1)) @ k.to(wide).unsqueeze(2).mT) * scale
    if block.mask_BQK is not None:
        return scores.masked_fill_(~block.mask_BQK[:, None, None], -math.inf)
    if block.causal:
        return scores.masked_fill_(~_allowed(0, q.shape[2], k.shape[2], None, q.device), -math.inf)
    return scores


def _bias(mask_BQK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as a bias of 0 and -inf, [rows or 1, 1, Q, K], as the kernel requires it."""
    return (
        torch.zeros(mask_BQK.shape, dtype=dtype, device=mask_BQK.device).masked_fill_(~mask_BQK, -math.inf).unsqueeze(1)
    )


def _kernel(q: Tensor, block: ScoreBlock) -> str:
    """Return the kernel for a block. CUDA's flash kernel needs 16-bit floats and no mask; "plain" supports all."""
    if q.device.type == "cpu":
        return "cpu flash"
    half = q.dtype in (torch.float16, torch.bfloat16)
    flash = q.device.type == "cuda" and half and block.mask_BQK is None and q.shape[-1] <= 256
    return "cuda flash" if flash else "plain"


def _padded_width(q: Tensor, v: Tensor) -> int:
    """Return the common width of q, k and v, a multiple of 8 for the CUDA kernel."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _pad_width(x: Tensor, width: int) -> Tensor:
    """Pad ``x`` with zeros to ``width``; they change neither scores nor outputs."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
