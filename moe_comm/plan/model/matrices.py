"""The matrices that a token is multiplied with, block by block; ``shape`` says which ones a model has."""

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
"""Operator -> family, as reports sum them up."""
BACKWARD = 2
"""Products in backward for each one in forward: one for the gradient of the input, one for that of the weight."""
MASTER = 4
"""Bytes of an element in fp32."""


@dataclass(frozen=True)
class Weight:
    """A matrix [k, n], or a vector (k = 1), of one operator of a block.

    k, n: inner and outer width of the product x_TK @ w_KN. name: which one it is ("up", "down", "q", ...).
    copies: how many there are (experts). used: how many of them each token goes through, on average.
    product: it is multiplied with, and not looked up (embedding) or added (bias, norm).
    owned: False: it is another block's (a tied head) and has no parameters of its own.
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
        """Elements, all copies together."""
        return self.copies * self.k * self.n if self.owned else 0

    @property
    def active(self) -> float:
        """Elements that one token uses."""
        return self.used * self.k * self.n if self.owned else 0

    @property
    def flops(self) -> float:
        """Forward, per token."""
        return 2 * self.used * self.k * self.n if self.product else 0


@dataclass(frozen=True)
class Block:
    """One attention block, MoE block, dense block, the embedding or the head; its norm is part of it.

    per_context: forward FLOPs of attention's scores and values, per token and token attended to.
    """

    name: str
    weights: tuple[Weight, ...]
    per_context: int = 0

    def parameters(self) -> dict[str, int]:
        """Elements by operator."""
        return summed((weight.operator, weight.params) for weight in self.weights if weight.params)

    @property
    def params(self) -> int:
        """Elements in all."""
        return sum(weight.params for weight in self.weights)

    @property
    def active(self) -> float:
        """Elements that one token uses; no expert's but those chosen."""
        return sum(weight.active for weight in self.weights)

    def flops(self, context: float) -> dict[str, float]:
        """Forward FLOPs per token by operator, of operators that have any.

        Args:
            context: mean number of tokens that a token attends to, see ``ModelShape.context``.
        """
        found = summed((weight.operator, weight.flops) for weight in self.weights if weight.product)
        if self.per_context:
            found["scores"] = self.per_context * context
        return found

    def products(self, operator: str) -> tuple[Weight, ...]:
        """The matrices of ``operator`` that tokens are multiplied with, in order of use."""
        return tuple(weight for weight in self.weights if weight.operator == operator and weight.product)


def summed(pairs: Iterable[tuple[str, N]]) -> dict[str, N]:
    """What each name has in all, in order of first mention."""
    found: dict[str, N] = {}
    for name, count in pairs:
        found[name] = found.get(name, 0) + count
    return found
