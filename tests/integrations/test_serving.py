"""Ranks of a swapped model generate independently: any number of requests, none included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_comm
from moe_comm.integrations.hugging_face import swap_moe
from tests.integrations.models import VOCAB, ep_group, load
from tests.pool import RankPool

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def prompts(rank: int, count: int) -> list[Tensor]:
    """Return prompts of different lengths."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(3, VOCAB, (1, 3 + i), generator=generator, device="cpu") for i in range(count)]


def tokens(model: Any, ids: Tensor, length: int, **settings: Any) -> Tensor:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, eos_token_id=None, **settings
    )


def generate(rank: int, world: int, arg: tuple[str, int]) -> list[tuple[Tensor, Tensor]]:
    """Rank 0 has no prompts, and the others different numbers."""
    folder, length = arg
    plain, swapped = load(folder), swap_moe(load(folder), ep_group(world))
    expected = [tokens(plain, ids, length + rank) for ids in prompts(rank, rank)]
    with moe_comm.serving(swapped):
        got = [tokens(swapped, ids, length + rank) for ids in prompts(rank, rank)]
    return list(zip(got, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_any_number_of_prompts_generate_the_tokens_of_the_unswapped_model(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    results = pool4.run(generate, (saved(family), 6))
    assert [len(result) for result in results] == [0, 1, 2, 3]
    for got, expected in sum(results, []):
        assert torch.equal(got, expected)
