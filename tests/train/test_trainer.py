from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm.errors import ConfigError, NonFiniteLoss, PeerError, RankMismatch
from moe_comm.train.data import Corpus
from moe_comm.train.trainer import Trainer
from tests.pool import RankPool
from tests.train.common import TEXT, full_weights, make_trainer, tiny


def _train(rank: int, world: int, overrides: tuple[str, ...]) -> Any:
    trainer = make_trainer(tiny(*overrides))
    status = trainer.fit()
    trainer.check_replicas()
    reports = [replace(report, seconds=1.0) for report in trainer.reports]
    answer = full_weights(trainer), reports, trainer.evaluate(), status
    trainer.model.close()
    return answer


SGD = ("optimizer.kind=sgd", "optimizer.lr=0.5", "model.aux_loss=0.1", "optimizer.clip=0.3")


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("spreading", [("parallel.ep=2",), ("parallel.ep=1",), ("parallel.ep=2", "data.batch=3")])
def test_one_and_two_ranks_end_with_the_same_weights(pool2: RankPool, family: str, spreading: tuple[str, ...]) -> None:
    """SGD and not Adam, which would hide a wrong scale of the experts' gradients."""
    common = (*SGD, f"model.family={family}")
    alone, reports, validation, _ = _train(0, 1, (*common, *spreading[1:]))
    untrained = full_weights(make_trainer(tiny(*common)))
    assert min(float((alone[name] - untrained[name]).abs().max()) for name in alone) > 1e-3
    assert any(report.grad_norm > 0.3 for report in reports), "clipping must take part"
    for weights, their_reports, their_validation, _ in pool2.run(_train, (*common, *spreading)):
        assert weights.keys() == alone.keys()
        for name, value in weights.items():
            assert torch.allclose(value, alone[name], rtol=1e-4, atol=1e-5), name
        for theirs, ours in zip(their_reports, reports, strict=True):
            assert theirs.loss == pytest.approx(ours.loss, rel=1e-5)
            assert theirs.balance == pytest.approx(ours.balance, rel=1e-4)
            assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-4)
            assert theirs.imbalance == pytest.approx(ours.imbalance)
        assert their_validation == pytest.approx(validation, rel=1e-5)


def test_training_again_gives_the_same_bits(pool2: RankPool) -> None:
    first, second = (pool2.run(_train, ("parallel.ep=2",)) for _ in range(2))
    for (weights, reports, validation, _), (weights_2, reports_2, validation_2, _) in zip(first, second, strict=True):
        assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
        assert (reports, validation) == (reports_2, validation_2)


def test_the_balance_loss_is_that_of_transformers() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    trainer = make_trainer(tiny("model.layers=1"))
    batch = trainer.corpus.train_batch(0)
    out: Any = trainer.model.module(input_ids=batch.inputs_BS, output_router_logits=True)
    routing = trainer.model.probe.take()
    ours = routing.balance_loss(routing.counts_LE, batch.num_targets)
    theirs = load_balancing_loss_func(out.router_logits, 5, 2)
    torch.testing.assert_close(ours, theirs)
    assert routing.counts_LE.sum() == 2 * batch.num_targets


def _poison(trainer: Trainer, at_call: int) -> None:
    """Make the logits of the given forward pass NaN, counted from 1."""
    calls = 0

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output * float("nan") if calls == at_call else output

    trainer.model.module.lm_head.register_forward_hook(hook)


def _nan_on_one_rank(rank: int, world: int, bad_rank: int) -> tuple[str, bool]:
    trainer = make_trainer(tiny("optimizer.clip=0.0"))
    for step in range(2):
        trainer.train_step(step)
    before = full_weights(trainer)
    if rank == bad_rank:
        _poison(trainer, at_call=1)
    with pytest.raises(NonFiniteLoss) as caught:
        trainer.train_step(2)
    after = full_weights(trainer)
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


def test_a_nan_loss_on_one_rank_stops_every_rank_before_the_weights_change(pool2: RankPool) -> None:
    for bad_rank in (0, 1):
        for message, unchanged in pool2.run(_nan_on_one_rank, bad_rank):
            assert f"step 3: the loss is NaN or infinite on rank {bad_rank};" in message
            assert unchanged


def test_an_infinite_gradient_leaves_the_weights_as_they_were() -> None:
    trainer = make_trainer(tiny())
    trainer.model.replicated[0].register_hook(lambda grad: grad * float("inf"))
    before = full_weights(trainer)
    with pytest.raises(NonFiniteLoss, match="gradient's norm is"):
        trainer.train_step(0)
    assert all(torch.equal(value, before[name]) for name, value in full_weights(trainer).items())


class _StopAt:
    """A sink that asks ``trainer`` to stop once it saw ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: Trainer | None = None

    def write(self, report: Any) -> None:
        if report.step == self.step and self.trainer is not None:
            self.trainer.request_stop()

    def summary(self, step: int, values: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def _stop_on_rank_1(rank: int, world: int, _: None) -> tuple[str, int]:
    sink = _StopAt(2)
    trainer = make_trainer(tiny("run.steps=50"), [sink])
    if rank == 1:
        sink.trainer = trainer
    return trainer.fit(), len(trainer.reports)


def test_a_stop_request_on_one_rank_ends_all_after_the_same_step(pool2: RankPool) -> None:
    assert pool2.run(_stop_on_rank_1) == [("interrupted", 3), ("interrupted", 3)]


def test_the_time_limit_ends_training_after_a_whole_step() -> None:
    trainer = make_trainer(tiny("run.steps=50", "run.time_limit_s=1e-6"))
    assert trainer.fit() == "time limit"
    assert len(trainer.reports) == 1


def test_a_batch_smaller_than_the_number_of_ranks_is_refused(pool2: RankPool) -> None:
    assert pool2.run(_refused, ("data.batch=1",)) == ["ConfigError"] * 2
    assert pool2.run(_refused, ("parallel.ep=3",)) == ["ConfigError"] * 2


def _refused(rank: int, world: int, overrides: tuple[str, ...]) -> str:
    try:
        make_trainer(tiny(*overrides))
    except ConfigError as error:
        return type(error).__name__
    return ""


def _drift(rank: int, world: int, _: None) -> str:
    trainer = make_trainer(tiny())
    trainer.check_replicas()
    if rank == 1:
        with torch.no_grad():
            trainer.model.replicated[0].view(-1)[0] += 1e-6
    with pytest.raises(RankMismatch) as caught:
        trainer.check_replicas()
    return str(caught.value)


def test_replicas_that_drifted_apart_are_noticed_on_every_rank(pool2: RankPool) -> None:
    assert all("replicated weights" in message for message in pool2.run(_drift))


def test_training_on_one_sentence_learns_it() -> None:
    config = tiny("run.steps=60", "optimizer.lr=0.02", "model.init_std=0.05")
    trainer = make_trainer(config)
    trainer.corpus = Corpus(TEXT, config.data, 0)
    assert trainer.fit() == "finished"
    assert trainer.reports[0].loss > 5
    assert trainer.reports[-1].loss < trainer.corpus.entropy
    assert trainer.evaluate() < trainer.corpus.entropy


def _leave(rank: int, world: int, _: None) -> str:
    trainer = make_trainer(tiny("parallel.timeout_s=10"))
    trainer.train_step(0)
    if rank == 1:
        os._exit(1)
    try:
        trainer.train_step(1)
    except PeerError as error:
        return type(error).__name__
    return "no error"


def test_a_rank_that_dies_between_steps_is_a_typed_error_on_the_other(pool2: RankPool) -> None:
    assert pool2.run(_leave, None, timeout=30, expect_dead={1})[0] == "PeerDied"
