"""An optimizer or an average that holds replaced parameters raises at its first step, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.16.1", reason="needs the hf extra")

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

import moe_comm
from moe_comm.errors import ConfigError
from moe_comm.integrations.hugging_face import swap_attention, swap_linears, swap_moe
from moe_comm.topology import Placement
from tests.integrations.models import batch, new_model, num_targets, token_loss
from tests.pool import on_ranks

TO_RANK_0 = Placement(((0,),) * 8, 2)
TO_RANK_0_REVERSED = Placement(((0,),) * 8, 2, order=((7, 6, 5, 4, 3, 2, 1, 0), ()))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return f"ConfigError: {error}"
    return "nothing raised"


def backward(model: Any, rank: int, world: int) -> None:
    ids = batch(world)
    token_loss(model(ids[rank], use_cache=False).logits, ids[rank], num_targets(ids)).backward()
    moe_comm.sync_gradients(model)


def scheduled(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return lambda: (optimizer.step(), scheduler.step())


def accelerated(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer).step  # type: ignore[no-any-return]


def scaled(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return lambda: scaler.step(optimizer)


STEPS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True).step,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True).step,
    "scheduled": lambda model: scheduled(torch.optim.SGD(model.parameters(), 0.1)),
    "accelerate": lambda model: accelerated(torch.optim.AdamW(model.parameters())),
    "scaler": lambda model: scaled(torch.optim.AdamW(model.parameters())),
    "experts only": lambda model: torch.optim.AdamW([p for n, p in model.named_parameters() if ".experts." in n]).step,
}


@on_ranks(2)
def test_an_optimizer_that_was_built_before_the_swap_raises_on_every_rank(rank: int, world: int) -> None:
    swaps: dict[str, Callable[[Any], Any]] = {
        "two ranks": lambda model: swap_moe(model, dist.group.WORLD),
        "all experts on rank 0": lambda model: swap_moe(model, dist.group.WORLD, placement=TO_RANK_0),
        "reversed": lambda model: swap_moe(model, dist.group.WORLD, placement=TO_RANK_0_REVERSED),
        "linears": lambda model: swap_linears(model, dist.group.WORLD),
        "attention": lambda model: swap_attention(model, dist.group.WORLD),
        "linears, one rank": swap_linears,
    }
    for name, swap in swaps.items():
        torch.manual_seed(0)
        model = new_model("qwen2_moe")
        steps = {
            step: build(model) for step, build in (STEPS if name == "two ranks" else {"sgd": STEPS["foreach"]}).items()
        }
        swap(model)
        if name == "two ranks":
            backward(model, rank, world)
        for step, call in steps.items():
            message = error_of(call)
            assert message.startswith("ConfigError: this optimizer has a parameter"), f"{name}, {step}: {message}"
            assert "Build the optimizer after swap_" in message


def test_a_swap_on_one_rank_keeps_the_parameters_of_an_older_optimizer() -> None:
    model = new_model("qwen2_moe")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    experts = swap_moe(model).model.layers[0].mlp.experts
    before = experts.down_proj.detach().clone()
    backward(model, 0, 1)
    optimizer.step()
    assert not torch.equal(experts.down_proj, before)


@on_ranks(2)
def test_averages_and_optimizers_of_parameters_that_the_model_no_longer_has_raise(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = new_model("mixtral", num_local_experts=2)  # one expert a rank, which a copy with all would broadcast
    older = AveragedModel(model)
    swap_moe(model, dist.group.WORLD)
    assert "was built before swap_moe" in error_of(lambda: older.update_parameters(model))
    newer = AveragedModel(model)
    newer.update_parameters(model)
    newer.update_parameters(model)
    for name, value in moe_comm.state_dict(newer.module).items():
        assert torch.equal(value, moe_comm.state_dict(model)[name]), name
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model, rank, world)
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    backward(model, rank, world)
    optimizer.step()
    model.to(torch.float64).to(torch.float32)  # keeps the parameters
    backward(model, rank, world)
    optimizer.step()
    model.load_state_dict(state, assign=True)
    for _ in range(2):
        message = error_of(optimizer.step)
        assert message.startswith("ConfigError: this optimizer has a parameter") and "assign=True" in message
        backward(model, rank, world)
    torch.optim.AdamW(model.parameters()).step()
    backward(deepcopy(model), rank, world)
    torch.optim.AdamW(model.parameters()).step()
