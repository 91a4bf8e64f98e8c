"""``moe-comm bench hierarchical``: hierarchical dispatch against all-to-all over real links between hosts.

Hosts are network namespaces with links of a given rate. These contestants are interleaved in one run:

    all_to_all          send the row of each slot to the rank of its expert, and back
    all_gather          send every token to every rank, and the row of each slot back
    hierarchical        send one copy of a token to each host, and the row of each slot back; bits as on one rank
    hierarchical_sums   send one copy to each host, and contestant sum of a host's rows back (``deterministic=False``)

Forward is dispatch and combine without experts between them. Results are compared with plain torch first. Bytes are
counted in two ways: rows, weights and ids that are sent to other hosts, and the bytes that the interfaces of all hosts
sent, which include headers, handshakes and retransmissions.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from moe_comm.bench.common import report
from moe_comm.bench.common.clock import gather, times_of
from moe_comm.bench.common.inputs import (
    RankInputs,
    check_result,
    expected_dweights,
    expected_dx,
    expected_rows,
    expected_y,
    make_inputs,
)
from moe_comm.bench.common.interleave import measure_interleaved
from moe_comm.bench.common.ranks import on_hosts, run_benchmark, say
from moe_comm.bench.common.settings import BatchShape, HierarchicalBench
from moe_comm.bench.hosts.namespaces import interface_bytes
from moe_comm.dispatch import Dispatcher, DispatchOptions, Traffic, make_dispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher

CONTESTANTS = {
    "all_to_all": ("all_to_all", True),
    "all_gather": ("all_gather", True),
    "hierarchical": ("hierarchical", True),
    "hierarchical_sums": ("hierarchical", False),
}
"""Backend and ``deterministic`` option of each contestant."""
BASELINE = "all_to_all"


class _Contestant:
    """One dispatcher with the inputs of this rank."""

    def __init__(self, name: str, bench: HierarchicalBench, inputs: RankInputs) -> None:
        backend, deterministic = CONTESTANTS[name]
        self.name, self.inputs, self.deterministic = name, inputs, deterministic
        self.dispatcher: Dispatcher = make_dispatcher(
            bench.experts, dist.group.WORLD, backend=backend, options=DispatchOptions(deterministic=deterministic)
        )
        self.x_TD = inputs.x_TD.clone().requires_grad_()
        self.weights_TK = inputs.weights_TK.clone().requires_grad_()
        self._y_TD: Tensor | None = None

    def forward(self, scaled: bool = False) -> Tensor:
        """Dispatch and combine. ``scaled`` multiplies the rows of each expert by its scale, for ``check``."""
        dispatched = self.dispatcher.dispatch(self.x_TD, self.inputs.ids_TK, label=self.name)
        rows_RD = dispatched.rows_RD
        if scaled:
            local = self.dispatcher.local_experts
            counts = torch.tensor(dispatched.handle.rows_per_expert, dtype=torch.int64, device="cpu")
            rows_RD = rows_RD * self.inputs.scale_E[local.start : local.stop].repeat_interleave(counts).unsqueeze(1)
        self._y_TD = self.dispatcher.combine(rows_RD, self.weights_TK, dispatched.handle)
        return self._y_TD

    def backward(self) -> None:
        assert self._y_TD is not None
        self.x_TD.grad = self.weights_TK.grad = None
        self._y_TD.backward(self.inputs.grad_TD)
        self._y_TD = None

    def check(self, shape: BatchShape) -> None:
        """Compare forward and backward with plain torch. Raises ``WrongAnswer`` if a result differs."""
        rows_RD = self.dispatcher.dispatch(self.inputs.x_TD, self.inputs.ids_TK).rows_RD
        check_result(self.name, "rows", rows_RD, expected_rows(shape, dist.get_rank()), bits=True)
        y_TD = self.forward(scaled=True).detach()
        self.backward()
        assert self.x_TD.grad is not None and self.weights_TK.grad is not None
        check_result(self.name, "y", y_TD, expected_y(self.inputs), bits=self.deterministic)
        check_result(self.name, "gradient of x", self.x_TD.grad, expected_dx(self.inputs), bits=False)
        check_result(
            self.name, "gradient of the weights", self.weights_TK.grad, expected_dweights(self.inputs), bits=False
        )


def run(bench: HierarchicalBench, threads: int) -> list[dict[str, Any]]:
    """Run the benchmark on this rank and return the results, the same on every rank."""
    inputs = make_inputs(bench.shape, dist.get_rank())
    group = dist.group.WORLD
    auto = make_dispatcher(bench.experts, group, traffic=Traffic(bench.top_k, bench.hidden)).name
    contestants = [_Contestant(name, bench, inputs) for name in CONTESTANTS]
    say(f"comparing the results of {', '.join(CONTESTANTS)} with plain torch")
    for contestant in contestants:
        contestant.check(bench.shape)
    phases = {
        contestant.name: (("forward", contestant.forward), ("backward", contestant.backward))
        for contestant in contestants
    }
    say(f"measuring {bench.warmup} (discarded) + {bench.rounds} rounds")
    stats = measure_interleaved(phases, bench.warmup, bench.rounds)
    results = []
    for contestant in contestants:
        times = {f"{phase}_ms": stats[contestant.name, phase]["median_ms"] for phase in ("forward", "backward")}
        times |= times_of(stats[contestant.name, "total"], "total")
        speedup = stats[BASELINE, "total"]["median_ms"] / times["total_ms"]
        counted_bytes, link_bytes = _sent_bytes(contestant, bench)
        row: dict[str, Any] = {
            "contestant": contestant.name,
            "auto": contestant.deterministic and contestant.dispatcher.name == auto,
        }
        row |= times | {
            "speedup": speedup,
            "counted_bytes": counted_bytes,
            "link_bytes": link_bytes,
        }
        results.append(row)
    return results


def _sent_bytes(contestant: _Contestant, bench: HierarchicalBench) -> tuple[int | None, int]:
    """Return the bytes that all ranks send to other hosts in one forward and backward: of rows, weights and ids, and by
    the interfaces of all hosts."""
    dist.barrier()
    counted, before = _counted(contestant, bench), interface_bytes().sent
    dist.barrier()
    contestant.forward()
    contestant.backward()
    dist.barrier()
    if isinstance(contestant.dispatcher, HierarchicalDispatcher):
        counted = _counted(contestant, bench) - counted
    by_rank = gather((str(Path("/proc/self/ns/net").readlink()), interface_bytes().sent - before, counted))
    # Ranks of one host share its network namespace and interface, so each is counted once.
    sent_by_namespace = {namespace: sent for namespace, sent, _ in by_rank}
    return sum(of_rank for _, _, of_rank in by_rank) or None, sum(sent_by_namespace.values())


def _counted(contestant: _Contestant, bench: HierarchicalBench) -> int:
    """Return the bytes that this rank has sent to other hosts, or for ``all_to_all`` those that it sends in a call."""
    if isinstance(contestant.dispatcher, HierarchicalDispatcher):
        return sum(operation.total for operation in contestant.dispatcher.wire_bytes.values())
    if contestant.name != "all_to_all":
        return 0
    host, ids_TK = dist.get_rank() // bench.ranks_per_host, contestant.inputs.ids_TK
    first, last = contestant.dispatcher.placement.offsets[:: bench.ranks_per_host][host : host + 2]
    slots = int(((ids_TK < first) | (ids_TK >= last)).sum())
    # One fp32 row in each of the four operations, and the weight and its gradient in the backward of combine.
    return slots * (4 * 4 * bench.hidden + 4 + 4)


def main(bench: HierarchicalBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench hierarchical``, see ``run_benchmark``."""
    return run_benchmark(lambda: _measure(bench), tables, json_out)


def _measure(bench: HierarchicalBench) -> dict[str, Any]:
    results, links = on_hosts(run, bench, bench.hosts, bench.ranks_per_host, bench.link_gbit)
    settings = asdict(bench)
    return {"benchmark": "hierarchical", "results": results, "link_gbit_measured": links, "settings": settings}


COLUMNS: tuple[report.Column, ...] = (
    ("", "contestant"),
    ("forward ms", "forward_ms"),
    ("backward ms", "backward_ms"),
    *report.timed("total ms"),
    (f"than {BASELINE}", lambda row: report.faster_or_slower(1 / row["speedup"])),
    ("rows MB", lambda row: "" if row["counted_bytes"] is None else f"{row['counted_bytes'] / 1e6:.1f}"),
    ("on the links MB", lambda row: "" if row["link_bytes"] is None else f"{row['link_bytes'] / 1e6:.1f}"),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of times and inter-host bytes of each backend."""
    s = result["settings"]
    heading = (
        f"{report.hosts(s, result['link_gbit_measured'], 'ranks')}, {s['tokens']} tokens per rank, "
        f"D {s['hidden']}, E {s['experts']}, K {s['top_k']}, float32; {report.machine(result)}"
    )
    caption = report.captions("MB: sent between hosts by all ranks, forward and backward")
    return [report.make_table(heading, COLUMNS, result["results"], caption)]
