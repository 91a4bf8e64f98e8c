"""Global gradient norm over a parallel mesh, and gradient clipping.

Several ranks can store the same element: a norm weight is replicated over tp x cp x dp of its stage, an expert weight
over edp. Exactly one of these ranks counts the element, so one sum over all ranks gives the norm. (Megatron-LM issue
6470: a dense and an expert scalar with gradient 1 on TP 2, EP 2, ETP 1 have norm sqrt(3): the dense scalar counts once,
and each of the two ranks has a different expert. Selecting experts by the dense tensor-parallel rank loses one.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moe_comm.layers.parallel.collectives import sum_values
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.parameters import OwnedParameter

_ROW = 4096


def squared_norm(values: Tensor) -> Tensor:
    """Return the squared norm as a float64 scalar.

    Rows of 4096 elements are summed in fp32 and the row sums in float64, which is nearly as exact as float64 and as
    fast as fp32.
    """
    flat = values.detach().reshape(-1)
    end = flat.numel() // _ROW * _ROW
    rows: Tensor = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1)
    return rows.double().square().sum() + flat[end:].double().square().sum()


def global_norm(owned: Iterable[OwnedParameter], mesh: ParallelMesh) -> float:
    """Return the 2-norm of the gradients of the whole model on all ranks. Collective: one all-reduce of one number.

    Call it after ``DataParallel.reduce``. A missing ``grad`` counts as zero. The norm is NaN or infinite if a gradient
    is.
    """
    items = list(owned)
    device = items[0].value.device if items else torch.device(mesh.device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for item in items:
        if item.counted and item.value.grad is not None and item.counts_once(mesh.place):
            total += squared_norm(item.value.grad)
    return math.sqrt(float(sum_values(total.view(1), mesh.world_group)))


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
