"""``torch.compile(fullgraph=True)`` of a swapped model has the bits of eager, and prints no warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_comm


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_swapped_model_is_one_graph_with_the_bits_of_eager(recompute: bool) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.16")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        attn_implementation="eager",  # the gradients of sdpa with fewer keys than queries differ on some CPUs
    )
    model = moe_comm.swap_moe(transformers.MixtralForCausalLM(config)).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(64, (2, 8))
    padded = torch.ones(2, 8, dtype=torch.int64)
    padded[0, :3] = 0

    def step(of: Any, **inputs: Any) -> list[Tensor]:
        model.zero_grad()
        loss = of(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    for inputs in ({}, {"attention_mask": padded}):
        expected = step(model, **inputs)
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            actual = step(torch.compile(model, backend="aot_eager", fullgraph=True), **inputs)
        assert [str(one.message) for one in recorded] == []
        assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))
