"""Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/): momentum, made orthogonal matrix by matrix.

A matrix must be whole to be made orthogonal, but its momentum lies where its parameter does:

    dense [R, C]         cut by tp, dealt to owners          gathered over both; each rank takes its own part again
    experts [E, R, C]    cut by ep, etp; experts to owners   gathered over etp only: a rank has its experts' rest
      fewer than owners  cut by ep, etp; matrices to owners  gathered over etp and the owners
    gate | up            one fused parameter                 two matrices, as if they had been kept apart

So the update of a matrix does not depend on how it is spread. Embeddings, output layer, router, norms and vectors are
AdamW's, as in the original.
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
from moe_comm.train.optim.base import Optimizer, OptimizerOptions, gradient, is_matrix, is_stack
from moe_comm.train.optim.elementwise import AdamW
from moe_comm.train.parallel.compress import buckets
from moe_comm.train.parallel.owned import Owned

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose iteration brings every singular value to about 1 the fastest; Keller Jordan's."""
_TOGETHER_BYTES = 64 << 20


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest. State: ``momentum_buffer``, or ``exp_avg`` and ``exp_avg_sq``."""

    def __init__(self, owned: Sequence[Owned], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        self.matrices = [item for item in self.owned if self._takes(item)]
        taken = set(self.matrices)
        self._make_state(self.matrices, "momentum_buffer")
        self._rest = AdamW([item for item in self.owned if item not in taken], mesh, options)
        self._state.update(self._rest.state_tensors())

    def load_steps(self, steps: int) -> None:
        super().load_steps(steps)
        self._rest.load_steps(steps)

    def _takes(self, item: Owned) -> bool:
        return is_matrix(item) and not any(fnmatchcase(item.name, name) for name in self.options.muon_excludes)

    def _step(self, lr: float) -> None:
        self._rest.step(lr)
        families: dict[tuple[str, ...], list[Owned]] = {}
        for item in self.matrices:
            families.setdefault(self._gather_axes(item), []).append(item)
        for axes, family in families.items():
            # Whole matrices exist for a few parameters at a time only.
            for some in buckets([math.prod(item.sharding.shape) * 4 for item in family], _TOGETHER_BYTES):
                self._update([family[i] for i in some], axes, lr)

    def _update(self, items: Sequence[Owned], axes: tuple[str, ...], lr: float) -> None:
        for item, whole in zip(items, self._whole([self._direction(item) for item in items], items, axes), strict=True):
            update = self._orthogonal(whole, item)
            own = torch.empty_like(item.value)
            for box in _boxes(item, self.mesh, None):
                own[box[0]] = update[box[1]]
            item.value.mul_(1 - lr * self._decay(item)).sub_(own, alpha=lr)

    def _direction(self, item: Owned) -> Tensor:
        momentum, grad = self.options.momentum, gradient(item)
        average = self._state[item.name]["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum) if self.options.nesterov else average

    @staticmethod
    def _gather_axes(item: Owned) -> tuple[str, ...]:
        """Mesh axes over which a matrix is spread, in the order of a group's name."""
        if is_stack(item):
            owners = item.owner_axes if item.share is not None and item.share.dim > 0 else ()
            return (*(split.axis for split in item.sharding.splits if split.dim > 0), *owners)
        return tuple(axis for axis in ("tp", "cp", "dp") if axis in item.spread_axes)

    def _whole(self, parts: Sequence[Tensor], items: Sequence[Owned], axes: tuple[str, ...]) -> list[Tensor]:
        """Each parameter whole from its ``parts``; of a stack, the experts that this rank owns."""
        group = self.mesh.group(*axes)
        if group is None:
            return list(parts)
        ranks = self.mesh.ranks(*axes)
        shapes = [[item.shape_of(self.mesh, rank) for item in items] for rank in ranks]
        longest = max(sum(math.prod(shape) for shape in of_rank) for of_rank in shapes)
        flat = torch.cat([part.reshape(-1) for part in parts])
        gathered = gather_values(F.pad(flat, (0, longest - flat.numel())), group, "matrices for Muon")
        wholes = [
            part.new_empty((part.shape[0], *item.sharding.shape[1:]) if is_stack(item) else item.sharding.shape)
            for part, item in zip(parts, items, strict=True)
        ]
        for rank, of_rank, values in zip(ranks, shapes, gathered, strict=True):
            pieces = values[: sum(map(math.prod, of_rank))].split([math.prod(shape) for shape in of_rank])
            for item, shape, piece, whole in zip(items, of_rank, pieces, wholes, strict=True):
                for local, place in _boxes(item, self.mesh, rank):
                    whole[place] = piece.view(shape)[local]
        return wholes

    def _orthogonal(self, whole: Tensor, item: Owned) -> Tensor:
        """The scaled update of each matrix in ``whole``, fused ones by themselves."""
        stack = whole if whole.dim() > 2 else whole.unsqueeze(0)
        rows, columns = (_segments(item, dim) for dim in (-2, -1))
        pieces = [
            self._scaled(piece)
            for band in stack.chunk(rows, dim=-2)
            for piece in (band.chunk(columns, dim=-1) if columns > 1 else (band,))
        ]
        return torch.cat(pieces, dim=-1 if columns > 1 else -2).view(whole.shape)

    def _scaled(self, matrices_ERC: Tensor) -> Tensor:
        rows, columns = matrices_ERC.shape[-2:]
        if self.options.muon_scale == "match_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        else:
            scale = math.sqrt(max(1.0, rows / columns))
        dtype = self.options.newton_schulz_dtype
        if dtype is None:
            dtype = torch.bfloat16 if matrices_ERC.is_cuda else torch.float32
        done = [
            newton_schulz(matrices_ERC[some], self.options.newton_schulz_steps, dtype).to(matrices_ERC.dtype)
            for some in buckets([rows * columns * 4] * len(matrices_ERC), _TOGETHER_BYTES)
        ]
        return torch.cat([*done, matrices_ERC[:0]]).mul_(scale)


def newton_schulz(matrices_ERC: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Each of E matrices with its singular values brought to about 1 (0.7 to 1.2), in ``dtype``. [E, R, C].

    A quintic iteration X <- aX + (bA + cA^2)X with A = XX^T, from X of Frobenius norm 1.
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


def _segments(item: Owned, dim: int) -> int:
    """Equal parts of a dimension (from the end) that are matrices of their own."""
    at = len(item.sharding.shape) + dim
    return max((split.segments for split in item.sharding.splits if split.dim == at), default=1)


def _boxes(item: Owned, mesh: ParallelMesh, rank: int | None) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Places in what ``rank`` (None: this one) owns and in ``_whole``, which has of a stack the owned experts only."""
    stack = is_stack(item)
    return [(b.local, (b.local[0], *b.whole[1:]) if stack else b.whole) for b in item.boxes(mesh, rank)]
