"""The workload of a step: sequence length, dtype, and imbalance of the tokens over experts.

The imbalance is a number, or the rows of the busiest rank with recorded expert loads and a placement of the experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import fmean
from typing import Literal, Self, get_args

from moe_comm.errors import ConfigError
from moe_comm.topology.assignment import Loads
from moe_comm.topology.balance import busiest_transfers
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import Decision, DecisionSettings, decide, moved_homes, replayed_ratio
from moe_plan.machine.hardware import BYTES, item_bytes
from moe_plan.model.lending import Lending, LendingReplay, replay_lending
from moe_plan.model.lengths import DocumentLengths

LoadPlacement = Literal["fixed", "relocate", "balance"]
LAYERS, STEPS = 8, 10
"""Number of layers, evenly spaced, and of last steps that are evaluated."""


@dataclass(frozen=True)
class PlacedLoads:
    """The loads on a number of ranks.

    Attributes:
        kind: "fixed" if no layer would switch, or lend experts.
        before: rows of the busiest rank over the mean with contiguous experts, mean over the layers.
        ratio: the same with the chosen placements.
        moved: experts that a rank sends or receives in a switch of one layer, or lends or borrows in a step, mean over
            the layers.
        copies, resident: lent experts of all ranks in a step of one layer, and those of them whose weights were sent
            before the step, mean.
        published, fresh: copies whose weights a rank sends or receives before a step of one layer and in it, mean.
        reason: why the first layer switches or does not.
    """

    kind: LoadPlacement
    before: float
    ratio: float
    moved: float
    reason: str
    copies: float = 0.0
    resident: float = 0.0
    published: float = 0.0
    fresh: float = 0.0


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """Loads of experts in some steps of some layers, and the placement to plan with. Compared by identity.

    Args:
        layers: for each layer the rows of each expert in each step.
        kind: "fixed", or "relocate": experts move as ``decide`` chooses. "balance": in each step, experts are lent with
            the recorded rows and the resident copies of the steps before, where that pays.
        every: steps between switches, over which their bytes are divided.
        lending: costs, for "balance".

    Raises:
        ConfigError: there are no loads, layers have different numbers of experts, or ``kind`` is unknown.
    """

    layers: tuple[tuple[Loads, ...], ...]
    kind: LoadPlacement = "fixed"
    every: int = 100
    lending: Lending | None = None

    def __post_init__(self) -> None:
        sizes = {len(loads_E) for steps in self.layers for loads_E in steps}
        if len(sizes) != 1 or not all(self.layers):
            raise ConfigError(f"loads must be of layers with equal numbers of experts; got {sorted(sizes) or 'none'}")
        if self.kind not in get_args(LoadPlacement) or (self.kind == "balance") != (self.lending is not None):
            kinds = ", ".join(get_args(LoadPlacement))
            raise ConfigError(f"the placement must be one of {kinds}, balance with costs; got {self.kind!r}")

    @classmethod
    def of(
        cls,
        loads: Mapping[str, Mapping[int, Loads]],
        kind: LoadPlacement,
        experts: int | None = None,
        lending: Lending | None = None,
    ) -> ExpertLoads:
        """Return a sample of the recorded loads of a run, of its first ``experts`` experts, by layer and step."""
        chosen = list(loads.values())[:: -(-len(loads) // LAYERS) or 1]
        sample = tuple(tuple(tuple(load[:experts]) for load in list(steps.values())[-STEPS:]) for steps in chosen)
        return cls(sample, kind, lending=lending if kind == "balance" else None)

    @property
    def experts(self) -> int:
        """Number of experts of a layer."""
        return len(self.layers[0][0])

    def placed(self, ranks: int) -> PlacedLoads:
        """Return the loads on ``ranks`` expert-parallel ranks."""
        return _placed(self, ranks)


@lru_cache(maxsize=1024)
def _placed(loads: ExpertLoads, ranks: int) -> PlacedLoads:
    if loads.kind == "balance":
        return _lent(loads, ranks)
    first = Placement.contiguous(loads.experts, ranks)
    settings = DecisionSettings(every=loads.every)
    before, after, moved, reasons = 0.0, 0.0, 0, []
    for steps in loads.layers:
        fixed = Decision(None, "the placement is fixed")
        decision = fixed if loads.kind == "fixed" else decide(steps, first, settings)
        reasons.append(decision.reason)
        before += replayed_ratio(steps, first)
        after += replayed_ratio(steps, decision.placement or first)
        if decision.placement is not None:
            moved += busiest_transfers(moved_homes(first, decision.placement))
    count = len(loads.layers)
    return PlacedLoads(loads.kind if moved else "fixed", before / count, after / count, moved / count, reasons[0])


def _lent(loads: ExpertLoads, ranks: int) -> PlacedLoads:
    assert loads.lending is not None
    balance, costs = loads.lending.balance(ranks), loads.lending.costs(ranks)
    in_place = loads.lending.in_place(ranks)
    layers = [replay_lending(steps, ranks, balance, costs, in_place) for steps in loads.layers]
    mean = {field.name: fmean(getattr(one, field.name) for one in layers) for field in fields(LendingReplay)}
    copies, resident, busiest = mean["copies"], mean["resident"], mean["busiest"]
    reason = (
        f"a layer lends {copies:.1f} experts in a step, {busiest:.1f} of one rank and {resident:.1f} of them resident, "
        f"and saves {mean['saved_s'] * 1e3:.3g} ms"
    )
    kind: LoadPlacement = "balance" if copies else "fixed"
    sent = copies, resident, mean["published"], mean["fresh"]
    return PlacedLoads(kind, mean["before"], mean["ratio"], busiest, reason, *sent)


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
        lengths: documents in the sequences, which attend to their own tokens only. Ranks of cp exchange keys in a ring.
            None: a sequence is one document, and cp exchanges heads.
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
    lengths: DocumentLengths | None = None

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

    def per_token(self, value: Callable[[int], float]) -> float:
        """Return the mean over the tokens of ``value``, a function of the tokens of a document."""
        return value(self.seq_len) if self.lengths is None else self.lengths.mean(value)

    def busiest(self, ep: int) -> float:
        """Return the rows of the busiest of ``ep`` ranks divided by the mean.

        The result is at most ``ep``, because a rank cannot receive more than all rows.
        """
        rows = min(self.imbalance, float(ep)) if self.loads is None else self.loads.placed(ep).ratio
        return rows if self.capacity is None else min(rows, self.capacity)
