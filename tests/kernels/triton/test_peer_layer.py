"""A layer over ``peer_to_peer`` with ``capacity_rows`` is one native call each way, with the bits of its parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from moe_comm.dispatch.peer_to_peer import primitives, repeated
from moe_comm.dispatch.peer_to_peer.peer_layer import PeerLayer
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.dispatch.types import DispatchOptions, PeerToPeerOptions
from moe_comm.errors import PeerError
from moe_comm.gpu import operations
from moe_comm.kernels import native
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig, Routing
from moe_comm.layers.moe.shared import SharedExpert
from tests.kernels.triton.common import drawn, kernels, some_ids
from tests.kernels.triton.test_device_call import (
    EXPERTS,
    FFN,
    HIDDEN,
    TOKENS,
    TOP_K,
    emulated,
    fill_biases,
    frames_of_package,
    passes,
    step_by_step,
)
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks
from tests.support.launches import HookedLauncher
from tests.support.python_driver import PythonDriver

pytestmark = needs_triton
pytest.importorskip("moe_comm._C", reason="the native core is not built")
FORWARD = ["linear_kernel", "route_kernel", "grouped_mm_tma_kernel", "swiglu_kernel", "grouped_mm_tma_kernel"]
"""Kernels that the driver launches."""
OF_PEERS = ["count", "scan", "push", "arrive", "meet", "sum", "meet", "spread", "meet", "sum"]
"""Kernels of peer_to_peer, which run on the CPU: six forward, and four backward."""
BACKWARD = ["grouped_mm_tma_kernel", "weighted_swiglu_backward_kernel", "grouped_weight_grad_kernel",
            "grouped_mm_tma_kernel", "grouped_weight_grad_kernel", "route_backward_kernel",
            "linear_backward_kernel"]  # fmt: skip


GPT_OSS = {"expert_bias": True, "activation": "clamped_swiglu"}
OF_BIASES = ["add_bias_dots_kernel", "sum_rows_kernel", "sum_rows_kernel"]
WITH_BIASES = [*BACKWARD[:2], OF_BIASES[0], BACKWARD[2], *OF_BIASES[1:], *BACKWARD[3:]]


def build(group: Any, capacity: int | None, heap_bytes: int | None = None, **experts: Any) -> MoELayer:
    """Return a layer. Layers with the same number of bytes share the memory of peers. experts: of ``MoEConfig``."""
    peers = PeerToPeerOptions(emulate=True, capacity_rows=capacity, heap_bytes=heap_bytes)
    options = DispatchOptions(timeout_s=60, peer_to_peer=peers)
    config = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, TOP_K), **experts)
    built = MoELayer.build(config, group, backend="peer_to_peer", options=options, seed=1, dtype=torch.bfloat16)
    fill_biases(built.experts)
    return built


def unseen(kernel: Any) -> Any:
    """Return a kernel whose frames a profiler does not see."""

    def run(*args: Any) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            kernel(*args)
        finally:
            sys.setprofile(profile)

    return run


@on_ranks(2)
def test_a_layer_is_one_native_call_each_way(rank: int) -> None:
    driver, of_peers = PythonDriver(), list[str]()
    with emulated(driver), pytest.MonkeyPatch.context() as patch:
        for module in (operations, repeated):
            patch.setattr(module, "RING", 8)  # headers of the third pass are written over those of the first one
        patch.setattr(primitives, "launcher_for", lambda *_: HookedLauncher(of_peers.append))
        counted, fixed = (build(dist.group.WORLD, capacity, heap_bytes=1 << 20) for capacity in (None, 50))

        def check(tokens: int, seed: int) -> list[Tensor]:
            x_TD = drawn(tokens, HIDDEN, dtype=torch.bfloat16, seed=seed + 7 * rank)
            expected = step_by_step(counted, x_TD)
            driver.launches.clear()
            driver.named.clear()
            of_peers.clear()
            actual = passes(fixed, x_TD)
            same = [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]
            assert same == [True] * (8 if fixed.experts.b2 is not None else 6), same
            return actual

        for seed in range(4):
            y_TD = check(TOKENS, seed)[0]
            names = [driver.names[launch.kernel] for launch in driver.launches]
            assert names == (FORWARD + BACKWARD if seed > 1 else []) and of_peers == OF_PEERS
            calls = [len(list(group)) for key, group in groupby(driver.named) if key == "cuLaunchKernel"]
            assert calls == ([len(FORWARD), len(BACKWARD)] if seed > 1 else [])
            assert driver.named.count("cuCtxGetCurrent") == (2 if seed > 1 else 0)
        x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=3 + 7 * rank)
        assert fixed.dispatch_stats == counted.dispatch_stats and fixed.saved_bytes == 50 * 2 * (HIDDEN + 2 * FFN)
        leaf = x_TD.clone().requires_grad_()
        driver.kernels = {number: unseen(kernel) for number, kernel in driver.kernels.items()}
        forward, again_TD = frames_of_package(lambda: fixed(leaf))
        wanted = [leaf, *fixed.parameters()]
        backward, _ = frames_of_package(lambda: torch.autograd.grad(again_TD.float().sum(), wanted))
        backward = backward[: backward.index("PeerGroupMemory.end") + 2]  # before hooks of parameters
        assert torch.equal(again_TD, y_TD)
        assert len(forward) <= 51 and len(backward) <= 32, (len(forward), len(backward), forward, backward)
        for _ in range(3):  # without a backward pass
            driver.launches.clear()
            with torch.no_grad():
                assert torch.equal(fixed(x_TD), y_TD)
        assert len(driver.launches) == len(FORWARD)
        if rank:  # this rank makes several calls, and the other one a native one
            for built in (fixed, counted):
                built.experts.register_forward_hook(lambda *_: None)
        check(TOKENS, 3)
        assert bool(rank) == (len(driver.launches) != len(FORWARD + BACKWARD))
        for built in (fixed, counted):
            built.experts._forward_hooks.clear()
        check(rank, 3)  # no tokens on rank 0
        counted, fixed = (build(dist.group.WORLD, rows, 1 << 20, **GPT_OSS) for rows in (None, 50))
        fixed.in_flight_hook = (lambda: None) if rank else None  # rank 1 makes several native calls
        for seed in range(3):
            check(TOKENS, seed)
        names = [driver.names[launch.kernel] for launch in driver.launches]
        assert names[:7] == [*FORWARD, *WITH_BIASES[:2]] and names.count("sum_rows_kernel") == 2
        assert names[7] == "add_bias_dots_kernel" and (rank or names == FORWARD + WITH_BIASES)
        assert rank or (driver.named.count("cuCtxGetCurrent") == 2 and of_peers == OF_PEERS)
        fixed.in_flight_hook = None
        fixed.dispatcher.calls.next(fixed.dispatcher._ordinal, rank)
        with pytest.raises(PeerError, match="call"):
            fixed(x_TD)


@on_ranks(4)
def test_tokens_have_the_same_bits_for_every_number_of_ranks(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([one]) for one in range(4)]
    with emulated(PythonDriver()):
        results = []
        for group in (dist.group.WORLD, pairs[rank // 2], alone[rank]):
            built = build(group, 4 * TOKENS * TOP_K)
            for _ in range(3 if group is dist.group.WORLD else 1):  # repeated by native code, or not
                actual = passes(built, drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=rank))
            results.append(actual)
        for actual in results[1:]:
            assert all(map(torch.equal, actual[:3], results[0][:3]))  # output, gradients of tokens and of the router


def capped(built: MoELayer) -> None:
    built.capacity = Capacity(0.5)


def sharded(built: MoELayer) -> None:
    moe_comm.prepare_fsdp(built)
    fully_shard(built)


CASES: dict[str, tuple[bool, Callable[[MoELayer], Any]]] = {
    "plain": (True, lambda built: None),
    "hooks of the layer": (True, lambda built: built.register_forward_hook(lambda *_: None)),
    "recomputed activations": (True, lambda built: setattr(built.experts, "recompute", True)),
    "frozen experts": (True, lambda built: built.experts.requires_grad_(False)),
    "frozen router": (True, lambda built: built.router.requires_grad_(False)),
    "hooks of the experts": (False, lambda built: built.experts.register_forward_hook(lambda *_: None)),
    "hooks of the router": (True, lambda built: built.router.register_forward_hook(lambda *_: None)),
    "shards of FSDP2": (False, sharded),
    "shared expert": (True, lambda built: setattr(built, "shared", SharedExpert(HIDDEN, 8, dtype=torch.bfloat16))),
    "shared module of a user": (False, lambda built: setattr(built, "shared", torch.nn.Identity())),
    "capacity": (True, capped),
}
"""Whether a layer is one function after a change."""


@on_ranks(2)
def test_unusual_calls_have_the_same_bits(rank: int) -> None:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    calls = [0]

    def over_peers(*args: Any, call: Any = PeerLayer.__call__) -> Any:
        calls[0] += 1
        return call(*args)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PeerLayer, "__call__", over_peers)
            x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=rank)
            for name, (whole, change) in CASES.items():
                counted, fixed = build(dist.group.WORLD, None), build(dist.group.WORLD, 50)
                for built in (counted, fixed):
                    torch.manual_seed(0)
                    change(built)
                calls[0] = 0
                if whole:
                    assert all(map(torch.equal, passes(fixed, x_TD), passes(counted, x_TD))), name
                else:
                    with torch.no_grad():
                        assert torch.equal(fixed(x_TD), counted(x_TD)), name
                assert calls[0] == whole, name
            counted, fixed = build(dist.group.WORLD, None), build(dist.group.WORLD, 50)
            compiled: Any = torch.compile(
                fixed, fullgraph=True, backend="aot_eager"
            )  # the operator runs the whole call
            calls[0] = 0
            assert all(map(torch.equal, passes(compiled, x_TD), passes(counted, x_TD))) and calls[0] == 1
            calls[0], results = 0, []
            for capacity in (None, 50):
                data_parallel = DistributedDataParallel(moe_comm.prepare_ddp(build(dist.group.WORLD, capacity)))
                y_TD = data_parallel(x_TD)
                y_TD.backward(drawn(*y_TD.shape, dtype=y_TD.dtype))
                results.append([y_TD, *(p.grad for p in data_parallel.parameters())])
            assert all(map(torch.equal, *results)) and calls[0] == 1
            calls[0] = 0
            for of_x, of_weights in ((True, True), (False, True), (True, False)):
                weights_TK = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(rank))
                routing = Routing(some_ids(TOKENS, TOP_K, EXPERTS, rank), weights_TK.requires_grad_(of_weights))
                results = []
                for built in (fixed, counted):
                    leaf = x_TD.clone().requires_grad_(of_x)
                    y_TD = built(leaf, routing)
                    wanted = [leaf] * of_x + [weights_TK] * of_weights + [built.experts.w13, built.experts.w2]
                    results.append([y_TD, *torch.autograd.grad(y_TD, wanted, drawn(*y_TD.shape, dtype=y_TD.dtype))])
                assert all(map(torch.equal, *results))
            assert calls[0] == 3
            fixed(x_TD, mask=torch.arange(TOKENS) > 3)
            with torch.autocast("cpu", torch.bfloat16):
                fixed(x_TD)
            assert calls[0] == 5

            def no_memory(*_: Any) -> Any:
                raise MemoryError("no memory for the casts")

            built = build(dist.group.WORLD, 50, heap_bytes=1 << 21)  # it cannot be used after an error
            if rank:
                patch.setattr(built.experts, "mlp_for", no_memory)
            with pytest.raises(MemoryError if rank else PeerError, match="no memory for the casts"):
                built(x_TD, routing)
            built = build(dist.group.WORLD, 2)
            with pytest.raises(PeerError, match=r"has no room for its rows.*capacity_rows"):
                built(x_TD)
    finally:
        native.TRITON_DEVICES.discard("cpu")


@on_ranks(2)
def test_a_swapped_model_is_one_native_call_each_way_with_the_bits_of_all_to_all(rank: int) -> None:
    pytest.importorskip("transformers")
    from moe_comm.integrations.hugging_face import swap_moe
    from tests.integrations.models import new_model, randomise

    driver = PythonDriver()
    peers = PeerToPeerOptions(emulate=True, capacity_rows=64, heap_bytes=1 << 20)
    with emulated(driver):
        models = []
        for backend, options in (("all_to_all", None), ("peer_to_peer", DispatchOptions(peer_to_peer=peers))):
            model = new_model("gpt_oss", num_hidden_layers=1, hidden_size=16, head_dim=4, intermediate_size=16)
            randomise(model, 0)
            models.append(swap_moe(model.bfloat16(), dist.group.WORLD, backend=backend, options=options))
        for seed in range(3):
            ids = torch.randint(3, 60, (2, 4 + rank), generator=torch.Generator().manual_seed(10 * seed + rank))
            results = []
            for model in models:
                driver.launches.clear()
                driver.named.clear()
                model.zero_grad()
                logits = model(ids).logits
                logits.backward(drawn(*logits.shape, dtype=logits.dtype, seed=3))
                results.append([logits, *(p.grad for p in model.parameters())])
            assert all(map(torch.equal, *results)) and len(results[0]) == len(results[1])
        names = [driver.names[launch.kernel] for launch in driver.launches]
        assert names == FORWARD[2:] + WITH_BIASES[:-2], names
        assert driver.named.count("cuCtxGetCurrent") == 2
