"""``moe-comm tune``: measure the fastest form of each operator and store it for ``Overlap("auto")``.

For each operator, direction and number of rows, the candidates are interleaved: numbers of chunks, and on GPUs Triton
kernels with several numbers of communicating programs. One chunk (no overlap) is chosen unless another candidate is
faster by at least ``GAIN``. The result also contains the time that the cost model predicts for each candidate, and the
prediction error, which shows how accurate ``auto`` is for cases that were not measured.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.bench.common import report
from moe_comm.bench.common.interleave import interleaved_times, slowest
from moe_comm.bench.common.ranks import on_hosts, on_ranks, run_benchmark, say
from moe_comm.bench.common.settings import Tune, torch_dtype
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import CHUNKED, SHARED, TILE, TRITON, Overlap
from moe_comm.overlap.tuning.choose import on_gpus, place_of
from moe_comm.overlap.tuning.cost import CHUNKS, DIRECTIONS, FUSED, IN_PLACE, MARGIN, GroupRates, OperatorWork, predict
from moe_comm.overlap.tuning.rates import measure_rates
from moe_comm.overlap.tuning.store import (
    Measurement,
    OverlapChoice,
    Trial,
    TuningEnvironment,
    cache_folder,
    errors_by_operator,
    fallback_rows,
    load_store,
    prediction_error,
    save_store,
)
from moe_comm.topology import ExpertPlacement

EXPERTS, TOP_K = 8, 2
"""Experts per rank, and experts that each token selects."""


@dataclass
class TuneContext:
    """Group, dtype and device of all cases of a run."""

    group: ProcessGroup
    dtype: torch.dtype
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    @cached_property
    def channel(self) -> Channel:
        """Channel of linear layers. Collective."""
        return channel_of(self.group)

    @cached_property
    def dispatcher(self) -> AllToAllDispatcher:
        """Dispatcher of MoE layers. Collective."""
        placement = ExpertPlacement.of(EXPERTS * self.world, self.world)
        return AllToAllDispatcher(placement, self.group, self.rank)

    def draw(self, *shape: int) -> Tensor:
        """Return normally distributed values that require a gradient, different on each rank."""
        generator = torch.Generator().manual_seed(self.seed * 64 + self.rank)
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
            .to(self.device, self.dtype)
            .requires_grad_()
        )


class TuneCase(ABC):
    """One operator with ``rows`` rows per rank. Rows of width ``sent`` are transferred, those of ``other`` are not.

    Attributes:
        leaves: tensors whose gradients the backward pass computes.
        copies: number of copies of a row.
        groups: number of GEMMs over which the rows are distributed.
    """

    operator: ClassVar[str]

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        self.context, self.rows, self.sent, self.other = context, rows, sent, other

    leaves: tuple[Tensor, ...]
    copies, groups = 1, 1

    @property
    def channel(self) -> Channel:
        return self.context.channel

    def work(self, direction: str) -> OperatorWork:
        """Return the work as the operator describes it to the tuner for ``Overlap("auto")``."""
        rows, world = self.rows * self.copies, self.context.world
        rows *= world if self.groups == 1 else 1
        return OperatorWork(
            self.operator, direction, rows, self.sent, self.other, self.context.dtype, world, self.groups
        )

    @abstractmethod
    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        """Return the forward pass. Collective."""


class GatherMatmulCase(TuneCase):
    operator = "gather_matmul"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self.leaves = context.draw(rows, sent), context.draw(other, sent)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: gather_matmul(x, w, self.context.group, overlap)


class MatmulScatterCase(TuneCase):
    operator = "matmul_scatter"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self.leaves = context.draw(rows * context.world, other), context.draw(sent, other)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: matmul_scatter(x, w, self.context.group, overlap)


class _ExpertCase(TuneCase):
    """``rows`` are the tokens per rank. Consecutive tokens select consecutive experts, so experts are balanced."""

    copies, groups = TOP_K, EXPERTS

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        first = torch.arange(rows, device="cpu") * TOP_K + context.rank * EXPERTS
        self.ids_TK = ((first[:, None] + torch.arange(TOP_K, device="cpu")) % (EXPERTS * context.world)).to(
            context.device
        )

    @property
    def channel(self) -> Channel:
        return self.context.dispatcher.channel


class DispatchMatmulCase(_ExpertCase):
    operator = "dispatch_matmul"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self.leaves = context.draw(rows, sent), context.draw(EXPERTS, other, sent)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: dispatch_matmul(self.context.dispatcher, x, self.ids_TK, w, overlap)[0]


class MatmulCombineCase(_ExpertCase):
    """The preceding dispatch, which determines the number of chunks, is not timed."""

    operator = "matmul_combine"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self._sent_TD = torch.zeros(rows, sent, dtype=context.dtype, device=context.device)
        self._weights_TK = context.draw(rows, TOP_K)
        received = context.dispatcher.dispatch(self._sent_TD, self.ids_TK).handle.num_rows
        self.leaves = context.draw(received, other), context.draw(EXPERTS, sent, other), self._weights_TK

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        rows, w, weights = self.leaves
        zero_weight_EGD = self._sent_TD.new_zeros(EXPERTS, 1, self.sent)
        _, dispatch = dispatch_matmul(self.context.dispatcher, self._sent_TD, self.ids_TK, zero_weight_EGD, overlap)
        return lambda: matmul_combine(rows, w, weights, dispatch)


CASES: dict[str, type[TuneCase]] = {
    case.operator: case for case in (GatherMatmulCase, MatmulScatterCase, DispatchMatmulCase, MatmulCombineCase)
}


WINS = 0.75
"""Fraction of the rounds in which a candidate must be faster than one chunk."""
PROGRAMS = (4, 8, 16, 32, 64)
"""Numbers of communicating programs of a Triton kernel, at most half of the GPU's multiprocessors."""


def run(tune: Tune, threads: int) -> list[Measurement]:
    """Measure on this rank. Return the measurements, the same on every rank."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device(tune.device, torch.cuda.current_device()) if tune.device == "cuda" else torch.device("cpu")
    context = TuneContext(group, torch_dtype(tune.dtype), tune.seed, device)
    rates_by_channel: dict[Channel, GroupRates] = {}
    result = []
    for operator, rows in itertools.product(tune.operators, tune.rows):
        say(f"measuring {operator}, {rows} rows per rank")
        case = CASES[operator](context, rows, tune.sent, tune.other)
        if case.channel not in rates_by_channel:
            rates_by_channel[case.channel] = measure_rates(case.channel, context.dtype, device, max(tune.rounds, 3))
        rates = rates_by_channel[case.channel]
        env = place_of(case.channel, rates, device)
        result += [_measure(case, direction, tune, rates, env) for direction in DIRECTIONS]
    return result


def candidates(
    operator: str, rows: int, rates: GroupRates, env: TuningEnvironment, device: torch.device
) -> list[OverlapChoice]:
    """Return the choices to measure, one chunk first. ``rows`` is the number of rows per rank."""
    if rates.shared and operator in IN_PLACE:
        return [OverlapChoice(), OverlapChoice(SHARED, 2)] if rows > TILE else [OverlapChoice()]
    result = [OverlapChoice(CHUNKED, chunks) for chunks in CHUNKS if chunks == 1 or chunks <= -(-rows // TILE)]
    if on_gpus(device) and env.hosts == 1 and operator in FUSED:
        max_programs = torch.cuda.get_device_properties(device).multi_processor_count // 2
        result += [OverlapChoice(TRITON, programs=programs) for programs in PROGRAMS if programs <= max_programs]
    return result


def overlap_of(choice: OverlapChoice) -> Overlap:
    """Return the ``Overlap`` that makes an operator use exactly ``choice``."""
    if choice.backend == TRITON:
        return Overlap(1, 1, backend="triton", programs=choice.programs or None)
    return Overlap(choice.chunks, 1, backend="auto" if choice.backend == SHARED else "chunked")


def _measure(case: TuneCase, direction: str, tune: Tune, rates: GroupRates, env: TuningEnvironment) -> Measurement:
    work = case.work(direction)
    device = case.context.device
    choices = candidates(case.operator, case.rows, rates, env, device)
    calls = {str(choice): _synchronized(_call(case, direction, overlap_of(choice)), device) for choice in choices}
    times = slowest_ms(calls, tune.warmup, tune.rounds)
    serial = times[str(choices[0])]

    def predicted_ms(choice: OverlapChoice) -> float:
        return 0.0 if choice.backend == TRITON else predict(work, rates, choice.chunks) * 1e3

    tried = tuple(Trial(choice, median(times[str(choice)]), predicted_ms(choice)) for choice in choices)
    best = min(range(len(tried)), key=lambda i: tried[i].ms)
    wins = sum(one < other for one, other in zip(times[str(tried[best].choice)], serial, strict=True))
    better = tried[best].beats(tried[0]) and wins >= WINS * len(serial)
    return Measurement(work, env, tried, best if better else 0)


def _call(case: TuneCase, direction: str, overlap: Overlap) -> Callable[[], Any]:
    forward = case.prepare(overlap)
    if direction == "forward":

        def without_grad() -> Tensor:
            with torch.no_grad():
                return forward()

        return without_grad
    y = forward()
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, case.leaves, grad, retain_graph=True)


def _synchronized(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return ``work`` followed by a synchronization of the device."""
    if device.type == "cpu":
        return work

    def work_and_synchronize() -> None:
        work()
        torch.cuda.synchronize(device)

    return work_and_synchronize


def slowest_ms(calls: dict[str, Callable[[], Any]], warmup: int, rounds: int) -> dict[str, list[float]]:
    """Time interleaved calls. Return the milliseconds of the slowest rank in each round, by name. Collective."""
    times = interleaved_times({name: (("total", work),) for name, work in calls.items()}, warmup, rounds)
    return {name: [seconds * 1e3 for seconds in slowest(times, name)] for name in calls}


def main(tune: Tune, json_out: str | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Run ``moe-comm tune``, see ``run_benchmark``, and store the measurements.

    Args:
        folder: folder of the measurements. None: ``cache_folder()``.
    """
    return run_benchmark(lambda: _measure_and_store(tune, folder or cache_folder()), tables, json_out, tune.device)


def _measure_and_store(tune: Tune, folder: Path) -> dict[str, Any] | None:
    if tune.hosts == 1:
        measured = on_ranks(run, tune, tune.world, tune.device)
    else:
        measured, _ = on_hosts(run, tune, tune.hosts, tune.ranks_per_host, tune.link_gbit)
    if measured is None:
        return None
    path = save_store(folder, load_store(folder).merged(measured))
    return {
        "benchmark": "tune",
        "results": [_row(m) for m in measured],
        "fallback_rows": {
            name: fallback_rows(m for m in measured if m.name == name)
            for name in dict.fromkeys(m.name for m in measured)
        },
        "prediction_error": prediction_error(measured),
        "errors_by_operator": errors_by_operator(measured),
        "stored": str(path),
        "settings": asdict(tune),
    }


COLUMNS: tuple[report.Column, ...] = (
    ("", lambda row: f"{row['op']}, {row['direction']}"),
    ("rows", "rows"),
    ("1 chunk ms", "serial_ms"),
    ("best ms", "best_ms"),
    ("choice", "choice"),
    ("predicted ms", lambda row: None if row["error"] is None else row["predicted_ms"]),
    ("error", lambda row: None if row["error"] is None else f"{row['error']:.0%}"),
    ("model's choice ms", "model_ms"),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of the best choice of each case, and of the prediction of the cost model."""

    def error(errors: dict[str, float]) -> str:
        return f"{errors['median']:.0%} (median), {errors['worst']:.0%} (worst)"

    s = result["settings"]
    one_host = s["hosts"] == 1
    where = f"{s['ranks_per_host']} ranks" if one_host else f"{s['hosts']} hosts x {s['ranks_per_host']} rank(s)"
    link = "" if one_host else f", links of {s['link_gbit']:g} Gbit/s"
    lines = [f"error of the cost model over all candidates: {error(result['prediction_error'])}"]
    lines += [f"    {name}: {error(errors)}" for name, errors in result["errors_by_operator"].items() if errors]
    lines += [f"one chunk is best up to {rows} rows: {name}" for name, rows in result["fallback_rows"].items()]
    heading = f"{where}{link}, {s['sent']} x {s['other']}, {s['dtype']}; {report.machine(result)}"
    return [
        report.make_table(heading, COLUMNS, result["results"], "\n".join([*lines, f"stored in {result['stored']}"]))
    ]


def _row(m: Measurement) -> dict[str, Any]:
    """Return a row of the table. ``rows`` is the number of rows of the GEMM on each rank."""
    return {
        "op": m.work.operator,
        "direction": m.work.direction,
        "rows": m.work.rows,
        "sent": m.work.sent,
        "other": m.work.other,
        "serial_ms": m.serial.ms,
        "best_ms": m.chosen.ms,
        "choice": str(m.chosen.choice),
        "predicted_ms": m.chosen.predicted_ms,
        "error": m.chosen.error,
        "model_ms": _choice_of_model(m).ms,
        "tried": m.to_json()["tried"],
    }


def _choice_of_model(m: Measurement) -> Trial:
    """Return the candidate that the cost model selects without measurements."""
    best = min((tried for tried in m.tried if tried.predicted_ms), key=lambda tried: tried.predicted_ms)
    return best if best.predicted_ms < m.serial.predicted_ms * (1 - MARGIN) else m.serial
