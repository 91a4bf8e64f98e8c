"""What a whole MoE transformer is made of. Frozen descriptions only; the modules that read them stand beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError
from moe_comm.layers.moe_config import MoEConfig

QKNorm = Literal["none", "head", "full"]
Context = Literal["ulysses", "ring", "token_ring"]
Recompute = Literal["none", "selective", "full"]


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


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only language model whose feed-forward blocks are mixtures of experts.

    attention: of every layer. moe: of every MoE layer; its ``hidden`` is the model's.
    dense_layers: ids of the layers with a plain feed-forward block of width ``dense_ffn`` instead.
    parallel_block: attention and feed-forward read the same normalised input and their outputs are added together
        (MegaScale, arXiv 2402.15627, section 3.1): x + attention(norm(x)) + ffn(norm(x)); there is one norm.
    shortcut: a layer with experts has two attentions and two dense blocks of width ``dense_ffn`` too, and the experts
        stand beside the last three of these (LongCat-Flash, arXiv 2509.01322); see ``layers/shortcut.py``.
    tie: the output projection is the embedding.
    """

    vocab: int
    hidden: int
    layers: int
    attention: AttentionConfig
    moe: MoEConfig
    max_length: int
    dense_layers: tuple[int, ...] = ()
    dense_ffn: int = 0
    norm_eps: float = 1e-6
    parallel_block: bool = False
    shortcut: bool = False
    tie: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if min(self.vocab, self.layers, self.max_length) < 1:
            raise ConfigError(f"vocab, layers and max_length must be at least 1; got {self}")
        if not self.hidden == self.attention.hidden == self.moe.hidden:
            raise ConfigError(
                f"one hidden size for all: model {self.hidden}, attention {self.attention.hidden}, "
                f"experts {self.moe.hidden}"
            )
        if any(not 0 <= layer < self.layers for layer in self.dense_layers):
            raise ConfigError(f"dense_layers {self.dense_layers} must be among the {self.layers} layers, from 0")
        if self.dense_layers and self.dense_ffn < 1:
            raise ConfigError("dense_layers need dense_ffn, their width")
        if self.shortcut and self.dense_ffn < 1:
            raise ConfigError("shortcut needs dense_ffn, the width of the dense blocks beside the experts")
        if self.shortcut and self.parallel_block:
            raise ConfigError("shortcut and parallel_block are two forms of a layer; choose one")
        if self.init_std <= 0:
            raise ConfigError(f"init_std must be positive; got {self.init_std}")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Ids of the layers with experts."""
        return tuple(layer for layer in range(self.layers) if layer not in self.dense_layers)
