"""Invalid pipelines and failing stages raise typed errors on all ranks."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from moe_comm.errors import ConfigError, MoeCommError, PeerError, RoutingError
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.pipeline import ActivationShape, Pipeline, make_runner
from tests.pool import RankPool, with_longer_deadline
from tests.train.pipes import HIDDEN, Case, Part, batches_of, build


def invalid_pipelines(rank: int, world: int, _: None) -> list[str]:
    """Construct invalid pipelines; each raises before anything is sent."""
    mesh, case = ParallelMesh(ParallelConfig(pp=2)), Case("zbv")
    parts = build(case, mesh)
    activations = ActivationShape(HIDDEN, case.dtype)
    messages = []
    for modules, plan, schedule in (
        (parts[:1], case.plan, "zbv"),
        (parts, case.plan, "interleaved_1f1b"),
        (parts, Case("zbv", pp=4, layers=8).plan, "zbv"),
        (parts[:1], Case(pp=1).plan, "1f1b"),
    ):
        with pytest.raises(ConfigError) as caught:
            Pipeline(modules, mesh, plan, schedule, activations)
        messages.append(str(caught.value))
    with mock.patch("moe_comm.train.pipeline.runner.SPLITS_BACKWARD", False), pytest.raises(ConfigError) as caught:
        Pipeline(parts, mesh, case.plan, "zbv", activations)
    return [*messages, str(caught.value)]


def test_a_plan_that_does_not_fit_mesh_schedule_or_modules_raises(pool2: RankPool) -> None:
    for modules, style, larger, none, old_torch in pool2.run(invalid_pipelines):
        assert "got 1 modules" in modules
        assert "style 'v'" in style
        assert "pp = 4" in larger
        assert "pp = 1" in none
        assert "zbv splits backward passes" in old_torch


def casting(rank: int, world: int, _: None) -> str:
    """Evaluate with a first stage that returns float32 instead of float64."""
    case = Case()
    mesh = ParallelMesh(ParallelConfig(pp=2))
    parts = build(case, mesh)
    runner = make_runner(parts, mesh, case.plan, case.schedule, ActivationShape(HIDDEN, case.dtype), timeout_s=2)
    if rank == 0:
        parts[0].register_forward_hook(lambda module, args, output: output.float())
    with pytest.raises(MoeCommError) as caught:
        runner.forward_only(batches_of(case))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_evaluation_checks_the_output_of_a_stage(pool2: RankPool) -> None:
    first, last = pool2.run(casting)
    assert first.startswith("InputError: the output of stage 0 must be (2, 6, 8) torch.float64")
    assert "torch.float32" in first
    assert last.startswith(("PeerTimeout", "PeerDied"))


class Failing(Part):
    """A stage that fails in its third forward pass, only on the last rank."""

    how = ""
    calls = 0

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        Failing.calls += 1
        if Failing.calls == 3 and self.head is not None:
            if self.how == "die":
                os._exit(1)
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.how == "route":
                raise RoutingError("expert 9 is outside 0..3")
            if self.how == "cast":
                return super().forward(x, **kwargs).float()
        return super().forward(x, **kwargs)


def fail(rank: int, world: int, arg: tuple[str, str, float]) -> tuple[str, str]:
    schedule, how, timeout_s = arg
    case = Case(schedule)
    mesh = ParallelMesh(ParallelConfig(pp=2))
    Failing.how, Failing.calls = how, 0
    plan = case.plan
    parts = [
        Failing(case, plan.layers_of(stage), plan.is_first(stage), plan.is_last(stage))
        for stage in plan.stages_of(mesh.place["pp"])
    ]
    runner = make_runner(parts, mesh, plan, schedule, ActivationShape(HIDDEN, case.dtype), timeout_s=timeout_s)
    with pytest.raises(MoeCommError) as caught:
        runner.step(batches_of(case))
    if isinstance(caught.value, PeerError):  # later calls raise the same type
        with pytest.raises(type(caught.value)):
            runner.forward_only(batches_of(case))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_a_dead_stage_is_peer_died_for_the_others(schedule: str, pool2: RankPool) -> None:
    # A dead stage must be detected before the timeout.
    name, message = pool2.run(fail, (schedule, "die", 100.0), expect_dead={1})[0]
    assert name == "PeerDied"
    assert "rank 1" in message


def test_a_stopped_stage_is_peer_timeout_for_the_others(pool2: RankPool) -> None:
    def check(timeout_s: float) -> None:
        name, message = pool2.run(fail, ("gpipe", "stop", timeout_s), expect_dead={1})[0]
        assert name == "PeerTimeout"
        assert "a pipeline step" in message

    with_longer_deadline(check, 2.0, 30.0)


@pytest.mark.parametrize(("how", "name"), [("route", "RoutingError"), ("cast", "InputError")])
def test_an_error_inside_a_stage_keeps_its_type(how: str, name: str, pool2: RankPool) -> None:
    def check(timeout_s: float) -> None:
        first, last = pool2.run(fail, ("1f1b", how, timeout_s))
        assert last[0] == name
        assert first[0] in ("PeerDied", "PeerTimeout")

    with_longer_deadline(check, 2.0, 30.0)
