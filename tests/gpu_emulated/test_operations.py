"""Operations launched by native code: few Python calls, the same results, and the right launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_comm
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import KernelError
from moe_comm.gpu.arguments import kernel_fields
from moe_comm.gpu.launch import NativeLauncher
from moe_comm.gpu.protocol import HEADER_WORDS, NOTHING, Offer, Reduction
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.topology import ExpertPlacement
from tests.pool import RankPool
from tests.support.launches import RecordingLauncher

core = pytest.importorskip("moe_comm._C", reason="the native core is not built")
FORWARD_CALLS, DISPATCH_AND_COMBINE_CALLS = 229, 90
PLACEMENT = ExpertPlacement.balanced(4, 1)


def one_rank() -> PeerToPeerDispatcher:
    options = DispatchOptions(peer_to_peer=PeerToPeerOptions(heap_bytes=1 << 20, num_blocks=4, emulate=True))
    return PeerToPeerDispatcher(PLACEMENT, None, 0, options, "cpu")


def calls_of(action: Callable[[], object]) -> int:
    """Return how many Python functions of this package, and constructors of its dataclasses, ``action`` enters."""
    calls, package = [0], str(Path(moe_comm.__file__).parent)

    def count(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        calls[0] += event == "call" and (file.startswith(package) or file == "<string>")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls[0]


def warm_calls(rank: int, world: int, arg: None) -> tuple[int, int]:
    """Return the calls of a forward pass of a layer, and of dispatch and combine, after several passes."""
    options = DispatchOptions(peer_to_peer=PeerToPeerOptions(heap_bytes=1 << 20, emulate=True))
    config = MoEConfig(hidden=64, ffn=128, router=RouterConfig(num_experts=8, top_k=2))
    layer = MoELayer.build(config, dist.group.WORLD, backend="peer_to_peer", options=options, seed=0)
    draw = torch.Generator().manual_seed(rank)
    x_TD, ids_TK = torch.randn(10, 64, generator=draw), torch.randint(0, 8, (10, 2), generator=draw)
    weights_TK, outputs = torch.rand(10, 2, generator=draw), []

    def forward() -> None:
        outputs.append(layer(x_TD.requires_grad_()))

    def dispatch_and_combine() -> None:
        sent = layer.dispatcher.dispatch(x_TD.detach(), ids_TK)
        layer.dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)

    for _ in range(3):
        forward()
        outputs.pop().sum().backward()
        dispatch_and_combine()
    return calls_of(forward), calls_of(dispatch_and_combine)


def test_a_forward_pass_makes_few_python_calls() -> None:
    """Python calls dominate the host time on a GPU. 10 percent more than these are allowed."""
    with RankPool(2) as pool:
        for forward, dispatch_and_combine in pool.run(warm_calls, None):
            assert 30 < dispatch_and_combine <= 1.1 * DISPATCH_AND_COMBINE_CALLS, dispatch_and_combine
            assert dispatch_and_combine < forward <= 1.1 * FORWARD_CALLS, forward


def test_growing_and_shrinking_batches_have_the_bits_of_local() -> None:
    peer_to_peer, plain = one_rank(), LocalDispatcher(PLACEMENT, None, 0, DispatchOptions())
    draw = torch.Generator().manual_seed(5)
    for tokens in (3, 40, 2500, 0, 7, 5100):
        x_TD, weights_TK = torch.randn(tokens, 6, generator=draw), torch.rand(tokens, 2, generator=draw)
        ids_TK = torch.rand(tokens, 4, generator=draw).topk(2).indices
        results = []
        for dispatcher in (peer_to_peer, plain):
            sent = dispatcher.dispatch(x_TD, ids_TK)
            results.append((sent.rows_RD, dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)))
        assert all(map(torch.equal, *results)), tokens
        del results, sent


def test_scratch_is_reused_by_later_turns_unless_a_graph_owns_it() -> None:
    """A turn is one operation of all ranks; scratch is the device memory that its kernels share."""
    operations = one_rank().memory.operations
    operations._prepare(3)
    first = operations.scratch
    operations._prepare(1)
    assert operations.scratch is first
    operations._capturing = True
    operations._prepare(1)
    assert operations.scratch is not first and operations.scratch.counts_CE.shape == (1, 4)
    operations._capturing = False
    operations._prepare(2)
    assert operations.scratch is first, "scratch of a captured graph belongs to the graph"
    operations._prepare(4)
    assert operations.scratch.bad_C4.shape[0] == 6
    assert any(scratch is first for scratch in operations._scratches), "kernels may still use the old scratch"


def test_a_reduced_combine_has_two_stages() -> None:
    recorder = RecordingLauncher()
    options = DispatchOptions(peer_to_peer=PeerToPeerOptions(heap_bytes=1 << 20, emulate=True))
    operations = PeerToPeerDispatcher(PLACEMENT, None, 0, options, "cpu", recorder).memory.operations
    place_TK, weights_TK, y_TD = torch.zeros(700, 2, dtype=torch.int64), torch.zeros(700, 2), torch.zeros(700, 4)
    operations.begin(5.0)
    own = Reduction(20, 256, 512, 768)
    operations.sum_reduced(b"\0" * 8 * HEADER_WORDS, Offer(1, 2, links=3), place_TK, weights_TK, y_TD, 0, 5, own)
    meet, weigh, stage_0, reduce, stage_1, total, done = launches = recorder.launches
    assert [launch.kernel for launch in launches] == [
        "meet",
        "weigh",
        "stage",
        "reduce",
        "stage",
        "sum_reduced",
        "done",
    ]
    assert [launch.grid for launch in launches] == [1, 3, 1, 2, 1, 5, 1]
    assert [meet.words[f"offer_{i}"] for i in range(4)] == [1, 2, 0, 3]
    assert (stage_0.words["stage"], stage_1.words["stage"]) == (0, 1) and done.kernel == "done"
    assert weigh.words["place_at"] == total.words["place_at"] == place_TK.data_ptr()
    assert weigh.words["weights_at"] == total.words["weights_at"] == weights_TK.data_ptr()
    assert weigh.words["offers_at"] == total.words["offers_at"] == meet.words["offers_at"]
    assert total.words["y_at"] == y_TD.data_ptr() and reduce.words["top_k"] == 2
    assert tuple(reduce.words[name] for name in ("rows", "rows_at", "links_at", "reduced_at")) == own


def test_a_header_of_another_length_is_refused() -> None:
    operations = one_rank().memory.operations
    operations.begin(5.0)
    with pytest.raises(ValueError, match="a header has 49 words"):
        operations.meet(b"\0" * 8, NOTHING)
    assert operations.turn == 0
    operations.meet(b"\0" * 8 * HEADER_WORDS, NOTHING)
    operations.wait()
    assert operations.turn == 1 and not operations.failed


def test_native_code_starts_kernels_through_a_python_function() -> None:
    recorder = RecordingLauncher()
    words = dict.fromkeys(kernel_fields()["done"], 3)
    packed = b"".join((3).to_bytes(8, sys.byteorder) for _ in words)
    recorder.starter.start("done", 2, 64, 16, 9, packed)
    (launch,) = recorder.launches
    assert (launch.kernel, launch.grid, launch.block, launch.shared, launch.stream) == ("done", 2, 64, 16, 9)
    assert launch.words == words


@pytest.mark.skipif(bool(core.cuda_archs()), reason="this build has CUDA kernels")
def test_a_build_without_cuda_kernels_raises_and_names_nvrtc() -> None:
    with pytest.raises(KernelError, match="compile them with NVRTC"):
        NativeLauncher("cuda", torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("kernel", "blocks", "threads", "args", "message"),
    [
        ("sub", 1, 1, b"", "no kernel is called 'sub'"),
        ("done", 1, 1, b"\0" * 8, "takes 80 bytes of arguments; got 8"),
        ("done", -1, 1, b"\0" * 80, "needs blocks >= 0"),
        ("done", 1, 1025, b"\0" * 80, "1 <= threads <= 1024"),
    ],
)
def test_wrong_launches_are_refused(kernel: str, blocks: int, threads: int, args: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.P2pStarter.host().start(kernel, blocks, threads, 0, 0, args)
