"""Which sequence stands where in which batch: a function of the seed and the step, and of nothing else.

    step, row of the batch ──▶ number of the sequence in the run ──▶ source, number within it ──▶ epoch, sequence
                               step * batch + row                    Mixture                      Permutation

No state is carried from step to step, so ranks agree without talking, any number of ranks sees the same batches, and
a resumed run goes on where the saved one stopped.
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
U64 = npt.NDArray[np.uint64]


def _mix(x: U64) -> U64:
    """SplitMix64's finalizer (Steele et al., OOPSLA 2014): each bit of the result depends on every bit of ``x``."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """An order of range(n) that needs no memory: a Feistel network over the next power of four, walked along its
    cycles until a number falls below n (Black and Rogaway, CT-RSA 2002).

    Args:
        key: non-negative integers; each gives another order.
    """

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        self.n = n
        self._half = np.uint64(max(3, ((n - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys: U64 = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)

    def __call__(self, place_N: Ints) -> Ints:
        """Which number stands at each place; places in [0, n)."""
        x = self._shuffle(place_N.astype(np.uint64))
        while (outside := x >= self.n).any():
            x[outside] = self._shuffle(x[outside])
        return x.astype(np.int64)

    def _shuffle(self, x: U64) -> U64:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


class Mixture:
    """Takes turns between sources so that, at any time, each has had its share to within one sequence.

    The turns repeat after a period. Within it, the j-th turn of a source with n turns may come from j * period / n on
    and must come before (j + 1) * period / n; the earliest deadline goes first, which meets them all (Baruah et al.,
    "Proportionate progress", Algorithmica 1996).

    Args:
        weights: positive. Their shares are kept exactly where they have a common denominator up to 65536 (0.7 and 0.3
            have 10), else rounded to 65536ths, at least one.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.turns = _turns(weights)
        self.period = sum(self.turns)
        self._source_P = np.empty(self.period, np.int64)
        # Released: (deadline, source, j); to come: (release, deadline, source, j).
        pending = [(0, math.ceil(Fraction(self.period, n)), s, 0) for s, n in enumerate(self.turns)]
        ready: list[tuple[int, int, int]] = []
        heapq.heapify(pending)
        for place in range(self.period):
            while pending and pending[0][0] <= place:
                _, deadline, s, j = heapq.heappop(pending)
                heapq.heappush(ready, (deadline, s, j))
            _, s, j = heapq.heappop(ready)
            self._source_P[place] = s
            n, j = self.turns[s], j + 1
            if j < n:
                heapq.heappush(pending, (j * self.period // n, -(-(j + 1) * self.period // n), s, j))
        self._places = [np.flatnonzero(self._source_P == s) for s in range(len(self.turns))]

    def source(self, number_N: Ints) -> Ints:
        """The source of the sequences with these numbers."""
        return self._source_P[number_N % self.period]

    def count(self, source: int, number_N: Ints) -> Ints:
        """How many of the sequences before each number are from ``source``."""
        rounds, place = np.divmod(number_N, self.period)
        result: Ints = rounds * self.turns[source] + np.searchsorted(self._places[source], place)
        return result


def _turns(weights: Sequence[float]) -> list[int]:
    """Turns of each source in a period, in proportion to its weight."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    turns = [max(1, int(share * MAX_PERIOD)) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda s: (turns[s] - shares[s] * MAX_PERIOD, s))
    for s in by_rest[: max(0, MAX_PERIOD - sum(turns))]:
        turns[s] += 1
    return turns


@dataclass(frozen=True)
class Supply:
    """What the sampler knows of a source: ``sequences`` in an epoch; endless ones are numbered on and on."""

    name: str
    digest: str
    sequences: int
    weight: float
    endless: bool = False


@dataclass(frozen=True)
class Places:
    """Where the sequences of a batch are: source and index within it, [B] each."""

    source_B: Ints
    index_B: Ints


class Sampler:
    """The order of the training data.

    Args:
        settings: everything else that changes what a step sees; kept in the state and compared on resuming.
    """

    def __init__(
        self, supplies: Sequence[Supply], batch: int, seed: int, shuffle: bool, settings: dict[str, Any]
    ) -> None:
        self.supplies = list(supplies)
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.mixture = Mixture([supply.weight for supply in supplies])
        self.settings = {"batch": batch, "seed": seed, "shuffle": shuffle, **settings}
        self._order = lru_cache(maxsize=4 * len(self.supplies))(self._permutation)

    def places(self, step: int) -> Places:
        """The sequences of the batch of ``step`` (from 0)."""
        number_B = np.arange(step * self.batch, (step + 1) * self.batch)
        source_B = self.mixture.source(number_B)
        index_B = np.empty(self.batch, np.int64)
        for s in np.unique(source_B):
            rows = np.flatnonzero(source_B == s)
            index_B[rows] = self._indices(int(s), self.mixture.count(int(s), number_B[rows]))
        return Places(source_B, index_B)

    def consumed(self, step: int) -> list[int]:
        """Sequences taken from each source before ``step``."""
        return [int(self.mixture.count(s, np.array(step * self.batch))) for s in range(len(self.supplies))]

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint taken before ``step`` keeps; plain JSON."""
        return {
            "version": 1,
            "step": step,
            "settings": self.settings,
            "sources": [
                {
                    "name": supply.name,
                    "digest": supply.digest,
                    "weight": supply.weight,
                    "consumed": consumed,
                    "epoch": consumed // supply.sequences,
                }
                for supply, consumed in zip(self.supplies, self.consumed(step), strict=True)
            ],
        }

    def resume(self, state: dict[str, Any]) -> int:
        """The step to go on with.

        Raises:
            ConfigError: the saved run read other data, or in another order; the message names each difference.
        """
        try:
            step = int(state["step"])
            mine = self.state(step)
            changed = _differences(state, mine)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the checkpoint's sampler state cannot be read: {error!r}") from error
        if changed:
            raise ConfigError(
                "the data is not what the checkpoint was trained on: "
                + "; ".join(changed)
                + ". Restore it, or start a new run from the checkpoint's weights"
            )
        return step

    def _indices(self, source: int, number_N: Ints) -> Ints:
        supply = self.supplies[source]
        if supply.endless:
            return number_N
        epoch_N, place_N = np.divmod(number_N, supply.sequences)
        if not self.shuffle:
            return place_N
        index_N = np.empty_like(place_N)
        for epoch in np.unique(epoch_N):
            rows = epoch_N == epoch
            index_N[rows] = self._order(source, int(epoch))(place_N[rows])
        return index_N

    def _permutation(self, source: int, epoch: int) -> Permutation:
        return Permutation(self.supplies[source].sequences, (self.seed, source, epoch))


def _differences(saved: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    if saved["version"] != mine["version"]:
        return [f"the state has version {saved['version']}, this moe_comm reads {mine['version']}"]
    changed = [
        f"data.{key} was {saved['settings'].get(key)!r} and is {mine['settings'].get(key)!r}"
        for key in sorted({*saved["settings"], *mine["settings"]})
        if saved["settings"].get(key) != mine["settings"].get(key)
    ]
    names = [[source["name"] for source in state["sources"]] for state in (saved, mine)]
    if names[0] != names[1]:
        return [*changed, f"the sources were {', '.join(names[0])} and are {', '.join(names[1])}"]
    for old, new in zip(saved["sources"], mine["sources"], strict=True):
        if old["digest"] != new["digest"]:
            changed.append(f"source {old['name']!r} has other tokens (its text or the tokenizer changed)")
        if old["weight"] != new["weight"]:
            changed.append(f"the weight of source {old['name']!r} was {old['weight']} and is {new['weight']}")
        elif not changed and old["consumed"] != new["consumed"]:
            changed.append(f"source {old['name']!r} stood at {old['consumed']} sequences, here at {new['consumed']}")
    return changed
