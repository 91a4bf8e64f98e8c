"""Contestants of ``bench dispatch`` and how they take turns; MPI ranks and ours measure with the same code."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from moe_comm.bench.common.case import Case, expected_rows, expected_y, require
from moe_comm.bench.common.clock import Clock, Stats
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.bench.dispatch.permute import Exchange, Permute
from moe_comm.topology import ExpertPlacement

Step = tuple[str | None, Callable[[], None]]
"""A phase and its work; the phase None is not timed."""
Summary = dict[tuple[str, str], Stats]
"""Statistics of the times of each (contestant, phase)."""


class Contestant(Protocol):
    """What takes turns in ``measure``."""

    name: str

    def steps(self) -> list[Step]:
        """The phases of one iteration, in order."""

    def check(self) -> dict[str, float]:
        """Raise ``WrongAnswer`` if the results are not right; returns their errors. Collective."""


class TorchPeer:
    """Permute in torch and exchange by ``exchange``; forward."""

    def __init__(
        self, name: str, exchange: Exchange, settings: DispatchBench, rank: int, case: Case, *, tuned: bool
    ) -> None:
        placement = ExpertPlacement.balanced(settings.experts, settings.ranks)
        self.name, self.settings, self.rank, self.case = name, settings, rank, case
        self.permute = Permute(exchange, placement, rank, tuned=tuned)
        local = placement.local_range(rank)
        self.scale_L = case.scale_E[local.start : local.stop]

    def _dispatch(self) -> None:
        self.rows_RD, self.sent = self.permute.dispatch(self.case.x_TD, self.case.ids_TK)

    def _experts(self) -> None:
        counts_L = torch.tensor(self.sent.recv_counts).sum(0)
        self.results_RD = self.rows_RD * self.scale_L.repeat_interleave(counts_L)[:, None]

    def _combine(self) -> None:
        self.y_TD = self.permute.combine(self.results_RD, self.case.weights_TK, self.sent)

    def _drop(self) -> None:
        del self.rows_RD, self.sent, self.results_RD, self.y_TD

    def steps(self) -> list[Step]:
        return [("dispatch", self._dispatch), (None, self._experts), ("combine", self._combine), (None, self._drop)]

    def check(self) -> dict[str, float]:
        self._dispatch()
        require(self.name, "dispatch", self.rows_RD, expected_rows(self.settings, self.rank), bits=True)
        self._experts()
        self._combine()
        error = require(self.name, "combine", self.y_TD, expected_y(self.case), bits=False)
        self._drop()
        return {"combine": error}


def measure(contestants: Iterable[Contestant], clock: Clock, settings: DispatchBench) -> None:
    """Every contestant once per round, in turn, each phase from a common start."""
    turns = [(c.name, c.steps()) for c in contestants]
    gc.collect()
    gc.disable()
    try:
        for turn in range(settings.warmup + settings.rounds):
            if turn == settings.warmup:
                clock.clear()
            for name, steps in turns[turn % len(turns) :] + turns[: turn % len(turns)]:
                for phase, work in steps:
                    if phase is None:
                        work()
                    else:
                        clock.measure(name, (phase, work), in_a_row=settings.in_a_row)
    finally:
        gc.enable()
