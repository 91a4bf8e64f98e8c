"""Parameters and matrix-product FLOPs of a transformer, from its configuration alone.

A product of [M, K] and [K, N] is 2 M K N FLOPs. For one token, with weights of P elements that it goes through:

    forward    2 P, and 2 * 2 * heads * head_dim * (tokens it attends to) for attention's scores and values
    training   three times that: each product has one for the gradient of its input and one for that of its weight

which is what model FLOPs utilisation (MFU) counts (PaLM, arXiv 2204.02311, appendix B): recomputed work, norms,
softmax and routing's sorting do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.kernels.activations import activation_of
from moe_comm.layers.config import AttentionConfig, TransformerConfig

BACKWARD = 2
"""Products in backward for each one in forward."""


@dataclass(frozen=True)
class Part:
    """One kind of module, over the whole model.

    params: elements. active: of them, those that one token uses. flops: forward, per token.
    """

    name: str
    params: int
    active: float
    flops: float


@dataclass(frozen=True)
class ModelCount:
    """What a model is made of.

    parts: "embedding", "attention", "norms", "router", "experts", "shared experts", "dense", "head". A tied head has
        no parameters of its own.
    context: mean number of tokens that a token attends to.
    """

    parts: tuple[Part, ...]
    context: float

    @property
    def params(self) -> int:
        return sum(part.params for part in self.parts)

    @property
    def active(self) -> int:
        """Parameters that one token uses; zero-computation experts count as chosen as often as the others."""
        return round(sum(part.active for part in self.parts))

    @property
    def forward_flops(self) -> float:
        """Per token."""
        return sum(part.flops for part in self.parts)

    @property
    def training_flops(self) -> float:
        """Per token, forward and backward."""
        return (1 + BACKWARD) * self.forward_flops

    def part(self, name: str) -> Part:
        """The part called ``name``."""
        return next(part for part in self.parts if part.name == name)


def count_model(config: TransformerConfig, length: int | None = None, *, causal: bool = True) -> ModelCount:
    """Parameters by kind, and FLOPs a token in sequences of ``length``.

    Args:
        length: None: ``config.max_length``.
        causal: count the scores that a causal mask leaves, (length + 1) / 2 a token or fewer under a window; False:
            all ``length`` of them, as some reports and ``torch.utils.flop_counter`` do.

    Raises:
        ConfigError: ``length`` is less than 1.
    """
    length = config.max_length if length is None else length
    if length < 1:
        raise ConfigError(f"sequences have at least 1 token; got {length}")
    layers, hidden, moe = config.layers, config.hidden, config.moe
    moe_layers = len(config.moe_layers)
    context = _context(length, config.attention.window) if causal else float(length)
    weights, vectors, per_score = _attention(config.attention)
    scores = per_score * context
    # With a shortcut a layer with experts has two attentions, each behind a norm, and two dense blocks, too.
    second = moe_layers if config.shortcut else 0
    attentions, denses = layers + second, layers - moe_layers + 2 * second
    norms = (attentions * (1 if config.parallel_block else 2) + 1) * hidden

    gated = 3 if activation_of(moe.activation).gated else 2
    real_share = moe.num_experts / moe.router.num_experts
    chosen = moe.router.top_k * real_share
    expert = gated * hidden * moe.ffn
    bias = ((gated - 1) * moe.ffn + hidden) if moe.expert_bias else 0
    router = moe.router.num_experts * hidden
    router_bias = moe.router.num_experts if moe.router.linear_bias else 0
    shared = gated * hidden * moe.shared_ffn + (hidden if moe.shared_gate else 0)
    dense = 3 * hidden * config.dense_ffn
    table = config.vocab * hidden

    def always(name: str, params: int, products: float) -> Part:
        return Part(name, params, params, 2 * products)

    return ModelCount(
        (
            always("embedding", table, 0),
            always("attention", attentions * (weights + vectors), attentions * (weights + scores)),
            always("norms", norms, 0),
            always("router", moe_layers * (router + router_bias), moe_layers * router),
            Part(
                "experts",
                moe_layers * moe.num_experts * (expert + bias),
                moe_layers * chosen * (expert + bias),
                2 * moe_layers * chosen * expert,
            ),
            always("shared experts", moe_layers * shared, moe_layers * shared),
            always("dense", denses * dense, denses * dense),
            always("head", 0 if config.tie else table, table),
        ),
        context,
    )


def _context(length: int, window: int | None) -> float:
    """Mean over a sequence's tokens of how many each sees: itself and those before it, of the last ``window``."""
    if window is None or window >= length:
        return (length + 1) / 2
    # The first ``window`` tokens see 1, 2, .. window; all later ones see ``window``.
    return (window * (window + 1) / 2 + (length - window) * window) / length


def _attention(config: AttentionConfig) -> tuple[int, int, int]:
    """Elements of one layer's matrices, of its vectors, and multiply-adds for each token attended to."""
    hidden, heads, mla = config.hidden, config.heads, config.mla
    if mla is None:
        queries, keys = heads * config.head_dim, config.kv_heads * config.head_dim
        matrices = hidden * (queries + 2 * keys) + queries * hidden
        vectors = (queries + 2 * keys if config.bias else 0) + (hidden if config.out_bias else 0)
        vectors += {"none": 0, "head": 2 * config.head_dim, "full": queries + keys}[config.qk_norm]
        return matrices, vectors, 2 * queries
    width = mla.nope_dim + mla.rope_dim
    queries = heads * width
    down = mla.kv_rank + mla.rope_dim
    matrices = hidden * down + mla.kv_rank * heads * (mla.nope_dim + mla.v_dim) + heads * mla.v_dim * hidden
    matrices += hidden * queries if mla.q_rank is None else (hidden + queries) * mla.q_rank
    vectors = mla.kv_rank + (mla.q_rank or 0)
    vectors += (down + (mla.q_rank or 0) if config.bias else 0) + (hidden if config.out_bias else 0)
    return matrices, vectors, heads * (width + mla.v_dim)


def mfu(tokens_per_s: float, count: ModelCount, peak_flops: Iterable[float]) -> float:
    """Model FLOPs utilisation: the model's training FLOPs a second over what the devices could do.

    Args:
        tokens_per_s: of all devices together. peak_flops: FLOP/s of each.
    """
    return tokens_per_s * count.training_flops / sum(peak_flops)
