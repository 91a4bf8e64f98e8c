"""What a pipeline that splits its backward passes keeps until the weights' halves have run.

All that forward left stays until then (``pipeline.in_flight`` counts for how many micro-batches), and beside it the
gradients that the input's half came by, one for the result of
each operator with weights, of which theirs are made. The first stage has none of these: its whole backward is there.
"""

from __future__ import annotations

from moe_comm.plan.machine.hardware import BYTES
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.model.matrices import Weight
from moe_comm.plan.model.shape import ModelShape


def gradients_between(shape: ModelShape, mapping: Mapping, load: Load, tokens: float, size: int) -> tuple[float, float]:
    """Bytes for a micro-batch in a dense layer, and in an MoE layer, between the halves of its backward.

    Args:
        tokens: a rank's own of a micro-batch. size: bytes of an element.
    """
    dense, moe = (
        sum(times * _of(shape, mapping, load, weight, size) for block, times in blocks for weight in block.weights)
        for blocks in (
            shape.layer_blocks("dense") if shape.dense_layers else (),
            shape.layer_blocks("moe") if shape.moe_layers else (),
        )
    )
    return tokens * dense, tokens * moe


def _of(shape: ModelShape, mapping: Mapping, load: Load, weight: Weight, size: int) -> float:
    """Bytes per token of the gradient of one operator's result."""
    p = mapping.parallel
    if weight.operator == "experts":
        if not weight.product or (weight.name != "down" and not mapping.fuses):
            return 0.0  # a function of its own, in front of which the gradient of its result stands
        rows = shape.chosen * load.busiest(p.ep) * p.etp
        return rows * size * (weight.n if weight.name == "down" else weight.n / p.etp)
    if weight.operator == "router":
        return BYTES["fp32"] * weight.n if weight.product else 0.0
    if weight.product:
        # Where rows are scattered over tp behind it, they are those of the whole group.
        whole = weight.operator in ("out", "dense") and weight.name in ("out", "down")
        return float(size * weight.n * (p.tp if whole else 1))
    if weight.name == "norm" and weight.operator == "qkv" and shape.latent is None:
        return float(size * (shape.heads + shape.kv_heads) * shape.head_dim)
    return float(size * weight.n) if weight.name == "norm" or weight.operator == "norms" else 0.0
