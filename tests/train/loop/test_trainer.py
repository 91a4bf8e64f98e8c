"""The training loop: equal results on all mappings, non-finite values on one rank, and clean stops."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from moe_comm.errors import ConfigError, NonFiniteLoss, PeerError
from moe_comm.layers.attention.sequence import Documents
from moe_comm.train.data import IGNORE
from moe_comm.train.loop.trainer import Trainer
from tests.pool import RankPool
from tests.train.common import SGD, Session, assert_same_training, session, train, whole


@pytest.mark.parametrize(
    "mapping",
    [
        ("parallel.ep=2", "parallel.sharding=fsdp"),
        ("parallel.tp=2", "model.family=deepseek_v3", "model.expert_groups=2", "model.shared_ffn=24"),
        ("parallel.dp=2", "parallel.ep=1", "parallel.sharding=zero1", "data.batch=6"),
        ("parallel.ep=2", "parallel.overlap_gradients=on", "model.recompute=full", "model.tie=true"),
        ("parallel.ep=1", "parallel.sharding=fsdp", "parallel.overlap_gradients=on", "model.recompute=full"),
        (
            "parallel.dp=2",
            "parallel.ep=1",
            "parallel.sharding=zero1",
            "parallel.overlap_gradients=on",
            "parallel.overlap_chunks=2",
            "parallel.interleave=true",
        ),
        ("parallel.cp=2", "parallel.context=ring", "model.family=olmoe", "model.kv_heads=4"),
        (
            "parallel.cp=2",
            "parallel.context=ring",
            "parallel.lengths=balanced",
            "parallel.sharding=fsdp",
            "data.documents=separate",
            "model.family=olmoe",
        ),
        ("parallel.cp=2", "parallel.context=token_ring", "model.family=mixtral", "model.window=5"),
        ("parallel.cp=2", "parallel.overlap_chunks=2", "model.family=deepseek_v3", "model.expert_groups=2"),
        ("parallel.pp=2", "parallel.schedule=zero_bubble", "model.family=mixtral", "model.window=5"),
        (
            "parallel.pp=2",
            "parallel.schedule=dualpipev",
            "parallel.overlap_chunks=2",
            "parallel.interleave=true",
            "data.micro_batches=8",
            "model.layers=4",
        ),
        ("parallel.ep=1", "parallel.etp=2", "model.parallel_block=true"),
        (
            "parallel.ep=2",
            "parallel.backend=all_to_all",
            "parallel.overlap_chunks=2",
            "parallel.interleave=true",
            "model.shortcut=true",
            "model.dense_ffn=24",
        ),
    ],
    ids=lambda mapping: " ".join(key.split(".")[1] for key in mapping),
)
def test_two_ranks_train_to_the_weights_of_one_rank(
    pool2: RankPool, shared_settings: list[str], mapping: tuple[str, ...]
) -> None:
    model_settings = [key for key in mapping if not key.startswith("parallel")]
    one_rank = train(0, 1, [*shared_settings, *SGD, *model_settings])
    assert any(norm > 0.5 for norm in one_rank.norms), "no gradient was clipped"
    assert_same_training(pool2.run(train, [*shared_settings, *SGD, *mapping], timeout=90), one_rank)


def test_training_again_gives_the_same_bits(pool2: RankPool, shared_settings: list[str]) -> None:
    first, second = (pool2.run(train, [*shared_settings, "parallel.ep=2"]) for _ in range(2))
    assert [t.losses for t in first] == [t.losses for t in second]
    assert [(t.norms, t.validation) for t in first] == [(t.norms, t.validation) for t in second]
    weights, second_weights = (whole([t.parts for t in run]) for run in (first, second))
    assert all(torch.equal(weights[name], second_weights[name]) for name in weights)


def test_the_first_loss_is_uniform_and_the_balance_loss_matches_the_loads(
    shared_settings: list[str],
) -> None:
    with session([*shared_settings, "model.init_std=1e-4", "data.micro_batches=1"]) as active:
        report = active.trainer.train_step(0)
        assert report.loss == pytest.approx(math.log(active.corpus.vocab_size), rel=1e-3)
        assert report.tokens == 8 * 16
        # Uniform probabilities: E * sum(f_e / E) over f_e that add up to K.
        assert report.load.balance == pytest.approx([2.0, 2.0], rel=1e-3)


def _poison(active: Session, how: str) -> None:
    """Make this rank's loss or router inputs NaN from now on."""
    if how == "loss":
        stage = active.stages[-1]
        loss = stage.loss
        stage.loss = lambda hidden, targets: loss(hidden, targets) * math.nan
    else:
        block = next(iter(active.stages[0].layers.values()))
        block.attention.register_forward_hook(lambda module, args, output: output * math.nan)


def _nan_on_one_rank(rank: int, world: int, arg: tuple[list[str], int, str]) -> tuple[str, bool]:
    settings, bad_rank, how = arg
    with session(settings) as active:
        for step in range(2):
            active.trainer.train_step(step)
        before = {name: pieces for name, (_, pieces) in active.parts().items()}
        if rank == bad_rank:
            _poison(active, how)
        with pytest.raises(NonFiniteLoss) as caught:
            active.trainer.train_step(2)
        after = active.parts()
        same = all(
            torch.equal(a, b) for name in before for (_, a), (_, b) in zip(before[name], after[name][1], strict=True)
        )
        return str(caught.value), same


@pytest.mark.parametrize("how", ["loss", "activations"])
@pytest.mark.parametrize(("mapping", "bad_rank"), [("parallel.ep=2", 0), ("parallel.ep=1", 1), ("parallel.pp=2", 1)])
def test_a_nan_on_one_rank_stops_every_rank_before_the_weights_change(
    pool2: RankPool, shared_settings: list[str], mapping: str, bad_rank: int, how: str
) -> None:
    """The NaN is in the loss or in a router, which other ranks would otherwise wait for."""
    for message, unchanged in pool2.run(_nan_on_one_rank, ([*shared_settings, mapping], bad_rank, how)):
        assert "step 3: " in message
        assert f"NaN or infinite on rank {bad_rank}" in message
        assert unchanged


def _skip(rank: int, world: int, settings: list[str]) -> list[tuple[bool, bool]]:
    """Return for each of three steps whether it was skipped and whether the weights changed."""
    outcomes = []
    with session([*settings, "run.nonfinite=skip"]) as active:
        stage = active.stages[-1]
        loss = stage.loss
        for step in range(3):
            before = active.parts()
            bad = step == 1 and rank == world - 1
            stage.loss = (lambda hidden, targets: loss(hidden, targets) * math.inf) if bad else loss
            report = active.trainer.train_step(step)
            changed = any(
                not torch.equal(a, b)
                for name, (_, pieces) in active.parts().items()
                for (_, a), (_, b) in zip(pieces, before[name][1], strict=True)
            )
            outcomes.append((bool(report.skipped), changed))
            assert math.isfinite(report.grad_norm) != bool(report.skipped)
    return outcomes


@pytest.mark.parametrize("mapping", ["parallel.ep=2", "parallel.sharding=fsdp", "parallel.pp=2"])
def test_a_skipped_step_is_skipped_on_all_ranks_and_training_continues(
    pool2: RankPool, shared_settings: list[str], mapping: str
) -> None:
    expected = [(False, True), (True, False), (False, True)]
    assert pool2.run(_skip, [*shared_settings, mapping]) == [expected] * 2


def test_an_infinite_gradient_does_not_change_the_weights(shared_settings: list[str]) -> None:
    with session(shared_settings) as active:
        before = whole([active.parts()])
        active.stages[0].norm.weight.register_hook(lambda grad: grad * math.inf)
        with pytest.raises(NonFiniteLoss, match="gradient's norm is"):
            active.trainer.train_step(0)
        after = whole([active.parts()])
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def _stop_on_rank_1(rank: int, world: int, settings: list[str]) -> tuple[str, int]:
    with session([*settings, "run.steps=50"]) as active:
        trainer = active.trainer

        def after(report: Any) -> None:
            if rank == 1 and report.step == 2:
                trainer.request_stop()

        return trainer.fit(after), len(trainer.reports)


def test_a_stop_request_on_one_rank_stops_all_after_the_same_step(pool2: RankPool, shared_settings: list[str]) -> None:
    assert pool2.run(_stop_on_rank_1, shared_settings) == [("interrupted", 3)] * 2


def test_the_time_limit_ends_training_after_a_complete_step(shared_settings: list[str]) -> None:
    with session([*shared_settings, "run.steps=50", "run.time_limit_s=1e-6"]) as active:
        assert active.trainer.fit() == "time limit"
        assert len(active.trainer.reports) == 1


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        (("data.batch=2", "parallel.dp=2"), "1 sequences for 2 data-parallel ranks"),
        (("parallel.ep=3",), "3"),
        (("parallel.pp=2", "parallel.schedule=zbv", "model.layers=1"), "layers"),
        (("parallel.tp=2", "model.heads=3", "model.kv_heads=1", "model.head_dim=8"), "heads"),
    ],
    ids=["batch", "ep", "layers", "heads"],
)
def test_an_invalid_mapping_raises_on_every_rank(
    pool2: RankPool, shared_settings: list[str], invalid: tuple[str, ...], expected: str
) -> None:
    messages = pool2.run(_refused, [*shared_settings, *invalid])
    assert all(expected in message for message in messages), messages


def _refused(rank: int, world: int, settings: list[str]) -> str:
    try:
        with session(settings) as active:
            active.trainer.train_step(0)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_training_learns_the_text(shared_settings: list[str]) -> None:
    learn = ("run.steps=60", "optimizer.lr=0.02", "model.init_std=0.05", "data.batch=16")
    with session([*shared_settings, *learn]) as active:
        assert active.trainer.fit() == "finished"
        reports = active.trainer.reports
        assert reports[0].loss > 5
        entropy = active.corpus.statistics().unigram_entropy
        assert reports[-1].loss < entropy
        assert active.trainer.evaluate() < entropy


class _Summaries:
    """A sink that records summaries."""

    def __init__(self) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []

    def write(self, report: Any) -> None: ...

    def summary(self, step: int, values: dict[str, float]) -> None:
        self.values.append((step, dict(values)))

    def close(self) -> None: ...


def test_perplexity_is_the_exponential_of_the_mean_loss_of_the_targets(shared_settings: list[str]) -> None:
    """The reference is a log-softmax in float64. Padding and the last tokens of documents are not targets."""
    settings = [*shared_settings, "data.packing=best_fit", "data.documents=separate", "data.seq_len=12"]
    sink = _Summaries()
    with session(settings, sinks=[sink]) as active:
        active.trainer.train_step(0)
        loss = active.trainer.evaluate()
        (model,) = active.stages
        losses = []
        for whole_batch in active.corpus.validation_batches(2):
            batch = whole_batch.local()
            documents = Documents.of(batch.documents_BS, None, "ulysses")
            with torch.no_grad():
                logits_BSV = model.logits(model(batch.ids_BS, positions=batch.positions_BS, documents=documents))
            log_p_BSV = logits_BSV.double().log_softmax(-1)
            counted_BS = batch.targets_BS != IGNORE
            targets_BS1 = batch.targets_BS.clamp(min=0).unsqueeze(-1)
            losses.append(-log_p_BSV.gather(-1, targets_BS1).squeeze(-1)[counted_BS])
    mean = torch.cat(losses).mean().item()
    assert 0 < len(torch.cat(losses)) < 2 * 8 * 12, "some targets must not count"
    assert loss == pytest.approx(mean, rel=1e-6)
    ((step, values),) = sink.values
    assert (step, values["validation/loss"]) == (0, loss)
    assert values["validation/perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def _leave(rank: int, world: int, settings: list[str]) -> str:
    """Rank 1 exits between steps, or in a backward pass in which gradients are reduced."""
    with session(settings) as active:
        active.trainer.train_step(0)
        if rank == 1 and "parallel.overlap_gradients=on" not in settings:
            os._exit(1)
        if rank == 1:
            first = next(iter(active.stages[0].parameters()))
            first.register_hook(lambda grad: os._exit(1))
        try:
            active.trainer.train_step(1)
        except PeerError as error:
            return type(error).__name__
    return "no error"


@pytest.mark.parametrize("mapping", [[], ["parallel.ep=1", "parallel.overlap_gradients=on"]])
def test_a_rank_that_dies_between_steps_or_in_backward_is_a_typed_error_on_the_other(
    pool2: RankPool, shared_settings: list[str], mapping: list[str]
) -> None:
    assert pool2.run(_leave, [*shared_settings, *mapping], timeout=120, expect_dead={1})[0] == "PeerDied"


def test_the_times_of_a_step_add_up_to_its_total(shared_settings: list[str]) -> None:
    with session(shared_settings) as active:
        trainer: Trainer = active.trainer
        for step in range(2):
            times = trainer.train_step(step).times
            parts = (times.compute, times.communication, times.data, times.checkpoint, times.loop)
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(times.total)
            assert times.communication == times.checkpoint == 0, "one rank without a saver"
            assert times.compute > 0
