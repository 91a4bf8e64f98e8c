"""Layers that share experts still share them after the swap, and train as in one process; other ties are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.16.1", reason="needs the hf extra")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.hugging_face import (
    expert_parameters,
    gather_linears,
    record_routing,
    save_swapped,
    swap_attention,
    swap_linears,
    swap_moe,
)
from tests.integrations.models import assert_close, batch, load, new_model, num_targets, randomise, token_loss
from tests.pool import on_ranks

MAX_NORM = 0.01


def share_module(first: Any, second: Any) -> None:
    second.mlp.experts = first.mlp.experts


def share_parameters(first: Any, second: Any) -> None:
    for name, param in list(first.mlp.experts.named_parameters()):
        setattr(second.mlp.experts, name, param)


def share_block(first: Any, second: Any) -> None:
    second.mlp = first.mlp


def share_router(first: Any, second: Any) -> None:
    second.mlp.gate.weight = first.mlp.gate.weight


SHARED: dict[str, Callable[[Any, Any], None]] = {
    "module": share_module,
    "parameters": share_parameters,
    "block": share_block,
    "router": share_router,
}


def tied_model(kind: str) -> Any:
    model = new_model("mixtral")
    randomise(model, 0)
    SHARED[kind](*model.model.layers)
    return model.train()


def train(model: Any, ids: Tensor, targets: int, loop: str, world: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the logits, the norm of the gradients, and the state dict after a step."""
    inner = model
    if loop == "DDP":
        model = DistributedDataParallel(model)
    elif loop == "FSDP2":
        moe_comm.prepare_fsdp(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, eps=1e-3)
    logits = model(ids, use_cache=False).logits
    (token_loss(logits, ids, targets) * (world if loop in ("DDP", "FSDP2") else 1)).backward()
    if loop == "own":
        moe_comm.sync_gradients(model)
    if loop == "FSDP2":
        norm = moe_comm.clip_grad_norm_(model, MAX_NORM)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return logits.detach(), norm.detach(), moe_comm.state_dict(inner)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "loop"),
    [*((kind, "own") for kind in SHARED), ("module", "DDP"), ("parameters", "FSDP2"), ("block", "DDP")],
)
def test_shared_experts_train_as_in_one_process(rank: int, world: int, kind: str, loop: str, tmp_path: Any) -> None:
    ids = batch(world)
    want_logits, want_norm, want = train(tied_model(kind), torch.cat(ids), num_targets(ids), "one", 1)
    model = swap_moe(tied_model(kind), dist.group.WORLD)
    first, second = (layer.mlp for layer in model.model.layers)
    if kind != "router":
        assert first.experts is second.experts
        assert sum(p.numel() for p in expert_parameters(model).values()) == 4 * 3 * 24 * 32
        if loop == "own":
            with record_routing(model) as routing, torch.no_grad():
                model(ids[rank])
            assert [len(x) for x in routing.layers.values()] == [2 * ids[rank].numel()]
    logits, norm, state = train(model, ids[rank], num_targets(ids), loop, world)
    assert_close(logits, want_logits.split([len(part) for part in ids])[rank], "logits")
    assert_close(norm, want_norm, "norm of the gradients")
    assert state.keys() == want.keys()
    for name, value in want.items():
        assert_close(state[name], value, name, rtol=1e-4)
    if loop == "own" and kind in ("module", "parameters"):  # transformers saves no model with a shared router
        save_swapped(model, tmp_path)
        dist.barrier()
        loaded = load(str(tmp_path)).state_dict()
        for name, value in state.items():
            assert torch.equal(loaded[name], value), name
        other = swap_moe(tied_model(kind), dist.group.WORLD)
        moe_comm.load_state_dict(other, state)
        for name, value in moe_comm.state_dict(other).items():
            assert torch.equal(state[name], value), name


def share_one_stack(model: Any) -> None:
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj


def share_memory(model: Any) -> None:
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj.data = first.down_proj.data


def register_elsewhere(model: Any) -> None:
    model.extra = nn.ParameterList([model.model.layers[1].mlp.experts.gate_up_proj])


def share_with_another_activation(model: Any) -> None:
    share_parameters(*model.model.layers)
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrize(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    nn.utils.parametrize.register_parametrization(experts, "down_proj", Twice())


@pytest.mark.parametrize(
    "tie", [share_one_stack, share_memory, register_elsewhere, share_with_another_activation, parametrize]
)
def test_other_ties_are_refused_and_leave_the_model_unchanged(tie: Callable[[Any], None]) -> None:
    model = new_model("mixtral")
    tie(model)
    before = dict(model.named_modules())
    with pytest.raises(UnsupportedModel, match=r"share|one parameter|plain parameters"):
        swap_moe(model)
    assert dict(model.named_modules()) == before


# --- linears and attention ---


def share_dense_block(first: Any, second: Any) -> None:
    second.mlp.shared_expert = first.mlp.shared_expert


def share_linear(first: Any, second: Any) -> None:
    second.mlp.shared_expert.down_proj = first.mlp.shared_expert.down_proj


def share_weight(first: Any, second: Any) -> None:
    second.mlp.shared_expert.up_proj.weight = first.mlp.shared_expert.up_proj.weight


def share_query(first: Any, second: Any) -> None:
    second.self_attn.q_proj = first.self_attn.q_proj


@on_ranks(2)
def test_dense_blocks_stay_shared_and_shared_parts_of_blocks_are_refused() -> None:
    ids = batch(1)[0]
    model = new_model("qwen2_moe").eval()
    randomise(model, 0)
    share_dense_block(*model.model.layers)
    model.extra = model.model.embed_tokens
    before, want = {name: value.clone() for name, value in model.state_dict().items()}, model(ids).logits.detach()
    swap_linears(model, dist.group.WORLD)
    assert model.extra is model.model.embed_tokens and model.extra.weight.shape == before["extra.weight"].shape
    first, second = (layer.mlp.shared_expert for layer in model.model.layers)
    assert first.up_proj is second.up_proj and first.up_proj.weight.shape[0] == 20
    assert_close(model(ids).logits.detach(), want, "logits")
    full = gather_linears(model)
    assert all(torch.equal(full[name], value) for name, value in before.items())
    swaps = {share_linear: swap_linears, share_weight: swap_linears, share_query: swap_attention}
    for share, swap in swaps.items():
        model = new_model("qwen2_moe")
        share(*model.model.layers)
        with pytest.raises(UnsupportedModel, match="shares weights with another module"):
            swap(model, dist.group.WORLD)


# --- own layers ---


def own_layers(group: Any, shared: str) -> nn.ModuleList:
    config = moe_comm.MoEConfig(hidden=8, ffn=16, router=moe_comm.RouterConfig(4, 2))
    layers = [moe_comm.MoELayer.build(config, group, seed=n, label=f"{n}") for n in range(2)]
    if shared == "module":
        layers[1].experts = layers[0].experts
    else:
        layers[1].experts.w13, layers[1].experts.w2 = layers[0].experts.w13, layers[0].experts.w2
    return nn.ModuleList(layers)


def train_own(layers: nn.ModuleList, x: Tensor, ranks: int = 1) -> tuple[Tensor, dict[str, Any]]:
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    y = x
    for layer in layers:
        y = y + layer(y)
    y.square().sum().backward()
    if ranks > 1:
        moe_comm.sync_gradients(layers, reduction="mean")
    norm = moe_comm.clip_grad_norm_(layers, 1e9) * ranks
    for param in layers.parameters():
        if param.grad is not None:
            param.grad *= ranks
    optimizer.step()
    return norm, moe_comm.state_dict(layers)


@on_ranks(2)
@pytest.mark.parametrize("shared", ["module", "parameters"])
def test_own_layers_that_share_experts_count_them_once(rank: int, world: int, shared: str) -> None:
    x = torch.randn(world, 5, 8, generator=torch.Generator().manual_seed(0))
    want_norm, want = train_own(own_layers(None, shared), x.flatten(0, 1))
    layers = own_layers(dist.group.WORLD, shared)
    norm, state = train_own(layers, x[rank], world)
    assert_close(norm, want_norm, "norm of the gradients")
    for name, value in want.items():
        assert_close(state[name], value, name)
    if shared == "module":
        moe_comm.prepare_ddp(layers)
    else:
        with pytest.raises(UnsupportedModel, match="are one parameter of two experts modules"):
            moe_comm.prepare_ddp(layers)
