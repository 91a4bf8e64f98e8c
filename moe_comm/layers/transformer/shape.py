"""The shape of a model: its weight matrices block by block, and parameters and FLOPs by operator.

A model is an embedding, layers and a head. A layer consists of blocks, each with a norm in front:

    dense layer   attention, dense block
    MoE layer     attention, MoE block               (shortcut: two attentions, two dense blocks, MoE block)

A block is a list of matrices. A matrix [K, N] can have several copies (experts), and a token uses ``used`` of them
(top-k). It costs 2 K N ``used`` FLOPs per token in forward and twice that in backward. This is how MFU counts FLOPs
(PaLM, arXiv 2204.02311, appendix B). Attention scores cost a constant per attended token. Norms, softmax, sorting and
recomputation are not counted.

    shape = ModelShape.of(config)
    shape.params, shape.active, shape.model_flops(seq_len)   # parameters, parameters used by a token, FLOPs per token
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self, TypeVar, get_args

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import MLAConfig, QKNorm

if TYPE_CHECKING:  # loads torch, which the planner does without
    from moe_comm.layers.transformer.config import TransformerConfig

Latent = MLAConfig
"""Widths of multi-head latent attention: q_rank (None: direct queries), kv_rank, nope_dim, rope_dim, v_dim."""

LayerKind = Literal["moe", "dense"]
Recompute = Literal["none", "selective", "full"]
N = TypeVar("N", int, float)

FAMILY = {
    "embedding": "embedding",
    "qkv": "attention",
    "scores": "attention",
    "out": "attention",
    "norms": "norms",
    "router": "router",
    "experts": "experts",
    "shared": "shared experts",
    "dense": "dense",
    "head": "head",
}
"""Operator -> family of operators in reports."""
BACKWARD = 2
"""Backward matrix products per forward product: one for the input gradient, one for the weight gradient."""
MASTER = 4
"""Bytes of an fp32 element."""


@dataclass(frozen=True)
class Weight:
    """A matrix [k, n], or a vector (k = 1), of one operator of a block.

    k, n: inner and outer width of the product x_TK @ w_KN. name: its role ("up", "down", "q", ...).
    copies: number of copies (experts). used: mean number of copies that a token uses.
    product: tokens are multiplied with it. False for lookup tables (embedding) and added vectors (bias, norm).
    owned: False if another block owns the parameters (a tied head).
    """

    operator: str
    name: str
    k: int
    n: int
    copies: int = 1
    used: float = 1
    product: bool = True
    owned: bool = True

    @property
    def params(self) -> int:
        """Number of elements of all copies."""
        return self.copies * self.k * self.n if self.owned else 0

    @property
    def active(self) -> float:
        """Number of elements that one token uses."""
        return self.used * self.k * self.n if self.owned else 0

    @property
    def flops(self) -> float:
        """Forward FLOPs per token."""
        return 2 * self.used * self.k * self.n if self.product else 0


@dataclass(frozen=True)
class Block:
    """An attention, MoE or dense block, the embedding or the head, including its norm.

    per_context: forward FLOPs of attention scores and values, per token and attended token.
    """

    name: str
    weights: tuple[Weight, ...]
    per_context: int = 0

    def parameters(self) -> dict[str, int]:
        """Return the number of elements by operator."""
        return summed((weight.operator, weight.params) for weight in self.weights if weight.params)

    @property
    def params(self) -> int:
        """Number of elements."""
        return sum(weight.params for weight in self.weights)

    @property
    def active(self) -> float:
        """Number of elements that one token uses. Of the experts, only the chosen ones count."""
        return sum(weight.active for weight in self.weights)

    def flops(self, context: float) -> dict[str, float]:
        """Return the forward FLOPs per token by operator. ``context``: mean number of attended tokens."""
        result = summed((weight.operator, weight.flops) for weight in self.weights if weight.product)
        if self.per_context:
            result["scores"] = self.per_context * context
        return result

    def products(self, operator: str) -> tuple[Weight, ...]:
        """Return the matrices of ``operator`` that tokens are multiplied with, in order of use."""
        return tuple(weight for weight in self.weights if weight.operator == operator and weight.product)


def summed(pairs: Iterable[tuple[str, N]]) -> dict[str, N]:
    """Return the sum of the values of each name, in order of first occurrence."""
    totals: dict[str, N] = {}
    for name, count in pairs:
        totals[name] = totals.get(name, 0) + count
    return totals


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder-only transformer, with or without experts.

    kv_heads, head_dim: ignored with ``latent``. experts: 0 means that all layers are dense.
    ffn: width of one expert. shared_ffn: total width of the shared experts. dense_ffn: width of a dense block.
    dense_layers: number of leading layers with a dense block instead of experts.
    gated, dense_gated: experts, dense blocks have three matrices (SwiGLU) instead of two.
    tie: the head shares its weight with the embedding.
    qk_norm, qkv_bias, out_bias, router_bias, expert_bias, shared_gate: small vectors, as in ``moe_comm.layers``.
    window: number of tokens, including itself, that a token attends to; None: all preceding ones. full_layers: number
        of layers without a window.
    zero_experts: number of zero-computation experts, in addition to ``experts``.
    groups, top_groups: a token's experts are in the best ``top_groups`` of ``groups`` equal groups (DeepSeek-V3).
    parallel_block: attention and feed-forward share one norm. shortcut: the layer of LongCat-Flash.
    layer_vectors: elements of other vectors of a layer: additional norms, norm biases, attention sinks.
    head_vectors: elements of the biases of the final norm and the head.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: Latent | None = None
    gated: bool = True
    tie: bool = False
    dense_gated: bool = True
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    window: int | None = None
    full_layers: int = 0
    zero_experts: int = 0
    parallel_block: bool = False
    shortcut: bool = False
    layer_vectors: int = 0
    head_vectors: int = 0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        self._check(min(self.layers, self.hidden, self.heads, self.vocab) >= 1, "layers, hidden, heads, vocab: >= 1")
        if self.latent is None:
            self._check(min(self.kv_heads, self.head_dim) >= 1, "kv_heads and head_dim must be at least 1")
            self._check(not self.heads % max(self.kv_heads, 1), "heads must be a multiple of kv_heads")
        self._check(0 <= self.dense_layers <= self.layers, "dense_layers must be from 0 to the number of layers")
        self._check(0 <= self.full_layers <= self.layers, "full_layers must be from 0 to the number of layers")
        self._check(self.window is None or self.window >= 1, "window must be at least 1, or None")
        self._check(min(self.shared_ffn, self.dense_ffn, self.zero_experts) >= 0, "widths cannot be negative")
        self._check(min(self.layer_vectors, self.head_vectors) >= 0, "vectors cannot be negative")
        self._check(self.qk_norm in get_args(QKNorm), f"qk_norm must be one of {', '.join(get_args(QKNorm))}")
        if self.moe_layers:
            self._check(self.experts >= 1, "without experts, all layers must be dense (dense_layers = layers)")
            self._check(1 <= self.top_k <= self.experts + self.zero_experts, "top_k must be from 1 to the experts")
            self._check(self.groups >= 1 and not self.experts % self.groups, "groups must divide the experts")
            self._check(1 <= self.top_groups <= self.groups, "top_groups must be from 1 to groups")
            chosen_from = self.top_groups * self.experts // self.groups + self.zero_experts
            self._check(self.top_k <= chosen_from, "top_groups have fewer experts than top_k")
            self._check(self.ffn >= 1, "ffn, the width of an expert, must be at least 1")
        if self.dense_layers or self.shortcut:
            self._check(self.dense_ffn >= 1, "dense blocks need a dense_ffn, their width")
        self._check(not (self.shortcut and self.parallel_block), "shortcut and parallel_block exclude each other")

    def _check(self, valid: bool, message: str) -> None:
        if not valid:
            raise ConfigError(f"model {self.name}: {message}; got {self}")

    @classmethod
    def of(cls, config: TransformerConfig, name: str = "model") -> Self:
        """Return the shape of a model of ``moe_comm.layers``. Its dense layers count as if they were the first ones."""
        from moe_comm.kernels.activations import activation_of  # loads torch, which the planner does without

        attention, moe = config.attention, config.moe
        # The router's groups include zero-computation experts; the groups here do not.
        grouped = not moe.num_experts % moe.router.num_groups
        return cls(
            name=name,
            layers=config.layers,
            hidden=config.hidden,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            vocab=config.vocab,
            experts=moe.num_experts,
            top_k=moe.router.top_k,
            ffn=moe.ffn,
            shared_ffn=moe.shared_ffn,
            dense_layers=len(set(config.dense_layers)),
            dense_ffn=config.dense_ffn,
            latent=attention.mla,
            gated=activation_of(moe.activation).gated,
            tie=config.tie,
            qk_norm=attention.qk_norm,
            qkv_bias=attention.bias,
            out_bias=attention.out_bias,
            router_bias=moe.router.linear_bias,
            expert_bias=moe.expert_bias,
            shared_gate=moe.shared_gate,
            window=attention.window,
            zero_experts=moe.zero_experts.total,
            parallel_block=config.parallel_block,
            shortcut=config.shortcut,
            groups=moe.router.num_groups if grouped else 1,
            top_groups=moe.router.top_groups if grouped else 1,
        )

    # Widths.

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense_layers

    @property
    def score_dim(self) -> int:
        """Width of the queries and keys of a head."""
        return self.head_dim if self.latent is None else self.latent.nope_dim + self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of the values of a head."""
        return self.head_dim if self.latent is None else self.latent.v_dim

    @property
    def key_heads(self) -> int:
        """Number of key and value heads that the attention kernel reads; ``heads`` with ``latent``."""
        return self.kv_heads if self.latent is None else self.heads

    @property
    def qkv_width(self) -> int:
        """Elements per token of the queries, keys and values that the attention kernel reads."""
        return (self.heads + self.key_heads) * self.score_dim + self.key_heads * self.value_dim

    @property
    def chosen(self) -> float:
        """Mean number of real experts per token: ``top_k`` unless there are zero-computation experts."""
        all_experts = self.experts + self.zero_experts
        return self.top_k * (self.experts / all_experts) if all_experts else 0

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer, given its index from 0."""
        return "dense" if layer < self.dense_layers else "moe"

    # Blocks.

    @cached_property
    def embedding_block(self) -> Block:
        return Block("embedding", (Weight("embedding", "table", self.vocab, self.hidden, product=False),))

    @cached_property
    def head_block(self) -> Block:
        """Final norm and output projection."""
        head = Weight("head", "head", self.hidden, self.vocab, owned=not self.tie)
        return Block("head", (self._norm, *self._vectors("norms", "vectors", self.head_vectors), head))

    @cached_property
    def attention_block(self) -> Block:
        latent, hidden = self.latent, self.hidden
        queries, out = self.heads * self.score_dim, self.heads * self.value_dim
        if latent is None:
            keys = self.kv_heads * self.head_dim
            inside = [Weight("qkv", "qkv", hidden, queries + 2 * keys)]
            inside += self._vectors("qkv", "bias", (queries + 2 * keys) * self.qkv_bias)
            norm = {"none": 0, "head": 2 * self.head_dim, "full": queries + keys}[self.qk_norm]
            inside += self._vectors("qkv", "norm", norm)
        else:
            down, q_rank = latent.kv_rank + latent.rope_dim, latent.q_rank or 0
            if q_rank:
                inside = [Weight("qkv", "q_down", hidden, q_rank), Weight("qkv", "q_up", q_rank, queries)]
            else:
                inside = [Weight("qkv", "q", hidden, queries)]
            inside.append(Weight("qkv", "kv_down", hidden, down))
            inside.append(Weight("qkv", "kv_up", latent.kv_rank, self.heads * (latent.nope_dim + latent.v_dim)))
            inside += self._vectors("qkv", "norm", latent.kv_rank + q_rank)
            inside += self._vectors("qkv", "bias", (down + q_rank) * self.qkv_bias)
        after = [Weight("out", "out", out, hidden), *self._vectors("out", "bias", hidden * self.out_bias)]
        others = self._vectors("norms", "vectors", self.layer_vectors)
        return Block("attention", (self._norm, *others, *inside, *after), 2 * (queries + out))

    @cached_property
    def dense_block(self) -> Block:
        up = (2 if self.dense_gated else 1) * self.dense_ffn
        return Block(
            "dense",
            (
                *(() if self.parallel_block else (self._norm,)),
                Weight("dense", "up", self.hidden, up),
                Weight("dense", "down", self.dense_ffn, self.hidden),
            ),
        )

    @cached_property
    def moe_block(self) -> Block:
        """Router, experts and shared experts. "up" of gated experts combines the gate and up projections."""
        hidden, parts = self.hidden, 2 if self.gated else 1
        routed = self.experts + self.zero_experts
        weights = [] if self.parallel_block or self.shortcut else [self._norm]
        weights += [
            Weight("router", "router", hidden, routed),
            *self._vectors("router", "bias", routed * self.router_bias),
        ]
        weights.append(Weight("experts", "up", hidden, parts * self.ffn, self.experts, self.chosen))
        weights.append(Weight("experts", "down", self.ffn, hidden, self.experts, self.chosen))
        if self.expert_bias:
            width = parts * self.ffn + hidden
            weights.append(Weight("experts", "bias", 1, width, self.experts, self.chosen, product=False))
        if self.shared_ffn:
            weights.append(Weight("shared", "up", hidden, parts * self.shared_ffn))
            weights.append(Weight("shared", "down", self.shared_ffn, hidden))
            weights += [Weight("shared", "gate", hidden, 1)] if self.shared_gate else []
        return Block("moe", tuple(weights))

    def layer_blocks(self, kind: LayerKind) -> tuple[tuple[Block, int], ...]:
        """Return the blocks of a layer of a kind, with the number of each."""
        if kind == "dense":
            return ((self.attention_block, 1), (self.dense_block, 1))
        if self.shortcut:
            return ((self.attention_block, 2), (self.dense_block, 2), (self.moe_block, 1))
        return ((self.attention_block, 1), (self.moe_block, 1))

    def blocks(self, kind: LayerKind | None = None) -> tuple[tuple[Block, int], ...]:
        """Return the blocks of a layer of a kind, or of the model (None), with the number of each."""
        if kind is not None:
            return self.layer_blocks(kind)
        layers: tuple[tuple[LayerKind, int], ...] = (("dense", self.dense_layers), ("moe", self.moe_layers))
        inside = ((block, times * count) for kind, count in layers if count for block, times in self.layer_blocks(kind))
        return ((self.embedding_block, 1), *inside, (self.head_block, 1))

    # Sums.

    def parameters(self, kind: LayerKind | None = None) -> dict[str, int]:
        """Return the number of elements by family (``FAMILY``), of a layer of a kind or of the model (None)."""
        return summed(
            (FAMILY[operator], times * count)
            for block, times in self.blocks(kind)
            for operator, count in block.parameters().items()
        )

    def active_parameters(self) -> dict[str, float]:
        """Return the number of elements that a token uses, by family."""
        return summed(
            (FAMILY[weight.operator], times * weight.active)
            for block, times in self.blocks()
            for weight in block.weights
            if weight.params
        )

    @cached_property
    def params(self) -> int:
        """Number of parameters, without layers for multi-token prediction."""
        return sum(times * block.params for block, times in self.blocks())

    @cached_property
    def active(self) -> int:
        """Number of parameters that a token uses, including embedding and head."""
        return round(sum(times * block.active for block, times in self.blocks()))

    def context(self, seq_len: int, causal: bool = True) -> float:
        """Return the mean number of tokens that a token attends to, over all layers.

        Args:
            seq_len: tokens of a sequence.
            causal: count only what the causal mask and the window leave. False: all ``seq_len``.

        Raises:
            ConfigError: ``seq_len`` is less than 1.
        """
        if seq_len < 1:
            raise ConfigError(f"seq_len must be at least 1; got {seq_len}")
        if not causal:
            return float(seq_len)
        full, window = (seq_len + 1) / 2, self.window
        if window is None or window >= seq_len:
            return full
        # The first ``window`` tokens attend to 1, 2, .. window tokens, all later ones to ``window``.
        narrow = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
        return narrow if not self.full_layers else narrow + (full - narrow) * self.full_layers / self.layers

    def flops_per_token(self, seq_len: int, causal: bool = True, kind: LayerKind | None = None) -> dict[str, float]:
        """Return the forward FLOPs per token by operator, of a layer of a kind or of the model (None).

        The operators are "qkv", "scores", "out", "router", "experts", "shared", "dense" and "head".

        Raises:
            ConfigError: ``seq_len`` is less than 1.
        """
        context = self.context(seq_len, causal)
        return summed(
            (operator, times * count)
            for block, times in self.blocks(kind)
            for operator, count in block.flops(context).items()
        )

    def model_flops(self, seq_len: int, causal: bool = True) -> float:
        """Return the FLOPs per token of forward and backward that MFU counts: three times forward, no recomputation."""
        return (1 + BACKWARD) * sum(self.flops_per_token(seq_len, causal).values())

    @property
    def _norm(self) -> Weight:
        return Weight("norms", "norm", 1, self.hidden, product=False)

    @staticmethod
    def _vectors(operator: str, name: str, width: int) -> list[Weight]:
        return [Weight(operator, name, 1, width, product=False)] if width else []
