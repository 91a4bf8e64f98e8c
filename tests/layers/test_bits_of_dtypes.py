"""A layer has the same bits at every EP size and on every instruction set of the native GEMMs, in each dtype."""

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
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OWN_ORDER = "avx512_bf16"
TOKENS, HIDDEN = 96, 72
CONFIG = MoEConfig(HIDDEN, 40, RouterConfig(4, 2), shared_ffn=24)


def _pass(rank: int, world: int, dtype_and_isa: tuple[torch.dtype, str]) -> list[Tensor]:
    """Return the output, the gradient of the input and the gradients of this rank's experts."""
    dtype, isa = dtype_and_isa
    chosen = _C.gemm_isa(CODES[dtype])
    assert _C.set_gemm_isa(CODES[dtype], isa)
    try:
        group = dist.group.WORLD if world > 1 else None
        layer = MoELayer.build(CONFIG, group, seed=1, dtype=dtype)
        own = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
        x = draw(TOKENS, HIDDEN, seed=2).to(dtype)[own].clone().requires_grad_()
        y = layer(x[None])[0]
        y.backward(draw(TOKENS, HIDDEN, seed=3).to(dtype)[own])
        grads = [x.grad, layer.experts.w13.grad, layer.experts.w2.grad]
        assert all(grad is not None for grad in grads)
        return [y.detach(), *grads]  # type: ignore[list-item]
    finally:
        _C.set_gemm_isa(CODES[dtype], chosen)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_the_bits_depend_neither_on_ranks_nor_on_the_instruction_set(
    dtype: torch.dtype, pool2: RankPool, pool4: RankPool
) -> None:
    isas = [name for name in _C.gemm_isa_names(CODES[dtype]) if name != OWN_ORDER]
    first = _pass(0, 1, (dtype, isas[0]))
    for isa in isas:
        for ranks in ([_pass(0, 1, (dtype, isa))], pool2.run(_pass, (dtype, isa)), pool4.run(_pass, (dtype, isa))):
            for alone, *parts in zip(first, *ranks, strict=True):
                assert torch.equal(torch.cat(parts), alone), (isa, len(ranks))
