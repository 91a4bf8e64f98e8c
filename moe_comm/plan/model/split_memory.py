"""What a pipeline that splits its backward passes keeps until the weights' halves have run.

All that forward left stays until then (``pipeline.in_flight`` counts for how many micro-batches), and beside it the
gradients that the input's half came by, one for the result of
each operator with weights, of which theirs are made. The first stage has none of these: its whole backward is there.
"""

from __future__ import annotations

from moe_comm.plan.model.activations import Activations
from moe_comm.plan.model.matrices import MASTER, Weight


def gradients_between(estimate: Activations, fused: bool) -> tuple[float, float]:
    """Bytes per token of a dense layer, and of an MoE layer, between the halves of its backward.

    Args:
        fused: experts are fused with their transfers, and are several functions.
    """
    shape = estimate.shape
    dense, moe = (
        sum(times * _of(estimate, fused, weight) for block, times in blocks for weight in block.weights)
        for blocks in (
            shape.layer_blocks("dense") if shape.dense_layers else (),
            shape.layer_blocks("moe") if shape.moe_layers else (),
        )
    )
    return dense, moe


def _of(estimate: Activations, fused: bool, weight: Weight) -> float:
    """Bytes per token of the gradient of one operator's result."""
    shape, size = estimate.shape, estimate.size
    if weight.operator == "experts":
        if not weight.product or (weight.name != "down" and not fused):
            return 0.0  # a function of its own, in front of which the gradient of its result stands
        rows = shape.chosen * estimate.rows * estimate.etp
        return rows * size * (weight.n if weight.name == "down" else weight.n / estimate.etp)
    if weight.operator == "router":
        return MASTER * weight.n if weight.product else 0.0
    if weight.product:
        # Where rows are scattered over tp behind it, they are those of the whole group.
        whole = weight.operator in ("out", "dense") and weight.name in ("out", "down")
        return float(size * weight.n * (estimate.tp if whole else 1))
    if weight.name == "norm" and weight.operator == "qkv" and shape.latent is None:
        return float(size * (shape.heads + shape.kv_heads) * shape.head_dim)
    return float(size * weight.n) if weight.name == "norm" or weight.operator == "norms" else 0.0
