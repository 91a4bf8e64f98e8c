"""The global gradient norm, clipping, and comparisons of the weights that several ranks hold.

Several ranks can store the same element: a norm weight is replicated over tp x cp x dp of its stage, an expert weight
over edp. Exactly one of these ranks counts the element, so one sum over all ranks gives the norm. (Megatron-LM issue
6470: a dense and an expert scalar with gradient 1 on TP 2, EP 2, ETP 1 have norm sqrt(3): the dense scalar counts once,
and each of the two ranks has a different expert. Selecting experts by the dense tensor-parallel rank loses one.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import RankMismatch
from moe_comm.layers.data_parallel.equal_tensors import compare_tensors
from moe_comm.layers.data_parallel.replicas import replicated_tensors
from moe_comm.layers.parallel.collectives import channel_of, sum_values
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.ranks import Ranks

_ROW = 4096
_UNIT = 1074
"""The smallest float64 is 2**-_UNIT."""
_DIGIT, _DIGITS = 32, (_UNIT + 1024) // 32 + 2


def squared_norm(values: Tensor) -> Tensor:
    """Return the squared norm as a float64 scalar.

    Rows of 4096 elements are summed in fp32 and the row sums in float64, which is nearly as exact as float64 and as
    fast as fp32.
    """
    return squared_norms(values.detach().reshape(1, -1))[0]


def squared_norms(stack_EN: Tensor) -> Tensor:
    """Return the squared norm of each row as [E] float64. Its bits do not depend on the other rows."""
    end = stack_EN.shape[1] // _ROW * _ROW
    rows = torch.linalg.vector_norm(stack_EN[:, :end].unflatten(1, (-1, _ROW)), dim=2)
    squares: Tensor = rows.double().square().sum(1) + stack_EN[:, end:].double().square().sum(1)
    return squares


def global_norm(owned: Iterable[OwnedParameter], mesh: ParallelMesh) -> float:
    """Return the 2-norm of the gradients of the whole model on all ranks. Collective: one all-reduce of 552 bytes.

    Call it after ``DataParallel.reduce``. A missing ``grad`` counts as zero. The norm is NaN or infinite if a gradient
    is.
    """
    squares = []
    for item in owned:
        grad = item.value.grad
        if item.counted and grad is not None and grad.numel() and item.counts_once(mesh):
            rows = grad.shape[0] if item.sharding.expert and grad.dim() else 1
            squares.append(squared_norms(grad.detach().reshape(rows, -1)))
    values = torch.cat(squares).tolist() if squares else []
    return math.sqrt(_exact_sum(values, mesh.world_group))


def _exact_sum(values: Sequence[float], group: ProcessGroup | None) -> float:
    """Return the sum of the positive float64 ``values`` of all ranks, rounded once. Collective.

    The result does not depend on the order of the values or on their distribution over ranks. Each rank adds its values
    as integers in units of the smallest float64. The ranks then add 32-bit digits, which float64 holds exactly.
    """
    finite = [value for value in values if math.isfinite(value)]
    total = sum(numerator << _UNIT >> (denominator.bit_length() - 1) for numerator, denominator in map(_ratio, finite))
    digits = [float(total >> _DIGIT * i & (1 << _DIGIT) - 1) for i in range(_DIGITS)]
    infinite = sum(map(math.isinf, values))
    local = torch.tensor([*digits, infinite, len(values) - len(finite) - infinite], dtype=torch.float64, device="cpu")
    *digits, infinite, nan = sum_values(local, group).tolist()
    if nan or infinite:
        return math.nan if nan else math.inf
    total = sum(int(digit) << _DIGIT * i for i, digit in enumerate(digits))
    return total / (1 << _UNIT) if total.bit_length() < _UNIT + 1024 else math.inf


def _ratio(value: float) -> tuple[int, int]:
    return value.as_integer_ratio()


@torch.no_grad()
def clip_(owned: Sequence[OwnedParameter], max_norm: float, mesh: ParallelMesh) -> float:
    """Scale all gradients so that the global norm is at most ``max_norm`` (0: no limit). Collective.

    Returns:
        The norm before scaling, the same on all ranks. Gradients of a non-finite norm are not scaled.
    """
    norm = global_norm(owned, mesh)
    if 0 < max_norm < norm < math.inf:
        grads = [item.value.grad for item in owned if item.value.grad is not None and item.value.numel()]
        if grads:
            torch._foreach_mul_(grads, max_norm / norm)
    return norm


ADVICE = (
    "The ranks of this run started with other weights (model.pretrained with different files), or an update was wrong "
    "on a rank: check the memory of these ranks, and resume from a checkpoint"
)


def check_equal_weights(
    owned: Sequence[OwnedParameter], stages: Sequence[nn.Module], mesh: ParallelMesh, ranks: Ranks
) -> None:
    """Compare the master weights that several ranks own, and the persistent buffers of a stage. Collective.

    Each rank reads its master weights once. Weights that are sharded over all data-parallel ranks have no replicas.
    """
    by_axes: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for item in owned:
        if item.replicas == 1:
            weights = item.weights if item.offloaded else None
            by_axes.setdefault(item.replicated_axes, {})[item.name] = item.value if weights is None else weights
    for stage in stages:
        params = {id(param) for param in stage.parameters()}
        buffers = {name: value for name, value in replicated_tensors(stage) if id(value) not in params}
        by_axes.setdefault(("tp", "cp", "dp"), {}).update(buffers)
    fault: RankMismatch | None = None
    for axes, tensors in sorted(by_axes.items()):
        group = mesh.group(*axes) if tensors and axes else None
        if group is None:
            continue
        try:
            compare_tensors(tensors, channel_of(group), f"the weights over {' x '.join(axes)}", ADVICE)
        except RankMismatch as error:  # compare the other groups too: their ranks do not know of this difference
            fault = fault or error
    failed = torch.zeros(ranks.world, dtype=torch.float32, device="cpu")
    failed[ranks.rank] = fault is not None
    failed = ranks.sum(failed)
    if fault is not None:
        raise fault
    if failed.any():
        raise RankMismatch(f"weights differ between the ranks {failed.nonzero().flatten().tolist()}. {ADVICE}")
