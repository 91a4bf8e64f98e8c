"""The number of chunks of a layer that is called again and again, chosen while it runs (Tutel, arXiv 2206.03382).

    calls    1 2 4 8 16  1 2 4 8 16  1 2 4 8 16  1 2 4 8 16 │ 4 4 4 4 4 4 ... 4 │ 4 4 4 ... 4 │ 1 2 4 8 16 ...
             warm-up     trials, whose median counts        │ the best          │ as many     │ rows changed
                                                            ▲ agree             ▲ agree       ▲ agree

Whatever it picks, the layer's bits are the same; only its time differs. All ranks must pick alike, for they cut the
same transfers, and times and rows differ between them. So what is picked depends on two things that do not: how often
the layer was called, and what ranks agreed on, which they do at calls that are counted, too: when a round of trials
ends, and every ``check_every`` calls from then on. No call in between says anything to anybody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from moe_comm.comm.meeting import channel_of, group_size
from moe_comm.errors import ConfigError
from moe_comm.overlap.cost import CHUNKS
from moe_comm.overlap.options import at_least_one

Agree = Callable[[Sequence[float]], Sequence[float]]
"""Collective: the largest of each number over the ranks."""


@dataclass(frozen=True)
class Trials:
    """How to try. candidates: numbers of chunks, the first of which is picked where times say nothing. warmup, rounds:
    times that each is tried, without and with its time noted. check_every: calls after which ranks compare how many
    rows they have. changed: how many times as many, or as few, rows make it try again.

    Raises:
        ConfigError: nothing to choose from, or a number that is not one.
    """

    candidates: tuple[int, ...] = CHUNKS
    warmup: int = 1
    rounds: int = 3
    check_every: int = 64
    changed: float = 2.0

    def __post_init__(self) -> None:
        if not self.candidates or len(set(self.candidates)) < len(self.candidates):
            raise ConfigError(f"candidates must be different numbers of chunks, at least one; got {self.candidates}")
        for name, value in (("rounds", self.rounds), ("check_every", self.check_every)):
            at_least_one(name, value)
        for chunks in self.candidates:
            at_least_one("a candidate", chunks)
        if self.warmup < 0 or not self.changed > 1:
            raise ConfigError(f"warmup must be at least 0 and changed above 1; got {self.warmup} and {self.changed}")


class RunningChoice:
    """Says before each call of a layer how many chunks to use, and learns afterwards how long it took.

        chunks = choice.next(rows)         # every rank, at every call
        ...                                # the layer, in so many chunks
        choice.took(seconds, chunks)       # where it was measured: of the forward pass, or of both

    Args:
        group: whose ranks must pick alike; None: one rank.
        agree: instead of the group's collective, for tests.
    """

    def __init__(
        self, group: ProcessGroup | None = None, trials: Trials | None = None, agree: Agree | None = None
    ) -> None:
        self.trials = trials or Trials()
        self._agree = agree or slowest_of(group)
        self._rows, self._most_rows, self._calls = 0.0, 0, 0
        self._begin()

    @property
    def settled(self) -> int | None:
        """What was found best; None while it is being tried."""
        return self._best

    def next(self, rows: int) -> int:
        """How many chunks the next call uses. Collective when a round of trials ends, and at times after that.

        Args:
            rows: of this rank; ranks may have different numbers.
        """
        trials = self.trials
        if self._best is None and self._calls == len(trials.candidates) * (trials.warmup + trials.rounds):
            self._settle()
        elif self._best is not None and self._calls == trials.check_every:
            self._check()
        call = self._calls
        self._calls, self._most_rows = call + 1, max(self._most_rows, rows)
        return self._best if self._best is not None else trials.candidates[call % len(trials.candidates)]

    def took(self, seconds: float, chunks: int) -> None:
        """A call in ``chunks`` took so long on this rank. Calls that nobody timed need not be told of.

        Where several calls are under way, tell them in the order of the calls.
        """
        if self._best is None and math.isfinite(seconds) and chunks in self._times:
            self._times[chunks].append(seconds)

    def _begin(self) -> None:
        """Try all candidates from now on."""
        self._best: int | None = None
        self._calls, self._most_rows = 0, 0
        self._times: dict[int, list[float]] = {chunks: [] for chunks in self.trials.candidates}

    def _settle(self) -> None:
        """Pick what was fastest at the slowest rank. A candidate that some rank did not time is out."""
        timed = (times[self.trials.warmup :] for times in self._times.values())
        medians = [statistics.median(times) if times else math.inf for times in timed]
        *slowest, self._rows = self._agree([*medians, float(self._most_rows)])
        self._best = self.trials.candidates[min(range(len(slowest)), key=lambda i: slowest[i])]
        self._calls, self._most_rows = 0, 0

    def _check(self) -> None:
        """Try again if the rows of the rank with the most have changed since the trials."""
        (rows,) = self._agree([float(self._most_rows)])
        low, high = sorted((max(rows, 1.0), max(self._rows, 1.0)))
        if high > self.trials.changed * low:
            self._begin()
        else:
            self._calls, self._most_rows = 0, 0


def slowest_of(group: ProcessGroup | None) -> Agree:
    """The largest of each number over the ranks of ``group``; one small exchange."""

    def agree(values: Sequence[float]) -> Sequence[float]:
        if group is None or group_size(group) == 1:
            return values
        channel = channel_of(group)
        said = torch.tensor(values, dtype=torch.float64, device=channel.control_device)
        found: list[float] = channel.all_gather(said, "choosing a layer's chunks").amax(0).tolist()
        return found

    return agree
