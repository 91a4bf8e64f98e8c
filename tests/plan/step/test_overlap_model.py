"""Overlap within a pass: the longer of two overlapping operations counts."""

from __future__ import annotations

import pytest

from moe_plan.model.mapping import OverlapMode
from moe_plan.step.blocks import FREE, hide
from moe_plan.step.operators import BlockOperations, Operation


def transfer(name: str, seconds: float, fused_share: float = 0.0) -> Operation:
    return Operation(name, "transfer", seconds, fused_share=fused_share)


def product(name: str, seconds: float, weight_grad_s: float = 0.0) -> Operation:
    return Operation(name, "product", seconds, weight_grad_s=weight_grad_s)


def seconds(one: BlockOperations, overlap: OverlapMode, again: int = 0) -> tuple[float, float]:
    return hide(one, again, overlap).seconds()


def test_without_overlap_nothing_is_hidden() -> None:
    one = BlockOperations((product("shared up", 2.0), transfer("dispatch", 1.0, 0.5)), (product("qkv", 4.0, 2.0),))
    assert hide(one, 0, "none") is one
    assert one.seconds() == (3.0, 4.0)


def test_dispatch_and_combine_overlap_with_shared_experts() -> None:
    moved = (transfer("dispatch", 1.0), transfer("combine", 1.0))
    long = BlockOperations((*moved, product("shared up", 5.0)), ())
    assert seconds(long, "inter")[0] == pytest.approx(5 + 2 * (1 - FREE)), "transfers take units from GEMMs"
    short = BlockOperations((*moved, product("shared up", 0.5)), ())
    assert seconds(short, "inter")[0] == pytest.approx(2 + 0.5 * (1 - FREE)), "compute is shorter than the transfers"
    others = BlockOperations((transfer("attention gather", 1.0), product("shared up", 5.0)), ())
    assert seconds(others, "inter")[0] == 6.0, "transfers that shared experts depend on do not overlap with them"


def test_forward_transfers_are_not_hidden_without_shared_experts() -> None:
    one = BlockOperations((product("qkv", 5.0), transfer("dispatch", 1.0), product("experts up", 5.0)), ())
    assert seconds(one, "inter")[0] == 11.0


def test_weight_gradients_hide_backward_transfers() -> None:
    one = BlockOperations(
        (), (product("out", 4.0, weight_grad_s=1.5), transfer("attention gather", 1.0), transfer("combine", 1.0))
    )
    assert seconds(one, "inter")[1] == pytest.approx(6 - 1.5 * FREE)
    hidden = [each.hidden for each in hide(one, 0, "inter").backward]
    assert hidden == pytest.approx([0.0, FREE, 0.5 * FREE])


def test_recomputed_memory_passes_hide_transfers_and_gemms_do_not() -> None:
    again = (Operation("norm", "memory", 0.5), product("qkv", 3.0))
    one = BlockOperations((), (*again, transfer("dispatch", 1.0), Operation("norm", "memory", 2.0)))
    assert seconds(one, "inter", again=2)[1] == pytest.approx(6.5 - 0.5 * FREE)
    assert seconds(one, "inter", again=0)[1] == 6.5


def test_overlap_all_hides_the_rest_inside_gemms() -> None:
    one = BlockOperations((transfer("dispatch", 1.0, fused_share=0.75), product("shared up", 0.4)), ())
    left = 1 - 0.4 * FREE
    assert seconds(one, "all")[0] == pytest.approx(0.4 + left * 0.25)
    assert seconds(one, "inter")[0] == pytest.approx(0.4 + left)
