"""FSDP's collectives with recorded spans, counted as communication time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.group_names import group_of

# Newer versions of torch renamed the functions and warn about the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def meter(module: FSDPModule) -> None:
    """Record the collectives of the FSDP unit ``module``, not those of nested units."""
    module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


class Allocates:
    """The ``allocate`` method that FSDP requires of custom collectives."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(Allocates):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        nbytes = (group.size() - 1) * input_tensor.nbytes
        with communication_span(Kind.COLLECTIVE, "gather of weights", group=group_of(group), nbytes=nbytes):
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(Allocates):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        nbytes = (group.size() - 1) * output_tensor.nbytes
        with communication_span(Kind.COLLECTIVE, "sum of gradients", group=group_of(group), nbytes=nbytes):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
