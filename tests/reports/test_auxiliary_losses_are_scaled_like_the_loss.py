"""Auxiliary losses of a step are the mean over its micro-batches, whatever scales and divides the main loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.errors import InputError
from tests.integrations.loops import launched
from tests.integrations.models import new_model, randomise
from tests.pool import RankPool
from tests.reports.aux_loops import (
    Grads,
    MeanModel,
    Model,
    accelerate_loop,
    assert_equal,
    expected,
    gradients,
    micro_batches,
    own_loop,
    part,
    trainer_loop,
)


def test_the_documented_loop_with_a_loss_scaler() -> None:
    batches = micro_batches(3)
    assert_equal(own_loop(batches), expected(batches))


def test_a_loss_scaler_alone_needs_no_call() -> None:
    (ids,), model, scaler = micro_batches(1), Model(), torch.amp.GradScaler("cpu")
    scaler.scale(model(ids).loss).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), 0.0))
    assert_equal(gradients(model), expected([ids]))


def test_a_loss_divided_by_the_tokens_of_the_step_passes_the_number_of_micro_batches() -> None:
    batches, model = micro_batches(4), Model()
    for ids in batches:
        moe_comm.scale_aux_like(model(ids, num_items_in_batch=4 * ids.numel()).loss, 1 / 4).backward()
    assert_equal(gradients(model), expected(batches))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_scale_holds_under_activation_checkpointing(reentrant: bool) -> None:
    batches, model = micro_batches(2), Model()
    run, model.moe.forward = model.moe.forward, lambda x: checkpoint(run, x, use_reentrant=reentrant)  # type: ignore[method-assign]
    for ids in batches:
        (moe_comm.scale_aux_like(model(ids).loss) / 2).backward()
    assert_equal(gradients(model), expected(batches))


def test_a_set_aux_scale_is_used_as_it_is_and_a_scale_ends_with_its_backward_pass() -> None:
    (ids,), model = micro_batches(1), Model()
    model.moe.aux_scale = 1.0
    (8 * moe_comm.scale_aux_like(model(ids).loss)).backward()
    model.moe.aux_scale = None
    kept = gradients(model)
    model.zero_grad()
    model(ids).loss.backward()  # without a call: the factor is 1
    assert_equal(gradients(model), expected([ids]))
    loss_only = copy.deepcopy(model)
    loss_only.zero_grad()
    loss_only.moe.aux_scale = 0.0
    (7 * loss_only(ids).loss).backward()
    assert_equal({n: kept[n] - g for n, g in gradients(loss_only).items()}, expected([ids]))


def test_the_loss_is_a_scalar() -> None:
    with pytest.raises(InputError, match=r"scalar loss; got \(2,\)"):
        moe_comm.scale_aux_like(torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_accelerate(prepared: bool, scaler: bool) -> None:
    batches = micro_batches(4)
    with launched(0, 1):
        assert_equal(accelerate_loop(0, 1, batches, prepared, scaler), expected(batches))


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("model", [Model, MeanModel])
def test_trainer_also_in_a_last_step_of_fewer_micro_batches(moe: bool, model: Any) -> None:
    from transformers import Trainer

    from moe_comm.integrations.hugging_face import MoETrainer

    batches = micro_batches(5)
    with launched(0, 1):
        seen = trainer_loop(0, 1, batches, MoETrainer if moe else Trainer, model(), 3)
    for got, want in zip(seen, (batches[:3], batches[3:]), strict=True):
        assert_equal(got, expected(want))


def router_model() -> Any:
    """Return a model of transformers that adds an auxiliary loss of its own."""
    model = new_model(
        "mixtral", num_hidden_layers=1, hidden_size=16, output_router_logits=True, router_aux_loss_coef=2.0
    )
    randomise(model, 0)
    return model


def router_ranks(rank: int, world: int, arg: None) -> Grads:
    from moe_comm.integrations.hugging_face import MoETrainer, swap_moe

    with launched(rank, world):
        model = swap_moe(router_model(), dist.group.WORLD if world > 1 else None)
        (grads,) = trainer_loop(rank, world, micro_batches(3), MoETrainer, model, 3)
    return {name: grad for name, grad in grads.items() if "experts" not in name}


def test_the_auxiliary_loss_of_transformers_is_averaged_over_micro_batches_and_ranks(pool2: RankPool) -> None:
    for world in (1, 2):
        model = router_model()
        parts = [part(ids, rank, world) for ids in micro_batches(3) for rank in range(world)]
        for ids in parts:
            (model(input_ids=ids, labels=ids, use_cache=False).loss / len(parts)).backward()
        want = {name: grad for name, grad in gradients(model).items() if "experts" not in name}
        for got in pool2.run(router_ranks, None) if world == 2 else [router_ranks(0, 1, None)]:
            assert_equal(got, want)


def ranks(rank: int, world: int, loop: str) -> list[Grads]:
    """Return the replicated gradients of each step, with two micro-batches each."""
    batches = micro_batches(2)
    if loop == "accelerate":
        with launched(rank, world):
            grads = [accelerate_loop(rank, world, batches, True)]
    elif loop == "trainer":
        from moe_comm.integrations.hugging_face import MoETrainer

        with launched(rank, world):
            grads = trainer_loop(rank, world, batches, MoETrainer, Model(dist.group.WORLD), 2)
    else:
        model = Model(dist.group.WORLD)
        for ids in batches:
            loss = model(part(ids, rank, world)).loss / (world if loop == "sum" else 1)
            if loop == "sum":  # of the ranks: the auxiliary losses must not be divided by their number
                moe_comm.scale_aux_like(loss)
            else:
                moe_comm.scale_aux_like(loss, world)
            (loss / 2).backward()
        moe_comm.sync_gradients(model, reduction="sum" if loop == "sum" else "mean")
        grads = [gradients(model)]
    return [{name: grad for name, grad in step.items() if "experts" not in name} for step in grads]


@pytest.mark.parametrize("loop", ["sum", "mean", "accelerate", "trainer"])
def test_two_ranks_equal_one_process_with_their_batches(loop: str, pool2: RankPool) -> None:
    want = {name: grad for name, grad in expected(micro_batches(2)).items() if "experts" not in name}
    for steps in pool2.run(ranks, loop):
        (got,) = steps
        assert_equal(got, want)
