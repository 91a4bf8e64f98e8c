"""``deepspeed.moe.layer.MoE`` with the rows moved by moe_comm, against DeepSpeed's own transport and one process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.errors import MoeCommError
from tests.pool import RankPool

os.environ["DS_ACCELERATOR"] = "cpu"  # read on import
pytest.importorskip("deepspeed", reason="needs DeepSpeed: make adapters")
HIDDEN, EXPERTS = 16, 8


@dataclass(frozen=True)
class Case:
    """settings: of ``MoE``. tokens: of each rank. one: all tokens prefer one expert."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    tokens: tuple[int, ...] = (12, 12, 12, 12)
    one: bool = False
    dtype: torch.dtype = torch.float32


def case(name: str, tokens: tuple[int, ...] = (12, 12, 12, 12), one: bool = False, **settings: Any) -> Case:
    dtype = settings.pop("dtype", torch.float32)
    return Case(
        name, tuple(({"use_rts": False, "top2_2nd_expert_sampling": False} | settings).items()), tokens, one, dtype
    )


CAPACITY = (
    case("top-1 with dropped tokens", k=1, capacity_factor=0.5, min_capacity=1),
    case("top-2", k=2, capacity_factor=2.0),
    case("top-2 with dropped tokens", k=2, capacity_factor=0.4, min_capacity=1),
    case("top-3 with dropped tokens, residual", k=3, capacity_factor=0.6, min_capacity=1, use_residual=True),
    case("all tokens to one expert, which drops some", k=1, one=True, capacity_factor=2.0),
    case("top-2 in bfloat16", k=2, capacity_factor=0.7, dtype=torch.bfloat16),
)
DROPLESS = (
    case("even", k=2, drop_tokens=False),
    case("uneven tokens", tokens=(3, 9, 1, 6), k=3, drop_tokens=False),
    case("zero tokens on some ranks", tokens=(0, 7, 0, 2), k=3, drop_tokens=False, min_capacity=0),
    case("all tokens to one expert", k=1, one=True, drop_tokens=False),
)


def make(case: Case, ep_size: int, rank: int, grouped: bool = True) -> Any:
    """Return a layer of DeepSpeed whose experts differ, with the same weights for every ``ep_size``."""
    from deepspeed import comm, ops
    from deepspeed.moe.layer import MoE

    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # do not compile an all-reduce
    comm.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))
    layer = MoE(HIDDEN, expert, EXPERTS, ep_size, **dict(case.settings))
    local = layer.num_local_experts
    start = rank % ep_size * local
    with torch.no_grad():
        for number, one in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for param in one.parameters():
                g = torch.Generator().manual_seed(100 + start + number)
                param.copy_(0.3 * torch.randn(param.shape, generator=g))
        if case.one:
            layer.deepspeed_moe.gate.wg.weight[5] = 50.0
    if grouped:  # deepspeed.initialize does the same
        layer.set_deepspeed_parallelism()
    return layer.to(case.dtype)


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return positive tokens [1, T, D] and the gradient of the output."""
    g = torch.Generator().manual_seed(50 + rank)
    shape = 1, case.tokens[rank], HIDDEN
    return torch.rand(shape, generator=g).to(case.dtype), torch.randn(shape, generator=g).to(case.dtype)


def step(layer: Any, x: Tensor, grad: Tensor, aux_weight: float = 0.0) -> dict[str, Tensor]:
    """Return outputs and gradients of one step."""
    x = x.clone().requires_grad_()
    y, aux, counts = layer(x)
    loss = (y * grad).sum()
    (loss + aux_weight * aux if aux_weight else loss).backward()
    assert x.grad is not None
    found = {"y": y.detach(), "aux": aux.detach(), "counts": counts, "x": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def both(rank: int, world: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from moe_comm.integrations.deepspeed import swap_transport

    theirs, ours = make(case, world, rank), swap_transport(make(case, world, rank))
    return step(theirs, *inputs(case, rank), 0.1), step(ours, *inputs(case, rank), 0.1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CAPACITY, ids=lambda case: case.name)
def test_results_are_those_of_deepspeeds_transport(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    tolerance = 1e-5 if case.dtype is torch.float32 else 0.05
    for theirs, ours in pools[world].run(both, case):
        assert theirs.keys() == ours.keys() and len(ours) > 4
        assert torch.equal(theirs["counts"], ours["counts"]) and torch.equal(theirs["aux"], ours["aux"])
        for name, expected in theirs.items():
            torch.testing.assert_close(
                ours[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
            )


def distributed_and_whole(rank: int, world: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return what this rank computes, and on rank 0 what DeepSpeed computes with all tokens in one process."""
    from moe_comm.integrations.deepspeed import swap_transport

    found = step(swap_transport(make(case, world, rank)), *inputs(case, rank))
    whole = make(case, 1, 0)
    parts = [inputs(case, r) for r in range(world)]
    x, grad = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    x = x.requires_grad_()
    y, _, counts = whole(x)
    (y * grad).sum().backward()
    expected = {"y": y.detach(), "x": x.grad, "counts": counts}
    expected |= {name: p.grad for name, p in whole.named_parameters()}
    return found, expected if rank == 0 else None


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", DROPLESS, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_one_process(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    results = pools[world].run(distributed_and_whole, case)
    expected = results[0][1]
    ranks = [found for found, _ in results]
    for name in ("y", "x"):
        torch.testing.assert_close(torch.cat([found[name] for found in ranks], 1), expected[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(sum(found["counts"] for found in ranks), expected["counts"])
    for name, value in expected.items():
        if found := re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name):
            owner, index = divmod(int(found[2]), EXPERTS // world)
            got = ranks[owner][f"{found[1]}{index}{found[3]}"]
        elif "." in name:
            got = sum(ranks_of[name] for ranks_of in ranks)  # the gate
        else:
            continue
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")


class Model(nn.Module):
    """Two MoE layers and a loss. Each rank has its own batch."""

    def __init__(self, case: Case, ep_size: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(make(case, ep_size, rank, grouped=False) for _ in range(2))
        nn.init.eye_(self.embedding.weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, total = self.embedding(x), torch.zeros(())
        for layer in self.layers:
            y, aux, _ = layer(x)
            x, total = x + y, total + 0.01 * aux
        return (x - target).square().mean() + total


def train(rank: int, world: int, arg: tuple[int, int, bool]) -> tuple[list[float], float, dict[str, Tensor]]:
    """Return losses, the last norm of gradients and the weights of three steps of DeepSpeed's engine."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    from moe_comm.integrations.deepspeed import swap_transport

    stage, ep_size, swapped = arg
    own = case("trained", k=2, capacity_factor=1.0, min_capacity=1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    model: nn.Module = Model(own, ep_size, rank)
    if swapped:
        model = swap_transport(model)
    groups = split({"params": list(model.parameters()), "name": "all"})
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    losses = []
    for _ in range(3):
        loss = engine(*inputs(own, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    norm = float(engine.get_global_grad_norm() or 0.0)
    return losses, norm, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize(("world", "ep_size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_engine_trains_as_with_deepspeeds_transport(
    stage: int, world: int, ep_size: int, pools: dict[int, RankPool]
) -> None:
    theirs = pools[world].run(train, (stage, ep_size, False))
    ours = pools[world].run(train, (stage, ep_size, True))
    for (losses, norm, weights), (got, got_norm, got_weights) in zip(theirs, ours, strict=True):
        assert got == pytest.approx(losses, rel=1e-5) and got[-1] < got[0]
        assert got_norm == pytest.approx(norm, rel=1e-4)
        assert weights.keys() == got_weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(got_weights[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n} {m}")


def refuse(rank: int, world: int, _: None) -> list[str]:
    """Return the errors of an unused Tutel, no MoE layer, no group, and rows of another dtype on the last rank."""
    from moe_comm.integrations.deepspeed import swap_transport

    layer = make(case("refused", k=2), world, rank, grouped=False)
    layer.deepspeed_moe.use_tutel = True  # Tutel is not installed
    errors = [error_of(swap_transport, layer), error_of(swap_transport, nn.Linear(2, 2))]
    layer.deepspeed_moe.use_tutel = False
    model = swap_transport(nn.ModuleDict({"block": layer}))
    x = torch.ones(1, 4, HIDDEN)
    errors.append(error_of(model["block"], x))
    layer.set_deepspeed_parallelism()
    errors.append(error_of(model["block"], x.bfloat16() if rank == world - 1 else x))
    return errors


def error_of(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except MoeCommError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_errors_raise_on_every_rank(pools: dict[int, RankPool]) -> None:
    for tutel, none, no_group, mismatch in pools[2].run(refuse):
        assert tutel.startswith("UnsupportedModel") and "use_tutel=False" in tutel
        assert none.startswith("UnsupportedModel") and "no deepspeed.moe.layer.MoE" in none
        assert no_group.startswith("ConfigError") and "deepspeed.initialize" in no_group
        assert mismatch.startswith("RankMismatch") and "block.deepspeed_moe" in mismatch


class TensorParallel:
    """An ``mpu``, as of Megatron, with one tensor-parallel group of all ranks."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.alone = [dist.new_group([one]) for one in range(world)][rank]

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.world

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self.alone


def tensor_parallel(rank: int, world: int, swapped_first: bool) -> str:
    """Return the error of ``swap_transport`` or of the first step, whichever follows ``deepspeed.initialize``."""
    import deepspeed
    from deepspeed.utils import groups

    from moe_comm.integrations.deepspeed import swap_transport

    own = case("tensor-parallel", k=1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    model: nn.Module = Model(own, 1, rank)
    if swapped_first:
        swap_transport(model)
    try:
        engine, _, _, _ = deepspeed.initialize(
            model=model, config={"train_micro_batch_size_per_gpu": 1}, mpu=TensorParallel(rank, world)
        )
        return error_of(engine, *inputs(own, 0)) if swapped_first else error_of(swap_transport, engine.module)
    finally:
        groups.mpu = None


@pytest.mark.parametrize("swapped_first", [True, False])
def test_tensor_parallelism_is_found_before_and_after_initialize(
    swapped_first: bool, pools: dict[int, RankPool]
) -> None:
    for error in pools[2].run(tensor_parallel, swapped_first):
        assert error.startswith("UnsupportedModel") and "tensor parallelism" in error
