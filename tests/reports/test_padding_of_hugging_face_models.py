"""Experts of swapped models skip the tokens that ``attention_mask`` excludes; real tokens have the same logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import StaticCache

from moe_comm.integrations.hugging_face import record_routing, swap_attention, swap_moe, swapped_experts
from tests.integrations.models import VOCAB, load, new_model, randomise, save_model
from tests.pool import RankPool

S = 7
LENGTHS = (7, 3, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("padded"), num_hidden_layers=2, hidden_size=16)


def batch(left: bool = False) -> tuple[Tensor, Tensor]:
    """Return token ids and the attention mask [B, S]."""
    ids = torch.randint(3, VOCAB, (len(LENGTHS), S), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).long()
    return ids, mask.flip(1) if left else mask


def call(model: Any, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    return logits


def loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return call(model, ids, mask).square()[mask.bool()].sum()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_real_tokens_have_the_logits_of_the_unswapped_model(family: str, left: bool) -> None:
    reference = new_model(family, num_hidden_layers=2).eval()
    randomise(reference, 0)
    swapped = swap_moe(copy.deepcopy(reference))
    ids, mask = batch(left)
    outputs: list[Tensor] = []
    for experts in swapped_experts(swapped).values():
        experts.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        torch.testing.assert_close(call(swapped, ids, mask)[mask.bool()], call(reference, ids, mask)[mask.bool()])
        assert outputs and all(not y[~mask.bool().view(-1)].any() and y.any() for y in outputs)
        outputs.clear()
        torch.testing.assert_close(call(swapped, ids), call(reference, ids))
        assert all(y.any(1).all() for y in outputs)


@pytest.mark.parametrize("swapped", [False, True])
def test_recorded_routing_has_no_padding(swapped: bool, folder: str) -> None:
    model = swap_moe(load(folder)) if swapped else load(folder)
    ids, mask = batch()
    with record_routing(model) as padded:
        call(model, ids, mask)
        call(model, ids, mask=torch.ones_like(ids))
        model.model(ids, mask, use_cache=False)  # the decoder alone, with a positional mask
        model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
        call(model, ids, torch.zeros(len(LENGTHS), 1, S, S))  # a mask of attention, not of padding
    assert all(len(ids_TK) == 3 * sum(LENGTHS) + 2 * ids.numel() for ids_TK in padded.layers.values())
    with record_routing(model) as alone:
        for row, length in zip(ids, LENGTHS, strict=True):
            call(model, row[None, :length])
    for name, ids_TK in alone.layers.items():
        assert torch.equal(padded.layers[name][: len(ids_TK)], ids_TK)


def test_generation_with_a_cache_skips_left_padding(folder: str) -> None:
    reference = load(folder).eval()
    model = swap_moe(load(folder)).eval()
    ids, mask = batch(left=True)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = reference.generate(input_ids=ids, attention_mask=mask, **settings)
    with record_routing(model) as record:
        assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **settings), want)
    assert len(next(iter(record.layers.values()))) == sum(LENGTHS) + 3 * len(LENGTHS)


def test_the_mask_of_a_cache_of_fixed_size_has_the_tokens_at_their_positions(folder: str) -> None:
    reference, model = load(folder).eval(), swap_moe(load(folder)).eval()
    ids, _ = batch()
    outputs = []
    for one in (reference, model):
        cache = StaticCache(config=one.config, max_cache_len=S + 3)
        for first, last in ((0, 4), (4, 5)):
            mask = (torch.arange(S + 3) < last).long().expand(len(ids), -1)
            position = torch.arange(first, last)
            more = {"past_key_values": cache, "cache_position": position, "use_cache": True}
            with torch.no_grad():
                outputs.append(one(input_ids=ids[:, first:last], attention_mask=mask, **more).logits)
    for want, got in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "by hand"])
def test_checkpointed_layers_are_recomputed_with_their_mask(kind: str, folder: str) -> None:
    plain, model = (swap_moe(load(folder)).train() for _ in range(2))
    if kind == "by hand":
        for layer in model.model.layers:
            run = layer.forward
            layer.forward = lambda *args, run=run, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()
    ids, mask = batch()
    batches = [(ids, mask), (ids, mask.flip(0)), (ids, mask.flip(1)), (ids, torch.ones_like(mask))]
    for one in (plain, model):
        losses = [loss(one, *arguments) for arguments in batches]
        for value in (losses[2], losses[0], losses[3], losses[1]):  # other calls lie between forward and backward
            value.backward()
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert got.grad is not None and want.grad is not None
        torch.testing.assert_close(got.grad, want.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_no_mask_outlives_its_call(folder: str) -> None:
    model, (ids, mask) = swap_moe(load(folder)), batch()

    def fail(*_: Any) -> None:
        raise KeyError("stopped")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        call(model, ids, mask)
    hook.remove()
    experts = next(iter(swapped_experts(model).values()))
    x, ids_TK, weights_TK = torch.randn(ids.numel(), 16), torch.zeros(ids.numel(), 1).long(), torch.ones(ids.numel(), 1)
    assert experts(x, ids_TK, weights_TK).any(1).all()
    torch.testing.assert_close(call(model, ids), call(load(folder), ids))


def test_a_copy_has_masks_of_its_own(folder: str) -> None:
    model, (ids, mask) = swap_moe(load(folder)), batch()
    other = copy.deepcopy(model)
    assert torch.equal(call(other, ids, mask), call(model, ids, mask))
    with record_routing(other) as record:
        call(other, ids, mask)
    assert len(next(iter(record.layers.values()))) == sum(LENGTHS)


@pytest.mark.parametrize("attention_first", [False, True])
def test_swapped_attention_keeps_the_mask(attention_first: bool, folder: str) -> None:
    model, (ids, mask) = load(folder), batch()
    for swap in (swap_attention, swap_moe) if attention_first else (swap_moe, swap_attention):
        model = swap(model)
    with record_routing(model) as record:
        got = call(model, ids, mask)
    assert len(next(iter(record.layers.values()))) == sum(LENGTHS)
    torch.testing.assert_close(got[mask.bool()], call(load(folder), ids, mask)[mask.bool()], rtol=1e-4, atol=1e-4)


def ranks(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Return the logits of each rank's real tokens, and its router's gradient. The last rank has only padding."""
    model = swap_moe(load(folder), dist.group.WORLD).train()
    ids, mask = batch()
    mask = torch.zeros_like(mask) if rank == world - 1 else mask
    logits = call(model, ids, mask)
    logits[mask.bool()].square().sum().backward()
    gate = model.model.layers[0].mlp.gate.weight.grad
    return {"logits": logits.detach()[mask.bool()], "gate": gate}


def test_a_rank_with_only_padding_takes_part(folder: str, pool2: RankPool) -> None:
    first, last = pool2.run(ranks, folder)
    model = load(folder).train()
    ids, mask = batch()
    logits = call(model, ids, mask)[mask.bool()]
    logits.square().sum().backward()
    torch.testing.assert_close(first["logits"], logits.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first["gate"], model.model.layers[0].mlp.gate.weight.grad, rtol=1e-3, atol=1e-3)
    assert not last["logits"].numel() and not last["gate"].any()
