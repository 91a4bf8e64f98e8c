"""Configuration of attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

QKNorm = Literal["none", "head", "full"]
Context = Literal["ulysses", "ring", "token_ring"]


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension of RoPE (arXiv 2309.00071), with the names of Hugging Face's ``rope_scaling``.

    Args:
        factor: length of the extended context divided by ``original_length``.
        original_length: context length of pre-training.
        beta_fast, beta_slow: rotations within ``original_length`` between which frequencies are interpolated.
        mscale, mscale_all_dim: DeepSeek's parameters of the attention temperature.
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

    Args:
        theta: base of the frequencies.
        yarn: context extension, or None.
        interleaved: pairs are adjacent (x0, x1), as in DeepSeek's weights; else they are (x0, x[d/2]), as in Llama's.
    """

    theta: float = 10_000.0
    yarn: Yarn | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        q_rank: width of the latent of the queries; None projects queries directly.
        kv_rank: width of the latent of keys and values.
        nope_dim: width of a head's keys without position.
        rope_dim: width of a head's keys with position.
        v_dim: width of a head's values.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        if min(self.kv_rank, self.nope_dim, self.rope_dim, self.v_dim, 1 if self.q_rank is None else self.q_rank) < 1:
            raise ConfigError(f"the widths of latent attention must be at least 1; got {self}")


@dataclass(frozen=True)
class AttentionConfig:
    """Causal self-attention.

    Args:
        hidden: width of the tokens.
        heads: number of query heads.
        kv_heads: number of key and value heads; each is shared by heads / kv_heads query heads.
        head_dim: width of a head; ignored with ``mla``.
        rope: rotary position embedding.
        qk_norm: RMSNorm of queries and keys: "none", per "head" (Qwen3), or over the "full" width (OLMoE).
        window: number of tokens that a token attends to, including itself; None: all previous ones.
        bias: biases of the q, k and v projections.
        out_bias: bias of the output projection.
        clip_qkv: bound on the projected values (OLMoE); None disables it.
        mla: latent attention, or None.
        norm_eps: epsilon of the norms.
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
        if self.mla is not None and (self.qk_norm != "none" or self.clip_qkv is not None):
            raise ConfigError(
                f"latent attention normalizes its latents: qk_norm must be 'none' and clip_qkv None; got "
                f"{self.qk_norm!r} and {self.clip_qkv}"
            )
