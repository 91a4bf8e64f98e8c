"""Parameters that every rank of their group holds and updates whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.compress import Wire
from moe_comm.train.parallel.owned import Held, Owned, master_dtype


def take_gradient(param: nn.Parameter) -> Tensor:
    """``param``'s gradient in the dtype of its master, zero where backward left none (experts without rows)."""
    if param.grad is None:
        return torch.zeros_like(param, dtype=master_dtype(param))
    return param.grad.to(master_dtype(param))


def clear_gradient(param: nn.Parameter) -> None:
    """Ready ``param`` for the next step's backward passes.

    A 16-bit parameter accumulates its micro-batches in fp32: autograd casts each gradient to ``grad_dtype`` and adds
    it in place. It must find zeros, not None: split backward passes assign their 16-bit gradient to an empty ``grad``.
    """
    if param.dtype == master_dtype(param):
        param.grad = None
    elif param.grad is None:
        param.grad = torch.zeros_like(param, dtype=master_dtype(param))
    else:
        param.grad.zero_()


@torch.no_grad()
def compute_in(param: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
    """Let ``param`` compute in ``dtype``, with fp32 gradients (float64 ones if it is float64).

    Returns:
        Its master weights where they are apart: in fp32, from before the cast. None: ``param`` is its own.
    """
    master = param.detach().to(master_dtype(param))
    param.data = master.to(dtype)
    param.grad_dtype = master.dtype
    return None if dtype == master.dtype else master


@dataclass(frozen=True)
class _Replica:
    held: Held
    owned: Owned
    master: bool


class Replicated:
    """Plain data parallelism: every rank of a parameter's sum group holds, sums and updates all of it."""

    def __init__(self, held: Sequence[Held], mesh: ParallelMesh, wire: Wire) -> None:
        self._wire = wire
        self._replicas: list[_Replica] = []
        self._families: list[tuple[ProcessGroup | None, list[_Replica]]] = []
        families: dict[tuple[tuple[int, ...], torch.dtype], list[_Replica]] = {}
        for item in held:
            master = compute_in(item.param, item.dtype)
            value = item.param if master is None else nn.Parameter(master)
            replica = _Replica(item, Owned(item.name, value, item.sharding), master is not None)
            self._replicas.append(replica)
            key = (mesh.ranks(*item.sharding.sum_axes), value.dtype)
            if key not in families:
                families[key] = []
                self._families.append((mesh.sum_group(item.sharding), families[key]))
            families[key].append(replica)
        self.zero_grad()

    @property
    def owned(self) -> list[Owned]:
        return [replica.owned for replica in self._replicas]

    def zero_grad(self) -> None:
        for replica in self._replicas:
            clear_gradient(replica.held.param)
            if replica.master:
                replica.owned.value.grad = None

    def reduce(self) -> None:
        for group, family in self._families:
            taken = [take_gradient(replica.held.param) for replica in family]
            for replica, grad in zip(family, self._wire.sum_all(taken, group), strict=True):
                replica.owned.value.grad = grad

    @torch.no_grad()
    def publish(self) -> None:
        for replica in self._replicas:
            if replica.master:
                replica.held.param.copy_(replica.owned.value)
