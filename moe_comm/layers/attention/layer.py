"""Causal self-attention: grouped heads, RoPE, QK-norm, windows, latents; over tensor- and context-parallel ranks.

What a rank holds, tp 2 and cp 2, sequence parallel:

    x [B, S/4, D] ──gather over tp──▶ [B, S/2, D] ── q, k, v: own heads ──▶ [B, S/2, heads/2, d]
                                                  attention over cp (``context``)      │
    y [B, S/4, D] ◀──reduce-scatter over tp── [B, S/2, D] partial sums ◀── o ──────────╯

The input is gathered once for q, k and v. Positions and documents are those of the context-parallel rank's tokens,
[B, S/cp], alike on all ranks of its tensor-parallel group.

With ``overlap`` the transfers at both ends hide behind the projections: those over tp (``gather_matmul``,
``matmul_scatter``), or, where tokens do not travel over tp, ulysses' exchanges over cp (``overlap.ulysses``). These
come right after the one projection and right before the other; norms and rotation follow them, of own heads:

    x [B, S/cp, D] ── q, k, v by cp rank ══all-to-all══▶ [B, S, heads/cp, d] ── norm, rotate, attend
    y [B, S/cp, D] ◀── o ══all-to-all══ [B, S, heads/cp, d] ◀───────────────────────────────╯
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.rms_norm import rms_norm
from moe_comm.kernels.wide import wide_dtype
from moe_comm.layers.attention.config import AttentionConfig, Context
from moe_comm.layers.attention.context import (
    ContextSpec,
    attend_heads,
    check_documents,
    check_heads,
    context_attention,
    head_repeats,
    project_from_heads,
    project_to_heads,
    to_heads,
)
from moe_comm.layers.attention.mla import Entrance, LatentProjections, latent_config
from moe_comm.layers.attention.rope import Rope, RopeTable, softmax_scale
from moe_comm.layers.attention.sequence import Documents, local_positions
from moe_comm.layers.parallel.collectives import channel_of, copy_to, gather_dim, group_rank, group_size, sum_over
from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear, enter, entering_linear, leave
from moe_comm.layers.parallel.norm import RMSNorm
from moe_comm.layers.parallel.recompute import again, again_inside
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding, Split


class HeadNorm(RMSNorm):
    """RMSNorm of every head by itself (Qwen3). The weight is alike on all ranks, each of which has some of the heads.

    Args:
        copied_over: group whose ranks need the complete gradient, because nobody sums it for them; None: the gradient
            is that of this rank's heads.
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
        """[B, S, heads, width], normalised over the last dimension."""
        return rms_norm(x_BShd, copy_to(self.weight, self.copied_over), self.eps)


class FullNorm(nn.Module):
    """RMSNorm over the full width of all heads (OLMoE), which are spread over a tensor-parallel group.

    Attributes:
        weight: [width / tp].
    """

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
        """Ones."""
        nn.init.ones_(self.weight)

    def shardings(self) -> dict[str, Sharding]:
        """How the ranks hold each parameter."""
        return {"weight": Sharding((self.width,), (Split(0, "tp"),))}

    def forward(self, x: Tensor, squares: Tensor) -> Tensor:
        """x [.., width / tp] normalised by ``squares`` [.., 1], the sum of squares over the full width."""
        scaled = x.to(squares.dtype) * torch.rsqrt(squares / self.width + self.eps)
        return (scaled * self.weight.to(squares.dtype)).to(x.dtype)


class Attention(LatentProjections):
    """Causal self-attention with heads over ``tp_group`` and the sequence over ``cp_group``.

    Args:
        config: of the whole layer. With ``mla``, kv_heads and head_dim are not used.
        tp_group: ranks that share the heads; None: all heads are here.
        cp_group: ranks that share the sequence; None: it is whole here.
        context: how, "ulysses" (contiguous, heads must divide), "ring" or "token_ring" (zig-zag; see
            ``layers.sequence``).
        sequence_parallel: outside of this layer every tp rank has its own part of the tokens, contiguous within the
            cp rank's. False: all tp ranks have all tokens of the cp rank; gradients of replicated parameters are then
            complete on each of them, and must not be summed over ``tp_group``.
        scale: of the scores; None: width of a head ** -0.5, and DeepSeek's YaRN factor with ``mla``.
        overlap: how the projections hide what travels beside them: with ``sequence_parallel`` and more than one tp
            rank gathering and summing tokens over ``tp_group``, else ulysses' exchanges over ``cp_group`` (but for
            qk_norm "full" only the one after attention: its sum of squares is over all heads of a token). None: one
            after the other.

    Attributes:
        q, k, v, o: projections, ``q.weight`` [heads / tp * head_dim, D] and so on; with ``mla`` those of
            ``LatentProjections``. q_norm, k_norm: with ``qk_norm``.
        rope: makes the table of sines and cosines, which a model may make once for all its layers.

    Weights that are alike on all ranks start as drawn on each: set them, or seed the ranks alike. The layer reads its
    projections' weights itself, so FSDP must wrap it, or a module around it, and not each projection.

    Raises:
        ConfigError: heads do not divide by tp, or by tp * cp with ulysses.
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
                raise ConfigError(f"{name} ({heads}) must be a multiple of tp ({tp}), which spreads them")
        check_heads(config.heads // tp, kv_heads // tp, cp, context)
        self.config, self.tp_group, self.cp_group, self.context = config, tp_group, cp_group, context
        self.sequence_dim, self.overlap = 1 if sequence_parallel else None, overlap
        if mla is None:
            self._add_heads(config, dtype, device)
            width, value_width, rotated = config.head_dim, config.head_dim, config.head_dim
        else:
            latent_config(config)
            self._add_latent(config, tp_group, dtype, device)
            width, value_width, rotated = mla.nope_dim + mla.rope_dim, mla.v_dim, mla.rope_dim
        self.o = RowParallelLinear(
            config.heads * value_width,
            config.hidden,
            tp_group,
            bias=config.out_bias,
            sequence_dim=self.sequence_dim,
            overlap=overlap,
            dtype=dtype,
            device=device,
        )
        travels_over_tp = tp > 1 and self.sequence_dim is not None
        self.swaps = overlap is not None and cp > 1 and context == "ulysses" and not travels_over_tp
        self.rope = Rope(config.rope, rotated)
        if scale is None:
            scale = softmax_scale(width, None if mla is None else config.rope.yarn)
        self.spec = ContextSpec(cp_group, context, scale, config.window)

    def _add_heads(self, config: AttentionConfig, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        def project(heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden, heads * config.head_dim, self.tp_group, bias=config.bias, dtype=dtype, device=device
            )

        self.q, self.k, self.v = project(config.heads), project(config.kv_heads), project(config.kv_heads)
        self.q_norm: HeadNorm | FullNorm | None = None
        self.k_norm: HeadNorm | FullNorm | None = None
        if config.qk_norm == "head":
            copied_over = None if self.sequence_dim is not None else self.tp_group
            self.q_norm, self.k_norm = (
                HeadNorm(config.head_dim, config.norm_eps, copied_over, dtype=dtype, device=device) for _ in range(2)
            )
        elif config.qk_norm == "full":
            self.q_norm, self.k_norm = (
                FullNorm(heads * config.head_dim, config.norm_eps, self.tp_group, dtype=dtype, device=device)
                for heads in (config.heads, config.kv_heads)
            )

    def forward(
        self,
        x_BSD: Tensor,
        positions_BS: Tensor | RopeTable | None = None,
        documents: Documents | Tensor | None = None,
    ) -> Tensor:
        """Attention of every token to itself and those before it. Collective over both groups.

        Args:
            x_BSD: [B, S / (cp * tp), D], or [B, S / cp, D] without ``sequence_parallel``.
            positions_BS: [B or 1, S / cp] positions of the cp rank's tokens, integers, for RoPE; or their table, as
                ``rope.table`` makes it; None: the tokens' places in the whole sequence. What a token may attend to
                follows from places, whatever its position is.
            documents: whose tokens attend to each other; or the ids of the cp rank's tokens [B, S / cp], from which
                they are made in every call (``Documents.of`` does that once for all layers). None: each row is one.

        Returns:
            The same shape.

        Raises:
            InputError: x, positions or documents have the wrong shape, or the sequence cannot be cut.
            PeerDied, PeerTimeout: a rank of a group is gone, or does not come.
        """
        if x_BSD.dim() != 3 or x_BSD.shape[-1] != self.config.hidden:
            raise InputError(f"attention takes [B, S, {self.config.hidden}]; got {tuple(x_BSD.shape)}")
        length = x_BSD.shape[1] * (group_size(self.tp_group) if self.sequence_dim is not None else 1)
        table = self._table(x_BSD, length, positions_BS)
        if isinstance(documents, Tensor):
            documents = Documents.of(documents, self.cp_group, self.context)
        if self.swaps:
            return self._swapped(x_BSD, table, positions_BS is None, documents)
        mla, entrance = self.config.mla, self._entrance()
        if mla is not None:
            q, k, v = self._latent_heads(mla, x_BSD, entrance, self._rotation(table))
        else:
            q, k, v = self._heads(self._projected(x_BSD), self._rotation(table))
        out_BShd = context_attention(q, k, v, self.spec, documents)
        return self.o(out_BShd.flatten(2))  # type: ignore[no-any-return]

    def _swapped(self, x_BSD: Tensor, table: RopeTable, in_order: bool, documents: Documents | None) -> Tensor:
        """With ulysses' exchanges behind the projections. in_order: positions are places in the sequence."""
        overlap, mla = self.overlap, self.config.mla
        assert overlap is not None
        check_documents(documents, x_BSD.shape[0], table.cos.shape[1] * group_size(self.cp_group))
        if mla is None and isinstance(self.q_norm, FullNorm):
            own = self._heads(self._projected(x_BSD), self._rotation(table))
            q, k, v = to_heads(*own, self.cp_group)
        else:
            rotate = self._rotation(self._whole_table(table, in_order))
            if mla is not None:
                q, k, v = self._latent_heads(mla, x_BSD, self._swapping_entrance(overlap), rotate)
            else:
                x_BSD = enter(x_BSD, self.tp_group, self.sequence_dim)
                q, k, v = self._heads(self._projected_to_heads(x_BSD, overlap), rotate)
        out_BShd = attend_heads(q, k, v, self.spec, documents)
        y_BSD = project_from_heads(out_BShd.flatten(2), self.o.weight, self.cp_group, overlap)
        y_BSD = leave(y_BSD, self.tp_group, self.sequence_dim)
        return y_BSD if self.o.bias is None else y_BSD + self.o.bias.to(y_BSD.dtype)

    def _rotation(self, table: RopeTable | Callable[[], RopeTable]) -> Callable[[Tensor], Tensor]:
        """What rotates heads by ``table``, which may still be on its way."""

        def rotate(heads_BShd: Tensor) -> Tensor:
            found = table if isinstance(table, RopeTable) else table()
            return self.rope.rotate(heads_BShd, RopeTable(*(part.to(heads_BShd.dtype) for part in found)))

        return rotate

    def _whole_table(self, table: RopeTable, in_order: bool) -> Callable[[], RopeTable]:
        """The table of all tokens, from those of the cp ranks, which travel while others compute."""
        assert self.cp_group is not None
        if in_order:
            positions = torch.arange(table.cos.shape[1] * group_size(self.cp_group), device=table.cos.device)
            whole = self.rope.table(positions.unsqueeze(0), table.cos.dtype)
            return lambda: whole
        channel, both = channel_of(self.cp_group), torch.stack(table)
        description = f"an exchange of rotations {tuple(both.shape)}"
        channel.compare(description, both)
        pending = channel.start_all_gather(both, description)
        return cache(lambda: RopeTable(*pending().movedim(0, 2).flatten(2, 3)))

    def _entrance(self) -> Entrance | Callable[[Tensor], Tensor]:
        enters = partial(enter, group=self.tp_group, sequence_dim=self.sequence_dim)
        if self.overlap is None or self.sequence_dim is None or group_size(self.tp_group) == 1:
            return enters
        how: dict[str, Any] = {"group": self.tp_group, "sequence_dim": self.sequence_dim, "overlap": self.overlap}
        return Entrance(partial(entering_linear, **how), enters)

    def _swapping_entrance(self, overlap: Overlap) -> Entrance:
        def linear(x_BSD: Tensor, weight_ND: Tensor) -> Tensor:
            return project_to_heads(enter(x_BSD, self.tp_group, self.sequence_dim), weight_ND, self.cp_group, overlap)

        return Entrance(
            linear, lambda x_BSD: gather_dim(enter(x_BSD, self.tp_group, self.sequence_dim), self.cp_group, 1)
        )

    def _heads(self, projected: Sequence[Tensor], rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, S, heads, d] from their projections [B, S, heads * d]."""
        config = self.config
        q, k, v = projected
        if isinstance(self.q_norm, FullNorm) and isinstance(self.k_norm, FullNorm):
            squares = torch.stack([t.to(wide_dtype(t.dtype)).square().sum(-1) for t in (q, k)], -1)
            # Each rank goes on with its own heads, so what it says about the sum's gradient is summed too.
            total = copy_to(sum_over(squares, self.tp_group), self.tp_group)
            q, k = self.q_norm(q, total[..., :1]), self.k_norm(k, total[..., 1:])
        if config.clip_qkv is not None:
            q, k, v = (t.clamp(-config.clip_qkv, config.clip_qkv) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, config.head_dim)) for t in (q, k, v))
        if isinstance(self.q_norm, HeadNorm) and isinstance(self.k_norm, HeadNorm):
            q, k = again_inside(self.q_norm, q), again_inside(self.k_norm, k)
        # Without a norm before it a rotation is as large as what it would be computed from again.
        q, k = (again(rotate, t) if isinstance(self.q_norm, HeadNorm) else rotate(t) for t in (q, k))
        return q, k, v

    def _projected(self, x_BSD: Tensor) -> Sequence[Tensor]:
        # The weights alone: each layer by itself would gather, or sum the gradient, once more.
        layers = (self.q, self.k, self.v)
        if self.overlap is None or self.sequence_dim is None or group_size(self.tp_group) == 1:
            x_BSD = enter(x_BSD, self.tp_group, self.sequence_dim)
            return [F.linear(x_BSD, layer.weight, layer.bias) for layer in layers]
        weight = torch.cat(tuple(layer.weight for layer in layers))
        biases = tuple(layer.bias for layer in layers if layer.bias is not None)
        bias = torch.cat(biases) if biases else None
        joined = entering_linear(x_BSD, weight, self.tp_group, self.sequence_dim, self.overlap, bias)
        return torch.split(joined, [layer.weight.shape[0] for layer in layers], -1)

    def _projected_to_heads(self, x_BSD: Tensor, overlap: Overlap) -> Sequence[Tensor]:
        """This cp rank's q, k and v of the whole sequence; heads that go to several ranks are computed for each."""
        cp, rank = group_size(self.cp_group), group_rank(self.cp_group)
        repeats = head_repeats(self.k.weight.shape[0] // self.config.head_dim, cp)

        def by_rank(of_heads: Tensor, times: int) -> Tensor:
            if times > 1:
                of_heads = of_heads.unflatten(0, (-1, self.config.head_dim)).repeat_interleave(times, 0).flatten(0, 1)
            return of_heads.view(cp, -1, *of_heads.shape[1:])

        layers = ((self.q, 1), (self.k, repeats), (self.v, repeats))
        weights = [by_rank(layer.weight, times) for layer, times in layers]
        joined = project_to_heads(x_BSD, torch.cat(weights, 1).flatten(0, 1), self.cp_group, overlap)
        biases = [by_rank(layer.bias, times)[rank] for layer, times in layers if layer.bias is not None]
        if biases:
            joined = joined + torch.cat(biases).to(joined.dtype)
        return torch.split(joined, [weight.shape[1] for weight in weights], -1)

    def _table(self, x_BSD: Tensor, length: int, positions_BS: Tensor | RopeTable | None) -> RopeTable:
        if isinstance(positions_BS, RopeTable):
            table = positions_BS
        else:
            if positions_BS is None:
                cp, rank = group_size(self.cp_group), group_rank(self.cp_group)
                positions_BS = local_positions(length * cp, cp, rank, self.context).to(x_BSD.device).unsqueeze(0)
            # Wide, as the projections' dtype, under autocast for one, is not known yet.
            table = self.rope.table(positions_BS, wide_dtype(x_BSD.dtype))
        shape = table.cos.shape
        if len(shape) != 3 or shape[0] not in (1, x_BSD.shape[0]) or shape[1:] != (length, self.rope.dim // 2):
            raise InputError(
                f"positions must be [{x_BSD.shape[0]} or 1, {length}], those of the context-parallel rank's tokens "
                f"before tensor parallelism cuts them; got {tuple(shape[:-1])}, {2 * shape[-1]} wide"
            )
        return table

    def extra_repr(self) -> str:
        tp, cp = group_size(self.tp_group), group_size(self.cp_group)
        return f"heads={self.config.heads}/{tp}, kv_heads={self.config.kv_heads}, cp={cp} ({self.context})"
