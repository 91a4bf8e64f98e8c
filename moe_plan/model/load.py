"""The workload of a step: sequence length, dtype, and imbalance of the tokens over experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from moe_comm.errors import ConfigError
from moe_plan.machine.hardware import BYTES, item_bytes
from moe_plan.model.expert_loads import ExpertLoads

DROPLESS = 1.29
"""Assumed ``Workload.imbalance`` without a capacity and without a measurement: routers are not balanced in training.
Fitted on MegaScale-MoE's 352B on 720 GPUs (arXiv 2505.11432)."""


@dataclass(frozen=True)
class Workload:
    """The workload of a step.

    Args:
        seq_len: tokens of a sequence.
        dtype: dtype of matrix products and of dispatched rows.
        capacity: slots of an expert divided by its mean load. None: no token is dropped.
        imbalance: rows of the busiest rank's experts divided by the mean. 1: uniform routing. A capacity limits it.
        deterministic: combine sends each row, never partial sums, as with ``DispatchOptions(deterministic=True)``.
        wire: bytes of a dispatched row in transfer, relative to its bytes in memory. Below 1 with a wire dtype.
        gradient_bytes: bytes of a gradient element in transfer. 2 with ``parallel.compress``.
        overlap_gradients: for every overlap mode, gradient collectives overlap with the backward of the last
            micro-batch, and weight collectives with the next forward. Not between CPU ranks of one host.
        loads: recorded loads of experts and the placement of the experts, which replace ``imbalance``.
    """

    seq_len: int
    dtype: str = "bf16"
    capacity: float | None = None
    imbalance: float = 1.0
    deterministic: bool = False
    wire: float = 1.0
    gradient_bytes: int = 4
    overlap_gradients: bool = False
    loads: ExpertLoads | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.dtype not in BYTES:
            raise ConfigError(f"seq_len must be at least 1 and dtype one of {', '.join(BYTES)}; got {self}")
        capacity = 1.0 if self.capacity is None else self.capacity
        if not (1 <= self.imbalance < math.inf and 0 < capacity < math.inf):
            raise ConfigError(f"imbalance must be at least 1, and capacity above 0 or None; got {self}")
        if not 0 < self.wire <= 1 or self.gradient_bytes not in (2, 4):
            raise ConfigError(f"wire must be above 0 and at most 1, and gradient_bytes 2 or 4; got {self}")

    @classmethod
    def assumed(cls, seq_len: int, dtype: str, capacity: float | None, imbalance: float | None = None) -> Self:
        """Return a workload. If no imbalance was measured and no capacity is set, assume ``DROPLESS``."""
        if imbalance is None:
            imbalance = DROPLESS if capacity is None else 1.0
        return cls(seq_len, dtype, capacity, imbalance)

    @property
    def size(self) -> int:
        """Bytes of an activation element. With fp8, only the operands of matrix products are fp8."""
        return item_bytes(self.dtype)

    def busiest(self, ep: int) -> float:
        """Return the rows of the busiest of ``ep`` ranks divided by the mean.

        The result is at most ``ep``, because a rank cannot receive more than all rows.
        """
        rows = min(self.imbalance, float(ep)) if self.loads is None else self.loads.placed(ep).ratio
        return rows if self.capacity is None else min(rows, self.capacity)
