"""A layer in bf16 has the same bits at every EP size and on every instruction set of the native GEMMs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.kernels.native import core
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from tests.layers.reference import draw
from tests.pool import RankPool

_C: Any = core()
pytestmark = pytest.mark.skipif(_C is None, reason="needs the native core")
BF16, OWN_ORDER = 1, "avx512_bf16"
TOKENS, HIDDEN = 96, 72
CONFIG = MoEConfig(HIDDEN, 40, RouterConfig(4, 2), shared_ffn=24)


def _pass(rank: int, world: int, isa: str) -> list[Tensor]:
    """Return the output, the gradient of the input and the gradients of this rank's experts."""
    chosen = _C.gemm_isa(BF16)
    assert _C.set_gemm_isa(BF16, isa)
    try:
        group = dist.group.WORLD if world > 1 else None
        layer = MoELayer.build(CONFIG, group, seed=1, dtype=torch.bfloat16)
        own = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
        x = draw(TOKENS, HIDDEN, seed=2).bfloat16()[own].clone().requires_grad_()
        y = layer(x[None])[0]
        y.backward(draw(TOKENS, HIDDEN, seed=3).bfloat16()[own])
        grads = [x.grad, layer.experts.w13.grad, layer.experts.w2.grad]
        assert all(grad is not None for grad in grads)
        return [y.detach(), *grads]  # type: ignore[list-item]
    finally:
        _C.set_gemm_isa(BF16, chosen)


def test_the_bits_depend_neither_on_ranks_nor_on_the_instruction_set(pool2: RankPool) -> None:
    isas = [name for name in _C.gemm_isa_names(BF16) if name != OWN_ORDER]
    first = _pass(0, 1, isas[0])
    for isa in isas:
        for alone, *both in zip(first, _pass(0, 1, isa), *pool2.run(_pass, isa), strict=True):
            assert torch.equal(both[0], alone), isa
            assert torch.equal(torch.cat(both[1:]), alone), isa
