"""Sequences of operations that all ranks run. In some steps one rank deviates, for example with bad input or a kill.

A sequence is plain data. Hypothesis prints the repr of a failing sequence, which is the code that reproduces it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MOST_RANKS = 4
GLOO = ("all_to_all", "all_gather", "hierarchical")
BACKENDS = ("local", "shared_memory", "peer_to_peer", *GLOO)
STRIDES = ("dense", "transposed", "every other column", "every other row", "expanded")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Odd:
    """A deviation: what one rank does differently in a step.

    how: "bad id" or "other dispatcher" (dispatch only); "bad rows" or "other handle" (combine only); "raise" or "kill"
        (every kind of step). A deviation that does not fit the step is ignored.
    """

    rank: int
    how: str


@dataclass(frozen=True)
class Step:
    """One operation, which every rank runs.

    kind: dispatch | combine | backward. Combine uses the earlier dispatch ``pick`` modulo the number of dispatches;
        backward picks among the combined ones in the same way. Without such a dispatch they do nothing.
    tokens: number of tokens of each rank. strides: strides of all input tensors, one of ``STRIDES``.
    """

    kind: str
    dispatcher: int = 0
    pick: int = 0
    tokens: tuple[int, ...] = (3, 3, 3, 3)
    strides: str = "dense"
    seed: int = 0
    odd: Odd | None = None


@dataclass(frozen=True)
class Sequence:
    """Steps on two dispatchers of one group, with ``experts`` each."""

    backend: str
    world: int
    steps: tuple[Step, ...]
    experts: tuple[int, int] = (3, 3)
    hidden: int = 4
    top_k: int = 2
    dtype: str = "float32"
    checked: bool = True

    @property
    def killed(self) -> set[int]:
        """Return the rank that the sequence kills, or an empty set. Steps after the kill are not checked."""
        for step in self.steps:
            if (how := self.deviation(step)) is not None and how.how == "kill":
                return {how.rank}
        return set()

    def deviation(self, step: Step) -> Odd | None:
        """Return the deviation of ``step`` with a valid rank, or None if it is not possible in this sequence."""
        if step.odd is None:
            return None
        how, alone = step.odd.how, self.world == 1
        possible = {
            "bad id": step.kind == "dispatch" and step.tokens[step.odd.rank % self.world] > 0,
            "other dispatcher": step.kind == "dispatch" and not alone,
            # Only the handshake of combine detects the next two.
            "bad rows": step.kind == "combine" and self.handshakes,
            "other handle": step.kind == "combine" and self.handshakes and not alone,
            # Without checks, ranks that wait inside their host notice the exception only at the deadline.
            "raise": self.handshakes or self.backend != "hierarchical",
            "kill": not alone,
        }[how]
        return Odd(step.odd.rank % self.world, how) if possible else None

    @property
    def handshakes(self) -> bool:
        """Return whether the ranks compare call headers in every operation."""
        return self.checked or self.backend not in GLOO


def useful(steps: list[Step]) -> tuple[Step, ...]:
    """Return ``steps`` in a valid order: a combine without a dispatch becomes one, a backward without one a combine."""
    valid: list[Step] = []
    earlier_kinds = set[str]()
    for step in steps:
        kind = step.kind
        if kind == "backward" and "combine" not in earlier_kinds:
            kind = "combine"
        if kind == "combine" and "dispatch" not in earlier_kinds:
            kind = "dispatch"
        if step.odd is None:
            earlier_kinds.add(kind)
        valid.append(replace(step, kind=kind))
    return tuple(valid)


def sequences(backend: str) -> SearchStrategy[Sequence]:
    """Draw sequences for one backend. Few of them kill a rank, because new ranks must then be started."""
    odd = st.builds(
        Odd,
        st.integers(0, MOST_RANKS - 1),
        st.sampled_from(
            ["bad id", "other dispatcher", "bad rows", "other handle", "raise"] * 4 + ["kill"],
        ),
    )
    step = st.builds(
        Step,
        kind=st.sampled_from(["dispatch", "combine", "backward"]),
        dispatcher=st.integers(0, 1),
        pick=st.integers(0, 3),
        # Equal counts are frequent: mixed-up handles with different numbers of rows would be easy to detect.
        tokens=st.just((3,) * MOST_RANKS) | st.tuples(*[st.sampled_from([3, 0, 1, 7])] * MOST_RANKS),
        strides=st.sampled_from(STRIDES),
        seed=st.integers(0, 2),
        odd=st.none() | odd,
    )
    num_experts = st.integers(1, 5)
    # In peer_to_peer, dispatchers with different numbers of experts use different memory. Ranks that call different
    # dispatchers would not see each other's calls.
    experts = num_experts.map(lambda number: (number, number))
    if backend != "peer_to_peer":
        experts |= st.tuples(num_experts, num_experts)
    dtypes = [name for name in DTYPES if name != "float64" or backend in GLOO or backend == "local"]
    return st.builds(
        Sequence,
        backend=st.just(backend),
        world=st.just(1) if backend == "local" else st.integers(2, MOST_RANKS),
        steps=st.lists(step, min_size=1, max_size=12).map(useful),
        experts=experts,
        hidden=st.sampled_from([4, 1, 5, 33]),
        top_k=st.integers(1, 3),
        dtype=st.sampled_from(dtypes),
        checked=st.sampled_from([True, True, True, False]),
    )
