"""Gradient norms equal those of one process on all ranks; an infinite gradient skips the step on every rank."""

from __future__ import annotations

import math
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import moe_comm
from moe_comm.errors import NonFiniteLoss
from tests.pool import RankPool, on_ranks
from tests.training_loops.loops import CLIPS, MAX_NORM, Case, check, difference, error_of, loss_at, wrap
from tests.training_loops.models import KINDS, ep_group

CLIPPED = [
    *(("own sum", clip) for clip in CLIPS if clip != "no clip"),
    *(("fsdp", clip) for clip in CLIPS if clip.startswith("our")),
]


@pytest.mark.slow
def test_norms_of_every_order_are_those_of_one_process_on_two_ranks(pool2: RankPool) -> None:
    kinds = cycle(("gpt, 5 experts", "gpt, 5 experts", "mixtral, 5 experts", "mixtral, 5 experts"))
    check(pool2, [Case(kind, loop, 2, clip=clip) for kind, (loop, clip) in zip(kinds, CLIPPED, strict=False)])


def test_norms_of_every_order_are_those_of_one_process_with_a_rank_without_experts(pool4: RankPool) -> None:
    models = ("gpt, 3 experts", 4), ("gpt, 5 experts", 2)
    of_clips = [(models[i // 2 % 2], clip) for i, clip in enumerate(CLIPS)]
    check(pool4, [Case(kind, "ddp", ep, clip=clip) for (kind, ep), clip in of_clips])


@on_ranks(2)
def test_clipping_by_torch_refuses_fsdp2_on_every_rank(rank: int, world: int) -> None:
    case = Case("gpt, 5 experts", "fsdp", world)
    model = wrap(KINDS[case.kind].on(ep_group(world)), case)
    loss_at(model, 0, rank, world, mean=True).backward()
    message = error_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    assert message.startswith("RuntimeError"), message


@on_ranks(2)
def test_parameters_on_two_meshes_of_the_same_ranks_have_one_norm(rank: int, world: int) -> None:
    """As torch gives the parameters of a model the mesh of an older one, on some ranks only."""
    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(2)]
    model = nn.ParameterList(
        DTensor.from_local(torch.full((1 + index,), 3.0), meshes[index * rank], [Shard(0)]) for index in range(2)
    )
    for param in model:
        param.grad = param.detach().clone()
    assert float(moe_comm.clip_grad_norm_(model, 1.0)) == pytest.approx(math.sqrt(6 * 9))


@on_ranks(2)
def test_an_infinite_norm_raises_on_every_rank_and_scales_nothing(rank: int, world: int) -> None:
    model = KINDS["gpt, 5 experts"].on(ep_group(world))
    loss_at(model, 0, rank, world).backward()
    moe_comm.sync_gradients(model)
    if rank == 1:
        model.blocks[1].moe.experts.w2.grad[0, 0, 0] = torch.inf
    before = model.head.weight.grad.clone()
    with pytest.raises(NonFiniteLoss):
        moe_comm.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.equal(before, model.head.weight.grad)


@on_ranks(2, 4)
def test_an_infinite_gradient_of_one_rank_skips_the_step_on_every_rank(rank: int, world: int) -> None:
    """Also on ranks without experts, with four ranks. In the second step a gradient of rank 0 is infinite."""
    kind = "gpt, 5 experts" if world == 2 else "gpt, 3 experts"
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
            assert changed == (step != 1), f"{case}, fused {fused}, step {step}"
        assert scaler.get_scale() == 2.0, f"{case}, fused {fused}"
