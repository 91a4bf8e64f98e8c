"""PEFT's LoRA of the linear layers of single experts, in blocks that are not from transformers, over several ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs make hosts")

import peft
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from moe_comm import swap_moe
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import GradientMismatch, InputError, MoeCommError
from moe_comm.integrations.hugging_face import expert_parameters, swapped_experts
from moe_comm.overlap.options import Overlap
from moe_comm.topology.balance import Balance
from tests.integrations.blocks.styles import DeepSeek, Megatron, Mixtral, Model, NoisyTopK, Torchtitan
from tests.integrations.models import assert_close
from tests.pool import RankPool

LAYERS: dict[str, Any] = {"target_modules": ["w1", "w2", "w3"]}


class Named(Mixtral):
    """Mixtral with names of experts, which are not in the order of their numbers."""

    NAMES = ("fast", "c", "a", "d", "z", "b", "slow")

    def __init__(self) -> None:
        super().__init__()
        named = dict(zip(self.NAMES, self.experts, strict=True))
        self.experts: Any = nn.ModuleDict({name: named[name] for name in sorted(named)})

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, 24)
        weights, selected = torch.topk(self.gate(flat), 2)
        weights, y = weights.softmax(1), torch.zeros_like(flat)
        for number, name in enumerate(self.NAMES):
            token, slot = torch.where(selected == number)
            y[token] += weights[token, slot, None] * self.experts[name](flat[token])
        return y.view_as(inputs)


class FusedExperts(nn.Module):
    """Gate and up alternate in one parameter [E, D, 2F]."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(7, 20, 24) * 0.1)
        self.w13 = nn.Parameter(torch.randn(7, 24, 40) * 0.1)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows = []
        for number, part in enumerate(torch.split(x, counts.tolist())):
            h = part @ self.w13[number]
            rows.append((nn.functional.silu(h[:, ::2]) * h[:, 1::2]) @ self.down_proj[number])
        return torch.cat(rows)


class Fused(Torchtitan):
    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.experts: Any = FusedExperts()
        self.experts.is_transposed = self.is_transposed


class OtherSide(Fused):
    """PEFT takes the last dimension for the inputs."""

    is_transposed = False


STACKED = {"target_modules": [], "target_parameters": ["experts.w1", "experts.w2", "experts.w3"]}
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "three layers": (Mixtral, LAYERS | {"rank_pattern": {"w2": 3, "experts.1.w1": 5}, "alpha_pattern": {"w3": 6}}),
    "biases, some experts": (NoisyTopK, {"target_modules": r".*experts\.[0245]\.c_.*|.*router", "use_rslora": True}),
    "shared experts": (DeepSeek, LAYERS | {"init_lora_weights": True}),
    "names": (Named, LAYERS),
    "fused": (Megatron, {"target_modules": "all-linear"}),
    "stacked": (Torchtitan, STACKED),
    "stacked, fused": (Fused, {"target_modules": ["head"], "target_parameters": ["experts.w13", "experts.down_proj"]}),
    "stacked, other side": (OtherSide, {"target_modules": [], "target_parameters": ["experts.w13"]}),
}
TOKENS = (9, 5, 0, 6)


def new_model(style: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(style).eval()


def adapted(model: nn.Module, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "init_lora_weights": False} | settings)
    return peft.get_peft_model(model, config).eval()


def swapped(style: type[nn.Module], settings: dict[str, Any], swap_first: bool, group: Any = None, **swap: Any) -> Any:
    if swap_first:
        return adapted(swap_moe(new_model(style), group, **swap), settings)
    return swap_moe(adapted(new_model(style), settings), group, **swap)


def inputs(world: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(2, count, 5) for count in TOKENS[:world]]


def train(model: Any, x: Tensor, steps: int, world: int = 1, optimizer: Any = None, total: int = 28) -> Tensor:
    optimizer = optimizer or torch.optim.SGD(trainable(model), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(x)[0]
        (logits.square().sum() / total).backward()
        if world > 1:
            moe_comm.sync_gradients(model)
        torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
        optimizer.step()
    return logits.detach()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def adapters_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items() if "lora" in name}


def assert_equal_state(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert got.keys() == want.keys() and got
    for name, value in want.items():
        assert_close(got[name], value, name, rtol)


def train_all(rank: int, world: int, swap_first: bool) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    results = {}
    for name, (style, settings) in CASES.items():
        model = swapped(style, settings, swap_first)
        logits = train(model, inputs(world)[rank], 5, world)
        for key, param in expert_parameters(model).items():
            assert param.requires_grad == (param.grad is not None) == ("lora" in key), key
        moe_comm.check_replicas(model)
        results[name] = logits, moe_comm.state_dict(model)
    return results


@pytest.mark.parametrize("swap_first", [False, True])
def test_adapters_of_linear_layers_train_as_in_one_process(swap_first: bool, pool2: RankPool) -> None:
    results = pool2.run(train_all, swap_first, timeout=120)
    for name, (style, settings) in CASES.items():
        model = adapted(new_model(style), settings)
        want = train(model, torch.cat(inputs(2), 1), 5)
        got = [result[name] for result in results]
        assert_close(torch.cat([logits for logits, _ in got], 1), want, name, 5e-5)
        for _, state in got:
            assert_equal_state(state, dict(model.state_dict()))


def gradients_of_block(rank: int, world: int, arg: tuple[int, dict[str, Any]]) -> dict[str, Tensor]:
    """Return outputs and gradients at an expert-parallel size, for the same rows in the same order."""
    size, swap = arg
    group = [dist.new_group([*range(first, first + size)]) for first in range(0, world, size)][rank // size]
    results = {}
    for name, (style, settings) in CASES.items():
        dropout = {"lora_dropout": 0.4 if name in ("three layers", "fused") else 0.0}
        model = swapped(style, settings | dropout, size > 1, group, **swap).train()
        block = next(module for module in model.modules() if hasattr(module, "block_plan"))
        experts = block.get_submodule(block.block_plan.path)
        generator = torch.Generator().manual_seed(3)
        x_TD = torch.randn(48, 24, generator=generator)
        ids_TK = torch.rand(48, 7, generator=generator).argsort(1)[:, :2]
        weights_TK = torch.rand(48, 2, generator=generator)
        part = slice(rank % size * 48 // size, (rank % size + 1) * 48 // size)
        torch.manual_seed(7)
        y_TD = experts(x_TD[part], ids_TK[part], weights_TK[part])
        y_TD.square().sum().backward()
        plans = [one.last_plan for one in swapped_experts(model).values() if one.last_plan is not None]
        assert len(plans) == bool(swap) and all(plan.lent for plan in plans)
        results |= {f"{name} {rows}": y for rows, y in zip(range(part.start, part.stop), y_TD.detach(), strict=True)}
        for key, param in experts.named_parameters():
            if param.requires_grad:
                grad: Any = param.grad
                results[f"{name} {key}"] = grad.full() if size > 1 else grad
    return results


def test_adapters_have_the_same_bits_at_every_size(pool4: RankPool) -> None:
    want = pool4.run(gradients_of_block, (1, {}), timeout=120)[0]
    assert sum(float(value.abs().sum()) > 0 for value in want.values()) > 0.9 * len(want)  # B is zero in one case
    for size in (2, 4):
        for got in pool4.run(gradients_of_block, (size, {}), timeout=120):
            assert len(got) == len(want) - len(CASES) * (48 - 48 // size)
            assert all(torch.equal(value, want[name]) for name, value in got.items())


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
def test_adapters_of_lent_experts_keep_the_bits_of_outputs(backend: str, pool4: RankPool) -> None:
    want = pool4.run(gradients_of_block, (1, {}), timeout=120)[0]
    swap = {"backend": backend, "options": DispatchOptions(balance=Balance(rows=1.0, worth=0))}
    for got in pool4.run(gradients_of_block, (4, swap), timeout=120):
        assert len(got) == len(want) - len(CASES) * (48 - 48 // 4)
        for name, value in got.items():
            if "lora" in name:  # sums in another order
                assert_close(value, want[name], name, 1e-6)
            else:
                assert torch.equal(value, want[name]), name


def test_dropout_keeps_the_expected_output_and_needs_training() -> None:
    x = torch.cat(inputs(2), 1)
    plain = adapted(new_model(Mixtral), LAYERS | {"lora_dropout": 0.2})
    model = swap_moe(adapted(new_model(Mixtral), LAYERS | {"lora_dropout": 0.2}))
    with torch.no_grad():
        assert_close(model(x)[0], plain(x)[0], "logits")
        for one in (plain, model):
            one.train()
        torch.manual_seed(5)
        assert not torch.equal(model(x)[0], model(x)[0])
        want, got = (torch.stack([one(x)[0] for _ in range(400)]) for one in (plain, model))
    deviation = (got.mean(0) - want.mean(0)).abs() / ((got.var(0) + want.var(0)) / 400).sqrt()
    assert float(deviation.mean()) < 1 and float(deviation.max()) < 5
    assert 0.9 < float((got.std(0) / want.std(0)).mean()) < 1.1


SAVED = LAYERS | {"target_modules": ["w1", "w2", "w3", "first"], "rank_pattern": {"w2": 3}, "lora_dropout": 0.1}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=0.01, eps=1e-4)


KINDS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "layers": (Mixtral, SAVED),
    "stacked": (Torchtitan, STACKED | {"target_modules": ["first"]}),
}


def train_and_save(rank: int, world: int, arg: tuple[str, str]) -> None:
    kind, folder = arg
    style, settings = KINDS[kind]
    x = inputs(2)[rank]
    model = swapped(style, settings, True)
    optimizer = adamw(model)
    train(model, x, 2, world, optimizer)
    model.save_pretrained(folder)
    state = moe_comm.optimizer_state_dict(model, optimizer)
    if rank == 0:
        torch.save(state, f"{folder}/optimizer.pt")
    original = swap_moe(new_model(style))
    with torch.no_grad():
        logits = model(x)[0]
        with model.disable_adapter():
            assert_close(model(x)[0], original(x)[0], "disabled")
        model.merge_adapter()
        assert_close(model(x)[0], logits, "merged")
        model.unmerge_adapter()
        assert_close(model(x)[0], logits, "unmerged")
        merged = model.merge_and_unload(safe_merge=True)
        assert_close(merged(x)[0], logits, "merged and unloaded")
    moe_comm.save_checkpoint(merged, f"{folder}/merged")


def resume(rank: int, world: int, arg: tuple[str, str]) -> dict[str, Tensor]:
    kind, folder = arg
    base = swap_moe(new_model(KINDS[kind][0]), overlap=Overlap(chunk_bytes=1, executor="pipelined"))
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    optimizer = adamw(model)
    moe_comm.load_optimizer_state_dict(model, optimizer, torch.load(f"{folder}/optimizer.pt"))
    train(model, torch.cat(inputs(2), 1).tensor_split(world, 1)[rank], 1, 2, optimizer)
    return adapters_of(moe_comm.state_dict(model))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_files_of_peft_and_resume_at_another_size(
    kind: str, tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    style, settings = KINDS[kind]
    x = torch.cat(inputs(2), 1)
    model = adapted(new_model(style), settings)
    optimizer = adamw(model)
    train(model, x, 2, optimizer=optimizer)
    pool2.run(train_and_save, (kind, str(tmp_path)), timeout=120)
    loaded = peft.PeftModel.from_pretrained(new_model(style), str(tmp_path)).eval()
    assert_equal_state(adapters_of(loaded.state_dict()), adapters_of(model.state_dict()))
    with torch.no_grad():
        want = model(x)[0]
        assert_close(loaded.merge_and_unload()(x)[0], want, "merged by PEFT", 5e-5)
        merged = swap_moe(new_model(style))
        moe_comm.load_checkpoint(merged, tmp_path / "merged")
        assert_close(merged(x)[0], want, "merged and saved", 5e-5)
    train(model, x, 1, optimizer=optimizer)
    for result in pool4.run(resume, (kind, str(tmp_path)), timeout=120):
        assert_equal_state(result, adapters_of(model.state_dict()), 5e-5)


def train_with_ddp(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    model = swapped(*KINDS[kind], False, halves(rank))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    (ddp(inputs(world)[rank])[0].square().sum() / (2 * sum(TOKENS)) * world).backward()
    torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
    optimizer.step()
    return adapters_of(moe_comm.state_dict(ddp))


def train_with_fsdp(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = swapped(*KINDS[kind], True, halves(rank))
    moe_comm.prepare_fsdp(model)
    fully_shard(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    (model(inputs(world)[rank])[0].square().sum() / (2 * sum(TOKENS)) * world).backward()
    moe_comm.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return adapters_of(moe_comm.state_dict(model))


def train_by_hand(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    model = swapped(*KINDS[kind], True, halves(rank))
    train(model, inputs(world)[rank], 1, world, total=2 * sum(TOKENS))
    return adapters_of(moe_comm.state_dict(model))


def halves(rank: int) -> Any:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", [train_by_hand, train_with_ddp, train_with_fsdp])
def test_replicas_of_experts_train_adapters_as_one_process(loop: Any, kind: str, pool4: RankPool) -> None:
    style, settings = KINDS[kind]
    model = adapted(new_model(style), settings)
    train(model, torch.cat(inputs(4), 1), 1, total=2 * sum(TOKENS))
    for result in pool4.run(loop, kind, timeout=120):
        assert_equal_state(result, adapters_of(model.state_dict()))


def refused(rank: int, world: int, swap_first: bool) -> list[str]:
    cases: list[tuple[type[nn.Module], dict[str, Any]]] = [
        (Mixtral, {"use_dora": True}),
        (Mixtral, {"lora_bias": True}),
        (NoisyTopK, {"target_modules": ["c_fc"], "bias": "all"}),
    ]
    messages = []
    for style, settings in cases:
        model = new_model(style)
        before = {name: id(param) for name, param in model.named_parameters()}
        try:
            if swap_first:
                adapted(swap_moe(model), LAYERS | settings)
            else:
                model = adapted(model, LAYERS | settings)
                before = {name: id(param) for name, param in model.named_parameters()}
                swap_moe(model)
        except MoeCommError as error:
            messages.append(str(error))
            assert swap_first or before == {name: id(param) for name, param in model.named_parameters()}
    model = swapped(Mixtral, LAYERS, swap_first)
    with pytest.raises(InputError, match="adapter_names"):
        model(inputs(world)[rank], adapter_names=["default", "default"])
    return messages


@pytest.mark.parametrize("swap_first", [False, True])
def test_unsupported_adapters_raise_on_every_rank_and_change_nothing(swap_first: bool, pool2: RankPool) -> None:
    for messages in pool2.run(refused, swap_first, timeout=120):
        assert len(messages) == 3
        assert all("blocks.0.experts.0." in message for message in messages)


def several_adapters(rank: int, world: int, _: None) -> list[Tensor]:
    x = inputs(2)[rank] if world > 1 else torch.cat(inputs(2), 1)
    model = adapted(swap_moe(new_model(Mixtral)) if world > 1 else new_model(Mixtral), LAYERS)
    torch.manual_seed(4)
    model.add_adapter("other", peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["w2"], use_rslora=True))
    outputs = []
    with torch.no_grad():
        for names in ("default", "other", ["default", "other"]):
            model.base_model.set_adapter(names)
            outputs.append(model.eval()(x)[0])
        model.delete_adapter("default")
        outputs.append(model(x)[0])
    return outputs


def served(rank: int, world: int, arg: None) -> None:
    """Rank 0 has no inputs."""
    (style, settings), x = CASES["three layers"], inputs(2)[1]
    want, model = adapted(new_model(style), settings), swapped(style, settings, True, dist.group.WORLD)
    with torch.no_grad(), moe_comm.serving(model):
        for _ in range(rank):
            assert_close(model(x)[0], want(x)[0], "logits")


def test_ranks_without_inputs_serve_adapted_layers(pool2: RankPool) -> None:
    pool2.run(served, None, timeout=60)


def test_several_adapters_compute_as_in_one_process(pool2: RankPool) -> None:
    want = several_adapters(0, 1, None)
    for got, expected in zip(zip(*pool2.run(several_adapters, None, timeout=120), strict=True), want, strict=True):
        assert_close(torch.cat(got, 1), expected, "logits")


def train_without_sync(rank: int, world: int, swap_first: bool) -> str:
    settings = LAYERS | {"target_modules": ["w1", "w2", "w3", "head"], "init_lora_weights": True}
    model = swapped(Mixtral, settings, swap_first)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    model(inputs(world)[rank])[0].square().sum().backward()
    with pytest.raises(GradientMismatch, match="sync_gradients"):
        optimizer.step()
    return ""


@pytest.mark.parametrize("swap_first", [False, True])
def test_a_missing_sync_is_reported_with_a_frozen_router(swap_first: bool, pool2: RankPool) -> None:
    pool2.run(train_without_sync, swap_first, timeout=120)


def train_experts_without_sync(rank: int, world: int, swap_first: bool) -> list[str]:
    """Return what is logged if only experts are adapted, in a step without, with and without a reduction."""
    model = swapped(Mixtral, LAYERS, swap_first, halves(rank))
    optimizer = torch.optim.SGD(trainable(model), lr=0.0)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_comm").addHandler(handler)
    for step in range(3):
        model(inputs(world)[rank])[0].square().sum().backward()
        if step == 1 or (swap_first and step == 0):
            moe_comm.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(f"step {step}")
    logging.getLogger("moe_comm").removeHandler(handler)
    return logged


@pytest.mark.parametrize("swap_first", [False, True])
def test_a_missing_sync_is_reported_if_only_experts_are_adapted(swap_first: bool, pool4: RankPool) -> None:
    for logged in pool4.run(train_experts_without_sync, swap_first, timeout=120):
        assert [text for text in logged if "sync_gradients" not in text] == ["step 0", "step 1", "step 2"]
        assert "distributed over 2 of 4 ranks" in logged.pop(2 if swap_first else 0) and len(logged) == 3


def test_the_state_dict_loads_as_a_checkpoint(tmp_path: Path) -> None:
    model = swapped(Mixtral, SAVED, True)
    state = {name: value.clone().contiguous() for name, value in moe_comm.state_dict(model).items()}
    assert any("base_layer" in name and ".experts." in name for name in state)
    save_file(state, tmp_path / "model.safetensors")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    moe_comm.load_checkpoint(model, tmp_path)
    assert_equal_state(moe_comm.state_dict(model), state, 0.0)
