"""MoE layers in ``bench overlap``: overlapped, serial, and Hugging Face's expert parallelism.

Forward and backward, including the router, with the same weights and inputs, interleaved. ``compute`` is the experts
only, ``comm`` is dispatch and combine only, both with their backward passes.

    serial                  d  c c c  d    d  c c c c c c  d         c: one GEMM of all rows, d: one transfer of them
    overlapped, at best     max(3 c, 2 d)  max(6 c, 2 d)             the gain is largest if d is 2 to 3 times c
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.bench.common.inputs import check_result
from moe_comm.bench.common.interleave import Phases, measure_interleaved
from moe_comm.bench.common.settings import LayerBench, OverlapBench
from moe_comm.bench.layer import benchmark as layers
from moe_comm.bench.layer.peers import HuggingFaceEPLayer, LayerWeights, MoeCommLayer
from moe_comm.bench.overlap.contest import MeasuredRates, hidden_of
from moe_comm.bench.overlap.timeline import TimelineStep, record
from moe_comm.kernels.row_invariant import TILE

GEMMS_PER_TRANSFER = 2.5
"""d / c of the layer (see above) if no width is given."""
WIDTH_MULTIPLE = 64
HF_EP = HuggingFaceEPLayer.name


class Serial(MoeCommLayer):
    """``MoELayer`` without overlap."""

    name = "serial"


class Overlapped(MoeCommLayer):
    """``MoELayer`` with overlap."""

    name = "overlapped"

    def __init__(self, settings: LayerBench, rank: int, bench: OverlapBench) -> None:
        self._overlap = bench.overlap
        super().__init__(settings, rank)

    def build(self, weights: LayerWeights) -> nn.Module:
        module: Any = super().build(weights)
        module.overlap = self._overlap
        return module  # type: ignore[no-any-return]


def settings_of(bench: OverlapBench, ffn: int) -> LayerBench:
    """Return the settings of ``bench layer`` for the layers, with a backend that uses the link."""
    return LayerBench(
        ranks=bench.world,
        tokens=bench.tokens,
        hidden=bench.hidden,
        experts=bench.num_experts,
        top_k=bench.top_k,
        seed=bench.seed,
        ffn=ffn,
        backend="all_to_all",
        memory=False,
    )


def widths(bench: OverlapBench, machine: MeasuredRates) -> tuple[int, ...]:
    """Return the expert widths to measure: ``bench.ffn``, or the width with the ratio ``GEMMS_PER_TRANSFER``."""
    if bench.ffn:
        return bench.ffn
    balanced = machine.balanced(bench.world) / GEMMS_PER_TRANSFER
    return (max(WIDTH_MULTIPLE, round(balanced / WIDTH_MULTIPLE) * WIDTH_MULTIPLE),)


class OverlapLayerContest:
    """The layers of one width. ``skipped`` is the reason why Hugging Face's layer is missing, or None."""

    def __init__(self, bench: OverlapBench, ffn: int) -> None:
        self.bench, self.ffn = bench, ffn
        settings, rank = settings_of(bench, ffn), dist.get_rank()
        self.skipped = HuggingFaceEPLayer.unavailable_reason(settings) if bench.peers else "peers=False"
        contestants: list[Any] = [Serial(settings, rank), Overlapped(settings, rank, bench)]
        if self.skipped is None:
            contestants.append(HuggingFaceEPLayer(settings, rank))
        inputs = layers.make_inputs(settings, rank)
        self.runners = {contestant.name: layers.ContestantRun(contestant, *inputs) for contestant in contestants}
        self._inputs = inputs
        # Sends the messages of the overlapped layer and computes next to nothing.
        self.narrow = layers.ContestantRun(Overlapped(settings_of(bench, TILE), rank, bench), *inputs)

    def check(self) -> None:
        """Compare the results: serial and overlapped in bits, Hugging Face's with a tolerance. Collective."""
        results = []
        for name in (Serial.name, Overlapped.name):
            runner = self.runners[name]
            runner.forward()
            runner.backward()
            results.append(runner.results())
            runner.free()
        for what, expected in results[0].items():
            check_result("MoE layer", what, results[1][what], expected, bits=True)
        if HF_EP in self.runners:
            layers.check([self.runners[Serial.name], self.runners[HF_EP]])

    def measure(self) -> dict[str, Any]:
        """Return the times in milliseconds and the speedups. Collective."""
        phases = {
            name: (("forward", runner.forward), ("backward", runner.backward)) for name, runner in self.runners.items()
        }
        contestants: dict[str, Phases] = {**phases, "compute": self._compute(), "comm": self._comm()}
        contestants["chunked_comm"] = (("forward", self.narrow.forward), ("backward", self.narrow.backward))

        def on_done(name: str) -> None:
            if name in self.runners:
                self.runners[name].free()
            elif name == "chunked_comm":
                self.narrow.free()

        stats = measure_interleaved(
            contestants, self.bench.warmup, self.bench.rounds, seconds=self.bench.seconds, on_done=on_done
        )
        row: dict[str, Any] = {"op": "moe_layer", "direction": "forward and backward", "ffn": self.ffn}
        for name in contestants:
            key = "hf_ep" if name == HF_EP else name
            for phase in ("forward", "backward", "total"):
                row[f"{key}_ms" if phase == "total" else f"{key}_{phase}_ms"] = stats[name, phase]["median_ms"]
        for which in ("min_ms", "p90_ms"):
            row |= {f"{name}_{which}": stats[name, "total"][which] for name in (Serial.name, Overlapped.name)}
        row |= hidden_of(row)
        row["comm_share"] = row["comm_ms"] / row["serial_ms"]
        row["speedup_vs_serial"] = row["serial_ms"] / row["overlapped_ms"]
        hf_ms = row.get("hf_ep_ms")
        row["speedup_vs_hf_ep"] = None if hf_ms is None else hf_ms / row["overlapped_ms"]
        return row | {"rounds": stats[Serial.name, "total"]["iterations"], "skipped": self.skipped}

    def timelines(self) -> list[TimelineStep]:
        """Record one step of the serial and of the overlapped layer. Collective."""
        steps = []
        for name in (Serial.name, Overlapped.name):
            runner = self.runners[name]

            def step(runner: layers.ContestantRun = runner) -> None:
                runner.forward()
                runner.backward()
                runner.free()

            steps.append(record(f"MoE layer of width {self.ffn}", name, step))
        return steps

    def close(self) -> None:
        """Release the resources of the layers. Collective."""
        for runner in (*self.runners.values(), self.narrow):
            runner.contestant.close()

    def _compute(self) -> Phases:
        """Return forward and backward of the experts only."""
        module: Any = self.runners[Serial.name].contestant.module
        with torch.no_grad():
            routing = module.router(self._inputs[0], 1)
            dispatched = module.dispatcher.dispatch(self._inputs[0], routing.ids_TK)
        rows, sizes = dispatched.rows_RD.detach().requires_grad_(), dispatched.handle.rows_per_expert
        grad, leaves = torch.ones_like(rows), (rows, module.experts.w13, module.experts.w2)
        return _phases(lambda: module.experts(rows, sizes), leaves, lambda: grad)

    def _comm(self) -> Phases:
        """Return forward and backward of dispatch and combine only."""
        module: Any = self.runners[Serial.name].contestant.module
        x_TD, grad_TD = self._inputs
        with torch.no_grad():
            routing = module.router(x_TD, 1)
        x, weights = x_TD.clone().requires_grad_(), routing.weights_TK.detach().requires_grad_()

        def forward() -> Tensor:
            dispatched = module.dispatcher.dispatch(x, routing.ids_TK)
            y: Tensor = module.dispatcher.combine(dispatched.rows_RD, weights, dispatched.handle)
            return y

        return _phases(forward, (x, weights), lambda: grad_TD)


def _phases(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Callable[[], Tensor]) -> Phases:
    """Return the phases forward and backward."""
    outputs: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs.pop(), leaves, grad())

    return ("forward", lambda: outputs.append(forward())), ("backward", backward)
