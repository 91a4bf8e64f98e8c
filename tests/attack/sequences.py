"""Sequences of operations that all ranks run, in which now and then one rank does something else.

A sequence is data: its repr, which hypothesis prints when it fails, is the program that reproduces it.
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
    """The deviation of one rank.

    how: "bad id", "other dispatcher" (dispatch); "bad rows", "other handle" (combine); "raise", "kill" (all three). One
        that the step cannot have is no deviation.
    """

    rank: int
    how: str


@dataclass(frozen=True)
class Step:
    """One operation of every rank.

    kind: dispatch | combine | backward. The last two take the dispatch ``pick``, modulo those there are; without one
        they do nothing, and so does a backward of what has not been combined.
    tokens: of each rank. strides: of all that is given.
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
        """The rank that is killed in the end, if there is one: nothing comes after it."""
        for step in self.steps:
            if (how := self.deviation(step)) is not None and how.how == "kill":
                return {how.rank}
        return set()

    def deviation(self, step: Step) -> Odd | None:
        """The deviation of ``step`` if it can have it here, with a rank that there is."""
        if step.odd is None:
            return None
        how, alone = step.odd.how, self.world == 1
        possible = {
            "bad id": step.kind == "dispatch" and step.tokens[step.odd.rank % self.world] > 0,
            "other dispatcher": step.kind == "dispatch" and not alone,
            # What only combine's handshake tells.
            "bad rows": step.kind == "combine" and self.handshakes,
            "other handle": step.kind == "combine" and self.handshakes and not alone,
            # Unchecked, ranks that wait inside their host learn of it at the deadline only.
            "raise": self.handshakes or self.backend != "hierarchical",
            "kill": not alone,
        }[how]
        return Odd(step.odd.rank % self.world, how) if possible else None

    @property
    def handshakes(self) -> bool:
        """Whether every operation compares headers."""
        return self.checked or self.backend not in GLOO


def useful(steps: list[Step]) -> tuple[Step, ...]:
    """Return ``steps`` in a valid order: a combine without a dispatch becomes one, a backward without one a combine."""
    found: list[Step] = []
    before = set[str]()
    for step in steps:
        kind = step.kind
        if kind == "backward" and "combine" not in before:
            kind = "combine"
        if kind == "combine" and "dispatch" not in before:
            kind = "dispatch"
        if step.odd is None:
            before.add(kind)
        found.append(replace(step, kind=kind))
    return tuple(found)


def sequences(backend: str) -> SearchStrategy[Sequence]:
    """Sequences for one backend; few of them kill a rank, since the ranks then start again."""
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
        # Often the same, or handles that are mixed up would differ in the number of their rows.
        tokens=st.just((3,) * MOST_RANKS) | st.tuples(*[st.sampled_from([3, 0, 1, 7])] * MOST_RANKS),
        strides=st.sampled_from(STRIDES),
        seed=st.integers(0, 2),
        odd=st.none() | odd,
    )
    some = st.integers(1, 5)
    # Dispatchers of other experts use other memory there, in which no rank can see the calls.
    experts = some.map(lambda number: (number, number))
    if backend != "peer_to_peer":
        experts |= st.tuples(some, some)
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
