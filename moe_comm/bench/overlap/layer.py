"""Whole MoE layers in ``bench overlap``: with and without overlap, and Hugging Face's expert parallelism beside them.

Forward and backward, router included, the same weights and input for all, taking turns. ``compute`` is the experts
alone, ``comm`` dispatch and combine alone, both with their backward passes.

    one after the other    d  c c c  d    d  c c c c c c  d         c: a product of all rows, d: a transfer of them
    overlapped, at best    max(3 c, 2 d)  max(6 c, 2 d)             most is to be had where d is 2 to 3 c
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.bench.common.case import require
from moe_comm.bench.common.race import Phases, race
from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer import benchmark as layers
from moe_comm.bench.layer.ours import Ours
from moe_comm.bench.layer.peers import HuggingFaceEP, Weights
from moe_comm.bench.overlap.case import Machine, OverlapBench, hidden_of
from moe_comm.bench.overlap.timeline import Step, record

PRODUCTS_PER_TRANSFER = 2.5
"""d over c of a layer whose width is not given."""
WIDTHS = 64
"""It is a multiple of this."""
HF_EP = HuggingFaceEP.name


class Serial(Ours):
    """``MoELayer``, one step after the other."""

    name = "serial"


class Overlapped(Ours):
    """``MoELayer`` with overlap."""

    name = "overlapped"

    def __init__(self, settings: LayerBench, rank: int, bench: OverlapBench) -> None:
        self._overlap = bench.overlap
        super().__init__(settings, rank)

    def build(self, weights: Weights) -> nn.Module:
        module: Any = super().build(weights)
        module.overlap = self._overlap
        return module  # type: ignore[no-any-return]


def settings_of(bench: OverlapBench, ffn: int) -> LayerBench:
    """As ``bench layer`` has them, over the link."""
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


def widths(bench: OverlapBench, machine: Machine) -> tuple[int, ...]:
    """Widths of experts to measure: those asked for, or the one with which transfers and products fit each other."""
    if bench.ffn:
        return bench.ffn
    balanced = machine.balanced(bench.world) / PRODUCTS_PER_TRANSFER
    return (max(WIDTHS, round(balanced / WIDTHS) * WIDTHS),)


class LayerContest:
    """The layers of one width. ``skipped``: why Hugging Face's is not there; None if it is."""

    def __init__(self, bench: OverlapBench, ffn: int) -> None:
        self.bench, self.ffn = bench, ffn
        settings, rank = settings_of(bench, ffn), dist.get_rank()
        self.skipped = HuggingFaceEP.why_not(settings) if bench.peers else "not asked for"
        contestants: list[Any] = [Serial(settings, rank), Overlapped(settings, rank, bench)]
        if self.skipped is None:
            contestants.append(HuggingFaceEP(settings, rank))
        inputs = layers._inputs(settings, rank)
        self.turns = {contestant.name: layers.Turn(contestant, *inputs) for contestant in contestants}
        self._settings, self._inputs = settings, inputs

    def check(self) -> None:
        """All give the same: with and without overlap in bits, Hugging Face's within rounding. Collective.

        Raises:
            WrongAnswer: they do not.
        """
        found = []
        for name in (Serial.name, Overlapped.name):
            turn = self.turns[name]
            turn.forward()
            turn.backward()
            found.append(turn.results())
            turn.drop()
        for what, want in found[0].items():
            require("MoE layer", what, found[1][what], want, bits=True)
        if HF_EP in self.turns:
            layers.check([self.turns[Serial.name], self.turns[HF_EP]], self._settings.torch_dtype)

    def measure(self) -> dict[str, Any]:
        """Milliseconds, and how much faster overlap makes it. Collective."""
        phases = {name: (("forward", turn.forward), ("backward", turn.backward)) for name, turn in self.turns.items()}
        parts: dict[str, Phases] = {**phases, "compute": self._compute(), "comm": self._comm()}

        def after(name: str) -> None:
            if name in self.turns:
                self.turns[name].drop()

        stats = race(parts, self.bench.warmup, self.bench.rounds, seconds=self.bench.seconds, after=after)
        found: dict[str, Any] = {"op": "moe_layer", "direction": "forward and backward", "ffn": self.ffn}
        for name in parts:
            for phase in ("forward", "backward", "total"):
                key = f"{_key(name)}_ms" if phase == "total" else f"{_key(name)}_{phase}_ms"
                found[key] = stats[name, phase]["median_ms"]
        found |= hidden_of(found)
        found["comm_share"] = found["comm_ms"] / found["serial_ms"]
        found["speedup_vs_serial"] = found["serial_ms"] / found["overlapped_ms"]
        hf_ms = found.get("hf_ep_ms")
        found["speedup_vs_hf_ep"] = None if hf_ms is None else hf_ms / found["overlapped_ms"]
        return found | {"rounds": stats[Serial.name, "total"]["iterations"], "skipped": self.skipped}

    def timelines(self) -> list[Step]:
        """One step of each of our two. Collective."""
        found = []
        for name in (Serial.name, Overlapped.name):
            turn = self.turns[name]

            def step(turn: layers.Turn = turn) -> None:
                turn.forward()
                turn.backward()
                turn.drop()

            found.append(record(f"MoE layer of width {self.ffn}", name, step))
        return found

    def close(self) -> None:
        """Give back what the layers hold. Collective."""
        for turn in self.turns.values():
            turn.contestant.close()

    def _compute(self) -> Phases:
        """The experts on the rows of a dispatch."""
        module: Any = self.turns[Serial.name].contestant.module
        with torch.no_grad():
            routing = module.router(self._inputs[0], 1)
            dispatched = module.dispatcher.dispatch(self._inputs[0], routing.ids_TK)
        rows, sizes = dispatched.rows_RD.detach().requires_grad_(), dispatched.handle.rows_per_expert
        grad, leaves = torch.ones_like(rows), (rows, module.experts.w13, module.experts.w2)
        return _phases(lambda: module.experts(rows, sizes), leaves, lambda: grad)

    def _comm(self) -> Phases:
        """Dispatch and combine; the experts leave rows as they are."""
        module: Any = self.turns[Serial.name].contestant.module
        x_TD, grad_TD = self._inputs
        with torch.no_grad():
            routing = module.router(x_TD, 1)
        x, weights = x_TD.clone().requires_grad_(), routing.weights_TK.detach().requires_grad_()

        def forward() -> Tensor:
            dispatched = module.dispatcher.dispatch(x, routing.ids_TK)
            found: Tensor = module.dispatcher.combine(dispatched.rows_RD, weights, dispatched.handle)
            return found

        return _phases(forward, (x, weights), lambda: grad_TD)


def _phases(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Callable[[], Tensor]) -> Phases:
    """Forward, and backward of what it gave."""
    kept: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kept.pop(), leaves, grad())

    return ("forward", lambda: kept.append(forward())), ("backward", backward)


def _key(name: str) -> str:
    return "hf_ep" if name == HF_EP else name
