"""Weight matrices of a model, block by block. ``shape`` builds them for a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

N = TypeVar("N", int, float)

FAMILY = {
    "embedding": "embedding",
    "qkv": "attention",
    "scores": "attention",
    "out": "attention",
    "norms": "norms",
    "router": "router",
    "experts": "experts",
    "shared": "shared experts",
    "dense": "dense",
    "head": "head",
}
"""Operator -> family of operators in reports."""
BACKWARD = 2
"""Backward matrix products per forward product: one for the input gradient, one for the weight gradient."""
MASTER = 4
"""Bytes of an fp32 element."""


@dataclass(frozen=True)
class Weight:
    """A matrix [k, n], or a vector (k = 1), of one operator of a block.

    k, n: inner and outer width of the product x_TK @ w_KN. name: its role ("up", "down", "q", ...).
    copies: number of copies (experts). used: mean number of copies that a token uses.
    product: tokens are multiplied with it. False for lookup tables (embedding) and added vectors (bias, norm).
    owned: False if another block owns the parameters (a tied head).
    """

    operator: str
    name: str
    k: int
    n: int
    copies: int = 1
    used: float = 1
    product: bool = True
    owned: bool = True

    @property
    def params(self) -> int:
        """Number of elements of all copies."""
        return self.copies * self.k * self.n if self.owned else 0

    @property
    def active(self) -> float:
        """Number of elements that one token uses."""
        return self.used * self.k * self.n if self.owned else 0

    @property
    def flops(self) -> float:
        """Forward FLOPs per token."""
        return 2 * self.used * self.k * self.n if self.product else 0


@dataclass(frozen=True)
class Block:
    """An attention, MoE or dense block, the embedding or the head, including its norm.

    per_context: forward FLOPs of attention scores and values, per token and attended token.
    """

    name: str
    weights: tuple[Weight, ...]
    per_context: int = 0

    def parameters(self) -> dict[str, int]:
        """Return the number of elements by operator."""
        return summed((weight.operator, weight.params) for weight in self.weights if weight.params)

    @property
    def params(self) -> int:
        """Number of elements."""
        return sum(weight.params for weight in self.weights)

    @property
    def active(self) -> float:
        """Number of elements that one token uses. Of the experts, only the chosen ones count."""
        return sum(weight.active for weight in self.weights)

    def flops(self, context: float) -> dict[str, float]:
        """Return the forward FLOPs per token by operator. ``context``: mean number of attended tokens."""
        result = summed((weight.operator, weight.flops) for weight in self.weights if weight.product)
        if self.per_context:
            result["scores"] = self.per_context * context
        return result

    def products(self, operator: str) -> tuple[Weight, ...]:
        """Return the matrices of ``operator`` that tokens are multiplied with, in order of use."""
        return tuple(weight for weight in self.weights if weight.operator == operator and weight.product)


def summed(pairs: Iterable[tuple[str, N]]) -> dict[str, N]:
    """Return the sum of the values of each name, in order of first occurrence."""
    totals: dict[str, N] = {}
    for name, count in pairs:
        totals[name] = totals.get(name, 0) + count
    return totals
