"""The recorded routing of a model on real text places its experts on fewer hosts, also for text it has not seen."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_comm.errors import InputError, UnsupportedModel
from moe_comm.integrations.hugging_face import record_routing, swap_moe, swapped_experts
from moe_comm.topology import Placement, placement_from_routing, remote_copies
from moe_comm.train.data.tokenizer import ByteTokenizer

EXPERTS, WORLD, HOSTS = 16, 8, 4
LENGTH = 128


def make_model() -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": ByteTokenizer().vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [],
    }
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**settings)).eval()


def text(sequences: int) -> Tensor:
    """Return sequences of Python's language reference."""
    (ids,) = ByteTokenizer().encode(["\n".join(topics[name] for name in sorted(topics))])
    return torch.tensor(ids[: sequences * LENGTH]).view(sequences, LENGTH)


def routing_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), record_routing(model) as routing:
        for part in ids.split(16):
            model(part, use_cache=False)
    assert list(routing.layers) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    return routing.ids


def test_held_out_text_is_sent_to_fewer_hosts_than_with_contiguous_experts() -> None:
    seen, held_out = text(128).chunk(2)
    model = make_model()
    recorded, new = routing_of(model, seen), routing_of(model, held_out)
    assert recorded.shape == (2 * seen.numel(), 4)
    contiguous = Placement.contiguous(EXPERTS, WORLD)
    placement = placement_from_routing(recorded.numpy(), EXPERTS, WORLD, ranks_per_host=WORLD // HOSTS)
    before, after = (remote_copies(new.numpy(), one, WORLD // HOSTS) for one in (contiguous, placement))
    assert after < 0.95 * before
    # The placement holds for the swapped model, which routes in the same way.
    swapped = swap_moe(make_model(), None, placement=placement_from_routing(recorded.numpy(), EXPERTS, 1))
    assert swapped_experts(swapped)
    assert torch.equal(routing_of(swapped, held_out[:2]), routing_of(model, held_out[:2]))


def test_recording_ends_with_the_context_and_needs_an_moe_block() -> None:
    model = make_model()
    with record_routing(model) as routing:
        with pytest.raises(InputError, match="no routing has been recorded"):
            _ = routing.ids
        model(text(1))
    tokens = len(routing.ids)
    model(text(1))
    assert len(routing.ids) == tokens == 2 * LENGTH
    with pytest.raises(UnsupportedModel), record_routing(nn.Linear(2, 2)):
        pass
