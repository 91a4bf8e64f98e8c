"""Causal self-attention: grouped heads, RoPE, QK-norm, windows, MLA; over tensor- and context-parallel ranks.

Tensors of one rank for tp 2 and cp 2, with sequence parallelism:

    x [B, S/4, D] ──gather over tp──▶ [B, S/2, D] ── q, k, v: own heads ──▶ [B, S/2, heads/2, d]
                                                  attention over cp (``context``)      │
    y [B, S/4, D] ◀──reduce-scatter over tp── [B, S/2, D] partial sums ◀── o ──────────╯

The input is gathered once for q, k and v. Positions and documents cover the tokens of the context-parallel rank, [B,
S/cp], and are equal on all ranks of its tensor-parallel group.

With ``overlap``, the projections overlap with the transfers over tp (``gather_matmul``, ``matmul_scatter``). If no
tokens are sent over tp, they overlap with the all-to-alls of ulysses over cp (``overlap.ulysses``). The all-to-alls are
then adjacent to the projections, and norms and rotation run on this rank's heads afterwards:

    x [B, S/cp, D] ── q, k, v by cp rank ══all-to-all══▶ [B, S, heads/cp, d] ── norm, rotate, attend
    y [B, S/cp, D] ◀── o ══all-to-all══ [B, S, heads/cp, d] ◀───────────────────────────────╯

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) gathers narrow latents instead of x:

    own tokens    x ─ q_a ─ norm ─▶ queries' latent ─╮
                  x ─ kv_a ─┬ norm ─▶ keys' latent ──┼─ gather over tp ─▶ all tokens ─ q_b, kv_b ─▶ own heads
                            ╰───────▶ shared key ────╯

The down-projections and their norms are small and replicated over the tensor-parallel group; their gradients are plain
sums over ranks. With overlap, the gather of each latent overlaps with its up-projection (``LatentGather``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autograd import accumulate_dtype, compute_dtype
from moe_comm.kernels.rms_norm import rms_norm
from moe_comm.layers.attention.config import AttentionConfig, Context, MLAConfig
from moe_comm.layers.attention.context import (
    ContextSpec,
    check_documents,
    check_heads,
    context_attention,
    head_repeats,
    local_attention,
    project_from_heads,
    project_to_heads,
    to_heads,
)
from moe_comm.layers.attention.rope import Rope, RopeTable, softmax_scale
from moe_comm.layers.attention.sequence import Documents, local_positions
from moe_comm.layers.parallel.collectives import (
    abort_on_error,
    channel_of,
    copy_to,
    gather_dim,
    group_rank,
    group_size,
    sum_over,
)
from moe_comm.layers.parallel.dense import RMSNorm
from moe_comm.layers.parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_linear,
    gather_input,
    reduce_output,
)
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.recompute import recomputed, recomputed_block
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding, Split


@dataclass(frozen=True)
class LatentGather:
    """Gathers the latents of all tokens, overlapped with their up-projections.

    linear: product of a latent [B, S, rank] with an up-projection's weight, for the gathered tokens. gather: all
    tokens' [B, S, rope] from this rank's [B, S / ranks, rope].
    """

    linear: Callable[[Tensor, Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


class HeadNorm(RMSNorm):
    """RMSNorm of each head (Qwen3). The weight is replicated over the ranks, each of which has some of the heads.

    The gradient covers this rank's heads. If no later reduction follows, ``copied_over`` is the group over which
    backward sums it.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        copied_over: ProcessGroup | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(width, eps, dtype=dtype, device=device)
        self.copied_over = copied_over

    def forward(self, x_BShd: Tensor) -> Tensor:
        """Normalize [B, S, heads, width] over the last dimension."""
        return rms_norm(x_BShd, copy_to(self.weight, self.copied_over), self.eps)


class FullNorm(nn.Module):
    """RMSNorm over the width of all heads (OLMoE), which are split over a tensor-parallel group."""

    def __init__(
        self,
        width: int,
        eps: float,
        group: ProcessGroup | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width // group_size(group), dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of each parameter."""
        return {"weight": Sharding((self.width,), (Split(0, "tp"),))}

    def forward(self, x: Tensor, squares: Tensor) -> Tensor:
        """Normalize x [.., width / tp] by ``squares`` [.., 1], the sum of squares over the full width."""
        scaled = x.to(squares.dtype) * torch.rsqrt(squares / self.width + self.eps)
        return (scaled * self.weight.to(squares.dtype)).to(x.dtype)


class Attention(ParallelModule):
    """Causal self-attention with heads split over ``tp_group`` and the sequence over ``cp_group``.

    Args:
        config: configuration of the layer. With ``mla``, kv_heads and head_dim are ignored.
        tp_group: ranks that share the heads; None: this rank has all heads.
        cp_group: ranks that share the sequence; None: this rank has the full sequence.
        context: form of context parallelism: "ulysses" (contiguous tokens, cp must divide the heads), "ring" or
            "token_ring" (zig-zag tokens; see ``attention/sequence.py``).
        sequence_parallel: outside of this layer, each tp rank has a contiguous part of the cp rank's tokens. False: all
            tp ranks have all tokens of the cp rank. Gradients of replicated parameters are then complete on each rank
            and must not be summed over ``tp_group``.
        scale: scale of the scores; None: head width ** -0.5, times DeepSeek's YaRN factor with ``mla``.
        overlap: how projections overlap with transfers. With ``sequence_parallel`` and more than one tp rank: the
            gather and reduce-scatter over ``tp_group``. Otherwise: the all-to-alls of ulysses over ``cp_group`` (with
            qk_norm "full" only the second one, as the sum of squares covers all heads of a token). None: no overlap.

    Attributes:
        q, k, v, o: projections; ``q.weight`` is [heads / tp * head_dim, D].
        q_a, q_a_norm, q_b: with ``mla``, projections of queries through a latent of ``q_rank``; ``q`` if that is None.
        kv_a: projection to the latent of keys and values, and to the rotated key that all heads share.
        kv_a_norm, kv_b: norm and up-projection of that latent.
        q_norm, k_norm: norms, with ``qk_norm``.
        rope: creates the table of sines and cosines, which a model can create once for all layers.

    Replicated weights are initialized independently on each rank: set them, or seed the ranks equally. The layer reads
    the weights of its projections directly, so FSDP must wrap the layer or a parent, not the projections.

    Raises:
        ConfigError: tp does not divide the heads, or tp * cp with ulysses.
    """

    def __init__(
        self,
        config: AttentionConfig,
        tp_group: ProcessGroup | None = None,
        cp_group: ProcessGroup | None = None,
        *,
        context: Context = "ulysses",
        sequence_parallel: bool = True,
        scale: float | None = None,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tp, cp, mla = group_size(tp_group), group_size(cp_group), config.mla
        kv_heads = config.kv_heads if mla is None else config.heads
        for name, heads in (("heads", config.heads), ("kv_heads", kv_heads)):
            if heads % tp:
                raise ConfigError(f"{name} ({heads}) must be a multiple of tp ({tp}), which splits them")
        check_heads(config.heads // tp, cp, context)
        self.config, self.tp_group, self.cp_group, self.context = config, tp_group, cp_group, context
        self.sequence_dim, self.overlap = 1 if sequence_parallel else None, overlap
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        if mla is None:
            self._add_heads(config, factory)
            width, value_width, rotated = config.head_dim, config.head_dim, config.head_dim
        else:
            self._add_latent(config, mla, factory)
            width, value_width, rotated = mla.nope_dim + mla.rope_dim, mla.v_dim, mla.rope_dim
        self.o = RowParallelLinear(
            config.heads * value_width,
            config.hidden,
            tp_group,
            bias=config.out_bias,
            sequence_dim=self.sequence_dim,
            overlap=overlap,
            **factory,
        )
        gathers_over_tp = tp > 1 and self.sequence_dim is not None
        self.overlaps_ulysses = overlap is not None and cp > 1 and context == "ulysses" and not gathers_over_tp
        self.rope = Rope(config.rope, rotated)
        if scale is None:
            scale = softmax_scale(width, None if mla is None else config.rope.yarn)
        self.spec = ContextSpec(cp_group, context, scale, config.window)

    def _add_heads(self, config: AttentionConfig, factory: dict[str, Any]) -> None:
        def project(heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden, heads * config.head_dim, self.tp_group, bias=config.bias, **factory
            )

        self.q, self.k, self.v = project(config.heads), project(config.kv_heads), project(config.kv_heads)
        self.q_norm: HeadNorm | FullNorm | None = None
        self.k_norm: HeadNorm | FullNorm | None = None
        if config.qk_norm == "head":
            copied_over = None if self.sequence_dim is not None else self.tp_group
            self.q_norm, self.k_norm = (
                HeadNorm(config.head_dim, config.norm_eps, copied_over, **factory) for _ in range(2)
            )
        elif config.qk_norm == "full":
            self.q_norm, self.k_norm = (
                FullNorm(heads * config.head_dim, config.norm_eps, self.tp_group, **factory)
                for heads in (config.heads, config.kv_heads)
            )

    def _add_latent(self, config: AttentionConfig, mla: MLAConfig, factory: dict[str, Any]) -> None:
        queries = config.heads * (mla.nope_dim + mla.rope_dim)

        def down(width: int) -> nn.Linear:
            return nn.Linear(config.hidden, width, bias=config.bias, **factory)

        def up(rank: int, width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(rank, width, self.tp_group, bias=False, **factory)

        if mla.q_rank is None:
            self.q = up(config.hidden, queries)
        else:
            self.q_a = down(mla.q_rank)
            self.q_a_norm = RMSNorm(mla.q_rank, config.norm_eps, **factory)
            self.q_b = up(mla.q_rank, queries)
        self.kv_a = down(mla.kv_rank + mla.rope_dim)
        self.kv_a_norm = RMSNorm(mla.kv_rank, config.norm_eps, **factory)
        self.kv_b = up(mla.kv_rank, config.heads * (mla.nope_dim + mla.v_dim))

    def _latent_heads(
        self,
        mla: MLAConfig,
        x_BSD: Tensor,
        gather: LatentGather | Callable[[Tensor], Tensor],
        rotate: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of all tokens: q, k [B, S, heads, nope + rope], v [B, S, heads, v_dim]. Collective.

        ``gather`` may be a function that gathers all latents at once before the up-projections.
        """
        # Under autocast the projections return a narrower dtype than x. One fp32 tensor would make ``packed`` fp32.
        x_q = x_BSD.to(compute_dtype(x_BSD)) if mla.q_rank is None else self.q_a_norm(self.q_a(x_BSD))
        latent, shared_key = self.kv_a(x_BSD).split([mla.kv_rank, mla.rope_dim], -1)
        latent = self.kv_a_norm(latent)
        if isinstance(gather, LatentGather):
            linear, shared_key = gather.linear, gather.gather(shared_key)
        else:
            packed = torch.cat([x_q, latent, shared_key], -1)
            widths = [x_q.shape[-1], mla.kv_rank, mla.rope_dim]
            linear, (x_q, latent, shared_key) = nn.functional.linear, gather(packed).split(widths, -1)
        up = self.q if mla.q_rank is None else self.q_b
        # Use the weights directly: the forward of the layer would gather its input again, or sum its gradient again.
        q = linear(x_q, up.weight).unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        kv = linear(latent, self.kv_b.weight).unflatten(-1, (-1, mla.nope_dim + mla.v_dim))
        q_plain, q_rotated = q.split([mla.nope_dim, mla.rope_dim], -1)
        k_plain, v = kv.split([mla.nope_dim, mla.v_dim], -1)
        key = rotate(shared_key.unsqueeze(2)).expand(*k_plain.shape[:3], mla.rope_dim)
        return torch.cat([q_plain, rotate(q_rotated)], -1), torch.cat([k_plain, key], -1), v

    def forward(
        self, x_BSD: Tensor, positions_BS: Tensor | RopeTable | None = None, documents: Documents | Tensor | None = None
    ) -> Tensor:
        """Attend each token to itself and the tokens before it. Collective over both groups.

        Args:
            x_BSD: [B, S / (cp * tp), D], or [B, S / cp, D] without ``sequence_parallel``.
            positions_BS: [B or 1, S / cp] integer positions of the cp rank's tokens for RoPE, or their ``rope.table``.
                None: positions in the full sequence. Causality depends on the order in the sequence, not on positions.
            documents: packed documents, or the ids [B, S / cp] of the cp rank's tokens. Ids are gathered over the
                cp ranks in each call, ``Documents.of`` gathers them once. None: each sequence is one document.

        Returns:
            A tensor of the shape of ``x_BSD``.

        Raises:
            InputError: x, positions or documents have the wrong shape, or the sequence cannot be split.
            PeerRaised, PeerError: attention raised on another rank of a group.
            PeerDied, PeerTimeout: a rank of a group failed, or did not call in time.
        """
        with abort_on_error("attention", self.tp_group, self.cp_group):
            return self._attend(x_BSD, positions_BS, documents)

    def _attend(
        self, x_BSD: Tensor, positions_BS: Tensor | RopeTable | None, documents: Documents | Tensor | None
    ) -> Tensor:
        if x_BSD.dim() != 3 or x_BSD.shape[-1] != self.config.hidden:
            raise InputError(f"attention expects [B, S, {self.config.hidden}]; got {tuple(x_BSD.shape)}")
        length = x_BSD.shape[1] * (group_size(self.tp_group) if self.sequence_dim is not None else 1)
        table = self._table(x_BSD, length, positions_BS)
        if isinstance(documents, Tensor):
            documents = Documents.of(documents, self.cp_group, self.context)
        if self.overlaps_ulysses:
            return self._forward_ulysses(x_BSD, table, positions_BS is None, documents)
        mla, gather = self.config.mla, self._tp_gather()
        if mla is not None:
            q, k, v = self._latent_heads(mla, x_BSD, gather, self._rotation(table))
        else:
            q, k, v = self._heads(self._projected(x_BSD), self._rotation(table))
        out_BShd = context_attention(q, k, v, replace(self.spec, documents=documents))
        return self.o(out_BShd.flatten(2))  # type: ignore[no-any-return]

    def _forward_ulysses(self, x_BSD: Tensor, table: RopeTable, in_order: bool, documents: Documents | None) -> Tensor:
        """Run ``forward`` with the all-to-alls of ulysses overlapped. in_order: positions are those in the sequence."""
        overlap, mla = self.overlap, self.config.mla
        assert overlap is not None
        check_documents(documents, x_BSD.shape[0], table.cos.shape[1] * group_size(self.cp_group))
        if mla is None and isinstance(self.q_norm, FullNorm):
            # The norm sums over all heads of a token, so it must run before the all-to-all.
            local_qkv = self._heads(self._projected(x_BSD), self._rotation(table))
            q, k, v = to_heads(*local_qkv, self.cp_group)
        else:
            rotate = self._rotation(self._full_table(table, in_order))
            if mla is not None:
                q, k, v = self._latent_heads(mla, x_BSD, self._ulysses_gather(overlap), rotate)
            else:
                x_BSD = gather_input(x_BSD, self.tp_group, self.sequence_dim)
                q, k, v = self._heads(self._projected_to_heads(x_BSD, overlap), rotate)
        out_BShd = local_attention(q, k, v, replace(self.spec, documents=documents))
        y_BSD = project_from_heads(out_BShd.flatten(2), self.o.weight, self.cp_group, overlap)
        y_BSD = reduce_output(y_BSD, self.tp_group, self.sequence_dim)
        return y_BSD if self.o.bias is None else y_BSD + self.o.bias.to(y_BSD.dtype)

    def _rotation(self, table: RopeTable | Callable[[], RopeTable]) -> Callable[[Tensor], Tensor]:
        """Return a function that rotates heads by ``table``, which may be pending."""

        def rotate(heads_BShd: Tensor) -> Tensor:
            ready = table if isinstance(table, RopeTable) else table()
            return self.rope.rotate(heads_BShd, RopeTable(*(part.to(heads_BShd.dtype) for part in ready)))

        return rotate

    def _full_table(self, table: RopeTable, in_order: bool) -> Callable[[], RopeTable]:
        """Return a function that waits for the table of all tokens; it is gathered from the cp ranks asynchronously."""
        assert self.cp_group is not None
        if in_order:
            positions = torch.arange(table.cos.shape[1] * group_size(self.cp_group), device=table.cos.device)
            full = self.rope.table(positions.unsqueeze(0), table.cos.dtype)
            return lambda: full
        channel, cos_sin = channel_of(self.cp_group), torch.stack(table)
        description = f"an exchange of rotations {tuple(cos_sin.shape)}"
        channel.compare(description, cos_sin)
        pending = channel.start_all_gather(cos_sin, description)
        return cache(lambda: RopeTable(*pending().movedim(0, 2).flatten(2, 3)))

    def _tp_gather(self) -> LatentGather | Callable[[Tensor], Tensor]:
        gather_tp = partial(gather_input, group=self.tp_group, sequence_dim=self.sequence_dim)
        if self.overlap is None or self.sequence_dim is None or group_size(self.tp_group) == 1:
            return gather_tp
        options: dict[str, Any] = {"group": self.tp_group, "sequence_dim": self.sequence_dim, "overlap": self.overlap}
        return LatentGather(partial(column_linear, **options), gather_tp)

    def _ulysses_gather(self, overlap: Overlap) -> LatentGather:
        def linear(x_BSD: Tensor, weight_ND: Tensor) -> Tensor:
            return project_to_heads(
                gather_input(x_BSD, self.tp_group, self.sequence_dim), weight_ND, self.cp_group, overlap
            )

        return LatentGather(
            linear, lambda x_BSD: gather_dim(gather_input(x_BSD, self.tp_group, self.sequence_dim), self.cp_group, 1)
        )

    def _heads(self, projected: Sequence[Tensor], rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [B, S, heads, d] from their projections [B, S, heads * d]."""
        config = self.config
        q, k, v = projected
        if isinstance(self.q_norm, FullNorm) and isinstance(self.k_norm, FullNorm):
            squares = torch.stack([t.to(accumulate_dtype(t.dtype)).square().sum(-1) for t in (q, k)], -1)
            # Each rank normalizes its own heads by this sum, so backward adds the gradients of all ranks.
            total = copy_to(sum_over(squares, self.tp_group), self.tp_group)
            q, k = self.q_norm(q, total[..., :1]), self.k_norm(k, total[..., 1:])
        if config.clip_qkv is not None:
            q, k, v = (t.clamp(-config.clip_qkv, config.clip_qkv) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, config.head_dim)) for t in (q, k, v))
        if isinstance(self.q_norm, HeadNorm) and isinstance(self.k_norm, HeadNorm):
            q, k = recomputed_block(self.q_norm, q), recomputed_block(self.k_norm, k)
        # Without a norm, recomputing saves no memory: the rotation's input is as large as its output.
        q, k = (recomputed(rotate, t) if isinstance(self.q_norm, HeadNorm) else rotate(t) for t in (q, k))
        return q, k, v

    def _projected(self, x_BSD: Tensor) -> Sequence[Tensor]:
        # Use the weights directly: the forward of each layer would gather x again, or sum its gradient again.
        layers = (self.q, self.k, self.v)
        if self.overlap is None or self.sequence_dim is None or group_size(self.tp_group) == 1:
            x_BSD = gather_input(x_BSD, self.tp_group, self.sequence_dim)
            return [F.linear(x_BSD, layer.weight, layer.bias) for layer in layers]
        weight = torch.cat(tuple(layer.weight for layer in layers))
        biases = tuple(layer.bias for layer in layers if layer.bias is not None)
        bias = torch.cat(biases) if biases else None
        qkv = column_linear(x_BSD, weight, self.tp_group, self.sequence_dim, self.overlap, bias)
        return torch.split(qkv, [layer.weight.shape[0] for layer in layers], -1)

    def _projected_to_heads(self, x_BSD: Tensor, overlap: Overlap) -> Sequence[Tensor]:
        """Return this cp rank's q, k and v of the full sequence.

        A key and value head that several cp ranks need is projected once for each of them.
        """
        cp, rank = group_size(self.cp_group), group_rank(self.cp_group)
        repeats = head_repeats(self.k.weight.shape[0] // self.config.head_dim, cp)

        def rows_by_rank(param: Tensor, copies: int) -> Tensor:
            if copies > 1:
                param = param.unflatten(0, (-1, self.config.head_dim)).repeat_interleave(copies, 0).flatten(0, 1)
            return param.view(cp, -1, *param.shape[1:])

        layers = ((self.q, 1), (self.k, repeats), (self.v, repeats))
        weights = [rows_by_rank(layer.weight, copies) for layer, copies in layers]
        qkv = project_to_heads(x_BSD, torch.cat(weights, 1).flatten(0, 1), self.cp_group, overlap)
        biases = [rows_by_rank(layer.bias, copies)[rank] for layer, copies in layers if layer.bias is not None]
        if biases:
            qkv = qkv + torch.cat(biases).to(qkv.dtype)
        return torch.split(qkv, [weight.shape[1] for weight in weights], -1)

    def _table(self, x_BSD: Tensor, length: int, positions_BS: Tensor | RopeTable | None) -> RopeTable:
        if isinstance(positions_BS, RopeTable):
            table = positions_BS
        else:
            if positions_BS is None:
                cp, rank = group_size(self.cp_group), group_rank(self.cp_group)
                positions_BS = local_positions(length * cp, cp, rank, self.context).to(x_BSD.device).unsqueeze(0)
            # In wide precision, as autocast determines the dtype of the projections later.
            table = self.rope.table(positions_BS, accumulate_dtype(x_BSD.dtype))
        shape = table.cos.shape
        if len(shape) != 3 or shape[0] not in (1, x_BSD.shape[0]) or shape[1:] != (length, self.rope.dim // 2):
            raise InputError(
                f"positions must be [{x_BSD.shape[0]} or 1, {length}] for all tokens of the context-parallel rank, and "
                f"the table {self.rope.dim} wide; got {tuple(shape[:-1])}, {2 * shape[-1]} wide"
            )
        return table

    def extra_repr(self) -> str:
        tp, cp = group_size(self.tp_group), group_size(self.cp_group)
        return f"heads={self.config.heads}/{tp}, kv_heads={self.config.kv_heads}, cp={cp} ({self.context})"
