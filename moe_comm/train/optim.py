"""Optimizers on sharded parameters, and learning rate schedules.

AdamW (arXiv 1711.05101) and SGD are torch's, without communication.

LAMB (arXiv 1904.00962, algorithm 2; MegaScale uses it to train with a four times larger batch, arXiv 2402.15627):

    update = m^ / (sqrt(v^) + eps) + decay * w             as in AdamW
    w     -= lr * |w| / |update| * update                  norms of the full parameter; the ratio is 1 if a norm is 0

Each rank computes the squared norms of its shards. One all-reduce over the pipeline stage sums them for all parameters.
Each expert in a stacked parameter has its own norms and ratio.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) orthogonalizes the momentum of matrices. That requires
the full matrix, but the momentum is sharded like the parameter. The owners of a parameter are the ranks over which
ZeRO-1 or FSDP shards it:

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
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.parallel.collectives import gather_values, sum_values
from moe_comm.runtime.event_layout import Kind as SpanKind
from moe_comm.runtime.events import communication_span
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.bucket_schedule import Transfer
from moe_comm.train.parallel.compress import buckets
from moe_comm.train.parallel.norm import squared_norm
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.sections import OptimizerOptions

__all__ = [
    "LAMB",
    "SGD",
    "AdamW",
    "Muon",
    "Optimizer",
    "OptimizerOptions",
    "learning_rate",
    "make_optimizer",
    "newton_schulz",
]


class Optimizer(ABC):
    """Update the owned shards from their ``grad``, after ``DataParallel.reduce`` and ``clip_``.

    The state of a parameter is a dict of tensors with the shape and sharding of ``OwnedParameter.value``, allocated by
    the constructor. The only other state is ``steps``, the number of completed steps.

    Attributes:
        in_flight: transfers that write the state. ``step`` and ``state_tensors`` wait for them and raise their errors.
    """

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        self.owned, self.mesh, self.options = list(owned), mesh, options
        self.steps = 0
        self.in_flight: list[Transfer] = []
        self._state: dict[str, dict[str, Tensor]] = {item.name: {} for item in self.owned}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all values. Collective for LAMB and Muon: every rank of the stage calls it."""
        self.wait_state()
        self.steps += 1
        self._step(lr)

    @abstractmethod
    def _step(self, lr: float) -> None: ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """State by parameter name and state name: the live tensors, into which a checkpoint may load."""
        self.wait_state()
        return {name: dict(state) for name, state in self._state.items()}

    def wait_state(self) -> None:
        """Wait for the transfers in flight."""
        while self.in_flight:
            with communication_span(SpanKind.COLLECTIVE, "wait for the state of moved experts"):
                self.in_flight.pop(0).wait()

    def load_steps(self, steps: int) -> None:
        """Set the number of completed steps, after loading the state."""
        self.steps = steps

    def _make_state(self, owned: Sequence[OwnedParameter], *names: str) -> None:
        for item in owned:
            for name in names:
                self._state[item.name][name] = torch.zeros_like(item.value, requires_grad=False)

    def _decay(self, item: OwnedParameter) -> float:
        return self.options.weight_decay if is_matrix(item) else 0.0


def is_stack(item: OwnedParameter) -> bool:
    """Return whether the parameter is a stack over experts in its first dimension. All expert parameters are."""
    return item.sharding.expert and bool(item.sharding.shape)


def stacked(item: OwnedParameter, mesh: ParallelMesh) -> list[tuple[slice, slice]]:
    """Return pairs of row ranges of a stack's value and the corresponding global experts."""
    ranges = {box.local[0].start: (box.local[0], box.full[0]) for box in item.boxes(mesh)}
    return list(ranges.values())


def is_matrix(item: OwnedParameter) -> bool:
    """Return whether the parameter is a matrix, or a stack with one matrix per expert."""
    return len(item.sharding.shape) - is_stack(item) >= 2 and "norm" not in item.name


def gradient(item: OwnedParameter) -> Tensor:
    """Return the reduced gradient. Raises ``InputError`` if ``DataParallel.reduce`` was not called."""
    if item.value.grad is None:
        raise InputError(f"{item.name} has no gradient; call DataParallel.reduce before the optimizer's step")
    return item.value.grad


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0, in a run of ``steps`` steps. After the last it is constant.

    The first warm-up step has lr / warmup, the last one lr.
    """
    o = options
    if step < 0:
        raise ConfigError(f"steps count from 0; got {step}")
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    if o.schedule == "constant":
        return o.lr
    begin = o.warmup
    if o.schedule == "wsd":
        begin = max(begin, steps - o.decay) - 1  # the step before the first decay step
        if o.decay == 0:
            return o.lr
    progress = min(max(step - begin, 0) / max(steps - 1 - begin, 1), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if o.schedule == "cosine" else 1 - progress
    return o.lr * (o.final_lr + (1 - o.final_lr) * remaining)


class _TorchOptimizer(Optimizer):
    """A torch optimizer with preallocated, named state."""

    _torch: torch.optim.Optimizer | None

    def _groups(self, owned: Sequence[OwnedParameter]) -> list[dict[str, Any]]:
        """Return the parameter groups with and without weight decay, without empty parameters."""
        nonempty = [item for item in owned if item.value.numel()]
        groups = [
            {"params": [item.value for item in nonempty if self._decay(item) == decay], "weight_decay": decay}
            for decay in dict.fromkeys((self.options.weight_decay, 0.0))
        ]
        return [group for group in groups if group["params"]]

    def _step(self, lr: float) -> None:
        for item in self.owned:
            gradient(item)
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._torch.step()


class AdamW(_TorchOptimizer):
    """AdamW, fused on CPU and CUDA. State: ``exp_avg``, ``exp_avg_sq``."""

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        self._make_state(self.owned, "exp_avg", "exp_avg_sq")
        self._counts: list[Tensor] = []
        self._torch = None
        groups = self._groups(self.owned)
        if not groups:
            return
        fused = all(item.value.device.type in ("cpu", "cuda") for item in self.owned)
        self._torch = torch.optim.AdamW(
            groups, lr=0.0, betas=options.betas, eps=options.eps, fused=fused, foreach=None if fused else True
        )
        for item in self.owned:
            if item.value.numel():
                count = torch.zeros((), dtype=torch.float32, device=item.value.device if fused else "cpu")
                self._counts.append(count)
                self._torch.state[item.value] = {"step": count, **self._state[item.name]}

    def load_steps(self, steps: int) -> None:
        super().load_steps(steps)
        for count in self._counts:
            count.fill_(steps)


class SGD(_TorchOptimizer):
    """SGD. With momentum, the state is ``momentum_buffer``."""

    def __init__(self, owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> None:
        super().__init__(owned, mesh, options)
        groups = self._groups(self.owned)
        self._torch = None
        if groups:
            self._torch = torch.optim.SGD(groups, lr=0.0, momentum=options.momentum_of_kind, foreach=True)
        if options.momentum_of_kind:
            self._make_state(self.owned, "momentum_buffer")
            for item in self.owned:
                if self._torch is not None and item.value.numel():
                    # With a zero buffer the first step sets it to the gradient, as torch does.
                    self._torch.state[item.value] = dict(self._state[item.name])


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


_KINDS: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD, "lamb": LAMB, "muon": Muon}


def make_optimizer(owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> Optimizer:
    """Return an optimizer of the shards ``DataParallel.owned()``. ``options`` must be equal on all ranks."""
    return _KINDS[options.kind](owned, mesh, options)
