"""The lower bound of the times, named "limit" in results: bare copies of the same bytes by all ranks at once.

The copies are written in C++ with non-temporal stores.

Dispatch copies row t of x to K addresses in the memory of the owner ranks. Combine reads K rows from the memory of the
owners and writes their weighted sum. The addresses are computed in advance and all pages are touched. There is no
exchange of counts, no handshake and no waiting. The difference to this time is the overhead of a dispatcher.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common.inputs import RankInputs, check_result, expected_rows, make_ids
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.runtime.memory import address, warm_rows
from moe_comm.topology import ExpertPlacement

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype codes of the native core."""
PAGE = 4096


class SharedSegments:
    """One shared memory block per rank, mapped by all ranks, without a name in the file system. Collective."""

    def __init__(self, num_bytes: int) -> None:
        size = max(PAGE, -(-num_bytes // PAGE) * PAGE)
        own_fd = os.memfd_create("moe_comm_limit", os.MFD_CLOEXEC)
        self._maps = []
        try:
            os.posix_fallocate(own_fd, 0, size)
            peers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(peers, (os.getpid(), own_fd, size))
            for pid, fd, peer_size in peers:
                peer = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                try:
                    self._maps.append(mmap.mmap(peer, peer_size))
                finally:
                    os.close(peer)
            dist.barrier()
        finally:
            os.close(own_fd)
        for block in self._maps:
            with contextlib.suppress(OSError):
                block.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = [np.frombuffer(block, np.uint8) for block in self._maps]
        for view in self.bytes:
            view[::PAGE] = 0  # map every page into this process
        dist.barrier()

    def address(self, rank: int) -> int:
        """Return the address of ``rank``'s block in this process."""
        return int(self.bytes[rank].ctypes.data)

    def tensor(self, rank: int, rows: int, like: Tensor) -> Tensor:
        """Return a view of ``rank``'s block, [rows, D] with the D and dtype of ``like``."""
        num_bytes = rows * like.shape[1] * like.element_size()
        return torch.from_numpy(self.bytes[rank][:num_bytes]).view(like.dtype).view(rows, like.shape[1])


def slot_destinations(settings: DispatchBench, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return owner rank [T*K] and row index at the owner [T*K] of each slot, and the number of rows of each rank.

    A slot is one of the K expert choices of a token. Rows at an owner are ordered by (expert, source rank, slot).
    """
    placement = ExpertPlacement.balanced(settings.experts, settings.ranks)
    ids = [make_ids(settings, source).reshape(-1) for source in range(settings.ranks)]
    counts_WE = torch.stack([torch.bincount(flat, minlength=settings.experts) for flat in ids])
    owner_E = torch.repeat_interleave(
        torch.arange(settings.ranks, device="cpu"),
        torch.tensor(placement.experts_per_rank, dtype=torch.int64, device="cpu"),
    )
    total_E = counts_WE.sum(0)
    rows_W = torch.zeros(settings.ranks, dtype=torch.int64, device="cpu").index_add_(0, owner_E, total_E)
    first_E = total_E.cumsum(0) - total_E - (rows_W.cumsum(0) - rows_W)[owner_E]
    local_ids = ids[rank]
    order = local_ids.argsort(stable=True)
    within = torch.empty_like(local_ids)
    local_E = counts_WE[rank]
    within[order] = torch.arange(len(local_ids), device="cpu") - (local_E.cumsum(0) - local_E)[local_ids[order]]
    row = first_E[local_ids] + counts_WE[:rank].sum(0)[local_ids] + within
    return owner_E[local_ids], row, rows_W.tolist()


class BareCopies:
    """Contestant that only copies and sums rows. The constructor is collective."""

    name = "limit"
    MAX_TOP_K = 64
    """Maximum of the native core's bare weighted sum."""

    def __init__(self, native: Any, settings: DispatchBench, rank: int, inputs: RankInputs, threads: int) -> None:
        self.native, self.settings, self.rank, self.inputs, self.threads = native, settings, rank, inputs, threads
        owner, row, rows_W = slot_destinations(settings, rank)
        self.rows = rows_W[rank]
        self.row_bytes = inputs.x_TD.shape[1] * inputs.x_TD.element_size()
        self.received = SharedSegments(self.rows * self.row_bytes)
        self.outputs = SharedSegments(self.rows * self.row_bytes)
        self.token = torch.arange(settings.tokens, device="cpu").repeat_interleave(settings.top_k)
        self.received_addresses = self._addresses(self.received, owner, row)
        self.output_addresses = self._addresses(self.outputs, owner, row)
        self.weights_TK = inputs.weights_TK.float().contiguous()
        # Huge pages, as for the results of a dispatcher.
        self.y_TD = warm_rows(settings.tokens, settings.hidden, inputs.x_TD.dtype, inputs.x_TD.device).zero_()

    def _addresses(self, segments: SharedSegments, owner: Tensor, row: Tensor) -> Tensor:
        base = torch.tensor(
            [segments.address(peer) for peer in range(self.settings.ranks)], dtype=torch.int64, device="cpu"
        )
        return (base[owner] + row * self.row_bytes).contiguous()

    def dispatch(self) -> None:
        """Copy each routed row to its destination."""
        self.native.bare_gather(
            address(self.inputs.x_TD, self.inputs.x_TD.dtype),
            address(self.token, torch.int64),
            address(self.received_addresses, torch.int64),
            len(self.token),
            self.row_bytes,
            self.threads,
        )

    def combine(self) -> None:
        """Compute the weighted sum of each token."""
        self.native.bare_weighted_sum(
            address(self.y_TD, self.inputs.x_TD.dtype),
            address(self.output_addresses, torch.int64),
            address(self.weights_TK, torch.float32),
            self.settings.tokens,
            self.settings.top_k,
            self.settings.hidden,
            DTYPE_CODES[self.inputs.x_TD.dtype],
            self.threads,
        )

    def experts(self) -> None:
        """Write the rows that ``combine`` reads, so that the caches have the same state as for other contestants."""
        rows_RD = self.received.tensor(self.rank, self.rows, self.inputs.x_TD)
        torch.mul(rows_RD, 1.0, out=self.outputs.tensor(self.rank, self.rows, self.inputs.x_TD))

    def steps(self) -> list[tuple[str | None, Callable[[], None]]]:
        """Return the phases of one iteration."""
        return [("dispatch", self.dispatch), (None, self.experts), ("combine", self.combine)]

    def check(self) -> dict[str, float]:
        """Compare with plain torch, and fill the rows that ``combine`` reads. Collective."""
        expected_RD = expected_rows(self.settings, self.rank)
        self.outputs.tensor(self.rank, self.rows, expected_RD).copy_(expected_RD)
        self.dispatch()
        dist.barrier()
        check_result(
            self.name, "dispatch", self.received.tensor(self.rank, self.rows, expected_RD), expected_RD, bits=True
        )
        self.combine()
        weighted_TD = self.inputs.x_TD.float() * self.weights_TK.sum(1, keepdim=True)
        error = check_result(self.name, "combine", self.y_TD, weighted_TD.to(self.y_TD.dtype), bits=False)
        return {"combine": error}
