"""Orders of passes equal torch's and do not deadlock; bubbles and memory equal the published ones."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from moe_comm.errors import ConfigError
from moe_comm.topology.pipeline import SCHEDULES, plan_stages
from moe_plan.orders import PassKind, pass_order
from moe_plan.step.replay import prepare, replay
from tests.plan.pipelines import idle, peak_held, timed_tasks

CASES = [
    (name, pp, micro_batches, virtual)
    for name, virtuals in {
        "gpipe": (1,),
        "1f1b": (1,),
        "interleaved_1f1b": (2, 3),
        "zero_bubble": (1, 2),
        "zbv": (2,),
        "dualpipev": (2,),
    }.items()
    for virtual in virtuals
    for pp, micro_batches in [(2, 4), (2, 7), (3, 12), (4, 8), (4, 12), (5, 10), (8, 16)]
    if name not in ("interleaved_1f1b", "zero_bubble") or micro_batches % max(1, micro_batches // pp) == 0
] + [("zbv", 4, 3, 2), ("zbv", 3, 1, 2), ("gpipe", 4, 2, 1), ("interleaved_1f1b", 4, 3, 2), ("zero_bubble", 4, 6, 3)]


class Recorder:
    """A stage without tensors or peers that records the calls of torch's single-stage schedules."""

    submod = None

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, index, stages
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.recorded: list[tuple[PassKind, int, int]] = []

    def forward_one_chunk(self, micro: int, *_: Any, **__: Any) -> None:
        self.recorded.append((PassKind.FORWARD, self.stage_index, micro))

    def backward_one_chunk(self, micro: int, **_: Any) -> None:
        self.recorded.append((PassKind.BACKWARD, self.stage_index, micro))

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def no_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_ops


def torch_orders(name: str, pp: int, micro_batches: int, virtual: int) -> list[list[tuple[PassKind, int, int]]]:
    """Return the passes that torch runs on each rank."""
    schedule_class = get_schedule_class(SCHEDULES[name].torch_name)
    if SCHEDULES[name].single:
        return [_recorded(schedule_class, rank, pp, micro_batches) for rank in range(pp)]
    stages = [
        SimpleNamespace(num_stages=pp * virtual, group_size=pp, group_rank=0, is_last=False, submod=None)
        for _ in range(virtual)
    ]
    order = schedule_class(stages, micro_batches).pipeline_order
    return [
        [action for actions in order[rank] if actions is not None for action in _flat(actions)] for rank in range(pp)
    ]


def _recorded(schedule_class: Any, rank: int, pp: int, micro_batches: int) -> list[tuple[PassKind, int, int]]:
    stage = Recorder(rank, pp)
    schedule = schedule_class(stage, micro_batches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return stage.recorded


def _flat(action: Any) -> list[tuple[PassKind, int, int]]:
    if action.sub_actions is not None:
        return [one for sub in action.sub_actions for one in _flat(sub)]
    kind = PassKind("FBIW".index(action.computation_type.value))
    return [(kind, action.stage_index, action.microbatch_index)]


@pytest.mark.parametrize(("name", "pp", "micro_batches", "virtual"), CASES)
def test_the_order_equals_that_of_torch(name: str, pp: int, micro_batches: int, virtual: int) -> None:
    order = pass_order(name, pp, micro_batches, virtual)
    expected = torch_orders(name, pp, micro_batches, virtual)
    columns = [column.tolist() for column in (order.rank, order.kind, order.stage, order.micro)]
    passes: list[list[tuple[PassKind, int, int]]] = [[] for _ in range(pp)]
    for rank, kind, stage, micro in zip(*columns, strict=True):
        passes[rank].append((PassKind(kind), stage, micro))
    assert passes == expected


@pytest.mark.parametrize(("name", "pp", "micro_batches", "virtual"), CASES)
def test_every_pass_runs_once_on_its_rank_after_its_dependencies(
    name: str, pp: int, micro_batches: int, virtual: int
) -> None:
    order = pass_order(name, pp, micro_batches, virtual)
    plan = plan_stages(pp * virtual, pp, name, virtual=virtual)
    assert [plan.rank_of(stage) for stage in order.stage.tolist()] == order.rank.tolist()
    rows = list(zip(order.kind.tolist(), order.stage.tolist(), order.micro.tolist(), strict=True))
    assert max(Counter(rows).values()) == 1
    begin = dict(zip(rows, replay(timed_tasks(order)).begin.tolist(), strict=False))
    for stage in range(pp * virtual):
        for micro in range(micro_batches):
            whole = (PassKind.BACKWARD, stage, micro) in begin
            first = PassKind.BACKWARD if whole else PassKind.INPUT
            assert whole != ((PassKind.INPUT, stage, micro) in begin)
            assert whole != ((PassKind.WEIGHT, stage, micro) in begin)
            assert begin[PassKind.FORWARD, stage, micro] < begin[first, stage, micro]
            if not whole:
                assert begin[PassKind.INPUT, stage, micro] < begin[PassKind.WEIGHT, stage, micro]
            if stage:
                assert begin[PassKind.FORWARD, stage - 1, micro] < begin[PassKind.FORWARD, stage, micro]


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 4), (4, 13), (7, 21), (1, 3)])
@pytest.mark.parametrize("backward", [1.0, 2.5])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_bubble_with_one_stage_per_rank(name: str, pp: int, micro_batches: int, backward: float) -> None:
    order = pass_order(name, pp, micro_batches)
    waits = idle(order, replay(timed_tasks(order, 1.0, backward, 0.5)))
    assert waits == pytest.approx(np.full(pp, (pp - 1) / (micro_batches + pp - 1)), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("pp", "micro_batches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (3, 9, 4), (8, 8, 2)])
def test_bubble_of_interleaved_stages_is_divided_by_their_number(pp: int, micro_batches: int, virtual: int) -> None:
    order = pass_order("interleaved_1f1b", pp, micro_batches, virtual)
    waits = idle(order, replay(timed_tasks(order)))
    assert waits == pytest.approx(np.full(pp, (pp - 1) / (virtual * micro_batches + pp - 1)), rel=1e-12)


def test_split_backward_fills_bubbles() -> None:
    """With F = I = W = 1, the bubble of ZB-H1 is (pp - 1)(F + I - W), a third of 1f1b's. That of ZB-V is smaller."""

    def longest(name: str) -> float:
        order = pass_order(name, 4, 12)
        seconds = 1 / order.virtual
        return float(replay(timed_tasks(order, seconds, seconds, seconds)).span)

    assert longest("1f1b") == 36 + 3 * 3
    assert longest("zero_bubble") == 36 + 3
    assert longest("zbv") < 36 + 3
    assert longest("dualpipev") < longest("1f1b")


TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.9), (1.0, 1.5, 1.0), (1.2, 1.0, 1.0)]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("forward", "input", "weight"), TIMES)
def test_bubbles_of_split_backward_passes_are_the_published_ones(
    pp: int, forward: float, input: float, weight: float
) -> None:
    def bubble(name: str) -> float:
        order = pass_order(name, pp, 4 * pp)
        span = float(replay(timed_tasks(order, forward, input, weight)).span)
        return span - 4 * pp * order.virtual * (forward + input + weight)

    assert bubble("1f1b") == pytest.approx((pp - 1) * (forward + input + weight))
    # ZB-H1, arXiv 2401.10241, table 1: (p - 1) (T_F + T_B - T_W).
    assert bubble("zero_bubble") == pytest.approx((pp - 1) * (forward + input - weight))
    # DualPipe, arXiv 2412.19437, table 2: (PP / 2 - 1) (F&B + B - 3 W), here on PP / 2 ranks, with an unsplit B and
    # without overlap in F&B. torch has a smaller bubble because it also splits backward passes.
    assert bubble("dualpipev") <= (pp - 1) * (forward + 2 * (input + weight) - 3 * weight) + 1e-9


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zbv_with_equal_passes_has_no_bubble_after_the_first_pass_of_a_rank(pp: int) -> None:
    """ZB-V, arXiv 2401.10241, section 6: none if F = B = W and there are enough micro-batches."""
    order = pass_order("zbv", pp, 4 * pp)
    times = replay(timed_tasks(order))
    for rank in range(pp):
        own = np.flatnonzero(order.rank == rank)
        assert times.end[own].max() - times.begin[own].min() == 4 * pp * 2 * 3
        assert times.begin[own].min() == rank, "a rank starts when the first micro-batch reaches it"


def test_peaks_of_activations_in_flight() -> None:
    def peak(name: str, virtual: int | None = None) -> list[float]:
        order = pass_order(name, 4, 12, virtual)
        result: list[float] = peak_held(order, np.ones(order.stages)).tolist()
        return result

    assert peak("gpipe") == [12, 12, 12, 12]
    assert peak("1f1b") == [4, 3, 2, 1]
    assert peak("interleaved_1f1b", 2) == [11, 9, 7, 5]
    assert peak("zero_bubble") == [4, 4, 4, 4]
    assert peak("zbv") == [8, 8, 8, 8]
    order = pass_order("1f1b", 4, 12)
    assert peak_held(order, np.array([10.0, 1, 1, 7])).tolist() == [40, 3, 2, 7]
    order = pass_order("zero_bubble", 4, 12)
    full = peak_held(order, np.full(4, 3.0))
    assert (peak_held(order, np.full(4, 3.0), np.full(4, 1.0)) <= full).all()
    assert peak_held(order, np.full(4, 3.0), np.zeros(4)).tolist() == [12, 9, 6, 3]


def test_transfers_lengthen_the_step_by_each_hop_and_more_if_exposed() -> None:
    order = pass_order("1f1b", 4, 4)

    def span(**options: Any) -> float:
        return float(replay(timed_tasks(order, **options)).span)

    assert span() == 4 * 3 + 3 * 3
    overlapped, exposed = span(transfer=0.25), span(transfer=0.25, exposed=True)
    assert span() + 2 * 3 * 0.25 <= overlapped <= exposed
    # Two ranks, two micro-batches: rank 0 runs F0 F1 B0 B1, rank 1 F0 B0 F1 B1, each F1 and B1 behind a transfer.
    small = pass_order("1f1b", 2, 2)
    times = replay(timed_tasks(small, 1.0, 1.0, 0.0, transfer=0.5, exposed=True))
    assert times.begin[: len(small)].tolist() == [0.0, 1.0, 4.0, 6.5, 1.5, 2.5, 4.0, 5.0]


def test_transfers_of_one_direction_queue_and_stages_of_one_rank_need_none() -> None:
    order = pass_order("zbv", 2, 4)
    tasks = timed_tasks(order, transfer=3.0)
    assert len(tasks) - len(order) == 2 * 2 * 4, "hops 0-1 and 2-3 cross ranks; stages 1 and 2 are on one rank"
    times = replay(tasks)
    for stream in np.unique(tasks.stream[len(order) :]):
        own = np.flatnonzero(tasks.stream == stream)
        assert (times.begin[own[1:]] >= times.end[own[:-1]]).all()


def test_a_slow_stage_sets_the_pace() -> None:
    order = pass_order("1f1b", 4, 8)
    tasks = timed_tasks(order, transfer=0.01)
    forwards = np.flatnonzero((order.stage == 2) & (order.kind == PassKind.FORWARD))
    slow, slower = tasks.duration.copy(), tasks.duration.copy()
    slow[forwards], slower[forwards] = 9.0, 10.0
    plan = prepare(tasks)
    before = replay(plan, slow).span
    assert replay(plan, slower).span == pytest.approx(before + 8.0), "each of its forwards delays the step"


def test_invalid_schedules_are_rejected() -> None:
    for call in (
        lambda: pass_order("1f1b", 0, 4),
        lambda: pass_order("1f2b", 2, 4),
        lambda: pass_order("1f1b", 4, 3),
        lambda: pass_order("dualpipev", 4, 7),
        lambda: pass_order("zbv", 4, 8, 3),
        lambda: pass_order("interleaved_1f1b", 4, 9),
    ):
        with pytest.raises(ConfigError):
            call()


def test_orders_are_cached_and_read_only() -> None:
    order = pass_order("1f1b", 2, 4)
    assert order is pass_order("1f1b", 2, 4)
    with pytest.raises(ValueError, match="read-only"):
        order.kind[0] = 3
