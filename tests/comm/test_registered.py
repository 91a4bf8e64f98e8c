"""Memory that is registered with NCCL: when it is used, and the path without it. Nothing here runs NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.comm import registered
from moe_comm.comm.registered import RegisteredMemory, registered_memory, registration_problem
from moe_comm.dispatch.hierarchical import rail
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.types import DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import MissingDependency
from moe_comm.topology import ExpertPlacement
from tests.pool import on_ranks

WITHOUT_API = type("ProcessGroupNCCL", (), {})
WITH_API = type("ProcessGroupNCCL", (), {"mem_allocator": None, "register_mem_pool": None})


@pytest.mark.parametrize(
    ("available", "version", "backend", "problem"),
    [
        (False, (2, 27, 5), WITH_API, "no NCCL"),
        (True, (2, 18, 6), WITH_API, "NCCL 2.18.6 is older than 2.19"),
        (True, (2, 27, 5), WITHOUT_API, "no mem_allocator, register_mem_pool"),
        (True, (2, 27, 5), WITH_API, ""),
    ],
)
def test_the_missing_capability_is_named(
    available: bool, version: tuple[int, ...], backend: type, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    assert problem in registration_problem() and bool(problem) == bool(registration_problem())


class Backend:
    """A fake backend of NCCL, which torch for the CPU does not have. It records calls; registration may fail."""

    mem_allocator = "allocator"

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def register_mem_pool(self, pool: Any) -> None:
        self.calls.append(f"register {pool}")
        if self.fails:
            raise RuntimeError("no memory could be registered")

    def deregister_mem_pool(self, pool: Any) -> None:
        self.calls.append(f"deregister {pool}")


class FakeCommunicator:
    """A communicator over NCCL whose group has the fake backend."""

    def __init__(self, backend: Backend) -> None:
        self.backends, self.kept = {"cuda": "nccl"}, {}
        self.group = SimpleNamespace(_get_backend=lambda device: backend)

    def keep(self, key: Any, make: Any) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what torch for the CPU lacks, and return the list of pools that allocations were made in."""
    pools: list[str] = []

    @contextmanager
    def use_mem_pool(pool: str, device: torch.device) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(registered, "registration_problem", lambda: "")
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **_: None)
    return pools


def test_a_pool_is_registered_once_per_communicator_and_deregistered_at_the_end(supported: list[str]) -> None:
    backend = Backend()
    comm: Any = FakeCommunicator(backend)
    memory = registered_memory(comm)
    assert memory is not None and registered_memory(comm) is memory
    with memory.allocating():
        assert supported[-1] == "pool of allocator"
    memory.close()
    memory.close()
    assert backend.calls == ["register pool of allocator", "deregister pool of allocator"]


def test_a_failed_registration_warns_once_and_is_not_repeated(supported: list[str]) -> None:
    backend = Backend(fails=True)
    comm: Any = FakeCommunicator(backend)
    with pytest.warns(UserWarning, match="no memory could be registered"):
        assert registered_memory(comm) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registered_memory(comm) is None
    assert len(backend.calls) == 1


def test_groups_without_nccl_or_without_the_capability_have_no_registered_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm: Any = FakeCommunicator(Backend())
    monkeypatch.setattr(registered, "registration_problem", lambda: "too old")
    assert registered_memory(comm) is None
    with pytest.raises(MissingDependency, match="too old"):
        RegisteredMemory(comm.group, torch.device("cuda", 0))
    monkeypatch.setattr(registered, "registration_problem", lambda: "")
    comm.backends = {"cpu": "gloo"}
    assert registered_memory(comm) is None


class CountingMemory:
    """Ordinary memory that counts how often allocations are made in it."""

    def __init__(self) -> None:
        self.uses = 0

    @contextmanager
    def allocating(self) -> Iterator[None]:
        self.uses += 1
        yield


@on_ranks(4)
@pytest.mark.parametrize("wire", [WireDtypes(), WireDtypes("fp8_block", "bf16")], ids=["same", "fp8"])
def test_rows_between_hosts_are_packed_and_received_in_registered_memory(
    rank: int, world: int, wire: WireDtypes
) -> None:
    """Over gloo, with the same bits. Each of 3 chunks is packed and received there, in dispatch and in combine."""
    options = DispatchOptions(wire_dtypes=wire)
    placement = ExpertPlacement.balanced(8, world)
    dispatcher = HierarchicalDispatcher(placement, dist.group.WORLD, rank, options, hosts=[0, 0, 1, 1])
    dispatcher.rail.min_chunk_bytes, dispatcher.rail.max_chunks = 64, 3
    draw = torch.Generator().manual_seed(rank)
    x_TD, ids_TK = torch.randn(20, 32, generator=draw), torch.randint(0, 8, (20, 3), generator=draw)
    weights_TK = torch.rand(20, 3, generator=draw)
    sent = dispatcher.dispatch(x_TD, ids_TK)
    y_TD = dispatcher.combine(sent.rows_RD * 2, weights_TK, sent.handle)
    memory = CountingMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rail, "registered_memory", lambda comm: memory)
        again = dispatcher.dispatch(x_TD, ids_TK)
        assert memory.uses == 6 and torch.equal(again.rows_RD, sent.rows_RD)
        assert torch.equal(dispatcher.combine(again.rows_RD * 2, weights_TK, again.handle), y_TD)
        assert memory.uses == 12
