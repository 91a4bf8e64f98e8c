"""The tests of ``peer_to_peer`` on a GPU that all ranks share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions, WireDtypes
from moe_comm.gpu.blocks import SHARING
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig
from tests.dispatch import test_peer_to_peer as on_cpu
from tests.dispatch.workers import Job
from tests.pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PEERS = replace(on_cpu.PEERS, emulate=False)
JOB = Job("peer_to_peer", "cuda", timeout_s=10, peers=PEERS)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, SHARING, "1")  # the ranks inherit the variable, and torch reads it
        with RankPool(4) as pool:
            yield pool


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, peers=replace(PEERS, relay=True)),
        replace(JOB, peers=replace(PEERS, num_blocks=1)),
        replace(JOB, wire_dtypes=WireDtypes("fp8_block", "fp8_token", "fp8_block", "fp8_block")),
        replace(JOB, wire_dtypes=WireDtypes("fp8_token_pow2", "bf16"), peers=replace(PEERS, relay=True)),
    ],
    ids=["usual", "relay", "one block", "fp8", "fp8, relay"],
)
def test_settings_do_not_change_bits(job: Job, pool: RankPool) -> None:
    for of_rank in pool.run(on_cpu.several, job, timeout=120):
        assert of_rank == [(name, True) for name in on_cpu.SOME]


def test_a_full_heap_raises_on_every_rank_and_ranks_stay_usable(pool: RankPool) -> None:
    for full, combine, works_on in pool.run(on_cpu.no_room, replace(JOB, peers=replace(PEERS, heap_bytes=4096))):
        assert full[0] == "HeapError" and "rank 3 has no room in its heap for 32 rows" in full[1], full
        assert combine[0] == "HeapError" and works_on, combine


def test_fixed_capacity_has_the_bits_of_exact_dispatch_and_drops_the_rest(pool: RankPool) -> None:
    ranks = pool.run(on_cpu.fixed, replace(JOB, peers=replace(PEERS, capacity_rows=16)))
    assert ranks == [(True, True, overflow, end) for overflow, end in ((0, 0), (0, 0), (2, 0), (6, 16))]


@pytest.mark.parametrize("wire_dtype", ["same", "fp8_block"])
def test_low_latency_has_the_bits_of_dispatch_and_combine(wire_dtype: Any, pool: RankPool) -> None:
    for same_result, too_many, in_between in pool.run(
        on_cpu.few, replace(JOB, wire_dtypes=WireDtypes(dispatch=wire_dtype))
    ):
        assert same_result
        assert too_many[0] == "InputError" and "got 5" in too_many[1]
        assert in_between[0] == "ConfigError" and "low_latency_combine" in in_between[1]


def passes(built: MoELayer, x_TD: Tensor) -> list[Tensor]:
    x_TD = x_TD.detach().requires_grad_()
    built.zero_grad(set_to_none=True)
    y_TD = built(x_TD)
    y_TD.backward(x_TD.detach())
    return [y_TD.detach(), *(p.grad for p in (x_TD, *built.parameters()) if p.grad is not None)]


def _without_counts(rank: int, world: int) -> None:
    tokens, hidden, experts, top_k = 300, 256, 8, 2
    config = MoEConfig(hidden, 128, RouterConfig(experts, top_k))

    def build(capacity_rows: int | None) -> MoELayer:
        peers = PeerToPeerOptions(heap_bytes=64 << 20, capacity_rows=capacity_rows)
        options = DispatchOptions(timeout_s=20, checked=False, peer_to_peer=peers)
        return MoELayer.build(
            config, dist.group.WORLD, backend="peer_to_peer", options=options, seed=0, dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip

    counted, fixed = build(None), build(world * tokens * top_k)
    for seed in range(4):  # the launches of a pass are recorded in the second call, and then repeated
        generator = torch.Generator("cuda").manual_seed(10 * rank + seed)
        x_TD = torch.randn(tokens, hidden, device="cuda", generator=generator).to(torch.bfloat16)
        expected = passes(counted, x_TD)
        torch.cuda.set_sync_debug_mode("error" if seed == 3 else "default")
        actual = passes(fixed, x_TD)
        torch.cuda.set_sync_debug_mode("default")
        assert len(expected) == len(actual) == 5
        for number, (want, got) in enumerate(zip(expected, actual, strict=True)):
            assert torch.equal(want, got), (seed, number)
    fixed.dispatcher.check()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_layer_with_room_for_a_fixed_number_of_rows_has_the_bits_of_one_with_counts(pool: RankPool) -> None:
    pool.run(_without_counts, timeout=60)
