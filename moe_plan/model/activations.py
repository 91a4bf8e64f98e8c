"""Estimate the bytes that autograd saves for the backward of a layer, by counting the saved tensors.

The table lists saved elements per token of the rank, with hidden size D, top-k K, expert width F and E experts. ``*``
marks tensors that recompute "selective" and "full" do not save. ``**`` marks tensors that ``recompute_experts`` does
not save.

    norm         D input, D* in fp32
    attention    tp D* normalized and gathered; q, k, v and output; log-sum-exp; q and k* if they have norms
    latent       as attention, with q, k and v of all heads, and three times the latents
    MoE          D* normalized, 2 K D expert input and output rows, 2 K F**, the router input*, 3 E scores in fp32
    dense        tp D* normalized and gathered, 2 F, F*
    shortcut     as MoE, with two attention blocks, two dense blocks and four norms
    shared       2 F, F*
    head         2 D, D in fp32

With recompute "full" a layer saves only its input, D. In addition, one complete layer is in memory during its backward.

If backward passes are split, saved activations stay allocated until the weight half has run; ``orders.in_flight_peaks``
counts the micro-batches. In
addition, the input half keeps the gradient of the output of each operator with weights, from which the weight half
computes the weight gradients. The first stage keeps none of these, because it runs complete backward passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from moe_comm.layers.transformer.shape import MASTER, LayerKind, ModelShape, Recompute, Weight

LOGITS_CHUNK = 1 << 24
"""Logits that the trainer computes at a time, as ``CHUNK_ELEMENTS`` of ``moe_comm.layers.parallel.cross_entropy``."""


@dataclass(frozen=True)
class ActivationMemory:
    """Activation memory of one model on one rank.

    Args:
        size: bytes of an element.
        tp: tensor-parallel degree.
        rows: rows of the rank's experts divided by K times its tokens. Below 1 if a capacity drops tokens, above 1 on
            the busiest rank.
        etp: number of ranks that share each expert. Each of them receives all rows of the expert.
        on_cpu: norms run in the native core and save no fp32 copy, and experts on one host read tokens and gradients in
            place and save no input rows.
        outputs: experts save their outputs, as those with fp8 GEMMs and those of other systems do.
    """

    shape: ModelShape
    size: int
    tp: int = 1
    recompute: Recompute = "none"
    recompute_experts: bool = False
    rows: float = 1.0
    etp: int = 1
    on_cpu: bool = False
    outputs: bool = False

    @cached_property
    def dense(self) -> float:
        """Bytes per token of a dense layer."""
        return self._layer("dense", self.recompute)

    @cached_property
    def moe(self) -> float:
        """Bytes per token of an MoE layer."""
        return self._layer("moe", self.recompute)

    @cached_property
    def head(self) -> float:
        """Bytes per token of the final norm and the head, without the loss."""
        return self.shape.hidden * (2 * self.size + self._norm_copy_bytes)

    def saved(self, dense: int, moe: int, head: int) -> float:
        """Return the bytes per token of a stage with ``dense`` and ``moe`` layers and ``head`` (0 or 1) heads."""
        return (dense * self.dense if dense else 0) + (moe * self.moe if moe else 0) + head * self.head

    def recomputed(self, dense: int, moe: int) -> float:
        """Return the bytes per token that recomputing the largest of these layers adds during backward."""
        full = self._without_recompute
        return max(full.dense - self.dense if dense else 0.0, full.moe - self.moe if moe else 0.0)

    def loss(self, tokens: int) -> int:
        """Return the bytes held by a loss before its backward: the head's weight gradient and one chunk of logits."""
        rows = math.ceil(self.shape.vocab / self.tp)
        logits = min(LOGITS_CHUNK, tokens * self.tp * rows)
        return MASTER * (rows * self.shape.hidden + logits)

    @cached_property
    def _without_recompute(self) -> ActivationMemory:
        return replace(self, recompute="none")

    def _layer(self, kind: LayerKind, recompute: Recompute) -> float:
        shape, c = self.shape, self.size
        if recompute == "full":
            return c * shape.hidden
        save_all = recompute == "none"
        norms = 1 if shape.parallel_block else 2
        attentions, denses = 1, int(kind == "dense")
        if kind == "moe" and shape.shortcut:
            attentions, denses, norms = 2, 2, 4
        inputs = norms * c * shape.hidden
        if save_all:
            inputs += norms * self._norm_copy_bytes * shape.hidden
            inputs += attentions * c * shape.hidden * (self.tp if shape.latent is None else 1)
        experts = self._experts(save_all) if kind == "moe" else 0.0
        return inputs + attentions * self._attention(save_all) + denses * self._dense(save_all) + experts

    @property
    def _norm_copy_bytes(self) -> int:
        """Bytes of an element of the fp32 copy that a norm saves."""
        return 0 if self.on_cpu else MASTER

    def _dense(self, save_all: bool) -> float:
        saved = 2 * self.shape.dense_ffn
        if save_all:
            saved += self.tp * self.shape.hidden + self.shape.dense_ffn
        return self.size * saved

    def _experts(self, save_all: bool) -> float:
        shape, c = self.shape, self.size
        row_tensors = (0 if self.on_cpu else 1) + self.outputs
        saved = row_tensors * shape.chosen * self.rows * self.etp * shape.hidden + 2 * shape.shared_ffn
        if not self.recompute_experts:
            saved += 2 * shape.chosen * self.rows * shape.ffn
        if save_all:
            shared_input = shape.parallel_block or shape.shortcut  # another block saves the same input
            saved += shape.shared_ffn + (0 if shared_input else shape.hidden)
        scores = 3 * MASTER * (shape.experts + shape.zero_experts)
        return c * saved + scores + (MASTER * shape.hidden if save_all and c < MASTER else 0)

    def _attention(self, save_all: bool) -> float:
        """Return the bytes saved between the norm and the output projection."""
        shape, c, heads, latent = self.shape, self.size, self.shape.heads, self.shape.latent
        if latent is not None:
            latents = 3 * ((latent.q_rank or 0) + latent.kv_rank) + 2 * latent.rope_dim
            latents += shape.hidden if latent.q_rank is None else 0
            return c * (heads * 2 * (shape.score_dim + shape.value_dim) + latents) + MASTER * heads
        queries, keys = heads * shape.head_dim, shape.kv_heads * shape.head_dim
        saved = c * (2 * queries + 2 * keys) + MASTER * heads
        if shape.qk_norm == "full":
            saved += (MASTER + self._norm_copy_bytes) * (queries + keys)
        elif shape.qk_norm == "head" and save_all:
            saved += max(self._norm_copy_bytes, c) * (queries + keys)
        return saved


def split_gradient_bytes(estimate: ActivationMemory, fused: bool) -> tuple[float, float]:
    """Return the bytes per token of a dense layer and of an MoE layer between the halves of its backward.

    ``fused``: experts are fused with their transfers and consist of several autograd functions.
    """
    shape = estimate.shape
    dense, moe = (
        sum(
            times * _output_gradient_bytes(estimate, fused, weight)
            for block, times in blocks
            for weight in block.weights
        )
        for blocks in (
            shape.layer_blocks("dense") if shape.dense_layers else (),
            shape.layer_blocks("moe") if shape.moe_layers else (),
        )
    )
    return dense, moe


def _output_gradient_bytes(estimate: ActivationMemory, fused: bool, weight: Weight) -> float:
    """Return the bytes per token of the gradient of one operator's output."""
    shape, size = estimate.shape, estimate.size
    if weight.operator == "experts":
        if not weight.product or (weight.name != "down" and not fused):
            return 0.0  # the experts are one autograd function, which keeps only the gradient of its output
        if estimate.on_cpu and not fused:
            return shape.hidden * size
        rows = shape.chosen * estimate.rows * estimate.etp
        return rows * size * (weight.n if weight.name == "down" else weight.n / estimate.etp)
    if weight.operator == "router":
        return MASTER * weight.n if weight.product else 0.0
    if weight.product:
        # Rows that are reduce-scattered over tp afterwards are those of the tensor-parallel group.
        whole = weight.operator in ("out", "dense") and weight.name in ("out", "down")
        return float(size * weight.n * (estimate.tp if whole else 1))
    if weight.name == "norm" and weight.operator == "qkv" and shape.latent is None:
        return float(size * (shape.heads + shape.kv_heads) * shape.head_dim)
    return float(size * weight.n) if weight.name == "norm" or weight.operator == "norms" else 0.0
