"""``Dispatcher.run_layer``: dispatch, experts and combine in one native call have the bits, spans and errors of the
separate calls, and ranks may choose differently."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.dispatch.backends.local import NativeLocalDispatcher
from moe_comm.dispatch.backends.native import SharedMemoryDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.expert_call import serial_call
from moe_comm.dispatch.types import DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import InputError, PeerRaised, RoutingError
from moe_comm.kernels.activations import ACTIVATIONS
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import COMMUNICATION, EVENTS
from moe_comm.runtime.memory import private_heap
from moe_comm.topology import ExpertPlacement
from tests.pool import on_ranks


@pytest.fixture(autouse=True)
def no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers in this process read the time of communication, which needs the separate calls."""
    monkeypatch.setattr(COMMUNICATION, "read", False)


EXPERTS, D, F, K = 7, 40, 24, 3
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
CASES = [(torch.float32, False, False), (torch.float32, True, True), (torch.bfloat16, False, True)]


def weights_of(experts: list[int], dtype: torch.dtype, bias: bool, transposed: bool) -> Weights:
    random = torch.Generator().manual_seed(7)
    shapes = [(D, 2 * F), (F, D)] if transposed else [(2 * F, D), (D, F)]
    w13, w2 = (torch.randn(EXPERTS, *shape, generator=random).to(dtype)[experts] for shape in shapes)
    b13, b2 = (torch.randn(EXPERTS, size, generator=random).to(dtype)[experts] for size in (2 * F, D))
    return (w13, w2, b13, b2) if bias else (w13, w2, None, None)


def tokens_of(count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(count, D, generator=random).to(dtype)
    return x_TD, torch.randint(-1, EXPERTS, (count, K), generator=random), torch.rand(count, K, generator=random)


def separate(dispatcher: Dispatcher, tensors: tuple[Tensor, Tensor, Tensor], weights: Weights, swap: bool) -> Tensor:
    w13, w2, b13, b2 = weights
    if swap:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    call = serial_call(dispatcher, *tensors, label="layer", in_place=True)
    mlp = ExpertMLP((w13, w2, b13, b2), ACTIVATIONS["swiglu"])
    with EVENTS.span(Kind.COMPUTE, "experts", layer="layer"):  # as of ``MoELayer``
        out_RD = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    return call.combine(out_RD)


def spans_of_layer() -> list[tuple[int, str, int, tuple[int, ...]]]:
    spans = [one for one in read_spans(EVENTS.region) if one.layer == "layer"]
    return [(one.index, one.name, one.nbytes, tuple(one.rows)) for one in spans]


def compare(dispatcher: Dispatcher, rank: int, case: tuple[torch.dtype, bool, bool]) -> None:
    """Compare all four choices of two ranks, or both of one, for several numbers of tokens."""
    dtype, bias, transposed = case
    weights = weights_of(list(dispatcher.local_experts), dtype, bias, transposed)
    for sizes in ((5, 3), (0, 4), (300, 1), (0, 0)):
        tensors = tokens_of(sizes[rank], dtype, 10 * rank + sizes[rank])
        results, spans = [], []
        for at_once in ((False, False), (True, True), (True, False), (False, True)):
            before = max((index for index, *_ in spans_of_layer()), default=-1)
            if at_once[rank]:
                run = dispatcher.run_layer(tensors, weights, transposed, "layer")
                assert run is not None
                y_TD, received = run
                assert received == sum(spans_of_layer()[-3][3])
            else:
                y_TD = separate(dispatcher, tensors, weights, transposed)
            results.append(y_TD)
            spans.append([fields for index, *fields in spans_of_layer() if index > before])
        assert all(torch.equal(one, results[0]) for one in results)
        assert results[0].shape == (sizes[rank], D)
        assert all(one == spans[0] for one in spans)
        assert [name for name, *_ in spans[0]] == ["dispatch", "experts", "combine"]


def make_shared(rank: int, world: int, **options: object) -> SharedMemoryDispatcher:
    settings = DispatchOptions(timeout_s=60.0, **options)  # type: ignore[arg-type]
    return SharedMemoryDispatcher(ExpertPlacement.balanced(EXPERTS, world), dist.new_group(), rank, settings)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank(case: tuple[torch.dtype, bool, bool]) -> None:
    dispatcher = NativeLocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1))
    before = private_heap().blocks
    compare(dispatcher, 0, case)
    tensors, weights = tokens_of(4, case[0], 3), weights_of(list(range(EXPERTS)), *case)
    tensors[2][2, 1] = torch.inf
    with pytest.raises(RoutingError, match="token 2 are NaN"):
        dispatcher.run_layer(tensors, weights, case[2], "layer")
    del tensors
    assert private_heap().blocks == before


@on_ranks(2)
def test_two_ranks(rank: int, world: int) -> None:
    with torch.no_grad():
        dispatcher = make_shared(rank, world)
        before = dispatcher.heap.blocks
        for case in CASES:
            compare(dispatcher, rank, case)
        assert dispatcher.heap.blocks == before

        weights = weights_of(list(dispatcher.local_experts), torch.float32, False, False)
        tensors = tokens_of(4, torch.float32, rank)
        if rank:
            tensors[2][3, 0] = torch.nan
        with pytest.raises(RoutingError, match="token 3 are NaN"):  # on both ranks
            dispatcher.run_layer(tensors, weights, False, "layer")
        tensors = tokens_of(4, torch.float32, rank)
        run = partial(dispatcher.run_layer, tensors, weights, False, "layer")
        refuse = partial(dispatcher.refuse, InputError("no tokens"), label="layer")
        with pytest.raises(InputError, match="no tokens"):  # on both ranks, which count the same calls after it
            (refuse if rank else run)()
        compare(dispatcher, rank, CASES[0])
        tensors = tokens_of(4, torch.float32, rank)
        if rank:
            weights = weights_of([*dispatcher.local_experts][1:], torch.float32, False, False)
        with pytest.raises(InputError if rank else PeerRaised):
            dispatcher.run_layer(tensors, weights, False, "layer")
        compare(dispatcher, rank, CASES[0])


def test_calls_that_need_the_separate_functions() -> None:
    tensors, weights = tokens_of(4, torch.float32, 3), weights_of(list(range(EXPERTS)), torch.float32, False, False)
    plain = NativeLocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1))
    rounding = DispatchOptions(wire_dtypes=WireDtypes(dispatch="bf16"))
    checking = DispatchOptions(checksums=True)
    for options in (rounding, checking):
        dispatcher = NativeLocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1), options=options)
        assert dispatcher.run_layer(tensors, weights, False, "layer") is None
    x_TD, ids_TK, weights_TK = tensors
    assert plain.run_layer((x_TD.double(), ids_TK, weights_TK), weights, False, "layer") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert plain.run_layer(tensors, weights, False, "layer") is None
    with torch.no_grad():
        assert plain.run_layer(tensors, weights, False, "layer") is not None
