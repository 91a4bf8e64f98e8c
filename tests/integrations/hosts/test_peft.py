"""PEFT's LoRA of a swapped model: of experts, whose A and B are distributed over ranks, and of other modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs make hosts")

import peft
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import ContinuousBatchingConfig, GenerationConfig

import moe_comm
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.integrations.hugging_face import expert_parameters, swap_moe, swapped_experts
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance
from tests.integrations.blocks.styles import Mixtral, Model
from tests.integrations.models import assert_close, batch, new_model, num_targets, randomise, token_loss
from tests.pool import RankPool

BOTH = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
EXPERTS: dict[str, dict[str, Any]] = {
    "one parameter": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "both, and attention": BOTH | {"target_modules": ["q_proj"]},
}
LENT: dict[str, Any] = {"options": DispatchOptions(balance=Balance(rows=1.0, worth=0))}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
SGD = partial(torch.optim.SGD, lr=0.1)
# With the default eps, rounding of gradients near zero changes steps of the size of the learning rate.
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


def small_model(family: str = "mixtral", **changes: Any) -> Any:
    model = new_model(family, **changes)
    randomise(model, 0)
    return model


def config(settings: dict[str, Any], **more: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "init_lora_weights": False} | settings | more)


def adapted(model: Any, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(settings))


def swapped(settings: dict[str, Any], swap_first: bool, swap: Any = (), **changes: Any) -> Any:
    if swap_first:
        return adapted(swap_moe(small_model(**changes), dist.group.WORLD, **dict(swap)), settings)
    return swap_moe(adapted(small_model(**changes), settings), dist.group.WORLD, **dict(swap))


def train(model: Any, ids: Tensor, targets: int, optimizer: Any, steps: int, world: int = 1) -> Tensor:
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(ids, use_cache=False).logits
        token_loss(logits, ids, targets).backward()
        if world > 1:
            moe_comm.sync_gradients(model)
        moe_comm.clip_grad_norm_(model, 1.0)
        optimizer.step()
    return logits.detach()


def trainable(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adapters_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items() if "lora" in name}


def assert_equal_state(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert got.keys() == want.keys() and got
    for name, value in want.items():
        assert_close(got[name], value, name, rtol)


def train_experts(rank: int, world: int, call: Any) -> dict[str, Tensor]:
    settings, swap_first, make, changes, *swap = call
    ids = batch(world)
    model = swapped(settings, swap_first, *swap, **changes)
    optimizer = make(trainable(model))
    logits = train(model, ids[rank], num_targets(ids), optimizer, 5, world)
    for experts in swapped_experts(model).values() if swap else ():
        assert experts.last_plan is not None
        assert experts.last_plan.lent
    assert {id(p) for p in optimizer.state} <= {id(p) for p in trainable(model)}
    for name, parameter in expert_parameters(model).items():
        assert parameter.requires_grad == ("lora" in name)
        assert (parameter.grad is not None) == parameter.requires_grad, name
    moe_comm.check_replicas(model)
    return {"logits": logits, **adapters_of(moe_comm.state_dict(model))}


def compare_training(pool: RankPool, ranks: int, *call: Any) -> None:
    settings, _, make, changes, *_ = call
    ids = batch(ranks)
    model = adapted(small_model(**changes), settings)
    want_logits = train(model, torch.cat(ids), num_targets(ids), make(trainable(model)), 5)
    results = pool.run(train_experts, call, timeout=120)
    assert_close(torch.cat([result.pop("logits") for result in results]), want_logits, "logits", 5e-5)
    for result in results:
        assert_equal_state(result, adapters_of(model.state_dict()))


@pytest.mark.parametrize("swap_first", [False, True])
@pytest.mark.parametrize("settings", EXPERTS.values(), ids=list(EXPERTS))
def test_adapters_of_experts_train_as_in_one_process(
    settings: dict[str, Any], swap_first: bool, pool2: RankPool
) -> None:
    compare_training(pool2, 2, settings, swap_first, SGD, {})


@pytest.mark.parametrize("swap_first", [False, True])
def test_uneven_experts_of_four_ranks_train_as_in_one_process(swap_first: bool, pool4: RankPool) -> None:
    patterns = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"gate_up_proj": 6}}
    settings = BOTH | patterns | {"use_rslora": True, "init_lora_weights": True}
    compare_training(pool4, 4, settings, swap_first, ADAMW, {"num_local_experts": 7})


def test_transposed_experts_with_biases_train_as_in_one_process(pool2: RankPool) -> None:
    compare_training(pool2, 2, BOTH, True, SGD, {"family": "gpt_oss"})


def test_ranks_without_experts_train_as_in_one_process(pool4: RankPool) -> None:
    compare_training(pool4, 4, BOTH, True, SGD, {"num_local_experts": 3})


@pytest.mark.parametrize(
    ("backend", "changes"), [("shared_memory", {}), ("all_to_all", {}), ("all_to_all", {"family": "gpt_oss"})]
)
def test_adapters_of_lent_experts_train_as_in_one_process(
    backend: str, changes: dict[str, Any], pool4: RankPool
) -> None:
    compare_training(pool4, 4, BOTH, True, SGD, changes, LENT | {"backend": backend})


def gradients_of_block(rank: int, world: int, size: int) -> dict[str, Tensor]:
    """Return gradients of A and B at expert-parallel size ``size``, for the same rows in the same order."""
    group = [dist.new_group([*range(first, first + size)]) for first in range(0, world, size)][rank // size]
    model = adapted(swap_moe(small_model(), group), BOTH)
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(48, 32, generator=generator)
    ids_TK = torch.rand(48, 8, generator=generator).argsort(1)[:, :2]
    weights_TK = torch.rand(48, 2, generator=generator)
    part = slice(rank % size * 48 // size, (rank % size + 1) * 48 // size)
    experts = model.base_model.model.model.layers[0].mlp.experts
    experts(x_TD[part], ids_TK[part], weights_TK[part]).square().sum().backward()
    grads = {}
    for name, parameter in experts.named_parameters():
        if parameter.requires_grad:
            grad: Any = parameter.grad
            grads[name] = grad.full() if size > 1 else grad
    return grads


def test_gradients_of_adapters_have_the_same_bits_at_every_size(pool4: RankPool) -> None:
    want = pool4.run(gradients_of_block, 1, timeout=120)[0]
    assert len(want) == 4 and all(float(grad.abs().sum()) for grad in want.values())
    for size in (2, 4):
        for got in pool4.run(gradients_of_block, size, timeout=120):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], grad) for name, grad in want.items())


ALL = BOTH | {"target_modules": ["q_proj"]}


def train_and_save(rank: int, world: int, folder: str) -> None:
    ids = batch(world)
    model = swapped(ALL, True)
    optimizer = ADAMW(trainable(model))
    train(model, ids[rank], num_targets(ids), optimizer, 2, world)
    model.save_pretrained(folder)
    moe_comm.save_swapped(model, f"{folder}/again")
    state = moe_comm.optimizer_state_dict(model, optimizer)
    if rank == 0:
        torch.save(state, f"{folder}/optimizer.pt")
    with torch.no_grad():
        adapted_logits = model(ids[rank]).logits
        with model.disable_adapter():
            assert_close(model(ids[rank]).logits, small_model()(ids[rank]).logits, "disabled")
        merged = model.merge_and_unload()
        assert_close(merged(ids[rank]).logits, adapted_logits, "merged")
    moe_comm.save_checkpoint(merged, f"{folder}/merged")


def resume(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    ids = batch(2)
    base = swap_moe(small_model(), dist.group.WORLD, overlap=Overlap(chunk_bytes=1, executor="pipelined"))
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    optimizer = ADAMW(trainable(model))
    moe_comm.load_optimizer_state_dict(model, optimizer, torch.load(f"{folder}/optimizer.pt"))
    own = torch.cat(ids).tensor_split(world)[rank]
    train(model, own, num_targets(ids), optimizer, 1, world)
    return adapters_of(moe_comm.state_dict(model))


def test_adapters_are_saved_in_the_format_of_peft_and_resumed_at_another_size(
    tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    ids = batch(2)
    model = adapted(small_model(), ALL)
    optimizer = ADAMW(trainable(model))
    train(model, torch.cat(ids), num_targets(ids), optimizer, 2)
    saved = adapters_of(model.state_dict())
    with torch.no_grad():
        want = model(torch.cat(ids)).logits
    pool2.run(train_and_save, str(tmp_path), timeout=120)
    for folder in (tmp_path, tmp_path / "again"):
        loaded = peft.PeftModel.from_pretrained(small_model(), str(folder))
        assert_equal_state(adapters_of(loaded.state_dict()), saved)
    with torch.no_grad():
        assert_close(loaded.merge_and_unload()(torch.cat(ids)).logits, want, "merged by PEFT", 5e-5)
        merged = type(small_model()).from_pretrained(tmp_path / "merged")
        assert_close(merged(torch.cat(ids)).logits, want, "merged and saved", 5e-5)
    train(model, torch.cat(ids), num_targets(ids), optimizer, 1)
    for result in pool4.run(resume, str(tmp_path), timeout=120):
        assert_equal_state(result, adapters_of(model.state_dict()), 5e-5)


def train_through_transformers(rank: int, world: int, folder: str) -> None:
    ids = batch(world)
    model = swap_moe(small_model(), dist.group.WORLD)
    torch.manual_seed(1)
    model.add_adapter(config(ALL))
    train(model, ids[rank], num_targets(ids), SGD(trainable(model)), 2, world)
    moe_comm.save_swapped(model, folder)
    adapters = {name: value for name, value in moe_comm.gather_state_dict(model).items() if "lora" in name}
    part = f"{folder}/part"
    model.save_pretrained(part, state_dict=adapters, is_main_process=rank == 0)
    base = f"{folder}/base"
    moe_comm.save_checkpoint(swap_moe(small_model()), base)
    if rank == 0:
        assert (
            Path(part, "adapter_model.safetensors").read_bytes()
            == Path(folder, "adapter_model.safetensors").read_bytes()
        )
    with pytest.raises(MoeCommError, match="PeftModel"):
        swap_moe(small_model()).load_adapter(folder)
    with pytest.raises(MoeCommError, match="before you add them"):
        moe_comm.load_checkpoint(model, base)
    del adapters["model.layers.0.mlp.experts.lora_A.default.weight"]
    with pytest.raises(ConfigError, match=r"lora_A\.default\.weight is missing"):
        model.save_pretrained(part, state_dict=adapters)


def test_adapters_that_transformers_adds_train_and_are_saved_as_in_one_process(tmp_path: Path, pool2: RankPool) -> None:
    ids = batch(2)
    model = adapted(small_model(), ALL)
    train(model, torch.cat(ids), num_targets(ids), SGD(trainable(model)), 2)
    pool2.run(train_through_transformers, str(tmp_path), timeout=120)
    loaded = peft.PeftModel.from_pretrained(small_model(), str(tmp_path))
    assert_equal_state(adapters_of(loaded.state_dict()), adapters_of(model.state_dict()))


def train_with_ddp(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    ids = batch(world)
    model = adapted(swap_moe(small_model(), dist.group.WORLD), ALL)
    ddp = DistributedDataParallel(model)
    optimizer = SGD(trainable(model))
    optimizer.zero_grad()
    (token_loss(ddp(ids[rank]).logits, ids[rank], num_targets(ids)) * world).backward()
    torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
    optimizer.step()
    model.save_pretrained(folder)
    return adapters_of(moe_comm.state_dict(ddp))


def train_with_fsdp(rank: int, world: int, folder: str, options: DispatchOptions | None = None) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    ids = batch(world)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = adapted(swap_moe(small_model(), group, options=options), ALL)
    moe_comm.prepare_fsdp(model)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = SGD(trainable(model))
    (token_loss(model(ids[rank]).logits, ids[rank], num_targets(ids)) * world).backward()
    moe_comm.clip_grad_norm_(model, 1.0)
    optimizer.step()
    moe_comm.save_swapped(model, folder)
    assert options is None or all(one.last_plan.lent for one in swapped_experts(model).values())
    return adapters_of(moe_comm.state_dict(model))


def train_lent_experts_with_fsdp(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    return train_with_fsdp(rank, world, folder, DispatchOptions(balance=Balance(rows=1.0, worth=0)))


@pytest.mark.parametrize("loop", [train_with_ddp, train_with_fsdp, train_lent_experts_with_fsdp])
def test_ddp_and_fsdp_train_and_save_adapters_as_one_process(loop: Any, tmp_path: Path, pool4: RankPool) -> None:
    ids = batch(4)
    model = adapted(small_model(), ALL)
    train(model, torch.cat(ids), num_targets(ids), SGD(trainable(model)), 1)
    want = adapters_of(model.state_dict())
    for result in pool4.run(loop, str(tmp_path), timeout=120):
        assert_equal_state(result, want)
    assert_equal_state(adapters_of(peft.PeftModel.from_pretrained(small_model(), str(tmp_path)).state_dict()), want)


def several_adapters(rank: int, world: int, _: None) -> list[Tensor]:
    ids = batch(world)[rank if world > 1 else slice(None)]
    ids = ids if isinstance(ids, Tensor) else torch.cat(batch(2))
    model = adapted(small_model() if world == 1 else swap_moe(small_model(), dist.group.WORLD), BOTH)
    model.add_adapter("other", config(BOTH, r=3, use_rslora=True))
    outputs = []
    with torch.no_grad():
        for name in ("default", "other"):
            model.set_adapter(name)
            outputs.append(model(ids).logits)
        model.base_model.set_adapter(["default", "other"])
        outputs.append(model(ids).logits)
        model.delete_adapter("default")
        outputs.append(model(ids).logits)
    assert not outputs[0].equal(outputs[1])
    return outputs


def test_several_adapters_compute_as_in_one_process(pool2: RankPool) -> None:
    want = several_adapters(0, 1, None)
    for got, expected in zip(zip(*pool2.run(several_adapters, None, timeout=120), strict=True), want, strict=True):
        assert_close(torch.cat(got), expected, "logits")


def low_precision(rank: int, world: int, call: tuple[bool, dict[str, Any]]) -> Tensor:
    ids = torch.cat(batch(2)) if world == 1 else batch(world)[rank]
    autocast, swap = call
    model = small_model() if autocast else small_model().bfloat16()
    model = adapted(model if world == 1 else swap_moe(model, dist.group.WORLD, **swap), BOTH)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(ids, use_cache=False).logits
    token_loss(logits, ids, num_targets(batch(2))).backward()
    assert all(p.dtype == torch.float32 == p.grad.dtype for p in trainable(model))
    return logits.detach().float()


@pytest.mark.parametrize(("autocast", "swap"), [(False, {}), (False, LENT), (True, {})])
def test_adapters_train_in_low_precision_with_checkpointing(
    autocast: bool, swap: dict[str, Any], pool2: RankPool
) -> None:
    want = low_precision(0, 1, (autocast, {}))
    got = torch.cat(pool2.run(low_precision, (autocast, swap), timeout=120))
    assert float((got - want).norm() / want.norm()) < 2e-2


def refused(rank: int, world: int, _: None) -> dict[str, str]:
    calls = {
        "olora": (BOTH | {"init_lora_weights": "olora"}, {}),
        "fp8": (BOTH, {"expert_gemm_dtype": "fp8"}),
        "bias": ({"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj_bias"]}, {}),
        "copies": (BOTH, {"placement": Placement(((0, 1), (0,), *[(1,)] * 6), world)}),
        "whole experts": (ATTENTION | {"modules_to_save": ["experts"]}, {}),
        "own block": (BOTH | {"target_parameters": ["experts.gate_up_proj"]}, {}),
    }
    messages = {}
    torch.manual_seed(0)
    for name, (settings, options) in calls.items():
        changes = {"hidden_size": 128} if name == "fp8" else {}
        family = "gpt_oss" if name == "bias" else "mixtral"
        model = Model(Mixtral) if name == "own block" else small_model(family, **changes)
        model = swap_moe(model, dist.group.WORLD, **options)
        try:
            adapted(model, settings)
        except MoeCommError as error:
            messages[name] = str(error)
    return messages


def test_unsupported_adapters_raise_on_every_rank(pool2: RankPool) -> None:
    for messages in pool2.run(refused, None, timeout=120):
        assert list(messages) == ["olora", "fp8", "bias", "copies", "whole experts", "own block"]
        assert "no matrix [E, ...] of the experts module" in messages.pop("own block")
        assert "modules_to_save cannot contain the experts model.layers.0" in messages.pop("whole experts")
        assert all("adapters (LoRA) of model.layers.0.mlp.experts." in message for message in messages.values())


def adapt_attention(rank: int, world: int, job: tuple[bool, str]) -> None:
    swap_first, folder = job
    ids = batch(world)
    want = adapted(small_model(), ATTENTION)
    want_logits = train(want, torch.cat(ids), num_targets(ids), SGD(trainable(want)), 1)
    model = swapped(ATTENTION, swap_first)
    logits = train(model, ids[rank], num_targets(ids), SGD(trainable(model)), 1, world)
    assert_close(logits, want_logits.split([len(part) for part in ids])[rank], "logits")
    assert_equal_state(adapters_of(model.state_dict()), adapters_of(want.state_dict()))
    if rank == 0:  # alone, as the ranks have equal adapters
        model.save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(small_model(), folder)
        assert_equal_state(adapters_of(loaded.state_dict()), adapters_of(want.state_dict()))


@pytest.mark.parametrize("swap_first", [False, True])
def test_adapters_of_attention_train_as_in_one_process(swap_first: bool, pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(adapt_attention, (swap_first, str(tmp_path)), timeout=120)


@pytest.mark.parametrize("swap_first", [False, True])
def test_on_one_rank_adapters_of_experts_train_as_before_the_swap(swap_first: bool) -> None:
    ids = torch.cat(batch(2))
    want = adapted(small_model(), ALL)
    want_logits = train(want, ids, ids.numel(), SGD(trainable(want)), 1)
    model = adapted(swap_moe(small_model()), ALL) if swap_first else swap_moe(adapted(small_model(), ALL))
    logits = train(model, ids, ids.numel(), SGD(trainable(model)), 1)
    assert_close(logits, want_logits, "logits")
    assert_equal_state(adapters_of(model.state_dict()), adapters_of(want.state_dict()))


def test_swap_attention_does_not_drop_adapters() -> None:
    model = adapted(small_model(), ATTENTION)
    with pytest.raises(MoeCommError, match=r"layer 0 has the parameter q_proj\.base_layer\.weight"):
        moe_comm.swap_attention(model.get_base_model())
    moe_comm.swap_attention(model.merge_and_unload())


def served(rank: int, world: int, swap: dict[str, Any]) -> None:
    """Calls without tokens of adapted experts while this rank is in a call of the same experts."""
    settings = EXPERTS["both, and attention"]
    plain, model = (one.eval() for one in (adapted(small_model(), settings), swapped(settings, True, swap)))
    store, ids = dist.distributed_c10d._get_default_store(), batch()[1]
    how = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    tokens = plain.generate(ids, max_new_tokens=8, **how)
    block, plain_block = (one.get_base_model().model.layers[1] for one in (model, plain))
    x = torch.randn(1, 5, plain.config.hidden_size)

    def meet(*_: Any) -> None:
        store.set("rank 0 is at layer 1", "")
        store.wait(["rank 1 is in layer 1"])

    with torch.no_grad(), moe_comm.serving(model):
        # In turns, each rank generates with the adapted experts, and calls them for the other one.
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
            got = model.generate(ids, max_new_tokens=8, **how)
        assert rank == 0 or torch.equal(got, tokens)
        # The thread of rank 1 is in layer 1, for rank 0, when a forward pass begins there.
        if rank == 0:
            store.wait(["rank 1 has its tokens"])
            handle = block.self_attn.register_forward_pre_hook(meet)
            assert torch.equal(model.generate(ids, max_new_tokens=8, **how), tokens)
            handle.remove()
        else:
            store.set("rank 1 has its tokens", "")
            store.wait(["rank 0 is at layer 1"])
            handle = block.mlp.gate.register_forward_hook(lambda *_: store.set("rank 1 is in layer 1", ""))
            assert_close(block.mlp(x), plain_block.mlp(x), "output of layer 1")
            handle.remove()
        assert torch.equal(model.generate(ids, max_new_tokens=8, **how), tokens)


@pytest.mark.parametrize("swap", [{}, LENT], ids=["", "lent"])
def test_ranks_serve_adapted_experts_at_the_same_time(swap: dict[str, Any], pool2: RankPool) -> None:
    pool2.run(served, swap, timeout=60)


def fail_on_one_rank(rank: int, world: int, backend: str) -> None:
    model = swapped(BOTH, True, LENT | {"backend": backend})
    block, x = model.get_base_model().model.layers[0].mlp, torch.randn(2, 8, 32)
    want = block(x)
    plan = next(iter(swapped_experts(model).values())).last_plan
    assert plan is not None and plan.lent
    for bad in (x.long(), x * float("nan")):
        with pytest.raises(MoeCommError):
            block(bad if rank == 1 else x)
        assert torch.equal(block(x), want)


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
def test_an_error_on_one_rank_is_raised_on_all_when_adapters_are_lent(backend: str, pool2: RankPool) -> None:
    pool2.run(fail_on_one_rank, backend, timeout=60)


def with_manager(rank: int, world: int, arg: None) -> None:
    model = swapped(BOTH, True).eval()
    model.get_base_model().set_attn_implementation("sdpa")
    ids, limits = batch()[1][:1], {"max_new_tokens": 4, "eos_token_id": -1, "pad_token_id": 0}
    cache = ContinuousBatchingConfig(num_blocks=7, page_size=16, max_batch_tokens=32)
    with moe_comm.serving(model):
        if rank:
            manager = model.init_continuous_batching(GenerationConfig(**limits), continuous_batching_config=cache)
            manager.start()
            manager.add_request(ids[0].tolist())
            assert len(next(iter(manager)).generated_tokens) == 4


def test_adapted_models_make_managers_of_continuous_batching(pool2: RankPool) -> None:
    pool2.run(with_manager, None, timeout=60)
