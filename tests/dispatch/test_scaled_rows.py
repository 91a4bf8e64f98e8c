"""``Dispatcher.dispatch(scaled=True)``: rows as e4m3 values and fp32 scales, the same bytes for every backend."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import WireDtypes
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.wire_dtype import WireDtype, decode, encode, rounded
from moe_comm.errors import ConfigError, InputError, RankMismatch
from tests.dispatch import cases, workers
from tests.dispatch.cases import Case
from tests.dispatch.workers import Job
from tests.pool import on_ranks

NAMES = (
    "plain",
    "no tokens anywhere",
    "all tokens on the first rank",
    "uneven experts, one rank without",
    "some slots dropped",
    "strided inputs",
    "bfloat16",
)
CASES = tuple(replace(cases.BY_NAME[name], hidden=256) for name in NAMES)
FP8 = ("fp8_block", "fp8_block_pow2", "fp8_token")
Delivered = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Bytes of the values, scales, dequantized rows, output, and gradient of the tokens."""


def deliver(rank: int, world: int, job: Job) -> list[Delivered]:
    return [_deliver(case, job, rank, world) for case in CASES]


def _deliver(case: Case, job: Job, rank: int, world: int) -> Delivered:
    group = None if job.backend in ("plain", "local") else dist.group.WORLD
    part = cases.make(case)[0].part(case, rank, world)
    dispatcher = workers.build(case, group, job, rank, world)
    x_TD = (cases.strided(part.x_TD) if case.strided else part.x_TD.clone()).requires_grad_()
    with workers.poisoned():
        sent = dispatcher.dispatch(x_TD, part.ids_TK, label=case.name, scaled=True)
        assert sent.scaled is not None
        assert sent.rows_RD.shape == (sent.handle.num_rows, case.hidden) and sent.rows_RD.dtype == case.dtype
        assert sent.rows_RD.isnan().all() and sent.rows_RD.requires_grad and not sent.scaled.scale_RB.requires_grad
        rows_RD = sent.scaled.dequantized(case.dtype)
        assert rows_RD.dtype == case.dtype and rows_RD.is_contiguous()
        y_TD = dispatcher.combine(rows_RD, part.weights_TK, sent.handle)
        sent.rows_RD.backward(rows_RD)
    assert x_TD.grad is not None
    values_RD = sent.scaled.values_RD.view(torch.uint8).clone()
    return values_RD, sent.scaled.scale_RB.clone(), rows_RD, y_TD, x_TD.grad


def _expected(case: Case, wire_dtype: WireDtype) -> Delivered:
    """Return the same from ``encode`` and a dispatch of rounded rows on one rank."""
    batch, _ = cases.make(case)
    plain = workers.build(case, None, Job("plain"), 0, 1)
    x_TD = batch.x_TD.clone().requires_grad_()
    of_wire = decode(encode(batch.x_TD, wire_dtype), wire_dtype, case.hidden, case.dtype)
    unchanged_RD = plain.dispatch(batch.x_TD, batch.ids_TK).rows_RD
    packed_RB = encode(unchanged_RD, wire_dtype)
    scales = wire_dtype.num_scales(case.hidden)
    scale_RB = packed_RB.view(torch.float32)[:, case.hidden // 4 :][:, :scales].expand(-1, 2)
    sent = plain.dispatch(of_wire, batch.ids_TK)
    grads = plain.dispatch(x_TD, batch.ids_TK)
    grads.rows_RD.backward(sent.rows_RD)
    assert x_TD.grad is not None
    y_TD = plain.combine(sent.rows_RD, batch.weights_TK, sent.handle)
    return packed_RB[:, : case.hidden], scale_RB, sent.rows_RD, y_TD, x_TD.grad


def _job(backend: str, dispatch: str) -> Job:
    if backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    return Job(backend, wire_dtypes=WireDtypes(dispatch))  # type: ignore[arg-type]


def _check(of_ranks: list[list[Delivered]], name: str) -> None:
    for case, parts in zip(CASES, zip(*of_ranks, strict=True), strict=True):
        whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        for index, (actual, expected) in enumerate(zip(whole, _expected(case, WireDtype.named(name)), strict=True)):
            assert torch.equal(actual, expected), (case.name, index)


@pytest.mark.parametrize("wire_dtype", FP8)
@pytest.mark.parametrize("backend", ["plain", "local"])
def test_one_rank_delivers_the_encoded_rows(backend: str, wire_dtype: str) -> None:
    _check([deliver(0, 1, _job(backend, wire_dtype))], wire_dtype)


@pytest.mark.parametrize(
    ("backend", "wire_dtype", "world"),
    [
        *(
            (backend, "fp8_block", world)
            for backend in ("all_to_all", "all_gather", "shared_memory")
            for world in (2, 4)
        ),
        *(("all_to_all", name, 2) for name in FP8[1:]),
        *(("peer_to_peer", name, 2) for name in FP8),
        ("peer_to_peer", "fp8_block", 4),
    ],
)
def test_every_backend_delivers_the_encoded_rows(backend: str, wire_dtype: str, world: int, pools: Any) -> None:
    """Values, scales, combine and backward, also with ranks and experts without rows."""
    _check(pools[world].run(deliver, _job(backend, wire_dtype), timeout=120), wire_dtype)


@pytest.mark.parametrize("backend", ["shared_memory", "hierarchical"])
def test_rows_in_another_wire_dtype_are_quantized_by_the_receiver(backend: str, pools: Any) -> None:
    _check(pools[2].run(deliver, _job(backend, "same"), timeout=120), "fp8_block")


@on_ranks(4)
@pytest.mark.parametrize("wire_dtype", ["fp8_block", "fp8_token_pow2", "same"])
def test_low_latency_delivers_values_and_scales_of_an_fp8_wire_dtype(rank: int, world: int, wire_dtype: str) -> None:
    """Values and scales equal those of a dispatch; one rank has no experts."""
    job = _job("peer_to_peer", wire_dtype)
    dispatcher = workers.build(CASES[3], dist.group.WORLD, job, rank, world)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    fp8 = job.wire_dtypes.of("dispatch").format == "fp8"
    for step in range(3):
        g = torch.Generator().manual_seed(10 * step + rank)
        x_TD = torch.randn((rank + step) % 4, 256, generator=g)
        ids_TK = torch.rand(x_TD.shape[0], dispatcher.num_experts, generator=g).argsort(1)[:, :2]
        expected = dispatcher.dispatch(x_TD, ids_TK, scaled=True).scaled
        assert expected is not None
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 4)
        if fp8:
            rows, counts_LW = sent.receive_scaled()
            block_LW = torch.arange(4 * counts_LW.numel()).view(*counts_LW.shape, 4)
            used_R = block_LW[torch.arange(4) < counts_LW.unsqueeze(2)]
            bytes_RD = rows.values_RD.view(torch.uint8)[used_R]
            assert torch.equal(bytes_RD, expected.values_RD.view(torch.uint8))
            assert torch.equal(rows.scale_RB[used_R], expected.scale_RB)
            sent.results.flatten(0, 1).copy_(rows.dequantized(x_TD.dtype))
        else:
            with pytest.raises(ConfigError, match="fp8"):
                sent.receive_scaled()
            sent.results.copy_(sent.receive()[0])
        y_TD = dispatcher.low_latency_combine(sent.results, torch.full(ids_TK.shape, 0.5), sent)
        assert torch.equal(y_TD, rounded(x_TD, job.wire_dtypes.of("dispatch")))


@on_ranks(2)
@pytest.mark.parametrize(("backend", "wire_dtype"), [("all_to_all", "same"), ("shared_memory", "fp8_block")])
def test_checksums_accept_scaled_rows(rank: int, world: int, backend: str, wire_dtype: str) -> None:
    job = replace(_job(backend, wire_dtype), checksums=True)
    dispatcher = workers.build(CASES[0], dist.group.WORLD, job, rank, world)
    part = cases.make(CASES[0])[0].part(CASES[0], rank, world)
    dispatcher.dispatch(part.x_TD, part.ids_TK, scaled=True)
    assert dispatcher.corruption.take() == 0


@on_ranks(2)
@pytest.mark.parametrize("backend", ["all_to_all", "all_gather", "shared_memory", "peer_to_peer", "hierarchical"])
def test_faults_are_raised_on_every_rank_before_rows_move(rank: int, world: int, backend: str) -> None:
    """A width that is no multiple of 128, scaled rows on one rank only, and fp8 rows that the backend decodes."""
    dispatcher = workers.build(CASES[0], dist.group.WORLD, _job(backend, "fp8_block"), rank, world)
    part = cases.make(CASES[0])[0].part(CASES[0], rank, world)
    with pytest.raises(InputError, match="D must be a positive multiple of 128"):
        dispatcher.dispatch(part.x_TD[:, :200], part.ids_TK, scaled=True)
    decodes = backend == "hierarchical"
    with pytest.raises(ConfigError if decodes else RankMismatch, match="all_to_all" if decodes else "rank 0: True, ra"):
        dispatcher.dispatch(part.x_TD, part.ids_TK, scaled=rank == 0)
    with pytest.raises(ConfigError) if decodes else nullcontext():
        dispatcher.dispatch(part.x_TD, part.ids_TK, scaled=True)
