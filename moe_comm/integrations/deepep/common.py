"""What both buffers of DeepEP share."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.per_rank.exchange import RankExchange
from moe_comm.errors import ConfigError, InputError

HandleT = TypeVar("HandleT")


def check_handle(handle: Any, kind: type[HandleT]) -> HandleT:
    """Return ``handle``, or raise InputError if it is of another kind."""
    if isinstance(handle, kind):
        return handle
    raise InputError(f"handle must come from dispatch of the same buffer; got {type(handle).__name__}")


def placed(rows_NX: Tensor, place: Tensor, *shape: int) -> Tensor:
    """Return zeros [*shape, X] with ``rows_NX`` at ``place``, an index or a mask. Torch cannot index e4m3."""
    bits_NX = rows_NX.view(torch.uint8) if rows_NX.dtype.itemsize == 1 else rows_NX
    out = bits_NX.new_zeros(*shape, *rows_NX.shape[1:])
    out[place] = bits_NX
    return out.view(rows_NX.dtype)


class GroupBuffer(RankExchange):
    """What both buffers have of DeepEP's interface.

    Raises:
        ConfigError: there is no process group.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is None:
            raise ConfigError("a deep_ep buffer of moe_comm needs group=, a torch.distributed process group")
        super().__init__(group)

    def destroy(self) -> None:
        """Do nothing: the dispatchers are released with the process group."""

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which all operations run. Needs CUDA."""
        return torch.cuda.current_stream()
