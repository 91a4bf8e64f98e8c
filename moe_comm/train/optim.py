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

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.collectives import gather_values, sum_values
from moe_comm.runtime.event_layout import Kind as SpanKind
from moe_comm.runtime.events import communication_span
from moe_comm.topology import ParallelMesh
from moe_comm.train.offload.resident import Piece, ResidentState, Sweep, gradient
from moe_comm.train.offload.settings import OffloadSection
from moe_comm.train.offload.streamed import StreamedState
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

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        mesh: ParallelMesh,
        options: OptimizerOptions,
        memory: ResidentState | None = None,
    ) -> None:
        self.owned, self.mesh, self.options = list(owned), mesh, options
        self.memory = memory or ResidentState()
        self.steps = 0
        self.in_flight: list[Transfer] = []
        self._add()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all values. Collective for LAMB and Muon: every rank of the stage calls it."""
        self.wait_state()
        self.steps += 1
        self._step(lr)
        self.memory.finish()

    @abstractmethod
    def _add(self) -> None:
        """Add the state to ``memory``."""

    @abstractmethod
    def _step(self, lr: float) -> None: ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """State by parameter name and state name: the live tensors, into which a checkpoint may load.

        Those that are not in memory are NaN; see ``opened``.
        """
        self.wait_state()
        return {item.name: dict(self.memory.tensors.get(item.name, {})) for item in self.owned}

    def opened(self, name: str, field: str, tensor: Tensor, write: bool = False) -> AbstractContextManager[Tensor]:
        """Open state ``field``, or the masters, of parameter ``name``: ``tensor``, or a copy if it is not in memory.

        Args:
            write: values are only written, and stored at the end. Otherwise they are only read.
        """
        opener = self.memory.opener(name, field)
        return contextlib.nullcontext(tensor) if opener is None else opener(write)

    def wait_state(self) -> None:
        """Wait for the transfers in flight."""
        while self.in_flight:
            with communication_span(SpanKind.COLLECTIVE, "wait for the state of moved experts"):
                self.in_flight.pop(0).wait()

    def load_steps(self, steps: int) -> None:
        """Set the number of completed steps, after loading the state."""
        self.steps = steps

    def close(self) -> None:
        """Release the file, memory and threads of offloaded state. The state is lost."""
        self.memory.close()

    def _decay(self, item: OwnedParameter) -> float:
        return self.options.weight_decay if is_matrix(item) else 0.0

    def _groups(self, sweep: Sweep) -> Iterator[tuple[float, list[Piece]]]:
        """Yield the pieces with and without weight decay, without empty ones."""
        for _, pieces in sweep:
            for decay in dict.fromkeys((self.options.weight_decay, 0.0)):
                if group := [piece for piece in pieces if self._decay(piece.item) == decay and piece.value.numel()]:
                    yield decay, group


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


class AdamW(Optimizer):
    """AdamW, fused on CPU and CUDA. State: ``exp_avg``, ``exp_avg_sq``."""

    def _add(self) -> None:
        self._sweep = self.memory.add(self.owned, ("exp_avg", "exp_avg_sq"))

    def _step(self, lr: float) -> None:
        for item in self.owned:
            gradient(item)
        (beta1, beta2), fused = self.options.betas, all(x.value.device.type in ("cpu", "cuda") for x in self.owned)
        for decay, group in self._groups(self._sweep):
            device = group[0].value.device if fused else torch.device("cpu")
            counts = torch.full((len(group),), self.steps - 1, dtype=torch.float32, device=device)
            adamw(
                [piece.value for piece in group],
                [piece.grad for piece in group],
                [piece.state["exp_avg"] for piece in group],
                [piece.state["exp_avg_sq"] for piece in group],
                [],
                list(counts.unbind()),
                foreach=not fused,
                fused=fused,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=decay,
                eps=self.options.eps,
                maximize=False,
            )


class SGD(Optimizer):
    """SGD. With momentum, the state is ``momentum_buffer``."""

    def _add(self) -> None:
        self._sweep = self.memory.add(self.owned, ("momentum_buffer",) if self.options.momentum_of_kind else ())

    def _step(self, lr: float) -> None:
        for item in self.owned:
            gradient(item)
        for decay, group in self._groups(self._sweep):
            sgd(
                [piece.value for piece in group],
                [piece.grad for piece in group],
                # With a zero buffer the first step sets it to the gradient, as torch does.
                [piece.state.get("momentum_buffer") for piece in group],
                foreach=True,
                weight_decay=decay,
                momentum=self.options.momentum_of_kind,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )


class LAMB(Optimizer):
    """LAMB. State: ``exp_avg``, ``exp_avg_sq``."""

    def _add(self) -> None:
        self._sweep = self.memory.add(self.owned, ("exp_avg", "exp_avg_sq"), [[item] for item in self.owned])
        self._norm_indices: list[slice] = []  # of each parameter: one norm, or one per expert
        end = 0
        for item in self.owned:
            begin, end = end, end + (item.sharding.shape[0] if is_stack(item) else 1)
            self._norm_indices.append(slice(begin, end))
        self._size = end

    def _step(self, lr: float) -> None:
        beta1, beta2 = self.options.betas
        device = next((item.value.device for item in self.owned), torch.device(self.mesh.device))
        squares = torch.zeros(2, self._size, dtype=torch.float64, device=device)
        updates: dict[int, Tensor] = {}
        for number, (piece,) in self._sweep:
            grad = piece.grad
            piece.state["exp_avg"].lerp_(grad, 1 - beta1)
            piece.state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            update = self._update(piece)
            self._add_squares(squares[:, self._norm_indices[number]], piece, update)
            if self.memory.resident:
                updates[number] = update
        norms = sum_values(squares, self.mesh.group("tp", "cp", "dp")).sqrt_()
        ratios = torch.where((norms > 0).all(0), norms[0] / norms[1], torch.ones_like(norms[0]))
        for number, (piece,) in self._sweep:
            update = updates.pop(number) if updates else self._update(piece)
            ratio = self._spread(piece.item, ratios[self._norm_indices[number]])
            piece.value.sub_(update.mul_(ratio.to(update.dtype)), alpha=lr)

    def _update(self, piece: Piece) -> Tensor:
        beta1, beta2 = self.options.betas
        mean, square = piece.state["exp_avg"], piece.state["exp_avg_sq"]
        root = (square / (1 - beta2**self.steps)).sqrt_().add_(self.options.eps)
        update = (mean / (1 - beta1**self.steps)).div_(root)
        return update.add_(piece.value, alpha=self._decay(piece.item))

    def _add_squares(self, squares_2E: Tensor, piece: Piece, update: Tensor) -> None:
        """Add the squared norms of weights and update: one, or one of each expert."""
        item = piece.item
        if item.counts_once(self.mesh):
            for row, values in zip(squares_2E, (piece.value, update), strict=True):
                if is_stack(item):
                    for local, experts in stacked(item, self.mesh):
                        row[experts] += _squares(values[local])
                else:
                    row[0] += squared_norm(values)

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

    def _add(self) -> None:
        self.matrices = [item for item in self.owned if takes(item)]
        matrices = set(self.matrices)
        self._adamw = AdamW([item for item in self.owned if item not in matrices], self.mesh, self.options, self.memory)
        families: dict[tuple[str, ...], list[OwnedParameter]] = {}
        for item in self.matrices:
            families.setdefault(self._gather_axes(item), []).append(item)
        # Gather the full matrices of only a few parameters at a time.
        self._buckets = [
            (axes, [family[i] for i in bucket])
            for axes, family in families.items()
            for bucket in buckets([math.prod(item.sharding.shape) * 4 for item in family], self._bucket_bytes())
        ]
        self._sweep = self.memory.add(self.matrices, ("momentum_buffer",), [items for _, items in self._buckets])

    def _bucket_bytes(self) -> int:
        """Return the maximum bytes of full matrices in a bucket, the same on all ranks."""
        return _BUCKET_BYTES if self.memory.resident else 0

    def load_steps(self, steps: int) -> None:
        super().load_steps(steps)
        self._adamw.load_steps(steps)

    def _step(self, lr: float) -> None:
        self._adamw.steps = self.steps
        self._adamw._step(lr)
        for number, pieces in self._sweep:
            self._update(pieces, self._buckets[number][0], lr)

    def _update(self, pieces: Sequence[Piece], axes: tuple[str, ...], lr: float) -> None:
        # Matrices are gathered and orthogonalized on the device of the mesh; the state can be on the host.
        directions = [self._direction(piece).to(self.mesh.device) for piece in pieces]
        items = [piece.item for piece in pieces]
        for piece, full in zip(pieces, self._gather(directions, items, axes), strict=True):
            update = self._orthogonal(full, piece.item)
            local_update = torch.empty_like(piece.value)
            for local, place in _boxes(piece.item, self.mesh, None):
                local_update[local] = update[place]
            piece.value.mul_(1 - lr * self._decay(piece.item)).sub_(local_update, alpha=lr)

    def _direction(self, piece: Piece) -> Tensor:
        momentum, grad = self.options.momentum_of_kind, piece.grad
        average = piece.state["momentum_buffer"].lerp_(grad, 1 - momentum)
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


def make_optimizer(
    owned: Sequence[OwnedParameter],
    mesh: ParallelMesh,
    options: OptimizerOptions,
    offload: OffloadSection | None = None,
) -> Optimizer:
    """Return an optimizer of the shards ``DataParallel.owned()``. Collective.

    Args:
        options: equal on all ranks.
        offload: memory tier of the state and of separate masters, equal on all ranks; None: in memory.

    Raises:
        ConfigError, StoreFull, StoreIOError: the state cannot be offloaded; on every rank.
    """
    memory = ResidentState() if offload is None or offload.optimizer == "none" else StreamedState(offload, mesh)
    optimizer = _KINDS[options.kind](owned, mesh, options, memory)
    memory.start()
    return optimizer
