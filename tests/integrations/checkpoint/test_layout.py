"""``checkpoint_layout`` against what transformers saves, and against state dicts of users' models."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.core_model_loading import revert_weight_conversion

import moe_comm
from moe_comm.integrations.checkpoint.layout import CheckpointTensor, checkpoint_layout, held_tensors
from tests.integrations.blocks.styles import STYLES, Model
from tests.integrations.models import SMALL, new_model, randomise
from tests.pool import on_ranks


def _check(model: nn.Module, expected: Mapping[str, Tensor], layout: Mapping[str, CheckpointTensor]) -> Tensor:
    """Compare what this rank holds with the tensors of a checkpoint. Returns the number of elements it holds."""
    held, seen = held_tensors(model), 0
    assert layout.keys() == expected.keys()
    for name, entry in layout.items():
        assert entry.shape == tuple(expected[name].shape), name
        assert entry.dtype == expected[name].dtype
        for piece in entry.slices:
            tensor = held[piece.parameter]
            for box in tensor.boxes():
                if (overlap := piece.overlap(tensor.sharding.shape, box)) is not None:
                    local = overlap.of(tensor.tensor)
                    assert torch.equal(expected[name][overlap.hub], local), name
                    seen += local.numel()
    assert seen == sum(tensor.tensor.numel() for tensor in held.values())
    return torch.tensor(seen)


@pytest.mark.parametrize("family", SMALL)
def test_the_layout_is_that_of_save_pretrained(family: str) -> None:
    model = new_model(family)
    randomise(model, 0)
    _check(model, revert_weight_conversion(model, dict(model.state_dict())), checkpoint_layout(model))


@on_ranks(2)
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3"])
def test_each_rank_holds_its_boxes(family: str, rank: int, group: ProcessGroup) -> None:
    changes = {"olmoe": {"num_experts": 5}, "mixtral": {"tie_word_embeddings": True}}.get(family, {})
    torch.manual_seed(0)
    model = new_model(family, **changes)
    randomise(model, 0)
    full = {name: value.clone() for name, value in model.state_dict().items()}
    if family == "mixtral":
        del full["lm_head.weight"]
    expected = revert_weight_conversion(model, full)
    moe_comm.swap_linears(moe_comm.swap_attention(moe_comm.swap_moe(model, group), group), group)
    _check(model, expected, checkpoint_layout(model))


@on_ranks(2)
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_blocks_of_users_have_the_names_of_their_state_dict(style: type[nn.Module], group: ProcessGroup) -> None:
    torch.manual_seed(0)
    model = Model(style)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moe_comm.swap_moe(model, group)
    _check(model, expected, checkpoint_layout(model))
