"""Configuration of an MoE transformer."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import AttentionConfig
from moe_comm.layers.moe.config import MoEConfig

MOST_LAYERS = 1 << 12
"""Largest accepted number of layers, four times that of the deepest published models."""


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only language model with mixture-of-experts feed-forward blocks.

    Args:
        vocab: vocabulary size.
        hidden: width of the tokens.
        layers: number of layers.
        attention: configuration of the attention in each layer. Its ``hidden`` must equal ``hidden``.
        moe: configuration of the experts and router in each MoE layer. Its ``hidden`` must equal ``hidden``.
        max_length: maximum length of a sequence.
        dense_layers: ids of layers with a dense feed-forward block of width ``dense_ffn`` instead of experts.
        dense_ffn: width of dense blocks.
        norm_eps: epsilon of the norms.
        parallel_block: compute each layer as x + attention(norm(x)) + ffn(norm(x)), with one norm (MegaScale,
            arXiv 2402.15627, section 3.1).
        shortcut: in each MoE layer, run the experts on a branch in parallel with other modules (LongCat-Flash,
            arXiv 2509.01322). The layer is attention, dense block, attention, dense block, with dense blocks of width
            ``dense_ffn``. The branch starts after the first attention and is added at the end; see
            ``ShortcutBlock``.
        tie: share the weight of the output projection with the embedding.
        init_std: standard deviation of initial weights.
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
        if self.layers > MOST_LAYERS:
            raise ConfigError(f"layers can be at most {MOST_LAYERS}; got {self.layers}")
        if not self.hidden == self.attention.hidden == self.moe.hidden:
            raise ConfigError(
                f"hidden sizes must be equal; got model {self.hidden}, attention {self.attention.hidden}, "
                f"experts {self.moe.hidden}"
            )
        if any(not 0 <= layer < self.layers for layer in self.dense_layers):
            raise ConfigError(f"dense_layers must be in 0..{self.layers - 1}; got {self.dense_layers}")
        if self.dense_layers and self.dense_ffn < 1:
            raise ConfigError("dense_layers needs dense_ffn, the width of the dense blocks")
        if self.shortcut and self.dense_ffn < 1:
            raise ConfigError("shortcut needs dense_ffn, the width of the dense blocks")
        if self.shortcut and self.parallel_block:
            raise ConfigError("shortcut and parallel_block exclude each other; set one of them")
        if self.init_std <= 0:
            raise ConfigError(f"init_std must be positive; got {self.init_std}")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Ids of the layers with experts."""
        return tuple(layer for layer in range(self.layers) if layer not in self.dense_layers)
