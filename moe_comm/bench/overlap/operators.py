"""The four operators of ``bench overlap``.

The serial form of the expert operators uses dispatch or combine of the same dispatcher, and its backward, before or
after the GEMMs of all experts. ``comm`` therefore includes the gathers around a transfer. In backward, the GEMMs are an
autograd node between those of the dispatcher, as in a layer without the operator. The GEMMs write into warm memory as
the operators do, because page faults would take longer than the GEMMs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.bench.overlap.contest import OperatorContest, Work, gradients, stepwise
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.kernels.autograd import sum_in_rank_order
from moe_comm.kernels.cpu_gemm import ExpertWeights, weight_gradients
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import PER_RANK_ROWS, exact_mm
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.runtime.memory import warm_like, warm_rows
from moe_comm.topology import ExpertPlacement


@lru_cache(maxsize=1)
def dispatcher_of(group: ProcessGroup, num_experts: int) -> AllToAllDispatcher:
    """Return the all-to-all dispatcher, which uses the link. The first call is collective."""
    placement = ExpertPlacement.of(num_experts, dist.get_world_size(group))
    return AllToAllDispatcher(placement, group, dist.get_rank(group))


def balanced_ids(tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Return distinct random expert ids of each token with balanced experts, [T, K].

    Tokens form blocks of E. In slot k of a block, each expert is selected once, by an offset that is drawn for the
    block and the slot. Only the last block may be unbalanced.
    """
    base_T = torch.arange(tokens, device="cpu") % num_experts
    blocks = -(-tokens // num_experts)
    offset_BK = torch.stack(
        [torch.randperm(num_experts, generator=generator, device="cpu")[:top_k] for _ in range(blocks)]
    )
    offset_TK = offset_BK.repeat_interleave(num_experts, 0)[:tokens]
    ids_TK = (base_T[:, None] + offset_TK) % num_experts
    return ids_TK[torch.randperm(tokens, generator=generator, device="cpu")]


def products(rows_RD: Tensor, sizes: tuple[int, ...], b_EDG: Tensor) -> Tensor:
    """Return ``rows @ b[e]`` for the rows of each expert, [R, G]."""
    out_RG = warm_rows(rows_RD.shape[0], b_EDG.shape[2], rows_RD.dtype, rows_RD.device)
    ExpertWeights(b_EDG.transpose(1, 2)).multiply(rows_RD, out_RG, sizes)
    return out_RG


def weight_products(grad_RG: Tensor, rows_RD: Tensor, sizes: tuple[int, ...], like_EGD: Tensor) -> Tensor:
    """Return ``grad.T @ rows`` for the rows of each expert, [E, G, D]."""
    grad_EGD = warm_like(like_EGD)
    weight_gradients(grad_RG, rows_RD, grad_EGD, sizes)
    return grad_EGD


class _ExpertContest(OperatorContest):
    """``rows`` are the tokens per rank."""

    @classmethod
    def gemms_per_transfer(cls, direction: str) -> float:
        return 1 if direction == "forward" else 2

    def prepare(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        bench = self.bench
        self.dispatcher = dispatcher_of(group, bench.num_experts)
        self.experts = len(self.dispatcher.local_experts)
        self.ids_TK = balanced_ids(self.rows, bench.num_experts, bench.top_k, self._generator)

    def transfer(self, handle: DispatchHandle, dispatch: bool) -> Work:
        """Return the transfer of the rows of a dispatch or of a combine, without gathers and sums."""
        routes: Routes = handle.state
        send, receive = (routes.send, routes.receive) if dispatch else (routes.receive, routes.send)
        rows = self.draw(sum(send), self.bench.width)
        return lambda: self.dispatcher.channel.all_to_all(rows, send, receive, "rows")


class DispatchMatmulContest(_ExpertContest):
    operator = "dispatch_matmul"

    def prepare(self) -> None:
        super().prepare()
        dispatcher, ids, overlap, width = self.dispatcher, self.ids_TK, self.bench.overlap, self.bench.width
        x, w = self.draw(self.rows, width).requires_grad_(), self.draw(self.experts, self.other, width).requires_grad_()
        xd, wd = x.detach(), w.detach()
        dispatched = dispatcher.dispatch(x, ids)
        rows, sizes = dispatched.rows_RD.detach(), dispatched.handle.rows_per_expert
        self.wire = self.transfer(dispatched.handle, dispatch=self.direction == "forward")
        if self.direction == "forward":

            def serial() -> Tensor:
                received = dispatcher.dispatch(xd, ids)
                return products(received.rows_RD, received.handle.rows_per_expert, wd.transpose(1, 2))

            self.compute = lambda: products(rows, sizes, wd.transpose(1, 2))
            self.comm = lambda: dispatcher.dispatch(xd, ids).rows_RD
            self.serial = serial
            self.overlapped = lambda: dispatch_matmul(dispatcher, xd, ids, wd, overlap)[0]
            return
        grad = self.draw(rows.shape[0], self.other)
        h, _ = dispatch_matmul(dispatcher, x, ids, w, overlap)

        def steps(grad: Tensor) -> tuple[Tensor, Tensor]:
            return products(grad, sizes, wd), weight_products(grad, rows, sizes, wd)

        serial_y = stepwise(h, steps, dispatched.rows_RD, w)
        self.compute = lambda: steps(grad)
        self.comm = lambda: gradients(dispatched.rows_RD, rows, (x,))
        self.serial = lambda: gradients(serial_y, grad, (x, w))
        self.overlapped = lambda: gradients(h, grad, (x, w))


class MatmulCombineContest(_ExpertContest):
    operator = "matmul_combine"

    def prepare(self) -> None:
        super().prepare()
        dispatcher, overlap, width = self.dispatcher, self.bench.overlap, self.bench.width
        # Dispatch with the operator: its handle has the number of chunks that is chosen for GEMMs of this width.
        zero_weight_EGD = torch.zeros(self.experts, self.other, width, dtype=torch.float32, device="cpu")
        _, dispatch = dispatch_matmul(
            dispatcher,
            torch.zeros(self.rows, width, dtype=torch.float32, device="cpu"),
            self.ids_TK,
            zero_weight_EGD,
            overlap,
        )
        handle, sizes = dispatch.handle, dispatch.handle.rows_per_expert
        self.wire = self.transfer(handle, dispatch=self.direction == "backward")
        rows = self.draw(handle.num_rows, self.other).requires_grad_()
        w = self.draw(self.experts, width, self.other).requires_grad_()
        weights = torch.rand(
            self.rows, self.bench.top_k, generator=self._generator, dtype=torch.float32, device="cpu"
        ).requires_grad_()
        rowsd, wd, weightsd = rows.detach(), w.detach(), weights.detach()
        if self.direction == "forward":
            outputs = self.draw(handle.num_rows, width)
            self.compute = lambda: products(rowsd, sizes, wd.transpose(1, 2))
            self.comm = lambda: dispatcher.combine(outputs, weightsd, handle)
            self.serial = lambda: dispatcher.combine(products(rowsd, sizes, wd.transpose(1, 2)), weightsd, handle)
            self.overlapped = lambda: matmul_combine(rowsd, wd, weightsd, dispatch)
            return
        grad = self.draw(self.rows, width)
        y = matmul_combine(rows, w, weights, dispatch)
        results = products(rowsd, sizes, wd.transpose(1, 2)).requires_grad_()
        combined = dispatcher.combine(results, weights, handle)

        def steps(grad: Tensor) -> tuple[Tensor, Tensor]:
            grad_w = weight_products(grad, rowsd, sizes, wd)
            return products(grad, sizes, wd), grad_w

        serial_y = dispatcher.combine(stepwise(results, steps, rows, w), weights, handle)
        grad_rows = results.detach()
        self.compute = lambda: steps(grad_rows)
        self.comm = lambda: gradients(combined, grad, (results, weights))
        self.serial = lambda: gradients(serial_y, grad, (rows, w, weights))
        self.overlapped = lambda: gradients(y, grad, (rows, w, weights))


class _LinearContest(OperatorContest):
    """Base class. The serial implementation transfers all rows in one collective, without chunks."""

    @property
    def num_exact(self) -> int:
        # From PER_RANK_ROWS rows on, the operator sums one weight-gradient GEMM per rank. The serial implementation
        # always uses one GEMM, so the bits differ.
        return 2 if self.bench.deterministic and self.rows < PER_RANK_ROWS else 1

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather the rows of all ranks, [W * S, D]."""
        return self.channel.all_gather(rows, "a gather").flatten(0, 1)

    def scatter(self, rows: Tensor) -> Tensor:
        """Reduce-scatter [W * S, D] rows to [S, D]."""
        return sum_in_rank_order(self.exchange(rows))

    def exchange(self, rows: Tensor) -> Tensor:
        """All-to-all of [W * S, D] rows. Return [W, S, D]: the rows that each rank sent to this rank."""
        return self.channel.swap(rows.unflatten(0, (self.bench.world, -1)), "a sum")

    def prepare(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.channel, self.group = channel_of(group), group


class GatherMatmulContest(_LinearContest):
    operator = "gather_matmul"

    @classmethod
    def gemms_per_transfer(cls, direction: str) -> float:
        return 1  # forward: one GEMM and one transfer; backward: two GEMMs and two transfers

    def prepare(self) -> None:
        super().prepare()
        world, width, overlap = self.bench.world, self.bench.width, self.bench.overlap
        x, w = self.draw(self.rows, width).requires_grad_(), self.draw(self.other, width).requires_grad_()
        xd, wd, gathered_rows = x.detach(), w.detach(), self.draw(self.rows * world, width)
        if self.direction == "forward":
            self.compute = lambda: row_invariant_mm(gathered_rows, wd.t())
            self.comm = self.wire = lambda: self.gather(xd)
            self.serial = lambda: row_invariant_mm(self.gather(xd), wd.t())
            self.overlapped = lambda: gather_matmul(xd, wd, self.group, overlap)
            return
        grad = self.draw(self.rows * world, self.other)
        y = gather_matmul(x, w, self.group, overlap)
        self.compute = lambda: (row_invariant_mm(grad, wd), exact_mm(grad.t(), gathered_rows))
        self.comm = lambda: (self.gather(xd), self.scatter(gathered_rows))
        self.wire = lambda: (self.gather(xd), self.exchange(gathered_rows))

        def steps(grad: Tensor) -> tuple[Tensor, Tensor]:
            return self.scatter(row_invariant_mm(grad, wd)), exact_mm(grad.t(), self.gather(xd))

        serial_y = stepwise(y, steps, x, w)
        self.serial = lambda: gradients(serial_y, grad, (x, w))
        self.overlapped = lambda: gradients(y, grad, (x, w))


class MatmulScatterContest(_LinearContest):
    operator = "matmul_scatter"

    @classmethod
    def gemms_per_transfer(cls, direction: str) -> float:
        return 1 if direction == "forward" else 2

    def prepare(self) -> None:
        super().prepare()
        world, width, overlap = self.bench.world, self.bench.width, self.bench.overlap
        rows = self.rows * world
        x, w = self.draw(rows, self.other).requires_grad_(), self.draw(width, self.other).requires_grad_()
        xd, wd, gathered_rows = x.detach(), w.detach(), self.draw(rows, width)
        if self.direction == "forward":
            self.compute = lambda: row_invariant_mm(xd, wd.t())
            self.comm = lambda: self.scatter(gathered_rows)
            self.wire = lambda: self.exchange(gathered_rows)
            self.serial = lambda: self.scatter(row_invariant_mm(xd, wd.t()))
            self.overlapped = lambda: matmul_scatter(xd, wd, self.group, overlap)
            return
        grad = self.draw(self.rows, width)
        y = matmul_scatter(x, w, self.group, overlap)

        def steps(grad: Tensor) -> tuple[Tensor, Tensor]:
            gathered = self.gather(grad)
            return row_invariant_mm(gathered, wd), exact_mm(gathered.t(), xd)

        self.compute = lambda: (row_invariant_mm(gathered_rows, wd), exact_mm(gathered_rows.t(), xd))
        self.comm = self.wire = lambda: self.gather(grad)
        serial_y = stepwise(y, steps, x, w)
        self.serial = lambda: gradients(serial_y, grad, (x, w))
        self.overlapped = lambda: gradients(y, grad, (x, w))
