"""``torch.compile`` of a swapped model breaks the graph at its experts modules only, and prints no warning."""

from __future__ import annotations

import warnings

import pytest
import torch

import moe_comm


def test_a_compiled_swapped_model_breaks_the_graph_at_its_experts_only() -> None:
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
    )
    model = moe_comm.swap_moe(transformers.MixtralForCausalLM(config))
    ids = torch.randint(64, (2, 8))
    expected = model(input_ids=ids, labels=ids).loss
    explained = torch._dynamo.explain(model)(input_ids=ids, labels=ids)
    assert all("Experts.forward" in str(reason.reason) for reason in explained.break_reasons)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        loss = torch.compile(model, backend="aot_eager")(input_ids=ids, labels=ids).loss
        loss.backward()
    assert [str(one.message) for one in recorded] == []
    torch.testing.assert_close(loss, expected)
