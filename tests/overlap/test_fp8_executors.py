"""Experts with fp8 GEMMs in the pipelined executor: the bits of the serial one, over every transport."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, make_dispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import InputError, PeerRaised
from moe_comm.kernels import expert_mlp
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.executors.pipelined import PipelinedCall
from moe_comm.overlap.options import Overlap
from tests.layers.reference import draw
from tests.overlap.test_experts import _gradients, _leaves, _routing, _same
from tests.pool import RankPool

pytest.importorskip("moe_comm._C", reason="the native core is not built")
D, F, EXPERTS = 256, 40, 5
ROUTINGS = ("random", "one expert", "no tokens on rank 0", "dropped")


@dataclass(frozen=True)
class Case:
    backend: str
    wire_dtypes: WireDtypes
    dtype: torch.dtype = torch.float32
    relay: bool = False

    def __str__(self) -> str:
        dispatch, combine = self.wire_dtypes.of("dispatch").name, self.wire_dtypes.of("combine").name
        return f"{self.backend}, {dispatch} and {combine}, {self.dtype}{', relay' * self.relay}"


def _dispatcher(case: Case) -> Dispatcher:
    peers = PeerToPeerOptions(emulate=True, relay=case.relay, heap_bytes=1 << 23)
    options = DispatchOptions(60, wire_dtypes=case.wire_dtypes, peer_to_peer=peers, checksums=True)
    return make_dispatcher(EXPERTS, dist.group.WORLD, backend=case.backend, options=options)


def _mlp(w: dict[str, Tensor], recompute: bool, gemm_dtype: Any = "fp8") -> ExpertMLP:
    return ExpertMLP((w["w13"], w["w2"], w["b13"], w["b2"]), activation_of("swiglu"), recompute, gemm_dtype)


def _run(
    dispatcher: Dispatcher,
    ids: Tensor,
    overlap: Overlap | None,
    recompute: bool,
    x: Tensor,
    weights: Tensor,
    **w: Tensor,
) -> Tensor:
    call = dispatch_rows(dispatcher, x, ids, weights, overlap, width=F, scaled=True)
    at_once = overlap is None or overlap.executor == "auto"
    assert type(call) is (ExpertCall if at_once else PipelinedCall)
    with mock.patch.object(expert_mlp, "quantize_weights", wraps=expert_mlp.quantize_weights) as quantize:
        rows = call.compute(call.rows, call.handle.rows_per_expert, _mlp(w, recompute))
    assert quantize.call_count == 2, "w13 and w2 are quantized once, not once for each row range"
    return call.combine(rows)


def _compare(rank: int, world: int, case: Case) -> None:
    dispatcher = _dispatcher(case)
    for kind in ROUTINGS:
        ids = _routing(kind, rank, EXPERTS, 3)
        leaves = _leaves(rank, len(dispatcher.local_experts), ids, case.dtype, hidden=D, ffn=F)
        grad = draw(ids.shape[0], D, seed=99 + rank, dtype=case.dtype)
        expected = _gradients(leaves, partial(_run, dispatcher, ids, None, False), grad)
        # One chunk of executor "auto" is dispatched at once.
        for overlap in (Overlap(1), *(Overlap(chunks, 1, executor="pipelined") for chunks in (1, 3))):
            for recompute in (False, True):
                run = partial(_run, dispatcher, ids, overlap, recompute)
                _same(_gradients(leaves, run, grad), expected, f"{kind}, {overlap}, {recompute=}")
        with torch.no_grad():
            assert torch.equal(run(**leaves), expected["y"])
    assert dispatcher.corruption.take() == 0


FP8, BACK = WireDtypes("fp8_block", "bf16", "bf16", "fp8_token"), WireDtypes("bf16", "bf16")
CASES = (
    Case("all_to_all", FP8),
    Case("all_to_all", BACK),
    Case("shared_memory", FP8),
    Case("shared_memory", WireDtypes("fp8_token_pow2"), torch.bfloat16),
    Case("shared_memory", BACK),
    Case("peer_to_peer", FP8),
    Case("peer_to_peer", WireDtypes()),
    Case("peer_to_peer", BACK, relay=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipelined_layer_has_the_bits_of_the_serial_one(case: Case, pool2: RankPool) -> None:
    """Rows are read as received, or quantized by row range; peers are computed in any order."""
    pool2.run(_compare, case, timeout=120)


@pytest.mark.parametrize("backend", ["all_to_all", "shared_memory"])
def test_four_ranks(backend: str, pool4: RankPool) -> None:
    pool4.run(_compare, Case(backend, FP8), timeout=120)


def _run_one_rank_serially(rank: int, world: int, case: Case) -> None:
    dispatcher, ids = _dispatcher(case), _routing("random", rank, EXPERTS, 2)
    leaves = _leaves(rank, len(dispatcher.local_experts), ids, torch.float32, hidden=D, ffn=F)
    grad = draw(ids.shape[0], D, seed=3)
    pipelined = Overlap(2, 1, executor="pipelined")
    results = [
        _gradients(leaves, partial(_run, dispatcher, ids, overlap, False), grad)
        for overlap in (pipelined, None if rank == 1 else pipelined)
    ]
    _same(results[1], results[0], "with a serial rank")


@pytest.mark.parametrize("wire_dtypes", [FP8, WireDtypes()], ids=str)
def test_serial_and_pipelined_ranks_run_together(wire_dtypes: WireDtypes, pool2: RankPool) -> None:
    pool2.run(_run_one_rank_serially, Case("shared_memory", wire_dtypes))


def _mistaken(rank: int, world: int, case: Case) -> None:
    dispatcher, ids = _dispatcher(case), _routing("random", rank, EXPERTS, 2)
    leaves = _leaves(rank, len(dispatcher.local_experts), ids, torch.float32, hidden=D, ffn=F)
    pipelined, x, weights = Overlap(2, 1, executor="pipelined"), leaves["x"], leaves["weights"]
    for hidden in (200, 0):
        with pytest.raises(InputError, match="must be a positive multiple of 128"):
            dispatch_rows(dispatcher, x[:, :hidden], ids, weights, pipelined, scaled=True)
    for scaled, gemm_dtype in ((True, "same"), (False, "fp8")):
        call = dispatch_rows(dispatcher, x, ids, weights, pipelined, scaled=scaled)
        with pytest.raises((InputError, PeerRaised), match="were dispatched with scaled"), call.abort_on_error():
            call.compute(call.rows, call.handle.rows_per_expert, _mlp(leaves, False, gemm_dtype))
    run = partial(_run, dispatcher, ids, pipelined, False)
    assert torch.equal(run(**leaves), _run(dispatcher, ids, None, False, **leaves))


def test_mistakes_are_typed_errors_and_the_group_remains_usable(pool2: RankPool) -> None:
    pool2.run(_mistaken, replace(CASES[2]))
