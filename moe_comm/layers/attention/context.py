"""Causal attention of a sequence that is split over a context-parallel group, in one of three forms.

    ulysses   [B, S/cp, h, d] ──all-to-all──▶ [B, S, h/cp, d] ── attention of h/cp heads ──▶ all-to-all back
              (arXiv 2309.14509; used by MegaScale-MoE, arXiv 2505.11432). cp must divide the heads. Two all-to-alls of
              activations in each direction; their size per rank decreases with cp.
    ring      keys and values circulate, queries stay (see ``ring``). Any number of heads; transfers overlap compute.
    token_ring  queries circulate and outputs return, keys and values stay (see ``token_ring``).

The sequence is contiguous for ulysses and zig-zag for both rings (see ``sequence``). With ``Overlap``, the all-to-alls
of ulysses overlap with the projections next to them (``project_to_heads``, ``project_from_heads``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autograd import cast_parameter, compute_dtype
from moe_comm.layers.attention.config import Context
from moe_comm.layers.attention.ring import RingSpec, ring_attention
from moe_comm.layers.attention.sequence import Documents, check_context
from moe_comm.layers.attention.token_ring import token_ring_attention
from moe_comm.layers.parallel.collectives import check_cut, group_size, swap_dims
from moe_comm.layers.parallel.recompute import recomputed
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.ulysses import matmul_swap, swap_matmul


@dataclass(frozen=True)
class ContextSpec:
    """How a sequence is attended.

    group: ranks over which the sequence is split; None: this rank has the full sequence. context: form of context
    parallelism. scale: scale of the scores. window: see ``AttentionConfig``.
    """

    group: ProcessGroup | None
    context: Context
    scale: float
    window: int | None = None


def check_heads(heads: int, kv_heads: int, cp: int, context: Context) -> None:
    """Raise ConfigError unless this form over cp ranks supports ``heads`` and ``kv_heads`` per rank."""
    check_context(context)
    if heads % kv_heads:
        raise ConfigError(f"the {heads} query heads of a rank must be a multiple of its {kv_heads} key and value heads")
    if context == "ulysses" and heads % cp:
        raise ConfigError(
            f"ulysses splits heads over the ranks: cp {cp} does not divide the {heads} heads of a rank; "
            'use context "ring" or "token_ring", which support any number of heads'
        )


def context_attention(
    q_BShd: Tensor, k_BSkd: Tensor, v_BSkd: Tensor, spec: ContextSpec, documents: Documents | None = None
) -> Tensor:
    """Return [B, S / cp, h, dv], the causal attention of this rank's queries to the full sequence. Collective.

    Args:
        q_BShd: [B, S / cp, h, d] in the layout of ``sequence``.
        k_BSkd: [B, S / cp, k, d], h a multiple of k.
        v_BSkd: [B, S / cp, k, dv].
        spec: group, form, scale and window.
        documents: packed documents of the full sequence; None: each sequence is one document.

    Raises:
        ConfigError: see ``check_heads``.
        InputError: shapes do not match each other or the layout.
        PeerDied, PeerTimeout: a rank of the group failed, or did not call in time.
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
    """Return the causal attention [B, S, h, dv] of a full sequence on this rank, without an S x S mask."""
    q, k, v = (t.transpose(1, 2) for t in (q_BShd, k_BSkd, v_BSkd))
    if documents is not None or (window is not None and window < q.shape[2]):
        return ring_attention(q, k, v, RingSpec(None, scale, window, documents)).transpose(1, 2)
    heads, width = k.shape[1], v.shape[-1]
    if q.device.type == "cuda" and q.dtype == torch.float32 and heads != q.shape[1]:
        # Only the flash kernel supports grouped heads without an S x S matrix, and it needs 16-bit floats.
        k, v = (t.repeat_interleave(q.shape[1] // heads, 1) for t in (k, v))
    if q.device.type == "cpu" and width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # the CPU's flash kernel needs equal widths
    grouped = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[..., :width].transpose(1, 2)


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return [B, S, heads / cp, d] of each of q, k and v [B, S / cp, heads, d], in one all-to-all.

    If there are fewer key and value heads than ranks, they are repeated first, so that their gradients are summed.
    """
    cp = group_size(group)
    repeats = head_repeats(k.shape[2], cp)
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
    # For each destination, concatenate its heads of q, k and v.
    parts = [t.unflatten(2, (cp, -1)).flatten(3) for t in (q, k, v)]
    packed = swap_dims(torch.cat(parts, -1), group, 2, 1)
    split = packed.squeeze(2).split([part.shape[-1] for part in parts], -1)
    q, k, v = (part.unflatten(-1, (-1, t.shape[-1])) for part, t in zip(split, (q, k, v), strict=True))
    return q, k, v


def head_repeats(kv_heads: int, cp: int) -> int:
    """Return the number of ulysses ranks that receive each key and value head."""
    # Repeat to the least common multiple, which divides the number of query heads.
    return cp // math.gcd(kv_heads, cp)


# --- ulysses, overlapped with the projections ---


def project_to_heads(x_BSD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """Map [B, S / cp, D] to this rank's outputs of ``F.linear`` for all tokens, [B, S, N / cp]. See ``matmul_swap``.

    Args:
        weight_ND: outputs are ordered by the rank that receives them.
    """
    y_TN = matmul_swap(recomputed(_rows, x_BSD), cast_parameter(weight_ND, x_BSD), group, overlap)
    return y_TN.view(-1, x_BSD.shape[0], y_TN.shape[1]).transpose(0, 1)


def project_from_heads(x_BSK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """Map [B, S, K / cp] to ``F.linear`` of all inputs for this rank's tokens, [B, S / cp, N]. See ``swap_matmul``."""
    check_cut(x_BSK, 1, group)
    y_TN = swap_matmul(_rows(x_BSK), cast_parameter(weight_NK, x_BSK), group, overlap)
    return y_TN.view(-1, x_BSK.shape[0], y_TN.shape[1]).transpose(0, 1)


def _rows(x_BSD: Tensor) -> Tensor:
    """Return x as [S * B, D] in the compute dtype, ordered by token, so that each rank holds contiguous rows."""
    return x_BSD.to(compute_dtype(x_BSD)).transpose(0, 1).reshape(-1, x_BSD.shape[-1])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[:3] != v.shape[:3] or k.shape[-1] != q.shape[-1]:
        raise InputError(
            "queries, keys and values must be [B, S, heads, width] with equal B and S, equal numbers of key and value "
            "heads, and equal widths of queries and keys; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def check_documents(documents: Documents | None, batch: int, length: int) -> None:
    """Raise InputError unless ``documents`` describe ``batch`` sequences of ``length`` tokens."""
    full = (batch, length)
    if documents is not None and tuple(documents.ids_BS.shape) != full:
        raise InputError(
            f"documents have shape {tuple(documents.ids_BS.shape)}, but the full sequences have shape {full}; "
            "make them with Documents.of over the context-parallel group"
        )
