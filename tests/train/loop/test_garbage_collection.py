"""Garbage collections run only after the planned steps, and automatic collection is restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.train import run
from moe_comm.train.hooks import PlannedCollections
from moe_comm.train.loop import job
from moe_comm.train.metrics import NO_LOAD, StepReport, StepTimes
from tests.pool import RankPool
from tests.train.common import session


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def _report(step: int) -> StepReport:
    return StepReport(step, 1.0, 1e-3, 1.0, 8, StepTimes(1, 1, 0, 0, 0), NO_LOAD, 0)


class _Count:
    """Count the collections of all generations."""

    def __enter__(self) -> list[int]:
        self.generations: list[int] = []
        gc.callbacks.append(self._on_collection)
        return self.generations

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.generations.append(info["generation"])

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._on_collection)


def test_only_the_first_step_and_every_nth_step_collect() -> None:
    pauses, collections = PlannedCollections(3), {}
    with _Count() as generations:
        for step in range(5, 12):
            before = len(generations)
            pauses.after_step(_report(step))
            collections[step] = len(generations) - before
            planned = len(generations)
            containers = [[[] for _ in range(10)] for _ in range(500)]  # enough for Python to collect by itself
            assert len(generations) == planned and containers
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        pauses.close()
    assert collections == {5: 1, 6: 1, 7: 0, 8: 0, 9: 1, 10: 0, 11: 0}
    assert gc.isenabled() and gc.get_freeze_count() == 0
    pauses.close()


def test_a_disabled_collector_stays_disabled_and_an_unused_hook_changes_nothing() -> None:
    PlannedCollections(3).close()
    assert gc.isenabled()
    gc.disable()
    pauses = PlannedCollections(1)
    pauses.after_step(_report(1))
    pauses.close()
    assert not gc.isenabled()


def _pauses(rank: int, world: int, settings: list[str]) -> list[int]:
    """Return the steps after which this rank paused."""
    hook = PlannedCollections(2)
    with session([*settings, "run.steps=5", "parallel.ep=2"], hooks=[hook]) as active:
        active.trainer.fit()
    hook.close()
    return [span.step for span in read_spans(EVENTS.region) if span.kind is Kind.PAUSE][-3:]


def test_all_ranks_pause_after_the_same_steps(pool2: RankPool, shared_settings: list[str]) -> None:
    assert pool2.run(_pauses, shared_settings) == [[1, 2, 4]] * 2


def _bytes_in_cycles(rank: int, world: int, settings: list[str]) -> int:
    """Return the bytes of tensors that only a collection frees."""
    hook = PlannedCollections(1000)
    with session([*settings, "run.steps=6"], hooks=[hook]) as active:
        active.trainer.fit()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            tensors = [item for item in gc.garbage if isinstance(item, torch.Tensor)]
            total = sum(tensor.nbytes for tensor in tensors)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    hook.close()
    return total


@pytest.mark.parametrize("mapping", ["parallel.ep=2", "parallel.sharding=fsdp", "parallel.pp=2"])
def test_steps_leave_no_activations_in_cycles(pool2: RankPool, shared_settings: list[str], mapping: str) -> None:
    """They would accumulate between collections, also in shared memory. A micro-batch has 4 x 16 tokens of width 16."""
    assert all(total < 4 * 16 * 16 * 4 for total in pool2.run(_bytes_in_cycles, [*shared_settings, mapping]))


@pytest.mark.parametrize(("every", "expected"), [(50, [50]), (0, [])])
def test_a_run_plans_collections_by_default(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    planned: list[int] = []

    class Recording(PlannedCollections):
        def __init__(self, every: int) -> None:
            planned.append(every)
            super().__init__(every)

    monkeypatch.setattr(job, "PlannedCollections", Recording)
    run(None, [*settings, "run.steps=2", f"run.gc_every={every}"])
    assert planned == expected
    assert gc.isenabled() and gc.get_freeze_count() == 0
