"""Whatever ranks do to each other: a right result, or one typed error on every rank before its deadline.

Hypothesis draws sequences of dispatch, combine and backward on two dispatchers, with deviations of one rank: bad input,
mixed-up handles and dispatchers, exceptions, a kill. What failed is printed as a ``Sequence``, shrunk; put it into
``FAILED_ONCE`` to run it with every change. A rank that hangs is ended by the run's deadline, which prints all stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings

from moe_comm import errors
from tests.attack import ranks
from tests.attack.ranks import Outcome
from tests.attack.sequences import BACKENDS, Odd, Sequence, Step, sequences
from tests.pool import RankPool

pytest.importorskip("moe_comm._C", reason="the native core is not built")

RUN_S = 60.0
FEW, MANY = 17, 334
"""Sequences of each backend: 100 and 2,000 in all."""

FAILED_ONCE: dict[str, Callable[[str], Sequence]] = {
    "the handle of another dispatcher, with as many rows": lambda backend: Sequence(
        backend,
        2,
        (Step("dispatch"), Step("dispatch", 1), Step("combine", odd=Odd(1, "other handle")), Step("combine")),
    ),
    "strides where there are no rows": lambda backend: Sequence(
        backend, 2, (Step("dispatch"), Step("combine", strides="transposed"), Step("backward")), (1, 1)
    ),
    "a dispatcher that only one rank called is called by all": lambda backend: Sequence(
        backend, 2, (Step("dispatch", odd=Odd(1, "other dispatcher")), Step("dispatch"), Step("dispatch", 1))
    ),
    "rows of another width, unchecked": lambda backend: Sequence(
        backend, 2, (Step("dispatch"), Step("combine", odd=Odd(1, "bad rows")), Step("combine")), checked=False
    ),
}
"""Sequences that failed once, by description."""


class Pools:
    """Ranks by number; fresh ones after whatever may have left them in a bad state."""

    def __init__(self) -> None:
        self._made: dict[int, RankPool] = {}

    def run(self, sequence: Sequence) -> list[list[Outcome]]:
        """Outcomes of each rank; of a killed one none."""
        if sequence.world == 1:
            return [ranks.run(0, 1, sequence)]
        pool = self._made.setdefault(sequence.world, RankPool(sequence.world))
        killed = sequence.killed
        found = pool.run(ranks.run, sequence, RUN_S, expect_dead=killed)
        return [outcomes or [] for outcomes in found]

    def drop(self, world: int) -> None:
        """End the ranks of pools of this size."""
        if world in self._made:
            self._made.pop(world).close()

    def close(self) -> None:
        for world in list(self._made):
            self.drop(world)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


def attack(pools: Pools, sequence: Sequence) -> None:
    """Run ``sequence`` and check every step."""
    ended = True
    try:
        found = pools.run(sequence)
        ended = check(sequence, found)
    finally:
        if ended:
            pools.drop(sequence.world)


def check(sequence: Sequence, found: list[list[Outcome]]) -> bool:
    """Raise unless each step is as it should be; return whether the group was lost."""
    alive = [rank for rank in range(sequence.world) if rank not in sequence.killed]
    dead, dispatched = False, 0
    for place, step in enumerate(sequence.steps):
        odd = sequence.deviation(step)
        dead = dead or (odd is not None and odd.how == "kill")
        outcomes = {rank: found[rank][place] for rank in alive}
        where = f"step {place}, {step}: {outcomes}"
        kinds = {kind for kind, _ in outcomes.values()}
        if kinds == {"none"}:
            continue
        if dead:
            assert kinds == {"PeerDied"}, where
            return True
        if odd is not None and odd.how == "other handle" and dispatched < 2:
            odd = None  # there is no other one
        dispatched += step.kind == "dispatch" and kinds == {""}
        if odd is None:
            assert kinds == {""}, where
        elif odd.how == "raise":
            expected = "PeerRaised" if sequence.handshakes else "PeerError"
            assert outcomes.get(odd.rank, ("Boom", ""))[0] == "Boom", where
            assert {kind for rank, (kind, _) in outcomes.items() if rank != odd.rank} <= {expected}, where
            if expected == "PeerError" and sequence.world > 1:
                return True
        else:
            assert len(kinds) == 1 and kinds <= EXPECTED[odd.how], where
            assert issubclass(getattr(errors, next(iter(kinds))), errors.MoeCommError)
    return dead


EXPECTED = {
    "bad id": {"RoutingError"},
    "other dispatcher": {"RankMismatch", "RoutingError"},  # it may have fewer experts
    "bad rows": {"InputError"},
    "other handle": {"InputError", "RankMismatch"},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_result_or_one_typed_error_on_every_rank(backend: str, pools: Pools) -> None:
    draw_and_attack(backend, pools, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_result_or_one_typed_error_on_every_rank_many_times(backend: str, pools: Pools) -> None:
    draw_and_attack(backend, pools, MANY)


def draw_and_attack(backend: str, pools: Pools, number: int) -> None:
    @settings(max_examples=number)
    @given(sequences(backend))
    def draw(sequence: Sequence) -> None:
        attack(pools, sequence)

    draw()


@pytest.mark.parametrize("name", FAILED_ONCE)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_what_failed_once(backend: str, name: str, pools: Pools) -> None:
    attack(pools, FAILED_ONCE[name](backend))
