"""The 2-norm of the whole model's gradient over a folded mesh, and clipping by it.

An element may lie on many ranks: a norm's weight on all tp x cp x dp of its stage, an expert's on edp. Each is counted
once, by the one rank that stands for it, whatever family its parameter belongs to; so one sum over all ranks is all
there is to do. (Megatron-LM issue 6470: a dense and an expert scalar with gradient 1 on TP 2, EP 2, ETP 1 have norm
sqrt(3): the dense one counts once, and each of the two ranks has an expert of its own. Counting experts by the dense
family's tensor-parallel rank loses one of them.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moe_comm.layers.parallel.collectives import sum_values
from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.owned import Owned

_ROW = 4096


def squared_norm(values: Tensor) -> Tensor:
    """Float64 scalar. Long fp32 tensors are summed in rows: as exact as float64 throughout, at the speed of fp32."""
    flat = values.detach().reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return rows.double().square().sum() + flat[whole:].double().square().sum()


def global_norm(owned: Iterable[Owned], mesh: ParallelMesh) -> float:
    """The 2-norm of the gradients of the whole model, the same on every rank; NaN or infinite if one of them is.

    One all-reduce of one number over all ranks. After ``DataParallel.reduce``; a missing ``grad`` counts as zero.
    """
    items = list(owned)
    device = items[0].value.device if items else torch.device(mesh.device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for item in items:
        if item.counted and item.value.grad is not None and item.counts_once(mesh.place):
            total += squared_norm(item.value.grad)
    return math.sqrt(float(sum_values(total.view(1), mesh.world_group)))


@torch.no_grad()
def clip_(owned: Sequence[Owned], max_norm: float, mesh: ParallelMesh) -> float:
    """Scale all gradients down to global norm ``max_norm`` (0: any) if it is larger. Collective.

    Returns:
        The norm before, the same on every rank. If it is not finite nothing is scaled, and the caller decides.
    """
    norm = global_norm(owned, mesh)
    if 0 < max_norm < norm < math.inf:
        grads = [item.value.grad for item in owned if item.value.grad is not None and item.value.numel()]
        if grads:
            torch._foreach_mul_(grads, max_norm / norm)
    return norm
