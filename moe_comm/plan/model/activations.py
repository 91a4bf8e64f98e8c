"""Bytes that autograd keeps of a layer until its backward, by counting the tensors that it saves.

Per token of a rank's own, in elements, with D hidden, K top_k, F ffn, E experts; * what recompute "selective" (and
"full") does not keep, ** what experts with ``recompute_experts`` do not:

    norm         D input, D* in fp32
    attention    tp D* normalised and gathered; q, k, v and output; log-sum-exp; where they have norms, q and k*
    latent       the same with q, k and v of all heads, and three times the latents
    MoE          D* normalised, 2 K D rows in and out, 2 K F**, the router's input* and 3 E scores in fp32
    dense        tp D* normalised and gathered, 2 F, F*
    shortcut     the MoE's, two attentions, two dense blocks and four norms
    shared       2 F, F*
    head         2 D, D in fp32

With "full" a layer keeps its input, D. Beside what is in flight, one layer is held whole while its backward runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from moe_comm.layers.parallel.cross_entropy import CHUNK_ELEMENTS
from moe_comm.layers.transformer.config import Recompute
from moe_comm.plan.model.matrices import MASTER
from moe_comm.plan.model.shape import LayerKind, ModelShape


@dataclass(frozen=True)
class Activations:
    """An estimate for one model.

    size: bytes of an element. tp: ranks that share heads. rows: rows of this rank's experts, over K for each of its
    tokens: less than 1 under a capacity that drops some, more on the busiest rank. etp: ranks that share each expert;
    every one of them has all rows of it. native_norms: norms run in the native core, as on the CPU, and keep no fp32
    copy.
    """

    shape: ModelShape
    size: int
    tp: int = 1
    recompute: Recompute = "none"
    recompute_experts: bool = False
    rows: float = 1.0
    etp: int = 1
    native_norms: bool = False

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
        return self.shape.hidden * (2 * self.size + self._wide)

    def kept(self, dense: int, moe: int, head: int) -> float:
        """Bytes per token of a stage with ``dense`` and ``moe`` layers and (1 or 0) the head."""
        return (dense * self.dense if dense else 0) + (moe * self.moe if moe else 0) + head * self.head

    def again(self, dense: int, moe: int) -> float:
        """Bytes per token that the backward of the largest of these layers adds by recomputing what was not kept."""
        whole = self._whole
        return max(whole.dense - self.dense if dense else 0.0, whole.moe - self.moe if moe else 0.0)

    def loss(self, tokens: int) -> int:
        """Bytes for a loss whose backward has not run: the gradient of the head's weight; and a chunk of logits."""
        rows = math.ceil(self.shape.vocab / self.tp)
        logits = min(CHUNK_ELEMENTS, tokens * self.tp * rows)
        return MASTER * (rows * self.shape.hidden + logits)

    @cached_property
    def _whole(self) -> Activations:
        return replace(self, recompute="none")

    def _layer(self, kind: LayerKind, recompute: Recompute) -> float:
        shape, c = self.shape, self.size
        if recompute == "full":
            return c * shape.hidden
        everything = recompute == "none"
        norms = 1 if shape.parallel_block else 2
        attentions, denses = 1, int(kind == "dense")
        if kind == "moe" and shape.shortcut:
            attentions, denses, norms = 2, 2, 4
        inputs = norms * c * shape.hidden
        if everything:
            inputs += norms * self._wide * shape.hidden
            inputs += attentions * c * shape.hidden * (self.tp if shape.latent is None else 1)
        experts = self._experts(everything) if kind == "moe" else 0.0
        return inputs + attentions * self._attention(everything) + denses * self._dense(everything) + experts

    @property
    def _wide(self) -> int:
        """Bytes of an element that a norm keeps in fp32."""
        return 0 if self.native_norms else MASTER

    def _dense(self, everything: bool) -> float:
        kept = 2 * self.shape.dense_ffn
        if everything:
            kept += self.tp * self.shape.hidden + self.shape.dense_ffn
        return self.size * kept

    def _experts(self, everything: bool) -> float:
        shape, c = self.shape, self.size
        kept = 2 * shape.chosen * self.rows * self.etp * shape.hidden + 2 * shape.shared_ffn
        if not self.recompute_experts:
            kept += 2 * shape.chosen * self.rows * shape.ffn
        if everything:
            beside = shape.parallel_block or shape.shortcut  # others keep the same input
            kept += shape.shared_ffn + (0 if beside else shape.hidden)
        scores = 3 * MASTER * (shape.experts + shape.zero_experts)
        return c * kept + scores + (MASTER * shape.hidden if everything and c < MASTER else 0)

    def _attention(self, everything: bool) -> float:
        """What lies between the norm and the output projection."""
        shape, c, heads, latent = self.shape, self.size, self.shape.heads, self.shape.latent
        if latent is not None:
            latents = 3 * ((latent.q_rank or 0) + latent.kv_rank) + 2 * latent.rope_dim
            latents += shape.hidden if latent.q_rank is None else 0
            return c * (heads * 2 * (shape.score_dim + shape.value_dim) + latents) + MASTER * heads
        queries, keys = heads * shape.head_dim, shape.kv_heads * shape.head_dim
        kept = c * (2 * queries + 2 * keys) + MASTER * heads
        if shape.qk_norm == "full":
            kept += (MASTER + self._wide) * (queries + keys)
        elif shape.qk_norm == "head" and everything:
            kept += max(self._wide, c) * (queries + keys)
        return kept
