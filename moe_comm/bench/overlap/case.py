"""What ``bench overlap`` measures: its settings, and one operator in one direction in parts that can be compared."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.bench.common.case import require
from moe_comm.bench.common.clock import sync_group
from moe_comm.bench.common.race import pairs, race
from moe_comm.errors import ConfigError
from moe_comm.kernels.row_invariant import TILE
from moe_comm.overlap.options import Overlap

OPERATORS = ("gather_matmul", "matmul_scatter", "dispatch_matmul", "matmul_combine")
DIRECTIONS = ("forward", "backward")
PARTS = ("serial", "overlapped", "compute", "comm", "wire")
SWEEP = tuple(2**power for power in range(14))
"""Rows from 1 to 8192."""
EXPERTS_A_RANK = 8
CALIBRATIONS, CALIBRATION_ROUNDS, CLOSE = 2, 3, 0.05
CPU_CALLS = 5
PAIRS_SHARE = 2.0
"""Of the seconds for all five parts, what serial and overlapped get once more by themselves."""
FARTHEST = 4.0
"""How many times wider or narrower than computed a measurement may make an operator."""


@dataclass(frozen=True)
class OverlapBench:
    """What to measure, float32 throughout.

    link_gbit: Gbit/s of each host's link.
    operators: some of ``OPERATORS``. rows: of each rank; tokens of the operators for experts.
    width: columns of what travels. ratios: communication over compute, by the width that does not travel.
    chunks: parts in which rows travel; "auto" is the library's choice.
    layer: measure whole MoE layers too, of ``tokens`` a rank, ``hidden``, and each ``ffn`` (none: one whose transfers
        take about as long as its experts); ``peers``: Hugging Face's expert parallelism beside them.
    experts: over all ranks, of the layer and of the operators for experts; 0: ``EXPERTS_A_RANK`` for each rank.
    rounds, seconds: rounds to take the median of, and more of them while they fit in so many seconds.

    Raises:
        ConfigError: nothing to measure, or sizes that do not fit.
    """

    hosts: int = 2
    ranks_per_host: int = 1
    link_gbit: float = 1.0
    operators: tuple[str, ...] = OPERATORS
    rows: tuple[int, ...] = (2048,)
    width: int = 512
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    chunks: int | Literal["auto"] = 8
    deterministic: bool = True
    experts: int = 0
    top_k: int = 2
    layer: bool = True
    peers: bool = True
    tokens: int = 2048
    hidden: int = 512
    ffn: tuple[int, ...] = ()
    warmup: int = 2
    rounds: int = 7
    seconds: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := set(self.operators) - set(OPERATORS):
            raise ConfigError(f"unknown operators {sorted(unknown)}; known: {', '.join(OPERATORS)}")
        if not self.operators and not self.layer:
            raise ConfigError("there is nothing to measure: give an operator or the layer")
        sizes = (*self.rows, *self.ffn, self.width, self.tokens, self.hidden, self.top_k, self.rounds)
        if not self.rows or not self.ratios or min(sizes) < 1 or min(self.ratios) <= 0:
            raise ConfigError(f"rows, ratios and all sizes must be there and positive; got {self}")
        if self.num_experts % self.world or self.top_k > self.num_experts:
            raise ConfigError(
                f"experts must divide by the {self.world} ranks and be at least top_k {self.top_k}; got {self.experts}"
            )
        Overlap(self.chunks)

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def num_experts(self) -> int:
        return self.experts or EXPERTS_A_RANK * self.world

    @property
    def overlap(self) -> Overlap:
        return Overlap(self.chunks, deterministic=self.deterministic)


@dataclass(frozen=True)
class Machine:
    """flops_per_s of a matrix product on the slowest rank; bytes_per_s that reach a rank."""

    flops_per_s: float
    bytes_per_s: float

    def balanced(self, world: int) -> float:
        """The other width at which one product takes as long as one transfer of its rows.

        Of W S rows of fp32 a rank sends (W - 1) S D 4 bytes, and multiplies W S D N times.
        """
        return 4 * (world - 1) * self.flops_per_s / (2 * world * self.bytes_per_s)


Work = Callable[[], Tensor | tuple[Tensor, ...]]


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        ctx.run = run
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.run(grad)


def stepwise(y: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    """``y``, whose backward pass is ``run``: one node of autograd, as training has one for every step.

    With few rows autograd takes as long as a product: serial has to pay for it as the operator has.
    """
    return _Steps.apply(y.detach(), run, *inputs)  # type: ignore[no-any-return]


def gradients(y: Tensor, grad: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of ``leaves``, as a training step gets them. Again and again: the graph is kept, and no gradient."""
    torch.autograd.backward(y, grad, retain_graph=True)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return tuple(gradient for gradient in found if gradient is not None)


class Contest(ABC):
    """One operator in one direction: its parts, alone and together.

    Attributes:
        serial: communication and products one after the other. overlapped: the operator.
        compute: the products alone, all rows at hand. comm: what moves rows alone. wire: its transfers.
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
    def products_per_transfer(cls, direction: str) -> float: ...

    @abstractmethod
    def prepare(self) -> None:
        """Make the parts. Collective."""

    @property
    def exact(self) -> int:
        """How many of the results must be equal in bits; the rest within rounding."""
        return 3

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers of this rank's own."""
        return torch.randn(*shape, generator=self._generator)

    def parts(self) -> dict[str, Work]:
        """By name, as in ``PARTS``."""
        return {name: getattr(self, name) for name in PARTS}

    def check(self) -> None:
        """The operator gives what its parts give one after the other. Collective.

        Raises:
            WrongAnswer: it does not.
        """
        both = [found if isinstance(found, tuple) else (found,) for found in (self.overlapped(), self.serial())]
        for number, (got, want) in enumerate(zip(*both, strict=True)):
            require(self.name, f"result {number}", got, want, bits=number < self.exact)


def fitting(kind: type[Contest], direction: str, ratio: float, bench: OverlapBench, machine: Machine) -> int:
    """The other width at which communication takes ``ratio`` times the products. Collective.

    Computed from the rates of machine and link, then mended by what the parts take: products of few rows are slower
    than those of a large matrix, and communication is more than its bytes.
    """
    rows = max(bench.rows)
    computed = machine.balanced(bench.world) / (ratio * kind.products_per_transfer(direction))
    other = _whole(computed)
    for _ in range(CALIBRATIONS):
        parts = kind(direction, bench, rows, other).parts()
        stats = race({name: (("total", parts[name]),) for name in ("compute", "comm")}, 1, CALIBRATION_ROUNDS)
        compute, comm = (stats[name, "total"]["median_ms"] for name in ("compute", "comm"))
        wanted = min(max(other * comm / (ratio * compute), computed / FARTHEST), computed * FARTHEST)
        if abs(wanted / other - 1) < CLOSE or _whole(wanted) == other:
            break
        other = _whole(wanted)
    return other


def _whole(width: float) -> int:
    return max(TILE, round(width / TILE) * TILE)


def measure(contest: Contest) -> dict[str, Any]:
    """Milliseconds of all parts, and what the operator hides. Collective."""
    bench = contest.bench
    parts = {name: (("total", work),) for name, work in contest.parts().items()}
    stats = race(parts, bench.warmup, bench.rounds, seconds=bench.seconds)
    times: dict[str, Any] = {f"{name}_ms": stats[name, "total"]["median_ms"] for name in PARTS}
    serial, overlapped = stats["serial", "total"], stats["overlapped", "total"]
    times |= hidden_of(times) | {"rounds": serial["iterations"]}
    times["vs_serial_min"] = overlapped["min_ms"] / serial["min_ms"]
    seconds = PAIRS_SHARE * bench.seconds
    paired = pairs(contest.serial, contest.overlapped, 0, bench.rounds, seconds=seconds)
    times |= {"vs_serial_paired": paired.ratio, "vs_serial_range": [paired.low, paired.high], "pairs": paired.count}
    return times | {"cpu_ms": {name: processor_ms(work) for name, work in contest.parts().items()}}


def processor_ms(work: Work) -> float:
    """Milliseconds for which a rank's processors are busy with ``work``, its backend's threads too; the busiest rank's.

    What communication takes of this no overlap can hide. Collective.
    """
    work()
    sync_group(0)
    before = time.process_time_ns()
    for _ in range(CPU_CALLS):
        work()
    return sync_group(time.process_time_ns() - before) * 1e-6 / CPU_CALLS


def hidden_of(times: dict[str, float]) -> dict[str, float]:
    """``hidden`` and other ratios of a result's times."""
    saved = times["serial_ms"] - times["overlapped_ms"]
    found = {
        "hidden": saved / min(times["compute_ms"], times["comm_ms"]),
        "vs_serial": times["overlapped_ms"] / times["serial_ms"],
        "ratio_measured": times["comm_ms"] / times["compute_ms"],
    }
    if "wire_ms" in times:
        found["hidden_wire"] = saved / min(times["compute_ms"], times["wire_ms"])
    return found
