"""Plain data parallelism: replicated parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.topology import ParallelMesh
from moe_comm.train.parallel.compress import GradientReducer, buckets
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, master_dtype


def take_gradient(param: nn.Parameter) -> Tensor:
    """Return the gradient of ``param`` in its master dtype; zeros if there is none (experts without rows)."""
    if param.grad is None:
        return torch.zeros_like(param, dtype=master_dtype(param))
    return param.grad.to(master_dtype(param))


def clear_gradient(param: nn.Parameter) -> None:
    """Reset the gradient of ``param`` for the next step.

    A 16-bit parameter accumulates its micro-batches in fp32: autograd casts each gradient to ``grad_dtype`` and adds it
    in place. Its ``grad`` is zeros instead of None, because split backward passes assign a 16-bit gradient to an empty
    ``grad``.
    """
    if param.dtype == master_dtype(param):
        param.grad = None
    elif param.grad is None:
        param.grad = torch.zeros_like(param, dtype=master_dtype(param))
    else:
        param.grad.zero_()


@torch.no_grad()
def compute_in(param: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
    """Cast ``param`` to ``dtype``, with gradients in the master dtype.

    Returns:
        The master weights before the cast; None if ``dtype`` is the master dtype, so that ``param`` is its own master.
    """
    master = param.detach().to(master_dtype(param))
    param.data = master.to(dtype)
    param.grad_dtype = master.dtype
    return None if dtype == master.dtype else master


@dataclass(frozen=True)
class _Replica:
    trained: LocalParameter
    owned: OwnedParameter
    has_master: bool


class _ReplicaBucket:
    """A ``GradientBucket`` of replicated parameters."""

    def __init__(self, replicas: Sequence[_Replica], group: ProcessGroup | None) -> None:
        self._replicas, self.group = replicas, group
        self.params = [replica.trained.param for replica in replicas]

    def pack(self) -> Tensor:
        grads = [take_gradient(param).reshape(-1) for param in self.params]
        return grads[0] if len(grads) == 1 else torch.cat(grads)

    def reduce(self, reducer: GradientReducer, group: ProcessGroup | None, packed: Tensor) -> Tensor:
        return reducer.sum(packed, group)

    def unpack(self, total: Tensor) -> None:
        sums = total.split([param.numel() for param in self.params])
        for replica, total in zip(self._replicas, sums, strict=True):
            replica.owned.value.grad = total.view(replica.owned.value.shape)


class ReplicatedParameters:
    """Parameters that all ranks of their reduction group store, reduce and update completely."""

    def __init__(self, trained: Sequence[LocalParameter], mesh: ParallelMesh, bucket_bytes: int) -> None:
        self._replicas: list[_Replica] = []
        families: dict[tuple[tuple[int, ...], torch.dtype], list[_Replica]] = {}
        for item in trained:
            master = compute_in(item.param, item.dtype)
            value = item.param if master is None else nn.Parameter(master)
            replica = _Replica(item, OwnedParameter(item.name, value, item.sharding), master is not None)
            self._replicas.append(replica)
            families.setdefault((mesh.ranks(*item.sharding.sum_axes), value.dtype), []).append(replica)
        self.buckets: list[_ReplicaBucket] = []
        for family in families.values():
            group = mesh.sum_group(family[0].trained.sharding)
            # Backward completes the gradients in about the reverse order of registration.
            family.reverse()
            largest = 0 if group is None else bucket_bytes  # 0: one parameter each, which needs no copy
            for bucket in buckets([replica.owned.value.nbytes for replica in family], largest):
                self.buckets.append(_ReplicaBucket([family[i] for i in bucket], group))
        self.zero_grad()

    @property
    def owned(self) -> list[OwnedParameter]:
        return [replica.owned for replica in self._replicas]

    def zero_grad(self) -> None:
        for replica in self._replicas:
            clear_gradient(replica.trained.param)
            if replica.has_master:
                replica.owned.value.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for replica in self._replicas:
            if replica.has_master:
                replica.trained.param.copy_(replica.owned.value)
