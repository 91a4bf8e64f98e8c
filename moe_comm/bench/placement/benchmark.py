"""``moe-comm bench placement``: forward and backward of an MoE layer while experts move to other ranks.

These contestants have equal weights, tokens and routing, and are interleaved in every step:

    fixed       consecutive experts on each rank
    relocate    every few steps, a decision from the loads of the last steps (``moe_comm.topology.rebalance``)
    balance     with --balance: fixed experts that are lent to other ranks in each step (``moe_comm.Balance``)
    eplb        EPLB's placement of the same loads, always applied at the same steps

EPLB with replicas, in ``slots`` more slots of each rank, is not run, because its replicas have no homes: only the rows
of its ranks are computed (``eplb_copies``).

Outputs, input gradients and the weight gradients of each expert that is not lent are compared with those of the fixed
layer, and must have the same bits. The first ``warmup`` steps are not timed, but all switches are.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from moe_comm.bench.common import report
from moe_comm.bench.common.clock import Clock, gather
from moe_comm.bench.common.inputs import WrongAnswer, make_x
from moe_comm.bench.common.interleave import run_rounds, slowest
from moe_comm.bench.common.ranks import on_hosts, on_ranks, run_benchmark, say
from moe_comm.bench.placement.settings import HOT, Costs, PlacementBench, eplb, eplb_replicas, rows_of_replicas
from moe_comm.dispatch import DispatchOptions
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig, Routing
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.topology.balance import Balance
from moe_comm.topology.load_window import LoadWindow
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import DecisionSettings, busiest_rows, moved_homes, over_mean

FIXED, RELOCATE, BALANCE, PEERS = "fixed", "relocate", "balance", ("eplb",)
TRIALS = 3
"""Number of steps and of moves that measure the seconds of a row and of a move before the first decision."""


class _Contestant:
    """A layer, and what its steps cost.

    Attributes:
        window: the loads that its next decision sees.
        decisions: its decisions.
        received: rows of this rank in each step.
        published_bytes: bytes that this rank sent for copies: weights, and gradients.
    """

    def __init__(self, name: str, bench: PlacementBench) -> None:
        self.name, self.bench = name, bench
        self.window, self.decisions = LoadWindow(bench.window), list[dict[str, Any]]()
        self.received, self.published_bytes = list[int](), 0
        placement = Placement.contiguous(bench.experts, bench.ranks)
        router = RouterConfig(num_experts=bench.experts, top_k=bench.top_k)
        balance = Balance(bench.balance) if name == BALANCE and bench.balance is not None else None
        options = DispatchOptions(balance=balance)
        self.layer = MoELayer.build(
            MoEConfig(hidden=bench.hidden, ffn=bench.ffn, router=router, placement=placement),
            dist.group.WORLD,
            options=options,
            seed=bench.seed,
            dtype=bench.torch_dtype,
            label=name,
        )
        group = self.layer.dispatcher.group
        if name != FIXED and group is not None:  # as the trainer does
            rows = max(placement.homes_per_rank) // 2
            expert_bytes = sum(param[0].nbytes for param in self.layer.experts.parameters())
            channel_of(group).reserve(rows * expert_bytes)
        x_TD = make_x(bench, dist.get_rank())
        self.x_TD, self.grad_TD = x_TD.requires_grad_(), torch.ones_like(x_TD)
        self.routing: Routing | None = None
        self.y_TD: Tensor | None = None
        self.moved_bytes = self.moved_experts = self.switches = 0

    def begin(self, ids_TK: Tensor) -> None:
        """Prepare a step with this routing."""
        weights_TK = torch.full(ids_TK.shape, 1 / ids_TK.shape[1], dtype=torch.float32, device="cpu")
        self.routing = Routing(
            ids_TK, weights_TK, torch.zeros(len(ids_TK), self.bench.experts, dtype=torch.float32, device="cpu"), None
        )
        self.y_TD = self.x_TD.grad = None
        self.layer.zero_grad(set_to_none=True)

    def forward(self) -> None:
        self.y_TD = self.layer(self.x_TD, self.routing)

    def backward(self) -> None:
        assert self.y_TD is not None
        self.y_TD.backward(self.grad_TD)
        if (copies := self.layer.copies) is not None:
            self.published_bytes, copies.published_bytes = self.published_bytes + copies.published_bytes, 0

    def step(self, ids_TK: Tensor, clock: Clock) -> None:
        """Run and measure a step."""
        self.begin(ids_TK)
        clock.measure(self.name, ("forward", self.forward), ("backward", self.backward))
        assert self.layer.dispatch_stats is not None
        self.received.append(self.layer.dispatch_stats.received)

    def decide(self, step: int, settings: DecisionSettings, clock: Clock) -> None:
        """Decide after ``step`` steps, and switch."""
        decision = self.window.decide(self.layer.placement, settings)
        switched = decision.placement is not None
        self.decisions.append({"contestant": self.name, "step": step, "switched": switched} | _numbers(decision))
        if decision.placement is not None:
            self.move(decision.placement, clock)

    def move(self, placement: Placement, clock: Clock, phase: str = "move") -> None:
        """Relocate the experts, and record the time."""
        sent = [0]

        def relocate() -> None:
            sent[0] = self.layer.relocate(placement)

        moved = moved_homes(self.layer.placement, placement)
        clock.measure(self.name, (phase, relocate))
        if phase == "move":
            total = torch.tensor(sent[0], dtype=torch.int64, device="cpu")
            dist.all_reduce(total)
            self.moved_bytes += int(total)
            self.moved_experts += len(moved)
            self.switches += 1

    def results(self) -> dict[str, str]:
        """Return digests of this rank's output and input gradient, and of the weight gradients of all experts."""
        assert self.y_TD is not None and self.x_TD.grad is not None
        lent = {one.expert for one in self.layer.last_plan.lent} if self.layer.last_plan is not None else set()
        own = {"output": _digest(self.y_TD), "input gradient": _digest(self.x_TD.grad)}
        local = {
            f"{name} gradient of expert {expert}": _digest(parameter.grad[at])
            for name, parameter in self.layer.experts.named_parameters()
            for at, expert in enumerate(self.layer.placement.homes_of(dist.get_rank()))
            if parameter.grad is not None and expert not in lent
        }
        return own | {name: digest for rank in gather(local) for name, digest in rank.items()}


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


def run(bench: PlacementBench, threads: int) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective."""
    balanced = () if bench.balance is None else (BALANCE,)
    layers = [_Contestant(name, bench) for name in (FIXED, RELOCATE, *balanced, *PEERS)]
    deciding = layers[1]
    clock = Clock(bench.device)
    say("measuring the time of a row and of a move")
    costs = _costs(layers[0], clock)
    loads: list[list[int]] = []
    packed_copies = [list(layers[0].layer.placement.homes_of(rank)) for rank in range(bench.ranks)]
    rows_of_copies: list[list[float]] = []
    last, checked = bench.warmup + bench.steps - 1, 0
    ids_TK: Tensor

    def before(step: int) -> None:
        nonlocal ids_TK
        if step == bench.warmup:
            for contestant in layers:  # discards the times of warm-up steps, but not of switches
                for phase in ("forward", "backward", "total"):
                    clock.times[contestant.name, phase] = []
                contestant.published_bytes = 0
        if step % bench.every == 0:
            until = min(step + bench.every, last + 1)
            say(f"steps {step + 1} to {until} of {bench.warmup} (discarded) + {bench.steps}")
        ids_TK = bench.ids(step, dist.get_rank())
        loads.append(bench.loads(step))

    def measure(contestant: _Contestant, _: int) -> None:
        contestant.step(ids_TK, clock)
        contestant.window.add(loads[-1])

    def after(step: int) -> None:
        nonlocal checked, packed_copies
        rows_of_copies.append(rows_of_replicas(loads[-1], packed_copies))
        if step % bench.every == 0 or step == last:  # the first step, those after decisions, and the last one
            _check(layers)
            checked += 1
        if (step + 1) % bench.every == 0 and step < last:
            gc.collect()
            deciding.decide(step + 1, bench.decisions(costs), clock)
            packed = layers[-1]
            totals_E = [sum(values) for values in zip(*loads[-bench.window :], strict=True)]
            packed.move(eplb(totals_E, packed.layer.placement), clock)
            packed_copies = eplb_replicas(totals_E, bench.ranks, bench.slots)

    try:
        # No warm-up here: its times are removed above, but not those of its switches.
        run_rounds(layers, measure, clock, 0, last + 1, collect_s=math.inf, before=before, after=after)
        by_rank = gather(dict(clock.times))
        rows_by_rank = gather({layer.name: (layer.received, layer.published_bytes) for layer in layers})
    finally:
        for contestant in layers:
            contestant.layer.dispatcher.close()
    fixed_s = sum(slowest(by_rank, FIXED))
    rows = {
        contestant.name: _row(contestant, by_rank, [ranks[contestant.name] for ranks in rows_by_rank], fixed_s)
        for contestant in layers
    }
    ours = rows[RELOCATE]
    peers: dict[str, Any] = {name: rows[name] for name in PEERS}
    if bench.slots:
        peers["eplb_copies"] = {"busiest_over_mean": _ratio(rows_of_copies[-bench.steps :]), "computed": True}
    return {
        "benchmark": "placement",
        "speedup": ours["speedup"],
        "busiest_over_mean": {"before": rows[FIXED]["busiest_over_mean"], "after": ours["busiest_over_mean"]},
        "moved_bytes": ours["moved_bytes"],
        "switches": ours["switches"],
        "bits_equal": checked > 0,  # a difference raises
        "checked_steps": checked,
        "contestants": {name: row for name, row in rows.items() if name not in PEERS},
        "peers": peers,
        "decisions": deciding.decisions,
        "seconds_per_row": costs.per_row,
        "seconds_to_move": costs.to_move,
        "settings": bench.to_dict() | {"iterations": bench.steps},
        "threads_per_rank": threads,
    }


def _ratio(steps: Sequence[Sequence[float]]) -> float:
    """Return the rows of the busiest rank over the mean, for the rows of each rank in each step."""
    return over_mean(sum(max(rows) for rows in steps), sum(map(sum, steps)), len(steps[0]))


def _numbers(decision: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(decision).items() if name != "placement"}


def _costs(fixed: _Contestant, clock: Clock) -> Costs:
    """Measure the seconds of one row on the busiest rank, and of exchanging two experts between two ranks."""
    bench, first = fixed.bench, fixed.layer.placement
    swapped = list(first.owners)
    swapped[0], swapped[-1] = swapped[-1], swapped[0]
    other = first.with_owners(swapped)
    for step in range(TRIALS):
        fixed.begin(bench.ids(step, dist.get_rank()))
        clock.measure(fixed.name, ("forward", fixed.forward), ("backward", fixed.backward))
        fixed.move(other, clock, "trial")
        fixed.move(first, clock, "trial")
    by_rank = gather(dict(clock.times))
    clock.clear()
    rows = median(busiest_rows(bench.loads(step), first) for step in range(TRIALS))
    seconds = median(slowest(by_rank, fixed.name))
    return Costs(seconds / rows, median(slowest(by_rank, fixed.name, "trial")))


def _check(layers: list[_Contestant]) -> None:
    """Compare the bits of the last step of all layers with those of the first."""
    expected = layers[0].results()
    for contestant in layers[1:]:
        wrong = [name for name, digest in contestant.results().items() if expected.get(name) != digest]
        found = [f"{name} of rank {rank}" for rank, names in enumerate(gather(wrong)) for name in names]
        if found:
            raise WrongAnswer(f"{contestant.name}: other bits than with fixed experts: {', '.join(found[:4])}")


def _row(
    contestant: _Contestant, by_rank: list[Any], of_ranks: list[tuple[list[int], int]], fixed_s: float
) -> dict[str, Any]:
    """of_ranks: received rows in each step, and published bytes, of each rank."""
    steps = list(zip(*(received for received, _ in of_ranks), strict=True))[-contestant.bench.steps :]
    steps_s = slowest(by_rank, contestant.name)
    moves_s = slowest(by_rank, contestant.name, "move") if (contestant.name, "move") in by_rank[0] else []
    return {
        "step_ms": median(steps_s) * 1e3,
        "step_min_ms": min(steps_s) * 1e3,
        "step_p90_ms": quantiles(steps_s, n=10, method="inclusive")[-1] * 1e3 if len(steps_s) > 1 else steps_s[0] * 1e3,
        "move_ms": median(moves_s) * 1e3 if moves_s else None,
        "speedup": fixed_s / (sum(steps_s) + sum(moves_s)),
        "busiest_over_mean": _ratio(steps),
        "switches": contestant.switches,
        "moved_experts": contestant.moved_experts,
        "moved_bytes": contestant.moved_bytes,
        "published_bytes": sum(sent for _, sent in of_ranks) // contestant.bench.steps,
    }


def main(bench: PlacementBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench placement``, see ``run_benchmark``."""
    return run_benchmark(lambda: _measure(bench), tables, json_out, bench.device)


def _measure(bench: PlacementBench) -> dict[str, Any] | None:
    if bench.hosts == 1:
        return on_ranks(run, bench, bench.ranks, bench.device, bench.cores_per_rank)
    per_host = bench.ranks // bench.hosts
    result, links = on_hosts(run, bench, bench.hosts, per_host, bench.link_gbit, bench.cores_per_rank)
    return result | {"link_gbit_measured": links}


COLUMNS: tuple[report.Column, ...] = (
    ("", "name"),
    *report.timed("step ms", "step"),
    ("than fixed", lambda row: report.faster_or_slower(1 / row["speedup"]) if "speedup" in row else "-"),
    ("busiest / mean", lambda row: f"{row['busiest_over_mean']:.2f}"),
    ("switches", "switches"),
    ("experts moved", "moved_experts"),
    ("MB moved", lambda row: _megabytes(row.get("moved_bytes"))),
    ("switch ms", "move_ms"),
    ("MB of copies", lambda row: _megabytes(row.get("published_bytes"))),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of steps, switches and rows of the busiest rank of each contestant."""
    s = result["settings"]
    drift = f", two experts exchanged every {s['drift']} steps" if s["drift"] else ""
    hosts = f"; {s['hosts']} hosts, {s['link_gbit']:g} Gbit/s" if s["hosts"] > 1 else ""
    hosts += f"; {s['cores_per_rank']:g} cores per rank" if s["cores_per_rank"] else ""
    load = f"{s['hot']:.0%} of the slots for {HOT} experts" if s["hot"] else f"Zipf {s['zipf']:g}"
    heading = f"{report.heading(result)}{hosts}; {load}{drift}; decisions every {s['every']} steps"
    equal = f"equal bits in {result['checked_steps']} compared steps; MB of copies are sent in each step"
    caption = report.captions(equal, "than fixed: by the mean of the steps, with the switches")
    rows = ({"name": name} | row for name, row in (result["contestants"] | result["peers"]).items())
    return [report.make_table(heading, COLUMNS, rows, caption)]


def _megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.1f}"
