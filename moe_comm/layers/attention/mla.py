"""Projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    own tokens    x ─ q_a ─ norm ─▶ queries' latent ─╮
                  x ─ kv_a ─┬ norm ─▶ keys' latent ──┼─ one gather over tp ─▶ all tokens ─ q_b, kv_b ─▶ own heads
                            ╰───────▶ shared key ────╯

The down-projections (``q_a``, ``kv_a`` and their norms) are small and alike on every rank of the tensor-parallel group.
Each rank runs them on its own tokens only and the narrow latents are gathered, not the wide x: fewer bytes, no work
done twice, and their gradients are plain sums over ranks like those of any replicated parameter. Where the way to the
heads is overlapped, each latent travels behind its own product (``Entrance``); the shared key, which has none, first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError
from moe_comm.kernels.autocast import compute_dtype
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig
from moe_comm.layers.parallel.linear import ColumnParallelLinear
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.norm import RMSNorm


@dataclass(frozen=True)
class Entrance:
    """A way for own tokens' latents to the heads of this rank.

    linear: product of a latent [B, S, rank] with its up-projection's weight, of all tokens there are on the other side.
    gather: all tokens' [B, S, rope] of this rank's [B, S / ranks, rope].
    """

    linear: Callable[[Tensor, Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


class LatentProjections(ParallelModule):
    """Queries, keys and values from latents; what ``Attention`` has instead of q, k and v where ``config.mla`` is set.

    Attributes:
        q_a, q_a_norm, q_b: queries through a latent of ``q_rank``; or q: directly, where that is None.
        kv_a: to the keys' and values' latent, and the one rotated key that all heads share. kv_a_norm. kv_b.
    """

    def _add_latent(
        self,
        config: AttentionConfig,
        group: ProcessGroup | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        mla = latent_config(config)
        queries = config.heads * (mla.nope_dim + mla.rope_dim)

        def down(width: int) -> nn.Linear:
            return nn.Linear(config.hidden, width, bias=config.bias, dtype=dtype, device=device)

        def up(rank: int, width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(rank, width, group, bias=False, dtype=dtype, device=device)

        if mla.q_rank is None:
            self.q = up(config.hidden, queries)
        else:
            self.q_a = down(mla.q_rank)
            self.q_a_norm = RMSNorm(mla.q_rank, config.norm_eps, dtype=dtype, device=device)
            self.q_b = up(mla.q_rank, queries)
        self.kv_a = down(mla.kv_rank + mla.rope_dim)
        self.kv_a_norm = RMSNorm(mla.kv_rank, config.norm_eps, dtype=dtype, device=device)
        self.kv_b = up(mla.kv_rank, config.heads * (mla.nope_dim + mla.v_dim))

    def _latent_heads(
        self,
        mla: MLAConfig,
        x_BSD: Tensor,
        entrance: Entrance | Callable[[Tensor], Tensor],
        rotate: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Own heads of all tokens: q and k [B, S, heads, nope + rope], v [B, S, heads, v_dim]. Collective.

        Args:
            entrance: or what gathers all latents at once, before their products.
        """
        # Under autocast the projections' outputs are narrower than x; one wide part would widen all of ``packed``.
        x_q = x_BSD.to(compute_dtype(x_BSD)) if mla.q_rank is None else self.q_a_norm(self.q_a(x_BSD))
        latent, shared_key = self.kv_a(x_BSD).split([mla.kv_rank, mla.rope_dim], -1)
        latent = self.kv_a_norm(latent)
        if isinstance(entrance, Entrance):
            linear, shared_key = entrance.linear, entrance.gather(shared_key)
        else:
            packed = torch.cat([x_q, latent, shared_key], -1)
            widths = [x_q.shape[-1], mla.kv_rank, mla.rope_dim]
            linear, (x_q, latent, shared_key) = nn.functional.linear, entrance(packed).split(widths, -1)
        up = self.q if mla.q_rank is None else self.q_b
        # The weights alone: the layer itself would gather, or sum the gradient, once more.
        q = linear(x_q, up.weight).unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        kv = linear(latent, self.kv_b.weight).unflatten(-1, (-1, mla.nope_dim + mla.v_dim))
        q_plain, q_rotated = q.split([mla.nope_dim, mla.rope_dim], -1)
        k_plain, v = kv.split([mla.nope_dim, mla.v_dim], -1)
        key = rotate(shared_key.unsqueeze(2)).expand(*k_plain.shape[:3], mla.rope_dim)
        return torch.cat([q_plain, rotate(q_rotated)], -1), torch.cat([k_plain, key], -1), v


def latent_config(config: AttentionConfig) -> MLAConfig:
    """``config.mla``, checked.

    Raises:
        ConfigError: a width is less than 1, or a setting that latent attention does not have is given.
    """
    mla = config.mla
    if mla is None:
        raise ConfigError("latent attention needs AttentionConfig.mla")
    if min(mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.v_dim, mla.q_rank or 1) < 1:
        raise ConfigError(f"the widths of latent attention must be at least 1; got {mla}")
    if config.qk_norm != "none" or config.clip_qkv is not None:
        raise ConfigError(
            f"latent attention normalises its latents: qk_norm must be 'none' and clip_qkv None; got "
            f"{config.qk_norm!r} and {config.clip_qkv}"
        )
    return mla
