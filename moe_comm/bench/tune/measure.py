"""``moe-comm tune``: how each operator is fastest here, measured, and stored for ``Overlap("auto")``.

For each operator, direction and number of rows, the candidates take turns in every round: numbers of chunks, and on
GPUs Triton kernels with several numbers of programs that communicate. One chunk, that is one step after the other,
stays the choice where nothing else is at least ``GAIN`` faster: so few rows fall back to it by what was measured.
Beside each time stands what the cost model says, and over all of them its error: what ``auto`` can be trusted with
where nothing was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.race import take_turns
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.common.settings import DTYPES
from moe_comm.bench.hosts.namespaces import Hosts
from moe_comm.bench.hosts.ranks import run_on_hosts
from moe_comm.bench.tune.cases import CASES, Case, Ground
from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError
from moe_comm.kernels.row_invariant import TILE
from moe_comm.overlap.cost import CHUNKS, DIRECTIONS, FUSED, IN_PLACE, MARGIN, Rates, predict
from moe_comm.overlap.options import CHUNKED, SHARED, TRITON, Overlap
from moe_comm.overlap.rates import measure_rates
from moe_comm.overlap.store import (
    Choice,
    Measured,
    Place,
    Tried,
    cache_folder,
    errors_by_operator,
    fallback_rows,
    load_store,
    prediction_error,
    save_store,
)
from moe_comm.overlap.tuning import on_gpus, place_of

WINS = 0.75
"""Share of the rounds in which they must."""
TIMEOUT_S = 1800.0
PROGRAMS = (4, 8, 16, 32, 64)
"""That communicate, of a Triton kernel; no more than half of the GPU's processors."""


@dataclass(frozen=True)
class Tune:
    """What to measure. hosts: 1 is this one; more are made (``bench.hosts``), with links of ``link_gbit`` Gbit/s.
    rows: of each rank (tokens, of an MoE layer). sent, other: widths of what travels and of what does not. device: cpu,
    or cuda, one GPU a rank.

    Raises:
        ConfigError: an unknown operator or dtype, or nothing to measure.
    """

    hosts: int = 1
    ranks_per_host: int = 2
    link_gbit: float = 1.0
    operators: tuple[str, ...] = tuple(CASES)
    rows: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)
    sent: int = 512
    other: int = 512
    dtype: str = "float32"
    device: str = "cpu"
    warmup: int = 2
    rounds: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for operator in self.operators:
            if operator not in CASES:
                raise ConfigError(f"unknown operator {operator!r}; known: {', '.join(CASES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.device == "cuda" and self.hosts > 1:
            raise ConfigError("GPUs cannot be in hosts that are made here; start the ranks of real ones with torchrun")
        if not self.operators or not self.rows or min(self.rows) < 1 or min(self.sent, self.other) < 1:
            raise ConfigError("give at least one operator and number of rows, and widths of at least 1")

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host


def run(tune: Tune, threads: int) -> list[Measured]:
    """One rank's part; the same list on every rank."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device(tune.device, torch.cuda.current_device()) if tune.device == "cuda" else torch.device("cpu")
    ground = Ground(group, DTYPES[tune.dtype], tune.seed, device)
    known: dict[Channel, Rates] = {}
    found = []
    for operator, rows in itertools.product(tune.operators, tune.rows):
        case = CASES[operator](ground, rows, tune.sent, tune.other)
        if case.channel not in known:
            known[case.channel] = measure_rates(case.channel, ground.dtype, device, max(tune.rounds, 3))
        rates = known[case.channel]
        place = place_of(case.channel, rates, device)
        found += [_measure(case, direction, tune, rates, place) for direction in DIRECTIONS]
    return found


def candidates(operator: str, rows: int, rates: Rates, place: Place, device: torch.device) -> list[Choice]:
    """What differs from each other in what it does, one chunk first.

    Args:
        rows: of a rank.
    """
    if rates.shared and operator in IN_PLACE:
        return [Choice(), Choice(SHARED, 2)] if rows > TILE else [Choice()]
    found = [Choice(CHUNKED, chunks) for chunks in CHUNKS if chunks == 1 or chunks <= -(-rows // TILE)]
    if on_gpus(device) and place.hosts == 1 and operator in FUSED:
        most = torch.cuda.get_device_properties(device).multi_processor_count // 2
        found += [Choice(TRITON, programs=programs) for programs in PROGRAMS if programs <= most]
    return found


def as_asked(choice: Choice) -> Overlap:
    """What to call an operator with so that it does as ``choice`` says, and nothing else."""
    if choice.backend == TRITON:
        return Overlap(1, 1, backend="triton", programs=choice.programs or None)
    return Overlap(choice.chunks, 1, backend="auto" if choice.backend == SHARED else "chunked")


def _measure(case: Case, direction: str, tune: Tune, rates: Rates, place: Place) -> Measured:
    work = case.work(direction)
    device = case.ground.device
    choices = candidates(case.operator, case.rows, rates, place, device)
    calls = {str(choice): _finished(_call(case, direction, as_asked(choice)), device) for choice in choices}
    times = race(calls, tune.warmup, tune.rounds)
    load, alone = work.load(), times[str(choices[0])]

    def predicted_ms(choice: Choice) -> float:
        return 0.0 if choice.backend == TRITON else predict(load, rates, choice.chunks) * 1e3

    tried = tuple(Tried(choice, median(times[str(choice)]), predicted_ms(choice)) for choice in choices)
    best = min(range(len(tried)), key=lambda i: tried[i].ms)
    wins = sum(one < other for one, other in zip(times[str(tried[best].choice)], alone, strict=True))
    better = tried[best].beats(tried[0]) and wins >= WINS * len(alone)
    return Measured(work, place, tried, best if better else 0)


def _call(case: Case, direction: str, overlap: Overlap) -> Callable[[], Any]:
    forward = case.prepare(overlap)
    if direction == "forward":

        def alone() -> Tensor:
            with torch.no_grad():
                return forward()

        return alone
    y = forward()
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, case.leaves, grad, retain_graph=True)


def _finished(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``work`` until the device has done it."""
    if device.type == "cpu":
        return work

    def until_done() -> None:
        work()
        torch.cuda.synchronize(device)

    return until_done


def race(parts: dict[str, Callable[[], Any]], warmup: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank, of each part in each round; they take turns. Collective."""
    every = take_turns({name: (("total", work),) for name, work in parts.items()}, warmup, rounds)
    return {
        name: [max(ranks) * 1e3 for ranks in zip(*(own[name, "total"] for own in every), strict=True)] for name in parts
    }


def main(tune: Tune, json_out: str | None = None, folder: Path | None = None) -> dict[str, Any] | None:
    """Measure, store, print a table, write JSON; the body of ``moe-comm tune``. None under torchrun but on rank 0.

    Args:
        folder: where measurements are kept; None: ``cache_folder()``.

    Raises:
        ConfigError: hosts cannot be made here (not root, no iproute2).
    """
    report.check_writable(json_out)
    folder = folder or cache_folder()
    if tune.hosts == 1:
        measured = on_ranks(run, tune, tune.world, tune.device)
    else:
        with Hosts(tune.hosts, tune.link_gbit) as hosts:
            args = (run, tune, tune.world, "cpu")
            measured = run_on_hosts(on_ranks, args, hosts, tune.ranks_per_host, TIMEOUT_S)[0]
    if measured is None:
        return None
    path = save_store(folder, load_store(folder).merged(measured))
    found = {
        "benchmark": "tune",
        "results": [_shown(m) for m in measured],
        "fallback_rows": _fallbacks(measured),
        "prediction_error": prediction_error(measured),
        "errors_by_operator": errors_by_operator(measured),
        "stored": str(path),
        "settings": asdict(tune),
        "machine": machine.facts(tune.device),
    }
    report.write_json(found, json_out)
    report.show(report.tune_tables(found), json_out)
    return found


def _shown(m: Measured) -> dict[str, Any]:
    """A row of the table; ``rows``: of the product on each rank, as in ``Work``."""
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
        "model_ms": _of_the_model(m).ms,
        "tried": m.to_json()["tried"],
    }


def _of_the_model(m: Measured) -> Tried:
    """What would have been done without measuring."""
    best = min((tried for tried in m.tried if tried.predicted_ms), key=lambda tried: tried.predicted_ms)
    return best if best.predicted_ms < m.serial.predicted_ms * (1 - MARGIN) else m.serial


def _fallbacks(measured: list[Measured]) -> dict[str, int]:
    """By operator and direction: the most rows, of the fewest on, that are best in one chunk."""
    found = {}
    for name in dict.fromkeys(m.name for m in measured):
        found[name] = fallback_rows(m for m in measured if m.name == name)
    return found
