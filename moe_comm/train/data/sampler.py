"""The order of the training sequences, as a function of the seed and the step only.

    step, row of the batch ──▶ number of the sequence in the run ──▶ source, number within it ──▶ epoch, sequence
                               step * batch + row                    Mixture                      Permutation

There is no state between steps. So ranks agree without communication, the batches do not depend on the number of ranks,
and a resumed run continues exactly where the saved one stopped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError
from moe_comm.train.data.tokenfile import Ints

MAX_PERIOD = 1 << 16
ROUNDS = 6
"""Rounds of the Feistel network of a ``Permutation``."""
U64 = npt.NDArray[np.uint64]


def _mix(x: U64) -> U64:
    """SplitMix64's finalizer (Steele et al., OOPSLA 2014): each bit of the result depends on every bit of ``x``."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A permutation of range(n) that needs no memory.

    It is a Feistel network over the next power of four, iterated until the number is below n (cycle walking: Black and
    Rogaway, CT-RSA 2002).

    Args:
        key: non-negative integers; each key gives another permutation.
    """

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        self.n = n
        self._half = np.uint64(max(3, ((n - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys: U64 = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)

    def __call__(self, position_N: Ints) -> Ints:
        """Return the numbers at the given positions in [0, n)."""
        x = self._shuffle(position_N.astype(np.uint64))
        while (outside := x >= self.n).any():
            x[outside] = self._shuffle(x[outside])
        return x.astype(np.int64)

    def _shuffle(self, x: U64) -> U64:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


class Mixture:
    """Alternates between sources. At any time, each source has had its share to within one sequence.

    The order of sources repeats after a period. In a period, the j-th draw from a source with n draws is released at
    j * period / n and has the deadline (j + 1) * period / n. The earliest deadline is first, which meets all deadlines
    (Baruah et al., "Proportionate progress", Algorithmica 1996).

    Args:
        weights: positive. Shares are exact if they have a common denominator of at most 65536 (0.7 and 0.3 have 10).
            Otherwise they are rounded to multiples of 1/65536, at least one.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.draws = _draws(weights)
        self.period = sum(self.draws)
        self._source_P = np.empty(self.period, np.int64)
        # Released turns: (deadline, source, j). Pending turns: (release, deadline, source, j).
        pending = [(0, math.ceil(Fraction(self.period, n)), s, 0) for s, n in enumerate(self.draws)]
        ready: list[tuple[int, int, int]] = []
        heapq.heapify(pending)
        for position in range(self.period):
            while pending and pending[0][0] <= position:
                _, deadline, s, j = heapq.heappop(pending)
                heapq.heappush(ready, (deadline, s, j))
            _, s, j = heapq.heappop(ready)
            self._source_P[position] = s
            n, j = self.draws[s], j + 1
            if j < n:
                heapq.heappush(pending, (j * self.period // n, -(-(j + 1) * self.period // n), s, j))
        self._positions = [np.flatnonzero(self._source_P == s) for s in range(len(self.draws))]

    def source(self, number_N: Ints) -> Ints:
        """Return the source of the sequences with these numbers."""
        return self._source_P[number_N % self.period]

    def count(self, source: int, number_N: Ints) -> Ints:
        """Return how many sequences before each number are from ``source``."""
        rounds, position = np.divmod(number_N, self.period)
        result: Ints = rounds * self.draws[source] + np.searchsorted(self._positions[source], position)
        return result


def _draws(weights: Sequence[float]) -> list[int]:
    """Return how many of every ``period`` sequences come from each source, in proportion to the weights."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    draws = [max(1, int(share * MAX_PERIOD)) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda s: (draws[s] - shares[s] * MAX_PERIOD, s))
    for s in by_rest[: max(0, MAX_PERIOD - sum(draws))]:
        draws[s] += 1
    return draws


@dataclass(frozen=True)
class SampledSource:
    """A source of the sampler, with ``sequences`` per epoch. An endless one has a sequence for every number."""

    name: str
    digest: str
    sequences: int
    weight: float
    endless: bool = False


@dataclass(frozen=True)
class SequenceIndices:
    """The sequences of a batch, [B] each: source, and index within the source. Index -1 is padding."""

    source_B: Ints
    index_B: Ints


class Sampler:
    """The order of the training data.

    Args:
        settings: other settings that change the data of a step. They are saved and compared when a run resumes.
    """

    def __init__(
        self, sources: Sequence[SampledSource], batch: int, seed: int, shuffle: bool, settings: dict[str, Any]
    ) -> None:
        self.sources = list(sources)
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.mixture = Mixture([source.weight for source in sources])
        self.settings = {"batch": batch, "seed": seed, "shuffle": shuffle, **settings}
        self._order = lru_cache(maxsize=4 * len(self.sources))(self._permutation)

    def indices(self, step: int) -> SequenceIndices:
        """Return the sequences of the batch of ``step`` (from 0)."""
        number_B = np.arange(step * self.batch, (step + 1) * self.batch)
        source_B = self.mixture.source(number_B)
        index_B = np.empty(self.batch, np.int64)
        for s in np.unique(source_B):
            rows = np.flatnonzero(source_B == s)
            index_B[rows] = self._indices(int(s), self.mixture.count(int(s), number_B[rows]))
        return SequenceIndices(source_B, index_B)

    def consumed(self, step: int) -> list[int]:
        """Return the number of sequences taken from each source before ``step``."""
        return [int(self.mixture.count(s, np.array(step * self.batch))) for s in range(len(self.sources))]

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON state for a checkpoint before ``step``."""
        return {
            "version": 1,
            "step": step,
            "settings": self.settings,
            "sources": [
                {
                    "name": source.name,
                    "digest": source.digest,
                    "weight": source.weight,
                    "consumed": consumed,
                    "epoch": consumed // source.sequences,
                }
                for source, consumed in zip(self.sources, self.consumed(step), strict=True)
            ],
        }

    def resume(self, state: dict[str, Any]) -> int:
        """Return the step to continue with."""
        try:
            step = int(state["step"])
            current = self.state(step)
            changed = _differences(state, current)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the checkpoint's sampler state cannot be read: {error!r}") from error
        if changed:
            raise ConfigError(
                "the data differs from that of the checkpoint: "
                + "; ".join(changed)
                + ". Restore it, or start a new run from the checkpoint's weights"
            )
        return step

    def _indices(self, source: int, number_N: Ints) -> Ints:
        sampled = self.sources[source]
        if sampled.endless:
            return number_N
        epoch_N, position_N = np.divmod(number_N, sampled.sequences)
        if not self.shuffle:
            return position_N
        index_N = np.empty_like(position_N)
        for epoch in np.unique(epoch_N):
            rows = epoch_N == epoch
            index_N[rows] = self._order(source, int(epoch))(position_N[rows])
        return index_N

    def _permutation(self, source: int, epoch: int) -> Permutation:
        return Permutation(self.sources[source].sequences, (self.seed, source, epoch))


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    if saved["version"] != current["version"]:
        return [f"the state has version {saved['version']}; this moe_comm reads {current['version']}"]
    changed = [
        f"data.{key} was {saved['settings'].get(key)!r} and is {current['settings'].get(key)!r}"
        for key in sorted({*saved["settings"], *current["settings"]})
        if saved["settings"].get(key) != current["settings"].get(key)
    ]
    names = [[source["name"] for source in state["sources"]] for state in (saved, current)]
    if names[0] != names[1]:
        return [*changed, f"the sources were {', '.join(names[0])} and are {', '.join(names[1])}"]
    for old, new in zip(saved["sources"], current["sources"], strict=True):
        if old["digest"] != new["digest"]:
            changed.append(f"source {old['name']!r} has other tokens (its text or the tokenizer changed)")
        if old["weight"] != new["weight"]:
            changed.append(f"the weight of source {old['name']!r} was {old['weight']} and is {new['weight']}")
        elif not changed and old["consumed"] != new["consumed"]:
            changed.append(f"source {old['name']!r} was at sequence {old['consumed']} and is at {new['consumed']}")
    return changed
