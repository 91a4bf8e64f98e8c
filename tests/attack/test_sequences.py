"""Random sequences of operations give a correct result, or one typed error on every rank before the deadline.

Hypothesis draws sequences of dispatch, combine and backward on two dispatchers. One rank may deviate: bad input, a
mixed-up handle or dispatcher, an exception, a kill. Hypothesis shrinks and prints a failing example as a ``Sequence``;
add it to ``FAILED_ONCE`` to run it every time. The deadline of the run ends a rank that hangs and prints all stacks.
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

RUN_S = 120.0
FEW, MANY = 6, 334
"""Sequences per backend: about 60 and 2,000 over all backends."""

FAILED_ONCE: dict[str, Callable[[str], Sequence]] = {
    "the handle of another dispatcher, with the same number of rows": lambda backend: Sequence(
        backend,
        2,
        (Step("dispatch"), Step("dispatch", 1), Step("combine", odd=Odd(1, "other handle")), Step("combine")),
    ),
    "strides where there are no rows": lambda backend: Sequence(
        backend, 2, (Step("dispatch"), Step("combine", strides="transposed"), Step("backward")), (1, 1)
    ),
    "all ranks call a dispatcher that only one rank called before": lambda backend: Sequence(
        backend, 2, (Step("dispatch", odd=Odd(1, "other dispatcher")), Step("dispatch"), Step("dispatch", 1))
    ),
    "rows of another width, unchecked": lambda backend: Sequence(
        backend, 2, (Step("dispatch"), Step("combine", odd=Odd(1, "bad rows")), Step("combine")), checked=False
    ),
}
"""Sequences that failed once, by description."""


class Pools:
    """One pool per number of ranks. After ``drop``, the next run starts new ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, sequence: Sequence) -> list[list[Outcome]]:
        """Return the outcomes of each rank; an empty list for a killed rank."""
        if sequence.world == 1:
            return [ranks.run(0, 1, sequence)]
        pool = self._pools.setdefault(sequence.world, RankPool(sequence.world))
        killed = sequence.killed
        results = pool.run(ranks.run, sequence, RUN_S, expect_dead=killed)
        return [outcomes or [] for outcomes in results]

    def drop(self, world: int) -> None:
        """End the ranks of pools of this size."""
        if world in self._pools:
            self._pools.pop(world).close()

    def close(self) -> None:
        for world in list(self._pools):
            self.drop(world)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools_by_size = Pools()
    yield pools_by_size
    pools_by_size.close()


def attack(pools: Pools, sequence: Sequence) -> None:
    """Run ``sequence`` and check every step. Drop the ranks if their group is unusable or a check failed."""
    unusable = True
    try:
        results = pools.run(sequence)
        unusable = check(sequence, results)
    finally:
        if unusable:
            pools.drop(sequence.world)


def check(sequence: Sequence, results: list[list[Outcome]]) -> bool:
    """Assert that every step has the expected outcomes. Return whether the group is unusable afterwards."""
    alive = [rank for rank in range(sequence.world) if rank not in sequence.killed]
    dead, dispatched = False, 0
    for index, step in enumerate(sequence.steps):
        odd = sequence.deviation(step)
        dead = dead or (odd is not None and odd.how == "kill")
        outcomes = {rank: results[rank][index] for rank in alive}
        message = f"step {index}, {step}: {outcomes}"
        kinds = {kind for kind, _ in outcomes.values()}
        if kinds == {"none"}:
            continue
        if dead:
            assert kinds == {"PeerDied"}, message
            return True
        if odd is not None and odd.how == "other handle" and dispatched < 2:
            odd = None  # there is no other handle to mix up
        dispatched += step.kind == "dispatch" and kinds == {""}
        if odd is None:
            assert kinds == {""}, message
        elif odd.how == "raise":
            expected = "PeerRaised" if sequence.handshakes else "PeerError"
            assert outcomes.get(odd.rank, ("Boom", ""))[0] == "Boom", message
            assert {kind for rank, (kind, _) in outcomes.items() if rank != odd.rank} <= {expected}, message
            if expected == "PeerError" and sequence.world > 1:
                return True
        else:
            assert len(kinds) == 1 and kinds <= EXPECTED[odd.how], message
            assert issubclass(getattr(errors, next(iter(kinds))), errors.MoeCommError)
    return dead


EXPECTED = {
    "bad id": {"RoutingError"},
    "other dispatcher": {"RankMismatch", "RoutingError"},  # the other dispatcher may have fewer experts
    "bad rows": {"InputError"},
    "other handle": {"InputError", "RankMismatch"},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_sequences_give_a_correct_result_or_one_typed_error(backend: str, pools: Pools) -> None:
    draw_and_attack(backend, pools, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_sequences_give_a_correct_result_or_one_typed_error_many_times(backend: str, pools: Pools) -> None:
    draw_and_attack(backend, pools, MANY)


def draw_and_attack(backend: str, pools: Pools, number: int) -> None:
    @settings(max_examples=number)
    @given(sequences(backend))
    def draw(sequence: Sequence) -> None:
        attack(pools, sequence)

    draw()


@pytest.mark.parametrize("name", FAILED_ONCE)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_sequences_that_failed_once_pass(backend: str, name: str, pools: Pools) -> None:
    attack(pools, FAILED_ONCE[name](backend))
