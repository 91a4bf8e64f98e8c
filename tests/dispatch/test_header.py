"""The header that ranks exchange before each operation: differences raise the same error on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm import errors
from moe_comm.comm import header as header_module
from moe_comm.comm.header import Header, check

GOOD = Header("dispatch", 7, 64, torch.bfloat16, 2, 8, True, "model.layers.3.mlp")


def error_texts(headers: list[Header]) -> list[tuple[type, str]]:
    """Return what each rank raises."""
    words = [header.pack() for header in headers]
    errors_by_rank = []
    for rank, header in enumerate(headers):
        with pytest.raises(errors.MoeCommError) as raised:
            check(words, rank, header)
        errors_by_rank.append((raised.type, str(raised.value)))
    return errors_by_rank


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"op": "combine"}, ("operation", "rank 1: combine")),
        ({"op": "dispatch_fixed"}, ("operation", "rank 1: dispatch_fixed")),
        ({"seq": 8}, ("call number", "rank 1: 8")),
        ({"hidden": 65}, ("hidden size", "rank 1: 65")),
        ({"dtype": torch.float32}, ("dtype", "rank 1: float32")),
        ({"top_k": 3}, ("top-k", "rank 1: 3")),
        ({"num_experts": 9}, ("experts", "rank 1: 9")),
        ({"requires_grad": False}, ("requires_grad", "rank 1: False")),
        ({"label": "model.layers.4.mlp"}, ("layer", "rank 1: 'model.layers.4.mlp'")),
    ],
)
def test_a_difference_is_named_on_every_rank(change: dict[str, Any], expected: tuple[str, str]) -> None:
    for kind, message in error_texts([GOOD, replace(GOOD, **change), GOOD]):
        assert kind is errors.RankMismatch
        assert f"disagree on {expected[0]}" in message and expected[1] in message


@pytest.mark.parametrize("kind", header_module.FAULTS)
def test_a_fault_on_one_rank_raises_its_class_and_text_on_every_rank(kind: type[errors.MoeCommError]) -> None:
    raised = error_texts([GOOD, replace(GOOD, fault=kind("7 is not 8"))])
    assert raised[1] == (kind, "7 is not 8")
    assert raised[0][0] is kind and raised[0][1].startswith("rank 1: 7 is not 8")


def test_a_fault_is_raised_instead_of_the_differences_it_causes() -> None:
    bad = replace(GOOD, hidden=0, fault=errors.InputError("x has one dimension"))
    assert [kind for kind, _ in error_texts([GOOD, bad])] == [errors.InputError] * 2
