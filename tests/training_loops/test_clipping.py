"""Gradient norms equal those of one process on all ranks; an infinite gradient skips the step on every rank."""

from __future__ import annotations

import torch

import moe_comm
from moe_comm.errors import NonFiniteLoss
from tests.pool import RankPool
from tests.training_loops.loops import CLIPS, MAX_NORM, Case, check, difference, error_of, loss_at, wrap
from tests.training_loops.models import KINDS, ep_group

CLIPPED = [
    Case(kind, loop, 2, clip=clip)
    for kind in ("gpt, 5 experts", "mixtral, 5 experts")
    for loop in ("own sum", "fsdp")
    for clip in CLIPS
    if clip != "no clip" and not (loop == "fsdp" and "torch" in clip)
]


def test_norms_of_every_order_are_those_of_one_process_on_two_ranks(pool2: RankPool) -> None:
    check(pool2, CLIPPED)


def test_norms_of_every_order_are_those_of_one_process_with_a_rank_without_experts(pool4: RankPool) -> None:
    check(pool4, [Case("gpt, 3 experts", "ddp", 4, clip=clip) for clip in CLIPS])
    check(pool4, [Case("gpt, 5 experts", "ddp", 2, clip=clip) for clip in CLIPS])


def clip_fsdp(rank: int, world: int, _: None) -> str:
    case = Case("gpt, 5 experts", "fsdp", world)
    model = wrap(KINDS[case.kind].on(ep_group(world)), case)
    loss_at(model, 0, rank, world, mean=True).backward()
    return error_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))


def test_clipping_by_torch_refuses_fsdp2_on_every_rank(pool2: RankPool) -> None:
    for message in pool2.run(clip_fsdp, timeout=60):
        assert message.startswith("RuntimeError"), message


def non_finite(rank: int, world: int, _: None) -> tuple[str, bool]:
    model = KINDS["gpt, 5 experts"].on(ep_group(world))
    loss_at(model, 0, rank, world).backward()
    moe_comm.sync_gradients(model)
    if rank == 1:
        model.blocks[1].moe.experts.w2.grad[0, 0, 0] = torch.inf
    before = model.head.weight.grad.clone()
    message = error_of(lambda: moe_comm.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    return message, torch.equal(before, model.head.weight.grad)


def test_an_infinite_norm_raises_on_every_rank_and_scales_nothing(pool2: RankPool) -> None:
    for message, same in pool2.run(non_finite, timeout=60):
        assert message.startswith(NonFiniteLoss.__name__)
        assert same


def scaled_steps(rank: int, world: int, kind: str) -> list[str]:
    """Run steps with ``GradScaler``. In the second step a gradient of an expert is infinite on rank 0 only."""
    wrong = []
    for loop, fused in [("own sum", None), ("ddp", None), ("ddp", True)]:
        case = Case(kind, loop, world)
        model = wrap(KINDS[kind].on(ep_group(world)), case)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            mean = loop == "ddp"
            scaler.scale(loss_at(model, step, rank, world, mean)).backward()
            if not mean:
                moe_comm.sync_gradients(model)
            if step == 1 and rank == 0:
                raw = getattr(model, "module", model)
                raw.blocks[0].moe.experts.w2.grad[0, 0, 0] = torch.inf
            before = {name: value.clone() for name, value in moe_comm.state_dict(model).items()}
            scaler.step(optimizer)
            scaler.update()
            changed = difference(moe_comm.state_dict(model), before) > 0
            if changed != (step != 1):
                wrong.append(f"{case}, fused {fused}: step {step} on rank {rank}: parameters moved: {changed}")
        if scaler.get_scale() != 2.0:
            wrong.append(f"{case}, fused {fused}: scale {scaler.get_scale()} on rank {rank}")
    return wrong


def test_an_infinite_gradient_of_one_rank_skips_the_step_on_every_rank(pool2: RankPool) -> None:
    wrong = [line for lines in pool2.run(scaled_steps, "gpt, 5 experts", timeout=60) for line in lines]
    assert not wrong, "\n".join(wrong)


def test_an_infinite_gradient_skips_the_step_on_ranks_without_experts_too(pool4: RankPool) -> None:
    wrong = [line for lines in pool4.run(scaled_steps, "gpt, 3 experts", timeout=60) for line in lines]
    assert not wrong, "\n".join(wrong)
