"""Loops with wrong gradients raise before the first step, on every rank; unusual but correct loops do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from moe_comm.layers.data_parallel import expert_parameters
from tests.pool import on_ranks
from tests.training_loops.loops import difference, error_of, loss_at
from tests.training_loops.models import ep_group, gpt, gpt_shared_frozen, mixtral, qwen3, wrapped

Step = Callable[[Any], None]


def reduce_all(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)


def reduce_replicated(model: nn.Module, divide: int = 1) -> None:
    experts = {id(param) for param in expert_parameters(model).values()}
    for param in model.parameters():
        if id(param) not in experts and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= divide


def scale_by_own_norm(params: Any, p: float = 2.0) -> None:
    params = list(params)
    flat = torch.cat([param.grad.flatten() for param in params])  # a norm of ``param.grad`` would cover all ranks
    for param in params:
        param.grad *= 1e-4 / float(flat.norm(p))


def own_norm(model: nn.Module) -> None:
    moe_comm.sync_gradients(model)
    scale_by_own_norm(model.parameters())


def own_norm_of_experts(model: nn.Module) -> None:
    moe_comm.sync_gradients(model)
    scale_by_own_norm(expert_parameters(model).values(), torch.inf)


WRONG: dict[str, tuple[Step, str]] = {
    "no reduction": (lambda model: None, "differ between ranks"),
    "every parameter reduced": (reduce_all, "as if experts were replicated"),
    "mean for replicated parameters, sum for experts": (
        lambda model: reduce_replicated(model, dist.get_world_size()),
        "but 1 times that of experts",
    ),
    "clipped by the norm of one rank's gradients": (own_norm, "differ between ranks"),
    "experts clipped by the norm of one rank's gradients": (own_norm_of_experts, "scaled differently"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reduction_raises_before_the_first_step(rank: int, world: int, name: str) -> None:
    for build in (qwen3, lambda group: gpt(group, experts=4)):
        torch.manual_seed(1)
        model = build(ep_group(world))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_at(model, 0, rank, world).backward()
        WRONG[name][0](model)
        before = {key: value.clone() for key, value in moe_comm.state_dict(model).items()}
        message = error_of(optimizer.step)
        assert message.startswith("GradientMismatch") and WRONG[name][1] in message, message
        assert difference(moe_comm.state_dict(model), before) == 0


def decay(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad += 0.1 * param.detach()


def clip_apart(model: nn.Module) -> None:
    """Clip the experts and the other parameters by separate norms."""
    experts = expert_parameters(model)
    torch.nn.utils.clip_grad_norm_(list(experts.values()), 0.01)
    torch.nn.utils.clip_grad_norm_([p for name, p in model.named_parameters() if name not in experts], 0.1)


def clip_by_hand(model: nn.Module) -> None:
    total = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
    for param in model.parameters():
        param.grad *= min(1.0, 0.01 / float(total))


def synced(change: Step) -> Step:
    return lambda model: (moe_comm.sync_gradients(model), change(model))  # type: ignore[func-returns-value]


CORRECT: dict[str, Step] = {
    "clipping by value": synced(lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)),
    "weight decay in the gradient": synced(decay),
    "experts clipped apart": synced(clip_apart),
    "clipped by a norm taken by hand": synced(clip_by_hand),
    "replicated parameters reduced by hand": reduce_replicated,
}


@on_ranks(2)
def test_unusual_but_correct_loops_do_not_raise(rank: int, world: int) -> None:
    """Each loop has 5 steps. Gradients are checked before steps 1, 2 and 4."""

    def train(
        build: Callable[[Any], nn.Module],
        change: Step = moe_comm.sync_gradients,
        optimizers: Callable[[nn.Module], list[Any]] = lambda model: [torch.optim.SGD(model.parameters(), 0.1)],
        schedule: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = build(ep_group(world))
        steppers = optimizers(model)
        rates = [torch.optim.lr_scheduler.ExponentialLR(stepper, 0.5) for stepper in steppers] if schedule else []
        for step in range(5):
            loss_at(model, step, rank, world).backward()
            change(model)
            for stepper in steppers:  # cleared at once, so the check of the next optimizer does not see these gradients
                stepper.step()
                stepper.zero_grad()
            for rate in rates:
                rate.step()

    def dense_first(model: nn.Module) -> list[Any]:
        experts = expert_parameters(model)
        others = [param for name, param in model.named_parameters() if name not in experts]
        return [torch.optim.AdamW(others, 1e-3), torch.optim.SGD(experts.values(), 0.1)]

    for change in CORRECT.values():
        train(gpt, change)
    train(mixtral, schedule=True)
    train(gpt, optimizers=dense_first)
    train(gpt, optimizers=lambda model: dense_first(model)[::-1])
    train(gpt_shared_frozen)
    for loop in (accumulate_over_steps, local_sgd, unfreeze):
        loop(rank, world)


def accumulate_over_steps(rank: int, world: int) -> None:
    """Step after every micro-batch, and clear the gradients after every other step."""
    model = gpt(ep_group(world))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        if step % 2 == 0:
            optimizer.zero_grad()
        loss_at(model, step, rank, world).backward()
        local_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        moe_comm.sync_gradients(model)
        optimizer.step()
        for name, p in model.named_parameters():
            p.grad.copy_(local_grads[name])


def local_sgd(rank: int, world: int) -> None:
    model = gpt(ep_group(world))
    moe_comm.skip_gradient_checks(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_at(model, step, rank, world).backward()
        optimizer.step()


def unfreeze(rank: int, world: int) -> None:
    """Train the experts from the third step on. Their gradients are means under DDP, too."""
    model = gpt(ep_group(world))
    experts = expert_parameters(model).values()
    wrapped = DistributedDataParallel(moe_comm.prepare_ddp(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        for param in experts:
            param.requires_grad_(step >= 2)
        optimizer.zero_grad()
        loss_at(wrapped, step, rank, world, mean=True).backward()
        optimizer.step()


def some_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def even(world: int) -> nn.Module:
    """Return a model with even experts. With uneven ones, a collective of torch fails before the forward pass."""
    return gpt(ep_group(world), experts=4)


def forward(model: nn.Module, rank: int, world: int) -> None:
    loss_at(model, 0, rank, world)


def ddp_of_own(rank: int, world: int) -> None:
    with torch.no_grad():
        forward(DistributedDataParallel(even(world)), rank, world)


def ddp_of_wrapped(rank: int, world: int) -> None:
    model = wrapped(ep_group(world))
    del model._ddp_params_and_buffers_to_ignore
    forward(DistributedDataParallel(model), rank, world)


def ddp_with_hook(rank: int, world: int, declared: Any = None) -> None:
    ddp = DistributedDataParallel(moe_comm.prepare_ddp(even(world), grad_reduction=declared))
    ddp.register_comm_hook(None, some_hook)
    loss_at(ddp, 0, rank, world).backward()
    torch.optim.SGD(ddp.parameters(), 0.1).step()


def ddp_with_declared_hook(rank: int, world: int) -> None:
    ddp_with_hook(rank, world, "sum")


def fsdp_of_blocks(rank: int, world: int) -> None:
    model = qwen3(ep_group(world))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    forward(fully_shard(model), rank, world)


def fsdp(rank: int, world: int, *, ignore: bool = False, forward_first: bool = False) -> None:
    model = even(world)
    if forward_first:
        forward(model, rank, world)
    fully_shard(model, ignored_params=set(expert_parameters(model).values()) if ignore else None)
    forward(model, rank, world)


def sync(rank: int, world: int, *, by: str) -> None:
    model = even(world)
    if by == "fsdp":
        whole = fully_shard(moe_comm.prepare_fsdp(model))
    else:
        whole = DistributedDataParallel(moe_comm.prepare_ddp(model))
    loss_at(whole, 0, rank, world).backward()
    moe_comm.sync_gradients(model if by == "inside ddp" else whole)


FIX_DDP, FIX_FSDP = "model = DistributedDataParallel(moe_comm.prepare_ddp(model))", "moe_comm.prepare_fsdp(model)"
WRAPPED: dict[str, tuple[Callable[[int, int], None], str]] = {
    "ddp": (ddp_of_own, FIX_DDP),
    "ddp of a wrapped model": (ddp_of_wrapped, FIX_DDP),
    "ddp with a hook": (ddp_with_hook, 'moe_comm.prepare_ddp(model, grad_reduction="sum")'),
    "ddp with a declared hook": (ddp_with_declared_hook, ""),
    "fsdp": (fsdp, FIX_FSDP),
    "fsdp of blocks": (fsdp_of_blocks, FIX_FSDP),
    "fsdp ignoring experts": (partial(fsdp, ignore=True), FIX_FSDP),
    "fsdp after a forward": (partial(fsdp, forward_first=True), FIX_FSDP),
    "fsdp ignoring experts after a forward": (partial(fsdp, ignore=True, forward_first=True), FIX_FSDP),
    "sync under ddp": (partial(sync, by="ddp"), "DistributedDataParallel reduces gradients during backward"),
    "sync inside ddp": (partial(sync, by="inside ddp"), "DistributedDataParallel reduces gradients during backward"),
    "sync under fsdp": (partial(sync, by="fsdp"), "FSDP reduces gradients during backward"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_that_would_mix_experts_raises_and_names_the_fix(rank: int, world: int, name: str) -> None:
    call, expected = WRAPPED[name]
    torch.manual_seed(0)
    message = error_of(lambda: call(rank, world))
    assert message.startswith("ConfigError" if expected else "") and expected in message, message
    assert bool(message) == bool(expected), message
