"""Causal attention whose sequence may be spread over a context-parallel group, in one of three forms.

    ulysses   [B, S/cp, h, d] ──all-to-all──▶ [B, S, h/cp, d] ── attention of a few heads ──▶ all-to-all back
              (arXiv 2309.14509; MegaScale-MoE's choice, arXiv 2505.11432). Heads must divide by cp; two exchanges of
              activations each way, whose size per rank falls with cp.
    ring      keys and values go round, queries stay (see ``ring``). Any number of heads; transfers run while computing.
    token_ring  queries go round and their outputs come back the other way, keys and values stay (see ``token_ring``).

The layout of the sequence is in ``sequence``: contiguous for ulysses, zig-zag for both rings. With ``Overlap`` the two
exchanges of ulysses hide behind the projections beside them (``project_to_heads``, ``project_from_heads``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autocast import cast_parameter, compute_dtype
from moe_comm.layers.attention.config import Context
from moe_comm.layers.attention.ring import RingSpec, ring_attention
from moe_comm.layers.attention.sequence import Documents, check_context
from moe_comm.layers.attention.token_ring import token_ring_attention
from moe_comm.layers.parallel.collectives import check_cut, group_size, swap_dims
from moe_comm.layers.parallel.recompute import again
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.ulysses import matmul_swap, swap_matmul


@dataclass(frozen=True)
class ContextSpec:
    """How a sequence is attended.

    group: ranks over which it is spread; None: it is whole here. context: how. scale: of the scores.
    window: tokens that a token sees, itself among them; None: all before it.
    """

    group: ProcessGroup | None
    context: Context
    scale: float
    window: int | None = None


def check_heads(heads: int, kv_heads: int, cp: int, context: Context) -> None:
    """Raise ConfigError unless one rank's ``heads`` and ``kv_heads`` can be attended in this form over cp ranks."""
    check_context(context)
    if heads % kv_heads:
        raise ConfigError(f"{heads} query heads on a rank must be a multiple of its {kv_heads} key and value heads")
    if context == "ulysses" and heads % cp:
        raise ConfigError(
            f"ulysses spreads heads over the ranks: {heads} heads of a rank do not divide by cp {cp}; "
            'use context "ring" or "token_ring", which work for any number of heads'
        )


def context_attention(
    q_BShd: Tensor, k_BSkd: Tensor, v_BSkd: Tensor, spec: ContextSpec, documents: Documents | None = None
) -> Tensor:
    """[B, S / cp, h, dv] causal attention to the whole sequence. Collective over ``spec.group``.

    Args:
        q_BShd: [B, S / cp, h, d] in the layout of ``sequence``. k_BSkd: [B, S / cp, k, d], h a multiple of k.
        v_BSkd: [B, S / cp, k, dv].
        documents: of the whole sequence; None: each row is one.

    Raises:
        ConfigError: see ``check_heads``. InputError: shapes do not fit each other or the layout.
        PeerDied, PeerTimeout: a rank of the group is gone, or does not come.
    """
    cp = group_size(spec.group)
    _check_shapes(q_BShd, k_BSkd, v_BSkd)
    check_documents(documents, q_BShd.shape[0], q_BShd.shape[1] * cp)
    check_heads(q_BShd.shape[2], k_BSkd.shape[2], cp, spec.context)
    if cp == 1:
        return local_attention(q_BShd, k_BSkd, v_BSkd, spec.scale, spec.window, documents)
    if spec.context != "ulysses":
        ring = RingSpec(spec.group, spec.scale, spec.window, documents)
        q, k, v = (t.transpose(1, 2) for t in (q_BShd, k_BSkd, v_BSkd))
        attend = ring_attention if spec.context == "ring" else token_ring_attention
        return attend(q, k, v, ring).transpose(1, 2)
    q, k, v = to_heads(q_BShd, k_BSkd, v_BSkd, spec.group)
    out = local_attention(q, k, v, spec.scale, spec.window, documents)
    return swap_dims(out, spec.group, 1, 2)


def local_attention(
    q_BShd: Tensor, k_BSkd: Tensor, v_BSkd: Tensor, scale: float, window: int | None, documents: Documents | None
) -> Tensor:
    """[B, S, h, dv] causal attention of a whole sequence on this rank; window and documents make no S x S mask."""
    q, k, v = (t.transpose(1, 2) for t in (q_BShd, k_BSkd, v_BSkd))
    if documents is not None or (window is not None and window < q.shape[2]):
        return ring_attention(q, k, v, RingSpec(None, scale, window, documents)).transpose(1, 2)
    heads, width = k.shape[1], v.shape[-1]
    if q.device.type == "cuda" and q.dtype == torch.float32 and heads != q.shape[1]:
        # The flash kernel, the only one that shares keys among heads, takes 16 bits; without this it would be S x S.
        k, v = (t.repeat_interleave(q.shape[1] // heads, 1) for t in (k, v))
    if q.device.type == "cpu" and width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # the CPU's flash kernel wants one width
    shared = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
    return out[..., :width].transpose(1, 2)


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, heads / cp, d] each from [B, S / cp, heads, d], in one exchange.

    Key and value heads that are fewer than the ranks go to several: they are repeated before, so that their gradients
    add up on the way back.
    """
    cp = group_size(group)
    repeats = head_repeats(k.shape[2], cp)
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
    # For each destination its heads of q, k and v side by side, whatever their widths.
    parts = [t.unflatten(2, (cp, -1)).flatten(3) for t in (q, k, v)]
    packed = swap_dims(torch.cat(parts, -1), group, 2, 1)
    split = packed.squeeze(2).split([part.shape[-1] for part in parts], -1)
    q, k, v = (part.unflatten(-1, (-1, t.shape[-1])) for part, t in zip(split, (q, k, v), strict=True))
    return q, k, v


def head_repeats(kv_heads: int, cp: int) -> int:
    """How many ranks of ulysses each key and value head goes to."""
    # To their least common multiple, which divides the query heads, as both do.
    return cp // math.gcd(kv_heads, cp)


# --- ulysses, overlapped with the projections ---


def attend_heads(
    q_BShd: Tensor, k_BSkd: Tensor, v_BSkd: Tensor, spec: ContextSpec, documents: Documents | None = None
) -> Tensor:
    """[B, S, h / cp, dv]: what ``context_attention`` does between its two exchanges, of this rank's heads of the whole
    sequence, as ``project_to_heads`` makes them.

    Args:
        documents: checked by ``check_documents`` before anything travelled.
    """
    return local_attention(q_BShd, k_BSkd, v_BSkd, spec.scale, spec.window, documents)


def project_to_heads(x_BSD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """[B, S, N / cp]: own outputs of ``F.linear`` of all tokens, from [B, S / cp, D]. See ``matmul_swap``.

    Args:
        weight_ND: its outputs stand by the rank that gets them.
    """
    y_TN = matmul_swap(again(_rows, x_BSD), cast_parameter(weight_ND, x_BSD), group, overlap)
    return y_TN.view(-1, x_BSD.shape[0], y_TN.shape[1]).transpose(0, 1)


def project_from_heads(x_BSK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """[B, S / cp, N]: ``F.linear`` of all inputs of own tokens, from [B, S, K / cp]. See ``swap_matmul``."""
    check_cut(x_BSK, 1, group)
    y_TN = swap_matmul(_rows(x_BSK), cast_parameter(weight_NK, x_BSK), group, overlap)
    return y_TN.view(-1, x_BSK.shape[0], y_TN.shape[1]).transpose(0, 1)


def _rows(x_BSD: Tensor) -> Tensor:
    """[S * B, D], token after token of all sequences, in the dtype products run in: ranks hold neighbouring rows."""
    return x_BSD.to(compute_dtype(x_BSD)).transpose(0, 1).reshape(-1, x_BSD.shape[-1])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[:3] != v.shape[:3] or k.shape[-1] != q.shape[-1]:
        raise InputError(
            "queries, keys and values must be [B, S, heads, width] of one batch and sequence; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def check_documents(documents: Documents | None, batch: int, length: int) -> None:
    """Raise InputError unless ``documents`` are of ``batch`` sequences of ``length`` tokens."""
    whole = (batch, length)
    if documents is not None and tuple(documents.whole_BS.shape) != whole:
        raise InputError(
            f"documents are of {tuple(documents.whole_BS.shape)} tokens, but the whole sequence is {whole}; "
            "make them with Documents.of over the context-parallel group"
        )
