"""Contestants of ``bench dispatch``, and the measurement loop. The MPI benchmark uses both, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from moe_comm.bench.common.clock import Clock
from moe_comm.bench.common.inputs import RankInputs, check_result, expected_rows, expected_y
from moe_comm.bench.common.interleave import run_rounds
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.bench.dispatch.torch_permute import Exchange, Permute
from moe_comm.topology import ExpertPlacement

TimedPhase = tuple[str | None, Callable[[], None]]
"""Name and function of a phase. A phase named None is not timed."""


class Contestant(Protocol):
    """An implementation that ``measure`` times."""

    name: str

    def steps(self) -> list[TimedPhase]:
        """Return the phases of one iteration, in order."""

    def check(self) -> dict[str, float]:
        """Compare the results with plain torch and return the error by operation. Collective.

        Raises:
            WrongAnswer: an error is larger than the tolerance.
        """


class TorchPeer:
    """Contestant that dispatches and combines with torch permutations and an all-to-all. Forward only."""

    def __init__(
        self, name: str, exchange: Exchange, settings: DispatchBench, rank: int, inputs: RankInputs, *, tuned: bool
    ) -> None:
        placement = ExpertPlacement.balanced(settings.experts, settings.ranks)
        self.name, self.settings, self.rank, self.inputs = name, settings, rank, inputs
        self.permute = Permute(exchange, placement, rank, tuned=tuned)
        local = placement.local_range(rank)
        self.scale_L = inputs.scale_E[local.start : local.stop]

    def _dispatch(self) -> None:
        self.rows_RD, self.sent = self.permute.dispatch(self.inputs.x_TD, self.inputs.ids_TK)

    def _experts(self) -> None:
        counts_L = torch.tensor(self.sent.recv_counts, dtype=torch.int64, device="cpu").sum(0)
        self.out_RD = self.rows_RD * self.scale_L.repeat_interleave(counts_L)[:, None]

    def _combine(self) -> None:
        self.y_TD = self.permute.combine(self.out_RD, self.inputs.weights_TK, self.sent)

    def _free(self) -> None:
        del self.rows_RD, self.sent, self.out_RD, self.y_TD

    def steps(self) -> list[TimedPhase]:
        return [("dispatch", self._dispatch), (None, self._experts), ("combine", self._combine), (None, self._free)]

    def check(self) -> dict[str, float]:
        self._dispatch()
        check_result(self.name, "dispatch", self.rows_RD, expected_rows(self.settings, self.rank), bits=True)
        self._experts()
        self._combine()
        error = check_result(self.name, "combine", self.y_TD, expected_y(self.inputs), bits=False)
        self._free()
        return {"combine": error}


def measure(contestants: Iterable[Contestant], clock: Clock, settings: DispatchBench) -> None:
    """Time the phases of all contestants in interleaved rounds. All ranks start each phase at the same time."""

    def measure_steps(contestant: Contestant, _: int) -> None:
        for phase, work in contestant.steps():
            if phase is None:
                work()
            else:
                clock.measure(contestant.name, (phase, work), in_a_row=settings.in_a_row)

    run_rounds(list(contestants), measure_steps, clock, settings.warmup, settings.rounds, collect_s=math.inf)
