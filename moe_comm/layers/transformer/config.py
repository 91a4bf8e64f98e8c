"""What a whole MoE transformer is made of. Frozen descriptions only; the modules that read them stand beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import AttentionConfig
from moe_comm.layers.moe.config import MoEConfig

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only language model whose feed-forward blocks are mixtures of experts.

    attention: of every layer. moe: of every MoE layer; its ``hidden`` is the model's.
    dense_layers: ids of the layers with a plain feed-forward block of width ``dense_ffn`` instead.
    parallel_block: attention and feed-forward read the same normalised input and their outputs are added together
        (MegaScale, arXiv 2402.15627, section 3.1): x + attention(norm(x)) + ffn(norm(x)); there is one norm.
    shortcut: a layer with experts has two attentions and two dense blocks of width ``dense_ffn`` too, and the experts
        stand beside the last three of these (LongCat-Flash, arXiv 2509.01322); see ``layers/transformer/shortcut.py``.
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
