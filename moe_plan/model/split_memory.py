"""Memory of a pipeline that splits backward passes, between the input half and the weight half.

Saved activations stay allocated until the weight half has run; ``pipeline.in_flight`` counts the micro-batches. In
addition, the input half keeps the gradient of the output of each operator with weights, from which the weight half
computes the weight gradients. The first stage keeps none of these, because it runs complete backward passes.
"""

from __future__ import annotations

from moe_comm.layers.transformer.shape import MASTER, Weight
from moe_plan.model.activations import ActivationMemory


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
