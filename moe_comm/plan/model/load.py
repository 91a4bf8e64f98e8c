"""What a step computes on: sequences, their dtype, and how unevenly their tokens fall on experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.hardware import BYTES, item_bytes

DROPLESS = 1.29
"""``Load.imbalance`` to assume where no capacity caps it and nothing was measured: routers in training are not even.
Fitted on MegaScale-MoE's 352B on 720 GPUs (arXiv 2505.11432)."""


@dataclass(frozen=True)
class Load:
    """What is computed. seq_len: tokens of a sequence. dtype: of products and of what travels.

    capacity: slots of an expert over its mean load, None: no token is dropped. imbalance: rows of the busiest rank's
    experts over the mean (1: routing is in equal parts); a capacity caps it.
    """

    seq_len: int
    dtype: str = "bf16"
    capacity: float | None = None
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.dtype not in BYTES:
            raise ConfigError(f"seq_len must be at least 1 and dtype one of {', '.join(BYTES)}; got {self}")
        capacity = 1.0 if self.capacity is None else self.capacity
        if not (1 <= self.imbalance < math.inf and 0 < capacity < math.inf):
            raise ConfigError(f"imbalance is at least 1, capacity above 0 or None; got {self}")

    @classmethod
    def assumed(cls, seq_len: int, dtype: str, capacity: float | None, imbalance: float | None = None) -> Self:
        """imbalance: None: not measured; then ``DROPLESS`` is assumed where no capacity caps it."""
        if imbalance is None:
            imbalance = DROPLESS if capacity is None else 1.0
        return cls(seq_len, dtype, capacity, imbalance)

    @property
    def size(self) -> int:
        """Bytes of an element of activations; products alone are in fp8."""
        return item_bytes(self.dtype)

    def busiest(self, ep: int) -> float:
        """Rows of the busiest of ``ep`` ranks over those of each if routing were in equal parts: at most all rows there
        are. One that has all experts has all rows of its tokens, however they are routed."""
        rows = min(self.imbalance, float(ep))
        return rows if self.capacity is None else min(rows, self.capacity)
