"""Time of a decoding step with attention and experts on accelerators of their own (MegaScale-Infer, 2504.02263).

    n_a attention nodes of tp_a accelerators          E expert nodes of tp_e accelerators, one expert each
    b_a requests of a micro-batch, KV cache  ── T_c ──▶  b_e = b_a n_a K / E rows
                                             ◀─ T_c ──

    m micro-batches of each node alternate:  attention  0 1 2 0 1 2 ...
                                             experts      0 1 2 0 1 ...

A layer takes max(m T_f, T_a + T_e + 2 T_c) with T_f = max(T_a, T_e): with enough micro-batches, the slower pool never
waits, and with one, both wait for each other. Times of dense layers are counted as those of layers with experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape, Weight
from moe_plan.machine.hardware import BYTES, Cluster, item_bytes

RESERVED = 0.1
"""Share of an accelerator's memory that neither weights nor the KV cache use (assumed)."""


@dataclass(frozen=True)
class ServeMapping:
    """How a model is served.

    tp_a, tp_e: accelerators of a node. n_a: attention nodes. m: micro-batches.
    """

    tp_a: int
    tp_e: int
    n_a: int
    m: int


@dataclass(frozen=True)
class StepTimes:
    """Times of one layer and of a decoding step, in seconds.

    attention_s, experts_s: T_a and T_e of a micro-batch. transfer_s: T_c, in one direction. step_s: of all layers.
    """

    attention_s: float
    experts_s: float
    transfer_s: float
    step_s: float

    @property
    def slower_s(self) -> float:
        """T_f."""
        return max(self.attention_s, self.experts_s)

    def idle(self, m: int) -> tuple[float, float]:
        """Return the share of a step in which the attention and the expert nodes wait, with ``m`` micro-batches."""
        period = max(m * self.slower_s, self.attention_s + self.experts_s + 2 * self.transfer_s)
        return 1 - m * self.attention_s / period, 1 - m * self.experts_s / period


@dataclass(frozen=True, eq=False)
class ServeModel:
    """The costs of a model on two pools. ``attention`` and ``experts``: hosts of the accelerators of each."""

    shape: ModelShape
    attention: Cluster
    experts: Cluster
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if not self.shape.moe_layers:
            raise ConfigError(f"model {self.shape.name} has no experts to serve on accelerators of their own")
        for pool in (self.attention, self.experts):
            pool.accelerator.peak(self.dtype)

    # Memory.

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache of all layers."""
        shape, latent = self.shape, self.shape.latent
        width = 2 * shape.kv_heads * shape.head_dim if latent is None else latent.kv_rank + latent.rope_dim
        return width * shape.layers * item_bytes(self.dtype)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in all layers with experts."""
        return sum(one.k * one.n for one in self._expert_products) * self.shape.moe_layers * BYTES[self.dtype]

    @property
    def other_bytes(self) -> int:
        """Bytes of all weights but the experts."""
        return self.shape.params * BYTES[self.dtype] - self.expert_bytes * self.shape.experts

    def kv_tokens(self, tp_a: int) -> int:
        """Return the tokens in the KV cache of an attention node. Negative if its weights do not fit."""
        return int((tp_a * usable_memory(self.attention) - self.other_bytes) // (self.kv_bytes * self.kv_copies(tp_a)))

    def kv_copies(self, tp: int) -> float:
        """Return the copies of the KV cache on ``tp`` accelerators: they shard it by heads, and a latent has none."""
        return tp / (min(tp, self.shape.kv_heads) if self.shape.latent is None else 1)

    def experts_fit(self, tp_e: int) -> bool:
        """Whether an expert fits an expert node."""
        return self.expert_bytes <= tp_e * usable_memory(self.experts)

    # Time.

    def attention_s(self, tokens: float, kv_tokens: float, tp: int) -> float:
        """Return T_a: ``tokens`` of a micro-batch that attend to ``kv_tokens`` in total."""
        return self._attention(self.attention, tokens, kv_tokens, tp)

    def experts_s(self, rows: float, tp: int) -> float:
        """Return T_e: ``rows`` of one expert."""
        return self._products(self.experts, self._expert_products, rows, tp)

    def transfer_s(self, tokens: float, rows: float, mapping: ServeMapping) -> float:
        """Return T_c: ``tokens`` of an attention node to ``rows`` of an expert node, or back."""
        width = self.shape.hidden * item_bytes(self.dtype)
        sent = tokens * width * self.shape.chosen / mapping.tp_a
        received = rows * width / mapping.tp_e
        ends = ((sent, self.attention.between), (received, self.experts.between))
        return max(num_bytes / link.rate + link.latency_s for num_bytes, link in ends)

    def step(self, mapping: ServeMapping, tokens: float, kv_tokens: float) -> StepTimes:
        """Return the times with ``tokens`` and ``kv_tokens`` in a micro-batch of each attention node."""
        shape, m = self.shape, mapping.m
        rows = tokens * mapping.n_a * shape.chosen / shape.experts
        attention_s, experts_s = self.attention_s(tokens, kv_tokens, mapping.tp_a), self.experts_s(rows, mapping.tp_e)
        transfer_s = self.transfer_s(tokens, rows, mapping)
        step_s = step_seconds(attention_s, experts_s, transfer_s, shape.layers, m)
        return StepTimes(attention_s, experts_s, transfer_s, step_s)

    def colocated_s(self, requests: float, kv_tokens: float, gpus: int) -> float:
        """Return the seconds of a step of ``requests`` on ``gpus`` attention accelerators that also have the experts.

        All weights are sharded over the accelerators of one host, as in tensor parallelism.
        """
        rows = requests * self.shape.chosen / self.shape.experts
        pool, layer_s = self.attention, self._attention(self.attention, requests, kv_tokens, gpus)
        touched = self.shape.experts * (1 - (1 - self.shape.chosen / self.shape.experts) ** requests)
        layer_s += self._products(pool, self._expert_products, rows, gpus, math.ceil(touched), sums=requests)
        return layer_s * self.shape.layers

    def balanced_nodes(self, context: float, tp_a: int, tp_e: int) -> float:
        """Return k1 E / (k3 K): the number of attention nodes with which T_a grows as T_e does with the batch."""
        few, many = 1024, 2048
        per_request = self.attention_s(many, many * context, tp_a) - self.attention_s(few, few * context, tp_a)
        per_row = self.experts_s(many, tp_e) - self.experts_s(few, tp_e)
        return per_request * self.shape.experts / (per_row * self.shape.chosen)

    # Parts.

    @property
    def _expert_products(self) -> tuple[Weight, ...]:
        return tuple(one for one in self.shape.moe_block.weights if one.product and one.copies == self.shape.experts)

    def _attention(self, pool: Cluster, tokens: float, kv_tokens: float, tp: int) -> float:
        blocks = (*self.shape.attention_block.weights, *self.shape.moe_block.weights)
        products = tuple(one for one in blocks if one.product and one.copies == 1)
        cache_s = pool.accelerator.memory_seconds(
            kv_tokens * self.kv_bytes / self.shape.layers * self.kv_copies(tp) / tp
        )
        return self._products(pool, products, tokens, tp) + cache_s

    def _products(
        self,
        pool: Cluster,
        products: tuple[Weight, ...],
        rows: float,
        tp: int,
        groups: int = 1,
        sums: float | None = None,
    ) -> float:
        """Return the seconds of products whose weights are sharded over ``tp`` ranks, and of the sum over the ranks.

        sums: rows that are summed over the ranks; None: ``rows``. A rank adds the outputs of a token's experts before.
        """
        if not rows:
            return 0.0
        gpu, seconds = pool.accelerator, 0.0
        for one in products:
            seconds += gpu.gemm_seconds(math.ceil(rows), math.ceil(one.n / tp), one.k, self.dtype, groups)
        if tp > 1:
            seconds += pool.all_reduce(
                (rows if sums is None else sums) * self.shape.hidden * item_bytes(self.dtype), range(tp)
            ).seconds
        return seconds


def step_seconds(attention_s: float, experts_s: float, transfer_s: float, layers: int, m: int) -> float:
    """Return the seconds of a step with ``m`` micro-batches, from the times of a layer of one."""
    once, slower = attention_s + experts_s + 2 * transfer_s, max(attention_s, experts_s)
    return once + slower * (m - 1) + (layers - 1) * max(m * slower, once)


def usable_memory(pool: Cluster) -> float:
    """Return the bytes of an accelerator for weights and the KV cache."""
    return pool.accelerator.memory_bytes * (1 - RESERVED)
