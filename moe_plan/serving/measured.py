"""Costs of decoding steps from measured steps of one attention node and its expert nodes, instead of a description of
accelerators.

    T_a = a + b tokens + c KV + d tokens KV      T_e = e + f tokens + g touched      T_c = h + i tokens

for all layers, with one micro-batch. KV: tokens in the cache that the step reads. touched: the share of experts that
get rows if routing is uniform. No coefficient is negative. The errors are smallest in the mean square, relative to the
fitted seconds of the step: relative to the measured ones, slow steps would count less than fast ones of the same size,
and all predictions be too low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_plan.serving.cost import ServeMapping, StepTimes, step_seconds

FEWEST, FITS = 8, 4
"""Steps that a fit needs, and how often they are fitted."""


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds of all layers of a step. tokens: computed; kv_tokens: read from the cache."""

    tokens: int
    kv_tokens: int
    attention_s: float
    experts_s: float
    transfer_s: float


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs as ``ServeModel`` has them, for ``replay``.

    Attributes:
        attention, experts, transfer: coefficients a to d, e to g, and h to i, in seconds.
        layers, num_experts, chosen: of the model.
        cache_tokens: KV cache of an attention node.
    """

    attention: tuple[float, ...]
    experts: tuple[float, ...]
    transfer: tuple[float, ...]
    layers: int
    num_experts: int
    chosen: int
    cache_tokens: int

    @classmethod
    def fit(
        cls, steps: Sequence[MeasuredStep], layers: int, num_experts: int, chosen: int, cache_tokens: int
    ) -> MeasuredCosts:
        """Return the costs that fit ``steps`` best.

        Raises:
            ConfigError: there are too few.
        """
        if len(steps) < FEWEST:
            raise ConfigError(f"costs of steps need at least {FEWEST} steps; got {len(steps)}")
        empty = cls((), (), (), layers, num_experts, chosen, cache_tokens)

        of_step: dict[str, Callable[[float, float], tuple[float, ...]]] = {
            "attention_s": _of_attention,
            "experts_s": empty._of_experts,
            "transfer_s": _of_transfer,
        }
        x = {name: np.array([of(one.tokens, one.kv_tokens) for one in steps]) for name, of in of_step.items()}
        y = {name: np.array([getattr(one, name) for one in steps]) for name in of_step}
        seconds_N = np.add.reduce(list(y.values()))
        for _ in range(FITS):
            found = {name: _not_negative(x[name], y[name], 1 / seconds_N) for name in of_step}
            seconds_N = np.add.reduce([x[name] @ np.array(found[name]) for name in of_step])
        attention, experts, transfer = found.values()
        return cls(attention, experts, transfer, layers, num_experts, chosen, cache_tokens)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MeasuredCosts:
        """Return the costs of a ``to_dict`` result.

        Raises:
            ConfigError: they are none.
        """
        try:
            lists: list[tuple[float, ...]] = [
                tuple(map(float, values[name])) for name in ("attention", "experts", "transfer")
            ]
            sizes = [int(values[name]) for name in ("layers", "num_experts", "chosen", "cache_tokens")]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"these are no measured costs of serving: {error}") from None
        numbers = [value for one in lists for value in one]
        right = [len(one) for one in lists] == [4, 3, 2] and all(0 <= one < np.inf for one in numbers)
        if not right or not any(numbers) or min(sizes) < 1 or sizes[2] > sizes[1]:
            raise ConfigError(f"these are no measured costs of serving: {values}")
        return cls(lists[0], lists[1], lists[2], *sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def kv_tokens(self, tp_a: int) -> int:
        """Return the tokens in the KV cache of an attention node."""
        return self.cache_tokens

    def step(self, mapping: ServeMapping, tokens: float, kv_tokens: float) -> StepTimes:
        """Return the times with ``tokens`` and ``kv_tokens`` in a micro-batch of each attention node."""
        attention_s = float(np.dot(self.attention, _of_attention(tokens, kv_tokens))) / self.layers
        experts_s = float(np.dot(self.experts, self._of_experts(tokens * mapping.n_a, 0))) / self.layers
        transfer_s = float(np.dot(self.transfer, _of_transfer(tokens, 0))) / self.layers / 2
        step_s = step_seconds(attention_s, experts_s, transfer_s, self.layers, mapping.m)
        return StepTimes(attention_s, experts_s, transfer_s, step_s)

    def _of_experts(self, tokens: float, _: float) -> tuple[float, ...]:
        return 1, tokens, 1 - (1 - self.chosen / self.num_experts) ** tokens


def _of_attention(tokens: float, kv_tokens: float) -> tuple[float, ...]:
    return 1, tokens, kv_tokens, tokens * kv_tokens


def _of_transfer(tokens: float, _: float) -> tuple[float, ...]:
    return 1, tokens


def _not_negative(x_NF: NDArray[Any], y_N: NDArray[Any], weights_N: NDArray[Any]) -> tuple[float, ...]:
    """Return the coefficients of the best fit without negative ones: of the best set of features."""
    best, least = np.zeros(x_NF.shape[1]), float("inf")
    for count in range(x_NF.shape[1] + 1):
        for chosen in map(list, combinations(range(x_NF.shape[1]), count)):
            found = np.zeros(x_NF.shape[1])
            found[chosen] = np.linalg.lstsq(x_NF[:, chosen] * weights_N[:, None], y_N * weights_N, rcond=None)[0]
            error = float((((x_NF @ found - y_N) * weights_N) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
    return tuple(best.tolist())
