"""Experts that FSDP2 shards in a loop of one's own, and that are lent to other ranks (``Balance``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import MoeCommError
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.overlap.options import Overlap
from moe_comm.topology.balance import Balance
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks

HIDDEN, EXPERTS = 24, 8
ALWAYS = Balance(rows=1.0, worth=0)
CONFIG = MoEConfig(HIDDEN, 8, RouterConfig(EXPERTS, 2), expert_bias=True)


@dataclass(frozen=True)
class Run:
    """A model to train. ep: ranks of an expert-parallel group. dtype: that of the gathered weights. together: all
    forward passes of a step precede its backward passes, which need the weights of lent experts again."""

    backend: str = "shared_memory"
    ep: int = 2
    reshard: bool = True
    checkpointed: bool = False
    dtype: torch.dtype | None = None
    overlap: Overlap | None = None
    together: bool = False
    balance: Balance | None = None
    config: MoEConfig = CONFIG


class Block(nn.Module):
    """A residual block with experts, with or without activation checkpointing."""

    def __init__(self, layer: MoELayer, checkpointed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float32, device="cpu")
        self.moe, self.checkpointed = layer, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._run, x, use_reentrant=False) if self.checkpointed else self._run(x))

    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(torch.tanh(self.linear(x)))
        return y


def build(rank: int, world: int, run: Run) -> nn.Sequential:
    """Return two blocks whose routers prefer the first experts."""
    groups = [dist.new_group(list(range(first, first + run.ep))) for first in range(0, world, run.ep)]
    options = DispatchOptions(balance=run.balance, timeout_s=60)
    torch.manual_seed(0)
    blocks = []
    for seed in range(2):
        layer = MoELayer.build(
            run.config, groups[rank // run.ep], backend=run.backend, options=options, overlap=run.overlap, seed=seed
        )
        blocks.append(Block(layer, run.checkpointed))
        with torch.no_grad():
            layer.router.weight.mul_(0.1)
            layer.router.weight[:2] += 0.2
            for bias in (layer.experts.b13, layer.experts.b2):
                assert bias is not None
                bias.fill_(0.1)
    return nn.Sequential(*blocks)


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [one for one in model.modules() if isinstance(one, MoELayer)]


def tokens(rank: int, seed: int) -> Tensor:
    return draw(16 + 8 * rank, HIDDEN, seed=rank + 10 * seed, dtype=torch.float32)


def train(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Train two steps of two micro-batches. Return results of the first step, and the weights."""
    model = build(rank, world, run)
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype), "reshard_after_forward": run.reshard}
    moe_comm.prepare_fsdp(model, **settings)
    for block in model:
        fully_shard(block, **settings)
    whole: Any = fully_shard(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    result: dict[str, Any] = {"lent": []}
    for step in range(2):
        inputs, outputs = [], []
        for micro in range(2):
            whole.set_requires_gradient_sync(micro == 1 or run.together)
            inputs.append(x := (-1) ** micro * tokens(rank, 2 * step + micro).requires_grad_())
            outputs.append(y := model(x))
            x.retain_grad()
            if not run.together:
                y.square().mean().backward()
            plans = [layer.last_plan for layer in layers_of(model)]
            result["lent"].append([() if plan is None else plan.lent for plan in plans])
        if run.together:
            sum(y.square().mean() for y in outputs).backward()
        if step == 0:
            for micro, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
                result |= {f"y {micro}": y.detach(), f"gradient of x {micro}": x.grad}
        optimizer.step()
        if step == 0:
            for name, param in model.named_parameters():
                grad: Any = param.grad
                result[f"gradient of {name}"] = grad if grad is None else grad.full_tensor()
        optimizer.zero_grad()
    with torch.no_grad():
        result["y without gradients"] = model(tokens(rank, 9))
    result |= {f"weight {name}": value for name, value in moe_comm.state_dict(model).items()}
    for layer in layers_of(model):
        layer.dispatcher.close()
    return result


PIPELINED = Overlap(2, 1, executor="pipelined")
UNEVEN = replace(CONFIG, experts_per_rank=(3, 0, 4, 1))
CASES = [
    (2, Run()),
    (2, Run("all_to_all", checkpointed=True)),
    (2, Run(overlap=PIPELINED)),
    (2, Run("all_to_all", together=True)),
    (4, Run(reshard=False, together=True)),
    (4, Run("all_to_all", reshard=False)),
    (4, Run(reshard=False, checkpointed=True)),
    (4, Run("all_to_all", ep=4, overlap=PIPELINED, config=replace(CONFIG, recompute=True))),
    (4, Run(dtype=torch.bfloat16)),
    (4, Run("all_to_all", ep=4, config=UNEVEN, checkpointed=True)),
    (4, Run(ep=4, config=UNEVEN)),
]


@pytest.mark.parametrize(("world", "run"), CASES)
def test_lent_experts_that_fsdp_shards_keep_the_bits(pools: dict[int, RankPool], world: int, run: Run) -> None:
    if run.backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    runs = [replace(run, balance=one) for one in (None, ALWAYS, ALWAYS)]
    for wanted, got, repeated in zip(*(pools[world].run(train, one, timeout=120) for one in runs), strict=True):
        wanted.pop("lent")
        lent = got.pop("lent")
        assert lent == repeated.pop("lent") and all(all(plans) for plans in lent) and lent[0] != lent[1]
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            if value is None:  # a rank without experts
                assert got[name] is None
                continue
            assert torch.equal(got[name], repeated[name]), f"{name} differs between two runs"
            if name.startswith(("y ", "gradient")) and "experts" not in name and "without" not in name:
                assert torch.equal(got[name], value), name
            else:
                bound = 1e-6 if run.dtype is None else 2**-7
                assert (got[name] - value).abs().max() <= bound * value.abs().max(), name


@on_ranks(2)
def test_experts_compute_rows_outside_of_a_call(group: dist.ProcessGroup, rank: int) -> None:
    results, x = [], tokens(rank, 0)
    for balance in (ALWAYS, None):
        (layer, _) = layers_of(moe_comm.prepare_fsdp(build(rank, 2, Run(balance=balance))))
        with torch.no_grad():
            for _ in range(2):
                results.append(layer(x))
                counts = (x.shape[0], 0, 0, 0)
                results.append(layer.experts(x, counts if balance is None else (*counts, 0, 0, 0, 0)))
        layer.dispatcher.close()
    assert all(map(torch.equal, results[:4], results[4:]))


def refuse(rank: int, world: int, case: str) -> list[str]:
    config = CONFIG
    if case == "fp8":
        config = MoEConfig(128, 128, RouterConfig(EXPERTS, 2), expert_bias=True, expert_gemm_dtype="fp8")
    layer = MoELayer.build(config, dist.group.WORLD, seed=3, options=DispatchOptions(balance=ALWAYS, timeout_s=60))
    x, texts = draw(16, config.hidden, seed=rank, dtype=torch.float32), []
    if case == "ignored":
        fully_shard(layer, ignored_params=set(layer.experts.parameters()))
    else:
        fully_shard(layer if case == "not prepared" else moe_comm.prepare_fsdp(layer))
    if case == "one rank":
        x = x[:, : config.hidden - rank]
    for _ in range(2):
        try:
            layer(x).sum().backward()
            texts.append("nothing raised")
        except MoeCommError as error:
            texts.append(f"{type(error).__name__}: {error}")
        x = draw(16, config.hidden, seed=rank, dtype=torch.float32)
    layer.dispatcher.close()
    return texts


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("not prepared", ("ConfigError", "moe_comm.prepare_fsdp(model)")),
        ("ignored", ("ConfigError", "moe_comm.prepare_fsdp(model)")),
        ("fp8", ("ConfigError", "without fp8 GEMMs")),
        ("one rank", ("InputError", "hidden")),
    ],
)
def test_errors_are_raised_on_every_rank(pool2: RankPool, case: str, keys: tuple[str, ...]) -> None:
    for first, second in pool2.run(refuse, case, timeout=60):
        assert all(key in first for key in keys), first
        assert all(key in second for key in keys) or (case == "one rank" and second == "nothing raised"), second
