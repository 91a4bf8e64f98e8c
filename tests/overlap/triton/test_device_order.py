"""The order in which the device executor computes and sums rows of late ranks, and its faults."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.dispatch.types import DispatchOptions, PeerToPeerOptions
from moe_comm.errors import ConfigError, InputError, PeerRaised, PeerTimeout, RankMismatch
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.low_rank import AdaptedMLP
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.overlap.executors.choice import explain_overlap
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.tuning.device_cost import H100, DeviceRates
from moe_comm.overlap.tuning.store import TuningStore, cache_folder, save_store
from tests.layers.reference import draw
from tests.overlap.triton.common import interpreted, needs_triton
from tests.overlap.triton.device_layer import (
    DEVICE,
    EXPERTS,
    D,
    F,
    leaves_of,
    make_device_dispatcher,
    run_layer,
    slot_ids,
    triton_on_cpus,
)
from tests.pool import RankPool, on_ranks, with_longer_deadline
from tests.support.launches import HookedLauncher

pytestmark = needs_triton


TOKENS = 64
"""Tokens of each rank, with an expert on every rank: whole tiles, so that no tile waits for two ranks."""


def _store(path: Path, world: int) -> dist.FileStore:
    store = dist.FileStore(str(path), world)
    store.set_timeout(timedelta(seconds=90))
    return store


def _sends_rows(number: dict[str, int], kernel: str) -> bool:
    """Return whether ``kernel`` is launched for the first time."""
    number[kernel] = number.get(kernel, 0) + 1
    return number[kernel] == 1


def _delay_rows(rank: int, world: int, arg: tuple[str, Path]) -> None:
    """The kernel of the last rank that sends rows starts after the other ranks have computed all rows but its own."""
    sending, path = arg
    kernels, store = interpreted("arrived_mm"), _store(path, world)

    def before(kernel: str) -> None:
        if kernel == "meet":
            sources.clear()  # of the last operation
        if _sends_rows(number, kernel) and kernel == sending and rank == world - 1:
            store.wait([f"computed {other}" for other in range(world - 1)])

    number: dict[str, int] = {}
    sources: list[int] = []
    orders: list[list[int]] = []
    compute_tile, rest = kernels.compute_tile, kernels.rest

    def recorded(*args: Any) -> None:
        start, first_n = int(args[7]), int(args[10])
        if not first_n:
            sources.append(start // TOKENS)
        if len(sources) == world * tiles_of_rank and not first_n:
            orders.append([*sources])
        compute_tile(*args)

    def rest_and_check() -> None:
        waits_in = "push_tiles" if not orders else "spread_tiles"
        if rank != world - 1 and waits_in == sending and len(sources) == (world - 1) * tiles_of_rank:
            assert sorted({*sources}) == [*range(world - 1)]
            store.set(f"computed {rank}", "")
        rest()

    with triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        dispatcher = make_device_dispatcher(rank, world, world, HookedLauncher(before), timeout_s=90)
        tiles_of_rank = TOKENS // kernels.tiling_of(torch.empty(TOKENS * world, D, dtype=torch.bfloat16), 1).rows
        ids = torch.arange(world).repeat(TOKENS, 1)
        patch.setattr(kernels, "compute_tile", recorded)
        patch.setattr(kernels, "rest", rest_and_check)
        run_layer(dispatcher, ids, DEVICE)
    assert len(orders) == 2, "forward and backward"
    for order in orders:
        assert sorted(order) == sorted([*range(world)] * tiles_of_rank)
    if rank != world - 1:
        received = [source for step in range(1, world + 1) if (source := (rank + step) % world) != world - 1]
        expected = [source for source in (*received, world - 1) for _ in range(tiles_of_rank)]
        assert orders[sending == "spread_tiles"] == expected, "own rows after those of other ranks, late rows last"


@pytest.mark.parametrize("kernel", ["push_tiles", "spread_tiles"])
def test_rows_of_other_ranks_are_computed_before_late_rows(kernel: str, pool3: RankPool, tmp_path: Path) -> None:
    pool3.run(_delay_rows, (kernel, tmp_path / "store"), timeout=120)


def _delay_slice(rank: int, world: int, path: Path) -> None:
    """The last GEMM of the last rank computes its second slice after the other ranks have summed the first one."""
    kernels, store = interpreted("publish_mm"), _store(path, world)
    columns, tokens, sums, order = kernels.SLICE_COLUMNS + 8, 16, 0, []

    def before(kernel: str) -> None:
        nonlocal sums
        sums += kernel == "sum"
        if kernel == "ready" and sums == 1 and rank != world - 1:
            store.set(f"summed {rank}", "")

    compute_tile = kernels.compute_tile

    def recorded(*args: Any) -> None:
        start, first_n = int(args[7]), int(args[10])
        order.append((first_n // kernels.SLICE_COLUMNS, (rank - start // tokens) % world))
        if rank == world - 1 and first_n >= kernels.SLICE_COLUMNS:
            store.wait([f"summed {other}" for other in range(world - 1)])
        compute_tile(*args)

    with triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        dispatcher = make_device_dispatcher(rank, world, world, HookedLauncher(before), timeout_s=90)
        ids = torch.arange(world).repeat(tokens, 1)
        expected = run_layer(dispatcher, ids, None, hidden=columns)
        sums = 0
        patch.setattr(kernels, "compute_tile", recorded)
        actual = run_layer(dispatcher, ids, DEVICE, hidden=columns)
        assert all(map(torch.equal, actual, expected))
    assert sums == 5, "two slices in each direction, and the gradients of weights"
    distances = [(-own - 1) % world for _, own in order]
    forward = [*zip([part for part, _ in order], distances, strict=True)][: len(order) // 2]
    assert forward == sorted(forward), "slice by slice, own rows last"


def test_slices_are_summed_while_others_are_computed(pool3: RankPool, tmp_path: Path) -> None:
    pool3.run(_delay_slice, tmp_path / "store", timeout=120)


def _hang(rank: int, world: int, arg: tuple[str, Path, float]) -> str:
    """Rank 1 begins an operation, and sends its rows or results only after the others have raised."""
    kernel, path, timeout_s = arg
    store, publish = _store(path, world), interpreted("publish_mm")
    others, number = [f"raised {other}" for other in range(world) if other != 1], dict[str, int]()

    def before(launched: str) -> None:
        if _sends_rows(number, launched) and launched == kernel and rank == 1:
            store.wait(others)

    def late(*args: Any) -> None:
        before("publish_mm")
        multiply(*args)

    multiply = publish.publish_mm_into
    with triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "publish_mm_into", late)
        dispatcher = make_device_dispatcher(rank, world, EXPERTS, HookedLauncher(before), timeout_s)
        ids = slot_ids("random", rank, EXPERTS, 3)
        with pytest.raises(PeerTimeout) as error:
            run_layer(dispatcher, ids, DEVICE)
        store.set(f"raised {rank}", "")
        with pytest.raises(PeerTimeout):
            dispatcher.dispatch(torch.ones(1, D), torch.zeros(1, 1, dtype=torch.int64))
    return str(error.value)


@pytest.mark.parametrize(
    ("kernel", "awaited"),
    [
        ("push_tiles", "to send its rows"),
        pytest.param("spread_tiles", "to send its rows", marks=pytest.mark.slow),
        ("publish_mm", "to compute the results of its experts"),
    ],
)
def test_a_rank_that_hangs_is_named_at_the_deadline(kernel: str, awaited: str, pool3: RankPool, tmp_path: Path) -> None:
    def check(timeout_s: float) -> None:
        errors = pool3.run(_hang, (kernel, tmp_path / f"store {timeout_s}", timeout_s), timeout=120)
        for rank in (0, 2):
            assert "rank 1" in errors[rank] and awaited in errors[rank]

    with_longer_deadline(check, 2.0, 30.0)


@on_ranks(3)
def test_ranks_with_other_executors_raise(rank: int, world: int) -> None:
    with triton_on_cpus():
        dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("random", rank, EXPERTS, 3)
        with pytest.raises(RankMismatch, match="whether GEMMs overlap on the device"):
            run_layer(dispatcher, ids, None if rank == 1 else DEVICE)
        run_layer(dispatcher, ids, DEVICE)  # the group can be used again


@on_ranks(3)
def test_an_exception_before_the_experts_reaches_all_ranks(rank: int, world: int) -> None:
    from moe_comm.overlap.executors.choice import dispatch_rows

    with triton_on_cpus():
        dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("random", rank, EXPERTS, 3)
        x, weights, w13, w2 = leaves_of(rank, len(dispatcher.local_experts), ids, torch.bfloat16)
        call = dispatch_rows(dispatcher, x, ids, weights, DEVICE, width=F)
        with pytest.raises(ZeroDivisionError if rank == 1 else PeerRaised):  # noqa: PT012
            with call.abort_on_error():
                if rank == 1:
                    raise ZeroDivisionError("between")
                mlp = ExpertMLP((w13, w2, None, None), activation_of("swiglu"))
                rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
            call.combine(rows)
        call = dispatch_rows(dispatcher, x, ids, weights, DEVICE, width=F)
        adapted = AdaptedMLP((w13, w2, None, None), activation_of("swiglu"), places=())
        with pytest.raises(ConfigError, match="experts without adapters"), call.abort_on_error():
            call.compute(call.rows, call.handle.rows_per_expert, adapted)
        run_layer(dispatcher, ids, DEVICE)  # the group can be used again


@on_ranks(3)
def test_a_layer_uses_the_kernels_by_its_overlap_option(rank: int) -> None:
    with triton_on_cpus():
        options = DispatchOptions(timeout_s=60, peer_to_peer=PeerToPeerOptions(emulate=True))
        x = draw(20 + rank, D, seed=rank, dtype=torch.bfloat16)
        results = []
        for overlap in (None, DEVICE, Overlap("auto", backend="triton")):
            layer = MoELayer.build(
                MoEConfig(D, F, RouterConfig(EXPERTS, 2)),
                dist.group.WORLD,
                backend="peer_to_peer",
                options=options,
                overlap=overlap,
                seed=1,
                dtype=torch.bfloat16,
            )
            launched = _launches(layer, x)
            assert ("arrived_mm_kernel" in launched) == (overlap is not None)
            results.append([p.grad for p in layer.parameters() if p.grad is not None])
        for actual in results[1:]:
            assert len(actual) > 2 and all(map(torch.equal, actual, results[0]))


@on_ranks(3)
def test_auto_chooses_the_kernels_by_calibrated_rates(rank: int) -> None:
    """The same on all ranks, which have different numbers of tokens, and in a recomputed call."""
    slow_link = DeviceRates(132, 1e6, 1e6, 1e9, 15e6, 1.0, 3e-4)
    options = DispatchOptions(timeout_s=60, peer_to_peer=PeerToPeerOptions(emulate=True))
    xs = [draw(tokens, D, seed=rank, dtype=torch.bfloat16) for tokens in (20 + rank, 1)]
    with triton_on_cpus(), TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        for calibrated in (True, False):
            if rank == 0:
                save_store(cache_folder(), TuningStore((), {"cpu": slow_link} if calibrated else {}))
            group = dist.new_group()
            serial, chosen = (
                MoELayer.build(
                    MoEConfig(D, F, RouterConfig(EXPERTS, 2)),
                    group,
                    backend="peer_to_peer",
                    options=options,
                    overlap=overlap,
                    seed=1,
                    dtype=torch.bfloat16,
                )
                for overlap in (None, "auto")
            )
            uses_kernels = partial(_uses_kernels, chosen)
            with pytest.raises(InputError, match="hidden size"):  # on all ranks, also in the first call
                chosen(xs[0][:, rank % 2 :])
            if calibrated:
                with torch.no_grad():  # by the rows of the last call
                    assert [uses_kernels(xs[i]) for i in (0, 0, 1, 1)] == [False, True, True, False]
                assert uses_kernels(xs[0], recompute=True)
                assert uses_kernels(xs[1]), "by the rows of the first call"
                for x in xs:
                    _launches(serial, x)
                grads = [[p.grad for p in layer.parameters() if p.grad is not None] for layer in (serial, chosen)]
                assert len(grads[0]) > 2 and all(map(torch.equal, *grads))
            else:
                assert not uses_kernels(xs[1])
            shape = {"tokens": 20, "top_k": 2, "hidden": D, "ffn": F, "dtype": torch.bfloat16}
            lines = explain_overlap(chosen.dispatcher, **shape).splitlines()
            assert lines[0] == "forward:" and lines[1] == f"rates: {'given' if calibrated else H100.source}"
            assert lines[-1].startswith("choice: device" if calibrated else "choice: serial")


def _uses_kernels(layer: torch.nn.Module, x: Tensor, recompute: bool = False) -> bool:
    return "tile_list_kernel" in _launches(layer, x, recompute)


def _launches(layer: torch.nn.Module, x: Tensor, recompute: bool = False) -> set[str]:
    """Run ``layer`` forward and, with gradients, backward. Return the names of the Triton kernels that ran."""
    from triton.runtime import interpreter

    names = set()
    launch = interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", recorded)
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        if torch.is_grad_enabled():
            y.float().square().sum().backward()
    return names
