"""``gather_matmul`` and ``matmul_scatter`` in ``bench overlap``."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.overlap.contest import OperatorContest, gradients, stepwise
from moe_comm.comm.group_setup import channel_of
from moe_comm.kernels.autograd import sum_in_rank_order
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import PER_RANK_ROWS, exact_mm
from moe_comm.overlap.gather_matmul import gather_matmul
from moe_comm.overlap.matmul_scatter import matmul_scatter


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
