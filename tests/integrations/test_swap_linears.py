"""A model with sharded linears matches the unsharded one, and unsupported models are rejected."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import moe_comm
from moe_comm.errors import ConfigError, InputError, RankMismatch, UnsupportedModel
from moe_comm.integrations.hugging_face import gather_state_dict, shard_inputs, sum_replicated_gradients, swap_moe
from moe_comm.integrations.hugging_face.attention import gather_attention, swap_attention
from moe_comm.integrations.hugging_face.linears import gather_linears, swap_linears, swapped_linears
from moe_comm.layers.attention.sequence import unshard_sequence
from moe_comm.topology import ParallelConfig, ParallelMesh
from tests.integrations.models import (
    SMALL,
    VOCAB,
    assert_close,
    batch,
    ep_group,
    gradients,
    load,
    num_targets,
    save_model,
    token_loss,
)
from tests.pool import RankPool

DENSE = {"intermediate_size": 48}
UNEVEN = 98  # 4 ranks hold 25, 25, 25 and 23 rows


@dataclass(frozen=True)
class Case:
    family: str
    tp: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def inputs() -> Tensor:
    ids = batch(1)[0]
    ids[0, 2] = 0  # the padding id, whose row of the embedding gets no gradient
    return ids


def losses(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    model.train()
    logits = model(ids, use_cache=False).logits
    return logits, token_loss(logits, ids, num_targets([ids]))


def reference(folder: str, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    model = load(folder, dtype=dtype)
    logits, loss = losses(model, inputs())
    loss.backward()
    return logits.detach(), gradients(model)


def run_sharded(rank: int, world: int, arg: tuple[str, Case]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits, and gradients of the full weights."""
    folder, case = arg
    model = swap_linears(load(folder, dtype=case.settings.get("dtype")), ep_group(case.tp))
    if case.settings.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits, loss = losses(model, inputs())
    loss.backward()
    names = [name for name, _ in model.named_parameters()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    whole = gather_linears(model)
    return logits.detach(), {name: whole[name] for name in names}


def compare(results: list[Any], expected: tuple[Tensor, dict[str, Tensor]], rtol: float = 1e-5) -> None:
    logits, grads = expected
    for rank, (got, got_grads) in enumerate(results):
        assert_close(got, logits, f"logits of rank {rank}", rtol)
        assert got_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert_close(got_grads[name], grad, f"{name} of rank {rank}", rtol)


def folder_of(case: Case, saved: Callable[[str], str], tmp_path: Path) -> str:
    return save_model(case.family, tmp_path, **case.changes) if case.changes else saved(case.family)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen2_moe", 2),
        Case("qwen2_moe", 4),
        Case("deepseek_v3", 2),
        Case("deepseek_v3", 4),
        Case("llama", 2, {**DENSE, "mlp_bias": True}),
        Case("llama", 4, {**DENSE, "mlp_bias": True, "tie_word_embeddings": True, "vocab_size": UNEVEN}),
        Case("phi3", 4, {**DENSE, "vocab_size": UNEVEN}),
        Case("llama", 2, DENSE, {"checkpointing": True}),
    ],
    ids=lambda case: f"{case.family}-{case.tp}",
)
def test_logits_and_all_gradients_equal_those_of_the_whole_model(
    case: Case, saved: Callable[[str], str], tmp_path: Path, pool4: RankPool
) -> None:
    folder = folder_of(case, saved, tmp_path)
    compare(pool4.run(run_sharded, (folder, case), timeout=120), reference(folder))


def test_a_bf16_model_stays_bf16_and_close_to_the_unswapped_one(tmp_path: Path, pool4: RankPool) -> None:
    case = Case("llama", 4, DENSE, {"dtype": torch.bfloat16})
    folder = save_model("llama", tmp_path, **DENSE)
    results = pool4.run(run_sharded, (folder, case), timeout=120)
    assert {value.dtype for logits, grads in results for value in (logits, *grads.values())} == {torch.bfloat16}
    exact, _ = reference(folder)
    whole, _ = reference(folder, torch.bfloat16)
    for logits, _ in results:
        assert (logits - exact).norm() < 1.5 * (whole - exact).norm()


def inspect_sharded(rank: int, world: int, folder: str) -> None:
    whole = load(folder)
    model = swap_linears(load(folder), dist.group.WORLD)
    num_local = sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)
    assert num_local * world == sum(p.numel() for name, p in whole.named_parameters() if ".mlp." in name)
    assert model.get_input_embeddings().weight is model.lm_head.weight
    assert len(model.lm_head.weight) == (25 if rank < 3 else 23)
    assert set(model.state_dict()) == set(whole.state_dict())
    gathered = gather_linears(model)
    assert all(torch.equal(gathered[name], value) for name, value in whole.state_dict().items())
    ids = inputs()
    expected = whole.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(deepcopy(model).generate(ids, max_new_tokens=4, do_sample=False), expected)
    with pytest.raises(ConfigError, match="already swapped"):
        swap_linears(model, dist.group.WORLD)
    with pytest.raises(ConfigError, match="the shards of this rank only"):
        model.save_pretrained("unused")
    with pytest.raises(InputError, match="token id 98 is outside"):
        model(ids + 98 - ids.max())


def test_ranks_hold_their_shards_generate_the_same_and_gather_the_same_bits(tmp_path: Path, pool4: RankPool) -> None:
    folder = save_model("llama", tmp_path, **DENSE, tie_word_embeddings=True, vocab_size=UNEVEN)
    pool4.run(inspect_sharded, folder, timeout=120)


def run_with_experts(rank: int, world: int, folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """tp 2 x ep 2: adjacent ranks have one batch, and ranks two apart share the experts."""
    tp = ep_group(2)
    ep = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    model = swap_linears(swap_moe(load(folder), ep), tp)
    parts = batch(2)
    logits = model(parts[rank // 2], use_cache=False).logits
    token_loss(logits, parts[rank // 2], num_targets(parts)).backward()
    sum_replicated_gradients(model, ep)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return logits.detach(), gather_linears(model, moe_comm.state_dict(model, form="local"))


def test_swap_linears_works_with_expert_parallelism_over_other_ranks(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    folder = saved("qwen2_moe")
    model = load(folder)
    parts = batch(2)
    logits = model(torch.cat(parts), use_cache=False).logits
    token_loss(logits, torch.cat(parts), num_targets(parts)).backward()
    expected = logits.detach().split([len(part) for part in parts])
    results = pool4.run(run_with_experts, folder, timeout=120)
    for rank, (got, grads) in enumerate(results):
        assert_close(got, expected[rank // 2], f"logits of rank {rank}")
        for name, grad in gradients(model).items():
            half = grad.chunk(2)[rank // 2] if ".experts." in name else grad
            assert_close(grads[name], half, f"{name} of rank {rank}")


def run_with_all(rank: int, world: int, arg: tuple[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
    """tp 2 x cp 2: attention and linears over tp, ring attention over cp, and experts over cp."""
    folder, order = arg
    mesh = ParallelMesh(ParallelConfig(tp=2, cp=2))
    tp, cp = mesh.group("tp"), mesh.group("cp")
    swaps: dict[str, Callable[[Any], Any]] = {
        "a": lambda model: swap_attention(model, tp, cp_group=cp, context="ring"),
        "l": lambda model: swap_linears(model, tp),
        "m": lambda model: swap_moe(model, cp),
    }
    model = load(folder)
    for name in order:
        model = swaps[name](model)
    assert not any(".self_attn." in name for name in swapped_linears(model))
    ids = whole_sequences()
    answer = model(**shard_inputs(ids, ids, cp_group=cp, context="ring"))
    answer.loss.backward()
    sum_replicated_gradients(model, cp)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return answer.logits.detach(), gather_linears(model, {**gather_state_dict(model), **gather_attention(model)})


def whole_sequences() -> Tensor:
    return torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(("family", "order"), [("qwen2_moe", "alm"), ("mixtral", "mla")])
def test_swap_linears_works_with_swapped_attention_and_experts_in_any_order(
    family: str, order: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    """Mixtral has no plain feed-forward block; only its vocabulary is sharded."""
    folder, ids = saved(family), whole_sequences()
    model = load(folder)
    expected = model(ids, labels=ids, use_cache=False)
    expected.loss.backward()
    results = pool4.run(run_with_all, (folder, order), timeout=120)
    logits = unshard_sequence([results[0][0], results[2][0]], "ring")
    assert_close(logits, expected.logits.detach(), "logits", 2e-5)
    for rank, (_, grads) in enumerate(results):
        for name, grad in gradients(model).items():
            assert_close(grads[name], grad, f"{name} of rank {rank}", 5e-5)


class Normalising(LlamaMLP):
    """The structure of Llama's block, with a normalization over full rows between the linears."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).softmax(-1))


def refusals(rank: int, world: int, folder: str) -> None:
    group = dist.group.WORLD

    def assert_refused(model: Any, kind: type[Exception], match: str) -> None:
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(kind, match=match):
            swap_linears(model, group)
        assert {name: type(module) for name, module in model.named_modules()} == before
        assert not swapped_linears(model)

    unshardable = load(folder)
    unshardable.model.layers[1].mlp.__class__ = Normalising
    assert_refused(
        unshardable,
        UnsupportedModel,
        r"layers\.1\.mlp \(Normalising\) cannot be sharded over 4 ranks: the outputs differ",
    )
    diverged = load(folder)
    with torch.no_grad():
        diverged.model.layers[0].mlp.down_proj.weight += 0.5 * (rank == 2)
    assert_refused(diverged, RankMismatch, "mlp.down_proj.weight .* .rank 2 of the group from rank 0")
    assert_refused(
        nn.Sequential(nn.Linear(4, 4)), UnsupportedModel, "no feed-forward block of plain linears; supported are gate"
    )
    hooked = load(folder)
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert_refused(hooked, UnsupportedModel, r"layers\.0\.mlp\.up_proj has forward or backward hooks")
    hooked = load(folder)
    hooked.model.layers[1].mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert_refused(hooked, UnsupportedModel, r"layers\.1\.mlp\.down_proj\.weight has gradient hooks")
    replaced_on_one_rank = load(folder)
    if rank == 3:
        replaced_on_one_rank.model.layers[0].mlp.forward = lambda x: x
    assert_refused(replaced_on_one_rank, UnsupportedModel, "was replaced")
    model = load(folder)
    calls: list[tuple[int, ...]] = []
    handles = [
        model.get_input_embeddings().register_forward_hook(lambda module, args, y: calls.append(tuple(y.shape))),
        model.lm_head.register_full_backward_hook(lambda module, inner, outer: calls.append(tuple(outer[0].shape))),
    ]
    assert swapped_linears(swap_linears(model, group))
    for kept in (True, False):
        model(inputs(), use_cache=False).logits.sum().backward()
        assert calls == [(*inputs().shape, model.config.hidden_size), (*inputs().shape, model.config.vocab_size)] * kept
        calls.clear()
        for handle in handles:
            handle.remove()


def narrow(rank: int, world: int, folder: str) -> None:
    model = load(folder)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp: the width 30 is not divisible by the 4 ranks"):
        swap_linears(model, dist.group.WORLD)
    assert not swapped_linears(model)


def test_unsupported_blocks_are_rejected_on_every_rank_and_unchanged(tmp_path: Path, pool4: RankPool) -> None:
    pool4.run(refusals, save_model("llama", tmp_path / "llama", **DENSE), timeout=120)
    pool4.run(narrow, save_model("llama", tmp_path / "narrow", intermediate_size=30), timeout=120)


def test_one_rank_keeps_everything_and_the_same_bits(saved: Callable[[str], str]) -> None:
    folder = saved("deepseek_v3")
    whole, model = load(folder), swap_linears(load(folder))
    assert len(swapped_linears(model)) == 3 * SMALL["deepseek_v3"]["num_hidden_layers"] + 2
    assert torch.equal(model(inputs()).logits, whole(inputs()).logits)
