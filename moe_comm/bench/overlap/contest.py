"""The base class of the operators that ``bench overlap`` measures."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.bench.common.clock import sync_group
from moe_comm.bench.common.inputs import check_result
from moe_comm.bench.common.interleave import measure_interleaved, measure_pairs
from moe_comm.bench.common.settings import OverlapBench
from moe_comm.overlap.options import TILE

DIRECTIONS = ("forward", "backward")
PARTS = ("serial", "overlapped", "compute", "comm", "wire")
CALIBRATIONS, CALIBRATION_ROUNDS, CLOSE = 2, 3, 0.05
"""Corrections of a width by measurement, rounds of each, and the relative change below which a width is kept."""
CPU_CALLS = 5
PAIRS_SHARE = 2.0
"""Time for the pairs of serial and overlapped, as a multiple of the time for all five parts."""
MAX_WIDTH_FACTOR = 4.0
"""Largest factor between the width that is computed from the rates and the calibrated width."""


@dataclass(frozen=True)
class MeasuredRates:
    """GEMM rate of the slowest rank, and the rate at which a rank receives."""

    flops_per_s: float
    bytes_per_s: float

    def balanced(self, world: int) -> float:
        """Return the width N at which one GEMM takes as long as one transfer of its fp32 rows.

        For W ranks with S rows of width D, a rank sends 4 (W - 1) S D bytes and computes 2 W S D N FLOPs.
        """
        return 4 * (world - 1) * self.flops_per_s / (2 * world * self.bytes_per_s)


Work = Callable[[], Tensor | tuple[Tensor, ...]]


class _OneNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        ctx.run = run
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.run(grad)


def stepwise(y: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    """Return ``y`` with ``run`` as its backward, in one autograd node.

    For few rows, the overhead of autograd is as large as a GEMM, so the serial form must include it too.
    """
    return _OneNode.apply(y.detach(), run, *inputs)  # type: ignore[no-any-return]


def gradients(y: Tensor, grad: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run backward and return the gradients of ``leaves``. The graph is retained, so this can be called repeatedly."""
    torch.autograd.backward(y, grad, retain_graph=True)
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return tuple(gradient for gradient in grads if gradient is not None)


class OperatorContest(ABC):
    """One operator in one direction, with ``rows`` rows per rank and ``other`` columns that are not transferred.

    Attributes:
        serial: communication and GEMMs in sequence.
        overlapped: the operator.
        compute: the GEMMs only, with all rows present.
        comm: the communication only, with its gathers and sums.
        wire: the transfers only.
    """

    operator: ClassVar[str]
    serial: Work
    overlapped: Work
    compute: Work
    comm: Work
    wire: Work

    def __init__(self, direction: str, bench: OverlapBench, rows: int, other: int) -> None:
        self.direction, self.bench, self.rows, self.other = direction, bench, rows, other
        self._generator = torch.Generator().manual_seed(bench.seed * 64 + dist.get_rank())
        self.prepare()

    @property
    def name(self) -> str:
        return f"{self.operator} {self.direction}"

    @classmethod
    @abstractmethod
    def gemms_per_transfer(cls, direction: str) -> float:
        """Return the number of GEMMs per transfer."""

    @abstractmethod
    def prepare(self) -> None:
        """Set the functions of all parts. Collective."""

    @property
    def num_exact(self) -> int:
        """Number of results that must be bit-identical. The others are compared with a tolerance."""
        return 3

    def draw(self, *shape: int) -> Tensor:
        """Return normally distributed values, different on each rank."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def parts(self) -> dict[str, Work]:
        """Return the functions of all ``PARTS`` by name."""
        return {name: getattr(self, name) for name in PARTS}

    def check(self) -> None:
        """Raise ``WrongAnswer`` if the results of overlapped and serial differ. Collective."""
        results = [y if isinstance(y, tuple) else (y,) for y in (self.overlapped(), self.serial())]
        for number, (actual, expected) in enumerate(zip(*results, strict=True)):
            check_result(self.name, f"result {number}", actual, expected, bits=number < self.num_exact)


def fitting(
    kind: type[OperatorContest], direction: str, ratio: float, bench: OverlapBench, machine: MeasuredRates
) -> int:
    """Return the width at which communication takes ``ratio`` times as long as the GEMMs. Collective.

    The width is computed from the measured rates and then corrected by measurements, because GEMMs with few rows are
    slower and communication has overhead besides the transfers.
    """
    rows = max(bench.rows)
    computed = machine.balanced(bench.world) / (ratio * kind.gemms_per_transfer(direction))
    other = _round_to_tile(computed)
    for _ in range(CALIBRATIONS):
        parts = kind(direction, bench, rows, other).parts()
        stats = measure_interleaved(
            {name: (("total", parts[name]),) for name in ("compute", "comm")}, 1, CALIBRATION_ROUNDS
        )
        compute, comm = (stats[name, "total"]["median_ms"] for name in ("compute", "comm"))
        target = other * comm / (ratio * compute)
        target = min(max(target, computed / MAX_WIDTH_FACTOR), computed * MAX_WIDTH_FACTOR)
        if abs(target / other - 1) < CLOSE or _round_to_tile(target) == other:
            break
        other = _round_to_tile(target)
    return other


def _round_to_tile(width: float) -> int:
    return max(TILE, round(width / TILE) * TILE)


def measure(contest: OperatorContest) -> dict[str, Any]:
    """Return the milliseconds of all parts and the hidden fraction. Collective."""
    bench = contest.bench
    # The narrowest operator sends the same messages and computes next to nothing.
    narrow = type(contest)(contest.direction, bench, contest.rows, TILE)
    works = contest.parts() | {"chunked_comm": narrow.overlapped}
    parts = {name: (("total", work),) for name, work in works.items()}
    stats = measure_interleaved(parts, bench.warmup, bench.rounds, seconds=bench.seconds)
    times: dict[str, Any] = {f"{name}_ms": stats[name, "total"]["median_ms"] for name in works}
    for which in ("min_ms", "p90_ms"):
        times |= {f"{name}_{which}": stats[name, "total"][which] for name in ("serial", "overlapped")}
    serial, overlapped = stats["serial", "total"], stats["overlapped", "total"]
    times |= hidden_of(times) | {"rounds": serial["iterations"]}
    times["vs_serial_min"] = overlapped["min_ms"] / serial["min_ms"]
    seconds = PAIRS_SHARE * bench.seconds
    paired = measure_pairs(contest.serial, contest.overlapped, 0, bench.rounds, seconds=seconds)
    times |= {
        "vs_serial_paired": paired.ratio,
        "vs_serial_range": [paired.low, paired.high],
        "pairs": paired.count,
    }
    return times | {"cpu_ms": {name: processor_ms(work) for name, work in contest.parts().items()}}


def processor_ms(work: Work) -> float:
    """Return the CPU milliseconds of ``work`` on the busiest rank, including backend threads. Collective.

    Overlap cannot hide the CPU time of communication.
    """
    work()
    sync_group(0)
    before = time.process_time_ns()
    for _ in range(CPU_CALLS):
        work()
    return sync_group(time.process_time_ns() - before) * 1e-6 / CPU_CALLS


def hidden_of(times: dict[str, float]) -> dict[str, float]:
    """Return ``hidden`` and the other ratios of measured times.

    The baseline of ``hidden`` is serial and sends the same messages: compute and then communication in chunks. The
    overlapped operator takes at least as long as the longer of the two, so ``hidden`` is at most 1; values above 1 are
    measurement noise and are returned as 1.
    """
    compute, comm = times["compute_ms"], times["chunked_comm_ms"]
    return {
        "hidden": min((compute + comm - times["overlapped_ms"]) / min(compute, comm), 1.0),
        "vs_serial": times["overlapped_ms"] / times["serial_ms"],
        "ratio_measured": times["comm_ms"] / compute,
    }
