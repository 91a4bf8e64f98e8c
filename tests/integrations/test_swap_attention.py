"""A model with swapped attention matches the unswapped one on 2 and 4 ranks, and raises clear errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from moe_comm.errors import ConfigError, InputError, UnsupportedModel
from moe_comm.integrations.hugging_face import sum_replicated_gradients, swap_moe
from moe_comm.integrations.hugging_face.attention import (
    gather_attention,
    shard_inputs,
    swap_attention,
    swapped_attention,
)
from moe_comm.layers.attention.sequence import unshard_sequence
from moe_comm.topology import ParallelConfig, ParallelMesh
from tests.integrations.models import VOCAB, assert_close, gradients, load, save_model
from tests.pool import RankPool

LENGTH = 16
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral_window": {"sliding_window": 5},
    "qwen3_moe": {},
    "olmoe": {"clip_qkv": 0.4, "num_attention_heads": 8, "num_key_value_heads": 4},
    "deepseek_v3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
    "llama": {"intermediate_size": 40, "attention_bias": True},
    "qwen3": {
        "intermediate_size": 40,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    written: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in written:
            family = name.removesuffix("_window")
            path: Path = tmp_path_factory.mktemp(name)
            written[name] = save_model(family, path, num_hidden_layers=2, **FAMILIES[name])
        return written[name]

    return folder


def data(packed: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    if not packed:
        return {"input_ids": ids, "labels": labels}
    positions = torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in ((5, 11), (3, 4, 9))])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def reference(folder: str, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model = load(folder)
    answer = model(**inputs, use_cache=False)
    answer.loss.backward()
    return answer.logits.detach(), gradients(model)


def run(rank: int, world: int, arg: tuple[str, list[tuple[int, int, str]], bool]) -> list[Any]:
    """Return the full logits and full gradients for each mapping (tp, cp, kind of context parallelism)."""
    folder, mappings, packed = arg
    return [run_mapping(folder, tp, cp, context, packed) for tp, cp, context in mappings]


def run_mapping(folder: str, tp: int, cp: int, context: Any, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    # The pool has four ranks; a mapping of two ranks runs twice concurrently.
    mesh = ParallelMesh(ParallelConfig(tp=tp, cp=cp, dp=4 // (tp * cp)))
    tp_group, cp_group = mesh.group("tp"), mesh.group("cp")
    model = swap_attention(load(folder), tp_group, cp_group=cp_group, context=context)
    answer = model(**shard_inputs(**data(packed), cp_group=cp_group, context=context))
    answer.loss.backward()
    if cp_group is not None:
        sum_replicated_gradients(model, cp_group)
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, (answer.logits.detach(), gradients(model)))
    logits = unshard_sequence([parts[at * tp][0] for at in range(cp)], context)
    sharding_of = {f"{n}.{k}": s for n, m in swapped_attention(model).items() for k, s in m.sharding_of.items()}
    whole = {}
    for name, value in parts[0][1].items():
        if name in sharding_of and sharding_of[name].splits:
            whole[name] = torch.zeros(sharding_of[name].shape)
            for rank in range(tp):
                for box in sharding_of[name].boxes({"tp": rank}, {"tp": tp}):
                    whole[name][box.full] = parts[rank][1][name][box.local]
        else:
            # Complete on every rank: no reduction is needed.
            for rank in range(tp * cp):
                assert_close(parts[rank][1][name], value, f"{name} on rank {rank}")
            whole[name] = value
    return logits, whole


def compare(results: list[Any], expected: tuple[Tensor, dict[str, Tensor]], what: str) -> None:
    for logits, grads in results:
        assert_close(logits, expected[0], f"{what}: logits", 2e-5)
        assert grads.keys() == expected[1].keys()
        for name, value in expected[1].items():
            assert_close(grads[name], value, f"{what}: {name}", 5e-5)


MAPPINGS = [(2, 1, "ulysses"), (2, 2, "ring"), (1, 2, "ulysses"), (1, 4, "ring"), (2, 2, "ulysses"), (1, 2, "ring")]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_gradients_equal_those_of_the_unswapped_model(
    family: str, folders: Callable[[str], str], pool4: RankPool
) -> None:
    folder = folders(family)
    some = MAPPINGS[list(FAMILIES).index(family) % 3 :: 3]
    compare(pool4.run(run, (folder, some, False))[0], reference(folder, **data()), family)


@pytest.mark.parametrize("family", ["mixtral_window", "olmoe", "deepseek_v3"])
def test_each_of_four_ranks_holds_a_quarter_of_the_heads(
    family: str, folders: Callable[[str], str], pool4: RankPool
) -> None:
    """All of these have four key and value heads, or a latent that all heads share."""
    folder = folders(family)
    compare(pool4.run(run, (folder, [(4, 1, "ulysses")], False))[0], reference(folder, **data()), family)


@pytest.mark.parametrize("family", ["mixtral_window", "deepseek_v3"])
def test_positions_that_restart_begin_a_new_document(
    family: str, folders: Callable[[str], str], pool4: RankPool
) -> None:
    folder = folders(family)
    mappings = [(1, 2, "ulysses"), (2, 2, "ring"), (1, 4, "ring")]
    expected = reference(folder, **data(packed=True))
    assert not torch.allclose(expected[0], reference(folder, **data())[0], rtol=1e-2)
    compare(pool4.run(run, (folder, mappings, True))[0], expected, family)


@pytest.mark.parametrize("pad_left", [True, False])
def test_padding_is_not_attended_to(pad_left: bool, folders: Callable[[str], str]) -> None:
    inputs = data()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, : 4 if pad_left else None] = 0 if pad_left else 1
    mask[1, -5 if not pad_left else LENGTH :] = 0
    expected = load(folders("qwen3_moe"))(**inputs, attention_mask=mask, use_cache=False).logits
    got = swap_attention(load(folders("qwen3_moe")))(**inputs, attention_mask=mask).logits
    not_padding = mask.bool()
    assert_close(got[not_padding], expected[not_padding], "logits of tokens that are not padding")


def swap_both(rank: int, world: int, folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Swap ring attention and experts over the same four ranks, with different tokens on each rank."""
    mesh = ParallelMesh(ParallelConfig(cp=4))
    group = mesh.group("cp")
    model = swap_moe(swap_attention(load(folder), cp_group=group, context="ring"), group)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    answer = model(**shard_inputs(**data(), cp_group=group, context="ring"))
    answer.loss.backward()
    sum_replicated_gradients(model, group)
    return answer.logits.detach(), {n: g for n, g in gradients(model).items() if ".experts." not in n}


def test_swap_attention_works_with_swap_moe_and_gradient_checkpointing(
    folders: Callable[[str], str], pool4: RankPool
) -> None:
    folder = folders("qwen3_moe")
    results = pool4.run(swap_both, folder)
    logits, grads = reference(folder, **data())
    whole = unshard_sequence([part for part, _ in results], "ring")
    compare([(whole, results[0][1])], (logits, {n: g for n, g in grads.items() if ".experts." not in n}), "both")


def gather(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    mesh = ParallelMesh(ParallelConfig(tp=2, dp=2))
    model = swap_attention(load(folder), mesh.group("tp"))
    with torch.no_grad():
        for module in swapped_attention(model).values():
            module.o_proj.weight.zero_()
    with pytest.raises(ConfigError, match="the heads of this rank only"):
        model.save_pretrained("nowhere")
    model.load_state_dict(load(folder).state_dict())  # full weights: each rank takes its shards
    return {**model.state_dict(), **gather_attention(model)}


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_full_weights_load_and_are_gathered_under_the_original_names(
    family: str, folders: Callable[[str], str], pool4: RankPool
) -> None:
    expected = load(folders(family)).state_dict()
    for got in pool4.run(gather, folders(family)):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_generation_without_a_cache_equals_the_unswapped_model_and_with_a_cache_raises(
    folders: Callable[[str], str],
) -> None:
    folder, prompt = folders("mixtral_window"), data()["input_ids"][:, :6]
    mask = torch.ones_like(prompt)
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = load(folder).generate(prompt, **settings)
    model = swap_attention(load(folder))
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), expected)
    with pytest.raises(InputError, match="use_cache=False"):
        model.generate(prompt, **settings)


def test_unsupported_models_are_rejected_and_unchanged(folders: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="GptOssAttention"):
        swap_attention(load(save_model("gpt_oss", tmp_path)))
    with pytest.raises(UnsupportedModel, match="no decoder"):
        swap_attention(nn.Linear(2, 2))
    model = load(folders("mixtral"), attention_dropout=0.1)
    before = model.model.layers[0].self_attn
    with pytest.raises(UnsupportedModel, match="attention_dropout"):
        swap_attention(model)
    assert model.model.layers[0].self_attn is before
    swapped = swap_attention(load(folders("mixtral")))
    with pytest.raises(ConfigError, match="already swapped"):
        swap_attention(swapped)
    with pytest.raises(InputError, match="attention_mask must have shape"):
        swapped(data()["input_ids"], attention_mask=torch.ones(2, 1, LENGTH, LENGTH))
    hole = torch.ones(2, LENGTH)
    hole[1, 5] = 0
    with pytest.raises(InputError, match="in the middle of a row"):
        swapped(data()["input_ids"], attention_mask=hole)


def test_one_rank_shares_the_parameters_of_the_model(folders: Callable[[str], str]) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folders("deepseek_v3")))
    before = dict(model.named_parameters())
    assert all(before[name] is p for name, p in swap_attention(model).named_parameters())


def hooks(rank: int, world: int, folder: str) -> None:
    group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    over_heads: dict[str, Any] = {"group": group}
    over_tokens: dict[str, Any] = {"cp_group": group, "context": "ring"}
    model = load(folder)
    attention = model.model.layers[1].self_attn
    for owner, register, settings, reason in (
        (attention.q_proj, "register_forward_hook", over_tokens, "self_attn.q_proj has forward or backward hooks"),
        (attention.q_proj.weight, "register_hook", over_heads, "self_attn.q_proj.weight has gradient hooks"),
        (attention, "register_state_dict_pre_hook", over_tokens, "self_attn has state-dict hooks"),
    ):
        handle = getattr(owner, register)(lambda *_: None)
        with pytest.raises(UnsupportedModel, match=f"model.layers.1.{reason}"):
            swap_attention(model, **settings)
        handle.remove()
    calls: list[str] = []
    handles = [
        attention.register_forward_pre_hook(lambda module, args, given: calls.append("before"), with_kwargs=True),
        attention.register_forward_hook(lambda module, args, output: calls.append(f"after {output[0].shape[-1]}")),
        attention.register_full_backward_hook(lambda module, inner, outer: calls.append("backward")),
    ]
    swap_attention(model, **over_heads)
    assert model.model.layers[1].self_attn is not attention
    for kept in (True, False):
        model(data()["input_ids"]).logits.sum().backward()
        assert calls == ["before", f"after {model.config.hidden_size}", "backward"] * kept
        calls.clear()
        for handle in handles:
            handle.remove()


def test_hooks_of_attention_run_after_the_swap_and_others_are_refused(
    folders: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(hooks, folders("mixtral"))
