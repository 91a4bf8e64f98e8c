"""Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/): orthogonalized momentum for matrices.

Orthogonalization requires the full matrix, but the momentum is sharded like the parameter. The owners of a parameter
are the ranks over which ZeRO-1 or FSDP shards it:

    dense [R, C]          sharded over tp and owners           gather over both, then take the local shard
    experts [E, R, C]     sharded over ep and etp; experts     gather over etp only: all other shards of the experts
                          divided among owners                 are local
      fewer experts than  sharded over ep and etp; matrices    gather over etp and owners
      owners              divided among owners
    gate | up             one fused parameter                  orthogonalize as two separate matrices

So the update of a matrix does not depend on its sharding. AdamW updates embeddings, output layer, router, norms and
vectors, as in the original.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.topology import ParallelMesh
from moe_comm.train.optim.base import Optimizer, gradient, is_matrix, is_stack
from moe_comm.train.optim.elementwise import AdamW
from moe_comm.train.parallel.compress import buckets
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.sections import OptimizerOptions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients of the quintic iteration, chosen for fast convergence of singular values to about 1."""
NEWTON_SCHULZ_STEPS = 5
EXCLUDED = ("*embed*", "*head.*", "*norm*", "*router*")
"""Name patterns of matrices that AdamW updates."""
_BUCKET_BYTES = 64 << 20


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest. State: ``momentum_buffer``, or ``exp_avg`` and ``exp_avg_sq``."""

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        self.matrices = [item for item in self.owned if takes(item)]
        matrices = set(self.matrices)
        self._make_state(self.matrices, "momentum_buffer")
        self._adamw = AdamW([item for item in self.owned if item not in matrices], mesh, options)
        self._state.update(self._adamw.state_tensors())

    def load_steps(self, steps: int) -> None:
        super().load_steps(steps)
        self._adamw.load_steps(steps)

    def _step(self, lr: float) -> None:
        self._adamw.step(lr)
        families: dict[tuple[str, ...], list[OwnedParameter]] = {}
        for item in self.matrices:
            families.setdefault(self._gather_axes(item), []).append(item)
        for axes, family in families.items():
            # Gather the full matrices of only a few parameters at a time.
            for bucket in buckets([math.prod(item.sharding.shape) * 4 for item in family], _BUCKET_BYTES):
                self._update([family[i] for i in bucket], axes, lr)

    def _update(self, items: Sequence[OwnedParameter], axes: tuple[str, ...], lr: float) -> None:
        directions = [self._direction(item) for item in items]
        for item, full in zip(items, self._gather(directions, items, axes), strict=True):
            update = self._orthogonal(full, item)
            local_update = torch.empty_like(item.value)
            for local, place in _boxes(item, self.mesh, None):
                local_update[local] = update[place]
            item.value.mul_(1 - lr * self._decay(item)).sub_(local_update, alpha=lr)

    def _direction(self, item: OwnedParameter) -> Tensor:
        momentum, grad = self.options.momentum_of_kind, gradient(item)
        average = self._state[item.name]["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum)  # Nesterov

    @staticmethod
    def _gather_axes(item: OwnedParameter) -> tuple[str, ...]:
        """Return the mesh axes over which a matrix is sharded, in the order of group names."""
        if is_stack(item):
            owners = item.owner_axes if item.shard is not None and item.shard.dim > 0 else ()
            return (*(split.axis for split in item.sharding.splits if split.dim > 0), *owners)
        return tuple(axis for axis in ("tp", "cp", "dp") if axis in item.sharded_axes)

    def _gather(self, shards: Sequence[Tensor], items: Sequence[OwnedParameter], axes: tuple[str, ...]) -> list[Tensor]:
        """Gather each parameter; of a stack, only the experts that this rank owns."""
        group = self.mesh.group(*axes)
        if group is None:
            return list(shards)
        ranks = self.mesh.ranks(*axes)
        shapes = [[item.shape_of(self.mesh, rank) for item in items] for rank in ranks]
        longest = max(sum(math.prod(shape) for shape in rank_shapes) for rank_shapes in shapes)
        flat = torch.cat([shard.reshape(-1) for shard in shards])
        gathered = gather_values(F.pad(flat, (0, longest - flat.numel())), group, "matrices for Muon")
        results = [
            shard.new_empty((shard.shape[0], *item.sharding.shape[1:]) if is_stack(item) else item.sharding.shape)
            for shard, item in zip(shards, items, strict=True)
        ]
        for rank, rank_shapes, values in zip(ranks, shapes, gathered, strict=True):
            rank_shards = values[: sum(map(math.prod, rank_shapes))].split([math.prod(shape) for shape in rank_shapes])
            for item, shape, shard, full in zip(items, rank_shapes, rank_shards, results, strict=True):
                for local, place in _boxes(item, self.mesh, rank):
                    full[place] = shard.view(shape)[local]
        return results

    def _orthogonal(self, full: Tensor, item: OwnedParameter) -> Tensor:
        """Return the scaled update of each matrix in ``full``; fused matrices are split."""
        stack = full if full.dim() > 2 else full.unsqueeze(0)
        rows, columns = (_segments(item, dim) for dim in (-2, -1))
        updates = [
            self._scaled(matrices)
            for band in stack.chunk(rows, dim=-2)
            for matrices in (band.chunk(columns, dim=-1) if columns > 1 else (band,))
        ]
        return torch.cat(updates, dim=-1 if columns > 1 else -2).view(full.shape)

    def _scaled(self, matrices_ERC: Tensor) -> Tensor:
        rows, columns = matrices_ERC.shape[-2:]
        # Updates of the same magnitude as AdamW's, for the same learning rate (arXiv 2502.16982).
        scale = 0.2 * math.sqrt(max(rows, columns))
        dtype = torch.bfloat16 if matrices_ERC.is_cuda else torch.float32
        updates = [
            newton_schulz(matrices_ERC[bucket], NEWTON_SCHULZ_STEPS, dtype).to(matrices_ERC.dtype)
            for bucket in buckets([rows * columns * 4] * len(matrices_ERC), _BUCKET_BYTES)
        ]
        return torch.cat([*updates, matrices_ERC[:0]]).mul_(scale)


def takes(item: OwnedParameter) -> bool:
    """Return whether Muon updates the parameter; AdamW updates the others."""
    return is_matrix(item) and not any(fnmatchcase(item.name, pattern) for pattern in EXCLUDED)


def newton_schulz(matrices_ERC: Tensor, steps: int = NEWTON_SCHULZ_STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthogonalize E matrices [E, R, C] approximately: all singular values become about 1 (0.7 to 1.2).

    The quintic iteration X <- aX + (bA + cA^2)X with A = XX^T starts from X of Frobenius norm 1.

    Args:
        matrices_ERC: [E, R, C] matrices.
        steps: number of iterations.
        dtype: dtype of the iterations and of the result.
    """
    a, b, c = COEFFICIENTS
    x = matrices_ERC.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _segments(item: OwnedParameter, dim: int) -> int:
    """Return the number of fused matrices along a dimension (counted from the end)."""
    at = len(item.sharding.shape) + dim
    return max((split.segments for split in item.sharding.splits if split.dim == at), default=1)


def _boxes(
    item: OwnedParameter, mesh: ParallelMesh, rank: int | None
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return pairs of positions in the shard of ``rank`` (None: this rank) and in the result of ``_gather``."""
    stack = is_stack(item)
    return [(b.local, (b.local[0], *b.full[1:]) if stack else b.full) for b in item.boxes(mesh, rank)]
