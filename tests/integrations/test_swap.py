"""A swapped model matches the unswapped one, holds only its local experts, and raises clear errors."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import moe_comm
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError, RoutingError, UnsupportedModel
from moe_comm.integrations.hugging_face import expert_parameters, swap_moe, swapped_experts
from moe_comm.kernels.activations import Activation
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance
from tests.integrations.blocks.styles import D, Mixtral as OwnBlock, TwoLayers
from tests.integrations.models import (
    SMALL,
    VOCAB,
    assert_close,
    batch,
    ep_group,
    gradients,
    load,
    new_model,
    num_targets,
    route_to_first_half,
    save_model,
    token_loss,
)
from tests.pool import RankPool

WORLD = 4


def run_swapped(rank: int, world: int, arg: tuple[str, int, dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of this rank's batch, and gradients reduced over the ranks."""
    folder, ep, settings = arg
    backend, placement = settings.get("backend", "auto"), settings.get("placement")
    model = swap_moe(
        load(folder, dtype=settings.get("dtype")),
        ep_group(ep),
        backend=backend,
        placement=placement,
        options=DispatchOptions(balance=settings.get("balance")),
    )
    model.train()
    if settings.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": settings["reentrant"]})
        model.enable_input_require_grads()
    ids = batch(world)
    logits = model(ids[rank], use_cache=False).logits
    token_loss(logits, ids[rank], num_targets(ids)).backward()
    moe_comm.sync_gradients(model)
    plans = [experts.last_plan for experts in swapped_experts(model).values()]
    assert any(plan is not None and plan.lent for plan in plans) == (settings.get("balance") is not None)
    return logits.detach(), gradients(model)


def reference(folder: str, dtype: torch.dtype | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return logits by rank and gradients of the unswapped model on the global batch."""
    model = load(folder, dtype=dtype)
    model.train()
    ids = batch(WORLD)
    logits = model(torch.cat(ids), use_cache=False).logits
    token_loss(logits, torch.cat(ids), num_targets(ids)).backward()
    return list(logits.detach().split([len(part) for part in ids])), gradients(model)


def compare(results: list[Any], expected: tuple[list[Tensor], dict[str, Tensor]], ep: int, rtol: float = 1e-5) -> None:
    """Compare the ``results`` of ``run_swapped`` by rank. Experts have 4 / ep replicas."""
    logits, grads = expected
    for rank, (got, got_grads) in enumerate(results):
        assert_close(got, logits[rank], f"logits of rank {rank}", rtol)
        assert got_grads.keys() == grads.keys()
    for name, full in grads.items():
        if ".experts." in name:
            for first in range(0, WORLD, ep):
                copy = torch.cat([results[first + r][1][name] for r in range(ep)])
                assert_close(copy, full, name, rtol)
        else:
            for _, got_grads in results:
                assert_close(got_grads[name], full, name, rtol)


@pytest.mark.parametrize("family", SMALL)
def test_logits_and_all_gradients_equal_those_of_the_unswapped_model(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    folder = saved(family)
    expected = reference(folder)
    assert all(bool((grad != 0).any()) for grad in expected[1].values())
    for ep in (1, 2, 4) if family == "mixtral" else (4,):
        compare(pool4.run(run_swapped, (folder, ep, {}), timeout=120), expected, ep)


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all", "all_gather"])
def test_every_backend_works_with_a_swapped_model(backend: str, saved: Callable[[str], str], pool4: RankPool) -> None:
    folder = saved("mixtral")
    compare(pool4.run(run_swapped, (folder, 2, {"backend": backend}), timeout=120), reference(folder), 2)


@pytest.mark.parametrize(
    ("homes", "order"),
    [
        ((1, 0, 0, 1, 1, 1, 0, 0), None),
        ((1, 0, 0, 1, 1, 1, 0, 0), ((6, 2, 1, 7), (0, 5, 4, 3))),
        ((0,) * 8, ((6, 2, 1, 7, 0, 5, 4, 3), ())),
    ],
    ids=["ascending", "order", "order_on_one_rank"],
)
def test_a_placement_moves_experts_and_changes_no_bit(
    homes: tuple[int, ...], order: tuple[tuple[int, ...], ...] | None, saved: Callable[[str], str], pool4: RankPool
) -> None:
    folder = saved("mixtral")
    placement = Placement(tuple((home,) for home in homes), 2, order=order)
    expected = pool4.run(run_swapped, (folder, 2, {}), timeout=120)
    results = pool4.run(run_swapped, (folder, 2, {"placement": placement}), timeout=120)
    for (logits, _), (wanted, _) in zip(results, expected, strict=True):
        assert torch.equal(logits, wanted)
    for name in expected[0][1]:
        copies = [
            [torch.cat([ranks[first + r][1][name] for r in (0, 1)]) for first in (0, 2)]
            for ranks in (results, expected)
        ]
        if ".experts." in name:
            stored = [expert for rank in (0, 1) for expert in placement.experts_of(rank)]
            assert all(torch.equal(got, wanted[stored]) for got, wanted in zip(*copies, strict=True)), name
        else:
            assert all(torch.equal(got, wanted) for got, wanted in zip(*copies, strict=True)), name


def infer_with_copies(rank: int, world: int, folder: str) -> None:
    """Copies change no bit of the logits. With gradients of experts, all ranks raise; frozen experts need none."""
    placement = Placement(((1, 0), (0,), (0,), (1, 0), (1,), (1,), (0, 1), (0,)), 2)
    fixed, copied = (swap_moe(load(folder), ep_group(2), placement=one) for one in (None, placement))
    ids = batch(world)[rank]
    with torch.no_grad():
        assert torch.equal(copied(ids, use_cache=False).logits, fixed(ids, use_cache=False).logits)
    with pytest.raises(ConfigError, match="for inference"):
        copied(ids, use_cache=False)
    for model in (fixed, copied):
        for name, param in model.named_parameters():
            param.requires_grad_("embed" in name)
        model(ids, use_cache=False).logits.square().sum().backward()
    for param, wanted in zip(copied.parameters(), fixed.parameters(), strict=True):
        assert (param.grad is None) == (wanted.grad is None)
        assert param.grad is None or torch.equal(param.grad, wanted.grad)


def test_copies_of_experts_are_for_inference_and_change_no_bit_of_the_output(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(infer_with_copies, saved("mixtral"), timeout=120)


@pytest.mark.parametrize("checkpointing", [{}, {"reentrant": False}, {"reentrant": True}])
def test_lent_experts_change_no_bit_but_those_of_their_gradients(
    checkpointing: dict[str, Any], saved: Callable[[str], str], pool4: RankPool
) -> None:
    settings = {"checkpointing": bool(checkpointing)} | checkpointing
    expected, results = (
        pool4.run(run_swapped, (saved("mixtral"), 2, settings | {"balance": balance}), timeout=120)
        for balance in (None, Balance(rows=1.0, worth=0))
    )
    for (logits, grads), (wanted, wanted_grads) in zip(results, expected, strict=True):
        assert torch.equal(logits, wanted) and grads.keys() == wanted_grads.keys()
        for name, grad in grads.items():
            if ".experts." in name:
                torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(grad, wanted_grads[name]), name


def test_any_number_of_experts_works_with_four_ranks(tmp_path: Path, pool4: RankPool) -> None:
    folder = save_model("mixtral", tmp_path, num_local_experts=7)
    compare(pool4.run(run_swapped, (folder, 4, {}), timeout=120), reference(folder), 4)


def test_ranks_whose_experts_get_no_rows_take_part_forward_and_backward(tmp_path: Path, pool4: RankPool) -> None:
    folder = save_model("deepseek_v3", tmp_path, edit=route_to_first_half)
    expected = reference(folder)
    unused = [grad[4:] for name, grad in expected[1].items() if ".experts." in name]
    assert unused and not any(bool(grad.any()) for grad in unused)
    compare(pool4.run(run_swapped, (folder, 4, {}), timeout=120), expected, 4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, saved: Callable[[str], str], pool4: RankPool) -> None:
    folder = saved("qwen3_moe")
    settings = {"checkpointing": True, "reentrant": reentrant}
    compare(pool4.run(run_swapped, (folder, 2, settings), timeout=120), reference(folder), 2)


def test_a_bf16_model_stays_bf16_and_as_close_to_fp32_as_the_unswapped_one(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    folder = saved("mixtral")
    results = pool4.run(run_swapped, (folder, 2, {"dtype": torch.bfloat16}), timeout=120)
    assert {value.dtype for logits, grads in results for value in (logits, *grads.values())} == {torch.bfloat16}
    exact, plain = torch.cat(reference(folder)[0]), torch.cat(reference(folder, torch.bfloat16)[0])
    # The median over tokens: rounding changes the experts of a few tokens.
    assert token_error(torch.cat([logits for logits, _ in results]), exact) < 1.2 * token_error(plain, exact) < 0.02


def token_error(logits: Tensor, exact: Tensor) -> float:
    """Return the median over tokens of the relative error."""
    logits, exact = logits.detach().float(), exact.detach()
    return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


def test_autocast_computes_experts_in_its_dtype(saved: Callable[[str], str]) -> None:
    ids = torch.cat(batch())
    plain, swapped = load(saved("qwen2_moe")), swap_moe(load(saved("qwen2_moe")))
    dtypes: list[torch.dtype] = []
    for experts in swapped_experts(swapped).values():
        experts.dispatcher.combinable = _spy(experts.dispatcher.combinable, dtypes)  # type: ignore[method-assign]
        break
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = swapped(ids).logits, plain(ids).logits
    assert dtypes and set(dtypes) == {torch.bfloat16}
    exact = plain(ids).logits
    assert token_error(got, exact) < 1.2 * token_error(expected, exact) < 0.02
    token_loss(got, ids, ids.numel()).backward()
    assert {p.grad.dtype for p in swapped.parameters() if p.grad is not None} == {torch.float32}


def _spy(call: Callable[..., Any], dtypes: list[torch.dtype]) -> Callable[..., Any]:
    def spied(rows_RD: Tensor, *args: Any) -> Any:
        dtypes.append(rows_RD.dtype)
        return call(rows_RD, *args)

    return spied


# --- memory ---


def measure_memory(rank: int, world: int, folder: str) -> tuple[int, int, list[str]]:
    """Return the expert elements before and after the swap, and names of full tensors that are still alive."""
    model = load(folder)
    full = {n: weakref.ref(p) for n, p in model.named_parameters() if ".experts." in n}
    before = sum(p().numel() for p in full.values())  # type: ignore[union-attr]
    swap_moe(model, ep_group(4))
    gc.collect()
    own = expert_parameters(model)
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in own.values())
    return before, sum(p.numel() for p in own.values()), [name for name, ref in full.items() if ref() is not None]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_each_rank_holds_its_local_experts_only_and_full_weights_are_freed(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    for before, after, alive in pool4.run(measure_memory, saved(family)):
        assert after * 4 == before
        assert alive == []


def test_without_a_group_no_weight_is_copied(saved: Callable[[str], str]) -> None:
    model = load(saved("olmoe"))
    before = dict(model.named_parameters())
    after = dict(swap_moe(model).named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


# --- experts that raise ---


def raise_in_experts(rank: int, world: int, folder: str) -> tuple[str, str, bool]:
    """The experts of rank 1 raise once. Then the model must work again."""
    model = swap_moe(load(folder), ep_group(4), options=DispatchOptions(timeout_s=200.0))
    ids = batch(world)[rank]

    def fail(h: Tensor) -> Tensor:
        raise ZeroDivisionError("no such expert")

    experts = next(iter(swapped_experts(model).values()))
    good = experts.layout
    if rank == 1:
        experts.layout = replace(good, activation=Activation("fails", fail, good.activation.gated))
    outcome = "nothing", ""
    try:
        model(ids)
    except Exception as error:
        outcome = type(error).__name__, str(error)
    experts.layout = good
    return *outcome, bool(torch.isfinite(model(ids).logits).all())


def test_experts_that_raise_on_one_rank_raise_on_every_rank(saved: Callable[[str], str], pool4: RankPool) -> None:
    for rank, (kind, message, works_on) in enumerate(pool4.run(raise_in_experts, saved("mixtral"), timeout=120)):
        assert kind == ("ZeroDivisionError" if rank == 1 else "PeerRaised") and works_on
        assert "no such expert" in message and (rank == 1 or "rank 1" in message)


# --- routers ---


def route_nan(rank: int, world: int, folder: str) -> tuple[str, bool]:
    """The input of rank 1 makes its router logits NaN. Then valid input must work again."""
    model = swap_moe(load(folder), ep_group(4))
    embeds = model.get_input_embeddings()(batch(world)[rank]).detach()
    good = embeds.clone()
    if rank == 1:
        embeds[0, 3] = float("nan")
    try:
        model(inputs_embeds=embeds)
    except RoutingError as error:
        return str(error), bool(torch.isfinite(model(inputs_embeds=good).logits).all())
    return "no error", False


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_nan_router_logits_on_one_rank_are_a_routing_error_on_every_rank(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    results = pool4.run(route_nan, saved(family), timeout=120)
    for rank, (message, recovered) in enumerate(results):
        assert "NaN" in message, message
        assert rank == 1 or "rank 1" in message
        assert recovered


def aux_loss(rank: int, world: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    ids = batch(world)[rank]
    results = []
    for model in (load(folder), swap_moe(load(folder), ep_group(2))):
        out = model(ids, labels=ids, output_router_logits=True)
        out.loss.backward()
        router = next(p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight"))
        results.append((out.aux_loss.detach(), out.loss.detach(), torch.stack(out.router_logits).detach(), router))
    return list(zip(*results, strict=True))  # type: ignore[arg-type]


def test_router_logits_and_auxiliary_loss_are_those_of_the_unswapped_model(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    for result in pool4.run(aux_loss, saved("mixtral")):
        parts = ("aux loss", "loss", "router logits", "router gradient")
        for what, (plain, swapped) in zip(parts, result, strict=True):
            assert_close(swapped, plain, what)


# --- generation ---


def generate(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor]:
    """Ranks generate different numbers of tokens."""
    ids = batch(world)[rank]
    settings = {"do_sample": False, "max_new_tokens": 3 + 2 * rank, "attention_mask": torch.ones_like(ids)}
    plain = load(folder).generate(ids, **settings)
    return plain, swap_moe(load(folder), ep_group(2)).generate(ids, synced_gpus=True, **settings)


def test_generate_gives_the_unswapped_models_tokens_though_ranks_stop_at_different_steps(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    for plain, swapped in pool4.run(generate, saved("mixtral")):
        assert torch.equal(plain, swapped)


# --- other families, hooks, DistributedDataParallel ---


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 0, "moe_num_shared_experts": 1}),
        ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_act": "gelu"}),
    ],
)
def test_other_families_and_activations_that_transformers_describes_are_swapped_too(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(model_type, tmp_path, intermediate_size=48, moe_intermediate_size=16, **settings)
    ids, results = batch()[0], []
    for model in (load(folder), swap_moe(load(folder))):
        logits = model(ids).logits
        token_loss(logits, ids, ids.numel()).backward()
        results.append((logits.detach(), gradients(model)))
    assert len(swapped_experts(model)) == 2
    (expected, expected_grads), (got, grads) = results
    assert_close(got, expected, "logits")
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name)


def test_a_custom_gate_function_is_used_and_the_replaced_weights_are_freed(saved: Callable[[str], str]) -> None:
    class OwnGate(type(load(saved("olmoe")).model.layers[0].mlp.experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.tanh(gate) * up + self.num_experts

    model, ids = load(saved("olmoe")).requires_grad_(False), batch()[0]
    before = model(ids).logits
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = OwnGate
    expected = model(ids).logits
    assert not torch.allclose(expected, before)
    weights = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    assert_close(swap_moe(model)(ids).logits.detach(), expected.detach(), "logits")
    for experts in swapped_experts(model).values():
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().clone(), requires_grad=False)
    gc.collect()
    assert [ref() for ref in weights] == [None, None]


def test_hooks_on_experts_survive_the_swap(saved: Callable[[str], str]) -> None:
    model = load(saved("olmoe"))
    calls: list[str] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, args, kwargs: calls.append("before"), with_kwargs=True)
    experts.register_forward_hook(lambda module, args, output: calls.append("after"))
    experts.register_full_backward_hook(lambda module, grads, outer: calls.append("backward"))
    swap_moe(model)(batch()[0]).logits.sum().backward()
    assert calls == ["before", "after", "backward"]


def hooks_are_refused(rank: int, world: int, folder: str) -> None:
    model = load(folder)
    experts = model.model.layers[0].mlp.experts
    for owner, register, reason in (
        (experts.down_proj, "register_hook", "experts.down_proj has gradient hooks"),
        (experts.down_proj, "register_post_accumulate_grad_hook", "experts.down_proj has gradient hooks"),
        (experts, "register_load_state_dict_post_hook", "experts has state-dict hooks"),
    ):
        handle = getattr(owner, register)(lambda *_: None)
        with pytest.raises(UnsupportedModel, match=reason):
            swap_moe(model)
        handle.remove()
    swap_moe(model)


def test_hooks_that_the_swap_would_lose_are_refused(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(hooks_are_refused, saved("olmoe"))
    model = load(saved("olmoe"))
    calls: list[int] = []
    experts = model.model.layers[0].mlp.experts
    experts.down_proj.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    swap_moe(model)(batch()[0]).logits.sum().backward()  # one rank keeps its parameters, and so their hooks
    assert calls == [1]


class Towers(nn.Module):
    """Looks like an MoE block, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.head = nn.ModuleList(TwoLayers() for _ in range(3)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stack:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


class Mixed(nn.Module):
    """A model of transformers, and an MoE block of the user's own."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.language, self.first, self.own = load(folder), nn.Linear(VOCAB, D), OwnBlock()
        self.towers = Towers()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.towers(self.own(self.first(self.language(ids, use_cache=False).logits)))
        return y


def run_mixed(rank: int, world: int, arg: tuple[str, int]) -> tuple[Tensor, dict[str, Tensor], bool, list[str]]:
    folder, ep = arg
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moe_comm.integrations.swap")
    logger.addHandler(handler)
    try:
        model = swap_moe(Mixed(folder), ep_group(ep) if world > 1 else None)
    finally:
        logger.removeHandler(handler)
    y = model(batch(world)[rank])
    y.square().sum().backward()
    if world > 1:
        moe_comm.sync_gradients(model)
    state, expected = moe_comm.gather_state_dict(model), Mixed(folder).state_dict()
    equal = state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    return y.detach(), moe_comm.gather_gradients(model), equal, lines


def test_blocks_of_transformers_and_own_ones_in_one_model(saved: Callable[[str], str], pool4: RankPool) -> None:
    folder = saved("olmoe")
    for ep in (1, 2, 4):
        world = 1 if ep == 1 else 4
        original = Mixed(folder)
        expected = [original(ids) for ids in batch(world)]
        sum(y.square().sum() for y in expected).backward()  # type: ignore[union-attr]
        results = [run_mixed(0, 1, (folder, 1))] if ep == 1 else pool4.run(run_mixed, (folder, ep))
        for rank, (y, grads, equal, lines) in enumerate(results):
            assert_close(y, expected[rank].detach(), f"results of rank {rank}")
            for name, param in original.named_parameters():
                if param.grad is not None:
                    assert_close(grads[name], param.grad, name, rtol=1e-4)
            assert equal
            left = [line for line in lines if "swap_moe: towers unchanged" in line]
            assert len(left) == (rank % ep == 0), lines


def test_a_copy_of_a_swapped_model_has_its_own_weights_and_computes_the_same(saved: Callable[[str], str]) -> None:
    model, ids = swap_moe(load(saved("gpt_oss"))), batch()[0]
    copied = deepcopy(model)
    assert torch.equal(copied(ids).logits, model(ids).logits)
    own = {p.data_ptr() for p in expert_parameters(model).values()}
    assert own.isdisjoint(p.data_ptr() for p in expert_parameters(copied).values())


def ddp_keeps_experts(rank: int, world: int, folder: str) -> dict[str, bool]:
    model = swap_moe(load(folder), ep_group(4))
    before = {name: p.detach().clone() for name, p in expert_parameters(model).items()}
    nn.parallel.DistributedDataParallel(model)
    dist.barrier()
    return {name: torch.equal(p, before[name]) for name, p in expert_parameters(model).items()}


def test_distributed_data_parallel_does_not_overwrite_experts(saved: Callable[[str], str], pool4: RankPool) -> None:
    for unchanged in pool4.run(ddp_keeps_experts, saved("mixtral")):
        assert unchanged and all(unchanged.values())


def compiled_gradients_equal(rank: int, world: int, folder: str) -> bool:
    gradients = []
    for compiles in (False, True):
        model = swap_moe(load(folder), ep_group(world))
        inner = torch.compile(model, fullgraph=True, backend="eager") if compiles else model
        nn.parallel.DistributedDataParallel(inner)(batch(world)[rank]).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    return len(gradients[0]) == len(gradients[1]) > 0 and all(map(torch.equal, *gradients))


@pytest.mark.slow
def test_distributed_data_parallel_of_a_compiled_model_has_the_gradients_of_eager(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    assert all(pool4.run(compiled_gradients_equal, saved("mixtral")))


# --- unsupported models ---


class HomemadeMoE(nn.Module):
    """Experts in a list, as in older code."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def test_unsupported_models_are_named_and_unchanged(saved: Callable[[str], str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32, **sizes))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .*'llama'.*LlamaMLP.*MixtralExperts"):
        swap_moe(dense)
    with pytest.raises(UnsupportedModel, match=r"HomemadeMoE.*GptOssExperts"):
        swap_moe(nn.Sequential(HomemadeMoE()))
    with pytest.raises(ConfigError, match="Module; got 'folder'"):
        swap_moe("folder")
    with pytest.raises(ConfigError, match="a DeviceMesh or None; got 'world'"):
        swap_moe(dense, "world")
    with pytest.raises(UnsupportedModel, match="MixtralExperts is an experts module"):
        swap_moe(load(saved("mixtral")).model.layers[0].mlp.experts)
    features = {
        "has_post_expert_norm": True,
        "has_gate": False,
        "scale": nn.Parameter(),
        "act_fn": nn.PReLU(),
    }
    for key, value in features.items():
        model = load(saved("olmoe"))
        setattr(model.model.layers[1].mlp.experts, key, value)
        with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.experts \(OlmoeExperts\)"):
            swap_moe(model)
        assert not swapped_experts(model)
    model = load(saved("mixtral"))
    with pytest.raises(ConfigError, match="telepathy"):
        swap_moe(model, backend="telepathy")
    assert not swapped_experts(model)
    with pytest.raises(ConfigError, match="already swapped"):
        swap_moe(swap_moe(model))


def quantized(rank: int, world: int, _: None) -> list[str]:
    messages = []
    for family, kind in (("gpt_oss", Mxfp4GptOssExperts), ("qwen3_moe", FP8Experts)):
        model = new_model(family, hidden_size=128)
        given = [(128, 128)] if kind is FP8Experts else []
        for layer in model.model.layers:
            layer.mlp.experts = kind(model.config, *given)
        with pytest.raises(UnsupportedModel) as raised:
            swap_moe(model)
        messages.append(str(raised.value))
    return messages


def test_quantized_experts_are_named_with_what_to_do(pool4: RankPool) -> None:
    for messages in pool4.run(quantized, None):
        for message, dtype in zip(messages, ("uint8", "float8_e4m3fn"), strict=True):
            assert "layers.0.mlp.experts " in message and dtype in message and "dequantize()" in message


def test_a_missing_package_names_the_extra_to_install() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import moe_comm.integrations
from moe_comm.errors import MissingDependency
for module, name in [(moe_comm, f"swap_{kind}") for kind in ("moe", "linears", "attention")] + [
    (moe_comm.integrations, "hugging_face")
]:
    try:
        exec(f"from {module.__name__} import {name}")
    except MissingDependency as error:
        print(error)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    lines = process.stdout.splitlines()
    assert len(lines) == 4, process.stderr
    assert all("need transformers" in line and "pip install '.[hf]'" in line for line in lines)
