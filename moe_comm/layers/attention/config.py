"""Attention as a configuration describes it. Frozen descriptions only; the modules that read them stand beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

QKNorm = Literal["none", "head", "full"]
Context = Literal["ulysses", "ring", "token_ring"]


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretched RoPE (arXiv 2309.00071), named as in Hugging Face's ``rope_scaling``.

    factor: how many times longer than ``original_length`` the context is. mscale, mscale_all_dim: DeepSeek's.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864).

    interleaved: pairs are neighbours (x0, x1) as in DeepSeek's weights, not halves (x0, x[d/2]) as in Llama's.
    """

    theta: float = 10_000.0
    yarn: Yarn | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    q_rank: width of the queries' latent; None projects queries directly. kv_rank: width of the keys' and values'.
    nope_dim, rope_dim: width of a head's keys without and with position. v_dim: width of a head's values.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class AttentionConfig:
    """Causal self-attention.

    kv_heads: key and value heads, each shared by heads / kv_heads query heads. head_dim: ignored with ``mla``.
    qk_norm: RMSNorm of queries and keys: per head (Qwen3) or over the full width (OLMoE).
    window: a token sees itself and the ``window - 1`` tokens before it; None: all before it.
    bias: of the q, k and v projections. out_bias: of the output projection.
    clip_qkv: bound on the projected values (OLMoE); None: none.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    qk_norm: QKNorm = "none"
    window: int | None = None
    bias: bool = False
    out_bias: bool = False
    clip_qkv: float | None = None
    mla: MLAConfig | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.hidden, self.heads, self.kv_heads, self.head_dim) < 1:
            raise ConfigError(f"hidden, heads, kv_heads and head_dim must be at least 1; got {self}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.qk_norm not in get_args(QKNorm):
            raise ConfigError(f"qk_norm must be one of {', '.join(get_args(QKNorm))}; got {self.qk_norm!r}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be at least 1; got {self.window}")
