"""One pipeline stage, as torch's schedules drive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from moe_comm.errors import InputError
from moe_comm.runtime.events import COMMUNICATION
from moe_comm.train.pipeline.batch import MicroBatch
from moe_comm.train.pipeline.transfers import ACTIVATIONS, GRADIENTS, Transfers, between

AfterBackward = Callable[[nn.Module], None]


class Stage(PipelineStage):
    """A stage whose shapes are given, so that no trial forward runs through the model's collectives.

    ``batches`` are those of the current step. A micro-batch's inputs are looked up here and not passed through the
    schedule, which could only cut tensors into equal chunks, and would take a document index for an activation.

    All that a schedule does but calling ``forward_one_chunk`` and ``backward_..._one_chunk`` is to move activations and
    to wait for them, so communication is counted from its start to its end except in those.

    Args:
        x: meta tensor of what the stage receives (ids on the first), y: of what it gives.
        split_backward: False computes the weights' gradients together with the input's even where the schedule puts
            them off.
        after_backward: called with the module whenever a micro-batch's gradients have been added to its parameters.
        transfers: records what is sent, received and computed.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        x: Tensor,
        y: Tensor,
        device: torch.device,
        group: ProcessGroup,
        split_backward: bool,
        after_backward: AfterBackward | None,
        transfers: Transfers | None = None,
    ) -> None:
        super().__init__(module, index, num_stages, device, input_args=x, output_args=y, group=group)
        self.batches: Sequence[MicroBatch] = ()
        self._shape, self._dtype = tuple(y.shape), y.dtype
        self._split_backward = split_backward
        self._whole: set[int] = set()  # micro-batches whose weight gradients have been computed already
        self._after_backward = after_backward
        self._batch: MicroBatch | None = None
        self._transfers = transfers or Transfers()
        self._label, self._before, self._after = f"stage {index}", between(index - 1), between(index)

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any) -> Tensor:
        self._batch = self.batches[fwd_chunk_id]
        own = (self._batch.ids_BS,) if self.is_first else ()
        taken = (ACTIVATIONS, self._before)
        with COMMUNICATION.paused(), self._transfers.working("forward", self._label, fwd_chunk_id, *taken):
            y: Tensor = super().forward_one_chunk(fwd_chunk_id, own, {}, *more, **options)
        return y

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self._batch is not None
        y: Tensor = super().forward_maybe_with_nosync(
            *args, positions=self._batch.positions_BS, documents=self._batch.documents
        )
        check_output(y, self.stage_index, self._shape, self._dtype)
        # What is sent must be dense, and torch detaches it in place, which a view or the stage's own input cannot be.
        y = y.contiguous()
        return y.clone() if y._is_view() or any(y is x for x in args) else y

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward and not self._split_backward:
            self._whole.add(bwd_chunk_id)
            full_backward = True
        taken = (GRADIENTS, self._after)
        with COMMUNICATION.paused(), self._transfers.working("backward", self._label, bwd_chunk_id, *taken):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
            return
        with COMMUNICATION.paused(), self._transfers.working("backward of weights", self._label, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        if backward_type != "weight":
            # autograd.grad gives strides as they come; what is sent must be dense.
            gradients = tuple(g.contiguous() if isinstance(g, Tensor) else g for g in gradients)
        if backward_type != "input" and self._after_backward is not None:
            self._after_backward(self.submod)
        return gradients, groups

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        self._transfers.receives(ACTIVATIONS, self._before, fwd_chunk_id, ops)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        self._transfers.receives(GRADIENTS, self._after, bwd_chunk_id, ops)
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self._transfers.sends(ACTIVATIONS, self._after, fwd_chunk_id, ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self._transfers.sends(GRADIENTS, self._before, bwd_chunk_id, ops)
        return ops

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # torch before 2.13 greets the neighbour of a V's lowest stage too, which is this rank; gloo cannot.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def check_output(y: Tensor, stage: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse what the next stage could not receive; before it is sent.

    Raises:
        InputError: says what ``stage`` gave and should give.
    """
    if tuple(y.shape) != shape or y.dtype != dtype:
        raise InputError(
            f"stage {stage} should give {shape} {dtype} to the next one; its module returned {tuple(y.shape)} {y.dtype}"
        )
