"""The limit: moving the same bytes with nothing around it, by every rank at once, in C++ with non-temporal stores.

Dispatch: row t of x goes to K addresses in the owners' memory. Combine: K rows are read from the owners' memory
and their weighted sum is written. Addresses are worked out beforehand and all pages are touched; there are no
counts, no handshake and no waiting. What a dispatcher takes above this is its own doing.
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

from moe_comm.bench.common.case import Case, expected_rows, make_ids, require
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.runtime.memory import warm_rows
from moe_comm.topology import ExpertPlacement

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of the native core."""
PAGE = 4096


class SharedSegments:
    """One block of shared memory per rank, each mapped by all; no name is left in the file system. Collective."""

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` of this rank's own block; may differ between ranks."""
        size = max(PAGE, -(-num_bytes // PAGE) * PAGE)
        own = os.memfd_create("moe_comm_limit", os.MFD_CLOEXEC)
        self._maps = []
        try:
            os.posix_fallocate(own, 0, size)
            peers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(peers, (os.getpid(), own, size))
            for pid, fd, peer_size in peers:
                peer = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                try:
                    self._maps.append(mmap.mmap(peer, peer_size))
                finally:
                    os.close(peer)
            dist.barrier()
        finally:
            os.close(own)
        for block in self._maps:
            with contextlib.suppress(OSError):
                block.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = [np.frombuffer(block, np.uint8) for block in self._maps]
        for view in self.bytes:
            view[::PAGE] = 0  # a page is mapped into each process at its first write
        dist.barrier()

    def address(self, rank: int) -> int:
        """Where ``rank``'s block begins, in this process."""
        return int(self.bytes[rank].ctypes.data)

    def tensor(self, rank: int, rows: int, like: Tensor) -> Tensor:
        """[rows, D] view of ``rank``'s block."""
        num_bytes = rows * like.shape[1] * like.element_size()
        return torch.from_numpy(self.bytes[rank][:num_bytes]).view(like.dtype).view(rows, like.shape[1])


def places(settings: DispatchBench, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Where this rank's slots go: owner [T*K], row at the owner [T*K], and every rank's number of rows."""
    placement = ExpertPlacement.balanced(settings.experts, settings.ranks)
    ids = [make_ids(settings, source).reshape(-1) for source in range(settings.ranks)]
    counts_WE = torch.stack([torch.bincount(flat, minlength=settings.experts) for flat in ids])
    owner_E = torch.repeat_interleave(torch.arange(settings.ranks), torch.tensor(placement.experts_per_rank))
    total_E = counts_WE.sum(0)
    rows_W = torch.zeros(settings.ranks, dtype=torch.int64).index_add_(0, owner_E, total_E)
    first_E = total_E.cumsum(0) - total_E - (rows_W.cumsum(0) - rows_W)[owner_E]
    mine = ids[rank]
    order = mine.argsort(stable=True)
    within = torch.empty_like(mine)
    own_E = counts_WE[rank]
    within[order] = torch.arange(len(mine)) - (own_E.cumsum(0) - own_E)[mine[order]]
    row = first_E[mine] + counts_WE[:rank].sum(0)[mine] + within
    return owner_E[mine], row, rows_W.tolist()


class Limit:
    """The bare copies. Collective to make."""

    name = "limit"
    MAX_TOP_K = 64
    """Of the native core's bare weighted sum."""

    def __init__(self, native: Any, settings: DispatchBench, rank: int, case: Case, threads: int) -> None:
        self.native, self.settings, self.rank, self.case, self.threads = native, settings, rank, case, threads
        owner, row, rows_W = places(settings, rank)
        self.rows = rows_W[rank]
        self.row_bytes = case.x_TD.shape[1] * case.x_TD.element_size()
        self.arrivals = SharedSegments(self.rows * self.row_bytes)
        self.results = SharedSegments(self.rows * self.row_bytes)
        self.token = torch.arange(settings.tokens).repeat_interleave(settings.top_k)
        self.to = self._addresses(self.arrivals, owner, row)
        self.of = self._addresses(self.results, owner, row)
        self.weights_TK = case.weights_TK.float().contiguous()
        # Huge pages where ours gets them.
        self.y_TD = warm_rows(settings.tokens, settings.hidden, case.x_TD.dtype, case.x_TD.device).zero_()

    def _addresses(self, segments: SharedSegments, owner: Tensor, row: Tensor) -> Tensor:
        base = torch.tensor([segments.address(peer) for peer in range(self.settings.ranks)])
        return (base[owner] + row * self.row_bytes).contiguous()

    def dispatch(self) -> None:
        """Every routed row to its place."""
        self.native.bare_gather(
            self.case.x_TD.data_ptr(),
            self.token.data_ptr(),
            self.to.data_ptr(),
            len(self.token),
            self.row_bytes,
            self.threads,
        )

    def combine(self) -> None:
        """Every token's weighted sum."""
        self.native.bare_weighted_sum(
            self.y_TD.data_ptr(),
            self.of.data_ptr(),
            self.weights_TK.data_ptr(),
            self.settings.tokens,
            self.settings.top_k,
            self.settings.hidden,
            DTYPE_CODES[self.case.x_TD.dtype],
            self.threads,
        )

    def experts(self) -> None:
        """Write the rows that ``combine`` reads, as the other contestants do: they leave the same caches behind."""
        arrived_RD = self.arrivals.tensor(self.rank, self.rows, self.case.x_TD)
        torch.mul(arrived_RD, 1.0, out=self.results.tensor(self.rank, self.rows, self.case.x_TD))

    def steps(self) -> list[tuple[str | None, Callable[[], None]]]:
        """(phase, work) of one iteration."""
        return [("dispatch", self.dispatch), (None, self.experts), ("combine", self.combine)]

    def check(self) -> dict[str, float]:
        """Compare with plain torch; also fills the rows that ``combine`` reads, so it comes first. Collective."""
        want_RD = expected_rows(self.settings, self.rank)
        self.results.tensor(self.rank, self.rows, want_RD).copy_(want_RD)
        self.dispatch()
        dist.barrier()
        require(self.name, "dispatch", self.arrivals.tensor(self.rank, self.rows, want_RD), want_RD, bits=True)
        self.combine()
        weighted_TD = self.case.x_TD.float() * self.weights_TK.sum(1, keepdim=True)
        error = require(self.name, "combine", self.y_TD, weighted_TD.to(self.y_TD.dtype), bits=False)
        return {"combine": error}
