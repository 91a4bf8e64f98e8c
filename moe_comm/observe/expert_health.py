"""Reduce per-layer expert load metrics to a few series.

A model of 61 layers with 256 experts has 15,616 loads per step, too many series for a dashboard. The loads are written
to ``loads.jsonl`` every few steps. Per-layer metrics are written for the worst layers only. The median and the 95th
percentile over all layers are always written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

LOW_IS_BAD = frozenset({"least", "diversity"})
"""Metrics for which low values are bad."""


def layers_to_write(imbalance: Sequence[float], metrics: int, most: int) -> tuple[int, ...]:
    """Return the layers whose metrics are written, in model order: at most ``most`` values of ``metrics`` per layer.

    If not all layers fit, the layers with the highest imbalance are chosen.
    """
    layers = len(imbalance)
    if layers * metrics <= most:
        return tuple(range(layers))
    worst = sorted(range(layers), key=lambda layer: (-imbalance[layer], layer))
    return tuple(sorted(worst[: most // max(metrics, 1)]))


def across_layers(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return the median and the 95th percentile (5th where low values are bad) over layers of each metric."""
    return {
        name: (quantile(layer_values, 0.5), quantile(layer_values, 0.05 if name in LOW_IS_BAD else 0.95))
        for name, layer_values in values.items()
        if len(layer_values)
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the ``share`` quantile of ``values``, with linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))
