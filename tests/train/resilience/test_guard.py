"""Wrong numbers in a step: a rerun in place leaves no trace, and all ranks make the same decision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_comm.errors import CorruptPayload, NonFiniteLoss, UnsettledStep
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.records import FAULTS, FaultRecord, read_lines
from moe_comm.train import run
from moe_comm.train.hooks import StepHook
from moe_comm.train.loop import job
from moe_comm.train.metrics import StepReport
from tests.pool import RankPool
from tests.train.common import Parts, session, whole
from tests.train.loop.test_resume import Crash, crash_after

RERUN = "run.nonfinite=rerun"
CHECKED = "guard.checksums=true"
MAPPINGS_2 = [
    ("parallel.ep=2", "parallel.sharding=fsdp"),
    ("parallel.tp=2", "model.family=deepseek_v3", "model.expert_groups=2", "model.shared_ffn=24"),
    ("parallel.dp=2", "parallel.ep=1", "parallel.sharding=zero1", "model.dtype=bfloat16"),
    ("parallel.pp=2", "parallel.schedule=zero_bubble", "model.recompute=selective", "model.capacity=1.0"),
    ("parallel.ep=2", "parallel.sharding=zero1", "parallel.overlap_gradients=on"),
    ("parallel.ep=2", "parallel.backend=all_to_all", "parallel.overlap_chunks=2", "parallel.interleave=true"),
]
MAPPINGS_4 = [
    ("parallel.pp=2", "parallel.ep=2", "parallel.schedule=zbv", "parallel.sharding=fsdp", "model.layers=4"),
    ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2", "parallel.sharding=zero1", "payload.dispatch=fp8_block"),
]


def _mapping_id(mapping: tuple[str, ...]) -> str:
    return " ".join(key.split(".")[1] for key in mapping)


@dataclass(frozen=True)
class Plan:
    """A fault: ``how`` on ``rank``, in the first ``tries`` executions of ``step``.

    how: "loss" (NaN), "gradient" (one element is NaN), "copy" (the same in the gradient of a copied expert), "bit" (one
    bit of a received row flips), "infinite row" (one element of a received row is infinite), "large loss", "large
    gradient", "other loss" (NaN in the first execution, infinite in the next), "activations" (NaN in the first block).
    """

    how: str
    step: int = 2
    rank: int = 0
    tries: int = 1


class Fault(StepHook):
    def __init__(self, plan: Plan | None, rank: int) -> None:
        self.plan = plan if plan is not None and plan.rank == rank else None
        self.step = self.done = 0
        self.stages: list[Any] = []

    def install(self, stages: list[Any]) -> None:
        """Install the faults that occur inside a step."""
        self.stages = stages
        if self.plan is None:
            return
        if self.plan.how in ("bit", "infinite row"):
            for stage in stages:
                for _, layer in moe_layers(stage):
                    self._flip_rows(layer.dispatcher)
                    break  # only in the first layer
        if self.plan.how == "activations":
            block = next(iter(stages[0].layers.values()))
            block.attention.register_forward_hook(lambda module, args, out: out * math.nan if self._due() else out)

    def _due(self) -> bool:
        if self.plan is None or self.step != self.plan.step or self.done >= self.plan.tries:
            return False
        self.done += 1
        return True

    def _flip_rows(self, dispatcher: Any) -> None:
        send = dispatcher._send_with
        infinite = self.plan is not None and self.plan.how == "infinite row"

        def damaged(x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor | None) -> Any:
            rows_RD, layout, words_RX = send(x_TD, ids_TK, words_TKX)
            if rows_RD.shape[0] and self._due():
                rows_RD = rows_RD.clone()
                words_RD = rows_RD.view(torch.int32)
                words_RD[0, 0] = 0x7F800000 if infinite else words_RD[0, 0] ^ (1 << 24)
            return rows_RD, layout, words_RX

        dispatcher._send_with = damaged
        dispatcher.reads_in_place = lambda x_TD: False  # the rows of these runs are copies, also without checksums

    def before_step(self, step: int) -> None:
        self.step = step

    def after_backward(self, step: int, loss: float) -> float:
        if self.plan is None or self.plan.how in ("bit", "infinite row", "activations") or not self._due():
            return loss
        if self.plan.how == "other loss":
            return math.nan if self.done == 1 else math.inf
        if self.plan.how == "large loss":
            return loss * 1000
        if "loss" in self.plan.how:
            return math.nan
        grad: Any = next(p.grad for p in self.stages[-1].parameters() if p.grad is not None and p.grad.numel())
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.view(-1)[0] = 1e6 if self.plan.how == "large gradient" else math.nan
        return loss


@dataclass
class RankResult:
    """Results of one rank. raised: the error that ended the run. steps: number of completed steps."""

    reports: list[StepReport] = field(default_factory=list)
    records: list[FaultRecord] = field(default_factory=list)
    parts: Parts = field(default_factory=dict)
    raised: str = ""
    validation: float = math.nan
    steps: int = 0

    @property
    def reruns(self) -> list[int]:
        return [report.reruns for report in self.reports]


def _train(rank: int, world: int, arg: tuple[list[str], Plan | None]) -> RankResult:
    settings, plan = arg
    outcome, fault = RankResult(), Fault(plan, rank)
    with session(settings, hooks=[fault], on_fault=outcome.records.append) as active:
        fault.install(active.stages)
        try:
            active.trainer.fit()
            outcome.validation = active.trainer.evaluate()
        except (NonFiniteLoss, UnsettledStep, CorruptPayload) as error:
            outcome.raised = f"{type(error).__name__}: {error}"
        outcome.reports, outcome.parts, outcome.steps = active.trainer.reports, active.parts(), active.trainer.next_step
    return outcome


def _train_one_rank(settings: list[str], plan: Plan | None = None) -> RankResult:
    return _train(0, 1, (settings, plan))


def assert_same_bits(actual: list[RankResult], expected: list[RankResult]) -> None:
    for result, reference in zip(actual, expected, strict=True):
        assert result.raised == reference.raised == "" and result.validation == reference.validation
        for report, other in zip(result.reports, reference.reports, strict=True):
            assert (report.loss, report.grad_norm) == (other.loss, other.grad_norm)
            assert report.load == other.load, "routers also counted the tokens of the discarded try"
    weights, expected_weights = (whole([outcome.parts for outcome in results]) for results in (actual, expected))
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert torch.equal(weights[name], tensor), name


def _check_transient(pool: RankPool, settings: list[str], plans: list[Plan]) -> None:
    plain = pool.run(_train, (settings, None), timeout=90)
    for plan in plans:
        results = pool.run(_train, ([*settings, RERUN, CHECKED], plan), timeout=90)
        assert_same_bits(results, plain)
        for result in results:
            assert result.reruns == [0, 1, 0, 0], plan
            (record,) = result.records
            assert (record.step, record.action) == (2, "rerun")
            assert record.kind == ("corrupt" if plan.how == "bit" else "nonfinite")
            assert plan.rank in record.ranks and record.what == results[0].records[0].what


@pytest.mark.parametrize("mapping", MAPPINGS_2, ids=_mapping_id)
def test_a_transient_fault_leaves_no_trace_on_two_ranks(
    pool2: RankPool, shared_settings: list[str], mapping: tuple[str, ...]
) -> None:
    plans = [Plan("loss", rank=1)]
    if "overlap_gradients" not in _mapping_id(mapping):  # the fault is injected when the gradients have been sent
        plans.append(Plan("gradient", rank=1))
    # With interleave, rows are sent in chunks. tests/dispatch/test_checksums.py covers damaged chunks.
    if "interleave" not in _mapping_id(mapping) and "ep=1" not in _mapping_id(mapping):
        plans[0] = Plan("bit", rank=1)
    _check_transient(pool2, [*shared_settings, *mapping], plans)


@pytest.mark.slow
def test_a_transient_fault_leaves_no_trace_on_four_ranks(pool4: RankPool, shared_settings: list[str]) -> None:
    for mapping, how in zip(MAPPINGS_4, ("gradient", "bit"), strict=True):
        _check_transient(pool4, [*shared_settings, *mapping], [Plan(how, rank=3)])


def test_a_transient_fault_leaves_no_trace_on_one_rank(shared_settings: list[str]) -> None:
    plain = _train_one_rank(shared_settings)
    clean = _train_one_rank([*shared_settings, RERUN, CHECKED])
    assert_same_bits([clean], [plain])
    assert clean.reruns == [0] * 4 and not clean.records
    for how in ("loss", "gradient", "bit", "activations"):
        faulty = _train_one_rank([*shared_settings, RERUN, CHECKED], Plan(how))
        assert_same_bits([faulty], [plain])
        assert faulty.reruns == [0, 1, 0, 0], how


def test_the_rank_whose_numbers_changed_is_named_on_every_rank(pool2: RankPool, shared_settings: list[str]) -> None:
    """A gradient that is damaged on one rank before the reduction makes the norm NaN on all."""
    settings = [*shared_settings, RERUN, "parallel.ep=1", "parallel.dp=2"]
    for outcome in pool2.run(_train, (settings, Plan("gradient", rank=1))):
        (record,) = outcome.records
        assert record.ranks == [1]
        assert "the gradient's norm is nan" in record.what and "(gradients of rank 1)" in record.what
    for outcome in pool2.run(_train, (settings, Plan("loss", rank=1))):
        assert "(loss of rank 1)" in outcome.records[0].what


def test_a_wrong_reduction_is_distinguished_from_wrong_numbers_of_a_rank(shared_settings: list[str]) -> None:
    records: list[FaultRecord] = []
    with session([*shared_settings, RERUN], on_fault=records.append) as active:
        data_parallel = active.trainer.train_state.data_parallel
        reduce, done = data_parallel.reduce, []

        def damaged() -> None:
            reduce()
            if not done:
                done.append(True)
                grad = data_parallel.owned()[0].value.grad
                assert grad is not None
                grad.view(-1)[0] = math.inf

        data_parallel.reduce = damaged  # type: ignore[method-assign]
        report = active.trainer.train_step(0)
    (record,) = records
    assert report.reruns == 1 and not report.skipped and math.isfinite(report.grad_norm)
    assert record.ranks == [] and "it happened in a sum over ranks" in record.what


@pytest.mark.parametrize("how", ["gradient", "activations"])
def test_a_persistent_fault_ends_the_run_as_without_a_rerun(
    pool2: RankPool, shared_settings: list[str], how: str
) -> None:
    plan = Plan(how, rank=1, tries=99)
    for outcome in pool2.run(_train, ([*shared_settings, RERUN, "parallel.ep=2"], plan)):
        assert outcome.raised.startswith("NonFiniteLoss: step 2: ") and "gave the same bits" in outcome.raised
        assert outcome.steps == 1 and [r.action for r in outcome.records] == ["stop"]


def test_a_rerun_with_other_bad_numbers_names_the_rank(pool2: RankPool, shared_settings: list[str]) -> None:
    for outcome in pool2.run(_train, ([*shared_settings, RERUN, "parallel.ep=2"], Plan("other loss", rank=1, tries=2))):
        assert outcome.raised.startswith("UnsettledStep: step 2: ") and "loss of rank 1" in outcome.raised
        assert "rank(s) 1" in outcome.raised
        (record,) = outcome.records
        assert (record.ranks, record.action) == ([1], "stop")


@pytest.mark.parametrize(("tries", "good"), [(3, True), (4, False)])
def test_damaged_rows_are_sent_again_up_to_three_times(shared_settings: list[str], tries: int, good: bool) -> None:
    settings = [*shared_settings, CHECKED, "data.micro_batches=1"]
    outcome = _train_one_rank(settings, Plan("bit", tries=tries))
    assert [record.kind for record in outcome.records] == ["corrupt"] * tries
    if good:
        assert outcome.reruns == [0, 3, 0, 0]
        assert_same_bits([outcome], [_train_one_rank(settings)])
    else:
        assert outcome.raised.startswith(
            "CorruptPayload: step 2: rows arrived damaged: 1 block(s) on rank 0, for the 4th"
        )
        assert outcome.steps == 1 and outcome.records[-1].action == "stop"


@pytest.mark.parametrize("how", ["bit", "infinite row"])
def test_damaged_rows_of_an_evaluation_are_sent_again(shared_settings: list[str], how: str) -> None:
    """An infinite row makes the next router's logits NaN. They must not count for the next step."""
    settings = [*shared_settings, CHECKED]
    losses = []
    for tries in (0, 1, 99):
        fault = Fault(Plan(how, step=1, tries=tries), 0)
        with session(settings, hooks=[fault]) as active:
            active.trainer.train_step(0)
            fault.install(active.stages)
            if tries == 99:
                with pytest.raises(CorruptPayload, match="in 4 consecutive evaluations"):
                    active.trainer.evaluate()
                continue
            losses.append(active.trainer.evaluate())
            assert active.trainer.train_step(1).reruns == 0, "the step was rerun because of damage in the evaluation"
    assert losses[0] == losses[1]


def test_without_checksums_a_flipped_bit_is_not_detected(shared_settings: list[str]) -> None:
    """This shows that the damage in these tests is real."""
    outcome = _train_one_rank(shared_settings, Plan("bit"))
    assert outcome.raised == "" and not outcome.records and outcome.reruns == [0] * 4
    assert outcome.reports[-1].loss != _train_one_rank(shared_settings).reports[-1].loss


SPIKES = ("guard.window=2", "guard.loss_spike=5", "guard.norm_spike=50", "run.steps=6")


@pytest.mark.parametrize("how", ["large loss", "large gradient"])
def test_a_spike_that_disappears_in_a_rerun_is_a_transient_fault(
    pool2: RankPool, shared_settings: list[str], how: str
) -> None:
    settings = [*shared_settings, *SPIKES, "guard.on_spike=rerun", "parallel.ep=2"]
    clean = pool2.run(_train, (settings, None))
    results = pool2.run(_train, (settings, Plan(how, step=4, rank=1)))
    assert not clean[0].records
    assert_same_bits(results, clean)
    assert results[0].reruns == [0, 0, 0, 1, 0, 0]
    (record,) = results[0].records
    assert (record.kind, record.action, record.ranks) == ("spike", "rerun", [1])
    assert "times its mean" in record.what and "a transient fault" in record.what


@pytest.mark.parametrize(
    ("policy", "how"), [("warn", "large loss"), ("skip", "large gradient"), ("rerun", "large loss")]
)
def test_a_spike_that_stays_is_handled_by_the_policy(shared_settings: list[str], policy: str, how: str) -> None:
    settings = [*shared_settings, *SPIKES, f"guard.on_spike={policy}"]
    outcome = _train_one_rank(settings, Plan(how, step=4, tries=99))
    assert outcome.raised == ""
    (record,) = outcome.records
    assert record.kind == "spike" and record.ranks == [] and record.step == 4
    assert record.action == {"warn": "none", "skip": "skip", "rerun": "rerun"}[policy]
    assert ("the data caused it" in record.what) == (policy == "rerun")
    assert outcome.reruns[3] == (policy == "rerun")
    assert [bool(report.skipped) for report in outcome.reports] == [policy == "skip" and n == 3 for n in range(6)]


def test_there_is_no_spike_before_the_window_is_full_and_none_without_a_factor(shared_settings: list[str]) -> None:
    early = _train_one_rank([*shared_settings, *SPIKES, "guard.on_spike=skip"], Plan("large loss", step=2))
    assert not early.records
    unset = _train_one_rank([*shared_settings, "run.steps=5", "guard.window=2"], Plan("large loss", step=4))
    assert not unset.records


def test_a_resumed_run_decides_like_an_uninterrupted_one(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of four updates spans the interruption. The faults are in the run's folder."""
    # The loss of step 5 is too large. ``CollapseHint`` is a hook of every run.
    monkeypatch.setattr(job.CollapseHint, "after_backward", lambda self, step, loss: loss * 7 if step == 5 else loss)
    common = [*settings, "run.steps=6", "guard.window=4", "guard.loss_spike=3", "guard.on_spike=skip"]
    saving = [*common, "run.name=broken", "checkpoint.every=2", "checkpoint.resume=auto"]
    with crash_after(2), pytest.raises(Crash):
        run(None, [*saving, "checkpoint.background=false"])
    for result in (run(None, common), run(None, saving)):
        records = read_lines(result.folder / FAULTS, FaultRecord)
        assert [(record.step, record.kind) for record in records] == [(5, "spike")]
