"""Projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    own tokens    x ─ q_a ─ norm ─▶ queries' latent ─╮
                  x ─ kv_a ─┬ norm ─▶ keys' latent ──┼─ gather over tp ─▶ all tokens ─ q_b, kv_b ─▶ own heads
                            ╰───────▶ shared key ────╯

The down-projections (``q_a``, ``kv_a`` and their norms) are small and replicated over the tensor-parallel group. Each
rank applies them to its own tokens, and the narrow latents are gathered instead of the wide x. This sends fewer bytes,
repeats no work, and gradients are plain sums over ranks, as for any replicated parameter. With overlap, the gather of
each latent overlaps with its up-projection (``LatentGather``); the shared key is gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError
from moe_comm.kernels.autograd import compute_dtype
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig
from moe_comm.layers.parallel.linear import ColumnParallelLinear
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.norm import RMSNorm


@dataclass(frozen=True)
class LatentGather:
    """Gathers the latents of all tokens, overlapped with their up-projections.

    linear: product of a latent [B, S, rank] with an up-projection's weight, for the gathered tokens. gather: all
    tokens' [B, S, rope] from this rank's [B, S / ranks, rope].
    """

    linear: Callable[[Tensor, Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


class LatentProjections(ParallelModule):
    """Queries, keys and values from latents; replaces q, k and v of ``Attention`` if ``config.mla`` is set.

    Attributes:
        q_a, q_a_norm, q_b: projections of queries through a latent of ``q_rank``.
        q: direct projection of queries if ``q_rank`` is None.
        kv_a: projection to the latent of keys and values, and to the rotated key that all heads share.
        kv_a_norm, kv_b: norm and up-projection of that latent.
    """

    def _add_latent(self, config: AttentionConfig, group: ProcessGroup | None, factory: dict[str, Any]) -> None:
        mla = latent_config(config)
        queries = config.heads * (mla.nope_dim + mla.rope_dim)

        def down(width: int) -> nn.Linear:
            return nn.Linear(config.hidden, width, bias=config.bias, **factory)

        def up(rank: int, width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(rank, width, group, bias=False, **factory)

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


def latent_config(config: AttentionConfig) -> MLAConfig:
    """Return ``config.mla``; raise ConfigError for an invalid width or an option that MLA does not support."""
    mla = config.mla
    if mla is None:
        raise ConfigError("latent attention needs AttentionConfig.mla")
    if min(mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.v_dim, mla.q_rank or 1) < 1:
        raise ConfigError(f"the widths of latent attention must be at least 1; got {mla}")
    if config.qk_norm != "none" or config.clip_qkv is not None:
        raise ConfigError(
            f"latent attention normalizes its latents: qk_norm must be 'none' and clip_qkv None; got "
            f"{config.qk_norm!r} and {config.clip_qkv}"
        )
    return mla
