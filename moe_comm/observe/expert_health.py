"""How well a step's tokens were spread over experts: which layers' numbers to keep, and what all layers say together.

A model of 61 layers with 256 experts has 15,616 loads a step: too many series for any dashboard. The loads themselves
go to ``loads.jsonl`` every few steps; of the numbers of single layers the worst layers' are kept; and across all layers
there are always the median and the 95th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

LOW_IS_BAD = frozenset({"least", "diversity"})
"""Of these numbers the small ones are bad, so that their worst layers are at the bottom."""


def kept_layers(imbalance: Sequence[float], metrics: int, most: int) -> tuple[int, ...]:
    """Layers whose numbers are written: all if ``metrics`` of each are at most ``most``, else those with the highest
    load, worst first come, in order of their place in the model."""
    layers = len(imbalance)
    if layers * metrics <= most:
        return tuple(range(layers))
    worst = sorted(range(layers), key=lambda layer: (-imbalance[layer], layer))
    return tuple(sorted(worst[: most // max(metrics, 1)]))


def across_layers(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """For each metric the median layer's value, and the value that 95% of layers are no worse than; none of no layers.

    Both are interpolated between the two layers next to the percentile.
    """
    return {
        name: (quantile(one, 0.5), quantile(one, 0.05 if name in LOW_IS_BAD else 0.95))
        for name, one in values.items()
        if len(one)
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
