"""LAMB (arXiv 1904.00962, algorithm 2). MegaScale uses it to train with a four times larger batch (arXiv 2402.15627).

    update = m^ / (sqrt(v^) + eps) + decay * w             as in AdamW
    w     -= lr * |w| / |update| * update                  norms of the full parameter; the ratio is 1 if a norm is 0

Parameters are sharded by tensor or expert parallelism, and additionally by the sharding of the optimizer state. Each
rank computes the squared norms of its shards. One all-reduce over the pipeline stage sums them for all parameters.
Each expert in a stacked parameter has its own norms and ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.layers.parallel.collectives import sum_values
from moe_comm.topology import ParallelMesh
from moe_comm.train.optim.base import Optimizer, gradient, is_stack, stacked
from moe_comm.train.parallel.norm import squared_norm
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.sections import OptimizerOptions


class LAMB(Optimizer):
    """LAMB. State: ``exp_avg``, ``exp_avg_sq``."""

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        self._make_state(self.owned, "exp_avg", "exp_avg_sq")
        self._norm_indices: list[slice] = []  # of each parameter: one norm, or one per expert
        end = 0
        for item in self.owned:
            begin, end = end, end + (item.sharding.shape[0] if is_stack(item) else 1)
            self._norm_indices.append(slice(begin, end))
        self._size = end

    def _step(self, lr: float) -> None:
        updates = [self._update(item) for item in self.owned]
        ratios = self._ratios(updates)
        for item, update, ratio in zip(self.owned, updates, ratios, strict=True):
            item.value.sub_(update.mul_(ratio.to(update.dtype)), alpha=lr)

    def _update(self, item: OwnedParameter) -> Tensor:
        beta1, beta2 = self.options.betas
        state, grad = self._state[item.name], gradient(item)
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**self.steps)).sqrt_().add_(self.options.eps)
        update = (mean / (1 - beta1**self.steps)).div_(root)
        return update.add_(item.value, alpha=self._decay(item))

    def _ratios(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """Return |w| / |update| for each parameter: a scalar, or one per expert, broadcastable to the parameter."""
        device = updates[0].device if updates else torch.device(self.mesh.device)
        squares = torch.zeros(2, self._size, dtype=torch.float64, device=device)
        for item, update, indices in zip(self.owned, updates, self._norm_indices, strict=True):
            if item.counts_once(self.mesh):
                for row, values in zip(squares[:, indices], (item.value, update), strict=True):
                    if is_stack(item):
                        for local, experts in stacked(item, self.mesh):
                            row[experts] += _squares(values[local])
                    else:
                        row[0] += squared_norm(values)
        norms = sum_values(squares, self.mesh.group("tp", "cp", "dp")).sqrt_()
        ratio = torch.where((norms > 0).all(0), norms[0] / norms[1], torch.ones_like(norms[0]))
        items = zip(self.owned, self._norm_indices, strict=True)
        return [self._spread(item, ratio[indices]) for item, indices in items]

    def _spread(self, item: OwnedParameter, ratio: Tensor) -> Tensor:
        if not is_stack(item):
            return ratio[0]
        if not item.value.numel():
            return ratio.new_ones(())
        ratios = [ratio[experts] for _, experts in stacked(item, self.mesh)]
        return torch.cat(ratios).view(-1, *[1] * (item.value.dim() - 1))


def _squares(values_ER: Tensor) -> Tensor:
    """Return the squared norm of each expert, [E] float64."""
    norms: Tensor = torch.linalg.vector_norm(values_ER.flatten(1), dim=1, dtype=torch.float64)
    return norms.square()
