"""Plans that the kernel ``lend`` computes: those of the native core and of the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.gpu.arguments import kernel_fields
from moe_comm.gpu.launch import NEEDED, NativeLauncher
from moe_comm.topology.balance import Balance, Lent, digest, plan_rows, rows_of_ranks

core = pytest.importorskip("moe_comm._C", reason="the native core is not built")


@dataclass(frozen=True)
class Case:
    """Row counts of each rank for each expert, homes and slots for copies, and costs."""

    counts_WE: list[list[int]]
    home_E: list[int]
    slots: int
    balance: Balance
    costs: tuple[int, int]
    residents: list[tuple[int, int]]

    @property
    def world(self) -> int:
        return len(self.counts_WE)

    @property
    def loads_E(self) -> list[int]:
        return [sum(of_expert) for of_expert in zip(*self.counts_WE, strict=True)]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of ``plan_rows``."""
        most = max(map(sum, self.counts_WE))
        limits = self.balance.limits(sum(self.loads_E), most, self.world, self.slots, self.costs)
        return self.loads_E, self.home_E, self.world, limits, self.residents


def draw_case(rng: random.Random) -> Case:
    """Return a case with skewed counts, and any number of experts on each rank."""
    world = rng.randint(1, 9)
    home_E = [rng.randrange(world) for _ in range(rng.randint(1, 20))]
    skew = rng.choice((1, 3, 20, 1000))
    loads_E = [rng.choice((0, rng.randint(0, 9), rng.randint(0, 9 * skew))) for _ in home_E]
    counts_WE = [[0] * len(home_E) for _ in range(world)]
    for expert, load in enumerate(loads_E):
        for _ in range(2):
            counts_WE[rng.randrange(world)][expert] += load
    most = max(map(home_E.count, range(world)))
    balance = Balance(rng.choice((1.0, 1.0, 1.125, 1.7)), rng.choice((None, None, 1.0, 1.5)))
    elsewhere = [(e, r) for e, home in enumerate(home_E) for r in range(world) if r != home]
    residents = rng.sample(elsewhere, rng.randint(0, min(len(elsewhere), 12)))
    slots, costs = rng.choice((most, most, most + 2, 1)), (rng.choice((1, 7)), rng.choice((0, 0, 3, 500)))
    return Case(counts_WE, home_E, slots, balance, costs, residents)


def words(*values: Any) -> Tensor:
    return torch.tensor([int(x) for x in values], dtype=torch.int64, device="cpu")


class LendKernel:
    """Runs the kernel on the CPU, as rank ``rank``."""

    def __init__(self) -> None:
        self._launcher, self._fields = NativeLauncher("cpu"), kernel_fields()["lend"]

    def __call__(self, case: Case, rank: int = 0) -> tuple[list[Lent], int, list[int], list[int]]:
        """Return the plan and its digest, the rows of each rank, and the slot and first row of each lent expert."""
        world, experts = case.world, len(case.home_E)
        homes_W = list(map(case.home_E.count, range(world)))
        slots_W = [homes + case.slots for homes in homes_W]
        held = sorted(range(experts), key=lambda e: (case.home_E[e], e))
        ends = [[sum(one[:r]) for r in range(world + 1)] for one in (homes_W, slots_W)]
        counts = words(*(n for of_rank in case.counts_WE for n in [*of_rank, *[0] * (sum(slots_W) - experts)]))
        slot_E = [ends[1][home] + held.index(e) - ends[0][home] for e, home in enumerate(case.home_E)]
        homes, offsets = words(*case.home_E, *held, *ends[0], *slot_E), words(*ends[1])
        plan_words, work_words = core.p2p_lend_words(world, experts, len(case.residents), case.slots)
        plan, work = words(*[-1] * plan_words), words(*[-1] * work_words)
        residents, state = words(*(x for pair in case.residents for x in pair), 0), words(0, 0, 0)
        rows, memory, _ = case.balance.words()
        self._launcher.launch(
            "lend", 1, 512, NEEDED, 0, dict.fromkeys(self._fields, 0) | {
                "world": world, "rank": rank, "experts": sum(slots_W), "offsets_at": offsets.data_ptr(),
                "state_at": state.data_ptr(), "routed": experts, "homes_at": homes.data_ptr(), "rows": rows,
                "memory": memory, "row_ns": case.costs[0], "copy_ns": case.costs[1], "copies": case.slots,
                "all_counts_at": counts.data_ptr(), "residents_at": residents.data_ptr(),
                "residents": len(case.residents), "work_at": work.data_ptr(), "plan_at": plan.data_ptr(),
            },
        )  # fmt: skip
        size, hashed = plan[:2].tolist()
        parts = world, experts + 1, experts, case.slots * world, case.slots * world * 5
        rows_W, first_E, before_E, taken_WC, lent = plan[2:].split(parts)
        lent_N5 = lent[: 5 * size].view(size, 5)
        of_rank = [[i for i in range(size) if lent_N5[i, 1] == r] for r in range(world)]
        assert taken_WC.tolist() == [i for own in of_rank for i in [*own, *[-1] * (case.slots - len(own))]]
        earlier = [[0] * experts, *case.counts_WE[:rank]]
        assert before_E.tolist() == [sum(of_expert) for of_expert in zip(*earlier, strict=True)]
        assert first_E.tolist() == [int((lent_N5[:, 0] < e).sum()) for e in range(experts + 1)]
        return (
            [Lent(*one) for one in lent_N5[:, :3].tolist()],
            hashed % 2**64,
            rows_W.tolist(),
            [tuple(one) for one in lent_N5[:, 3:].tolist()],
        )


def check_plans(seed: int, cases: int, with_reference: int) -> None:
    """Compare kernel and native core on ``cases`` cases, and the reference on the first ``with_reference``."""
    rng, kernel, lending = random.Random(seed), LendKernel(), 0
    for number in range(cases):
        case = draw_case(rng)
        rank = rng.randrange(case.world)
        native, hashed = core.plan_rows(*case.arguments)
        lent, of_kernel, rows_W, places = kernel(case, rank)
        assert lent == [Lent(*one) for one in native] and of_kernel == hashed, case
        if number < with_reference:
            assert tuple(lent) == plan_rows(*case.arguments) and hashed == digest(lent), case
        assert rows_W == rows_of_ranks(case.loads_E, case.home_E, case.world, lent)
        homes_W = list(map(case.home_E.count, range(case.world)))
        for i, (one, (first, slot)) in enumerate(zip(lent, places, strict=True)):
            first_slot = sum(homes_W[: one.rank]) + one.rank * case.slots + homes_W[one.rank]
            assert slot == first_slot + sum(other.rank == one.rank for other in lent[:i])
            later = sum(other.rows for other in lent[i:] if other.expert == one.expert)
            assert first == case.loads_E[one.expert] - later
        lending += bool(lent)
    assert lending > cases // 4


def test_the_kernel_returns_the_plans_of_the_native_core_and_of_the_reference() -> None:
    check_plans(1, 3_000, 1_000)


@pytest.mark.slow
def test_all_three_return_the_same_plans_for_many_counts() -> None:
    check_plans(2, 100_000, 100_000)


@pytest.mark.parametrize(("world", "experts"), [(1, 4), (3, 2), (4, 12), (70, 140)])
@pytest.mark.parametrize("load", ["none", "all to one expert", "even"])
def test_extreme_counts(world: int, experts: int, load: str) -> None:
    home_E = [e * world // experts for e in range(experts)]
    per = {"none": lambda e: 0, "all to one expert": lambda e: 1000 * (e == experts - 1), "even": lambda e: 7}[load]
    counts_WE = [[per(e) for e in range(experts)]] * world
    case = Case(counts_WE, home_E, -(-experts // world), Balance(1.0, 1.0), (1, 0), [])
    lent, _, rows_W, _ = LendKernel()(case)
    assert tuple(lent) == plan_rows(*case.arguments)
    assert max(rows_W) == -(-sum(case.loads_E) // world)
    uneven = {"none": False, "all to one expert": world > 1, "even": experts % world > 0}
    assert bool(lent) == uneven[load]
