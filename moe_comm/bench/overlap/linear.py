"""``gather_matmul`` and ``matmul_scatter`` as ``bench overlap`` measures them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.overlap.case import Contest, gradients, stepwise
from moe_comm.comm.meeting import channel_of
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.kernels.wide import added_in_order
from moe_comm.overlap.chunked import RANK_BY_RANK, exact_mm
from moe_comm.overlap.gather_matmul import gather_matmul
from moe_comm.overlap.matmul_scatter import matmul_scatter


class _Linear(Contest):
    """rows: of each rank. The collectives are plain ones over the link, for all rows at once."""

    @property
    def exact(self) -> int:
        # With many rows the operator adds up a product for each rank, and serial takes one over all rows.
        return 2 if self.bench.deterministic and self.rows < RANK_BY_RANK else 1

    def gather(self, part: Tensor) -> Tensor:
        """[W * S, D] the rows of all ranks."""
        return self.channel.all_gather(part, "a gather").flatten(0, 1)

    def scatter(self, parts: Tensor) -> Tensor:
        """[S, D] this rank's rows of the sum over ranks."""
        return added_in_order(self.exchange(parts))

    def exchange(self, parts: Tensor) -> Tensor:
        """[W, S, D] what all ranks have for this one."""
        world, ones = self.bench.world, [1] * self.bench.world
        return self.channel.all_to_all(parts.unflatten(0, (world, -1)), ones, ones, "a sum")

    def prepare(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.channel, self.group = channel_of(group), group


class GatherMatmul(_Linear):
    operator = "gather_matmul"

    @classmethod
    def products_per_transfer(cls, direction: str) -> float:
        return 1  # backward has two of each

    def prepare(self) -> None:
        super().prepare()
        world, width, overlap = self.bench.world, self.bench.width, self.bench.overlap
        x, w = self.draw(self.rows, width).requires_grad_(), self.draw(self.other, width).requires_grad_()
        xd, wd, whole = x.detach(), w.detach(), self.draw(self.rows * world, width)
        if self.direction == "forward":
            self.compute = lambda: row_invariant_mm(whole, wd.t())
            self.comm = self.wire = lambda: self.gather(xd)
            self.serial = lambda: row_invariant_mm(self.gather(xd), wd.t())
            self.overlapped = lambda: gather_matmul(xd, wd, self.group, overlap)
            return
        grad = self.draw(self.rows * world, self.other)
        y = gather_matmul(x, w, self.group, overlap)
        self.compute = lambda: (row_invariant_mm(grad, wd), exact_mm(grad.t(), whole))
        self.comm = lambda: (self.gather(xd), self.scatter(whole))
        self.wire = lambda: (self.gather(xd), self.exchange(whole))

        def steps(grad: Tensor) -> tuple[Tensor, Tensor]:
            return self.scatter(row_invariant_mm(grad, wd)), exact_mm(grad.t(), self.gather(xd))

        one_by_one = stepwise(y, steps, x, w)
        self.serial = lambda: gradients(one_by_one, grad, (x, w))
        self.overlapped = lambda: gradients(y, grad, (x, w))


class MatmulScatter(_Linear):
    operator = "matmul_scatter"

    @classmethod
    def products_per_transfer(cls, direction: str) -> float:
        return 1 if direction == "forward" else 2

    def prepare(self) -> None:
        super().prepare()
        world, width, overlap = self.bench.world, self.bench.width, self.bench.overlap
        rows = self.rows * world
        x, w = self.draw(rows, self.other).requires_grad_(), self.draw(width, self.other).requires_grad_()
        xd, wd, whole = x.detach(), w.detach(), self.draw(rows, width)
        if self.direction == "forward":
            self.compute = lambda: row_invariant_mm(xd, wd.t())
            self.comm = lambda: self.scatter(whole)
            self.wire = lambda: self.exchange(whole)
            self.serial = lambda: self.scatter(row_invariant_mm(xd, wd.t()))
            self.overlapped = lambda: matmul_scatter(xd, wd, self.group, overlap)
            return
        grad = self.draw(self.rows, width)
        y = matmul_scatter(x, w, self.group, overlap)

        def steps(grad: Tensor) -> tuple[Tensor, Tensor]:
            everyone = self.gather(grad)
            return row_invariant_mm(everyone, wd), exact_mm(everyone.t(), xd)

        self.compute = lambda: (row_invariant_mm(whole, wd), exact_mm(whole.t(), xd))
        self.comm = self.wire = lambda: self.gather(grad)
        one_by_one = stepwise(y, steps, x, w)
        self.serial = lambda: gradients(one_by_one, grad, (x, w))
        self.overlapped = lambda: gradients(y, grad, (x, w))
