"""Batch shapes, the dispatchers that are compared, and checks of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.gpu.timing import Timer, random
from moe_comm.comm.registered import RegisteredMemory
from moe_comm.dispatch import DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.dispatch.wire_dtype import bytes_per_row
from moe_comm.gpu.heap import heap_bytes
from moe_comm.topology import ExpertPlacement

ERROR_BOUND, FP8_ERROR_BOUND = 2e-2, 8e-2
"""Largest allowed error of y relative to its largest element, for rows in bfloat16 and for rows sent in e4m3."""
TIMEOUT_S = 10.0
"""Timeout of ``peer_to_peer``. It is far below the limit of a part, so that an error names the call that hangs."""


@dataclass(frozen=True)
class Case:
    """A batch shape (tokens T, hidden D, experts E, top-k K) and the timer of its measurements."""

    timer: Timer
    tokens: int
    hidden: int
    experts: int
    top_k: int

    @property
    def device(self) -> str:
        return self.timer.device

    @property
    def world(self) -> int:
        return self.timer.world

    @property
    def group(self) -> ProcessGroup | None:
        """The group of all ranks, or None for one rank."""
        return dist.group.WORLD if self.world > 1 else None

    @property
    def row_bytes(self) -> int:
        """Bytes of a bfloat16 row."""
        return 2 * self.hidden

    def moved_bytes(self, wire_dtype: str = "same") -> int:
        """Return the bytes that a dispatch reads and writes; with ``same`` also those of a combine."""
        sent = bytes_per_row(self.hidden, wire_dtypes(wire_dtype).of("dispatch"), torch.bfloat16)
        return self.tokens * self.row_bytes + self.tokens * self.top_k * sent

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, K distinct experts per token, and weights. They are generated on the device."""
        x_TD = random(self.device, self.tokens, self.hidden, seed=self.tokens)
        maker = torch.Generator(self.device).manual_seed(self.tokens)
        scores_TE = torch.rand(self.tokens, self.experts, generator=maker, device=self.device)
        weights_TK = torch.rand(self.tokens, self.top_k, generator=maker, device=self.device)
        return x_TD, scores_TE.topk(self.top_k).indices, weights_TK

    def describe(self) -> dict[str, Any]:
        """Return the values that identify the case in a result."""
        return {name: getattr(self, name) for name in ("tokens", "hidden", "experts", "top_k", "world")}


def wire_dtypes(dispatch: str) -> WireDtypes:
    """Return wire dtypes with ``dispatch`` as that of the dispatch."""
    return WireDtypes(dispatch=dispatch)  # type: ignore[arg-type]


class TorchContestant:
    """Dispatch by a sort and ``index_select``, combine by ``index_select`` and a weighted sum in fp32."""

    wire_dtype = "same"

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Return the rows by expert, and their order."""
        order = ids_TK.flatten().argsort(stable=True)
        return x_TD.index_select(0, order // ids_TK.shape[1]), order

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, order: Any) -> Tensor:
        """Return the weighted sums, [T, D]."""
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        slots_TKD = rows_RD.index_select(0, inverse).view(*weights_TK.shape, rows_RD.shape[1])
        return (slots_TKD.float() * weights_TK.unsqueeze(2)).sum(1).to(rows_RD.dtype)


class NcclContestant(TorchContestant):
    """``TorchContestant`` with an ``all_to_all_single`` in each direction, for one rank.

    The receive buffers are registered with NCCL where torch and NCCL support it, which saves NCCL's staging copies.
    """

    def __init__(self, case: Case) -> None:
        backend = "nccl" if case.device == "cuda" else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.registered, shape = False, (case.tokens * case.top_k, case.hidden)
        self._memory: RegisteredMemory | None = None
        if case.device == "cuda":
            try:
                dist.barrier()  # creates the communicator
                group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
                self._memory = RegisteredMemory(group, device)  # type: ignore[arg-type]
                with self._memory.allocating():
                    self.buffers = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
                self.registered = True
            except (AttributeError, RuntimeError, TypeError) as error:
                print(f"NCCL buffers are not registered: {error}", flush=True)
        if not self.registered:
            self.buffers = [torch.empty(shape, dtype=torch.bfloat16, device=case.device) for _ in range(2)]

    def close(self) -> None:
        """Destroy the process group, so that the process does not wait for NCCL when it exits."""
        self.buffers.clear()
        if self._memory is not None:
            self._memory.close()
        dist.destroy_process_group()

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        rows_RD, order = super().dispatch(x_TD, ids_TK)
        dist.all_to_all_single(self.buffers[0], rows_RD)
        return self.buffers[0], order

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, order: Any) -> Tensor:
        dist.all_to_all_single(self.buffers[1], rows_RD)
        return super().combine(self.buffers[1], weights_TK, order)


class DispatcherContestant:
    """A dispatcher of this library."""

    def __init__(self, dispatcher: Any, wire_dtype: str = "same") -> None:
        self.dispatcher, self.wire_dtype = dispatcher, wire_dtype

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Any]:
        """Return the rows by expert, and the dispatch handle."""
        sent = self.dispatcher.dispatch(x_TD, ids_TK)
        return sent.rows_RD, sent.handle

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, handle: Any) -> Tensor:
        """Return the weighted sums, [T, D]."""
        return self.dispatcher.combine(rows_RD, weights_TK, handle)  # type: ignore[no-any-return]


Contestant = TorchContestant | DispatcherContestant


def peer_to_peer(
    case: Case, wire_dtype: str = "same", heap: int = 0, *, fixed: bool = False, checked: bool = True, **settings: Any
) -> PeerToPeerDispatcher:
    """Return a peer-to-peer dispatcher with a heap for ``case``, or of ``heap`` bytes.

    With ``fixed``, ``dispatch_fixed`` has a capacity for the rows of all ranks. settings: other ``PeerToPeerOptions``.
    """
    rows = case.tokens * case.top_k * (case.world if fixed else 1)
    options = DispatchOptions(
        wire_dtypes=wire_dtypes(wire_dtype),
        timeout_s=TIMEOUT_S,
        checked=checked,
        peer_to_peer=PeerToPeerOptions(
            heap_bytes=heap or heap_bytes(rows, case.hidden, torch.bfloat16, blocks=3) + (1 << 20),
            capacity_rows=rows if fixed else None,
            emulate=case.device == "cpu",
            **settings,
        ),
    )
    rank = dist.get_rank() if case.world > 1 else 0
    placement = ExpertPlacement.of(case.experts, case.world, None)
    return PeerToPeerDispatcher(placement, case.group, rank, options, case.device)


def bulk_copies(case: Case, blocks: int | None) -> DispatcherContestant:
    """Return a peer-to-peer dispatcher that copies rows with cp.async.bulk, on at most ``blocks`` thread blocks."""
    return DispatcherContestant(peer_to_peer(case, bulk_copies=True, num_blocks=blocks))


def dispatch_and_combine(who: Contestant, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y of a dispatch and a combine without experts."""
    rows_RD, state = who.dispatch(x_TD, ids_TK)
    return who.combine(rows_RD, weights_TK, state)


def contestants(case: Case) -> dict[str, Callable[[], Contestant]]:
    """Return the constructors of the contestants. Only one contestant exists at a time, because heaps are large."""

    def named(backend: str) -> DispatcherContestant:
        return DispatcherContestant(make_dispatcher(case.experts, case.group, backend=backend, device=case.device))

    if case.world > 1:  # over NCCL
        others: dict[str, Callable[[], Contestant]] = {
            name: partial(named, name) for name in ("all_to_all", "all_gather")
        }
    else:
        others = {"torch index_select": TorchContestant, "local": lambda: named("local")}
    return {
        "peer_to_peer": lambda: DispatcherContestant(peer_to_peer(case)),
        "peer_to_peer fp8": lambda: DispatcherContestant(peer_to_peer(case, "fp8_block"), "fp8_block"),
        **others,
    }


def reference(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a dispatch, and y in float64."""
    rows_RD, order = TorchContestant().dispatch(x_TD, ids_TK)
    return rows_RD, TorchContestant().combine(rows_RD.double(), weights_TK.double(), order)


def difference(name: str, y_TD: Tensor, exact_TD: Tensor) -> float:
    """Return the largest difference of ``y_TD`` from the reference.

    Raises:
        AssertionError: the difference exceeds ERROR_BOUND or FP8_ERROR_BOUND.
    """
    if y_TD.shape != exact_TD.shape:
        raise AssertionError(f"{name}: y has shape {tuple(y_TD.shape)}; expected {tuple(exact_TD.shape)}")
    error = float((y_TD.double() - exact_TD).abs().max())
    limit = (FP8_ERROR_BOUND if "fp8" in name else ERROR_BOUND) * float(exact_TD.abs().max())
    if not error <= limit:  # also if NaN
        raise AssertionError(
            f"{name}: y differs from the reference by {error:g} for {len(y_TD)} tokens (allowed: {limit:g})"
        )
    return error


def check(name: str, rows_RD: Tensor, y_TD: Tensor, expected: tuple[Tensor, Tensor], world: int) -> float:
    """Return the largest difference of y from the reference, which does not depend on the number of ranks.

    On one rank, the rows must be bit-identical to the reference, except for fp8.

    Raises:
        AssertionError: the rows or y differ.
    """
    if world == 1 and "fp8" not in name and not torch.equal(rows_RD, expected[0]):
        raise AssertionError(f"{name}: the rows differ from those of index_select")
    return difference(name, y_TD, expected[1])
