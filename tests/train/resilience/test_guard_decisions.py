"""Decisions of the guard for given numbers, and the digests and history that they depend on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch

from moe_comm.errors import CheckpointError, UnsettledStep
from moe_comm.observe.records import FaultRecord
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.guard import History, StepDecision, StepDigest, StepGuard, StepSummary
from moe_comm.train.sections import GuardSection

SPIKES = GuardSection(window=2, norm_spike=5, on_spike="rerun")


def _guard() -> tuple[StepGuard, list[FaultRecord]]:
    """Return a guard in the third step, after two steps with loss and norm 1."""
    records: list[FaultRecord] = []
    guard = StepGuard(SPIKES, "rerun", Ranks(), History(), records.append)
    for step in (1, 2):
        guard.begin(step)
        assert _tried(guard, 1.0, 1.0) is StepDecision.GO
    guard.begin(3)
    return guard, records


def _tried(guard: StepGuard, loss: float, norm: float) -> StepDecision:
    finite = math.isfinite(loss)
    agreed = StepSummary(loss if finite else 0.0, {}, (), () if finite else (0,), {}, (False, False))
    decision = guard.after_loss(agreed, loss, [])
    return guard.after_norm(norm) if decision is StepDecision.GO else decision


@pytest.mark.parametrize(
    ("tries", "expected_records"),
    [
        (
            [(math.nan, 0.0), (1.0, 9.0), (1.0, 9.0)],
            [("nonfinite", "a transient fault"), ("spike", "the data caused it")],
        ),
        ([(math.nan, 0.0), (1.0, 9.0), (1.5, 1.0)], [("nonfinite", "a transient fault"), ("spike", "a transient")]),
        ([(1.5, 9.0), (math.nan, 0.0), (1.0, 1.0)], [("spike", "a transient fault"), ("nonfinite", "a transient")]),
    ],
)
def test_a_problem_of_another_kind_in_a_rerun_gets_its_own_rerun(
    tries: Sequence[tuple[float, float]], expected_records: Sequence[tuple[str, str]]
) -> None:
    guard, records = _guard()
    assert [_tried(guard, *numbers) for numbers in tries] == [StepDecision.RERUN, StepDecision.RERUN, StepDecision.GO]
    assert guard.reruns == 2 and [record.kind for record in records] == [kind for kind, _ in expected_records]
    for record, (_, expected) in zip(records, expected_records, strict=True):
        assert expected in record.what and record.action == "rerun"


def test_each_kind_of_problem_gets_one_rerun() -> None:
    guard, _ = _guard()
    assert [_tried(guard, *numbers) for numbers in ((math.nan, 0.0), (1.0, 9.0))] == [
        StepDecision.RERUN,
        StepDecision.RERUN,
    ]
    with pytest.raises(UnsettledStep, match="loss of rank 0"):
        _tried(guard, math.inf, 0.0)


def test_a_digest_changes_with_one_bit_of_a_gradient_or_the_loss() -> None:
    grads = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((3, 5), ())]
    first = StepDigest.of(1.5, grads)
    assert first.changed(StepDigest.of(1.5, grads)) == 0
    assert first.changed(StepDigest.of(math.nextafter(1.5, 2), grads)) == 1
    assert StepDigest.of(math.nan, grads).changed(StepDigest.of(math.nan, grads)) == 0
    grads[0].view(torch.int32)[1, 1] ^= 1
    assert first.changed(StepDigest.of(1.5, grads)) == 2


def test_history_json_round_trip_and_invalid_values() -> None:
    history = History()
    for i in range(5):
        history.add(1 / (i + 3), math.pi * i, window=3)
    loaded = History()
    loaded.load(json.loads(json.dumps(history.state())))
    assert loaded == history and len(loaded.losses) == 3
    loaded.load(None)
    assert loaded == History()
    for bad in ({"losses": [1.0]}, {"losses": 3, "norms": []}, {"losses": ["x"], "norms": []}, [1]):
        with pytest.raises(CheckpointError, match="unreadable"):
            loaded.load(bad)  # type: ignore[arg-type]
