"""``moe-comm bench placement``: forward and backward of an MoE layer while experts move to other ranks.

These contestants have equal weights, tokens and routing, and are interleaved in every step:

    fixed       consecutive experts on each rank
    relocate    every few steps, a decision from the loads of the last steps (``moe_comm.topology.rebalance``)
    eplb        at the same steps, EPLB's placement of the same loads, without a decision

Relocation must not change a bit: outputs, input gradients and the weight gradients of each expert are compared with
those of the fixed layer. The first ``warmup`` steps are not timed, but all switches are.
"""

from __future__ import annotations

import gc
import hashlib
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.clock import Clock, sync_group
from moe_comm.bench.common.inputs import WrongAnswer, make_x
from moe_comm.bench.common.interleave import rotated, slowest
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.placement.settings import PlacementBench, eplb
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig, Routing
from moe_comm.topology.placement import Placement
from moe_comm.topology.placement_replay import LoadWindow, ReplaySettings, placed_ratio
from moe_comm.topology.rebalance import Moves, busiest_rows

FIXED, PEERS = "fixed", ("eplb",)
CONTESTANTS = (FIXED, "relocate", *PEERS)
TRIALS = 3
"""Number of steps and of moves that measure the seconds of a row and of a move before the first decision."""


class _Contestant:
    """A layer, and the placements of the steps that it ran."""

    def __init__(self, name: str, bench: PlacementBench) -> None:
        self.name, self.bench = name, bench
        router = RouterConfig(num_experts=bench.experts, top_k=bench.top_k)
        self.layer = MoELayer.build(
            MoEConfig(hidden=bench.hidden, ffn=bench.ffn, router=router),
            dist.group.WORLD,
            seed=bench.seed,
            dtype=bench.torch_dtype,
            label=name,
        )
        x_TD = make_x(bench, dist.get_rank())
        self.x_TD, self.grad_TD = x_TD.requires_grad_(), torch.ones_like(x_TD)
        self.routing: Routing | None = None
        self.y_TD: Tensor | None = None
        self.placed: list[Placement] = []
        self.moved_bytes = self.moved_experts = self.switches = 0

    def begin(self, ids_TK: Tensor) -> None:
        """Prepare a step with this routing."""
        weights_TK = torch.full(ids_TK.shape, 1 / ids_TK.shape[1])
        self.routing = Routing(ids_TK, weights_TK, torch.zeros(len(ids_TK), self.bench.experts), None)
        self.y_TD = self.x_TD.grad = None
        self.layer.zero_grad(set_to_none=True)

    def forward(self) -> None:
        self.y_TD = self.layer(self.x_TD, self.routing)

    def backward(self) -> None:
        assert self.y_TD is not None
        self.y_TD.backward(self.grad_TD)

    def move(self, placement: Placement, clock: Clock, phase: str = "move") -> None:
        """Relocate the experts, and record the time."""
        sent = [0]

        def relocate() -> None:
            sent[0] = self.layer.relocate(placement)

        moves = Moves.of(self.layer.placement, placement)
        clock.measure(self.name, (phase, relocate))
        if phase == "move":
            total = torch.tensor(sent[0])
            dist.all_reduce(total)
            self.moved_bytes += int(total)
            self.moved_experts += len(moves.homes)
            self.switches += 1

    def results(self) -> dict[str, str]:
        """Return digests of this rank's output and input gradient, and of the weight gradients of all experts."""
        assert self.y_TD is not None and self.x_TD.grad is not None
        own = {"output": _digest(self.y_TD), "input gradient": _digest(self.x_TD.grad)}
        local = {
            f"{name} gradient of expert {expert}": _digest(parameter.grad[at])
            for name, parameter in self.layer.experts.named_parameters()
            for at, expert in enumerate(self.layer.local_experts)
            if parameter.grad is not None
        }
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, local)
        return own | {name: digest for rank in by_rank for name, digest in rank.items()}


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


def run(bench: PlacementBench, threads: int) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective.

    Raises:
        WrongAnswer: a relocated layer has other bits than the fixed one.
    """
    layers = [_Contestant(name, bench) for name in CONTESTANTS]
    clock = Clock(sync_group, bench.device)
    settings = _costs(layers[0], clock)
    window, decisions, loads = LoadWindow(bench.window), [], []
    checked, compare = 0, True
    try:
        gc.collect()
        gc.disable()
        for step in range(bench.warmup + bench.steps):
            if step == bench.warmup:
                for name in CONTESTANTS:  # the times of switches remain
                    clock.times[name, "forward"], clock.times[name, "backward"], clock.times[name, "total"] = [], [], []
            ids_TK, loads_E = bench.ids(step, dist.get_rank()), bench.loads(step)
            for one in rotated(layers, step):
                one.begin(ids_TK)
                clock.measure(one.name, ("forward", one.forward), ("backward", one.backward))
                one.placed.append(one.layer.placement)
            loads.append(loads_E)
            compare = compare or step == bench.warmup + bench.steps - 1
            checked += _check(layers) if compare else 0
            compare = False
            window.add(loads_E)
            if (step + 1) % bench.every == 0 and step + 1 < bench.warmup + bench.steps:
                gc.collect()
                relocating, packed = layers[1], layers[2]
                decision = window.decide(relocating.layer.placement, settings)
                decisions.append({"step": step + 1, "switched": decision.placement is not None} | _numbers(decision))
                if decision.placement is not None:
                    relocating.move(decision.placement, clock)
                totals_E = [sum(values) for values in zip(*loads[-bench.window :], strict=True)]
                packed.move(eplb(totals_E, bench.ranks, packed.layer.placement.version + 1), clock)
                compare = True
        by_rank: list[Any] = [None] * bench.ranks
        dist.all_gather_object(by_rank, dict(clock.times))
    finally:
        gc.enable()
        for one in layers:
            one.layer.dispatcher.close()
    measured = loads[bench.warmup :]
    fixed_s = sum(slowest(by_rank, FIXED))
    rows = {one.name: _row(one, by_rank, measured, fixed_s) for one in layers}
    ours = rows["relocate"]
    return {
        "benchmark": "placement",
        "speedup": ours["speedup"],
        "busiest_over_mean": {"before": rows[FIXED]["busiest_over_mean"], "after": ours["busiest_over_mean"]},
        "moved_bytes": ours["moved_bytes"],
        "switches": ours["switches"],
        "bits_equal": checked > 0,  # a difference raises
        "checked_steps": checked,
        "contestants": {name: row for name, row in rows.items() if name not in PEERS},
        "peers": {name: rows[name] for name in PEERS},
        "decisions": decisions,
        "seconds_per_row": settings.seconds_per_row,
        "seconds_to_move": settings.seconds_to_move,
        "settings": bench.to_dict() | {"iterations": bench.steps},
        "threads_per_rank": threads,
    }


def _numbers(decision: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(decision).items() if name != "placement"}


def _costs(fixed: _Contestant, clock: Clock) -> ReplaySettings:
    """Measure the seconds of a row of the busiest rank, and of moving one expert to a rank and another one back."""
    bench, first = fixed.bench, fixed.layer.placement
    swapped = list(first.owners)
    swapped[0], swapped[-1] = swapped[-1], swapped[0]
    other = Placement(tuple(swapped), first.world, 1)
    for step in range(TRIALS):
        fixed.begin(bench.ids(step, dist.get_rank()))
        clock.measure(fixed.name, ("forward", fixed.forward), ("backward", fixed.backward))
        fixed.move(other, clock, "trial")
        fixed.move(first, clock, "trial")
    by_rank: list[Any] = [None] * bench.ranks
    dist.all_gather_object(by_rank, dict(clock.times))
    clock.clear()
    rows = median(busiest_rows(bench.loads(step), first) for step in range(TRIALS))
    seconds = median(slowest(by_rank, fixed.name))
    return bench.replayed(seconds / rows, median(slowest(by_rank, fixed.name, "trial")))


def _check(layers: list[_Contestant]) -> int:
    """Compare the bits of the last step of all layers with those of the first. Returns 1, the number of steps."""
    expected = layers[0].results()
    for one in layers[1:]:
        wrong = [name for name, digest in one.results().items() if expected.get(name) != digest]
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, wrong)
        found = [f"{name} of rank {rank}" for rank, names in enumerate(faults) for name in names]
        if found:
            raise WrongAnswer(f"{one.name}: other bits than with fixed experts: {', '.join(found[:4])}")
    return 1


def _row(one: _Contestant, by_rank: list[Any], loads: list[list[int]], fixed_s: float) -> dict[str, Any]:
    steps_s = slowest(by_rank, one.name)
    moves_s = slowest(by_rank, one.name, "move") if (one.name, "move") in by_rank[0] else []
    return {
        "step_ms": median(steps_s) * 1e3,
        "move_ms": median(moves_s) * 1e3 if moves_s else None,
        "speedup": fixed_s / (sum(steps_s) + sum(moves_s)),
        "busiest_over_mean": placed_ratio(loads, one.placed[-len(loads) :]),
        "switches": one.switches,
        "moved_experts": one.moved_experts,
        "moved_bytes": one.moved_bytes,
    }


def main(bench: PlacementBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench placement``: measure, print a table, write JSON.

    Starts the ranks. Under torchrun, uses the ranks of torchrun, and only rank 0 prints; the others return {}.

    Raises:
        WrongAnswer: a relocated layer has other bits than the fixed one.
    """
    report.check_writable(json_out)
    info = machine.machine_info(bench.device)
    result = on_ranks(run, bench, bench.ranks, bench.device)
    if result is None:
        return {}
    result["machine"] = info
    report.write_json(result, json_out)
    report.show(report.placement_tables(result), json_out)
    return result
