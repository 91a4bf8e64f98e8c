"""Losses and gradients of pipelines of 2 and 4 ranks, compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.runtime import events
from moe_comm.runtime.events import COMMUNICATION
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding
from moe_comm.train.parallel import DataParallel, DataParallelOptions
from moe_comm.train.pipeline import SCHEDULES, Accumulation
from moe_comm.train.pipeline.stage import Stage
from tests.pool import RankPool
from tests.train.pipes import EVALUATED, SCALE, TIED, Case, Part, batches_of, build, make, reference
from tests.train.toy import assemble, pieces


def train(rank: int, world: int, case: Case) -> Any:
    """Return losses, evaluation losses and owned gradients. Two steps, so that buffers are reused."""
    mesh = ParallelMesh(ParallelConfig(dp=case.dp, pp=case.pp, ep=case.ep))
    parts = build(case, mesh)
    shardings = {name: sharding for part in parts for name, sharding in shardings_of(part).items()}
    options = DataParallelOptions(sharding=case.strategy, overlap_gradients=case.overlap)
    data_parallel = DataParallel(parts, shardings, mesh, options, TIED if case.tie else (), bucket_bytes=1000)
    runner = make(case, parts, mesh, data_parallel=data_parallel)
    batches = batches_of(case, mesh.place["dp"], case.dp)
    first = runner.step(batches, SCALE)
    evaluated = runner.forward_only(batches[:EVALUATED])
    data_parallel.zero_grad()
    losses = runner.step(batches, SCALE)
    assert torch.equal(first, losses)
    if case.overlap == "on" and case.strategy == "zero1":  # the schedule has packed all buckets
        assert all(param.grad is None for part in parts for param in part.parameters() if param.numel())
    data_parallel.reduce()
    runner.close()
    data_parallel.close()
    owned = data_parallel.owned()
    return losses, evaluated, pieces(owned, mesh, {item.name: item.value.grad for item in owned})


def check(case: Case, results: list[Any]) -> None:
    losses, gradients = reference(case)
    tolerance = 1e-5 if case.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(sum(r[0] for r in results), losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(sum(r[1] for r in results), losses[:EVALUATED], rtol=tolerance, atol=0)
    shapes = {name: Sharding(tuple(grad.shape)) for name, grad in gradients.items()}
    for name, gradient in assemble([r[2] for r in results], shapes, case.dtype).items():
        error = float((gradient - gradients[name]).abs().max() / gradients[name].abs().max())
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_two_ranks_have_the_losses_and_gradients_of_one(schedule: str, pool2: RankPool) -> None:
    case = Case(schedule)
    check(case, pool2.run(train, case))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_four_stages_with_tied_embeddings(schedule: str, pool4: RankPool) -> None:
    case = Case(schedule, pp=4, layers=8, micro_batches=8, tie=True)
    check(case, pool4.run(train, case))


OTHERS: tuple[dict[str, Any], ...] = (
    {"ep": 2},
    {"strategy": "fsdp", "tie": True},
    {"strategy": "fsdp", "tie": True, "overlap": "on"},
)
SHARDED = [
    (Case(schedule, dp=2, **settings), number // 3 == of_fast)
    for number, schedule in enumerate(sorted(SCHEDULES))
    for of_fast, settings in enumerate(({"strategy": "zero1", "tie": True, "overlap": "on"}, OTHERS[number % 3]))
]
"""Cases, and whether they are among the fast tests: each setting with three schedules."""


@pytest.mark.parametrize(
    "case",
    [case if fast else pytest.param(case, marks=pytest.mark.slow) for case, fast in SHARDED],
    ids=lambda case: f"{case.schedule}-ep{case.ep}-{case.strategy}-{case.overlap}",
)
def test_stages_with_expert_parallelism_and_with_sharded_gradients(case: Case, pool4: RankPool) -> None:
    check(case, pool4.run(train, case))


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", stage_layers=(3, 1), dense=(0, 1, 2)),
        Case("gpipe", stage_layers=(4, 0)),
        Case("interleaved_1f1b", stage_layers=(0, 2, 0, 2), dense=(0, 1)),
        Case("zero_bubble", stage_layers=(1, 3), dense=(0,)),
        Case("zero_bubble", virtual=2, stage_layers=(1, 0, 3, 0)),
        Case("zbv", stage_layers=(2, 0, 1, 1), dense=(3,)),
        Case("dualpipev", stage_layers=(0, 3, 0, 1)),
    ],
    ids=lambda case: f"{case.schedule}{case.stage_layers}",
)
def test_uneven_stages_stages_without_experts_and_without_layers(case: Case, pool2: RankPool) -> None:
    check(case, pool2.run(train, case))


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [("gpipe", 1), ("1f1b", 5), ("interleaved_1f1b", 3), ("zero_bubble", 1), ("zbv", 3), ("dualpipev", 5)],
)
def test_micro_batches_that_are_not_a_multiple_of_the_ranks(schedule: str, micro_batches: int, pool2: RankPool) -> None:
    case = Case(schedule, micro_batches)
    check(case, pool2.run(train, case))


def changing(rank: int, world: int, case: Case) -> Any:
    """Run an invalid number of micro-batches, then steps with other numbers and shapes."""
    mesh = ParallelMesh(ParallelConfig(pp=case.pp))
    parts = build(case, mesh)
    runner = make(case, parts, mesh)
    with pytest.raises(ConfigError, match="5"):
        runner.step(batches_of(replace(case, micro_batches=5)))
    uneven = [*batches_of(replace(case, micro_batches=3)), *batches_of(replace(case, micro_batches=1, batch=3))]
    with pytest.raises(InputError, match="micro-batch 3 has"):
        runner.step(uneven)
    cases = [case, replace(case, micro_batches=2), replace(case, batch=3), case]
    losses = [runner.step(batches_of(other)) for other in cases]
    runner.close()
    return losses


def test_steps_can_differ_in_number_and_shape_and_the_pipeline_is_usable_after_an_error(pool2: RankPool) -> None:
    case = Case("interleaved_1f1b")
    first, last = pool2.run(changing, case)
    for index, other in enumerate((case, replace(case, micro_batches=2), replace(case, batch=3), case)):
        torch.testing.assert_close(first[index] + last[index], reference(other)[0])


@pytest.mark.parametrize("tied", [False, True])
def test_without_pipeline_micro_batches_accumulate(tied: bool) -> None:
    case = Case(pp=1, micro_batches=3, tie=tied)
    mesh = ParallelMesh(ParallelConfig())
    model = Part(case, range(case.layers), True, True)
    if tied:
        model.head = model.embed
    data_parallel = DataParallel(model, {}, mesh, tied=TIED if tied else ())
    runner = make(case, [model], mesh)
    assert isinstance(runner, Accumulation)
    losses = runner.step(batches_of(case), SCALE)
    expected, gradients = reference(case)
    assert torch.equal(losses, expected)
    assert torch.equal(runner.forward_only(batches_of(case)), expected)
    data_parallel.reduce()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


class Clock:
    """A fake clock. A forward, backward or loss takes 1 s, and getting the receive operations of a pass takes 100 s."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def computed(self, *_: Any) -> None:
        self.now += 1

    def watch(self, module: Any, args: Any, output: Tensor) -> None:
        self.computed()
        output.register_hook(self.computed)

    def delaying(self, get_ops: Any) -> Any:
        def delayed(stage: Stage, number: int) -> Any:
            self.now += 100
            return get_ops(stage, number)

        return delayed


def timed(rank: int, world: int, schedule: str) -> float:
    """Return the seconds of a step that count as communication."""
    case, clock = Case(schedule), Clock()
    mesh = ParallelMesh(ParallelConfig(pp=2))
    parts = build(case, mesh)
    runner = make(case, parts, mesh)
    for part in parts:
        part.register_forward_hook(clock.watch)
        loss = part.loss
        part.loss = lambda *args, loss=loss: (clock.computed(), loss(*args))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "time", clock)
        for method in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
            patch.setattr(Stage, method, clock.delaying(getattr(Stage, method)))
        COMMUNICATION.take()
        runner.step(batches_of(case))
        communication_s = COMMUNICATION.take()
    computed = sum(2 * case.micro_batches for _ in parts) + (case.micro_batches if parts[-1].head is not None else 0)
    assert clock.now - communication_s == computed, (
        "expected 1 s for each forward and backward of a micro-batch, and on the last stage for each loss"
    )
    return communication_s


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_time_between_passes_counts_as_communication(schedule: str, pool2: RankPool) -> None:
    for communication_s in pool2.run(timed, schedule):
        assert communication_s >= 400, "expected at least one receive for each of the 4 micro-batches"
        assert communication_s % 100 == 0, "expected only receives"
