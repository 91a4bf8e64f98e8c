"""Lent experts on a GPU that all ranks share, and tiles for few and for many rows, which must have equal bits."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_comm.gpu.blocks import SHARING
from moe_comm.overlap.options import Overlap
from tests.layers.test_balance import Run, compare, run_layer
from tests.pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, SHARING, "1")  # the ranks inherit the variable, and torch reads it
        with RankPool(2) as pool:
            yield pool


RUNS = {
    "all_to_all": Run("all_to_all"),
    "peer_to_peer": Run("peer_to_peer"),
    "device executor": Run("peer_to_peer", overlap=Overlap(executor="device")),
    "planned on the device": Run("peer_to_peer", capacity=96),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_lent_experts_keep_the_bits(run: Run, pool: RankPool) -> None:
    compare(pool, run_layer, 2, replace(run, dtype=BF16, device="cuda"))


@pytest.mark.parametrize(("inner", "columns"), [(512, 384), (200, 136)])
def test_rows_have_the_same_bits_in_tiles_for_few_and_for_many_rows(inner: int, columns: int) -> None:
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into

    generator, device = torch.Generator("cuda").manual_seed(0), torch.device("cuda", 0)
    rows_RD = torch.randn(400, inner, generator=generator, device=device).to(BF16)
    w_END = torch.randn(2, columns, inner, generator=generator, device=device).to(BF16)

    def product(counts: list[int], rows_RD: torch.Tensor, w_END: torch.Tensor) -> torch.Tensor:
        out_RN = torch.empty(rows_RD.shape[0], w_END.shape[1], dtype=BF16, device=device)
        grouped_mm_into(rows_RD, w_END, torch.tensor(counts, device=device), out_RN)
        return out_RN

    many_RN = product([300, 100], rows_RD, w_END)
    few_RN = product([40, 0], rows_RD[:40], w_END)
    assert torch.equal(few_RN, many_RN[:40])
    back_RD = product([300, 100], many_RN, w_END.transpose(1, 2))
    assert torch.equal(product([40, 0], few_RN, w_END.transpose(1, 2)), back_RD[:40])
